"""One stream socket on which every call ends by a deadline and payload goes straight to its place.

Blocking calls with the kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO): one system call per
value where a poll before each would take two and wake the thread for every few packets. With TLS
on it a record of 16 KiB at most comes at a time, by OpenSSL's own calls.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import xxhash

from kvatlas.dataplane._copies import receive
from kvatlas.dataplane.tls import left_s, reason_of

LINE_BYTES_MAX = 4096
SUM_BYTES = 256 << 10  # received and summed at once
SLACK_S = 0.02
SMALL_BYTES = 1024
ROOM_BYTES = 4 << 20  # for what comes in and is not read yet
_RECORD_BYTES = 16 << 10  # of TLS
_PARTS_MAX = 512  # of one sendmsg; the kernel takes 1,024
#: Puts TLS on a connected socket, by a time on time.monotonic.
Wrap = Callable[[socket.socket, float], ssl.SSLSocket]
_TIME = struct.Struct("@ll")


class Digest(Protocol):
    """What hashlib and xxhash call a hash object."""

    def update(self, data: memoryview, /) -> object:
        """Takes more bytes in."""


class Address(tuple[str, int]):
    """Host and port; port 0: the host is the path of a Unix socket."""

    __slots__ = ()

    def __new__(cls, host: str, port: int = 0) -> Address:
        return super().__new__(cls, (host, port))

    def __str__(self) -> str:
        return f"{self[0]}:{self[1]}" if self[1] else self[0]


class Stream:
    """A connected socket, with a small buffer for what comes in before it is asked for.

    Every call raises TimeoutError once ``until`` (on time.monotonic) has passed, and
    ConnectionError where the other side went away. After either the stream is of no use.
    """

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._socket = sock
        self._ended = threading.Lock()
        self.until = until
        self._buffer = bytearray(LINE_BYTES_MAX)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._limits: dict[int, tuple[float, float]] = {}
        self._secure = isinstance(sock, ssl.SSLSocket)

    @classmethod
    def connect(cls, address: Address, until: float, wrap: Wrap | None = None) -> Self:
        """``wrap``: with TLS. Raises OSError."""
        if address[1]:
            sock = socket.create_connection(address, left_s(until))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A low-water mark makes room for as much and leaves the room to the kernel, which
            # SO_RCVBUF would not. Left to itself it may stay too small for long, and drops.
            for size in (ROOM_BYTES, 1):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        else:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(left_s(until))
                sock.connect(address[0])
            except BaseException:
                sock.close()
                raise
        sock.settimeout(None)
        made = cls(sock, until)
        if wrap is not None:
            made.secure(wrap)
        return made

    def secure(self, wrap: Wrap) -> None:
        """From now on with TLS. Raises OSError; it is closed then."""
        try:
            wrapped = wrap(self._socket, self.until)
        except BaseException:
            self.close()
            raise
        with self._ended:
            self._socket = wrapped
        self._secure = True
        self._limits.clear()

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """All of them, in order, without joining them."""
        waiting = [memoryview(part).cast("B") for part in parts if len(part)]
        if self._secure:
            self._send_records(waiting)
            return
        at = 0
        while at < len(waiting):
            self._limit(socket.SO_SNDTIMEO)
            try:
                sent = self._socket.sendmsg(waiting[at : at + _PARTS_MAX])
            except BlockingIOError:
                continue
            while at < len(waiting) and sent >= len(waiting[at]):
                sent -= len(waiting[at])
                at += 1
            if sent:
                waiting[at] = waiting[at][sent:]

    def _send_records(self, waiting: Sequence[memoryview]) -> None:
        """Small parts together: each call makes a record."""
        small = bytearray()
        for part in waiting:
            if len(part) < _RECORD_BYTES:
                small += part
            if len(part) >= _RECORD_BYTES or len(small) >= _RECORD_BYTES:
                self._send_all(memoryview(small))
                small = bytearray()
            if len(part) >= _RECORD_BYTES:
                self._send_all(part)
        self._send_all(memoryview(small))

    def _send_all(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            self._limit(socket.SO_SNDTIMEO)
            at += self._socket.send(data[at:])

    def line(self) -> bytes:
        """Up to CR LF, without it. Raises ValueError where none comes within a buffer's length."""
        while True:
            found = self._buffer.find(b"\r\n", self._start, self._end)
            if found >= 0:
                line = bytes(self._view[self._start : found])
                self._start = found + 2
                return line
            if self._start:
                size = self._end - self._start
                self._buffer[:size] = self._buffer[self._start : self._end]
                self._start, self._end = 0, size
            if self._end == LINE_BYTES_MAX:
                raise ValueError("a line without an end")
            self._end += self._receive(self._view[self._end :], 0)

    def fill(self, target: memoryview, digest: Digest | None = None) -> None:
        """Exactly so many bytes; what comes after them is kept for the next call. ``digest`` takes
        them in piece by piece, while they are in the core's cache."""
        at = min(len(target), self._end - self._start)
        target[:at] = self._view[self._start : self._start + at]
        self._start += at
        if digest is not None and at:
            digest.update(target[:at])
        if at < len(target):
            self._start = self._end = 0
        while at < len(target) <= SMALL_BYTES:  # together with what follows
            self._end += self._receive(self._view[self._end :], 0)
            if self._end >= len(target) - at:
                self._start = len(target) - at
                target[at:] = self._view[: self._start]
                if digest is not None:
                    digest.update(target[at:])
                return
        while at < len(target):
            end = len(target) if digest is None else min(len(target), at + SUM_BYTES)
            got = self._receive(target[at:end], socket.MSG_WAITALL)
            if digest is not None:
                digest.update(target[at : at + got])
            at += got

    def receive(self, targets: Sequence[memoryview]) -> list[int]:
        """Fills all of them, one after the other, and says the checksum of each
        (`base.checksum_of`): one call, in which other threads run, however many they are."""
        if self._secure:
            return [self._receive_summed(target) for target in targets]
        ahead = self._view[self._start : self._end]
        sums = receive(self._socket.fileno(), ahead, targets, self.until)
        self._start += min(len(ahead), sum(map(len, targets)))
        return sums

    def _receive_summed(self, target: memoryview) -> int:
        digest = xxhash.xxh3_128()
        self.fill(target, digest)
        return digest.intdigest() or 1

    def skip(self, size_bytes: int) -> None:
        """Read and forget."""
        scratch = memoryview(bytearray(min(size_bytes, 1 << 16)))
        while size_bytes > 0:
            part = scratch[: min(size_bytes, len(scratch))]
            self.fill(part)
            size_bytes -= len(part)

    def abort(self) -> None:
        """Wakes whoever waits in a call, with an error. From any thread."""
        with self._ended, contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS is not asked

    def close(self) -> None:
        """Safe to call twice."""
        with self._ended:
            self._socket.close()

    def _receive(self, target: memoryview, flags: int) -> int:
        while True:
            self._limit(socket.SO_RCVTIMEO)
            try:
                got = self._socket.recv_into(target, 0, 0 if self._secure else flags)
            except BlockingIOError:
                continue
            except ssl.SSLError as error:
                raise ConnectionResetError(reason_of(error)) from error
            if not got:
                raise ConnectionResetError("the other side closed the connection")
            return got

    def _limit(self, option: int) -> None:
        """The kernel's own timeout, set anew where the last is older than `SLACK_S`."""
        now = time.monotonic()
        to_go_s = self.until - now
        if to_go_s <= 0:
            raise TimeoutError("the deadline has passed")
        ends, set_at = self._limits.get(option, (0.0, 0.0))
        if ends == self.until and now - set_at < SLACK_S:
            return
        self._limits[option] = (self.until, now)
        if self._secure:
            self._socket.settimeout(to_go_s)
            return
        seconds = int(to_go_s)
        micros = max(1, int((to_go_s - seconds) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(seconds, micros))
