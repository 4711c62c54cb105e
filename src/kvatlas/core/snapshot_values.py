"""A snapshot of a directory's soft state, as the pieces in which it travels (`core.snapshot`).

Each is a MessagePack array that begins with its kind. Nothing here is understood by another
`FORMAT`: whatever changes in these classes, in how keys are made (`core.keys`) or in how claims
are filed (`core.claims`) is another one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvatlas.core.keys import KEY_BYTES
from kvatlas.core.records import Place, Publisher, Tier
from kvatlas.core.units import Part

FORMAT = 1

ROWS_MAX = 2048  # in one piece: what is read, or written, in one go

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = bytes  # joined
Hash = int  # of an engine, 64 bits
Lane = Annotated[int, msgspec.Meta(ge=0)]
Bits = Annotated[int, msgspec.Meta(ge=0)]


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One of them."""


class Opening(Piece, frozen=True, tag="opening"):
    """The first."""

    format: int


class Closing(Piece, frozen=True, tag="closing"):
    """The last; ``pieces``: how many came before it."""

    pieces: int


# -- one engine's rank ----------------------------------------------------------------------------


class Engine(Piece, frozen=True, tag="engine"):
    """A publisher, up to where its stream was applied. What follows is of it, up to the next."""

    publisher: Publisher
    fingerprint: bytes
    lanes: int
    place: Place


class Claimed(Piece, frozen=True, tag="claimed"):
    """What `core.claims` knows of the stream beside the blocks."""

    lanes: dict[int, Lane]  # engine's group → lane
    report: bool
    reports: bool
    group: int
    full: bool
    muted: bool


class Names(Piece, frozen=True, tag="names"):
    """Engine hashes, 8 bytes each, and the keys that they stand for. ``held``: by lane and tier,
    per name whether its key is held there, b"" where all are."""

    names: bytes
    keys: Keys
    held: list[tuple[Lane, Tier, bytes]]


class Recent(Piece, frozen=True, tag="recent"):
    """Names of blocks that left."""

    rows: list[tuple[Hash, Key]]


class Pending(Piece, frozen=True, tag="pending"):
    """Lane, hash, tiers as bits: claims that wait for the name of their block."""

    rows: list[tuple[Lane, Hash, Bits]]


class Twins(Piece, frozen=True, tag="twins"):
    """Lane, hash, how often beyond once."""

    rows: list[tuple[Lane, Hash, Bits]]


class Follows(Piece, frozen=True, tag="follows"):
    """Lane, hash, the hash after it."""

    rows: list[tuple[Lane, Hash | None, Hash]]


class Before(Piece, frozen=True, tag="before"):
    """Of a windowed lane: hash, the hash before it, tiers as bits."""

    lane: Lane
    rows: list[tuple[Hash, Hash | None, Bits]]


class Placed(Piece, frozen=True, tag="placed"):
    """Of a windowed lane: hash, its grid key, unit from the end."""

    lane: Lane
    rows: list[tuple[Hash, Key, Bits]]


class Shared(Piece, frozen=True, tag="shared"):
    """Of a windowed lane: hash, further grid keys."""

    lane: Lane
    rows: list[tuple[Hash, tuple[Key, ...]]]


class Masks(Piece, frozen=True, tag="masks"):
    """Of a windowed lane and a tier: grid key, units held as bits."""

    lane: Lane
    tier: Tier
    rows: list[tuple[Key, Bits]]


Rows = Names | Recent | Pending | Twins | Follows | Before | Placed | Shared | Masks


# -- agents ---------------------------------------------------------------------------------------


class Agent(Piece, frozen=True, tag="agent"):
    """An agent, up to where its stream was applied; its own shelves follow."""

    agent: Publisher
    place: Place


class Shelved(Piece, frozen=True, tag="shelved"):
    """What lies on one of its shelves."""

    tier: Tier
    part: Part
    keys: Keys


class Stored(Piece, frozen=True, tag="stored"):
    """What lies in a store; ``users``: the agents whose word that is."""

    store: str
    users: list[Publisher]
    part: Part
    keys: Keys


# -- prices ---------------------------------------------------------------------------------------


class LineState(msgspec.Struct, frozen=True, array_like=True):
    """`core.cost.Line`, by its own names."""

    intercept: float
    slope: float
    count: int
    _w: float
    _x: float
    _y: float
    _xx: float
    _xy: float
    _error2: float
    _usual: float
    _lean: float
    _off: float


Four = tuple[float, float, float, float]


class PartsState(msgspec.Struct, frozen=True, array_like=True):
    """`core.cost.Parts`."""

    usual: float
    count: int
    _prior: Four
    _factors: Four
    _rates: Four
    _squares: tuple[Four, Four, Four, Four]
    _sums: Four
    _lean: float


class GapState(msgspec.Struct, frozen=True, array_like=True):
    """`core.promises.HitGap`."""

    requests: int
    expected: float
    kept: float
    reported: float
    foreseen: float


class ErrorState(msgspec.Struct, frozen=True, array_like=True):
    """`core.promises.PredictionError`."""

    requests: int
    error_s: float
    regret_s: float
    _predicted_s: float
    _measured_s: float
    _apart_s: float


class PoolPrices(Piece, frozen=True, tag="pool"):
    """What time is worth on engines of one fingerprint."""

    fingerprint: bytes
    prefill: PartsState
    crowd: LineState
    loads: dict[Tier, LineState]


class EnginePrices(Piece, frozen=True, tag="price"):
    """Of one of them, where it is apart, and what became of its promises."""

    publisher: Publisher
    fingerprint: bytes
    own: PartsState | None
    usual: float
    apart: float
    gap: GapState
    error: ErrorState


AnyPiece = (
    Opening
    | Closing
    | Engine
    | Claimed
    | Rows
    | Agent
    | Shelved
    | Stored
    | PoolPrices
    | EnginePrices
)
