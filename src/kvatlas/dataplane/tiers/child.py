"""A process of ours for a library that may hang or die, and nothing else with it.

It is started as a module with its own settings as its only word, and talks over a socket pair:
frames of a length (4 bytes, little endian) and one message. A late answer ends it, and whenever it
has ended another is started: what ended touches nothing any more, also no memory that both map.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvatlas.dataplane.tiers.base import Counts

FRAME_BYTES_MAX = 8 << 20
RETRY_S = 1.0  # between two processes
_HEAD = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


class Numbered(Protocol):
    """An answer: to which question."""

    @property
    def number(self) -> int: ...


class Kind(msgspec.Struct, frozen=True):
    """What a child is. ``words``: its settings, given the number of its end of the socket pair.
    ``receive``: the next message from it. ``take``: whether a message says that it is ready now, is
    the answer to something (that it returns), or neither.

    ``ready_s``: how long it may take to become ready. ``retry_max_s``: the pause before another,
    doubled up to that while none becomes ready. ``patient``: what is asked before it is ready
    waits, unless the last one failed. ``grace_s``: how long who ends one waits for its death.
    """

    name: str
    module: str
    fds: tuple[int, ...]
    words: Callable[[int], bytes]
    receive: Callable[[socket.socket], object]
    take: Callable[[object], bool | Numbered | None]
    ready_s: float
    retry_max_s: float = RETRY_S
    patient: bool = True
    grace_s: float | None = None


class Child:
    """See `Kind`. All methods may be called from any thread."""

    def __init__(self, kind: Kind, counts: Counts) -> None:
        """Starts the first one, in the background."""
        self._kind = kind
        self._counts = counts
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._sending = threading.Lock()
        self._socket: socket.socket | None = None  # while it is ready
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, list[Numbered]] = {}
        self._dying: subprocess.Popen[bytes] | None = None  # killed, and perhaps not dead
        self._after: list[Callable[[], None]] = []
        self._failed = False  # the last try
        self._closed = threading.Event()
        self._number = 0
        self._keeper = threading.Thread(target=self._keep, name=f"kvatlas-{kind.name}", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        """Of the last one that was started; 0: none was."""
        with self._lock:
            return 0 if self._child is None else self._child.pid

    @property
    def failed(self) -> bool:
        """Whether the last one ended, or never became ready, and no other is ready yet."""
        return self._failed

    def ready(self, until: float = 0.0) -> bool:
        """Whether it can be asked, by ``until`` at the latest."""
        with self._changed:
            while self._socket is None and not self._failed and not self._closed.is_set():
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    break
            return self._socket is not None

    def ask(self, question: Callable[[int], msgspec.Struct], until: float) -> Numbered | None:
        """None: it did not answer, and was ended (see `after`)."""
        if not self.ready(until if self._kind.patient else 0.0):
            return None
        with self._lock:
            sock = self._socket
            if sock is None:
                return None
            self._number += 1
            number = self._number
            self._waiting[number] = []
        try:
            with self._sending:
                send(sock, question(number))
        except OSError:
            self.kill()
        with self._changed:
            while not (got := self._waiting.get(number)) and got is not None:
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    break
            got = self._waiting.pop(number, None)
        if got:
            return got[0]
        if got is not None:
            self._counts.add("client_late")
            self.kill()
        return None

    def kill(self) -> None:
        """And wait for its end, for ``grace_s``: afterwards it touches nothing."""
        with self._lock:
            child, self._socket = self._child, None
            self._dying = child
        if child is not None:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(self._kind.grace_s)

    def after(self, then: Callable[[], None]) -> bool:
        """False: nothing that was killed still lives. Else ``then`` is called when it is dead, from
        another thread: what hangs in the kernel ends late."""
        with self._lock:
            if self._dying is None or self._dying.poll() is not None:
                return False
            self._after.append(then)
            return True

    def wait(self) -> None:
        """Until what was killed is dead, however long that takes."""
        with self._lock:
            dying = self._dying
        if dying is not None:
            dying.wait()

    def close(self) -> None:
        """It is gone, and whoever waits hears of that."""
        self._closed.set()
        self.kill()
        self._keeper.join()

    # -- its life -------------------------------------------------------------------------------

    def _keep(self) -> None:
        pause_s = RETRY_S
        while not self._closed.is_set():
            was_ready = False
            try:
                was_ready = self._serve()
                self._counts.add("client_ended")
            except OSError:  # no descriptor, say, or no memory for another process
                self._over()
                self._counts.add("client_not_started")
            pause_s = RETRY_S if was_ready else min(pause_s * 2, self._kind.retry_max_s)
            self._closed.wait(pause_s)

    def _serve(self) -> bool:
        """One process, from its start to its end: was it ever ready? Raises OSError where it cannot
        be started."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                child = self._start(theirs)
            with self._lock:
                self._child = child
            if self._closed.is_set():
                child.kill()
            ready = False
            try:
                ours.settimeout(self._kind.ready_s)
                while True:
                    took = self._kind.take(self._kind.receive(ours))
                    ready = ready or took is True
                    self._take(ours, took)
            except (OSError, ValueError, msgspec.MsgspecError):
                pass
            child.kill()
            child.wait()
            self._over()
            return ready

    def _start(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        end = theirs.fileno()
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, "-m", self._kind.module, self._kind.words(end).decode()],
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            pass_fds=(*self._kind.fds, end),
        )

    def _take(self, ours: socket.socket, took: bool | Numbered | None) -> None:
        with self._changed:
            if took is True:
                ours.settimeout(None)
                self._socket, self._failed = ours, False
            elif took and took.number in self._waiting:
                self._waiting[took.number].append(took)
            self._changed.notify_all()

    def _over(self) -> None:
        """Whoever waits for it hears that it is gone."""
        with self._changed:
            self._socket = self._dying = None
            self._failed = True
            self._waiting.clear()
            after, self._after = self._after, []
            self._changed.notify_all()
        for then in after:
            then()


def end_with_parent() -> None:
    """In the child: when who started it ends, so does it, at once."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(work: Callable[[], None]) -> None:
    """In the child: until the other side ends; then at once, for a library's own end may hang or
    fail."""
    end_with_parent()
    try:
        work()
    except (OSError, ValueError):
        pass
    finally:
        os._exit(0)


# -- frames ---------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()


def send(sock: socket.socket, message: msgspec.Struct) -> None:
    """For one thread at a time. Raises OSError."""
    body = _encoder.encode(message)
    sock.sendall(_HEAD.pack(len(body)) + body)


def received(sock: socket.socket) -> bytes:
    """The next frame. Raises OSError, and ValueError for one that is too long."""
    (size,) = _HEAD.unpack(_exactly(sock, _HEAD.size))
    if size > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {size} bytes")
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    view = memoryview(data)
    at = 0
    while at < size_bytes:
        got = sock.recv_into(view[at:])
        if not got:
            raise ConnectionResetError("the other side has ended")
        at += got
    return bytes(data)
