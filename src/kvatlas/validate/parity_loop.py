"""An event loop with real sockets and virtual time: time passes only when nothing is on its way.

What is on its way is told by whoever runs it: bytes in sockets and batches in ZMQ's threads cannot
be seen from here. While anything is, the loop waits for it in real time and the clock stands still;
then the clock jumps to what is due next. So whatever runs on it takes no time but what it asks for.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
import time
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeVarTuple

from kvatlas.errors import EngineError

STUCK_S = 30.0  # real seconds in which nothing moves, although something is on its way
_LOOK_S = 0.005  # between two looks at what is on its way

_Ts = TypeVarTuple("_Ts")
Travelling = Callable[[], str]  # what is on its way, "" when nothing is


class _Selector(selectors.DefaultSelector):
    """Asks its loop what to do when nothing is ready."""

    idle: Callable[[], bool] | None = None  # True: time went on, something is due
    heard_at = 0.0  # real seconds, when something was last ready

    def select(self, timeout_s: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.idle is None:
            return super().select(timeout_s)
        found = super().select(0)
        if found:
            self.heard_at = time.monotonic()
        if found or timeout_s == 0 or self.idle():
            return found
        return super().select(_LOOK_S)


class QuietLoop(asyncio.SelectorEventLoop):
    """An ordinary loop, whose clock begins at 0, until `go_virtual`. It never goes back."""

    _clock_resolution: float

    def __init__(self) -> None:
        self._now: float | None = None
        self._offset_s = -time.monotonic()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._later: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._travelling: Travelling = lambda: ""
        self._quiet_selector = _Selector()
        super().__init__(self._quiet_selector)

    def time(self) -> float:
        """Real before `go_virtual`, the virtual time from then on."""
        return time.monotonic() + self._offset_s if self._now is None else self._now

    def go_virtual(self, now: float, travelling: Travelling) -> None:
        """From here on time is virtual, and goes on at ``now``, which must not be past."""
        assert now >= self.time()
        self._travelling = travelling
        self._quiet_selector.idle = self._idle
        self._set(now)

    def go_real(self) -> None:
        """From here on the clock goes as the real one."""
        self._quiet_selector.idle = None
        self._offset_s = self.time() - time.monotonic()
        self._now = None

    def when_quiet(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` at ``when``, once nothing else happens or is on its way then."""
        heapq.heappush(self._later, (when, next(self._numbers), call, args))

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As every loop's."""
        handle = super().call_at(when, callback, *args, context=context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    # -- inside ---------------------------------------------------------------------------------

    def _set(self, now: float) -> None:
        self._now = now
        # The base class runs what is due before time() plus this: exactly what is due now.
        self._clock_resolution = math.ulp(now)
        self._quiet_selector.heard_at = time.monotonic()

    def _idle(self) -> bool:
        what = self._travelling()
        if what:
            if time.monotonic() - self._quiet_selector.heard_at > STUCK_S:
                at = self._now
                self.go_real()  # so that what runs can still be ended
                raise EngineError(f"nothing moved for {STUCK_S:g} s at {at} s: {what}")
            return False
        assert self._now is not None
        timers, later = self._timers, self._later
        while timers and (timers[0][2].cancelled() or timers[0][0] <= self._now):
            heapq.heappop(timers)
        if later and (not timers or later[0][0] < timers[0][0]):
            when, _, call, args = heapq.heappop(later)
            self._set(max(when, self._now))
            self.call_soon(call, *args)
            return True
        if timers:
            self._set(timers[0][0])
            return True
        return False
