"""What two agents say to each other about values: requests, in msgpack after a length."""

from __future__ import annotations

import struct

import msgspec

from kvatlas.dataplane.tiers.sockets import Stream

NAMES_MAX = 4096
REQUEST_BYTES_MAX = 2 << 20
LENGTH = struct.Struct("<I")
SAME, MISSED = b"\1", b"\0"  # of each slot, once its bytes have left


class Request(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """``names`` to read; none: the catalogue from ``start`` on. ``suspect``: these came wrong.
    ``find``: which of them are there? ``loan``: they are to be read by NIXL, and the reader's
    process knows the owner's of this epoch."""

    names: list[bytes]
    start: int = 0
    suspect: bool = False
    find: bool = False
    loan: bytes | None = None


def ask(link: Stream, request: Request) -> None:
    """Raises OSError."""
    tell(link, msgspec.msgpack.encode(request))


def tell(link: Stream, data: bytes) -> None:
    """Bytes after their length. Raises OSError."""
    link.send([LENGTH.pack(len(data)), data])


def bulk(link: Stream, size_bytes_max: int) -> bytes:
    """The same at the other end. Raises OSError, and ValueError where they are too many."""
    (size,) = LENGTH.unpack(exactly(link, LENGTH.size))
    if size > size_bytes_max:
        raise ValueError(f"{size} bytes at once: at most {size_bytes_max}")
    return exactly(link, size)


def exactly(link: Stream, size_bytes: int) -> bytes:
    """Raises OSError."""
    data = bytearray(size_bytes)
    link.fill(memoryview(data))
    return bytes(data)


def request(link: Stream) -> Request:
    """The next one. Raises OSError, ValueError and MsgspecError."""
    asked = msgspec.msgpack.decode(bulk(link, REQUEST_BYTES_MAX), type=Request)
    if len(asked.names) > NAMES_MAX or asked.start < 0:
        raise ValueError("too many names, or a start below zero")
    return asked
