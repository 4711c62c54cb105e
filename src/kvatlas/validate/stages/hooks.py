"""Commands of the operator's: what breaks and mends a part, what reads a figure, what tries a
point. Where we started the cluster ourselves, functions stand in for commands."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from kvatlas.errors import KvatlasError
from kvatlas.validate.stages.values import Missing, Trial, excerpt

_OUTPUT_MAX = 64 << 10
_T = TypeVar("_T")


class Hooks:
    """``commands`` by name, each for a shell; ``own`` wins: a function that raises OSError, or an
    error of kvatlas's, where it could not do it."""

    def __init__(
        self,
        commands: Mapping[str, str],
        *,
        timeout_s: float,
        own: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        self._commands = dict(commands)
        self._own = dict(own or {})
        self._timeout_s = timeout_s
        self.done: list[str] = []  # each that was begun, and how it went

    def __contains__(self, name: str) -> bool:
        return name in self._commands or name in self._own

    async def run(self, name: str) -> Missing | None:
        """Do it; why it could not be done, else None."""
        self.done.append(f"{name} (cut short)")
        why = await self._run(name)
        self.done[-1] = why.reason if why else name
        return why

    async def around(
        self, away: str, back: str, during: Callable[[], Awaitable[_T]]
    ) -> _T | Missing:
        """What ``during`` gives once ``away`` is done; why it could not be done, or undone.

        ``back``, where there is such a hook, is run however that ends: after a failure, too, and
        after an ``away`` that was cut short, for it may have done half of it.
        """
        if away not in self:
            return Missing(f"no hook {away} in the stage file: nothing outside can do it")
        undone: Missing | None = None
        try:
            found = await self.run(away) or await during()
        finally:
            if back in self:
                undone = await self.run(back)
        return found if isinstance(found, Missing) else undone or found

    async def _run(self, name: str) -> Missing | None:
        if name in self._own:
            try:
                self._own[name]()  # here: what it starts must belong to the main thread
            except (OSError, KvatlasError) as error:
                return Missing(f"hook {name}: {error}")
            return None
        if name not in self._commands:
            return Missing(f"no hook {name} in the stage file: nothing outside can do it")
        trial = await self.try_out(self._commands[name])
        if trial.status:
            return Missing(f"hook {name}: status {trial.status}: {trial.output}")
        return None

    async def number(self, name: str) -> float | Missing:
        """What a command prints."""
        if name not in self._commands:
            return Missing(f"no command read.{name} in the stage file")
        trial = await self.try_out(self._commands[name])
        try:
            value = float(trial.output)
        except ValueError:
            value = math.nan
        if trial.status or not math.isfinite(value):
            return Missing(f"read.{name}: status {trial.status}, printed {trial.output!r}")
        return value

    async def try_out(self, command: str) -> Trial:
        """Its exit status (-1: it took too long) and the end of what it printed."""
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_shell(
                command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        )
        try:
            process = await asyncio.shield(starting)  # half started it could not be ended whole
            async with asyncio.timeout(self._timeout_s):
                output, _ = await process.communicate()
        except TimeoutError:
            output = b"no end within %g s" % self._timeout_s
            return Trial(command, -1, output.decode())
        finally:
            process = await starting
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        text = output[-_OUTPUT_MAX:].decode("utf-8", "replace").strip()
        return Trial(command, process.returncode or 0, excerpt(text))
