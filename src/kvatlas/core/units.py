"""What the lower tiers keep of a prompt: bodies and points, and how large they are.

A *body* is what all chain components keep of one grid block. A *point* is what all windowed
components keep of the tokens that end at one grid position: with it, and all bodies before it, a
prompt can be resumed there. A layout without windows has no points: each body ends at a position.
Parts that are optional are not kept: their loss costs speed only.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from kvatlas.core.layout import Layout, Rule
from kvatlas.errors import LayoutError


class Part(enum.IntEnum):
    """Which of the two a unit is."""

    BODY = 0
    POINT = 1


def name_of(key: bytes, part: Part) -> bytes:
    """Under what a unit is booked: one name per block key and part."""
    return key + (b"\1" if part else b"\0")


class Unit(msgspec.Struct, frozen=True, gc=False):
    """One thing that is stored, moved and lost as a whole.

    ``index`` is the grid block's number from the start of its prompt; a point with it ends at
    token (index + 1) · grid.
    """

    key: bytes
    part: Part
    index: int
    size_bytes: int

    @property
    def name(self) -> bytes:
        """Under what it is booked."""
        return name_of(self.key, self.part)


class Sizes:
    """Bytes of the units of one layout."""

    def __init__(self, layout: Layout, *, minimal: bool = False) -> None:
        """``minimal``: points hold only what a resume reads, where that was shown to be enough.

        Raises LayoutError where the layout does not say how large its blocks are.
        """
        grid = layout.grid_tokens
        parts = layout.components
        self.layout = layout
        self.grid_tokens = grid
        self.body_bytes = sum(
            c.stored_block_bytes * grid // c.block_tokens for c in parts if c.rule is Rule.CHAIN
        )
        self._windows = [
            (c.window_blocks(minimal=minimal) or 0, c.block_tokens, c.stored_block_bytes)
            for c in parts
            if c.rule is Rule.WINDOW
        ]
        self.has_points = bool(self._windows)
        if self.body_bytes <= 0 or any(size <= 0 for _, _, size in self._windows):
            raise LayoutError(
                f"the layout of {layout.model or layout.engine!r} gives no block sizes: what lies"
                " in lower tiers cannot be booked"
            )
        self._far = self._point_bytes(None)
        self._reach = max((n * size for n, size, _ in self._windows), default=0)

    def point_bytes(self, index: int) -> int:
        """Bytes of the point at the end of grid block ``index``; 0 where there are no points."""
        tokens = (index + 1) * self.grid_tokens
        return self._far if tokens >= self._reach else self._point_bytes(tokens)

    def _point_bytes(self, tokens: int | None) -> int:
        return sum(
            size_bytes * (blocks if tokens is None else min(blocks, -(-tokens // block_tokens)))
            for blocks, block_tokens, size_bytes in self._windows
        )

    def body(self, keys: Sequence[bytes], index: int) -> Unit:
        """The body of grid block ``index`` of a prompt."""
        return Unit(keys[index], Part.BODY, index, self.body_bytes)

    def point(self, keys: Sequence[bytes], index: int) -> Unit:
        """The point at the end of grid block ``index``."""
        return Unit(keys[index], Part.POINT, index, self.point_bytes(index))
