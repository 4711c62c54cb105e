"""What a ledger takes and answers: limits, entries, reservations, leases, refusals."""

from __future__ import annotations

import enum
import math

import msgspec

from kvatlas.core.forgetting import payer_of
from kvatlas.core.policy.base import Facts, Key
from kvatlas.core.retention import Terms
from kvatlas.errors import LedgerError

_NO_TERMS = Terms()


class Why(enum.StrEnum):
    """Why there is no room for a block, or no lease, now."""

    HELD = "held"  # it is here already
    WRITING = "writing"  # somebody else is writing it: wait for that, or do without
    LEAVING = "leaving"  # it is here, and on its way out: `keep` it, or wait
    TOO_LARGE = "too_large"  # larger than the tier, or than its tenant's quota
    QUOTA = "quota"  # evict `short_bytes` of the tenant's own first
    FULL = "full"  # evict `short_bytes` first
    BUSY = "busy"  # what is here is in use, being written or leaving: come back, or do without
    LIMIT = "limit"  # too many entries, reservations or leases


class Refusal(msgspec.Struct, frozen=True):
    """No, and why; ``short_bytes`` have to leave first."""

    why: Why
    short_bytes: int = 0


class Limits(msgspec.Struct, frozen=True):
    """What one tier may hold.

    ``high`` and ``low`` are shares of the capacity: eviction starts above the one and goes on to
    the other. ``quotas``: bytes by tenant; a tenant not named there has ``quota_default_bytes``
    (None: no quota but the capacity). ``terms``: by tenant, how long and how firmly it is kept.
    """

    capacity_bytes: int
    high: float = 0.95
    low: float = 0.90
    quotas: dict[str, int] = {}
    quota_default_bytes: int | None = None
    entries_max: int = 4_000_000
    reservations_max: int = 65_536
    leases_max: int = 65_536
    terms: dict[str, Terms] = {}

    def __post_init__(self) -> None:
        """Raises LedgerError on values that cannot work."""
        if not isinstance(self.capacity_bytes, int) or self.capacity_bytes < 0:
            raise LedgerError(
                f"capacity_bytes is {self.capacity_bytes!r}: a whole number, not negative"
            )
        if not 0 < self.low <= self.high <= 1:
            raise LedgerError(
                f"watermarks: low {self.low} and high {self.high} must be 0 < low <= high <= 1"
            )
        maxima = (self.entries_max, self.reservations_max, self.leases_max)
        if min(maxima) < 1 or min([0, *self.quotas.values(), self.quota_default_bytes or 0]) < 0:
            raise LedgerError("limits: counts must be at least 1, and no quota negative")
        if not all(0 <= terms.ttl_s < math.inf for terms in self.terms.values()):
            raise LedgerError("limits: ttl_s must be seconds, at least 0")

    @property
    def high_bytes(self) -> int:
        """Above this eviction starts."""
        return math.floor(self.capacity_bytes * self.high)

    @property
    def low_bytes(self) -> int:
        """Down to this it goes."""
        return math.floor(self.capacity_bytes * self.low)

    def quota_bytes(self, tenant: str) -> int | None:
        """What a tenant may hold; None: no limit but the capacity."""
        return self.quotas.get(tenant, self.quota_default_bytes)

    def expires_at(self, owner: str, since: float) -> float:
        """When the life of what an owner saved then ends."""
        return self.terms.get(payer_of(owner), _NO_TERMS).expires_at(since)


class Entry(msgspec.Struct):
    """One committed block. The ledger alone changes it.

    ``since``: when it was saved, here or in the tier that it was copied from. ``order`` numbers its
    last use among all uses, ``leaving``: chosen for eviction, still readable; ``doomed``: deleted
    or expired while somebody used it, found by nobody new.
    """

    key: Key
    facts: Facts
    tenant: str
    since: float
    used_at: float
    expires_at: float
    order: int
    uses: int = 0
    pins: int = 0
    leases: int = 0
    leaving: bool = False
    doomed: bool = False


class Reservation(msgspec.Struct, frozen=True):
    """Room for a block that is being written. ``number`` is what `commit` and `abort` take."""

    number: int
    key: Key
    facts: Facts
    tenant: str
    owner: str
    until: float


class Lease(msgspec.Struct, frozen=True):
    """A right to find an entry until a deadline."""

    number: int
    key: Key
    owner: str
    until: float


class Gone(msgspec.Struct, frozen=True):
    """What a call gave back: entries whose bytes are free now, rooms that were never filled, and
    how many leases ended."""

    entries: tuple[Entry, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    leases: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Where every byte of a tier is. ``committed_bytes`` includes what is leaving and doomed;
    ``in_use_bytes`` is what pins and leases hold of it."""

    capacity_bytes: int
    reserved_bytes: int
    committed_bytes: int
    leaving_bytes: int
    doomed_bytes: int
    in_use_bytes: int
    entries: int
    reservations: int
    leases: int
    pins: int


class Snapshot(msgspec.Struct, frozen=True):
    """A ledger as plain values; entries in the order of their last use."""

    limits: Limits
    entries: tuple[Entry, ...]
    reservations: tuple[Reservation, ...]
    leases: tuple[Lease, ...]
    pins: tuple[tuple[str, Key, int], ...]
    refused: dict[Why, int]
    evicted_bytes: int
    clock_steps: int
    number: int
    now: float
