"""Which blocks of a request become findable, and how the engine announces them. Pure.

vLLM 0.32: `SingleTypeKVCacheManager.cache_blocks`, `BlockPool.cache_full_blocks`.
"""

from __future__ import annotations

from itertools import repeat
from math import gcd

from kvatlas.core.events import BlockStored
from kvatlas.core.layout import Layout
from kvatlas.workload.blocks import Blocks
from kvatlas.workload.holding import TOKEN_BYTES, Holding, Slot
from kvatlas.workload.protocol import BlockRef

_NONE = range(0)


class Caching:
    """``retention``: see `Pool`."""

    def __init__(
        self, layout: Layout, slots: tuple[Slot, ...], blocks: Blocks, retention: int | None
    ) -> None:
        self._grid = layout.grid_tokens
        self._slots = slots
        self._blocks = blocks
        self._retention = retention
        self._hash_step = gcd(*(s.block_tokens for s in slots))
        self._aliased = [
            s for s in slots if s.chain and s.group.required and s.block_tokens != self._hash_step
        ]

    def cache(self, holding: Holding, upto: int, *, loaded: bool = False) -> None:
        """Make the full blocks up to the last grid position findable, and announce them.

        ``loaded``: they came from outside, so only those that were to be filled count.
        """
        start, end = holding.cached, upto // self._grid * self._grid
        holding.cached = end
        self._blocks.version += 1
        publish = self._blocks.publish
        tokens = holding.ids(start, end) if publish else b""  # most groups announce the same range
        parent = holding.key(start) if publish and start else None
        points = self._points(holding)
        for slot in self._slots:
            size = slot.block_tokens
            first = max(start // size, holding.absent[slot.index])
            if first * size >= end:
                continue
            kept = self._kept(slot, points, first, end // size)
            if loaded:
                named = holding.named
                kept = [index for index in kept if (slot.index, index) in named]
            if unfilled := holding.unfilled:
                kept = [index for index in kept if (slot.index, index) not in unfilled]
            keys = self._add(slot, holding, kept) if kept else ()
            if publish:
                salted = bool(keys) and kept[0] == 0
                if first * size == start:
                    self._announce(slot, holding, keys, parent, tokens, salted=salted)
                else:
                    before = first * size
                    shorter = tokens[(before - start) * TOKEN_BYTES :]
                    self._announce(slot, holding, keys, holding.key(before), shorter, salted=salted)
            if slot in self._aliased:
                self.alias(slot, holding)

    def aliases(self, holding: Holding) -> None:
        """The second names of blocks that a request has taken over."""
        for slot in self._aliased:
            self.alias(slot, holding)

    def alias(self, slot: Slot, holding: Holding) -> None:
        """vLLM's second name for the block in which the prompt ends.

        Where groups differ in block size, its full-attention manager also registers the last
        position of the prompt at the finest block size, once that block is full. No lookup of a
        sliding-window model can use it, but it is announced, and removed with the block.
        """
        step = self._hash_step
        position = (holding.prompt - 1) // step * step
        if not 0 < position <= holding.cached or position % slot.block_tokens == 0:
            return
        index = position // slot.block_tokens
        blocks = self._blocks
        block = holding.held[slot.index][index][1]
        key = holding.key(position)
        aliases = blocks.aliases.setdefault(block, [])
        if key in aliases:
            return
        aliases.append(key)
        blocks.find(slot.index, key, block)
        if blocks.publish:
            start = position - step
            tokens = holding.ids(start, position)
            parent = holding.key(start) if start else None
            self._announce(slot, holding, (key,), parent, tokens, salted=not start, unit=step)

    def _points(self, holding: Holding) -> list[int]:
        """Positions on the grid at which a request's own windows are kept: where its prompt ends,
        and where others parted from it."""
        if self._retention is None:
            return []
        grid = self._grid
        return [b // grid * grid for b in (holding.prompt - 1, holding.junction) if b >= grid]

    def _kept(self, slot: Slot, points: list[int], start: int, end: int) -> list[int] | range:
        """Indices of the blocks in start…end-1 that some later resume could need. All of them are
        still held: what left the window ends before the grid position that is cached next."""
        need, size = slot.need, slot.block_tokens
        if need is None:
            return range(start, end)
        ends = [point // size for point in points if point > start * size]
        if self._retention != 0:
            per_stretch = (self._retention or self._grid) // size
            if need >= per_stretch:
                return range(start, end)
            ends += range(start // per_stretch * per_stretch, end + per_stretch, per_stretch)
        if not ends:
            return _NONE
        runs = [
            range(max(start, stop - need), min(end, stop))
            for stop in ends
            if stop > start and stop - need < end
        ]
        return runs[0] if len(runs) == 1 else sorted({index for run in runs for index in run})

    def _add(self, slot: Slot, holding: Holding, kept: list[int] | range) -> tuple[int, ...]:
        """Give the holding's counted blocks ids and keys, those that have an id already keys."""
        size, number, blocks = slot.block_tokens, slot.index, self._blocks
        step, named = holding.keys.step, holding.named
        first, last = kept[0], kept[-1]
        keys: tuple[int, ...]
        if size % step == 0:
            every = size // step
            chain = holding.chain((last + 1) * every)
            if last - first + 1 == len(kept):
                keys = tuple(chain[(first + 1) * every - 1 : (last + 1) * every : every])
            else:
                keys = tuple([chain[(index + 1) * every - 1] for index in kept])
        elif last - first + 1 == len(kept):
            keys = holding.run((first + 1) * size, size, len(kept))
        else:
            keys = tuple([holding.key((index + 1) * size) for index in kept])
        if named:
            ids = [
                self._add_one(slot, key, index, holding)
                for index, key in zip(kept, keys, strict=True)
            ]
        else:
            ids = blocks.add(number, keys)
            holding.held[number] += zip(kept, ids, strict=True)
        holding.fresh += map(BlockRef, repeat(number), kept, ids, keys)
        return keys

    def _add_one(self, slot: Slot, key: int, index: int, holding: Holding) -> int:
        """Of a holding with blocks that have ids already: this one may be among them."""
        block = holding.named.pop((slot.index, index), None)
        if block is None:
            (block,) = self._blocks.add(slot.index, (key,))
            holding.held[slot.index].append((index, block))
        else:
            self._blocks.add_named(slot.index, key, block)
        return block

    def _announce(
        self,
        slot: Slot,
        holding: Holding,
        keys: tuple[int, ...],
        parent: int | None,
        tokens: bytes,
        *,
        salted: bool,
        unit: int = 0,
    ) -> None:
        """One BlockStored for the kept blocks of a range. vLLM sends it even when none was kept;
        the salt goes out only with the first block of a sequence."""
        kind = slot.group.kind
        self._blocks.events.append(
            BlockStored(
                hashes=keys,
                parent=parent,
                tokens=tokens,
                block_tokens=unit or slot.block_tokens,
                group=slot.index,
                kind=None if kind == "*" else kind,
                window_tokens=slot.group.window_tokens,
                salt=holding.keys.salt if salted else "",
                adapter=holding.keys.adapter,
            )
        )
