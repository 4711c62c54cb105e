"""GDSF: what saves the fewest seconds per byte goes first, with age.

Greedy-Dual-Size-Frequency (Cherkasova, HPL-98-69R1, 1998): priority = clock + uses · cost / size,
where the clock is the priority of the last victim, so that what is not used again grows old. Cost
is `Facts.saves_s`: a block deep in a long prompt is dearer than one at its start, since attention
grows with the position. That alone would let the start of every prompt go first, so only leaves
go here.
"""

from __future__ import annotations

from kvatlas.core.policy.base import Facts, Key, MayGo
from kvatlas.core.policy.leaves import Leaves


class Gdsf:
    """Fewest seconds saved per byte, leaves first. Blocks of unknown cost (0) count one second."""

    tree = True

    def __init__(self) -> None:
        self._leaves = Leaves()
        self._uses: dict[Key, int] = {}
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._leaves)

    def added(self, key: Key, facts: Facts, now: float) -> None:
        self._uses[key] = 1 + facts.uses
        self._leaves.add(key, facts, self._worth(facts, 1 + facts.uses))

    def touched(self, key: Key, now: float) -> None:
        uses = self._uses[key] = self._uses[key] + 1
        self._leaves.priority[key] = self._worth(self._leaves[key], uses)

    def removed(self, key: Key) -> None:
        self._leaves.remove(key)
        del self._uses[key]

    def evict(self, need_bytes: int, now: float, may_go: MayGo | None = None) -> list[Key]:
        found = self._leaves.take(need_bytes, may_go, self._age)
        for key in found:
            del self._uses[key]
        return found

    def _age(self, key: Key, facts: Facts, priority: float) -> list[Key]:
        self._clock = max(self._clock, priority)
        return []

    def _worth(self, facts: Facts, uses: int) -> float:
        return self._clock + uses * (facts.saves_s or 1.0) / facts.size_bytes
