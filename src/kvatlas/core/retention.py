"""How long what a tenant has saved is kept, and who goes first where a tier is full."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec

TtlSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Retention(enum.StrEnum):
    """What a full tier lets go, before it asks its policy."""

    DROP_FIRST = "drop_first"  # before all else
    NORMAL = "normal"
    KEEP = "keep"  # after all else, up to a fair share of the tier; what is beyond is normal


class Terms(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant's. ``ttl_s``: life of a unit from when it was saved, used or not; 0: without end."""

    ttl_s: TtlSeconds = 0.0
    retention: Retention = Retention.NORMAL

    def expires_at(self, since: float) -> float:
        """When what was saved then is over."""
        return since + self.ttl_s if self.ttl_s else math.inf


def turns(
    terms: Mapping[str, Terms], held: Mapping[str, int], capacity_bytes: int
) -> list[Collection[str] | None]:
    """Whose entries may go, turn by turn until there is room; None: everybody's.

    ``held``: bytes by tenant in the tier. A fair share is the same part of it for each of them.
    """
    classes = {t: terms[t].retention for t in terms.keys() & held.keys()}
    first = {t for t, kind in classes.items() if kind is Retention.DROP_FIRST}
    kept = {
        t
        for t, kind in classes.items()
        if kind is Retention.KEEP and held[t] * len(held) <= capacity_bytes
    }
    found: list[Collection[str] | None] = [None]
    if kept:
        found.insert(0, held.keys() - kept)
    if first:
        found.insert(0, first)
    return found
