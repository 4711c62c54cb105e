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
) -> Counts:
    """Belady's MIN: what will be used last goes first, and what would be, does not come in.

    The most hits that any policy can have with blocks of equal size (Belady, IBM Systems Journal
    5-2, 1966); where the capacity counts tokens, the short last blocks make it a bound that may be
    missed by their share. A block is never used again before its parent, so it knows the tree.
    Raises ConfigError where the capacity is below 1.
    """
    if capacity < 1:
        raise ConfigError(f"a cache needs a capacity of 1 or more, not {capacity}")
    never = work.blocks
    upcoming = _next_uses(work, never)
    due = [-1] * work.unique_blocks  # next use of what is held; -1: not held
    sizes = [0] * work.unique_blocks
    heap: list[tuple[int, int]] = []  # (-next use, block), some stale
    counts = Counts()
    used = at = 0
    for prompt in work.prompts:
        keys = prompt.keys
        hits = 0
        for key in keys:
            if due[key] < 0:
                break
            hits += 1
        counts.add(prompt, hits, work.block_tokens, seconds)
        last = len(keys) - 1
        for index, key in enumerate(keys):
            then = upcoming[at]
            at += 1
            if due[key] >= 0:
                counts.held_blocks += 1
            else:
                size = 1
                if unit_tokens:
                    size = prompt.last_tokens if index == last else work.block_tokens
                while used + size > capacity and heap:
                    least, victim = heap[0]
                    if due[victim] != -least:
                        heapq.heappop(heap)
                    elif -least <= then:
                        break
                    else:
                        heapq.heappop(heap)
                        due[victim] = -1
                        used -= sizes[victim]
                        counts.dropped_blocks += 1
                        counts.dropped += sizes[victim]
                if used + size > capacity:
                    counts.refused_blocks += 1
                    continue
                used += size
                sizes[key] = size
            due[key] = then
            heapq.heappush(heap, (-then, key))
    return counts


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
