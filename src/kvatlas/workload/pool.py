"""The block pool of one engine rank: what is held, what can be resumed, what is announced.

A model of vLLM 0.32's prefix cache (its block pool, the hybrid coordinator and the managers of
full-attention and sliding-window groups), small enough to run thousands of requests a second.
All groups of a layout share one pool. Three facts keep it small without losing exactness:

* Blocks without a key are interchangeable, so they are only counted. A block gets an id at the
  moment it becomes findable, and keeps it until it is evicted.
* vLLM's free queue is always unkeyed blocks first, then keyed ones in the order in which they
  became free. It is kept as a counter and an ordered map.
* Hits end on the grid, so keys are chained at the grid and derived in between only for the few
  windowed blocks that are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from math import gcd

from kvatlas.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError
from kvatlas.workload.holding import TOKEN_BYTES, Hit, Holding, Slot, unroll
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
    never hold more than their window and that. Raises ConfigError on values that cannot work.
    """

    def __init__(
        self,
        layout: Layout,
        blocks: int,
        *,
        retention: int | None = 0,
        step_tokens: int = 8192,
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
        self.retention = retention
        self._publish = publish
        self.key_step = key_step(layout)
        self._hash_step = gcd(*(s.block_tokens for s in self.slots))
        self._caps = [
            None
            if s.need is None
            else -(-(s.window_tokens - 1 + step_tokens) // s.block_tokens) + 1
            for s in self.slots
        ]
        # Per slot: index, block size, window (0: a chain, whose blocks are never let go).
        self._geometry = [(s.index, s.block_tokens, s.window_tokens) for s in self.slots]
        self._spare = list(range(blocks - 1, -1, -1))  # ids of blocks without a key
        self._plain = 0  # blocks without a key that are in use
        self._idle: OrderedDict[int, None] = OrderedDict()  # keyed, unused, oldest first
        self._refs = [0] * blocks
        self._keys: list[tuple[int, int] | None] = [None] * blocks  # id -> (slot, key)
        self._aliases: dict[int, list[int]] = {}  # id -> keys of prompt ends inside that block
        self._found: list[dict[int, list[int]]] = [{} for _ in self.slots]  # key -> ids
        self._events: list[Event] = []

    # Read-outs ---------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Blocks that an allocation could take now, those still findable included."""
        return len(self._spare) - self._plain + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that a lookup could find now, in use or not."""
        return self.capacity - len(self._spare)

    def take_events(self) -> tuple[Event, ...]:
        """KV events since the last call, in order."""
        events = tuple(self._events)
        self._events.clear()
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
        for slot in self.slots:
            if slot.chain and slot.group.required:
                longest = min(longest, self._chain_hit(slot, holding, longest))
        windows = [s for s in self.slots if not s.chain and s.group.required]
        tokens = longest
        while tokens and not all(self._window_hit(s, holding, tokens) for s in windows):
            tokens -= grid
        blocks = tuple(self._hit_blocks(s, holding, tokens) for s in self.slots)
        return Hit(tokens, longest if longest > tokens else 0, blocks)

    def admit(self, holding: Holding, hit: Hit, upto: int) -> bool:
        """Take the hit's blocks and allocate for tokens up to ``upto``; False: no room now.

        As vLLM does, it asks for room for the whole known sequence first, so that a request is
        not let in only to be thrown out again in mid-prefill.
        """
        idle = sum(1 for blocks in hit.blocks for _, b in blocks if not self._refs[b])
        whole = self._missing(hit, holding.size, capped=True) + idle
        now = self._missing(hit, upto, capped=False) + idle
        if max(whole, now) > self.free:
            return False
        for slot, blocks in zip(self.slots, hit.blocks, strict=True):
            for _, block in blocks:
                self._hold(block)
            count = hit.tokens // slot.block_tokens
            holding.held[slot.index] = list(blocks)
            holding.total[slot.index] = count
            holding.first[slot.index] = 0 if slot.chain else count - len(blocks)
        holding.cached = hit.tokens
        holding.junction = hit.junction
        grown = self.grow(holding, hit.tokens, upto)
        assert grown, "room was checked above"
        for slot in self.slots:
            self._alias(slot, holding)
        return True

    def grow(self, holding: Holding, computed: int, upto: int) -> bool:
        """Let go of what left the windows at ``computed``, then allocate up to ``upto``.

        False when the pool has no room: nothing was allocated then. Full blocks on the grid
        become findable at once, before they are computed, as in vLLM.
        """
        grid_due = upto >= holding.cached + self.grid
        if upto <= holding.room and computed < holding.quiet_from and not grid_due:
            return True
        total, first = holding.total, holding.first
        need = 0
        for i, size, window in self._geometry:
            if window and (gone := (computed - window + 1) // size) > first[i]:
                self._slide(i, holding, min(gone, total[i]))
            missing = -(-upto // size) - total[i]
            if missing > 0:
                need += missing
        if need > self.free:
            return False
        self._allocate(need)
        room = quiet = _FAR
        for i, size, window in self._geometry:
            total[i] = max(total[i], -(-upto // size))
            room = min(room, total[i] * size)
            if window:
                quiet = min(quiet, (first[i] + 1) * size + window - 1)
        holding.room, holding.quiet_from = room, quiet
        if grid_due:
            self._cache(holding, upto)
        return True

    def release(self, holding: Holding) -> None:
        """Give back everything; blocks at the end of the sequence are evicted first.

        The holding can be admitted again (preemption): its tokens and keys stay.
        """
        for slot in self.slots:
            i = slot.index
            blocks = holding.held[i]
            self._plain -= holding.total[i] - holding.first[i] - len(blocks)
            for _, block in reversed(blocks):
                self._let_go(block)
            holding.held[i] = []
            holding.total[i] = holding.first[i] = 0
        holding.cached = holding.room = holding.quiet_from = 0
        holding.fresh.clear()

    def clear(self) -> bool:
        """Drop the whole prefix cache. As in vLLM refused (False) while any block is in use."""
        if self.free != self.capacity:
            return False
        for found in self._found:
            found.clear()
        self._spare.extend(self._idle)
        for block in self._idle:
            self._keys[block] = None
        self._aliases.clear()
        self._idle.clear()
        if self._publish:
            self._events.append(AllBlocksCleared())
        return True

    # Lookup ------------------------------------------------------------------------------------

    def _chain_hit(self, slot: Slot, holding: Holding, limit: int) -> int:
        found = self._found[slot.index]
        size = slot.block_tokens
        position = 0
        while position + size <= limit and holding.key(position + size) in found:
            position += size
        return position // self.grid * self.grid

    def _window_hit(self, slot: Slot, holding: Holding, position: int) -> bool:
        found = self._found[slot.index]
        return all(holding.key(p) in found for p in _window_ends(slot, position))

    def _hit_blocks(
        self, slot: Slot, holding: Holding, position: int
    ) -> tuple[tuple[int, int], ...]:
        found = self._found[slot.index]
        size = slot.block_tokens
        if not slot.group.required and not self._window_hit(slot, holding, position):
            return ()
        ends = reversed(_window_ends(slot, position))
        return tuple((p // size - 1, found[holding.key(p)][0]) for p in ends)

    def _missing(self, hit: Hit, upto: int, *, capped: bool) -> int:
        """Blocks to allocate for tokens up to ``upto`` on top of a hit."""
        missing = 0
        for slot, cap in zip(self.slots, self._caps, strict=True):
            count = -(-upto // slot.block_tokens)
            if capped and cap is not None:
                count = min(count, cap)
            missing += max(0, count - hit.tokens // slot.block_tokens)
        return missing

    # Blocks ------------------------------------------------------------------------------------

    def _allocate(self, count: int) -> None:
        for _ in range(count - (len(self._spare) - self._plain)):
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self._spare.append(block)
        self._plain += count

    def _forget(self, block: int) -> None:
        entry = self._keys[block]
        assert entry is not None
        slot, key = entry
        self._keys[block] = None
        found = self._found[slot]
        for each in (key, *self._aliases.pop(block, ())):
            ids = found[each]
            ids.remove(block)
            if not ids:
                del found[each]
            if self._publish:
                self._events.append(BlockRemoved((each,), group=slot))

    def _hold(self, block: int) -> None:
        if not self._refs[block]:
            del self._idle[block]
        self._refs[block] += 1

    def _let_go(self, block: int) -> None:
        self._refs[block] -= 1
        if not self._refs[block]:
            self._idle[block] = None

    def _slide(self, slot: int, holding: Holding, first: int) -> None:
        """Free the blocks of a windowed group before ``first``: no later token attends to them."""
        gone = first - holding.first[slot]
        if gone <= 0:
            return
        holding.first[slot] = first
        held = holding.held[slot]
        keyed = sum(1 for index, _ in held if index < first) if held else 0
        for _, block in reversed(held[:keyed]):
            self._let_go(block)
        del held[:keyed]
        self._plain -= gone - keyed

    # Caching -----------------------------------------------------------------------------------

    def _cache(self, holding: Holding, upto: int) -> None:
        """Make the full blocks up to the last grid position findable, and announce them."""
        start, end = holding.cached, upto // self.grid * self.grid
        holding.cached = end
        for slot in self.slots:
            size = slot.block_tokens
            kept = self._kept(slot, holding, start // size, end // size)
            keys = tuple(holding.key((index + 1) * size) for index in kept)
            for index, key in zip(kept, keys, strict=True):
                self._add(slot.index, key, index, holding)
            salted = bool(kept) and kept[0] == 0
            self._announce(slot, holding, keys, (start, end), size, salted=salted)
            self._alias(slot, holding)

    def _kept(self, slot: Slot, holding: Holding, start: int, end: int) -> list[int] | range:
        """Indices of the blocks in start…end-1 that some later resume could need. All of them are
        still held: what left the window ends before the grid position that is cached next."""
        if slot.need is None:
            return range(start, end)
        size = slot.block_tokens
        stretch = self.grid if self.retention is None else self.retention
        per_stretch = stretch // size
        if stretch and slot.need >= per_stretch:
            return range(start, end)
        ends: set[int] = set()
        if stretch:
            ends.update(range(start // per_stretch * per_stretch, end + per_stretch, per_stretch))
        if self.retention is not None:
            for boundary in (holding.prompt - 1, holding.junction):
                ends.add(boundary // self.grid * self.grid // size)
        kept: set[int] = set()
        for stop in ends:
            kept.update(range(max(start, stop - slot.need), min(end, stop)))
        return sorted(kept)

    def _add(self, slot: int, key: int, index: int, holding: Holding) -> None:
        """Give one of the holding's counted blocks an id and a key."""
        block = self._spare.pop()
        self._plain -= 1
        self._refs[block] = 1
        self._keys[block] = (slot, key)
        self._found[slot].setdefault(key, []).append(block)
        holding.held[slot].append((index, block))
        holding.fresh.append(BlockRef(slot, index, block))

    def _alias(self, slot: Slot, holding: Holding) -> None:
        """vLLM's second name for the block in which the prompt ends.

        Where groups differ in block size, its full-attention manager also registers the last
        position of the prompt at the finest block size, once that block is full. No lookup of a
        sliding-window model can use it, but it is announced, and removed with the block.
        """
        step = self._hash_step
        if not slot.chain or slot.block_tokens == step:
            return
        position = (holding.prompt - 1) // step * step
        if not 0 < position <= holding.cached or position % slot.block_tokens == 0:
            return
        index = position // slot.block_tokens
        block = holding.held[slot.index][index][1]
        key = holding.key(position)
        aliases = self._aliases.setdefault(block, [])
        if key in aliases:
            return
        aliases.append(key)
        self._found[slot.index].setdefault(key, []).append(block)
        self._announce(
            slot, holding, (key,), (position - step, position), step, salted=position == step
        )

    def _announce(
        self,
        slot: Slot,
        holding: Holding,
        keys: tuple[int, ...],
        span: tuple[int, int],
        block_tokens: int,
        *,
        salted: bool,
    ) -> None:
        """One BlockStored for the kept blocks of a range. vLLM sends it even when none was kept;
        the salt goes out only with the first block of a sequence."""
        if not self._publish:
            return
        start, end = span
        kind = slot.group.kind
        self._events.append(
            BlockStored(
                hashes=keys,
                parent=holding.key(start) if start else None,
                tokens=bytes(holding.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]),
                block_tokens=block_tokens,
                group=slot.index,
                kind=None if kind == "*" else kind,
                window_tokens=slot.group.window_tokens,
                salt=holding.keys.salt if salted else "",
                adapter=holding.keys.adapter,
            )
        )


def _window_ends(slot: Slot, position: int) -> range:
    """End positions, last first, of the blocks of this group that a resume at position needs."""
    size = slot.block_tokens
    count = position // size if slot.need is None else min(slot.need, position // size)
    return range(position, position - count * size, -size)
