"""The block pool of one engine rank: what is held, what can be resumed, what is announced.

A model of vLLM 0.32's prefix cache (its block pool, the hybrid coordinator and the managers of
full-attention and sliding-window groups), small enough to run thousands of requests a second.
All groups of a layout share one pool. Blocks without a key are only counted (`blocks`). Hits end
on the grid, so keys are chained at the grid and derived in between only for the few windowed
blocks that are kept (`caching`).
"""

from __future__ import annotations

from kvatlas.core.events import Event
from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError
from kvatlas.workload.blocks import Blocks
from kvatlas.workload.caching import Caching
from kvatlas.workload.holding import Hit, Holding, Slot, resumed_blocks, unroll
from kvatlas.workload.prompt_keys import PromptKeys, key_step
from kvatlas.workload.protocol import BlockRef


def pool_blocks(layout: Layout, memory_bytes: int) -> int:
    """Blocks that fit into ``memory_bytes``: each block costs what the largest group needs.

    Raises ConfigError where the layout does not say how large its blocks are.
    """
    strides = []
    for group in layout.groups:
        parts = [c.stored_block_bytes for c in layout.components if c.group == group.name]
        strides.append(-(-sum(parts) // group.copies))
    if not strides or max(strides) <= 0:
        raise ConfigError(f"layout of {layout.model!r} gives no block sizes: state the block count")
    return memory_bytes // max(strides)


_FAR = 1 << 62  # beyond any token position


class Pool:
    """One pool of ``blocks`` usable blocks (vLLM's ``num_gpu_blocks`` less its null block).

    ``retention`` is vLLM's ``prefix_cache_retention_interval``: None keeps every window on the
    grid, 0 the one at the end of the prompt and at observed junctions, a positive multiple of the
    grid one per such stretch. ``step_tokens`` bounds what one step may schedule: windowed groups
    never hold more than their window and that. ``minimal``: state from outside comes without the
    blocks that no resume reads (`Component.least_blocks`). Raises ConfigError on values that
    cannot work.
    """

    def __init__(
        self,
        layout: Layout,
        blocks: int,
        *,
        retention: int | None = 0,
        step_tokens: int = 8192,
        minimal: bool = False,
        publish: bool = True,
    ) -> None:
        if blocks < 1:
            raise ConfigError(f"a block pool needs at least 1 block, not {blocks}")
        grid = layout.grid_tokens
        if retention is not None and (retention < 0 or retention % grid):
            raise ConfigError(
                f"retention_tokens is {retention}: give 0 or a multiple of the grid ({grid})"
            )
        self.slots = unroll(layout)
        for slot in self.slots:
            if slot.block_tokens < 1 or grid % slot.block_tokens:
                raise ConfigError(
                    f"group {slot.group.name!r}: blocks of {slot.block_tokens} tokens do not "
                    f"divide the grid of {grid}"
                )
        self.layout = layout
        self.grid = grid
        self.capacity = blocks
        self.key_step = key_step(layout)
        self._caps = [
            None
            if s.need is None
            else -(-(s.window_tokens - 1 + step_tokens) // s.block_tokens) + 1
            for s in self.slots
        ]
        # Per slot: index, block size, window (0: a chain, whose blocks are never let go).
        self.geometry = [(s.index, s.block_tokens, s.window_tokens) for s in self.slots]
        self._chains = [s for s in self.slots if s.chain and s.group.required]
        self._windows = [s for s in self.slots if not s.chain and s.group.required]
        self._minimal = minimal
        self._filled = [resumed_blocks(layout, s, minimal=minimal) for s in self.slots]
        self.blocks = Blocks(blocks, len(self.slots), publish=publish)
        self._caching = Caching(layout, self.slots, self.blocks, retention)
        self.wanted = 0  # free blocks that the last refused admission asked for

    # Read-outs ---------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Blocks that an allocation could take now, those still findable included."""
        return self.blocks.free

    @property
    def cached(self) -> int:
        """Blocks that a lookup could find now, in use or not."""
        return self.blocks.cached

    def take_events(self) -> tuple[Event, ...]:
        """KV events since the last call, in order."""
        events = tuple(self.blocks.events)
        self.blocks.events.clear()
        return events

    def peak_blocks(self, tokens: int) -> int:
        """Blocks that a request of ``tokens`` in all holds at its largest, alone and cold."""
        return sum(
            -(-tokens // s.block_tokens) if cap is None else min(cap, -(-tokens // s.block_tokens))
            for s, cap in zip(self.slots, self._caps, strict=True)
        )

    # The life of a request ---------------------------------------------------------------------

    def open(
        self, tokens: bytes, *, salt: str = "", adapter: str = "", keys: PromptKeys | None = None
    ) -> Holding:
        """Start a request on prompt ids (uint32, little endian). Takes no block yet.

        ``keys``: those of this very prompt, where somebody made them before.
        """
        if keys is None:
            keys = PromptKeys(tokens, self.key_step, salt=salt, adapter=adapter)
        return Holding(len(self.slots), keys)

    def lookup(self, holding: Holding) -> Hit:
        """The longest position, at most size - 1, at which every required group is present.

        Changes nothing. Full chains shrink only from the end, so the first position from the
        right at which all windows are there is the fixed point over the groups.
        """
        grid = self.grid
        longest = (holding.size - 1) // grid * grid
        for slot in self._chains:
            longest = min(longest, self._chain_hit(slot, holding, longest))
        tokens = self._window_hits(holding, longest)
        blocks = tuple([self._hit_blocks(s, holding, tokens) for s in self.slots])
        return Hit(tokens, longest if longest > tokens else 0, blocks)

    def admit(self, holding: Holding, hit: Hit, upto: int) -> bool:
        """Take the hit's blocks and allocate for tokens up to ``upto``; False: no room now.

        As vLLM does, it asks for room for the whole known sequence first, so that a request is
        not let in only to be thrown out again in mid-prefill.
        """
        if not self._take(holding, hit, upto, loaded=0, reserved=0):
            return False
        grown = self.grow(holding, hit.tokens, upto)
        assert grown, "room was checked above"
        self._caching.aliases(holding)
        return True

    def grow(self, holding: Holding, computed: int, upto: int) -> bool:
        """Let go of what left the windows at ``computed``, then allocate up to ``upto``.

        False when the pool has no room: nothing was allocated then. Full blocks on the grid
        become findable at once, before they are computed, as in vLLM.
        """
        grid_due = upto >= holding.cached + self.grid
        if upto <= holding.room and computed < holding.quiet_from and not grid_due:
            return True
        if not self._extend(holding, computed, upto):
            return False
        if grid_due:
            self._caching.cache(holding, upto)
        return True

    def release(self, holding: Holding) -> None:
        """Give back everything; blocks at the end of the sequence are evicted first.

        The holding can be admitted again (preemption): its tokens and keys stay.
        """
        for i, held in enumerate(holding.held):
            self.blocks.plain -= holding.total[i] - holding.first[i] - len(held)
            self.blocks.let_go_all(held)
            holding.held[i] = []
            holding.total[i] = holding.first[i] = holding.absent[i] = 0
        holding.cached = holding.room = holding.quiet_from = 0
        holding.named.clear()
        holding.unfilled.clear()
        holding.fresh.clear()

    def clear(self) -> bool:
        """Drop the whole prefix cache. As in vLLM refused (False) while any block is in use."""
        return self.blocks.clear()

    # State from outside --------------------------------------------------------------------------

    def admit_load(
        self, holding: Holding, hit: Hit, upto: int, reserved: int
    ) -> tuple[BlockRef, ...] | None:
        """Take the hit's blocks and allocate for state up to ``upto`` that is to be loaded; None:
        no room now beside the ``reserved`` blocks.

        Returns the blocks to fill. Nothing becomes findable before `land`.
        """
        if not self._take(holding, hit, upto, loaded=upto, reserved=reserved):
            return None
        grown = self._extend(holding, upto, upto)
        assert grown, "room was checked above"
        due = []
        for (i, size, _), filled in zip(self.geometry, self._filled, strict=True):
            end = -(-upto // size)
            start = holding.absent[i]
            if self._minimal and filled is not None and upto % self.grid == 0:
                start = max(start, end - filled)
            for index in range(start, end):
                block = self.blocks.name()
                holding.held[i].append((index, block))
                holding.named[i, index] = block
                due.append(BlockRef(i, index, block))
        return tuple(due)

    def land(self, holding: Holding, upto: int) -> None:
        """What was loaded up to ``upto`` is there: full blocks on the grid become findable."""
        if upto >= holding.cached + self.grid:
            self._caching.cache(holding, upto, loaded=True)
        self._caching.aliases(holding)
        holding.fresh.clear()

    def resume(self, holding: Holding, computed: int, upto: int) -> bool:
        """`grow` for the first step after a load: room for the whole known sequence is asked."""
        self.wanted = self.remaining(holding)
        return self.wanted <= self.free and self.grow(holding, computed, upto)

    def refs(self, holding: Holding, upto: int) -> tuple[BlockRef, ...]:
        """The blocks with an id that a request holds of its first ``upto`` tokens."""
        keys = self.blocks.keys
        return tuple(
            [
                BlockRef(i, index, block, entry[1] if (entry := keys[block]) else 0)
                for i, size, _ in self.geometry
                for index, block in holding.held[i]
                if index * size < upto
            ]
        )

    def remaining(self, holding: Holding) -> int:
        """Blocks that a request which holds some needs to have its whole known sequence."""
        missing = 0
        for (i, size, _), cap in zip(self.geometry, self._caps, strict=True):
            count = -(-holding.size // size)
            missing += max(0, (count if cap is None else min(count, cap)) - holding.total[i])
        return missing

    def partly(self) -> bool:
        """Whether a part of a load is of use: where windows come only at its end, it is not."""
        return all(slot.chain for slot in self.slots)

    # Lookup ------------------------------------------------------------------------------------

    def _chain_hit(self, slot: Slot, holding: Holding, limit: int) -> int:
        found = self.blocks.found[slot.index]
        size = slot.block_tokens
        every = size // self.key_step
        count = limit // size
        keys = holding.chain(count * every)
        position = 0
        for index in range(every - 1, count * every, every):
            if keys[index] not in found:
                break
            position += size
        return position // self.grid * self.grid

    def _window_hits(self, holding: Holding, position: int) -> int:
        """The longest position up to ``position`` at which every required window is there."""
        windows = self._windows
        if not windows or not position:
            return position
        every = self.grid // self.key_step
        keys = holding.chain(position // self.key_step)
        found = self.blocks.found[windows[0].index]
        for index in range(position // self.key_step - 1, -1, -every):
            if keys[index] in found:  # most often it is not
                at = (index + 1) * self.key_step
                if all(self._window_hit(slot, holding, at) for slot in windows):
                    return at
        return 0

    def _window_hit(self, slot: Slot, holding: Holding, position: int) -> bool:
        found = self.blocks.found[slot.index]
        return not position or all(key in found for key in _window_keys(slot, holding, position))

    def _hit_blocks(
        self, slot: Slot, holding: Holding, position: int
    ) -> tuple[tuple[int, int], ...]:
        found = self.blocks.found[slot.index]
        size = slot.block_tokens
        if slot.chain and slot.group.required:
            every = size // self.key_step
            keys = holding.chain(position // self.key_step)
            count = position // size
            return tuple([(i, found[keys[(i + 1) * every - 1]]) for i in range(count)])
        if not slot.group.required and not self._window_hit(slot, holding, position):
            return ()
        window = _window_keys(slot, holding, position)
        first = position // size - len(window)
        return tuple([(i, found[key]) for i, key in enumerate(window, first)])

    # Blocks ------------------------------------------------------------------------------------

    def _take(self, holding: Holding, hit: Hit, upto: int, *, loaded: int, reserved: int) -> bool:
        """Take the hit's blocks where there is room for all that is to follow.

        ``loaded``: position up to which state comes from outside (0: none does); what of the hit
        lies before the windows there is left alone.
        """
        idle = whole = now = 0
        refs, skipped = self.blocks.refs, []
        done = loaded or hit.tokens
        for (i, size, window), cap in zip(self.geometry, self._caps, strict=True):
            gone = max(0, (done - window + 1) // size) if window and loaded else 0
            skipped.append(gone)
            present = max(gone, hit.tokens // size)
            count = -(-holding.size // size)
            whole += max(0, (count if cap is None else min(count, cap)) - present)
            now += max(0, -(-upto // size) - present)
            idle += sum([not refs[block] for index, block in hit.blocks[i] if index >= gone])
        self.wanted = idle + max(whole, now + reserved)
        if self.wanted > self.blocks.free:
            return False
        for (i, size, _), gone, blocks in zip(self.geometry, skipped, hit.blocks, strict=True):
            taken = [entry for entry in blocks if entry[0] >= gone] if gone else list(blocks)
            self.blocks.hold_all(taken)
            present = max(gone, hit.tokens // size)
            holding.held[i] = taken
            holding.total[i] = holding.absent[i] = present
            holding.first[i] = taken[0][0] if taken else present
        holding.cached = hit.tokens
        holding.junction = hit.junction
        self.settle(holding)
        return True

    def _extend(self, holding: Holding, computed: int, upto: int) -> bool:
        """`grow` without making anything findable."""
        total, full_at, gone_at = holding.total, holding.full_at, holding.gone_at
        need = 0
        grown = []
        for i, size, window in self.geometry:
            if computed >= gone_at[i]:
                self._slide(i, holding, min((computed - window + 1) // size, total[i]))
                gone_at[i] = (holding.first[i] + 1) * size + window - 1
            if upto > full_at[i]:
                count = -(-upto // size)
                need += count - total[i]
                grown.append((i, count, count * size))
        if need > self.blocks.free:
            holding.room = 0
            return False
        if need:
            self.blocks.allocate(need)
        for i, count, full in grown:
            total[i] = count
            full_at[i] = full
        holding.room = min(full_at)
        holding.quiet_from = min(gone_at)
        return True

    def settle(self, holding: Holding) -> None:
        """After a change of what is allocated: how far that goes."""
        for i, size, window in self.geometry:
            holding.full_at[i] = holding.total[i] * size
            holding.gone_at[i] = (holding.first[i] + 1) * size + window - 1 if window else _FAR

    def _slide(self, slot: int, holding: Holding, first: int) -> None:
        """Free the blocks of a windowed group before ``first``: no later token attends to them."""
        gone = first - holding.first[slot]
        if gone <= 0:
            return
        holding.first[slot] = first
        held = holding.held[slot]
        if held and held[0][0] < first:
            count = sum([index < first for index, _ in held])
            self.blocks.let_go_all(held[:count])
            del held[:count]
            gone -= count
        self.blocks.plain -= gone


def _window_keys(slot: Slot, holding: Holding, position: int) -> tuple[int, ...]:
    """Keys, in order, of the blocks of this group that a resume at position needs."""
    size = slot.block_tokens
    count = position // size if slot.need is None else min(slot.need, position // size)
    if not count:
        return ()
    return holding.run(position - (count - 1) * size, size, count)
