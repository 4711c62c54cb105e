"""Lanes: the groups of a layout as the directory files them, and who shares them."""

from __future__ import annotations

import msgspec

from kvatlas.core.layout import Group, Layout, Rule
from kvatlas.errors import LayoutError


class Lane(msgspec.Struct, frozen=True):
    """One group of a layout, copies told apart by ``copy``."""

    group: Group
    copy: int
    span: int | None  # grid blocks that must be held, ending at p + ahead; None: all of them
    units: int  # of the group's own blocks, filed under one grid block
    ahead: int = 0  # 1: the grid block after p must be held too, or speaks for the window at p


class Pool:
    """All publishers of one fingerprint: they share a layout and can be asked in one walk."""

    def __init__(self, fingerprint: bytes, layout: Layout) -> None:
        self.fingerprint = fingerprint
        self.layout = layout
        self.lanes = lanes_of(layout)
        self.required = [i for i, lane in enumerate(self.lanes) if lane.group.required]
        self.windowed = [i for i in self.required if self.lanes[i].span is not None]
        narrow = [i for i in self.windowed if self.lanes[i].span == 1]
        self.short = [i for i in narrow if not self.lanes[i].ahead]
        self.short_ahead = [i for i in narrow if self.lanes[i].ahead]
        self.long = [i for i in self.windowed if i not in narrow]
        chains = [self.lanes[i] for i in self.required if self.lanes[i].span is None]
        self.points = any(
            c.rule is Rule.WINDOW for c in layout.components
        )  # as `core.units` has it
        self.ahead = max((lane.ahead for lane in chains), default=0)  # blocks of chain beyond p
        self.alive = 0
        self.lower = 0  # publishers that announced anything below hbm
        self.shared = 0  # publishers that announced the object tier, and so can load from it


def lanes_of(layout: Layout) -> list[Lane]:
    """The lanes of a layout: its groups in order, copies unrolled.

    A window that must be found with a block beyond p (`Group.lookahead`) is filed under the grid
    block that begins at p where it is smaller than one: that block's key stands for the tokens
    that the extra block must have. A larger window asks for one grid block more.

    Raises `LayoutError` where the blocks of a group do not divide the grid.
    """
    grid = layout.grid_tokens
    for group in layout.groups:
        if group.block_tokens < 1 or grid % group.block_tokens:
            raise LayoutError(
                f"group {group.name!r}: blocks of {group.block_tokens} tokens do not divide the"
                f" resume grid of {grid}"
            )
    return [
        Lane(group, copy, *_places(group, grid))
        for group in layout.groups
        for copy in range(group.copies)
    ]


def _places(group: Group, grid: int) -> tuple[int | None, int, int]:
    """span, units and ahead of a group's lanes."""
    span, units, ahead = group.span(grid), group.units(grid), min(group.lookahead, 1)
    if span is None or not ahead:
        return span, units, ahead
    if group.block_tokens < grid and span == 1:
        return 1, units + 1, 1
    return span + 1, units, 1
