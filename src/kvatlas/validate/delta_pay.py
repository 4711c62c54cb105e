"""When coding pays: seconds saved on a link against seconds spent coding.

Both sides grow with the bytes, so what decides is the speed of the link, not the length of the
context: that only scales what is won or lost. ``ratio`` is bytes before over bytes behind.
"""

from __future__ import annotations

import math

import msgspec

SEED_FRAME = 0.25  # seed document 003, 11.3: a P frame takes a quarter of an I frame
SEED_RATIOS = (5.0, 13.0)  # and what it makes of it


class Speeds(msgspec.Struct, frozen=True):
    """What a coder does on one core, in bytes of what goes in and comes out again."""

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


def frames_ratio(distance: int, frame: float = SEED_FRAME) -> float:
    """The whole ratio where all but one of ``distance`` rows shrink to ``frame``."""
    return distance / (1 + (distance - 1) * frame)


def both(parts: list[tuple[float, Speeds]]) -> Speeds:
    """Parts of one state, each with its share of the bytes, one after another."""
    whole = sum(share for share, _ in parts)
    return Speeds(
        ratio=whole / sum(share / s.ratio for share, s in parts),
        encode_bytes_per_s=whole / sum(share / s.encode_bytes_per_s for share, s in parts),
        decode_bytes_per_s=whole / sum(share / s.decode_bytes_per_s for share, s in parts),
    )


def seconds(size_bytes: float, link_bytes_per_s: float, coder: Speeds, *, encode: bool) -> float:
    """Over the link and decoded, one after the other; encoded before where ``encode`` (a hand-off;
    what is loaded from a tier was encoded when it was stored)."""
    return size_bytes * (1 / link_bytes_per_s / coder.ratio + _work(coder, encode=encode))


def pays_below(coder: Speeds, *, encode: bool, other: Speeds | None = None) -> float:
    """The link's bytes/s below which this coder is faster than ``other`` (none: no coder).

    0 where no link is slow enough, since it is not smaller; infinity where every link is: smaller
    and not slower.
    """
    saved = (1 / other.ratio if other else 1.0) - 1 / coder.ratio
    spent = _work(coder, encode=encode) - (_work(other, encode=encode) if other else 0.0)
    if saved <= 0:
        return 0.0
    return saved / spent if spent > 0 else math.inf


def needed_bytes_per_s(ratio: float, link_bytes_per_s: float) -> float:
    """How fast a coder of this ratio must decode for a load over the link to break even."""
    return link_bytes_per_s / (1 - 1 / ratio) if ratio > 1 else math.inf


def _work(coder: Speeds, *, encode: bool) -> float:
    """Seconds per byte."""
    return 1 / coder.decode_bytes_per_s + (1 / coder.encode_bytes_per_s if encode else 0.0)
