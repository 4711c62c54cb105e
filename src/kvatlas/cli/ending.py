"""Long commands: whoever ends one, or closes its terminal, ends it as Ctrl-C does."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_until_ended(
    work: Coroutine[Any, Any, _T],
    run: Callable[[Coroutine[Any, Any, _T]], _T] = asyncio.run,
) -> _T:
    """What ``work`` gives, in the loop of ``run``. SIGTERM and SIGHUP cancel it once, so that it
    undoes what it did; then KeyboardInterrupt is raised."""
    try:
        return run(_heeding(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _heeding(work: Coroutine[Any, Any, _T]) -> _T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    ended = False

    def end() -> None:
        nonlocal ended
        if not ended:  # another one must not cut short what is being undone
            ended = True
            task.cancel()

    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) is signal.SIG_DFL:  # nohup has the second one ignored
                loop.add_signal_handler(each, end)
    return await work
