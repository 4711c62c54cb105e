"""Values that every part of the house shares. Frozen, no behaviour beyond reading themselves."""

from __future__ import annotations

import enum
from typing import Literal

import msgspec


class Tier(enum.IntEnum):
    """Where bytes lie, nearest to the engine first (DESIGN §2)."""

    HBM = 0
    DRAM = 1
    DISK = 2
    OBJECT = 3
    PEER = 4


class Publisher(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """One rank of one engine: the unit that publishes KV events and that a request is sent to."""

    worker: str
    dp_rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker}#{self.dp_rank}" if self.dp_rank else self.worker


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a publisher's stream has been applied to: all before ``next_seq``, in one unbroken run
    from ``run_start`` on. ``last_ts`` is the time stamp of the batch before ``next_seq``: with its
    number it tells this life from others. Nothing before ``floor`` may be applied."""

    next_seq: int
    last_ts: float
    floor: int
    run_start: int
    applied: bool  # anything since the last reset
    cleared: bool


class Resume(msgspec.Struct, frozen=True, gc=False):  # of no cycle, and many at once
    """Up to where one publisher can really resume a given prompt, as the directory believes.

    ``tokens`` is the deepest position at which every required group is present; ``chain_tokens``
    is what counting matching blocks alone would promise (never smaller than ``tokens``).
    ``tier_tokens`` splits ``tokens`` by the nearest tier that holds them, indexed by `Tier`.
    ``missing`` names the group that stops it at ``tokens`` ("" when the chain itself ends there).
    ``own_tokens``: where an agent carries the engine on, how far it is from its own hbm; -1 where
    none does, and what it announces below hbm it loads by itself, dear or not.
    """

    publisher: Publisher
    tokens: int
    chain_tokens: int
    tier_tokens: tuple[int, ...] = ()
    missing: str = ""
    own_tokens: int = -1


class Refusal(msgspec.Struct, frozen=True):
    """Why a request was not taken, and in how many seconds it may be worth coming back.

    Of one that would have been late: which engine would have been the soonest, and when."""

    reason: Literal["slo_unreachable", "in_flight_max"]
    retry_after_s: float
    soonest: Publisher | None = None
    ttft_s: float = -1.0
