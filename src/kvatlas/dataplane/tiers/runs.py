"""Operations cut into runs, worked off by a few threads with a connection each, by a deadline.

What a store beyond the node has of its own is how a run goes over one connection; queueing,
joining, deadlines, reconnection, counting and the end of it all are here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from kvatlas.dataplane.tiers import framing
from kvatlas.dataplane.tiers.base import Counts, Finish, Piece, Report, let_go
from kvatlas.errors import ConfigError

RUN_BYTES = 8 << 20
RUN_BYTES_MIN = 1 << 20
RUN_PIECES = 128
_NO = {"busy": "too much waits already", "closed": "the store was closed"}


class Refused(Exception):
    """The other side said no, in a way that another try would not mend. ``reason`` is counted."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Outcome:
    """What became of one run so far. Pieces end in their order; those that did not are open."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self.open = list(pieces)
        self.arrived = 0
        self.failed: list[bytes] = []
        self.damaged: list[bytes] = []
        self.why = ""  # of the last that failed
        self.silent = False  # the other side did not answer

    def arrive(self) -> None:
        """The first open piece is where it belongs."""
        del self.open[0]
        self.arrived += 1

    def fail(self, why: str = "missing") -> None:
        """The first open piece is not there, or could not be written."""
        self.why = why
        self.failed.append(self.open.pop(0).name)

    def damage(self) -> None:
        """The first open piece is there, and wrong."""
        self.damaged.append(self.open.pop(0).name)


class Link(Protocol):
    """One connection. ``until`` bounds every call on it."""

    until: float

    def abort(self) -> None:
        """Ends what waits in a call, from another thread."""

    def close(self) -> None:
        """Gives it back; again: nothing."""


L = TypeVar("L", bound=Link)
Work = Callable[[L, Outcome], None]


class _Joint:
    """Calls ``done`` once, when the last run of an operation has ended."""

    def __init__(self, runs: int, done: Finish) -> None:
        self._lock = threading.Lock()
        self._left = runs
        self._done = done
        self._arrived = 0
        self._failed: list[bytes] = []
        self._damaged: list[bytes] = []
        self._error = ""
        self._silent = False

    def ended(self, outcome: Outcome, error: str) -> None:
        with self._lock:
            self._left -= 1
            self._arrived += outcome.arrived
            self._failed += outcome.failed + [piece.name for piece in outcome.open]
            self._damaged += outcome.damaged
            self._error = self._error or error or outcome.why
            self._silent = self._silent or outcome.silent
            if self._left:
                return
        none = not self._arrived and not self._damaged
        error = self._error if none else ""
        self._done(Report(tuple(self._failed), tuple(self._damaged), error, self._silent))


class _Job(Generic[L]):
    def __init__(self, outcome: Outcome, work: Work[L], until: float, joint: _Joint) -> None:
        self.outcome = outcome
        self.work = work
        self.until = until
        self.joint = joint


class Runs(Generic[L]):
    """``streams`` threads, each with one connection; at most ``queue_max`` runs wait."""

    def __init__(
        self,
        name: str,
        connect: Callable[[float], L],
        greet: Callable[[L], None],
        *,
        streams: int = 4,
        queue_max: int = 1024,
        deadline_s: float = 10.0,
        run_bytes: int = RUN_BYTES,
    ) -> None:
        """``connect`` makes a connection by a deadline, ``greet`` says there what comes first.
        ``run_bytes``: what may be asked for at once; an operation is spread over all streams."""
        if streams < 1 or queue_max < 1 or not 0 < deadline_s < 86400:
            raise ConfigError(
                f"{name}: streams ({streams}) and queue_max ({queue_max}) must be at least 1,"
                f" deadline_s ({deadline_s}) above 0 and below a day"
            )
        self.name = name
        self.deadline_s = deadline_s
        self.counts = Counts()
        self._connect = connect
        self._greet = greet
        self._queue_max = queue_max
        self._streams = streams
        self._run_bytes = run_bytes
        self._queue: queue.SimpleQueue[_Job[L] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._links: set[L] = set()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._loop, name=f"kvatlas-{name}-{i}", daemon=True)
            for i in range(streams)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, pieces: Sequence[Piece], work: Work[L], done: Finish, *, into: bool = False
    ) -> None:
        """``done`` is called by the deadline, from one of the threads; at once where nothing can
        be tried: too much waits, the store is closed, no piece is fit. ``into``: a read."""
        fit: list[Piece] = []
        unfit: list[Piece] = []
        for piece in pieces:
            (fit if framing.fit(piece, into=into) else unfit).append(piece)
        bad = Outcome(unfit)
        until = time.monotonic() + self.deadline_s
        share = sum(piece.view.nbytes for piece in fit) // self._streams + 1
        size = max(min(share, self._run_bytes), RUN_BYTES_MIN)
        cut = [Outcome(run) for run in _cut(fit, size)]
        joint = _Joint(len(cut) + 1, done)
        self._end(bad, joint, self._lost("invalid", "not fit to be stored") if bad.open else "")
        with self._lock:
            no = "closed" if self._closed else ""
            if not no and self._queue.qsize() + len(cut) > self._queue_max:
                no = "busy"
            for outcome in () if no else cut:
                self._queue.put(_Job(outcome, work, until, joint))
        for outcome in cut if no else ():
            self._end(outcome, joint, self._lost(no, _NO[no]))

    def opened(self) -> L:
        """A connection of the caller's own, who closes it. Raises OSError, Refused."""
        link = self._connect(time.monotonic() + self.deadline_s)
        try:
            self._greet(link)
        except BaseException:
            link.close()
            raise
        return link

    def close(self) -> None:
        """What is in flight or waits ends as failed; the threads are gone afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
            for link in self._links:
                link.abort()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a ``done`` may close
                thread.join(self.deadline_s + 1)

    def _loop(self) -> None:
        link: L | None = None
        while (job := self._queue.get()) is not None:
            error = ""
            try:
                link = self._work(link, job)
            except TimeoutError:
                job.outcome.silent = True
                error = self._lost("timeout", f"not done within {self.deadline_s:g} s")
            except OSError as problem:
                job.outcome.silent = True
                error = self._lost("broken", str(problem) or type(problem).__name__)
            except Refused as problem:
                error = self._lost(problem.reason, str(problem))
            except ValueError as problem:
                error = self._lost("garbled", str(problem))
            except Exception as problem:  # a fault of ours must not end the thread
                error = self._lost("fault", f"{type(problem).__name__}: {problem}")
            if error:
                link = None  # `_work` has closed it
            self._end(job.outcome, job.joint, error)
        self._forget(link)

    def _work(self, link: L | None, job: _Job[L]) -> L:
        """On an old connection that turns out dead, once more on a new one: all work is
        idempotent. The link in use is in ``_links`` while it lives."""
        for again in (False, True):
            if self._closed or time.monotonic() >= job.until:
                self._forget(link)
                raise Refused("closed", _NO["closed"]) if self._closed else TimeoutError
            new = link is None
            now = self._open(job.until) if link is None else link
            now.until = job.until
            link = None
            try:
                job.work(now, job.outcome)
                return now
            except BaseException as problem:
                self._forget(now)
                if new or again or not isinstance(problem, (ConnectionError, ValueError)):
                    raise
        raise AssertionError("the second try is on a new connection")

    def _open(self, until: float) -> L:
        link = self._connect(until)
        with self._lock:
            self._links.add(link)
            if self._closed:
                link.abort()
        try:
            self._greet(link)
        except BaseException:
            self._forget(link)
            raise
        return link

    def _forget(self, link: L | None) -> None:
        if link is not None:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _lost(self, reason: str, text: str) -> str:
        self.counts.add(f"failed_{reason}")
        return f"{self.name}: {text}"

    def _end(self, outcome: Outcome, joint: _Joint, error: str) -> None:
        self.counts.add("pieces", outcome.arrived)
        self.counts.add("missing", len(outcome.failed))
        self.counts.add("damaged", len(outcome.damaged))
        self.counts.add("open", len(outcome.open))
        for piece in outcome.pieces:
            let_go(piece, self.counts)
        try:
            joint.ended(outcome, error)
        except Exception:  # the caller's; the thread goes on, the counter tells
            self.counts.add("done_raised")


def _cut(pieces: Sequence[Piece], run_bytes: int) -> Iterable[list[Piece]]:
    run: list[Piece] = []
    size_bytes = 0
    for piece in pieces:
        if run and (size_bytes >= run_bytes or len(run) >= RUN_PIECES):
            yield run
            run, size_bytes = [], 0
        run.append(piece)
        size_bytes += piece.view.nbytes
    if run:
        yield run
