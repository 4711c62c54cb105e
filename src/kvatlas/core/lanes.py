"""Lanes: the groups of a layout as the directory files them, and who shares them."""

from __future__ import annotations

import msgspec

from kvatlas.core.layout import Group, Layout


class Lane(msgspec.Struct, frozen=True):
    """One group of a layout, copies told apart by ``copy``."""

    group: Group
    copy: int
    span: int | None  # grid blocks that must be held, ending at p; None: all of them
    units: int  # of the group's own blocks inside one grid block


class Pool:
    """All publishers of one fingerprint: they share a layout and can be asked in one walk."""

    def __init__(self, fingerprint: bytes, layout: Layout) -> None:
        self.fingerprint = fingerprint
        self.layout = layout
        self.lanes = lanes_of(layout)
        self.required = [i for i, lane in enumerate(self.lanes) if lane.group.required]
        self.alive = 0
        self.lower = 0  # publishers that announced anything below hbm
        self.shared = 0  # publishers that announced the object tier, and so can load from it


def lanes_of(layout: Layout) -> list[Lane]:
    """The lanes of a layout: its groups in order, copies unrolled."""
    grid = layout.grid_tokens
    return [
        Lane(group=group, copy=copy, span=group.span(grid), units=group.units(grid))
        for group in layout.groups
        for copy in range(group.copies)
    ]
