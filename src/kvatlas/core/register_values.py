"""What the register is asked, and what it answers. See `core.register`.

Times of the register are its own, in milliseconds: nobody else's clock decides. Whoever is told of
an end counts from when he asked, by his own steady clock.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from kvatlas.core.forgetting import Floor

FORMAT = 1  # of all that is kept in the register; members of another one are refused
CLOCK_APART_MS = 30_000
MEMBERS_MAX = 4096
LEASES_MAX = 64
RECORDS_MAX = 10_000_000  # of a store
RECORD_BYTES_MAX = 1024
MEMBER_BYTES_MAX = 16_384  # of what a member tells of itself
TENANTS_BYTES_MAX = 8 << 20
COMMITS_MAX = 256  # records in one call; as many are looked at for their end
NAME_CHARS_MAX = 128  # of members, leases, stores
KEYS_MAX = 1024  # of positions, or floors, in one question
KEY_BYTES_MAX = 256
OWNER_CHARS_MAX = 256
URL_CHARS_MAX = 1024
STORES_MAX = 256
NUMBER_MAX = (1 << 53) - 1  # what Lua counts exactly
CLUSTER_NAME = r"[A-Za-z0-9._-]{1,64}"

Kind = Literal["gateway", "agent"]


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process that has a part in the cluster. ``life`` differs at each start; ``url`` is where
    the others reach it, ``told`` what its kind tells of itself, as JSON."""

    name: str
    kind: Kind
    life: str
    url: str
    version: str
    draining: bool = False
    told: bytes = b"{}"


class No(enum.StrEnum):
    """Why the register refuses."""

    CLUSTER = "other_cluster"  # another secret under this name
    FORMAT = "other_format"  # of a version that keeps its state otherwise
    NAME = "name_taken"  # by a life that is still there
    CLOCK = "clock_apart"
    FULL = "full"
    STRANGER = "not_a_member"  # of that life, now
    HELD = "held"  # a lease, by somebody else
    STALE = "stale"  # an older revision, generation or token than the one that counts
    FORGOTTEN = "forgotten"  # what was purged
    QUOTA = "over_quota"


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Nothing was changed. ``about``: who holds it, what it is by now, and the like."""

    why: No
    about: str = ""


# -- members ---------------------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag=True):
    """Be a member, or stay one: for ``ttl_ms`` from now. ``identity`` proves the cluster: it is
    made of its name and its secret. ``clock_ms``: the caller's wall clock. ``known``: the state of
    the members that it has been told of."""

    member: Member
    identity: str
    ttl_ms: int
    clock_ms: int
    format: int = FORMAT
    known: int = 0


class Joined(msgspec.Struct, frozen=True, tag=True):
    """``created`` names the register's own life: another one is an empty register. The revisions
    say whether there is anything new to ask for; ``members`` is None where the caller knows."""

    now_ms: int
    created: str
    members_rev: int
    floors_rev: int
    tenants_rev: int
    members: tuple[Member, ...] | None


class Leave(msgspec.Struct, frozen=True, tag=True):
    """End of a life, with its leases."""

    name: str
    life: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is so. ``revision``: of what was changed, where it has one."""

    revision: int = 0


# -- leases ----------------------------------------------------------------------------------------


class Acquire(msgspec.Struct, frozen=True, tag=True):
    """The lease of ``what``, or more time of it. ``above``: the highest token of it that was ever
    seen, so that tokens rise over an empty register, too."""

    what: str
    name: str
    life: str
    ttl_ms: int
    above: int = 0


class Held(msgspec.Struct, frozen=True, tag=True):
    """It is the caller's, for its ``ttl_ms`` from the time of asking. ``token`` rises with each new
    holder: who sees a higher one refuses this."""

    what: str
    token: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Before its end."""

    what: str
    name: str
    life: str


# -- what was forgotten, and tenants ---------------------------------------------------------------


class Raise(msgspec.Struct, frozen=True, tag=True):
    """Floors that count from now on, each where it is higher than the one there is."""

    floors: tuple[Floor, ...]


class AskFloors(msgspec.Struct, frozen=True, tag=True):
    """All floors; `ToldFloors` with none where ``known`` is their revision."""

    known: int = 0


class ToldFloors(msgspec.Struct, frozen=True, tag=True):
    """None: the caller knows them."""

    revision: int
    floors: tuple[Floor, ...] | None


class PutTenants(msgspec.Struct, frozen=True, tag=True):
    """The file of tenants, as text. Where ``expected`` is the revision that counts it gets the next
    one. ``offered``: the revision that this text had before the register lost all; it is taken
    where that is higher than the one there is, and never replaces a newer one."""

    text: str
    expected: int = -1
    offered: int = 0


class AskTenants(msgspec.Struct, frozen=True, tag=True):
    """Their file, where ``known`` is not its revision."""

    known: int = 0


class ToldTenants(msgspec.Struct, frozen=True, tag=True):
    """None: the caller knows it."""

    revision: int
    text: str | None


# -- resume records of shared stores ---------------------------------------------------------------


class Record(msgspec.Struct, frozen=True, array_like=True):
    """``data`` is a resume record as `dataplane.records` packs it, of the position ``key``.
    ``size_bytes``: what was written to the store for it, which its owner's tenant pays for."""

    key: bytes
    owner: str
    size_bytes: int
    data: bytes


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Positions that are whole in a store, last of all. ``generation``: of the store's content, as
    the caller knew it when it began to write. ``ttl_ms`` 0: without end. ``quota_bytes``: by the
    tag of tenants that have one; -1 is none."""

    store: str
    generation: int
    records: tuple[Record, ...]
    ttl_ms: int = 0
    quota_bytes: dict[str, int] = {}


class Committed(msgspec.Struct, frozen=True, tag=True):
    """Why each was refused, None where it was not."""

    generation: int
    refused: tuple[No | None, ...]


class AskRecords(msgspec.Struct, frozen=True, tag=True):
    """Which of these positions are whole in a store."""

    store: str
    keys: tuple[bytes, ...]


class ToldRecords(msgspec.Struct, frozen=True, tag=True):
    """``data`` of each key, None where there is none that counts."""

    generation: int
    data: tuple[bytes | None, ...]


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """These positions are not whole any more."""

    store: str
    keys: tuple[bytes, ...]


class Expire(msgspec.Struct, frozen=True, tag=True):
    """What was in a store of this generation is gone, or not to be trusted: a new one begins, with
    no records. `Done` with the generation that counts, also where another has begun it before."""

    store: str
    generation: int


class ForgetOwner(msgspec.Struct, frozen=True, tag=True):
    """Records that a floor covers go, at most `COMMITS_MAX` at a time. `Left` says what is left."""

    store: str
    floor: Floor


class Left(msgspec.Struct, frozen=True, tag=True):
    """So many records went, and so many are to go."""

    gone: int
    left: int


class AskUsage(msgspec.Struct, frozen=True, tag=True):
    """How much a store is known to hold, and who pays for it."""

    store: str


class ToldUsage(msgspec.Struct, frozen=True, tag=True):
    """Records, and bytes by the tag of the tenant that pays."""

    generation: int
    records: int
    used_bytes: dict[str, int]


OfStore = Commit | AskRecords | Withdraw | Expire | ForgetOwner | AskUsage
Question = Join | Leave | Acquire | Release | Raise | AskFloors | PutTenants | AskTenants | OfStore
Answer = (
    Refused
    | Joined
    | Done
    | Held
    | ToldFloors
    | ToldTenants
    | Committed
    | ToldRecords
    | Left
    | ToldUsage
)
