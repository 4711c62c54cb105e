"""A process's event loop as something that goes wrong: it stands still, ends, its clock jumps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvatlas.sim.timeline import Timeline, Timer


class _LoopTimer(Timer):
    __slots__ = ("inner",)

    inner: Timer | None

    def cancel(self) -> None:
        self.call = None
        self.args = ()
        if self.inner is not None:
            self.inner.cancel()


class Loop(Timeline):
    """A process's own timeline on the world's. While it is stalled whatever is due waits: what
    came over the network first, then timers, as asyncio's loop takes them.

    ``now`` is the process's steady clock: it may jump forward, and never goes back.
    """

    def __init__(self, world: Timeline) -> None:
        self._world = world
        self._offset_s = 0.0
        super().__init__()
        self._stalled_until = 0.0
        self._ended = False
        self._inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._late: list[_LoopTimer] = []
        self._timers: dict[int, _LoopTimer] = {}  # in the order of asking

    @property
    def now(self) -> float:
        """Seconds on the process's steady clock."""
        return self._world.now + self._offset_s

    @now.setter
    def now(self, value: float) -> None:
        assert value == 0.0, "only the base class sets it, once"

    def at(self, when: float, call: Callable[..., None], *args: Any) -> Timer:
        """As `Timeline.at`, on this clock."""
        timer = _LoopTimer(self, max(when, self.now), call, args)
        self._asked += 1
        self._arm(self._asked, timer)
        return timer

    def call(self, call: Callable[..., None], *args: Any) -> None:
        """Something arrives from outside: now, or when the loop moves again."""
        if self._ended:
            return
        if self._inbox or self._world.now < self._stalled_until:
            self._inbox.append((call, args))
        else:
            call(*args)

    def stall(self, seconds: float) -> None:
        """Stand still from now on."""
        self._stalled_until = max(self._stalled_until, self._world.now + seconds)
        self._world.at(self._stalled_until, self._wake)

    def jump(self, seconds: float) -> None:
        """The clock is that much further on, all of a sudden: timers that it passed are due."""
        self._offset_s += seconds
        for number, timer in list(self._timers.items()):
            if timer.inner is not None:
                timer.inner.cancel()
            self._arm(number, timer)

    def end(self) -> None:
        """The process is killed: nothing of it happens any more."""
        self._ended = True
        self._inbox.clear()
        self._late.clear()
        for timer in list(self._timers.values()):
            timer.cancel()
        self._timers.clear()

    @property
    def moves(self) -> bool:
        """Neither ended nor standing still."""
        return not self._ended and self._world.now >= self._stalled_until

    def _arm(self, number: int, timer: _LoopTimer) -> None:
        if timer.call is None or self._ended:
            self._timers.pop(number, None)
            return
        self._timers[number] = timer
        when = timer.at - self._offset_s
        while when + self._offset_s < timer.at:  # rounding: called too early it would ask for ever
            when = math.nextafter(when, math.inf)
        timer.inner = self._world.at(when, self._due, number, timer)

    def _due(self, number: int, timer: _LoopTimer) -> None:
        self._timers.pop(number, None)
        if self._world.now < self._stalled_until:
            self._late.append(timer)
        else:
            _run(timer)

    def _wake(self) -> None:
        if self._world.now < self._stalled_until:
            return
        while self._inbox:
            call, args = self._inbox.pop(0)
            call(*args)
        late, self._late = self._late, []
        for timer in late:
            _run(timer)


def _run(timer: Timer) -> None:
    call, timer.call = timer.call, None
    if call is not None:
        call(*timer.args)
