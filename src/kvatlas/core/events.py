"""KV events as core understands them: one form, whatever engine, version or encoding sent them.

`service.wire` decodes the engines' own bytes into these. Engine keys are unsigned 64-bit numbers
here (a 32-byte digest is cut to its low 64 bits, a signed number is taken modulo 2**64), because
they are only ever used inside the map of the publisher that sent them. Our own keys are computed
from the token ids (`core.keys`).
"""

from __future__ import annotations

import msgspec

from kvatlas.core.records import Tier


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks of one group are now held on ``tier``.

    ``hashes`` lists the kept blocks in token order, ``tokens`` the ids (uint32, little endian) of
    the whole newly cached range that starts after ``parent``. For a windowed group the list is
    shorter than the range: the two must never be zipped, and ``tokens`` may be left out, as long
    as ``range_tokens`` says how many there are. Both are empty for a location alone.
    ``salt`` counts only where ``parent`` is None. ``extras`` holds per block of ``block_tokens``
    what else identifies its content (images, embeddings), b"" for none; () means none at all.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes
    block_tokens: int
    tier: Tier = Tier.HBM
    group: int | None = None
    kind: str | None = None
    window_tokens: int | None = None
    salt: str = ""
    adapter: str = ""
    extras: tuple[bytes, ...] = ()
    range_tokens: int = 0


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks left one tier of the publisher (every tier where ``tier`` is None)."""

    hashes: tuple[int, ...]
    tier: Tier | None = Tier.HBM
    group: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The publisher dropped its whole prefix cache, on every tier that it announces."""


class UnitsHeld(msgspec.Struct, frozen=True, tag=True):
    """An agent's word: these lie on ``tier`` now, by our own keys of grid blocks.

    ``bodies`` of blocks, and ``points``: sealed, at the ends of blocks (`core.units`).
    """

    tier: Tier
    bodies: tuple[bytes, ...] = ()
    points: tuple[bytes, ...] = ()


class UnitsGone(msgspec.Struct, frozen=True, tag=True):
    """The same, of what lies there no more."""

    tier: Tier
    bodies: tuple[bytes, ...] = ()
    points: tuple[bytes, ...] = ()


Event = BlockStored | BlockRemoved | AllBlocksCleared | UnitsHeld | UnitsGone


class Batch(msgspec.Struct, frozen=True):
    """What one engine step published: ``seq`` counts up by one within an epoch of a publisher.

    ``ts`` is the engine's own clock in seconds, used only to tell a late duplicate from a restart.
    ``malformed`` counts events of this batch that could not be decoded and were left out,
    ``unknown`` those of a type that we do not know.
    """

    seq: int
    ts: float
    events: tuple[Event, ...]
    dp_rank: int = 0
    malformed: int = 0
    unknown: int = 0
