"""Deadlines that may be moved or lifted: a heap whose stale entries are passed over."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_SPARE = 1024  # stale entries that are not worth a rebuild


class Deadlines(Generic[T]):
    """Things with a time each. Memory follows what still counts, not what was ever set.

    ``counts(at, thing)`` says whether a deadline still holds; it must answer no for ever once it
    has answered no.
    """

    def __init__(self, counts: Callable[[float, T], bool]) -> None:
        self._counts = counts
        self._heap: list[tuple[float, int, T]] = []
        self._number = 0
        self._rebuild_at = _SPARE

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, at: float, thing: T) -> None:
        """Add a deadline; one in infinity is none."""
        if at == math.inf:
            return
        self._number += 1  # ties go in the order in which they were set; things are not compared
        heapq.heappush(self._heap, (at, self._number, thing))
        if len(self._heap) > self._rebuild_at:
            self._heap = sorted(item for item in self._heap if self._counts(item[0], item[2]))
            self._rebuild_at = 2 * len(self._heap) + _SPARE

    def next(self) -> float | None:
        """The earliest that counts; None: there is none."""
        heap = self._heap
        while heap and not self._counts(heap[0][0], heap[0][2]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop(self, now: float) -> T | None:
        """Takes the earliest that counts and is due; None: none is."""
        at = self.next()
        if at is None or at > now:
            return None
        return heapq.heappop(self._heap)[2]
