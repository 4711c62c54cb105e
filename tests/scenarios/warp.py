"""An event loop in which waiting takes no time: where nothing is to be read, its clock jumps to the
next timer. All ends of all sockets are in this process, so what was sent is there to be read."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")

_STILL_S = 0.0005  # real: the kernel and ZMQ's threads may take a moment to deliver


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout is None or timeout <= 0:
            return ready or (super().select(None) if timeout is None else [])
        ready = super().select(_STILL_S)
        if not ready:
            self.now += timeout
        return ready


class WarpLoop(asyncio.SelectorEventLoop):
    """Its time is that of `time.perf_counter`, too, while `run` runs in it."""

    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=WarpLoop) as runner:
        loop = runner.get_loop()
        with mock.patch.object(time, "perf_counter", loop.time):
            return runner.run(main)
