"""What one request holds in a block pool: its tokens, its keys, its blocks of every group."""

from __future__ import annotations

import msgspec

from kvatlas.core.layout import Group, Layout
from kvatlas.workload.prompt_keys import TOKEN_BYTES, PromptKeys, chain_key, key_of, rest_key
from kvatlas.workload.protocol import BlockRef

__all__ = ["TOKEN_BYTES", "Hit", "Holding", "Slot", "unroll"]


class Slot(msgspec.Struct, frozen=True):
    """One group of the layout with its copies unrolled: the unit that owns blocks."""

    index: int
    group: Group
    block_tokens: int
    need: int | None  # blocks that must end at a resume position; None: all of them
    window_tokens: int

    @property
    def chain(self) -> bool:
        return self.need is None


def unroll(layout: Layout) -> tuple[Slot, ...]:
    """The groups of a layout as an engine numbers them: copies follow each other."""
    groups = [group for group in layout.groups for _ in range(group.copies)]
    return tuple(
        Slot(i, g, g.block_tokens, g.window_blocks(), g.window_tokens or 0)
        for i, g in enumerate(groups)
    )


def resumed_blocks(layout: Layout, slot: Slot, *, minimal: bool) -> int | None:
    """Blocks of a slot that end at a resume position and are read there; None: all of them.

    ``minimal``: as few as `Component.least_blocks` says.
    """
    if not minimal or slot.need is None:
        return slot.need
    parts = [c for c in layout.components if c.group == slot.group.name]
    counts = [c.window_blocks(minimal=True) for c in parts]
    return max((slot.need if n is None else n for n in counts), default=slot.need)


class Hit(msgspec.Struct, frozen=True):
    """What a lookup found. ``junction``: the longer prefix that only the chain still holds."""

    tokens: int
    junction: int
    blocks: tuple[tuple[tuple[int, int], ...], ...]  # per slot: (index, block id), ascending

    def refs(self) -> tuple[BlockRef, ...]:
        """The blocks, slot by slot."""
        return tuple(
            [BlockRef(slot, i, block) for slot, held in enumerate(self.blocks) for i, block in held]
        )


class Holding:
    """One request's tokens, keys and blocks. Made by `Pool.open`, changed by the pool only."""

    __slots__ = (
        *("absent", "cached", "first", "fresh", "full_at", "gone_at", "held", "junction", "keys"),
        *("later", "named", "output", "prompt", "quiet_from", "room", "size", "total", "unfilled"),
    )

    def __init__(self, slots: int, keys: PromptKeys) -> None:
        self.output = bytearray()  # token ids behind the prompt's
        self.prompt = len(keys.tokens) // TOKEN_BYTES
        self.size = self.prompt  # tokens known so far: the prompt and what was produced
        self.keys = keys
        self.later: list[bytes] = []  # digests at the steps behind the prompt's end
        self.junction = 0
        self.cached = 0  # tokens up to which blocks were offered to the cache
        self.first = [0] * slots  # blocks before this left the window
        self.total = [0] * slots  # blocks allocated so far, those that left included
        self.absent = [0] * slots  # blocks before this were not offered to the cache by this one
        self.named: dict[tuple[int, int], int] = {}  # (slot, index) -> block to load, unkeyed
        self.unfilled: set[tuple[int, int]] = set()  # (slot, index): never to be found
        self.held: list[list[tuple[int, int]]] = [[] for _ in range(slots)]  # (index, block id)
        self.fresh: list[BlockRef] = []  # became findable since the last `take_fresh`
        self.full_at = [0] * slots  # tokens that fit into the blocks, and
        self.room = 0  # the least of them
        self.gone_at = [0] * slots  # computed tokens at which the next block leaves its window, and
        self.quiet_from = 0  # the least of them

    def append(self, token: int) -> None:
        """One produced token id (uint32)."""
        self.output += token.to_bytes(TOKEN_BYTES, "little")
        self.size += 1

    def extend(self, tokens: bytes) -> None:
        """Several of them, little endian."""
        self.output += tokens
        self.size += len(tokens) // TOKEN_BYTES

    def ids(self, start: int, end: int) -> bytes:
        """Token ids start…end-1, uint32 little endian."""
        first, last = start * TOKEN_BYTES, end * TOKEN_BYTES
        prompt = self.prompt * TOKEN_BYTES
        if end <= self.prompt:
            return self.keys.tokens[first:last]
        tail = bytes(memoryview(self.output)[max(0, first - prompt) : last - prompt])
        return self.keys.tokens[first:] + tail if first < prompt else tail

    def take_fresh(self) -> tuple[BlockRef, ...]:
        """Blocks that became findable since the last call, in the order of caching."""
        fresh = tuple(self.fresh)
        self.fresh.clear()
        return fresh

    def key(self, position: int) -> int:
        """The 64-bit key of the prefix of ``position`` tokens; the same for every group."""
        if position <= self.prompt:
            return self.keys.key(position)
        step = self.keys.step
        full, rest = divmod(position, step)
        if not rest:
            return key_of(self._digest(full))
        return rest_key(self._digest(full), self.ids(full * step, position))

    def chain(self, count: int) -> list[int]:
        """Keys of the first ``count`` steps and perhaps more; not to be changed."""
        prompt = self.prompt // self.keys.step
        if count <= prompt:
            return self.keys.chain(count)
        self._digest(count)
        return self.keys.chain(prompt)[:prompt] + [key_of(digest) for digest in self.later]

    def run(self, first: int, apart: int, count: int) -> tuple[int, ...]:
        """Keys of ``count`` prefixes, the shortest ``first`` tokens long, each ``apart`` longer."""
        last = first + apart * (count - 1)
        if last <= self.prompt:
            return self.keys.run(first, apart, count)
        return tuple([self.key(position) for position in range(first, last + 1, apart)])

    def _digest(self, count: int) -> bytes:
        """The digest of the first ``count`` steps."""
        step = self.keys.step
        before, later = self.prompt // step, self.later
        if count <= before:
            return self.keys.digest(count)
        while before + len(later) < count:
            later.append(self._chained((before + len(later)) * step, step))
        return later[count - before - 1]

    def _chained(self, start: int, count: int) -> bytes:
        """The digest of ``count`` tokens more than ``start``, a multiple of the step."""
        parent = self._digest(start // self.keys.step)
        return chain_key(parent, self.ids(start, start + count))
