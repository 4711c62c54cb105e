"""Drives `core.agent.Agent` in real time: performs its effects with the stores of the data plane.

All of it runs in one event loop; stores work in their own threads and report back to it. What is
staged for an engine is verified and held before the engine hears of it, so that no load can fail
once it was promised; whatever fails before that is a recompute, with a counted reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core.agent import Agent
from kvatlas.core.events import Event
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit, name_of
from kvatlas.dataplane import records
from kvatlas.dataplane.arena import Arena, Slot
from kvatlas.dataplane.tiers.base import Piece, Report
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.dram import DramStore
from kvatlas.dataplane.tiers.dram import Unit as Kept
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent_loads import Here, Loads


class Saving(msgspec.Struct, eq=False):
    """A save whose engine copies: unit, slot and name of its room, by the unit's name."""

    save: words.Save
    rooms: dict[bytes, tuple[Unit, Slot, bytes]]
    tenant: str
    fingerprint: bytes


class Driver:
    """One node's agent and its stores. ``clock`` is steady; for the event loop's thread alone."""

    def __init__(
        self,
        agent: Agent,
        arena: Arena,
        dram: DramStore,
        disk: DiskStore | None,
        *,
        ready: Callable[[str, wire.Staged], None],
        announce: Callable[[Sequence[Event]], None] = lambda _: None,
        threads: int = 2,
    ) -> None:
        """``ready(worker, staged)`` is told of every load that is over."""
        self.loads = Loads(
            arena,
            dram,
            disk,
            post=self._from_thread,
            done=self._done,
            ready=ready,
            threads=threads,
        )
        self.agent = agent
        self.arena = arena
        self.dram = dram
        self.disk = disk
        self.counts: Counter[str] = Counter()
        self._announce = announce
        self._loop = asyncio.get_running_loop()
        self._order = ThreadPoolExecutor(1, "agent-disk")
        self._savings: dict[int, Saving] = {}
        self._asking: words.Filled | None = None  # whose engine waits for its orders
        self._orders: list[wire.Order] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # -- the machine ----------------------------------------------------------------------------

    def tell(self, event: words.Input) -> None:
        """An input of the machine."""
        if not self._closed:
            self._perform(self.agent.handle(event, self._loop.time()))

    def filled(self, event: words.Filled) -> list[wire.Order]:
        """The same, for an engine that waits for what it is to save."""
        self._asking, self._orders = event, []
        try:
            self.tell(event)
        finally:
            self._asking = None
        return self._orders

    def found(self) -> int:
        """Tell the machine what the disk's catalogue says; how many units that is."""
        if self.disk is None:
            return 0
        units: dict[str, list[Unit]] = {}
        sealed: dict[str, list[bytes]] = {}
        count = 0
        for entry in self.disk.scan():
            key, kind = entry.name[:-1], entry.name[-1:]
            if entry.name == records.record_name(key):
                sealed.setdefault(entry.tenant, []).append(key)
            elif kind in (b"\0", b"\1"):
                unit = Unit(key, Part(kind[0]), entry.index, entry.size_bytes)
                units.setdefault(entry.tenant, []).append(unit)
                count += 1
        for tenant, mine in units.items():
            self.tell(words.Found(Tier.DISK, tuple(mine), tuple(sealed.get(tenant, ())), tenant))
        return count

    def _perform(self, effects: Iterable[words.Effect]) -> None:
        for effect in effects:
            match effect:
                case words.Save():
                    self._save(effect)
                case words.Load():
                    self.loads.begin(effect)
                case words.Copy():
                    self._copy(effect)
                case words.Seal():
                    self._seal(effect)
                case words.Drop(tier, names):
                    self._drop(tier, names)
                case words.Stop(op):
                    self._stop(op)
                case words.Ready(worker, request, tokens):
                    self.loads.say_ready(worker, request, tokens)
                case words.Announce(events):
                    self._announce(events)
                case _:
                    self.counts["not_performed"] += 1
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.agent.next_deadline()
        if due is not None and not self._closed:
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self.agent.tick(self._loop.time()))

    def _done(
        self, op: int, failed: Iterable[bytes] = (), damaged: Iterable[bytes] = (), error: str = ""
    ) -> None:
        """The machine hears of it when the effects at hand are performed."""
        event = words.Done(op, tuple(failed), tuple(damaged), error)
        self._loop.call_soon(self.tell, event)

    def _from_thread(self, then: Callable[..., None], *given: object) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(then, *given)

    # -- saves ----------------------------------------------------------------------------------

    def _save(self, save: words.Save) -> None:
        """Make room and let the engine copy; it must be the one that asks right now."""
        asking = self._asking
        if asking is None or (asking.worker, asking.request) != (save.worker, save.request):
            self.counts["save_after_the_step"] += 1  # its blocks may be others' by now
            self._done(save.op, error="the engine has gone on")
            return
        rooms: dict[bytes, tuple[Unit, Slot, bytes]] = {}
        pieces = []
        for unit in save.units:
            room = unit.name if save.tier is Tier.DRAM else self.loads.room_name(unit.name)
            slot = self.dram.reserve(room, unit.size_bytes)
            if slot is not None:
                rooms[unit.name] = unit, slot, room
                pieces.append(wire.Piece(unit.name, unit.part, unit.index, slot))
        if not pieces:
            self._done(save.op, error="no room in one piece")
            return
        fingerprint = self.loads.engines[save.worker].fingerprint
        self._savings[save.op] = Saving(save, rooms, asking.tenant, fingerprint)
        self._orders.append(wire.Order(save.op, tuple(pieces)))

    def saved(self, worker: str, op: int, sums: dict[bytes, int]) -> None:
        """The engine has copied these, with their checksums."""
        saving = self._savings.get(op)
        if saving is None or saving.save.worker != worker:
            self.counts["saved_too_late"] += 1
            return
        del self._savings[op]
        save = saving.save
        failed = [u.name for u in save.units if not sums.get(u.name) or u.name not in saving.rooms]
        going: list[Piece] = []
        for name, (unit, slot, room) in saving.rooms.items():
            if name in failed:
                self.dram.abort(room, slot)
            elif save.tier is Tier.DRAM:
                kept = Kept(slot, sums[name], unit.index, saving.tenant, saving.fingerprint)
                self.dram.commit(name, kept)
            else:
                going.append(self._piece(unit, slot, sums[name], saving, room))
        if not going:
            self.tell(words.Done(op, tuple(failed)))  # now: the next question may be about it
            return

        def written(report: Report) -> None:
            self._from_thread(self._written, save.op, failed, report)

        self._to_disk(going, written)

    def _written(self, op: int, failed: list[bytes], report: Report) -> None:
        # A name of another value than ours is no value that we promised: it did not arrive.
        self._done(op, (*failed, *report.failed, *report.damaged), (), report.error)

    def _piece(self, unit: Unit, slot: Slot, checksum: int, saving: Saving, room: bytes) -> Piece:
        return Piece(
            unit.name,
            self.arena.view(slot),
            checksum,
            unit.index,
            saving.tenant,
            saving.fingerprint,
            released=partial(self._from_thread, self.dram.abort, room, slot),
        )

    # -- between tiers --------------------------------------------------------------------------

    def _copy(self, copy: words.Copy) -> None:
        match copy.source.tier, copy.target:
            case Tier.DRAM, Tier.DISK if self.disk is not None:
                self._down(copy)
            case Tier.DISK, Tier.DRAM if self.disk is not None:
                self._up(copy)
            case _:
                self._done(copy.op, error="there is no such way here")

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
                    self.arena.view(kept.slot),
                    kept.checksum,
                    kept.index,
                    kept.tenant,
                    kept.fingerprint,
                    released=partial(self._from_thread, self.dram.unpin, kept.slot),
                )
            )

        def done(report: Report) -> None:
            bad = (*failed, *report.failed)
            self._from_thread(self._done, copy.op, bad, report.damaged, report.error)

        self._to_disk(pieces, done)

    def _up(self, copy: words.Copy) -> None:
        assert self.disk is not None
        pieces, failed, rooms = [], [], []
        for unit in copy.source.units:
            slot = self.dram.reserve(unit.name, unit.size_bytes)
            entry = self.disk.entry(unit.name)
            if slot is None or entry is None:
                failed.append(unit.name)
                if slot is not None:
                    self.dram.abort(unit.name, slot)
                continue
            here = Here(unit, Tier.DISK, slot, room=unit.name)
            piece = self.loads.reading(here)
            piece.tenant, piece.fingerprint = entry.tenant, entry.fingerprint
            rooms.append((here, piece))
            pieces.append(piece)
        if not pieces:
            self._done(copy.op, failed, error="no room in one piece")
            return

        def done(report: Report) -> None:
            self._from_thread(self._came_up, copy.op, rooms, failed, report)

        self.disk.read(pieces, done)

    def _came_up(
        self,
        op: int,
        rooms: Sequence[tuple[Here, Piece]],
        failed: Sequence[bytes],
        report: Report,
    ) -> None:
        bad = {*report.failed, *report.damaged}
        for here, piece in rooms:
            if piece.name in bad:
                self.loads.let_go((here,))
                continue
            tenant, fingerprint = piece.tenant, piece.fingerprint
            kept = Kept(here.slot, piece.checksum, here.unit.index, tenant, fingerprint)
            self.dram.commit(piece.name, kept)
        self._done(op, (*failed, *report.failed), report.damaged, report.error)

    def _seal(self, seal: words.Seal) -> None:
        """Write resume records, last of all, so that they survive whatever comes."""
        assert self.disk is not None
        pieces: list[Piece] = []
        failed: list[bytes] = []
        for key in seal.keys:
            parts = [self.disk.entry(name_of(key, part)) for part in Part]
            body, point = parts
            if body is None or point is None:
                failed.append(name_of(key, Part.POINT))
                continue
            record = records.ResumeRecord(
                key,
                point.index,
                tuple(
                    records.Component(
                        part, e.name, e.size_bytes, records.checksum_bytes(e.checksum)
                    )
                    for part, e in ((Part.BODY, body), (Part.POINT, point))
                ),
                tenant=point.tenant,
                fingerprint=point.fingerprint,
            )
            view = memoryview(bytearray(records.pack(record)))
            name = records.record_name(key)
            pieces.append(
                Piece(name, view, 0, point.index, point.tenant, point.fingerprint, lasting=True)
            )

        def done(report: Report) -> None:
            bad = [name_of(n[:-1], Part.POINT) for n in (*report.failed, *report.damaged)]
            self._from_thread(self._done, seal.op, (*failed, *bad), (), report.error)

        self._to_disk(pieces, done)

    def _to_disk(self, pieces: list[Piece], done: Callable[[Report], None]) -> None:
        """In one order with what is deleted there."""
        assert self.disk is not None
        if pieces:
            self._order.submit(self.disk.write, pieces, done)
        else:
            done(Report())

    # -- ends -----------------------------------------------------------------------------------

    def _drop(self, tier: Tier, names: Sequence[bytes]) -> None:
        if tier is Tier.DRAM:
            self.dram.delete(names)
        elif tier is Tier.DISK and self.disk is not None:
            points = [name for name in names if name[-1] == Part.POINT]
            sealed = [records.record_name(name[:-1]) for name in points]
            self._order.submit(self.disk.delete, [*sealed, *names])

    def _stop(self, op: int) -> None:
        """Loads end when their parts do; copies by the deadline of their store."""
        self.loads.stop(op)
        if (saving := self._savings.pop(op, None)) is not None:
            for _, slot, room in saving.rooms.values():
                self.dram.abort(room, slot)
            self._done(op, error="stopped")

    def gone(self, worker: str) -> None:
        """An engine's process has ended: nothing of it reads or writes any more."""
        self.tell(words.Detach(worker))
        self.loads.gone(worker)

    def close(self) -> None:
        """Ends everything; stores are the caller's to close after it."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.loads.close()
        self._order.shutdown(wait=True)
