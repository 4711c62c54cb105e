"""The held blocks as trees, and their leaves by a priority. Not a policy by itself."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvatlas.core.policy.base import Facts, Key, MayGo

_SPARE = 1024  # stale heap entries that are not worth a rebuild


class Leaves:
    """Blocks under their parents; only those below which nothing is held can be taken.

    The priority of a block never falls. Leaves enter the heap when somebody asks, so that a prompt
    that comes in block by block costs one entry and not one per block.
    """

    def __init__(self) -> None:
        self.priority: dict[Key, float] = {}
        self._facts: dict[Key, Facts] = {}
        self._children: dict[Key, int] = {}  # held children, of parents held or not
        self._fresh: dict[Key, None] = {}  # leaves that are not in the heap
        self._heap: list[tuple[float, int, Key]] = []
        self._entry: dict[Key, int] = {}  # key -> number of its one good heap entry
        self._number = 0

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, key: Key) -> Facts:
        return self._facts[key]

    def add(self, key: Key, facts: Facts, priority: float) -> None:
        """A block comes in, wherever its parent and its children are."""
        self._facts[key] = facts
        self.priority[key] = priority
        parent = facts.parent
        if parent is not None:
            count = self._children.get(parent, 0)
            self._children[parent] = count + 1
            if not count:
                self._fresh.pop(parent, None)
        if key not in self._children:
            self._fresh[key] = None

    def remove(self, key: Key) -> None:
        """It is gone, leaf or not."""
        parent = self._facts.pop(key).parent
        del self.priority[key]
        self._fresh.pop(key, None)
        self._entry.pop(key, None)
        if parent is not None:
            count = self._children[parent] - 1
            if count:
                self._children[parent] = count
            else:
                del self._children[parent]
                if parent in self._facts:
                    self._fresh[parent] = None

    def take(
        self,
        need_bytes: int,
        may_go: MayGo | None,
        more: Callable[[Key, Facts, float], list[Key]] | None = None,
    ) -> list[Key]:
        """As `Policy.evict`: the leaf of the lowest priority first, those of one priority in the
        order in which they became leaves.

        ``more`` hears of each that went (with its facts and its priority), and answers which
        leaves should go with it.
        """
        heap, entry = self._heap, self._entry
        found: list[Key] = []
        passed: list[tuple[float, int, Key]] = []
        while need_bytes > 0:
            if self._fresh:
                self._enter()
                heap = self._heap
            if not heap:
                break
            priority, number, key = heap[0]
            if entry.get(key) != number:
                heapq.heappop(heap)
            elif key in self._children:
                heapq.heappop(heap)  # a parent again; fresh when its children are gone
                del entry[key]
            elif self.priority[key] != priority:
                heapq.heapreplace(heap, (self.priority[key], number, key))
            else:
                heapq.heappop(heap)
                if may_go is None or may_go(key):
                    need_bytes -= self._go(key, found, more)
                else:
                    passed.append((priority, number, key))
        for item in passed:
            heapq.heappush(heap, item)
        return found

    def _go(
        self,
        key: Key,
        found: list[Key],
        more: Callable[[Key, Facts, float], list[Key]] | None,
    ) -> int:
        facts, priority = self._facts[key], self.priority[key]
        found.append(key)
        self.remove(key)
        size_bytes = facts.size_bytes
        for other in more(key, facts, priority) if more is not None else ():
            size_bytes += self._facts[other].size_bytes
            found.append(other)
            self.remove(other)
        return size_bytes

    def is_leaf(self, key: Key) -> bool:
        """Whether it is held and nothing below it is."""
        return key in self._facts and key not in self._children

    def only_child(self, key: Key) -> bool:
        """Whether no more than one block below it is held."""
        return self._children.get(key, 0) <= 1

    def _enter(self) -> None:
        for key in self._fresh:
            self._number += 1
            self._entry[key] = self._number
            heapq.heappush(self._heap, (self.priority[key], self._number, key))
        self._fresh.clear()
        if len(self._heap) > 2 * len(self._entry) + _SPARE:
            self._heap = [(self.priority[k], n, k) for k, n in self._entry.items()]
            heapq.heapify(self._heap)
