"""What no policy can beat: a cache that knows the future, and one without an end."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvatlas.errors import ConfigError
from kvatlas.sim.cache import Counts, Work


def endless(work: Work, *, seconds: Callable[[int], float] | None = None) -> Counts:
    """A cache in which everything fits: each block misses once."""
    seen = bytearray(work.unique_blocks)
    counts = Counts()
    for prompt in work.prompts:
        hits = 0
        for key in prompt.keys:
            if not seen[key]:
                break
            hits += 1
        counts.add(prompt, hits, work.block_tokens, seconds)
        for key in prompt.keys:
            counts.held_blocks += seen[key]
            seen[key] = 1
    return counts


def optimal(
    work: Work,
    capacity: int,
    *,
    unit_tokens: bool = False,
    seconds: Callable[[int], float] | None = None,
    measure_from: int = 0,
) -> Counts:
    """Belady's MIN: what will be used last goes first, and what would be, does not come in.

    The most hits that any policy can have with blocks of equal size (Belady, IBM Systems Journal
    5-2, 1966); where the capacity counts tokens, the short last blocks make it a bound that may be
    missed by their share. A block is never used again before its parent, so it knows the tree.
    Requests before number ``measure_from`` only fill it. Raises ConfigError where the capacity is
    below 1.
    """
    if capacity < 1:
        raise ConfigError(f"a cache needs a capacity of 1 or more, not {capacity}")
    upcoming = iter(_next_uses(work, work.blocks))
    held = _Foreseen(capacity, work.unique_blocks)
    for number, prompt in enumerate(work.prompts):
        if number == measure_from:
            held.counts = Counts()
        keys = prompt.keys
        hits = 0
        for key in keys:
            if held.due[key] < 0:
                break
            hits += 1
        held.counts.add(prompt, hits, work.block_tokens, seconds)
        last = len(keys) - 1
        for index, key in enumerate(keys):
            weight = 1
            if unit_tokens:
                weight = prompt.last_tokens if index == last else work.block_tokens
            held.use(key, weight, next(upcoming))
    return held.counts


class _Foreseen:
    """What is held, by when it is used next."""

    def __init__(self, capacity: int, unique_blocks: int) -> None:
        self.counts = Counts()
        self.due = [-1] * unique_blocks  # next use of what is held; -1: not held
        self._weights = [0] * unique_blocks
        self._heap: list[tuple[int, int]] = []  # (-next use, block), some stale
        self._free = capacity

    def use(self, key: int, weight: int, then: int) -> None:
        """One use of a block, the next of which is number ``then``."""
        if self.due[key] >= 0:
            self.counts.held_blocks += 1
        elif not self._make_room(weight, then):
            self.counts.refused_blocks += 1
            return
        else:
            self._free -= weight
            self._weights[key] = weight
        self.due[key] = then
        heapq.heappush(self._heap, (-then, key))

    def _make_room(self, weight: int, then: int) -> bool:
        heap, due = self._heap, self.due
        while self._free < weight and heap:
            least, victim = heap[0]
            if due[victim] != -least:
                heapq.heappop(heap)
            elif -least <= then:
                break  # all that is held is used before this
            else:
                heapq.heappop(heap)
                due[victim] = -1
                self._free += self._weights[victim]
                self.counts.dropped_blocks += 1
                self.counts.dropped += self._weights[victim]
        return self._free >= weight


def _next_uses(work: Work, never: int) -> list[int]:
    """For each use of a block, in order, the number of its next one."""
    upcoming = [never] * work.blocks
    last = [never] * work.unique_blocks
    at = work.blocks
    for prompt in reversed(work.prompts):
        for key in reversed(prompt.keys):
            at -= 1
            upcoming[at] = last[key]
            last[key] = at
    return upcoming
