"""Loads: all of one is brought into the arena, verified and held before its engine hears of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit
from kvatlas.dataplane.arena import Arena, Slot
from kvatlas.dataplane.tiers.base import Piece, Report, checksum_of
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.dram import DramStore
from kvatlas.service import agent_wire as wire

_STAGING = b"\xff"  # after a unit's name: room that no ledger knows of


class Engine(msgspec.Struct, frozen=True):
    """What has to be known of an engine that is attached."""

    fingerprint: bytes
    grid_tokens: int


class Here(msgspec.Struct, eq=False):
    """A unit of a load in the arena. ``room``: under which it is reserved, where it is read from
    elsewhere; else it is pinned. ``touched``: a store may still write to it."""

    unit: Unit
    tier: Tier
    slot: Slot
    checksum: int = 0
    room: bytes = b""
    bad: str = ""
    touched: bool = False
    dropped: bool = False


class Staging(msgspec.Struct, eq=False):
    """A load on its way: what is here, what is missing, and how many answers are still to come."""

    load: words.Load
    here: list[Here]
    waiting: int
    failed: list[bytes]
    damaged: list[bytes]
    stopped: bool = False


class End(Protocol):
    """Tells the machine that an operation is over."""

    def __call__(
        self, op: int, failed: Iterable[bytes] = (), damaged: Iterable[bytes] = (), error: str = ""
    ) -> None:
        """As `core.agent_values.Done`."""


class Loads:
    """Of one node. For the event loop's thread alone."""

    def __init__(
        self,
        arena: Arena,
        dram: DramStore,
        disk: DiskStore | None,
        *,
        post: Callable[..., None],
        done: End,
        ready: Callable[[str, wire.Staged], None],
        threads: int,
    ) -> None:
        """``post`` calls something in the loop's thread; ``ready`` is told of every end."""
        self.arena = arena
        self.dram = dram
        self.disk = disk
        self.engines: dict[str, Engine] = {}
        self.counts: Counter[str] = Counter()
        self.loaded: Counter[str] = Counter()  # tokens that engines loaded, by tier
        self._from_thread = post
        self._done = done
        self._ready = ready
        self._sums = ThreadPoolExecutor(threads, "agent-sums")
        self._stagings: dict[int, Staging] = {}
        self._over: dict[tuple[str, str], Staging] = {}  # done, and `Ready` is about to come
        # What engines may read, and how many tokens it is from each tier.
        self._held: dict[tuple[str, str], tuple[Sequence[Here], Counter[str]]] = {}
        self._number = 0

    def begin(self, load: words.Load) -> None:
        """Bring everything to where the engine can copy it from, and verify it there."""
        staging = Staging(load, [], 0, [], [])
        self._stagings[load.op] = staging
        fingerprint = self.engines[load.worker].fingerprint
        far: dict[Tier, list[Piece]] = {}
        for source in load.sources:
            for unit in source.units:
                if source.tier is Tier.DRAM:
                    self._pin(staging, unit, fingerprint)
                elif source.tier is Tier.DISK and self.disk is not None:
                    room = self.room_name(unit.name)
                    slot = self.dram.reserve(room, unit.size_bytes)
                    if slot is None:
                        self.counts["staging_full"] += 1
                        staging.failed.append(unit.name)
                        continue
                    here = Here(unit, source.tier, slot, room=room)
                    staging.here.append(here)
                    piece = self.reading(here)
                    piece.fingerprint = fingerprint
                    far.setdefault(source.tier, []).append(piece)
                else:
                    staging.failed.append(unit.name)
        near = [h for h in staging.here if not h.room]
        staging.waiting = len(far) + bool(near)
        if near:
            self._sums.submit(self._verify, staging, near)
        for pieces in far.values():
            self._read(staging, pieces)
        if not staging.waiting:
            self._staged(staging)

    def _pin(self, staging: Staging, unit: Unit, fingerprint: bytes) -> None:
        kept = self.dram.pin(unit.name)
        if kept is None:
            staging.failed.append(unit.name)
            return
        here = Here(unit, Tier.DRAM, kept.slot, kept.checksum)
        if kept.slot.size_bytes != unit.size_bytes or kept.fingerprint != fingerprint:
            here.bad = "another unit"
        staging.here.append(here)

    def _verify(self, staging: Staging, pieces: Sequence[Here]) -> None:
        """In a thread: find those whose bytes are not what was saved."""
        wrong = []
        for here in pieces:
            if here.bad or checksum_of(self.arena.view(here.slot)) != here.checksum:
                wrong.append(here.unit.name)
        self._from_thread(self._arrived, staging, Report((), tuple(wrong)))

    def reading(self, here: Here) -> Piece:
        """A read into its room, which is nobody else's as long as the store may write to it."""
        here.touched = True

        def released() -> None:
            self._from_thread(self._untouched, here)

        return Piece(here.unit.name, self.arena.view(here.slot), released=released)

    def _untouched(self, here: Here) -> None:
        here.touched = False
        if here.dropped:
            self.dram.abort(here.room, here.slot)

    def _read(self, staging: Staging, pieces: list[Piece]) -> None:
        assert self.disk is not None

        def done(report: Report) -> None:
            self._from_thread(self._arrived, staging, report)

        self.disk.read(pieces, done)

    def _arrived(self, staging: Staging, report: Report) -> None:
        staging.failed += report.failed
        staging.damaged += report.damaged
        staging.waiting -= 1
        if not staging.waiting:
            self._staged(staging)

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
        self._done(staging.load.op, staging.failed, staging.damaged)

    def say_ready(self, worker: str, request: str, tokens: int) -> None:
        """Tell the engine; what it is not going to read is let go of."""
        name = worker, request
        staging = self._over.pop(name, None)
        self.release(worker, request, used=False)
        if staging is None or worker not in self.engines:
            self.let_go(staging.here if staging is not None else ())
            self._ready(worker, wire.Staged(request, tokens, why="not loaded"))
            return
        load = staging.load
        if tokens <= load.start:
            self.let_go(staging.here)
            self._ready(worker, wire.Staged(request, tokens, why="damaged or gone"))
            return
        grid = self.engines[worker].grid_tokens
        bad = {*staging.failed, *staging.damaged}
        mine: list[Here] = []
        rest: list[Here] = []
        for here in staging.here:
            end = (here.unit.index + 1) * grid
            fits = here.unit.name not in bad and end <= tokens
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
        for here in pieces:
            if not here.room:
                self.dram.unpin(here.slot)
            elif here.touched:
                here.dropped = True
            else:
                self.dram.abort(here.room, here.slot)

    def room_name(self, name: bytes) -> bytes:
        """For room that no ledger knows of."""
        self._number += 1
        return name + _STAGING + self._number.to_bytes(8, "big")

    def stop(self, op: int) -> None:
        """Ends when all its parts do."""
        if (staging := self._stagings.get(op)) is not None:
            staging.stopped = True

    def gone(self, worker: str) -> None:
        """The process of an engine has ended."""
        self.engines.pop(worker, None)
        for name in [name for name in self._over if name[0] == worker]:
            self.let_go(self._over.pop(name).here)
        for name in [name for name in self._held if name[0] == worker]:
            self.release(*name, used=False)

    @property
    def held(self) -> int:
        """Requests for which something is held in the arena."""
        return len(self._held)

    def close(self) -> None:
        """Waits for what is being verified."""
        self._sums.shutdown(wait=True)
