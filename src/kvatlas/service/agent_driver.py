"""Drives `core.agent.Agent` in real time: performs its effects with the stores of the data plane.

All of it runs in one event loop; stores work in their own threads and report back to it. What is
staged for an engine is verified and held before the engine hears of it, so that no load can fail
once it was promised; whatever fails before that is a recompute, with a counted reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core.agent import Agent
from kvatlas.core.events import Event
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit
from kvatlas.dataplane import records
from kvatlas.dataplane.arena import Arena, Slot
from kvatlas.dataplane.tiers.base import Piece, Report, Shared
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.dram import DramStore
from kvatlas.dataplane.tiers.dram import Unit as Kept
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent_copies import Copies
from kvatlas.service.agent_loads import Loads
from kvatlas.service.agent_shared import Place, Ways

UNANSWERED_MAX = 8  # orders of one engine


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
        shared: Mapping[Place, Shared] | None = None,
        *,
        ready: Callable[[str, wire.Staged], None],
        announce: Callable[[Sequence[Event]], None] = lambda _: None,
        threads: int = 2,
    ) -> None:
        """``ready(worker, staged)`` is told of every load that is over."""
        post = self._from_thread
        self.agent = agent
        self.arena = arena
        self.dram = dram
        self.disk = disk
        self.ways = Ways(shared or {}, tell=self.tell, post=post)
        self.copies = Copies(
            dram,
            disk,
            self.ways,
            post=post,
            done=self._done,
            expects=agent.expects,
            forgotten=agent.forgotten,
        )
        dram.wipes = agent.forgotten
        if disk is not None:
            disk.wipes = agent.forgotten
        self.loads = self.copies.loads = Loads(
            arena,
            dram,
            self.copies.read,
            post=post,
            done=self._done,
            ready=ready,
            threads=threads,
        )
        self.counts: Counter[str] = Counter()
        self._announce = announce
        self._loop = asyncio.get_running_loop()
        self._savings: dict[int, Saving] = {}
        self._unanswered: dict[int, Saving] = {}  # given up, and their engines may still copy
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
                    self.copies.begin(effect)
                case words.Seal():
                    self.copies.seal(effect)
                case words.Drop(tier, names):
                    self.copies.drop(tier, names)
                case words.Stop(op):
                    self._stop(op)
                case words.Ready(worker, request, tokens):
                    self.loads.say_ready(worker, request, tokens)
                case words.Lent():
                    self.ways.lent(effect)
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
        self,
        op: int,
        failed: Iterable[bytes] = (),
        damaged: Iterable[bytes] = (),
        error: str = "",
        refused: Iterable[bytes] = (),
    ) -> None:
        """The machine hears of it when the effects at hand are performed."""
        event = words.Done(op, tuple(failed), tuple(damaged), error, tuple(refused))
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
        late = sum(given_up.save.worker == save.worker for given_up in self._unanswered.values())
        if late >= UNANSWERED_MAX:
            self.counts["save_unanswered"] += 1
            self._done(save.op, error="the engine does not answer")
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
            given_up = self._unanswered.get(op)
            if given_up is not None and given_up.save.worker == worker:
                self._give_back(op)
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

        self.copies.write(save.tier, going, written)

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
            released=partial(self._from_thread, self.dram.abort, room, slot, saving.tenant),
        )

    # -- ends -----------------------------------------------------------------------------------

    def _stop(self, op: int) -> None:
        """Loads end when their parts do; copies by the deadline of their store. A save is over at
        once, but its room is nobody else's before the engine answers or is gone: a copy that was
        held up would go on in what others have there by then."""
        self.loads.stop(op)
        if (saving := self._savings.pop(op, None)) is not None:
            self._unanswered[op] = saving
            self._done(op, error="stopped")

    def _give_back(self, op: int) -> None:
        saving = self._unanswered.pop(op)
        for _, slot, room in saving.rooms.values():
            self.dram.abort(room, slot, saving.tenant)

    def gone(self, worker: str) -> None:
        """An engine's process has ended: nothing of it reads or writes any more."""
        self.tell(words.Detach(worker))
        self.loads.gone(worker)
        for op in [n for n, saving in self._unanswered.items() if saving.save.worker == worker]:
            self._give_back(op)

    def close(self) -> None:
        """Ends everything; stores are the caller's to close after it."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.loads.close()
        self.copies.close()
        self.ways.close()
