"""What one request holds in a block pool: its tokens, its keys, its blocks of every group."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from kvatlas.core.layout import Group, Layout
from kvatlas.workload.protocol import BlockRef

TOKEN_BYTES = 4


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


class Hit(msgspec.Struct, frozen=True):
    """What a lookup found. ``junction``: the longer prefix that only the chain still holds."""

    tokens: int
    junction: int
    blocks: tuple[tuple[tuple[int, int], ...], ...]  # per slot: (index, block id), ascending


class Holding:
    """One request's tokens, keys and blocks. Made by `Pool.open`, changed by the pool only."""

    __slots__ = (
        *("adapter", "cached", "first", "fresh", "held", "junction", "keys", "prompt"),
        *("quiet_from", "room", "root", "salt", "size", "step", "subkeys", "tokens", "total"),
    )

    def __init__(self, slots: int, tokens: bytes, step: int, salt: str, adapter: str) -> None:
        self.tokens = bytearray(tokens)
        self.prompt = len(tokens) // TOKEN_BYTES
        self.size = self.prompt  # tokens known so far: the prompt and what was produced
        self.step = step
        self.salt = salt
        self.adapter = adapter
        root = msgspec.json.encode([salt, adapter]) if salt or adapter else b""
        self.root = int.from_bytes(blake2b(root, digest_size=8).digest(), "little")
        self.keys: list[int] = []
        self.subkeys: dict[int, int] = {}
        self.junction = 0
        self.cached = 0  # tokens up to which blocks were offered to the cache
        self.first = [0] * slots  # blocks before this left the window
        self.total = [0] * slots  # blocks allocated so far, those that left included
        self.held: list[list[tuple[int, int]]] = [[] for _ in range(slots)]  # (index, block id)
        self.fresh: list[BlockRef] = []  # became findable since the last `take_fresh`
        self.room = 0  # tokens that fit without another block
        self.quiet_from = 0  # computed tokens at which the next block leaves a window

    def append(self, token: int) -> None:
        """One produced token id (uint32)."""
        self.tokens += token.to_bytes(TOKEN_BYTES, "little")
        self.size += 1

    def take_fresh(self) -> tuple[BlockRef, ...]:
        """Blocks that became findable since the last call, in the order of caching."""
        fresh = tuple(self.fresh)
        self.fresh.clear()
        return fresh

    def key(self, position: int) -> int:
        """The 64-bit key of the prefix of ``position`` tokens; the same for every group."""
        step = self.step
        full, rest = divmod(position, step)
        keys = self.keys
        size = step * TOKEN_BYTES
        while len(keys) < full:
            parent = keys[-1] if keys else self.root
            start = len(keys) * size
            keys.append(_chain(parent, self.tokens[start : start + size]))
        if not rest:
            return keys[full - 1]
        found = self.subkeys.get(position)
        if found is None:
            parent = keys[full - 1] if full else self.root
            part = self.tokens[full * size : position * TOKEN_BYTES]
            found = self.subkeys[position] = _chain(parent, part)
        return found


def _chain(parent: int, tokens: bytearray) -> int:
    digest = blake2b(tokens, digest_size=8, key=parent.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")
