"""Copies between the tiers of a node, and the records that make a position count, written last."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from kvatlas.core import agent_values as words
from kvatlas.core.records import Tier
from kvatlas.core.register_values import Record
from kvatlas.core.units import Part, name_of
from kvatlas.dataplane import records
from kvatlas.dataplane.tiers.base import Entry, Finish, Piece, Report
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.dram import DramStore
from kvatlas.dataplane.tiers.dram import Unit as Kept
from kvatlas.service.agent_loads import End, Here, Loads
from kvatlas.service.agent_records import Records
from kvatlas.service.agent_shared import Ways

T = TypeVar("T")
QUEUE_S = 20.0  # with the disk's own deadline less than the machine waits for a copy


class Copies:
    """Of one node. For the event loop's thread alone."""

    def __init__(
        self,
        dram: DramStore,
        disk: DiskStore | None,
        ways: Ways,
        *,
        post: Callable[..., None],
        done: End,
        expects: Callable[[Tier, bytes], bool],
        forgotten: Callable[[str], bool],
    ) -> None:
        """``expects``: whether the machine has a unit in a tier, or waits for it; ``forgotten``:
        whether nothing of an owner may be kept."""
        self.writing: Counter[str] = Counter()  # pieces that stores have not ended, by owner
        self._expects = expects
        self._forgotten = forgotten
        self.dram = dram
        self.disk = disk
        self.ways = ways
        self.loads: Loads  # set by who makes both
        self._post = post
        self._done = done
        self._order = ThreadPoolExecutor(1, "agent-disk")

    # -- one store ------------------------------------------------------------------------------

    def read(self, tier: Tier, node: str, pieces: Sequence[Piece], done: Finish) -> bool:
        """From any tier but dram; False where there is none that answers."""
        if tier is not Tier.DISK:
            return self.ways.read(tier, node, pieces, done)
        if self.disk is not None:
            self.disk.read(pieces, done)
        return self.disk is not None

    def write(self, tier: Tier, pieces: Sequence[Piece], done: Finish) -> None:
        """To any tier but dram; on disk in one order with what is deleted there."""
        if not pieces:
            done(Report())
            return
        done = self._watched(tier, pieces, done)
        if tier is Tier.DISK and self.disk is not None:
            until = time.monotonic() + QUEUE_S
            self._order.submit(self._in_turn, self.disk, pieces, done, until)
        elif tier is Tier.DISK or not self.ways.write(tier, pieces, done):
            _refuse(pieces, done, "no such tier answers")

    def _watched(self, tier: Tier, pieces: Sequence[Piece], done: Finish) -> Finish:
        """What a store has written of an owner who was forgotten meanwhile goes again, also where
        it says that it has not: it may have, and been too late to say so."""
        owners = Counter(piece.tenant for piece in pieces)
        self.writing.update(owners)

        def over() -> None:
            self.writing.subtract(owners)
            self.writing += Counter()  # without those at zero
            names = [piece.name for piece in pieces if self._forgotten(piece.tenant)]
            if names and tier is Tier.DISK and self.disk is not None:
                self._order.submit(self.disk.delete, names)
            elif names:
                self.ways.delete(tier, names)

        def written(report: Report) -> None:
            self._post(over)
            done(report)

        return written

    def _in_turn(
        self, disk: DiskStore, pieces: Sequence[Piece], done: Finish, until: float
    ) -> None:
        """The disk may have hung for so long that nobody would know of what is written now."""
        if time.monotonic() >= until:
            _refuse(pieces, done, "the disk did not take it in time")
            return
        names = [piece.name for piece in pieces if piece.name[-1] in tuple(Part)]

        def written(report: Report) -> None:
            done(report)
            self._post(self._post, self._tidy, names)  # when the machine has heard of it

        disk.write(pieces, written)

    def _tidy(self, names: Sequence[bytes]) -> None:
        """What was written for an operation that was given up meanwhile is nobody's."""
        self.drop(Tier.DISK, [name for name in names if not self._expects(Tier.DISK, name)])

    def drop(self, tier: Tier, names: Sequence[bytes]) -> None:
        """Of own tiers; on disk with the records of points."""
        if tier is Tier.DRAM:
            self.dram.delete(names)
        elif tier is Tier.DISK and self.disk is not None and names:
            points = [name for name in names if name[-1] == Part.POINT]
            sealed = [records.record_name(name[:-1]) for name in points]
            self._order.submit(self.disk.delete, [*sealed, *names])

    # -- copies ---------------------------------------------------------------------------------

    def begin(self, copy: words.Copy) -> None:
        """Ends with its `Done`."""
        if copy.target is Tier.DRAM:
            self._up(copy)
        elif copy.source.tier is Tier.DRAM:
            self._down(copy)
        else:
            self._through(copy)

    def _down(self, copy: words.Copy) -> None:
        pieces, failed = [], []
        for unit in copy.source.units:
            kept = self.dram.pin(unit.name)
            if kept is None:
                failed.append(unit.name)
                continue
            pieces.append(
                Piece(
                    unit.name,
                    self.dram.arena.view(kept.slot),
                    kept.checksum,
                    kept.index,
                    kept.tenant,
                    kept.fingerprint,
                    released=partial(self._post, self.dram.unpin, kept.slot),
                )
            )
        self.write(copy.target, pieces, partial(self._post, self._written, copy.op, failed, ()))

    def _written(
        self, op: int, failed: Iterable[bytes], refused: Iterable[bytes], report: Report
    ) -> None:
        self._done(op, failed, report.damaged, report.error, (*refused, *report.failed))

    def _up(self, copy: words.Copy) -> None:
        """What an engine was just given from there is here already."""
        rooms: list[Here] = []
        refused: list[bytes] = []
        for unit in copy.source.units:
            if self.loads.adopt(unit):
                continue
            slot = self.dram.reserve(unit.name, unit.size_bytes)
            if slot is None:
                refused.append(unit.name)
                continue
            here = Here(unit, copy.source.tier, slot, room=unit.name)
            piece = self.loads.piece_of(here)
            entry = self._disk_entry(unit.name) if copy.source.tier is Tier.DISK else None
            if entry is not None:
                piece.tenant, piece.fingerprint = entry.tenant, entry.fingerprint
            rooms.append(here)
        self._fill(copy, rooms, partial(self._came_up, copy.op, rooms, refused))

    def _fill(self, copy: words.Copy, rooms: Sequence[Here], then: Finish) -> None:
        """Read into rooms; ``then`` is called in the loop's thread."""
        pieces = [here.piece for here in rooms if here.piece is not None]
        if not pieces:
            then(Report())
            return
        ended = partial(self._post, then)
        if not self.read(copy.source.tier, copy.source.node, pieces, ended):
            for here in rooms:
                here.touched = False
            self.loads.let_go(rooms)
            self._done(copy.op, error="no such tier answers")

    def _came_up(
        self, op: int, rooms: Sequence[Here], refused: Sequence[bytes], report: Report
    ) -> None:
        bad = {*report.failed, *report.damaged}
        for here in rooms:
            piece = here.piece
            if piece is None or piece.name in bad:
                self.loads.let_go((here,))
                continue
            tenant, fingerprint = piece.tenant, piece.fingerprint
            kept = Kept(here.slot, piece.checksum, here.unit.index, tenant, fingerprint)
            self.dram.commit(piece.name, kept)
        error = report.error if rooms and len(bad) == len(rooms) else ""
        self._done(op, report.failed, report.damaged, error, refused)

    def _through(self, copy: words.Copy) -> None:
        """From a tier that is not dram to another: by way of room that no ledger knows of."""
        rooms: list[Here] = []
        refused: list[bytes] = []
        for unit in copy.source.units:
            room = self.loads.room_name(unit.name)
            slot = self.dram.reserve(room, unit.size_bytes)
            if slot is None:
                refused.append(unit.name)
                continue
            here = Here(unit, copy.source.tier, slot, room=room)
            self.loads.piece_of(here)
            rooms.append(here)
        self._fill(copy, rooms, partial(self._pass_on, copy, rooms, refused))

    def _pass_on(
        self, copy: words.Copy, rooms: Sequence[Here], refused: Sequence[bytes], report: Report
    ) -> None:
        bad = {*report.failed, *report.damaged}
        going: list[Piece] = []
        for here in rooms:
            read = here.piece
            if read is None or read.name in bad or here.touched:
                bad.add(here.unit.name)
                self.loads.let_go((here,))
                continue
            piece = self.loads.piece_of(here)
            entry = self._disk_entry(read.name)
            piece.checksum, piece.index = read.checksum, here.unit.index
            if entry is not None:
                piece.tenant, piece.fingerprint = entry.tenant, entry.fingerprint
            here.dropped = True  # its room goes when the store lets go of it
            going.append(piece)
        ended = partial(self._post, self._written, copy.op, bad, refused)
        self.write(copy.target, going, ended)

    # -- records --------------------------------------------------------------------------------

    def seal(self, seal: words.Seal) -> None:
        """Write resume records, last of all, so that they survive whatever comes."""
        found: list[tuple[bytes, Entry, Entry]] = []
        failed: list[bytes] = []
        for key in seal.keys:
            body, point = (self._entry(seal.tier, name_of(key, part)) for part in Part)
            if body is None or point is None:
                failed.append(name_of(key, Part.POINT))
            else:
                found.append((key, body, point))
        if seal.tier is Tier.OBJECT and self.ways.records is not None and found:
            self._register(seal, found, failed, self.ways.records)
            return

        def done(report: Report) -> None:
            bad = [name_of(n[:-1], Part.POINT) for n in (*report.failed, *report.damaged)]
            self._post(self._done, seal.op, (*failed, *bad), (), report.error)

        pieces = [
            Piece(
                records.record_name(key),
                memoryview(bytearray(_record(key, body, p).ljust(records.RECORD_BYTES, b"\0"))),
                0,
                p.index,
                p.tenant,
                p.fingerprint,
                lasting=True,
            )
            for key, body, p in found
        ]
        self.write(seal.tier, pieces, done)

    def _register(
        self,
        seal: words.Seal,
        found: Sequence[tuple[bytes, Entry, Entry]],
        failed: Sequence[bytes],
        register: Records,
    ) -> None:
        """The same, in the cluster's register."""

        def done(bad: set[bytes]) -> None:
            points = [name_of(key, Part.POINT) for key in bad]
            why = "the register does not take it" if bad else ""
            self._done(seal.op, (*failed, *points), (), why)

        register.commit(
            [
                Record(key, p.tenant, body.size_bytes + p.size_bytes, _record(key, body, p))
                for key, body, p in found
            ],
            done,
        )

    def made_by(self, name: bytes) -> bytes | None:
        """The fingerprint of whoever made a unit that lies on this node; None: none does."""
        entry = self._entry(Tier.DRAM, name)
        return None if entry is None else entry.fingerprint

    def _entry(self, tier: Tier, name: bytes) -> Entry | None:
        """What was written to a tier under a name: it came from here."""
        if tier is not Tier.DISK and (kept := self.dram.pin(name)) is not None:
            self.dram.unpin(kept.slot)
            size = kept.slot.size_bytes
            return Entry(name, size, kept.checksum, kept.index, kept.tenant, kept.fingerprint)
        return self._disk_entry(name)

    def _disk_entry(self, name: bytes) -> Entry | None:
        return None if self.disk is None else self.disk.entry(name)

    def in_order(self, call: Callable[[], T]) -> Future[T]:
        """Do something after all that the disk was told to delete until now."""
        return self._order.submit(call)

    def close(self) -> None:
        """Waits for what is being handed to the disk."""
        self._order.shutdown(wait=True)


def _refuse(pieces: Sequence[Piece], done: Finish, why: str) -> None:
    for piece in pieces:
        if piece.released is not None:
            piece.released()
    done(Report(tuple(piece.name for piece in pieces), error=why))


def _record(key: bytes, body: Entry, point: Entry) -> bytes:
    record = records.ResumeRecord(
        key,
        point.index,
        tuple(
            records.Component(part, e.name, e.size_bytes, records.checksum_bytes(e.checksum))
            for part, e in ((Part.BODY, body), (Part.POINT, point))
        ),
        tenant=point.tenant,
        fingerprint=point.fingerprint,
    )
    return records.pack(record)
