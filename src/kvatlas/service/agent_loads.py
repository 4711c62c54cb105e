"""Loads of a node's agent: what an engine is going to read, brought to the arena and verified.

An engine hears of a load only when all of it is in slots that are pinned or reserved, with
checksums that were just seen right: nothing that it was promised can fail. What several requests
want at once is fetched once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit
from kvatlas.dataplane.arena import Arena, Slot
from kvatlas.dataplane.tiers.base import Finish, Piece, Report, checksum_of
from kvatlas.dataplane.tiers.dram import DramStore
from kvatlas.dataplane.tiers.dram import Unit as Kept
from kvatlas.service import agent_wire as wire

_STAGING = b"\xff"  # after a unit's name: room that no ledger knows of


class Engine(msgspec.Struct, frozen=True):
    """What has to be known of an engine that is attached."""

    fingerprint: bytes
    grid_tokens: int


class Here(msgspec.Struct, eq=False):
    """A unit of a load in the arena. ``room``: under which it is reserved, where it is read from
    elsewhere by ``piece``; else it is pinned. ``users``: loads that it is for. ``touched``: a store
    may still write to it."""

    unit: Unit
    tier: Tier
    slot: Slot
    checksum: int = 0
    room: bytes = b""
    bad: str = ""
    piece: Piece | None = None
    reading: Reading | None = None
    users: int = 1
    touched: bool = False
    dropped: bool = False


class Reading(msgspec.Struct, eq=False):
    """One read of a store that is on its way, and the loads that wait for it."""

    stagings: list[Staging]


class Staging(msgspec.Struct, eq=False):
    """A load on its way: what is here, what is missing, and how many answers are still to come."""

    load: words.Load
    here: list[Here]
    waiting: int
    failed: list[bytes]
    damaged: list[bytes]
    refused: list[bytes]
    stopped: bool = False


class End(Protocol):
    """Tells the machine that an operation is over."""

    def __call__(
        self,
        op: int,
        failed: Iterable[bytes] = (),
        damaged: Iterable[bytes] = (),
        error: str = "",
        refused: Iterable[bytes] = (),
    ) -> None:
        """As `core.agent_values.Done`."""


class Read(Protocol):
    """Reads from a store; False: there is none, or it does not answer now."""

    def __call__(self, tier: Tier, node: str, pieces: Sequence[Piece], done: Finish) -> bool:
        """``done`` is called from any thread."""


class Loads:
    """Of one node. For the event loop's thread alone."""

    def __init__(
        self,
        arena: Arena,
        dram: DramStore,
        read: Read,
        *,
        post: Callable[..., None],
        done: End,
        ready: Callable[[str, wire.Staged], None],
        threads: int,
    ) -> None:
        """``read``: from tiers other than dram. ``post`` calls something in the loop's thread;
        ``ready`` is told of every end."""
        self.arena = arena
        self.dram = dram
        self.engines: dict[str, Engine] = {}
        self.counts: Counter[str] = Counter()
        self.loaded: Counter[str] = Counter()  # tokens that engines loaded, by tier
        self._from_thread = post
        self._read = read
        self._done = done
        self._ready = ready
        self._threads = threads
        self._sums = ThreadPoolExecutor(threads, "agent-sums")
        self._stagings: dict[int, Staging] = {}
        self._over: dict[tuple[str, str], Staging] = {}  # done, and `Ready` is about to come
        # What engines may read, and how many tokens it is from each tier.
        self._held: dict[tuple[str, str], tuple[Sequence[Here], Counter[str]]] = {}
        self._fetched: dict[bytes, Here] = {}  # units from elsewhere, on their way or held
        self._number = 0

    def begin(self, load: words.Load) -> None:
        """Bring everything to where the engine can copy it from, and verify it there."""
        staging = Staging(load, [], 1, [], [], [])  # one for this call itself
        self._stagings[load.op] = staging
        fingerprint = self.engines[load.worker].fingerprint
        near: list[Here] = []
        for source in load.sources:
            if source.tier is Tier.DRAM:
                near += self._pinned(staging, source.units, fingerprint)
            else:
                self._fetch(staging, source, fingerprint)
        for share in filter(None, (near[n :: self._threads] for n in range(self._threads))):
            staging.waiting += 1
            self._sums.submit(self._verify, staging, share)
        self._arrived(staging, (), ())

    # -- what lies in dram ----------------------------------------------------------------------

    def _pinned(
        self, staging: Staging, units: Iterable[Unit], fingerprint: bytes
    ) -> Iterable[Here]:
        for unit in units:
            kept = self.dram.pin(unit.name)
            if kept is None:
                staging.failed.append(unit.name)
                continue
            here = Here(unit, Tier.DRAM, kept.slot, kept.checksum)
            if kept.slot.size_bytes != unit.size_bytes or kept.fingerprint != fingerprint:
                here.bad = "another unit"
            staging.here.append(here)
            yield here

    def _verify(self, staging: Staging, pieces: Sequence[Here]) -> None:
        """In a thread: find those whose bytes are not what was saved."""
        wrong = []
        for here in pieces:
            if here.bad or checksum_of(self.arena.view(here.slot)) != here.checksum:
                wrong.append(here.unit.name)
        self._from_thread(self._arrived, staging, (), tuple(wrong))

    # -- what lies elsewhere --------------------------------------------------------------------

    def _fetch(self, staging: Staging, source: words.Source, fingerprint: bytes) -> None:
        """Read it, or wait for what others read already."""
        reading = Reading([staging])
        mine: list[Here] = []
        for unit in source.units:
            there = self._fetched.get(unit.name)
            if there is not None and there.piece is not None:
                if there.piece.fingerprint != fingerprint or there.unit != unit:
                    staging.refused.append(unit.name)
                    continue
                there.users += 1
                staging.here.append(there)
                other = there.reading
                if other is not None and staging not in other.stagings:
                    other.stagings.append(staging)
                    staging.waiting += 1
                continue
            room = self.room_name(unit.name)
            slot = self.dram.reserve(room, unit.size_bytes)
            if slot is None:
                self.counts["staging_full"] += 1
                staging.refused.append(unit.name)
                continue
            here = Here(unit, source.tier, slot, room=room, reading=reading)
            self.piece_of(here).fingerprint = fingerprint
            self._fetched[unit.name] = here
            staging.here.append(here)
            mine.append(here)
        if not mine:
            return
        staging.waiting += 1
        pieces = [here.piece for here in mine if here.piece is not None]
        ended = partial(self._from_thread, self._came, reading, mine)
        if not self._read(source.tier, source.node, pieces, ended):
            for here in mine:
                here.touched, here.reading = False, None
                del self._fetched[here.unit.name]
                staging.refused.append(here.unit.name)
            self._arrived(staging, (), ())

    def piece_of(self, here: Here) -> Piece:
        """To read into its room, which is nobody else's as long as the store may write to it."""
        here.touched = True
        released = partial(self._from_thread, self._untouched, here)
        here.piece = Piece(here.unit.name, self.arena.view(here.slot), released=released)
        return here.piece

    def _untouched(self, here: Here) -> None:
        here.touched = False
        if here.dropped:
            self._free(here)

    def _came(self, reading: Reading, mine: Iterable[Here], report: Report) -> None:
        bad = {*report.failed, *report.damaged}
        for here in mine:
            here.reading = None
            if here.unit.name in bad and self._fetched.get(here.unit.name) is here:
                del self._fetched[here.unit.name]
        for staging in reading.stagings:
            self._arrived(staging, report.failed, report.damaged)

    def _arrived(self, staging: Staging, failed: Iterable[bytes], damaged: Iterable[bytes]) -> None:
        names = {here.unit.name for here in staging.here}
        staging.failed += [name for name in failed if name in names]
        staging.damaged += [name for name in damaged if name in names]
        staging.waiting -= 1
        if not staging.waiting:
            self._staged(staging)

    def adopt(self, unit: Unit) -> bool:
        """What was fetched for an engine stays in dram as a unit; False: it is not here."""
        here = self._fetched.get(unit.name)
        if here is None or here.reading is not None or here.piece is None or not here.room:
            return False
        piece = here.piece
        kept = Kept(here.slot, piece.checksum, unit.index, piece.tenant, piece.fingerprint)
        if here.touched or not self.dram.adopt(here.room, unit.name, kept):
            return False
        here.room = b""  # pinned from now on
        return True

    # -- ends -----------------------------------------------------------------------------------

    def _staged(self, staging: Staging) -> None:
        """All is here that will come: the machine says how far that reaches."""
        self._stagings.pop(staging.load.op, None)
        if staging.stopped:
            self.let_go(staging.here)
            self._done(staging.load.op, error="stopped")
            return
        name = staging.load.worker, staging.load.request
        if name in self._over:
            self.let_go(self._over.pop(name).here)
        self._over[name] = staging
        self._done(staging.load.op, staging.failed, staging.damaged, "", staging.refused)

    def say_ready(self, worker: str, request: str, tokens: int) -> None:
        """Tell the engine; what it is not going to read is let go of."""
        name = worker, request
        staging = self._over.pop(name, None)
        self.release(worker, request, used=False)
        if staging is None or staging.stopped or worker not in self.engines:
            self.let_go(staging.here if staging is not None else ())
            self._ready(worker, wire.Staged(request, tokens, why="not loaded"))
            return
        load = staging.load
        each = load.end == load.start  # a `Take`: every unit counts for itself
        if tokens <= load.start and not each:
            self.let_go(staging.here)
            self._ready(worker, wire.Staged(request, tokens, why="damaged or gone"))
            return
        grid = self.engines[worker].grid_tokens
        bad = {*staging.failed, *staging.damaged, *staging.refused}
        mine: list[Here] = []
        rest: list[Here] = []
        for here in staging.here:
            end = (here.unit.index + 1) * grid
            fits = here.unit.name not in bad and (each or end <= tokens)
            (mine if fits else rest).append(here)
        self.let_go(rest)
        tiers: Counter[str] = Counter()
        for here in mine:
            if here.unit.part is Part.BODY:
                tiers[here.tier.name.lower()] += grid
        self._held[name] = mine, tiers
        pieces = tuple(wire.Piece(h.unit.name, h.unit.part, h.unit.index, h.slot) for h in mine)
        self._ready(worker, wire.Staged(request, tokens, pieces, tuple(tiers.items())))

    def release(self, worker: str, request: str, *, used: bool) -> None:
        """What was staged for a request is read no more."""
        pieces, tiers = self._held.pop((worker, request), ((), Counter()))
        self.let_go(pieces)
        for tier, tokens in tiers.items():
            self.loaded[tier if used else f"{tier}_unused"] += tokens

    def let_go(self, pieces: Iterable[Here]) -> None:
        """One of those that they are for does not need them any more."""
        for here in pieces:
            here.users -= 1
            if here.users:
                continue
            if self._fetched.get(here.unit.name) is here:
                del self._fetched[here.unit.name]
            if not here.room:
                self.dram.unpin(here.slot)
            elif here.touched:
                here.dropped = True
            else:
                self._free(here)

    def _free(self, here: Here) -> None:
        owner = here.piece.tenant if here.piece is not None else ""
        self.dram.abort(here.room, here.slot, owner)

    def room_name(self, name: bytes) -> bytes:
        """For room that no ledger knows of."""
        self._number += 1
        return name + _STAGING + self._number.to_bytes(8, "big")

    def stop(self, op: int) -> None:
        """Ends when all its parts do."""
        for staging in (self._stagings.get(op), *self._over.values()):
            if staging is not None and staging.load.op == op:
                staging.stopped = True

    def gone(self, worker: str) -> None:
        """The process of an engine has ended."""
        self.engines.pop(worker, None)
        for name in [name for name in self._over if name[0] == worker]:
            self.let_go(self._over.pop(name).here)
        for name in [name for name in self._held if name[0] == worker]:
            self.release(*name, used=False)

    def held_of(self, meant: Callable[[str], bool]) -> int:
        """Pieces that engines may read still, of owners that are meant, from other tiers."""
        pieces = (here.piece for held, _ in self._held.values() for here in held)
        return sum(piece is not None and meant(piece.tenant) for piece in pieces)

    @property
    def held(self) -> int:
        """Requests for which something is held in the arena."""
        return len(self._held)

    def close(self) -> None:
        """Waits for what is being verified."""
        self._sums.shutdown(wait=True)
