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
READ_BYTES = 1 << 20  # what is received at once
FRAME_BYTES_MAX = 32 << 20  # token ids of eight million tokens
HASH_BYTES = 32  # of a page's name in engines that name them
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


def parts_of(layout: Layout, ranks: int = 1) -> tuple[PartInfo, ...]:
    """All components that lie in blocks of a group, with their pages as one of ``ranks`` holds
    them, between which the heads are cut."""
    groups = {g.name: g for g in layout.groups}
    return tuple(
        PartInfo(
            c.name,
            groups[c.group].kind,
            groups[c.group].window_tokens,
            c.block_tokens,
            c.stored_block_bytes // c.layers // max(ranks, 1),
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


class PoolInfo(msgspec.Struct, frozen=True, array_like=True):
    """A pool of an engine with pages of its own: ``page_bytes`` of every page or, where only the
    last pages before a resume position count, of a ``trailing`` one. ``form``: how the bytes lie,
    and whose share of them it is."""

    name: str
    form: str
    page_bytes: int
    trailing: bool


# -- from the engine ----------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An engine, and all that must agree before it may use state of others.

    ``config``: the model's config.json as text. ``block_tokens`` 0: the engine chooses by layer.
    ``device``: as its kernels see it, "" unknown. ``ranks``: between which
    the heads are cut. ``variant`` as in `core.keys.Fingerprint`.
    ``pools``: of an engine that names its pages itself, and says `Look`, `Take` and `Give`; what
    it keeps of a page in them, one after the other, is a body, or a point of trailing ones.
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
    pools: tuple[PoolInfo, ...] = ()
    device: str = ""
    ranks: int = 1
    variant: str = ""


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


class Look(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Which pages of a prompt are there, from page ``first`` on? Answered by `Present`.

    ``hashes``: names of its pages from the start on, `HASH_BYTES` each. ``each``: every page counts
    by itself, and holes end nothing: `points` are then those of pages that are there.
    """

    request: str
    hashes: bytes
    first: int
    each: bool = False


class Take(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make these pages ready, those in trailing pools or those in the others. Answered by `Staged`
    of no tokens, always and once: its pieces are those that are there."""

    request: str
    hashes: bytes
    first: int
    points: bool
    deadline_s: float


class Give(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine can copy out the pages from ``first`` on, and at ``points`` (counts of pages) the
    last page in trailing pools. Answered by `Orders`."""

    request: str
    hashes: bytes
    first: int
    points: tuple[int, ...]


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


# -- from people and controllers: answered by `Status`, or `Refused` ------------------------------


class Errand(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Move or keep what is held of a prompt. ``what``: "pull" (up to dram), "push" (to ``tier``),
    "pin" (for ``hold_s``), or "where" it lies, which changes nothing.

    The prompt is told by ``tokens`` (as in `Want`) or by block ``keys``; ``model`` "": that of the
    engines that are attached. ``name``: by which it is called off; "": one is made.
    """

    what: str
    name: str = ""
    model: str = ""
    tokens: bytes = b""
    keys: tuple[bytes, ...] = ()
    tier: str = ""
    hold_s: float = 0.0
    scope: str = ""
    adapter: str = ""


class Recall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Call an errand off."""

    name: str


class Resize(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Another size of a tier of the node's own."""

    tier: str
    size_bytes: int


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Save nothing more, bring to disk what only dram has, then end; not before ``linger_s`` are
    over, in which others may read from here."""

    linger_s: float = 0.0


# -- from the agent -----------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``arena`` names this life of the agent's memory. ``grid_tokens`` 0: to `Map`. ``minimal``:
    points hold only what a resume reads."""

    arena: str
    grid_tokens: int = 0
    parts: tuple[PartInfo, ...] = ()
    minimal: bool = False


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


class Present(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``pages`` are there in a row; at each of ``points`` (counts of pages from the prompt's start)
    the last page in trailing pools too. Without such pools every count is one."""

    request: str
    pages: int
    points: tuple[int, ...]


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


FromOperator = Errand | Recall | Resize | Drain
FromEngine = (
    FromOperator
    | Hello
    | Map
    | Want
    | Cancel
    | Release
    | Filled
    | Look
    | Take
    | Give
    | Saved
    | End
    | Bye
    | AskStatus
)
FromAgent = Welcome | Refused | Staged | Present | Orders | Status

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
    """Cuts what arrives into messages, in one piece of memory: pages that are fresh each time cost
    a long prompt more than its hash."""

    def __init__(self) -> None:
        self._data = bytearray(READ_BYTES)
        self._end = 0

    def room(self) -> memoryview:
        """Where to receive more. Release it before `came`."""
        return memoryview(self._data)[self._end :]

    def came(self, count: int) -> Iterator[memoryview]:
        """So many bytes did: bodies of whole frames, each gone when the next is asked for. Raises
        EngineError for one that is too long."""
        self._end += count
        at = 0
        try:
            while self._end - at >= _HEAD.size:
                (length,) = _HEAD.unpack_from(self._data, at)
                if length > FRAME_BYTES_MAX:
                    raise EngineError(f"a frame of {length} bytes: at most {FRAME_BYTES_MAX}")
                begin = at + _HEAD.size
                if self._end < begin + length:
                    return
                at = begin + length
                with memoryview(self._data) as view, view[begin:at] as body:
                    yield body
        finally:
            self._keep(at)

    def _keep(self, at: int) -> None:
        """What is of the next frame goes to the front; the room grows as that comes in."""
        left = self._end - at
        if at:
            self._data[:left] = self._data[at : self._end]
        self._end = left
        if left == len(self._data):
            self._data.extend(bytes(left))
        elif not left and len(self._data) > READ_BYTES:
            self._data = bytearray(READ_BYTES)

    def add(self, data: bytes) -> Iterator[bytes]:
        """The same of bytes that were received elsewhere."""
        rest = memoryview(data)
        while rest:
            with self.room() as room:
                count = min(len(room), len(rest))
                room[:count] = rest[:count]
            for body in self.came(count):
                yield bytes(body)
            rest = rest[count:]


def from_engine(body: bytes | memoryview) -> FromEngine:
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
