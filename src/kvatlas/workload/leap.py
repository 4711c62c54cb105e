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
        regular = True
        rows, left = [], [0] * limit
        for holding in holdings:
            far, plain = self._is_far(holding)
            if far:
                at = holding.size % grid
                row = self._moves[at : at + limit - 1]
                if not plain:
                    self._keyed(holding, limit, row, left)
            else:
                row = self._row(holding, limit)
                self._keyed(holding, limit, row, left)
            regular = regular and far and plain
            rows.append(row)
        if regular and self._is_roomy(holdings, limit, wanted):
            return limit
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
            full_at, gone_at = holding.full_at, holding.gone_at
            for i, size, window in pool.geometry:
                if upto > full_at[i]:
                    count = -(-upto // size)
                    plain += count - total[i]
                    total[i] = count
                    full_at[i] = count * size
                if upto > gone_at[i]:
                    gone = (upto - window) // size
                    plain -= gone - first[i]
                    first[i] = gone
                    gone_at[i] = (gone + 1) * size + window - 1
                    if held[i]:
                        kept = [entry for entry in held[i] if entry[0] >= gone]
                        plain += len(held[i]) - len(kept)
                        held[i] = kept
            holding.room = min(full_at)
            holding.quiet_from = min(gone_at)
        pool.blocks.plain += plain
        assert pool.blocks.unkeyed >= 0, "a leap took more than there was"

    def _is_far(self, holding: Holding) -> tuple[bool, bool]:
        """Whether it is far behind all windows, so that `_moves` says what comes; and whether
        none of the blocks in them has an id."""
        upto = holding.size
        held, first, plain = holding.held, holding.first, True
        for i, size, window in self._windows:
            if first[i] != (upto - window) // size:  # below 0 before the window is full
                return False, False
            if held[i]:
                plain = False
        return True, plain

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

    def _row(self, holding: Holding, limit: int) -> list[int]:
        """What each step after the scheduled one takes of blocks without a key, less what leaves
        a window."""
        upto = holding.size
        moves = [0] * limit  # by step; 0 is the scheduled one
        for i, size, window in self._pool.geometry:
            for step in range(holding.total[i] * size - upto + 1, limit, size):
                moves[step] += 1
            if window:
                for step in range((holding.first[i] + 1) * size + window - upto, limit, size):
                    moves[step] -= 1
        return moves[1:]

    def _keyed(self, holding: Holding, limit: int, row: list[int], left: list[int]) -> None:
        """Findable blocks that leave a window are not without a key: take them out of ``row`` and
        count them in ``left``, which is free blocks by step."""
        keys = self._pool.blocks.keys
        for i, size, window in self._windows:
            base = size + window - holding.size
            for index, block in holding.held[i]:
                step = index * size + base
                if step >= limit:
                    break
                if keys[block] is not None:
                    row[step - 1] += 1
                    left[step] += 1
