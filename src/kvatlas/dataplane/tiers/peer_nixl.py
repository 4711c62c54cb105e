"""Another agent's dram by NIXL: straight from its slots into ours.

All that is agreed goes over the connection that `peer` has anyway. A reader asks for a *loan*: the
owner pins what there is of some names and says where it lies; the reader checks that, lets its NIXL
process read, and says so; the owner says of each slot whether it was still the same, and unpins.
Then checksums are verified as always. Whatever does not work is read over TCP instead, and why is
counted. A loan is longer than any read; one whose reader says nothing ends with its connection.

A late read is given up by killing the process that reads, and its slots are nobody else's until it
is dead: nothing is written into a slot that has another owner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.extents import GRAIN_BYTES
from kvatlas.dataplane.records import Label
from kvatlas.dataplane.tiers import framing
from kvatlas.dataplane.tiers.base import Counts, Piece
from kvatlas.dataplane.tiers.dram import DramStore, Unit
from kvatlas.dataplane.tiers.moved import Moved
from kvatlas.dataplane.tiers.nixl import Nixl
from kvatlas.dataplane.tiers.nixl_wire import Ready
from kvatlas.dataplane.tiers.peer_wire import MISSED, SAME, Request, ask, bulk, exactly, tell
from kvatlas.dataplane.tiers.runs import RUN_PIECES, Outcome, Refused
from kvatlas.dataplane.tiers.sockets import Stream

READ_S = 4.0  # one read at most; less where the deadline is nearer
LOAN_S = 10.0  # longer than that
JOIN_S = 2.0
REST_S = 30.0  # over TCP after a failure
LOAN_BYTES = 8 << 20  # pinned at once for one reader; the next is read while this one is verified
ANSWER_BYTES_MAX = 1 << 20
METADATA_BYTES_MAX = 1 << 16
EPOCH_BYTES = 16
_OVER, _GIVEN_UP = b"\1", b"\0"
_QUESTIONS = 3  # for one loan: processes that start anew all the time are not waited for
_encode = msgspec.msgpack.Encoder().encode
Labels = Sequence[Label | None]
Judge = Callable[[Outcome, str, Labels, Sequence[int | None], bytes], list[bytes]]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A value: the label that stands before values elsewhere, and where it lies, from where slots
    begin. No head: it is not there."""

    head: bytes = b""
    offset: int = 0
    size_bytes: int = 0


class Loan(msgspec.Struct, frozen=True, array_like=True):
    """The owner's answer. ``why`` there is none; ``there``: of a process that the reader does not
    know, and nothing is lent yet; else places of the first names."""

    why: str = ""
    there: Ready | None = None
    places: list[Place] = []


_loan = msgspec.msgpack.Decoder(Loan)


# -- the owner ------------------------------------------------------------------------------------


class Lender:
    """What an owner does for those who read by NIXL."""

    def __init__(
        self,
        dram: DramStore,
        nixl: Nixl | None,
        head_of: Callable[[bytes, Unit, memoryview], bytes],
        counts: Counts,
    ) -> None:
        """``head_of``: the label of a unit. Without ``nixl`` nothing is lent."""
        self._dram = dram
        self._nixl = nixl
        self._head_of = head_of
        self._counts = counts

    def serve(self, link: Stream, request: Request) -> None:
        """One loan, from its question to its end. Raises OSError."""
        loan, units = self._loan(request.names, request.loan or b"")
        link.until = time.monotonic() + LOAN_S
        try:
            tell(link, _encode(loan))
            if not units:
                return
            over = exactly(link, 1) == _OVER
            arena = self._dram.arena
            same = [unit is not None and arena.current(unit.slot) for unit in units]
        finally:
            self._end(units)
        for unit, ok in zip(units, same, strict=True) if over else ():
            self._counts.add("missing" if unit is None else "lent" if ok else "recycled")
        link.send([b"".join(SAME if ok else MISSED for ok in same)])

    def _loan(self, names: Sequence[bytes], epoch: bytes) -> tuple[Loan, list[Unit | None]]:
        """What to say, and what is pinned by it."""
        if self._nixl is None:
            return Loan("no_nixl_there"), []
        there = self._nixl.ready()
        if there is None or there.epoch != epoch:
            there = self._nixl.alive()
            return Loan("not_ready_there") if there is None else Loan("", there), []
        units: list[Unit | None] = []
        places: list[Place] = []
        pinned = 0
        try:
            for name in names[:RUN_PIECES]:
                if pinned >= LOAN_BYTES:
                    break
                units.append(unit := self._dram.pin(name))
                if unit is None:
                    places.append(Place())
                    continue
                head = self._head_of(name, unit, self._dram.arena.view(unit.slot))
                places.append(Place(head, unit.slot.offset, unit.slot.size_bytes))
                pinned += unit.slot.size_bytes
        except BaseException:
            self._end(units)
            raise
        return Loan("", None, places), units

    def _end(self, units: Sequence[Unit | None]) -> None:
        for unit in units:
            if unit is not None:
                self._dram.unpin(unit.slot)


