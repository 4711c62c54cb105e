"""What engine processes and the agent of their node say to each other, over a Unix socket.

Frames: length (4 bytes, little endian), then one message in msgpack. No bytes of state come this
way: those are copied through the arena, whose descriptor follows the first frame of a `Welcome`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.dataplane.arena import Slot
from kvatlas.errors import EngineError

VERSION = 1
FRAME_BYTES_MAX = 32 << 20  # token ids of eight million tokens
_HEAD = struct.Struct("<I")


class PartInfo(msgspec.Struct, frozen=True, array_like=True):
    """One component of the state, as the groups of an engine show it.

    ``blocks``: the last blocks that a resume position needs; None: all, a chain. ``least_blocks``:
    of a window, those that a resume really reads, where that is fewer.
    """

    name: str
    kind: str
    window_tokens: int | None
    block_tokens: int
    page_bytes: int
    blocks: int | None
    least_blocks: int | None


def parts_of(layout: Layout) -> tuple[PartInfo, ...]:
    """All components that lie in blocks of a group."""
    groups = {g.name: g for g in layout.groups}
    return tuple(
        PartInfo(
            c.name,
            groups[c.group].kind,
            groups[c.group].window_tokens,
            c.block_tokens,
            c.stored_block_bytes // c.layers,
            c.window_blocks(),
            c.window_blocks(minimal=True),
        )
        for c in layout.components
        if c.group in groups
    )


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A unit and its place in the arena: ``part`` and ``index`` as in `core.units.Unit`."""

    name: bytes
    part: int
    index: int
    slot: Slot


# -- from the engine ----------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An engine, and all that must agree before it may use state of others.

    ``config``: the model's config.json as text. ``block_tokens`` 0: the engine chooses by layer.
    """

    version: int
    model: str
    names: tuple[str, ...]
    config: bytes
    engine: str
    engine_version: str
    kv_dtype: str
    block_tokens: int
    weights_digest: str = ""
    hash_algorithm: str = ""
    name: str = ""


class Map(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A process of an engine that only copies: it wants the arena."""

    version: int


class Want(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How far can this prompt be resumed? Answered by `Staged`, always and once.

    ``tokens``: ids, 4 bytes each, little endian, all that there are. ``scope`` and ``adapter`` go
    into the keys.
    """

    request: str
    tokens: bytes
    local_tokens: int
    deadline_s: float
    scope: str = ""
    adapter: str = ""


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody waits for `Staged` any more; it still comes."""

    request: str


class Release(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What was staged is read no more; ``used`` of it was loaded, for the counts."""

    request: str
    used: bool


class Filled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """By the end of its present step the engine has the state of the first ``blocks`` grid blocks,
    and all windows at ``points``. Answered by `Orders`.

    ``tokens`` follow those that were sent before, ``since`` of them.
    """

    request: str
    since: int
    tokens: bytes
    blocks: int
    points: tuple[int, ...]
    resumed_tokens: int
    prompt_tokens: int


class Saved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An order was carried out as far as ``sums`` say: name and checksum of what was copied."""

    op: int
    sums: tuple[tuple[bytes, bytes], ...]


class End(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request is over."""

    request: str


class Bye(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine goes, and touches nothing any more."""


class AskStatus(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What does the agent hold and do?"""


# -- from the agent -----------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``arena`` names this life of the agent's memory. ``grid_tokens`` 0: to `Map`."""

    arena: str
    grid_tokens: int = 0
    parts: tuple[PartInfo, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No, and why; the connection ends."""

    why: str


class Staged(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request can go on at ``tokens``: all pieces for it are verified and stay where they are
    until `Release`. ``tiers``: from where they came, in tokens."""

    request: str
    tokens: int
    pieces: tuple[Piece, ...] = ()
    tiers: tuple[tuple[str, int], ...] = ()
    why: str = ""


class Order(msgspec.Struct, frozen=True, array_like=True):
    """Copy these units out, and answer with `Saved`."""

    op: int
    pieces: tuple[Piece, ...]


class Orders(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What to save of what was filled."""

    request: str
    orders: tuple[Order, ...] = ()
    known: bool = True  # False: send all tokens again


class Status(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """JSON for readers."""

    json: bytes


FromEngine = Hello | Map | Want | Cancel | Release | Filled | Saved | End | Bye | AskStatus
FromAgent = Welcome | Refused | Staged | Orders | Status

_from_engine = msgspec.msgpack.Decoder(FromEngine)
_from_agent = msgspec.msgpack.Decoder(FromAgent)
_encoder = msgspec.msgpack.Encoder()


def frame(message: FromEngine | FromAgent) -> bytes:
    """As it goes over the wire. Raises EngineError where it is too long."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise EngineError(f"a message of {len(body)} bytes: at most {FRAME_BYTES_MAX}")
    return _HEAD.pack(len(body)) + body


class Frames:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> Iterator[bytes]:
        """Bodies of whole frames. Raises EngineError for one that is too long."""
        self._data += data
        at = 0
        try:
            while len(self._data) - at >= _HEAD.size:
                (length,) = _HEAD.unpack_from(self._data, at)
                if length > FRAME_BYTES_MAX:
                    raise EngineError(f"a frame of {length} bytes: at most {FRAME_BYTES_MAX}")
                end = at + _HEAD.size + length
                if len(self._data) < end:
                    return
                body = bytes(self._data[at + _HEAD.size : end])
                at = end
                yield body
        finally:
            del self._data[:at]


def from_engine(body: bytes) -> FromEngine:
    """Raises EngineError for anything else."""
    try:
        return _from_engine.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineError(f"not a message of ours: {error}") from error


def from_agent(body: bytes) -> FromAgent:
    """Raises EngineError for anything else."""
    try:
        return _from_agent.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineError(f"not a message of ours: {error}") from error
