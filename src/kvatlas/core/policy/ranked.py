"""Blocks by a rank of their own, those of equal rank by their last use. Not a policy by itself."""

from __future__ import annotations

import heapq

from kvatlas.core.policy.base import Key, MayGo

_SPARE = 1024  # stale heap entries that are not worth a rebuild


class Ranked:
    """A heap that is put right when it is asked.

    A rank that rises costs nothing but a note; the heap's entry of that block is then too low, so
    it surfaces early, and is put back at its place. One that falls (`rerank`) gets an entry more.
    """

    def __init__(self) -> None:
        self._held: dict[Key, tuple[float, int, int]] = {}  # key -> (rank, last use, size_bytes)
        self._heap: list[tuple[float, int, Key]] = []
        self._uses = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: Key, rank: float, size_bytes: int) -> None:
        """A block comes in, and counts as used now."""
        self._uses += 1
        self._held[key] = (rank, self._uses, size_bytes)
        self._push(rank, self._uses, key)

    def _push(self, rank: float, use: int, key: Key) -> None:
        heapq.heappush(self._heap, (rank, use, key))
        if len(self._heap) > 2 * len(self._held) + _SPARE:
            self._heap = [(rank, use, k) for k, (rank, use, _) in self._held.items()]
            heapq.heapify(self._heap)

    def use(self, key: Key, by: float) -> None:
        """It was used, and its rank rises ``by`` so much (0 or more)."""
        rank, _, size_bytes = self._held[key]
        self._uses += 1
        self._held[key] = (rank + by, self._uses, size_bytes)

    def rerank(self, key: Key, rank: float) -> None:
        """Another rank, without a use."""
        _, use, size_bytes = self._held[key]
        self._held[key] = (rank, use, size_bytes)
        self._push(rank, use, key)

    def remove(self, key: Key) -> None:
        """It is gone."""
        del self._held[key]

    def take(self, need_bytes: int, may_go: MayGo | None) -> list[Key]:
        """As `Policy.evict`."""
        held, heap = self._held, self._heap
        found: list[Key] = []
        passed: list[tuple[float, int, Key]] = []
        while need_bytes > 0 and heap:
            rank, use, key = heap[0]
            now = held.get(key)
            if now is None:
                heapq.heappop(heap)
            elif (rank, use) != now[:2]:
                heapq.heapreplace(heap, (now[0], now[1], key))
            else:
                heapq.heappop(heap)
                if may_go is None or may_go(key):
                    del held[key]
                    found.append(key)
                    need_bytes -= now[2]
                else:
                    passed.append((rank, use, key))
        for item in passed:
            heapq.heappush(heap, item)
        return found
