"""The one interface of all stores, and what they have in common.

A store keeps immutable values under names. It moves bytes between its medium and slots of the
arena, it never decides what to keep. Every operation ends by the store's own deadline, whatever
the medium does, and its ``done`` is called exactly once, after which nothing touches the views.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import xxhash

from kvatlas.core.records import Tier

NAME_BYTES_MAX = 255


class Piece(msgspec.Struct):
    """One value: its name, the arena bytes that it is written from or read into, its checksum.

    ``view`` is as long as the value and writable for reads. ``checksum`` is `checksum_of` its
    bytes; for a read what must be found, 0: whatever the store's own record says, and that is
    then put here.

    ``index``, ``tenant`` and ``fingerprint`` are kept with what is written and found by `scan`; a
    fingerprint given to a read must be that of the write. ``lasting``: what is reported written
    survives a loss of power, with all that was reported before (what resume records need).
    ``released`` is called when nothing touches the view any more: before ``done``, or after it
    where the medium hangs in a call that cannot be ended.
    """

    name: bytes
    view: memoryview
    checksum: int = 0
    index: int = 0
    tenant: str = ""
    fingerprint: bytes = b""
    lasting: bool = False
    released: Callable[[], None] | None = None


class Report(msgspec.Struct, frozen=True):
    """How an operation ended. All pieces that are not named did arrive.

    ``failed``: not written, or (a read) not there. ``damaged``: there, but not what was promised:
    other bytes, another size. ``error``: none arrived, and why. ``silent``: the other side could
    not be reached, or did not answer in time, for all of it or a part.
    """

    failed: tuple[bytes, ...] = ()
    damaged: tuple[bytes, ...] = ()
    error: str = ""
    silent: bool = False


class Entry(msgspec.Struct, frozen=True):
    """What a store says that it holds under a name."""

    name: bytes
    size_bytes: int
    checksum: int = 0
    index: int = 0
    tenant: str = ""
    fingerprint: bytes = b""


Finish = Callable[[Report], None]


class Store(Protocol):
    """Where values lie. Several operations may be in flight; the methods may be called from any
    thread and do not block on the medium (`scan`, `delete` and `close` may, up to the deadline).

    ``transport`` says what really carries the bytes ("O_DIRECT", "tcp", "shm", "rdma").
    """

    tier: Tier
    transport: str

    def write(self, pieces: Sequence[Piece], done: Finish) -> None:
        """Store all pieces. A name that is there already keeps its value, which is the same."""

    def read(self, pieces: Sequence[Piece], done: Finish) -> None:
        """Fill the views. Verified before ``done``: what is not reported is right."""

    def delete(self, names: Sequence[bytes]) -> None:
        """Remove what is there of these."""

    def scan(self) -> Iterator[Entry]:
        """Catalogue, as after a restart. Nothing of it is verified before it is read."""

    def close(self) -> None:
        """Ends what is in flight (as failed) and gives everything back."""


class Shared(Store, Protocol):
    """A store that other nodes use too: what is in it may come and go without our doing."""

    def find(self, names: Sequence[bytes], done: Finish) -> None:
        """Which of these are there; ``failed`` are those that are not. Nothing is verified."""

    def labels(self) -> Iterator[Entry] | None:
        """As `scan`, with what each value says of itself; None where that cannot be had. May read
        something of every value: for purges."""

    @property
    def counts(self) -> dict[str, int]:
        """Pieces and failures, by reason."""


class Counts:
    """Counters that several threads raise: operations, bytes, and failures by reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def all(self) -> dict[str, int]:
        """A copy."""
        with self._lock:
            return dict(self._values)


class Life:
    """Which life the other side is in: who began another may have lost all that it held."""

    def __init__(self, counts: Counts, lost: Callable[[str], None] | None) -> None:
        """``lost`` is told of every change, in words."""
        self._counts = counts
        self._lost = lost
        self._last = b""

    def seen(self, life: bytes, change: str) -> None:
        """What it says now; b"": it could not tell. ``change``: what another one than the last
        means."""
        if not life:
            return
        before, self._last = self._last, life
        if before and before != life:
            self._counts.add("restarts")
            if self._lost is not None:
                self._lost(change)


_NOTHING = memoryview(bytearray(1))


def asked(names: Sequence[bytes]) -> list[Piece]:
    """Names alone in the form of pieces, for `Shared.find`: their views are never touched."""
    return [Piece(name, _NOTHING) for name in names]


def let_go(piece: Piece, counts: Counts) -> None:
    """Nothing of ours touches its view any more."""
    if piece.released is None:
        return
    released, piece.released = piece.released, None  # which may hold the piece itself
    try:
        released()
    except Exception:  # as with ``done``
        counts.add("released_failed")


def well_formed(piece: Piece, *, into: bool = False) -> bool:
    """Whether it has a name and bytes in a row, at least one; ``into``: that can be written to."""
    view = piece.view
    row = view.ndim == 1 and view.itemsize == 1 and view.c_contiguous and view.nbytes > 0
    return row and 0 < len(piece.name) <= NAME_BYTES_MAX and not (into and view.readonly)


def checksum_of(view: memoryview | bytes) -> int:
    """XXH3, 128 bits; never 0, which stands for unknown."""
    return xxhash.xxh3_128_intdigest(view) or 1
