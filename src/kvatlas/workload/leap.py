"""Many decode steps as one: how far nothing but the counts of blocks changes, and going there.

While every running request only decodes, a step does three things to the pool: it takes a block
where one is full, gives one back where it left a window, and makes blocks findable on the grid. A
leap ends before the last of these. In between, what a single-stepping engine does depends only on
how many free blocks without a key there are: as long as there are enough, at every moment within
every step, nothing is evicted, announced or preempted, and the order does not matter. So it is the
*largest* number of blocks in use on the way that counts, and not what was taken in all: a window
that moves on takes back, a few steps later, what it gave. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from kvatlas.workload.holding import Holding
from kvatlas.workload.pool import Pool

_Leaving = tuple[int, int, int, int, int]  # step, request, slot, minus the index, block


class Leaps:
    """Looks ahead in one pool. A step is counted from the one that has been scheduled (step 0,
    the pool has grown for it) on: ``upto`` of its end is each request's ``holding.size``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        grid = pool.grid
        self._windows = [(i, size, window) for i, size, window in pool.geometry if window]
        self._chains = [(i, size) for i, size, window in pool.geometry if not window]
        self._regular_from = max((w for _, _, w in self._windows), default=0)
        # By position on the grid, far behind all windows: what the next token takes and gives.
        moves = [0] * grid
        for _, size, window in self._windows:
            for at in range(grid):
                moves[at] += (at % size == 0) - ((at - window + 1) % size == 0)
        self._level = list(accumulate(moves, initial=0))[:-1]
        self._high, self._low = max(self._level), min(self._level)
        for _, size in self._chains:
            for at in range(0, grid, size):
                moves[at] += 1
        self._moves = moves * 2

    def steps(self, holdings: Sequence[Holding], limit: int, wanted: int) -> int:
        """How many steps, at most ``limit``, can be taken as one. 1: only the scheduled one.

        ``wanted``: free blocks at which somebody could be admitted; 0: nobody waits for any.
        """
        grid = self._pool.grid
        for holding in holdings:
            limit = min(limit, holding.cached + grid - holding.size)
        if limit < 2:
            return 1
        regular = all(self._is_regular(holding) for holding in holdings)
        if regular and self._is_roomy(holdings, limit, wanted):
            return limit
        rows, left = [], [0] * limit
        for holding in holdings:
            if regular:
                at = holding.size % grid
                rows.append(self._moves[at : at + limit - 1])
            else:
                rows.append(self._row(holding, limit, left))
        blocks = self._pool.blocks
        unkeyed, free = blocks.unkeyed, blocks.free
        enough = wanted or inf
        used = 0
        for step, column in enumerate(zip(*rows, strict=True), 1):
            for move in column:
                used += move
                if used > unkeyed:
                    return step
            free += left[step]
            if free - used >= enough:
                return step
        return limit

    def advance(self, holdings: Sequence[Holding], steps: int) -> None:
        """Bring the pool from step 0 to step ``steps`` - 1 (of those that `steps` allowed)."""
        extra = steps - 1
        pool = self._pool
        leaving: list[_Leaving] = []
        for number, holding in enumerate(holdings):
            for i, size, window in self._windows:
                if holding.held[i]:
                    base = size + window - holding.size
                    leaving += [
                        (step, number, i, -index, block)
                        for index, block in holding.held[i]
                        if (step := index * size + base) <= extra
                    ]
        leaving.sort()
        for _, _, _, _, block in leaving:
            pool.blocks.let_go(block)
        plain = 0
        for holding in holdings:
            upto = holding.size + extra
            total, first, held = holding.total, holding.first, holding.held
            for i, size, window in pool.geometry:
                count = -(-upto // size)
                if count > total[i]:
                    plain += count - total[i]
                if window and (gone := (upto - window) // size) > first[i]:
                    plain -= gone - first[i]
                    first[i] = gone
                    if held[i]:
                        kept = [entry for entry in held[i] if entry[0] >= gone]
                        plain += len(held[i]) - len(kept)
                        held[i] = kept
            pool.settle(holding, upto)
        pool.blocks.plain += plain
        assert pool.blocks.unkeyed >= 0, "a leap took more than there was"

    def _is_regular(self, holding: Holding) -> bool:
        """Far behind all windows, and nothing findable in them: `_moves` says what comes."""
        upto = holding.size
        if upto < self._regular_from:
            return False
        held, first = holding.held, holding.first
        for i, size, window in self._windows:
            if held[i] or first[i] != (upto - window) // size:
                return False
        return True

    def _is_roomy(self, holdings: Sequence[Holding], limit: int, wanted: int) -> bool:
        """Whether even the worst sum of all windows fits, and the best lets nobody in."""
        grid, blocks = self._pool.grid, self._pool.blocks
        level = 0
        chains = 0
        for holding in holdings:
            upto = holding.size
            level += self._level[upto % grid]
            for _, size in self._chains:
                chains += (upto + limit - 2) // size - (upto - 1) // size
        many = len(holdings)
        if many * self._high - level + chains > blocks.unkeyed:
            return False
        return not wanted or blocks.free + level - many * self._low < wanted

    def _row(self, holding: Holding, limit: int, left: list[int]) -> list[int]:
        """What each step after the scheduled one takes of blocks without a key, less what it
        gives back; findable blocks that leave a window are counted in ``left``."""
        upto = holding.size
        moves = [0] * limit  # by step; 0 is the scheduled one
        for i, size, window in self._pool.geometry:
            for step in range(holding.total[i] * size - upto + 1, limit, size):
                moves[step] += 1
            if window:
                base = size + window - upto
                for step in range(holding.first[i] * size + base, limit, size):
                    moves[step] -= 1
                for index, block in holding.held[i]:
                    step = index * size + base
                    if step < limit and self._pool.blocks.keys[block] is not None:
                        moves[step] += 1
                        left[step] += 1
        return moves[1:]
