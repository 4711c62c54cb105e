"""One line that says what is going on, how far it is and for how long."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PLAIN_EVERY_S = 10.0


class Waiting:
    """On a terminal a live line that vanishes when done; elsewhere a plain one every ten seconds.

    ``total`` is the number of steps, where it is known.
    """

    def __init__(self, console: Console, what: str, total: int | None = None) -> None:
        self._console = console
        self._what = what
        self._total = total
        self._done = 0
        self._detail = ""
        self._started = self._printed = time.monotonic()
        self._live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._live.start()
        if not self._console.is_terminal:
            self._console.print(f"  {self._what} …")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        if error is None:
            spent_s = time.monotonic() - self._started
            self._console.print(f"  {self._what}: done in {spent_s:.0f} s")

    def say(self, detail: str) -> None:
        """What it is doing at this moment."""
        self._detail = detail
        self._live.update(self._task, description=f"{self._what}: {detail}"[:100])
        self.tick()

    def step(self) -> None:
        """One of the ``total`` steps is done."""
        self._done += 1
        self._live.update(self._task, completed=self._done)
        self.tick()

    def tick(self) -> None:
        """Still waiting. Call it often: it keeps the plain form going."""
        now = time.monotonic()
        if self._console.is_terminal or now - self._printed < PLAIN_EVERY_S:
            return
        self._printed = now
        steps = f" {self._done}/{self._total}" if self._total else ""
        self._console.print(f"  {self._what}{steps}, {now - self._started:.0f} s: {self._detail}")
