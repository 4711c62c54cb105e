"""LFU: what was used least often since it came in goes first; of those, what was used longest ago.

Counts die with the block ("in-cache LFU"): nothing is remembered of what is gone.
"""

from __future__ import annotations

from kvatlas.core.policy.base import Facts, Key, MayGo
from kvatlas.core.policy.ranked import Ranked


class Lfu:
    """Least frequently used. Does not know the tree."""

    tree = False

    def __init__(self) -> None:
        self._ranked = Ranked()

    def __len__(self) -> int:
        return len(self._ranked)

    def added(self, key: Key, facts: Facts, now: float) -> None:
        self._ranked.add(key, 1 + facts.uses, facts.size_bytes)

    def touched(self, key: Key, now: float) -> None:
        self._ranked.use(key, 1)

    def removed(self, key: Key) -> None:
        self._ranked.remove(key)

    def evict(self, need_bytes: int, now: float, may_go: MayGo | None = None) -> list[Key]:
        return self._ranked.take(need_bytes, may_go)
