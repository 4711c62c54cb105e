"""Units in the shared arena of a node.

Engines copy from and to slots themselves: `reserve` a place, let them fill it, `commit`; `pin` it,
let them read, `unpin`. Whoever does not map the arena copies in and out by `write` and `read`. A
unit that is deleted while it is pinned is found by nobody, and its place is nobody else's until the
last pin ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvatlas.core.records import Tier
from kvatlas.dataplane.arena import Arena, Slot, Slots
from kvatlas.dataplane.tiers.base import Counts, Entry, Finish, Piece, checksum_of, let_go
from kvatlas.dataplane.tiers.work import Why, check, report, unfit
from kvatlas.errors import StoreError

_Act = Callable[[Piece], Why | None]


class Unit(msgspec.Struct, frozen=True):
    """A unit in its slot; ``checksum`` 0: nobody knows."""

    slot: Slot
    checksum: int = 0
    index: int = 0
    tenant: str = ""
    fingerprint: bytes = b""


class DramStore:
    """The `dram` tier of one node. Its own copies run in the caller's thread."""

    tier = Tier.DRAM
    transport = "shm"

    def __init__(self, arena: Arena, *, verify: bool = True) -> None:
        """``arena``: the caller's own and empty; closed by the caller. ``verify``: whether
        checksums of what `write` and `read` copy must be right."""
        self.arena = arena
        self.counts = Counts()
        self.wipes: Callable[[str], bool] = lambda _: False  # of an owner whose bytes must not stay
        self._verify = verify
        self._slots = Slots(arena)
        self._units: dict[bytes, Unit] = {}
        self._rooms: dict[bytes, Slot] = {}
        self._lock = threading.Lock()
        self._closed = False

    # -- in place -------------------------------------------------------------------------------

    def reserve(self, name: bytes, size_bytes: int) -> Slot | None:
        """A place to fill; None: it is there or being filled already, or there is no room (in one
        piece). Until `commit` or `abort` it counts as in use by whoever fills it."""
        with self._lock:
            if self._closed or name in self._units or name in self._rooms:
                return None
            slot = self._slots.take(size_bytes)
            if slot is None:
                scattered = self._slots.free_bytes >= size_bytes
                self.counts.add("write_scattered" if scattered else "write_full")
                return None
            self._slots.hold(slot)
            self._rooms[name] = slot
            return slot

    def commit(self, name: bytes, unit: Unit) -> None:
        """From now on it can be found. Raises StoreError where this slot was not reserved."""
        with self._lock:
            if self._rooms.get(name) != unit.slot:
                raise StoreError(f"commit {name!r}: not reserved (any more)")
            del self._rooms[name]
            self._units[name] = unit
            self._slots.release(unit.slot)

    def abort(self, name: bytes, slot: Slot, owner: str = "") -> None:
        """The room is free: whoever filled it, for ``owner``, touches it no more. Raises as
        `commit`."""
        with self._lock:
            if self._rooms.get(name) != slot:
                raise StoreError(f"abort {name!r}: not reserved (any more)")
            del self._rooms[name]
            self._slots.give(slot, wipe=self.wipes(owner))
            self._slots.release(slot)

    def adopt(self, room: bytes, name: bytes, unit: Unit) -> bool:
        """What fills a room is a unit from now on, and pinned for whoever held the room; False
        where one of that name is there or on its way. Raises StoreError as `commit`."""
        with self._lock:
            if self._rooms.get(room) != unit.slot:
                raise StoreError(f"adopt {room!r}: not reserved (any more)")
            if self._closed or name in self._units or name in self._rooms:
                return False
            del self._rooms[room]
            self._units[name] = unit
            return True

    def pin(self, name: bytes) -> Unit | None:
        """It stays where it is until `unpin`; None: it is not there."""
        with self._lock:
            unit = self._units.get(name)
            if unit is not None:
                self._slots.hold(unit.slot)
            return unit

    def unpin(self, slot: Slot) -> None:
        """End of a `pin`. Raises StoreError when there is none."""
        with self._lock:
            self._slots.release(slot)

    # -- the interface --------------------------------------------------------------------------

    def write(self, pieces: Sequence[Piece], done: Finish) -> None:
        """As `Store.write`. Other bytes under a name that is held are reported as damaged."""
        self._each("write", pieces, self._put, done)

    def read(self, pieces: Sequence[Piece], done: Finish) -> None:
        """As `Store.read`."""
        self._each("read", pieces, self._get, done)

    def delete(self, names: Sequence[bytes]) -> None:
        """As `Store.delete`."""
        with self._lock:
            for name in names:
                if (unit := self._units.pop(name, None)) is not None:
                    self._slots.give(unit.slot, wipe=self.wipes(unit.tenant))

    def scan(self) -> Iterator[Entry]:
        """As `Store.scan`."""
        with self._lock:
            units = list(self._units.items())
        for name, unit in units:
            size = unit.slot.size_bytes
            yield Entry(name, size, unit.checksum, unit.index, unit.tenant, unit.fingerprint)

    def has(self, names: Sequence[bytes]) -> int:
        """How many of them are held, up to the first that is not."""
        for count, name in enumerate(names):
            if name not in self._units:
                return count
        return len(names)

    def close(self) -> None:
        """As `Store.close`; all that it held is gone."""
        with self._lock:
            self._closed = True
            names = list(self._units)
        self.delete(names)

    # -- state ----------------------------------------------------------------------------------

    @property
    def wiping(self) -> int:
        """Deleted units whose bytes are to be wiped and still touched by somebody."""
        with self._lock:
            return self._slots.to_wipe

    @property
    def free_bytes(self) -> int:
        """That can be reserved, if not in one piece."""
        with self._lock:
            return self._slots.free_bytes

    # -- inside ---------------------------------------------------------------------------------

    def _each(self, kind: str, pieces: Sequence[Piece], act: _Act, done: Finish) -> None:
        ends: list[tuple[bytes, Why | None]] = []
        for piece in pieces:
            try:
                check(piece, filled=kind == "read")
                why = Why.CLOSED if self._closed else act(piece)
            except StoreError:
                why = Why.INVALID
            if why is not None:
                self.counts.add(f"{kind}_{why}")
            let_go(piece, self.counts)
            ends.append((piece.name, why))
        done(report(ends))

    def _put(self, piece: Piece) -> Why | None:
        with self._lock:
            unit, filling = self._units.get(piece.name), piece.name in self._rooms
        if unit is not None:
            if len(piece.view) != unit.slot.size_bytes:
                return Why.CONFLICT
            checksum = checksum_of(piece.view) if self._verify else piece.checksum
            return None if unit.checksum in (0, checksum) else Why.CONFLICT
        slot = None if filling else self.reserve(piece.name, len(piece.view))
        if slot is None:
            return Why.BUSY if filling else Why.FULL
        checksum = self.arena.copy_in(slot, [piece.view])
        if self._verify:
            if piece.checksum not in (0, checksum):
                self.abort(piece.name, slot)
                return Why.DAMAGED  # it was wrong before it came here
            piece.checksum = checksum
        unit = Unit(slot, piece.checksum, piece.index, piece.tenant, piece.fingerprint)
        self.commit(piece.name, unit)
        return None

    def _get(self, piece: Piece) -> Why | None:
        unit = self.pin(piece.name)
        if unit is None:
            return Why.MISSING
        try:
            why = unfit(piece, unit.slot.size_bytes, unit.checksum, unit.fingerprint)
            if why is not None:
                return why
            copied = self.arena.copy_out(unit.slot, [piece.view])
            found = copied if self._verify else unit.checksum
            wanted = piece.checksum or unit.checksum
            if wanted and found != wanted:
                self._quarantine(piece.name, unit)
                return Why.DAMAGED
            piece.checksum = found
            return None
        finally:
            self.unpin(unit.slot)

    def _quarantine(self, name: bytes, unit: Unit) -> None:
        self.counts.add("quarantined")
        with self._lock:
            if self._units.get(name) is unit:
                del self._units[name]
                self._slots.give(unit.slot)
