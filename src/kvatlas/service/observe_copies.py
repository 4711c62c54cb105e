"""Copies of what passed, as frames over a socket: from whoever carries it to whoever looks at it.

The carrier never waits. Where the other end does not keep up, a copy is dropped and counted, and
the numbers of the pieces show the reader that one is missing.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from typing import Any

import msgspec

QUEUE_BYTES_MAX = 64 << 20
CONNECTIONS_MAX = 8192  # that are copied at once; further ones pass all the same
FRAME_BYTES_MAX = 16 << 20

# connection, number of the piece in it, kind, when (seconds), copies dropped so far, bytes behind
_HEAD = struct.Struct("<IIBdII")


class Kind(enum.IntEnum):
    """What a piece is."""

    ASKED = 0  # bytes from the client
    ANSWERED = 1  # bytes for the client
    CLOSED = 2


class Piece(msgspec.Struct, frozen=True):
    """Bytes of one connection, in order, and when they came. ``dropped``: copies, ever."""

    connection: int
    number: int
    kind: Kind
    at_s: float
    dropped: int
    data: bytes


class Copies(asyncio.Protocol):
    """The carrier's end. `piece` costs one write to a buffer of at most ``queue_bytes_max``."""

    def __init__(
        self, queue_bytes_max: int = QUEUE_BYTES_MAX, connections_max: int = CONNECTIONS_MAX
    ) -> None:
        self.dropped = 0  # pieces, and connections of which none was copied
        self.unwatched = 0  # connections beyond the limit
        self.gone = asyncio.Event()  # nobody is there any more
        self._queue_bytes_max = queue_bytes_max
        self._connections_max = connections_max
        self._transport: Any = None  # uvloop's and asyncio's share no typed base
        self._numbers: dict[int, int] = {}  # of the next piece, by connection
        self._last = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.gone.set()
        self._numbers.clear()

    def opened(self) -> int:
        """A connection's number; 0 where it is not copied."""
        if self._transport is None:
            return 0
        if len(self._numbers) >= self._connections_max:
            self.unwatched += 1
            self.dropped = min(self.dropped + 1, 0xFFFFFFFF)
            return 0
        self._last = self._last % 0xFFFFFFFF + 1
        self._numbers[self._last] = 0
        return self._last

    def piece(self, connection: int, kind: Kind, at_s: float, data: bytes = b"") -> None:
        """Hand on what just passed. Never blocks, never raises."""
        number = self._numbers.get(connection)
        transport = self._transport
        if number is None or transport is None:
            return
        if kind is Kind.CLOSED:
            del self._numbers[connection]
        else:
            self._numbers[connection] = (number + 1) & 0xFFFFFFFF
        if transport.get_write_buffer_size() + len(data) > self._queue_bytes_max:
            self.dropped = min(self.dropped + 1, 0xFFFFFFFF)
            return
        head = _HEAD.pack(connection, number, kind, at_s, self.dropped, len(data))
        transport.write(head + data)

    def close(self) -> None:
        """What was written is still sent; then the reader sees the end."""
        if self._transport is not None:
            self._transport.close()


class Frames:
    """The reader's end: bytes as they come in, whole pieces out."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Piece]:
        """Raises ValueError for what no carrier sends."""
        held = self._held
        held += data
        at, found = 0, []
        while len(held) - at >= _HEAD.size:
            connection, number, kind, at_s, dropped, size = _HEAD.unpack_from(held, at)
            if size > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {size} bytes")
            end = at + _HEAD.size + size
            if len(held) < end:
                break
            body = bytes(held[at + _HEAD.size : end])
            found.append(Piece(connection, number, Kind(kind), at_s, dropped, body))
            at = end
        del held[:at]
        return found