# -- the reader -----------------------------------------------------------------------------------


class Borrowed(msgspec.Struct, frozen=True):
    """A loan that makes sense: labels of the first pieces, and what is to be read: offset in our
    arena, in theirs, bytes."""

    epoch: bytes
    labels: list[Label | None]
    reads: list[tuple[int, int, int]]


class Reader:
    """One peer's, with a process of its own: what UCX says there is of this peer alone."""

    def __init__(
        self, arena: Arena, nixl: Nixl, *, only: bool = False, emulated: bool = False
    ) -> None:
        """``nixl`` is closed with it. ``only``: nothing is read over TCP instead. ``emulated``:
        also where UCX has no transport that reads, and sends messages, slower than TCP alone."""
        self._nixl = nixl
        self._arena = arena
        self.only = only
        self._emulated = emulated
        self._lock = threading.Lock()
        self._joined: Ready | None = None
        self._transport = ""
        self._why = ""
        self._rests_until = 0.0

    def status(self) -> dict[str, object]:
        """For people: how it reads, or why it does not now."""
        rests = time.monotonic() < self._rests_until
        counts = self._nixl.counts.all()
        return {"transport": self._transport, "rests": self._why if rests else "", "counts": counts}

    @property
    def fault(self) -> str:
        """What is wrong, and should be seen to: not that TCP is better, or the peer not ready."""
        if self._nixl.child.failed:
            return "its process ended, or does not start"
        rests = time.monotonic() < self._rests_until
        meant = self._why.endswith("_there") or self._why.startswith("only_")
        return self._why if rests and not meant else ""

    def close(self) -> None:
        """Its process is gone afterwards."""
        self._nixl.close()

    def borrow(self, link: Stream, outcome: Outcome, moved: Moved, judge: Judge) -> list[bytes]:
        """What is open, as far as it goes; what is left is to be read otherwise. Names of what is
        wrong there. Raises OSError, ValueError, and Refused where there is no otherwise."""
        broken: list[bytes] = []
        while outcome.open:
            pieces = outcome.open[:RUN_PIECES]
            asked, why = self._asked(link, pieces), ""
            borrowed = None if isinstance(asked, str) else self._checked(pieces, *asked)
            if isinstance(asked, str):
                why = asked
            elif borrowed is None:
                link.send([_GIVEN_UP])
                exactly(link, len(asked[1].places))
                why = self._rest("senseless")
            else:
                with moved.timed(self._transport):
                    why = self._read(borrowed, link.until)
                    if why:  # before anything else can fail
                        self._settle(outcome, len(borrowed.labels))
                    link.send([_GIVEN_UP if why else _OVER])
                    flags = exactly(link, len(borrowed.labels))
                    if not why:
                        sums = [None] * len(flags)
                        broken += judge(outcome, self._transport, borrowed.labels, sums, flags)
                        continue
                moved.failed(self._transport)
            moved.instead(why)
            if self.only:
                raise Refused("no_nixl", f"it is to be read by NIXL alone, which fails: {why}")
            break
        return broken

    # -- agreeing -------------------------------------------------------------------------------

    def _asked(self, link: Stream, pieces: Sequence[Piece]) -> tuple[Ready, Loan] | str:
        """A loan, and of which process; or why there is none."""
        if time.monotonic() < self._rests_until:
            return self._why
        if self._nixl.ready() is None:
            return "starting"
        if any(self._arena.offset_of(piece.view) is None for piece in pieces):
            return "outside"
        for _ in range(_QUESTIONS):
            joined = self._joined
            epoch = b"" if joined is None else joined.epoch
            ask(link, Request([piece.name for piece in pieces], loan=epoch))
            try:
                loan = _loan.decode(bulk(link, ANSWER_BYTES_MAX))
            except msgspec.MsgspecError as error:
                raise ValueError(f"a loan is garbled: {error}") from error
            if loan.why:
                return self._rest(loan.why)
            if loan.there is None and joined is not None:
                return joined, loan
            if loan.there is None:  # of no process that could be known
                return self._rest("restless")
            if why := self._join(loan.there, link.until):
                return why
        return self._rest("restless")

    def _join(self, there: Ready, until: float) -> str:
        """Why not, or ""."""
        mine = self._nixl.ready()
        if mine is None:
            return "starting"
        if there.version != mine.version:
            return self._rest("version")
        ends = there.address + there.size_bytes
        small = len(there.epoch) == EPOCH_BYTES and len(there.metadata) <= METADATA_BYTES_MAX
        if not small or not 0 < there.address < ends < 1 << 64:
            return self._rest("senseless")
        with self._lock:
            ended = self._nixl.join(there, min(until, time.monotonic() + JOIN_S))
            if ended.why in ("another", "starting"):  # a new life there; ours begins one, too
                return "starting"
            if ended.why:
                return self._rest(f"join_{ended.why}")
            if ended.emulated and not self._emulated:
                return self._rest(f"only_{ended.transport}")
            self._joined, self._transport = there, f"nixl/{ended.transport}"
        return ""

    def _checked(self, pieces: Sequence[Piece], there: Ready, loan: Loan) -> Borrowed | None:
        """None where the owner's words make no sense: nothing is read by them."""
        if not 0 < len(loan.places) <= len(pieces):
            return None
        labels: list[Label | None] = []
        reads: list[tuple[int, int, int]] = []
        for piece, place in zip(pieces, loan.places, strict=False):
            label = framing.unpack(place.head) if place.head else None
            labels.append(label)
            if not place.head:
                continue
            ends = place.offset + place.size_bytes
            if label is None or label.size_bytes != place.size_bytes or place.size_bytes < 1:
                return None
            if place.offset < 0 or place.offset % GRAIN_BYTES or ends > there.size_bytes:
                return None
            here = self._arena.offset_of(piece.view)
            if here is not None and place.size_bytes == piece.view.nbytes:
                reads.append((here, place.offset, place.size_bytes))
        return Borrowed(there.epoch, labels, reads)

    # -- reading --------------------------------------------------------------------------------

    def _read(self, borrowed: Borrowed, until: float) -> str:
        """Why not, or ""; by half of what is left of the time, so that some is left for TCP."""
        if not borrowed.reads:
            return ""
        now = time.monotonic()
        why = self._nixl.read(borrowed.epoch, borrowed.reads, now + min(READ_S, (until - now) / 2))
        if why:
            self._joined = None
        return why if why in ("", "not_joined") else self._rest(why)

    def _settle(self, outcome: Outcome, count: int) -> None:
        """After a read that failed. Where the process that read is not dead yet, the first pieces
        that are open end as failed, and are let go of when it is."""
        pieces = outcome.open[:count]
        released = [piece.released for piece in pieces]
        if None in released:  # whoever gave it counts on its place when all has ended
            self._nixl.child.wait()
        elif self._nixl.child.after(partial(_let_go, released)):
            for piece in pieces:
                piece.released = None
                outcome.fail("late")

    def _rest(self, why: str) -> str:
        """Over TCP for a while."""
        self._why = why
        self._rests_until = time.monotonic() + REST_S
        return why


def _let_go(released: Sequence[Callable[[], None] | None]) -> None:
    for release in released:
        if release is not None:
            release()
