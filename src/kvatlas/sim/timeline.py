"""Virtual time: one heap of what is due, and nothing else that could tell two runs apart."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

_Call = tuple[Callable[..., None], tuple[Any, ...]]
_DEAD_MIN = 1024  # cancelled entries are swept out when they are many, and most of the heap


class Timer:
    """One call that is due at ``at`` (seconds). `cancel` it as often as you like."""

    __slots__ = ("_timeline", "args", "at", "call")

    def __init__(
        self, timeline: Timeline, at: float, call: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        self._timeline = timeline
        self.at = at
        self.call: Callable[..., None] | None = call
        self.args = args

    def cancel(self) -> None:
        """It will not be called; after it was, this does nothing."""
        if self.call is not None:
            self.call = None
            self.args = ()
            self._timeline._cancelled()


class Timeline:
    """Time moves from one due call to the next; equal times run in the order of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Timer | _Call]] = []
        self._asked = 0
        self._dead = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> Timer:
        """Call ``call(*args)`` at ``when``; what lies in the past is due now."""
        timer = Timer(self, max(when, self.now), call, args)
        self._asked += 1
        heapq.heappush(self._heap, (timer.at, self._asked, timer))
        return timer

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> Timer:
        """Call ``call(*args)`` in ``delay_s`` seconds."""
        return self.at(self.now + delay_s, call, *args)

    def rearm(
        self, timer: Timer | None, when: float | None, call: Callable[[], None]
    ) -> Timer | None:
        """What is to be kept in the place of ``timer``: one that calls at ``when``, or none.
        ``call`` must take the timer out of that place."""
        if timer is not None:
            if timer.at == when:
                return timer
            timer.cancel()
        return self.at(when, call) if when is not None else None

    def post(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """`after` for what nobody will want to cancel: no timer is made for it."""
        self._asked += 1
        when = self.now + max(delay_s, 0.0)
        heapq.heappush(self._heap, (when, self._asked, (call, args)))

    def step(self) -> bool:
        """Run the next due call; False when there is none."""
        while self._heap:
            when, _, due = heapq.heappop(self._heap)
            if isinstance(due, tuple):
                call, args = due
            elif due.call is None:
                self._dead -= 1
                continue
            else:
                call, args = due.call, due.args
                due.call = None
            self.now = when
            call(*args)
            return True
        return False

    def next_at(self) -> float | None:
        """When the next call is due; None when nothing is."""
        while self._heap and _is_dead(self._heap[0][2]):
            heapq.heappop(self._heap)
            self._dead -= 1
        return self._heap[0][0] if self._heap else None

    def _cancelled(self) -> None:
        self._dead += 1
        if self._dead > _DEAD_MIN and 2 * self._dead > len(self._heap):
            self._heap = [entry for entry in self._heap if not _is_dead(entry[2])]
            heapq.heapify(self._heap)
            self._dead = 0


def _is_dead(due: Timer | _Call) -> bool:
    return isinstance(due, Timer) and due.call is None
