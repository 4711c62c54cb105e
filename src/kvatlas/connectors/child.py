"""A process that we start, watch and end: one log file, one process group, no orphans."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kvatlas.errors import EngineError

TAIL_BYTES = 3000
_PORTS = range(12_000, 32_000)  # registered ones; Linux gives connections 32768 and above

_LIBC = ctypes.CDLL(None)


class Child:
    """Start it from the main thread: on Linux the kernel ends it when the thread that started it
    dies, so that not even a SIGKILL of ours leaves it behind.

    ``url`` is where it answers HTTP; `wait_ready` polls ``GET {url}{health}`` there.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        url: str = "",
        health: str = "/health",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.url = url
        self.health = health
        self.env = dict(env) if env is not None else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Also the id of its process group. 0 before `start`."""
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Raises EngineError when the program cannot be started at all."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.env,
                    start_new_session=True,  # a Ctrl-C at the terminal is ours to pass on
                    # One system call, no Python lock is touched: safe beside other threads.
                    preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
                )
        except OSError as error:
            raise EngineError(f"{self.name}: {self.argv[0]} cannot be started: {error}") from error

    def ready(self) -> bool:
        """One look at its health. Raises EngineError, with the end of its log, when it is dead."""
        self.check()
        return _get_status(self.url + self.health) == 200

    def wait_ready(
        self, deadline_s: float = 180.0, tick: Callable[[float], None] | None = None
    ) -> float:
        """Blocks until it is healthy; returns the seconds it took, ``tick`` gets them meanwhile.

        Raises EngineError when it dies or is not healthy in time.
        """
        started = time.monotonic()
        while not self.ready():
            waited = time.monotonic() - started
            if waited > deadline_s:
                raise EngineError(
                    f"{self.name}: not healthy after {deadline_s:.0f} s; see {self.log}"
                )
            if tick:
                tick(waited)
            time.sleep(0.1)
        return time.monotonic() - started

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status once it has ended by itself, None when it still runs after that."""
        assert self._process is not None, "not started"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def check(self) -> None:
        """Raises EngineError, with the end of its log, when it is not running."""
        if not self.alive:
            status = self._process.poll() if self._process else "never started"
            raise EngineError(
                f"{self.name}: ended (status {status}); {self.log} ends with:\n{self.log_tail()}"
            )

    def log_tail(self, size_bytes: int = TAIL_BYTES) -> str:
        try:
            return self.log.read_bytes()[-size_bytes:].decode("utf-8", "replace")
        except OSError as error:
            return f"({error})"

    def stop(self, grace_s: float = 15.0) -> None:
        """Ends it and everything that it started; safe to call twice."""
        stop_all([self], grace_s)

    def ended(self) -> None:
        """Called once it was stopped: the place to clear away what it leaves behind."""


def stop_all(children: Iterable[Child], grace_s: float = 15.0) -> None:
    """SIGTERM to all their groups at once, SIGKILL to what is left after ``grace_s``."""
    running = [c for c in children if c._process is not None]
    for child in running:
        _signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for child in running:
        assert child._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child._process.wait(max(0.0, deadline - time.monotonic()))
        # Members that outlive the leader (engine cores, workers) are still in its group.
        while _signal_group(child.pid, 0) and time.monotonic() < deadline:
            child._process.poll()
            time.sleep(0.02)
        _signal_group(child.pid, signal.SIGKILL)
        child._process.wait()
        child._process = None
        child.ended()


def free_ports(count: int) -> list[int]:
    """Distinct ports of the loopback interface that nobody listens on now.

    They lie below those that the kernel gives to connections: an engine takes a minute until it
    listens, and by then a connection of somebody else's could have one of these. Raises
    EngineError where there are not so many.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                break
            held = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                held.bind(("127.0.0.1", port))
                ports.append(port)
        if len(ports) < count:
            raise EngineError(f"no {count} ports are free from {_PORTS[0]} to {_PORTS[-1]}")
        return ports


def _signal_group(group: int, number: int) -> bool:
    """False when nobody is left in the group."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _die_with_parent() -> None:
    """Linux prctl(PR_SET_PDEATHSIG): SIGTERM when the parent is gone, however it went."""
    _LIBC.prctl(1, signal.SIGTERM)


def _get_status(url: str) -> int:
    """HTTP status of a GET, 0 when nothing answers within a second."""
    host, _, path = url.partition("://")[2].partition("/")
    connection = http.client.HTTPConnection(host, timeout=1.0)
    try:
        connection.request("GET", "/" + path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
