"""What a store and the process of its Mooncake client say to each other (`child`), in msgpack.

No value comes this way: both map the arena and one more stretch of memory for values that lie
elsewhere.
"""

from __future__ import annotations

import socket

import msgspec

from kvatlas.dataplane.tiers import child

GROUP = 32  # pieces in one call: a large batch costs a third of the same in several threads


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
    """A piece: ``offset`` into the arena, or where ``bounced`` into the other memory. ``sealed``:
    its label is the store's to make (``label``) and to judge; no key ever comes here."""

    name: bytes
    offset: int = 0
    size_bytes: int = 0
    bounced: bool = False
    checksum: bytes = b""
    index: int = 0
    tenant: str = ""
    fingerprint: bytes = b""
    sealed: bool = False
    label: bytes = b""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """``what``: write, read, find, delete, or size."""

    number: int
    what: str
    items: tuple[Item, ...]


class End(msgspec.Struct, frozen=True, array_like=True):
    """``why`` as in `work.Why`, "" where it arrived; of a read what the label says, or the
    ``label`` as it is, and of a size that."""

    why: str = ""
    checksum: bytes = b""
    index: int = 0
    tenant: str = ""
    fingerprint: bytes = b""
    size_bytes: int = -1
    label: bytes = b""


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
_from_client = msgspec.msgpack.Decoder(FromClient)
_job = msgspec.msgpack.Decoder(Job)


def from_client(sock: socket.socket) -> FromClient:
    """The next message. Raises OSError, and ValueError for anything else."""
    return _from_client.decode(child.received(sock))


def job(sock: socket.socket) -> Job:
    """The same on the other side."""
    return _job.decode(child.received(sock))
