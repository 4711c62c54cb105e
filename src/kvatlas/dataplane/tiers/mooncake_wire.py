"""What a store and the process of its Mooncake client say to each other, over a socket pair.

Frames: length (4 bytes, little endian), then one message in msgpack. No value comes this way:
both map the arena and one more stretch of memory for values that lie elsewhere.
"""

from __future__ import annotations

import socket
import struct

import msgspec

FRAME_BYTES_MAX = 8 << 20
GROUP = 32  # pieces in one call: a large batch costs a third of the same in several threads
HEAD = struct.Struct("<I")


class Client(msgspec.Struct, frozen=True, array_like=True):
    """What the process needs to know. The descriptors are those that it inherits."""

    arena: int
    bounce: int
    bounce_bytes: int
    socket: int
    host: str
    metadata: str
    protocol: str
    devices: str
    master: str
    buffer_bytes: int
    threads: int
    prefix: str


class Item(msgspec.Struct, frozen=True, array_like=True):
    """A piece: ``offset`` into the arena, or where ``bounced`` into the other memory."""

    name: bytes
    offset: int = 0
    size_bytes: int = 0
    bounced: bool = False
    checksum: bytes = b""
    index: int = 0
    tenant: str = ""
    fingerprint: bytes = b""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """``what``: write, read, find, delete, or size."""

    number: int
    what: str
    items: tuple[Item, ...]


class End(msgspec.Struct, frozen=True, array_like=True):
    """``why`` as in `work.Why`, "" where it arrived; of a read what the label says, and of a size
    that."""

    why: str = ""
    checksum: bytes = b""
    index: int = 0
    tenant: str = ""
    fingerprint: bytes = b""
    size_bytes: int = -1


class Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One end per item, and what else is to be counted."""

    number: int
    ends: tuple[End, ...]
    counts: dict[str, int] = {}


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """There is a connection to the master."""


class Seen(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The marker that is in the store now."""

    life: bytes


FromClient = Answer | Ready | Seen
_encoder = msgspec.msgpack.Encoder()
_from_client = msgspec.msgpack.Decoder(FromClient)
_job = msgspec.msgpack.Decoder(Job)


def send(sock: socket.socket, message: Job | FromClient) -> None:
    """For one thread at a time. Raises OSError."""
    body = _encoder.encode(message)
    sock.sendall(HEAD.pack(len(body)) + body)


def from_client(sock: socket.socket) -> FromClient:
    """The next message. Raises OSError, and ValueError for anything else."""
    return _from_client.decode(_received(sock))


def job(sock: socket.socket) -> Job:
    """The same on the other side."""
    return _job.decode(_received(sock))


def _received(sock: socket.socket) -> bytes:
    (size,) = HEAD.unpack(_exactly(sock, HEAD.size))
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
