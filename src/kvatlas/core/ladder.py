"""The ladder of a request: the rungs that it may stand on, why it left one, and what that cost.

Priced by what engines hold → by load alone; a pair of engines → one engine; an engine → the next;
state from a lower tier → what the engine itself holds → computed again; an error only when nobody
is left. With a deadline each rung gets so much time that the one below can still be done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

#: Of what is left of a deadline, for a rung that has another one below it.
SHARE = 0.5

#: What a request may stand on. ``prefill`` and ``decode`` are the halves of a pair under way.
Rung = Literal["lookup", "remote", "pair", "prefill", "decode", "engine"]
Below = Literal["by_load", "local", "recompute", "pair", "engine", "error"]


class Fallback(msgspec.Struct, frozen=True):
    """One step down. ``cost_s``: the time that had gone into the rung when it was left.
    ``worker``: on which engine, "" for none."""

    rung: Rung
    reason: str
    to: Below
    worker: str = ""
    cost_s: float = 0.0


def patience_s(left_s: float, own_s: float, below_s: Iterable[float]) -> float:
    """How long a try may be silent when ``left_s`` are left of the deadline.

    ``own_s`` is what it should take itself, ``below_s`` what the rungs below would. It gets
    `SHARE` of what is left, or what it should take, as long as the cheapest rung below can be done
    after it. Where the two cannot both be done, it is the one that has begun that gets it all.
    """
    next_s = min(below_s, default=math.inf)
    if next_s == math.inf or own_s + next_s > left_s:
        return left_s
    return max(own_s, min(left_s - next_s, SHARE * left_s))


def first_in_time(prices_s: Sequence[float], left_s: float) -> int:
    """The first of the plans, by their seconds to the first token, that can be done in what is
    left; the first of all where none can: a price is no certainty."""
    return next((at for at, price_s in enumerate(prices_s) if price_s <= left_s), 0)


def loaded(expected: int, remote: int, cached: int) -> Below | None:
    """What became of a resume that was to take ``remote`` of its ``expected`` tokens from below
    hbm, where the engine reports ``cached``: None where it did, or where nothing was to be."""
    if remote <= 0 or cached < 0 or cached >= expected:
        return None
    return "local" if cached else "recompute"
