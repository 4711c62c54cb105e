"""Leaf LRU: of the blocks below which nothing is held, what was used longest ago goes first.

What SGLang's radix cache does, and `kvcache-simulator` under the name of LRU: a prompt is eaten
up from its end, so that nothing is ever held that cannot be reached.
"""

from __future__ import annotations

from kvatlas.core.policy.base import Facts, Key, MayGo
from kvatlas.core.policy.leaves import Leaves


class LeafLru:
    """Least recently used leaf."""

    tree = True

    def __init__(self) -> None:
        self._leaves = Leaves()
        self._uses = 0

    def __len__(self) -> int:
        return len(self._leaves)

    def added(self, key: Key, facts: Facts, now: float) -> None:
        self._uses += 1
        self._leaves.add(key, facts, self._uses)

    def touched(self, key: Key, now: float) -> None:
        self._uses += 1
        self._leaves[key]
        self._leaves.priority[key] = self._uses

    def removed(self, key: Key) -> None:
        self._leaves.remove(key)

    def evict(self, need_bytes: int, now: float, may_go: MayGo | None = None) -> list[Key]:
        return self._leaves.take(need_bytes, may_go)
