"""Threads that do a store's work, within limits: a bounded queue, a deadline, one answer each.

Whatever a medium does, an operation ends by its deadline and says so once. A thread that hangs in
the kernel cannot be called back: what it touches is let go of (`Piece.released`) when it returns.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvatlas.dataplane.tiers.base import Counts, Finish, Piece, Report, let_go, well_formed
from kvatlas.errors import StoreError


class Why(enum.StrEnum):
    """Why a piece did not arrive. `DAMAGED` and what follows it: it is there, and wrong."""

    MISSING = "missing"
    FULL = "full"  # no room
    BUSY = "busy"  # too much is waiting: come back, or do without
    LATE = "late"  # not done by the deadline
    INVALID = "invalid"  # no bytes in a row, too long a name: the caller's fault
    IO = "io"  # the medium said no
    CLOSED = "closed"
    LOCKED = "locked"  # sealed with a key that is not known here
    ERASED = "erased"  # sealed with a key that was dropped
    NO_KEY = "no_key"  # none can be had to seal it with
    DAMAGED = "damaged"
    FOREIGN = "foreign"  # whole, but of another name, generation or fingerprint
    CONFLICT = "conflict"  # a value of other bytes is there under this name


_WRONG = (Why.DAMAGED, Why.FOREIGN, Why.CONFLICT)


class Batch:
    """One operation: its pieces, how each ended, and one call of ``done``."""

    def __init__(self, kind: str, pieces: Sequence[Piece], done: Finish, counts: Counts):
        """``kind`` is "read" or "write"; failures are counted under it."""
        self.until = 0.0
        self._kind = kind
        self._open = {id(piece): piece for piece in pieces}
        self._waiting = set(self._open)
        self._ends: list[tuple[bytes, Why | None]] = []
        self._done = done
        self._counts = counts
        self._lock = threading.Lock()
        self.over = False

    def start(self, piece: Piece) -> bool:
        """Work on a piece begins; False: it was given up before."""
        with self._lock:
            if self.over or id(piece) not in self._waiting:
                return False
            self._waiting.discard(id(piece))
            return True

    def settle(self, piece: Piece, why: Why | None) -> bool:
        """A piece ended; None: it arrived. False: nobody waits for that any more."""
        with self._lock:
            if self._open.pop(id(piece), None) is None:
                self._counts.add(f"{self._kind}_too_late")
                return False
            self._note(piece, why)
            if self._open:
                return True
            self.over = True
        self._tell()
        return True

    def end(self, why: Why) -> None:
        """Whatever has not ended has failed."""
        with self._lock:
            if self.over:
                return
            self.over = True
            left = list(self._open.values())
            idle = [piece for piece in left if id(piece) in self._waiting]
            self._open.clear()
            self._waiting.clear()
            for piece in left:
                self._note(piece, why)
        for piece in idle:
            let_go(piece, self._counts)
        self._tell()

    def _tell(self) -> None:
        """Once; what was waited with, views say, is not kept up to the deadline."""
        done, self._done = self._done, lambda _: None
        try:
            done(report(self._ends))
        except Exception:  # a fault of whoever asked must not end our threads
            self._counts.add("done_failed")

    def _note(self, piece: Piece, why: Why | None) -> None:
        self._ends.append((piece.name, why))
        if why is not None:
            self._counts.add(f"{self._kind}_{why}")


def report(ends: Iterable[tuple[bytes, Why | None]]) -> Report:
    """How an operation ended whose pieces ended so."""
    whys = dict(ends)
    failed = tuple(n for n, why in whys.items() if why is not None and why not in _WRONG)
    damaged = tuple(n for n, why in whys.items() if why in _WRONG)
    error = str(whys[failed[-1]]) if failed and len(failed) == len(whys) else ""
    silent = any(why in (Why.LATE, Why.IO) for why in whys.values())
    return Report(failed, damaged, error, silent)


def check(piece: Piece, *, filled: bool = False) -> None:
    """Raises StoreError for what cannot be stored, or (``filled``) not be read into."""
    if not well_formed(piece, into=filled):
        raise StoreError(f"{piece.name[:32]!r}: its name or its view is none that a store takes")


def unfit(piece: Piece, size_bytes: int, checksum: int, fingerprint: bytes) -> Why | None:
    """Why what is held is not what a read asks for."""
    if piece.fingerprint and piece.fingerprint != fingerprint:
        return Why.FOREIGN
    if len(piece.view) != size_bytes:
        return Why.DAMAGED
    return Why.DAMAGED if piece.checksum and checksum and piece.checksum != checksum else None


Task = Callable[[Batch, Piece], bool]  # True: the piece is still in use, and let go of later


class Workers:
    """``threads`` of them, with at most ``queue_max`` pieces waiting or in work."""

    def __init__(
        self, name: str, counts: Counts, *, threads: int, queue_max: int, deadline_s: float
    ) -> None:
        """``deadline_s``: after this many seconds an operation has failed."""
        self.counts = counts
        self._queue: queue.SimpleQueue[tuple[Batch, Piece, Task] | None] = queue.SimpleQueue()
        self._batches: deque[Batch] = deque()
        self._busy = 0
        self._queue_max = queue_max
        self._deadline_s = deadline_s
        self._turn = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        self._watch = threading.Thread(target=self._expire, name=f"{name}-clock", daemon=True)
        for thread in (*self._threads, self._watch):
            thread.start()

    def run(self, kind: str, pieces: Sequence[Piece], task: Task, done: Finish) -> None:
        """Call ``task`` on every piece; it settles the piece. Refused as busy as a whole."""
        batch = Batch(kind, pieces, done, self.counts)
        with self._turn:
            why = None
            if self._closed:
                why = Why.CLOSED
            elif self._busy + len(pieces) > self._queue_max:
                why = Why.BUSY
            else:
                self._busy += len(pieces)
                while self._batches and self._batches[0].over:
                    self._batches.popleft()
                batch.until = time.monotonic() + self._deadline_s
                self._batches.append(batch)
                if len(self._batches) == 1:
                    self._turn.notify_all()
        if why is not None or not pieces:
            batch.end(why or Why.CLOSED)
            return
        for piece in pieces:
            self._queue.put((batch, piece, task))

    def close(self) -> bool:
        """End what is under way; False: a thread hangs in the kernel and was left there."""
        with self._turn:
            self._closed = True
            batches = list(self._batches)
            self._turn.notify_all()
        for batch in batches:
            batch.end(Why.CLOSED)
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + self._deadline_s
        own = threading.current_thread()
        for thread in (*self._threads, self._watch):
            if thread is not own:
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads if thread is not own)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            batch, piece, task = job
            if batch.start(piece):
                kept = False
                try:
                    kept = task(batch, piece)
                except StoreError:
                    batch.settle(piece, Why.INVALID)
                except Exception:  # a fault of ours must not end the thread
                    self.counts.add("fault")
                    batch.settle(piece, Why.IO)
                if not kept:
                    let_go(piece, self.counts)
            with self._turn:
                self._busy -= 1
            del job, batch, piece, task  # no view is kept while there is nothing to do

    def _expire(self) -> None:
        """Operations have the same time each: the oldest is the next that is due."""
        while True:
            with self._turn:
                while self._batches and self._batches[0].over:
                    self._batches.popleft()
                if self._closed:
                    return
                head = self._batches[0] if self._batches else None
                left = head.until - time.monotonic() if head is not None else None
                if left is None or left > 0:
                    self._turn.wait(left)
                    continue
                self._batches.popleft()
            assert head is not None
            head.end(Why.LATE)
