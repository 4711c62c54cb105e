"""When requests arrive: at the trace's own times, or a think time after the answer before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvatlas.sim.timeline import Timeline
from kvatlas.workload.trace import TraceRequest

READ_AHEAD_MAX = 10_000  # requests that were read and have not arrived

Ask = Callable[[TraceRequest, Callable[[], None]], None]  # (request, what to call at its end)


class Arrivals:
    """Reads a trace as far as it must. ``ask`` gets each request when it arrives.

    Open loop: at ``arrival_s * time_scale``, whatever became of those before. Closed loop: where
    the trace knows the think time, that long after the session's answer before. A session's next
    turn is found up to ``READ_AHEAD_MAX`` requests ahead; beyond, it waits until it is read.
    """

    def __init__(
        self,
        timeline: Timeline,
        requests: Iterator[TraceRequest],
        ask: Ask,
        *,
        closed_loop: bool = False,
        time_scale: float = 1.0,
    ) -> None:
        self._timeline = timeline
        self._requests = requests
        self._ask = ask
        self._closed = closed_loop
        self._scale = time_scale
        self._ahead = 0
        self._read_all = False
        self._turns: dict[str, deque[TraceRequest]] = {}  # session → its turns to come
        self._answered: dict[str, float | None] = {}  # session → end of its last; None: running

    @property
    def done(self) -> bool:
        """Every request of the trace has arrived."""
        return self._read_all and not self._ahead

    def start(self) -> None:
        """Read the first requests."""
        self._fill()

    def _fill(self) -> None:
        most = READ_AHEAD_MAX if self._closed else 1
        while self._ahead < most and not self._read_all:
            request = next(self._requests, None)
            if request is None:
                self._read_all = True
                return
            self._ahead += 1
            if self._waits(request):
                self._turns.setdefault(request.session, deque()).append(request)
                self._next_turn(request.session)
            else:
                if self._closed and request.session:
                    self._answered.setdefault(request.session, None)
                self._timeline.at(request.arrival_s * self._scale, self._arrive, request)

    def _waits(self, request: TraceRequest) -> bool:
        """Is there a turn before it that it must wait for?"""
        return self._closed and request.think_s is not None and request.session in self._answered

    def _next_turn(self, session: str) -> None:
        turns = self._turns.get(session)
        ended_at = self._answered.get(session)
        if not turns or ended_at is None:
            return
        request = turns.popleft()
        if not turns:
            del self._turns[session]
        self._answered[session] = None
        think_s = (request.think_s or 0.0) * self._scale
        self._timeline.at(ended_at + think_s, self._arrive, request)

    def _arrive(self, request: TraceRequest) -> None:
        self._ahead -= 1
        self._ask(request, lambda: self._ended(request.session))
        self._fill()

    def _ended(self, session: str) -> None:
        if self._closed and session:
            self._answered[session] = self._timeline.now
            self._next_turn(session)
