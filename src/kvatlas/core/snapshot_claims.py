"""One life's claims as pieces of a snapshot, and back: the other half of `core.claims`.

Both are walks in parts. Between two pieces others may work, as long as nothing is claimed or given
up in the life that is read.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from kvatlas.core.claims import PENDING_MAX, RECENT_MAX, Claims
from kvatlas.core.keys import KEY_BYTES
from kvatlas.core.native import KeyTable
from kvatlas.core.records import Tier
from kvatlas.core.snapshot_values import (
    ROWS_MAX,
    Before,
    Claimed,
    Follows,
    Masks,
    Names,
    Pending,
    Piece,
    Placed,
    Recent,
    Rows,
    Shared,
    Twins,
)
from kvatlas.core.windows import Windows
from kvatlas.errors import SnapshotError

if TYPE_CHECKING:
    from kvatlas.core.directory import Directory, _Slot

_RUN = 16  # places of a table that are read together
_GOLDEN = 0.618

T = TypeVar("T")


def pieces_of(directory: Directory, life: _Slot) -> Iterator[Piece]:
    """All claims of one life."""
    claims = life.claims
    yield Claimed(
        dict(claims._lane_of_group),
        claims._report,
        claims._reports,
        claims._group,
        claims._full,
        life.muted,
    )
    yield from _names(directory, life)
    yield from map(Recent, _rows(claims._recent.items()))
    pending = ((lane, name, tiers) for (lane, name), tiers in claims._pending.items())
    yield from map(Pending, _rows(pending))
    twins = ((lane, name, count) for (lane, name), count in claims._twins.items())
    yield from map(Twins, _rows(twins))
    follows = ((i, a, b) for i, line in claims._follows.items() for a, b in line.items())
    yield from map(Follows, _rows(follows))
    for lane, windows in claims._windows.items():
        for before in _rows((name, *waits) for name, waits in windows.before.items()):
            yield Before(lane, before)
        for placed in _rows((name, *place) for name, place in windows.place.items()):
            yield Placed(lane, placed)
        for shared in _rows(windows.shared.items()):
            yield Shared(lane, shared)
        for tier, masks in zip(Tier, windows.masks, strict=True):
            for rows in _rows(masks.items()):
                yield Masks(lane, tier, rows)


def _rows(rows: Iterable[T]) -> Iterator[list[T]]:
    walk = iter(rows)
    while some := list(itertools.islice(walk, ROWS_MAX)):
        yield some


def _names(directory: Directory, life: _Slot) -> Iterator[Names]:
    table, bit = life.claims._names, life.bit
    below = bool(life.pool.lower & bit)  # else it never announced anything there
    books = [
        (lane, tier, book)
        for lane, tiers in enumerate(directory.books(life.pool))
        for tier, book in zip(Tier, tiers, strict=True)
        if below or tier is Tier.HBM
    ]
    for starts in _spread(table.slots()):
        entries = [entry for start in starts for entry in table.entries(start, start + _RUN)]
        if not entries:
            continue
        names, keys = zip(*entries, strict=True)
        held = [(lane, tier, _held(book, keys, bit)) for lane, tier, book in books]
        yield Names(
            struct.pack(f"<{len(names)}Q", *names),
            b"".join(keys),
            [
                (lane, tier, flags if 0 in flags else b"")
                for lane, tier, flags in held
                if 1 in flags
            ],
        )


def _spread(slots: int) -> Iterator[range]:
    """Where to read a table in runs, each place once: from all over it at any time. In its own
    order all would come to one end of a table that grows, and each would be put behind all."""
    pieces = max(-(-slots // ROWS_MAX), 1)
    step = round(_GOLDEN * pieces) or 1
    while math.gcd(step, pieces) > 1:
        step += 1
    for number in range(pieces):
        yield range(number * step % pieces * _RUN, slots, pieces * _RUN)


def _held(book: KeyTable, keys: tuple[bytes, ...], bit: int) -> bytes:
    get = book.get
    return bytes([1 if get(key, 0) & bit else 0 for key in keys]) if len(book) else b""


def take_claimed(life: _Slot, piece: Claimed) -> None:
    """What `Claimed` says, into a life that is fresh. Raises SnapshotError."""
    claims = life.claims
    _known(max(piece.lanes.values(), default=0) < len(life.pool.lanes))
    claims._lane_of_group = dict(piece.lanes)
    claims._report, claims._reports = piece.report, piece.reports
    claims._group, claims._full = piece.group, piece.full
    claims.touched = True
    life.muted = piece.muted


def take_rows(directory: Directory, life: _Slot, piece: Rows) -> None:
    """One piece of its claims. Raises SnapshotError where they are of no such life, or too many;
    it must then be given up."""
    claims = life.claims
    lanes = len(life.pool.lanes)
    match piece:
        case Names():
            _take_names(directory, life, piece)
        case Recent(rows):
            claims._recent.update(rows)
            _few(len(claims._recent), RECENT_MAX)
        case Pending(pending):
            _known(all(lane < lanes for lane, _, _ in pending))
            claims._pending.update(((lane, name), tiers) for lane, name, tiers in pending)
            _few(len(claims._pending), PENDING_MAX)
        case Twins(twins):
            _known(all(lane < lanes for lane, _, _ in twins))
            claims._twins.update(((lane, name), count) for lane, name, count in twins)
            _few(len(claims._twins), PENDING_MAX)
        case Follows(follows):
            for lane, name, after in follows:
                _known(lane < lanes)
                claims._follows.setdefault(lane, {})[name] = after
        case _:
            _take_windows(claims, piece)


def _take_windows(claims: Claims, piece: Before | Placed | Shared | Masks) -> None:
    windows = claims._windows.get(piece.lane)
    if windows is None:
        raise SnapshotError("it tells of windows that the layout does not have")
    few = claims._names_max * windows.full.bit_length()
    match piece:
        case Before(_, waiting):
            windows.before.update((name, (before, tiers)) for name, before, tiers in waiting)
            _few(len(windows.before), PENDING_MAX)
        case Placed(_, placed):
            _known(all(unit < windows.full.bit_length() for _, _, unit in placed))
            windows.place.update((name, (key, unit)) for name, key, unit in placed)
            _few(len(windows.place), few)
        case Shared(_, shared):
            windows.shared.update(shared)
            _few(len(windows.shared), few)
        case Masks(_, tier, masks):
            _take_masks(windows, tier, masks, few)


def _take_masks(windows: Windows, tier: Tier, rows: list[tuple[bytes, int]], few: int) -> None:
    _known(all(units <= windows.full for _, units in rows))
    windows.masks[tier].update(rows)
    _few(len(windows.masks[tier]), few)


def _take_names(directory: Directory, life: _Slot, piece: Names) -> None:
    count = len(piece.keys) // KEY_BYTES
    _known(len(piece.keys) == count * KEY_BYTES and len(piece.names) == count * 8)
    keys = [piece.keys[i : i + KEY_BYTES] for i in range(0, len(piece.keys), KEY_BYTES)]
    table = life.claims._names
    _few(len(table) + count, life.claims._names_max)
    try:
        table.add(struct.unpack(f"<{count}Q", piece.names), keys)
    except ValueError as error:  # a key of zeros, which means none
        raise SnapshotError(f"it contradicts itself: {error}") from error
    for lane, tier, flags in piece.held:
        _known(lane < len(life.pool.lanes) and len(flags) in (0, count))
        held = list(itertools.compress(keys, flags)) if flags else keys
        if tier is Tier.HBM:
            room = directory.set_all(life, lane, held) is not None
        else:
            room = all(directory.set(life, lane, tier, key) for key in held)
        if not room:
            raise SnapshotError("it tells of more block-holders than this directory may have")


def _known(right: bool) -> None:
    if not right:
        raise SnapshotError("it contradicts itself, or the layout of its engine")


def _few(count: int, most: int) -> None:
    if count > most:
        raise SnapshotError(f"it tells of more of an engine than this directory takes: {most}")
