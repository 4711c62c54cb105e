"""What an agent and the process of its NIXL agent say to each other (`child`), in msgpack.

No value comes this way: the process maps the arena, and NIXL reads into it.
"""

from __future__ import annotations

import socket

import msgspec

from kvatlas.dataplane.tiers import child


class Given(msgspec.Struct, frozen=True, array_like=True):
    """What the process needs to know: descriptors that it inherits."""

    arena: int
    socket: int


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What others need to read from this arena. ``epoch``: of this process alone. ``address``: in
    it, where slots begin, and how many bytes they have."""

    epoch: bytes
    version: str
    metadata: bytes
    address: int
    size_bytes: int


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Get to know another's process, the only one, and how its memory is reached."""

    number: int
    there: Ready


class Read(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From there into our arena: offset in ours, offset in theirs, bytes."""

    number: int
    epoch: bytes
    places: list[tuple[int, int, int]]


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Is it alive?"""

    number: int


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``why`` not, "" where it was done. To a join: ``transport`` is what UCX reads over, as it
    says itself; ``emulated``: by messages that the other side's processor answers."""

    number: int
    why: str = ""
    transport: str = ""
    emulated: bool = False


Question = Join | Read | Ping
_question = msgspec.msgpack.Decoder(Question)
_answer = msgspec.msgpack.Decoder(Ready | Ended)


def question(sock: socket.socket) -> Question:
    """The next one. Raises OSError, and ValueError for anything else."""
    return _question.decode(child.received(sock))


def answer(sock: socket.socket) -> Ready | Ended:
    """The next from the process. Raises as `question`."""
    return _answer.decode(child.received(sock))
