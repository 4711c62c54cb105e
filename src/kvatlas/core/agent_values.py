"""The words between the agent of a node and whoever drives it: its inputs, its effects, its limits.

Every operation has a number and ends with one `Done`, whatever became of it. Times are seconds on
the driver's steady clock; ``until`` is when the agent gives an operation up.
"""

from __future__ import annotations

import enum
import math

import msgspec

from kvatlas.core.events import Event
from kvatlas.core.forgetting import Floor
from kvatlas.core.layout import Layout
from kvatlas.core.policy.checkpoints import Spacing
from kvatlas.core.records import Tier
from kvatlas.core.retention import Terms
from kvatlas.core.units import Part, Unit
from kvatlas.errors import ConfigError

RELAYS_MAX = 8  # each is priced for every load


class Config(msgspec.Struct, frozen=True):
    """How an agent behaves. Limits count what is in flight or waits; beyond them work is dropped
    and counted.

    ``hit_share``: how likely a saved unit is thought to be asked for again: it is saved where
    ``saves_s`` · ``hit_share`` is at least the time of its write. ``promote_after``: uses of a
    unit in a lower tier before it is copied up; 0 never. ``exclusive``: what is copied up leaves
    the tier below. ``write_through``: tiers that get a copy of what was saved at once.
    ``spacing``: which of the points that an engine has are saved; None: all. ``reads`` and
    ``writes``: bytes per second of the ways from and to each tier, as measured at the start.
    ``relays``: nodes that can read the store for this one and pass it on, and at how many bytes per
    second: loads are split over them where that is sooner. ``load_least_s``: a load is given up
    once it has taken as long as computing what it brings would, but not before this.
    """

    save_s: float = 30.0
    load_s: float = 10.0
    load_least_s: float = 1.0
    copy_s: float = 60.0
    queue_s: float = 60.0
    grace_s: float = 30.0
    saves_max: int = 64
    copies_max: int = 64
    loads_max: int = 4096
    queue_max: int = 1024
    units_max: int = 8192
    known_max: int = 4_000_000
    hit_share: float = 0.25
    promote_after: int = 1
    exclusive: bool = False
    write_through: tuple[Tier, ...] = ()
    demote: bool = True
    spacing: Spacing | None = None
    reads: dict[Tier, float] = {}
    writes: dict[Tier, float] = {}
    relays: dict[str, float] = {}

    def __post_init__(self) -> None:
        """Raises ConfigError on values that cannot work."""
        loads = self.load_s, self.load_least_s
        times = (*loads, self.save_s, self.copy_s, self.queue_s, self.grace_s)
        counts = (self.saves_max, self.copies_max, self.loads_max, self.queue_max)
        if not all(math.isfinite(t) and t > 0 for t in times):
            raise ConfigError(f"agent: times must be seconds above zero, not {times}")
        if min(*counts, self.units_max, self.known_max) < 1 or self.promote_after < 0:
            raise ConfigError("agent: limits must be at least 1, promote_after at least 0")
        rates = (*self.reads.values(), *self.writes.values(), *self.relays.values())
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ConfigError("agent: reads, writes and relays are bytes per second, above zero")
        if "" in self.relays or len(self.relays) > RELAYS_MAX:
            raise ConfigError(f"agent: relays are nodes by name, {RELAYS_MAX} at most")
        if not 0 <= self.hit_share <= 1:
            raise ConfigError(f"agent: hit_share is {self.hit_share}: a share is in 0…1")


# -- inputs -----------------------------------------------------------------------------------


class Attach(msgspec.Struct, frozen=True, tag=True):
    """An engine of this node. Again: it started anew, and what was under way for it is over.

    ``minimal``: its points are the minimal ones. ``prefill_tokens_per_s``: as told, not measured.
    """

    worker: str
    layout: Layout
    fingerprint: bytes
    minimal: bool = False
    prefill_tokens_per_s: float = 8000.0


class Detach(msgspec.Struct, frozen=True, tag=True):
    """The engine's process is gone. It writes and reads no more."""

    worker: str


class Filled(msgspec.Struct, frozen=True, tag=True):
    """An engine has computed (or loaded) a prompt up to the end of ``keys``, block keys from the
    start on; ``points``: counts of blocks at which it holds all windows now.

    ``resumed_tokens``: where the request began, by a hit or a load; ``prompt_tokens`` and
    ``output_tokens`` (so far): what a spacing of points goes by. ``first``: the blocks before it
    cannot be copied from there (any more). ``ahead``: bodies after the last point are saved too,
    because a point after them may follow.
    """

    worker: str
    request: str
    keys: tuple[bytes, ...]
    points: tuple[int, ...] = ()
    tenant: str = ""
    resumed_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first: int = 0
    ahead: bool = False


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """Blocks left an engine: what waits to be saved from there has no source any more."""

    worker: str
    keys: tuple[bytes, ...]


class Ask(msgspec.Struct, frozen=True):
    """How far could this prompt be resumed from here? ``keys``: as in `Directory.peek`.

    ``local_tokens`` is where the engine would resume without us, ``deadline_s`` how long a load
    may take.
    """

    request: str
    worker: str
    keys: tuple[bytes, ...]
    local_tokens: int
    prompt_tokens: int
    deadline_s: float = math.inf
    tenant: str = ""


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """The engine has made room and waits: load up to ``tokens``. Answered by `Ready`, always."""

    ask: Ask
    tokens: int


class Take(msgspec.Struct, frozen=True, tag=True):
    """Load the bodies, or the points, of the blocks ``first``… of ``keys``, each for itself: this
    engine can do with fewer than it asked for. Answered by `Ready` of no tokens, always."""

    worker: str
    request: str
    keys: tuple[bytes, ...]
    first: int
    part: Part
    deadline_s: float
    tenant: str = ""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this request's load any more. `Ready` still comes, once nothing writes."""

    worker: str
    request: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """An operation is over and touches nothing any more.

    ``failed`` names units that their source did not give, ``damaged`` those found wrong there, and
    ``refused`` those that were not taken where they were to go, or had no room there: their source
    is as good as before. ``error``: none arrived, and why.
    """

    op: int
    failed: tuple[bytes, ...] = ()
    damaged: tuple[bytes, ...] = ()
    error: str = ""
    refused: tuple[bytes, ...] = ()


class Damaged(msgspec.Struct, frozen=True, tag=True):
    """Somebody found these units of a tier wrong or gone."""

    tier: Tier
    names: tuple[bytes, ...]


class Found(msgspec.Struct, frozen=True, tag=True):
    """A tier's own catalogue, after a restart: units, and the positions that were sealed."""

    tier: Tier
    units: tuple[Unit, ...]
    sealed: tuple[bytes, ...] = ()
    tenant: str = ""


class Told(msgspec.Struct, frozen=True, tag=True):
    """Somebody else holds these in a tier that is shared, or holds them no more.

    Points among ``units`` are sealed. ``gone`` are names of units; ``node`` is that of a peer.
    """

    tier: Tier
    units: tuple[Unit, ...] = ()
    gone: tuple[bytes, ...] = ()
    node: str = ""


class Lose(msgspec.Struct, frozen=True, tag=True):
    """A tier is gone with all that it held (or the peer ``node`` is)."""

    tier: Tier
    node: str = ""


class Rest(msgspec.Struct, frozen=True, tag=True):
    """A shared tier does not answer: nothing is offered from it or written to it while it
    ``rests``. What is known of it stays."""

    tier: Tier
    rests: bool


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Bring a prompt up to dram before it is asked for. ``owner``: for whom, see `Release`."""

    worker: str
    keys: tuple[bytes, ...]
    tenant: str = ""
    owner: str = ""


class Push(msgspec.Struct, frozen=True, tag=True):
    """Write what this node holds of a prompt to a tier below or shared, before somebody asks there.
    ``owner``: for whom, see `Release`."""

    worker: str
    keys: tuple[bytes, ...]
    tier: Tier = Tier.OBJECT
    tenant: str = ""
    owner: str = ""


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Do not evict what is held of a prompt before ``until``."""

    owner: str
    keys: tuple[bytes, ...]
    until: float


class Lend(msgspec.Struct, frozen=True, tag=True):
    """A peer wants to read these from our dram until then. Answered by `Lent`, ended by `Release`
    of the same owner."""

    owner: str
    names: tuple[bytes, ...]
    until: float


class Release(msgspec.Struct, frozen=True, tag=True):
    """End of `Keep` and of `Lend`. What is under way of `Pull` and `Push` is given up: nothing of
    it is kept that has not arrived."""

    owner: str


class Quota(msgspec.Struct, frozen=True, tag=True):
    """What a tenant may hold in a tier of this node (None: in each), in bytes; None: no limit of
    its own."""

    tenant: str
    size_bytes: int | None
    tier: Tier | None = None


class Retain(msgspec.Struct, frozen=True, tag=True):
    """How long, and how firmly, what tenants have saved is kept in this node's tiers: of all of
    them; who is not named has no terms."""

    terms: dict[str, Terms]


class Resize(msgspec.Struct, frozen=True, tag=True):
    """Another capacity of an own tier; 0 empties it, downwards where that pays."""

    tier: Tier
    capacity_bytes: int


class Drain(msgspec.Struct, frozen=True, tag=True):
    """The node is going to end: nothing more is saved, and what only dram has is copied to disk,
    whether that pays or not. See `Agent.drained`."""


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Delete all of an owner, all that ``floors`` mean, and these ``names``; nothing of it that is
    under way arrives. Floors stay: what comes later of what they mean is refused."""

    tenant: str = ""
    floors: tuple[Floor, ...] = ()
    names: frozenset[bytes] = frozenset()


Input = (
    Attach
    | Detach
    | Filled
    | Evicted
    | Fetch
    | Take
    | Cancel
    | Done
    | Damaged
    | Found
    | Told
    | Lose
    | Rest
    | Pull
    | Push
    | Keep
    | Lend
    | Release
    | Quota
    | Retain
    | Resize
    | Drain
    | Forget
)

# -- answers and effects ----------------------------------------------------------------------


class Source(msgspec.Struct, frozen=True):
    """Units that come from one tier: of the peer ``node``, or of the store through that relay."""

    tier: Tier
    units: tuple[Unit, ...]
    node: str = ""

    @property
    def size_bytes(self) -> int:
        """Of all units."""
        return sum(unit.size_bytes for unit in self.units)


class Offer(msgspec.Struct, frozen=True):
    """Up to where a prompt should be loaded. ``tokens`` is ``local_tokens`` where nothing should:
    ``why`` then says the reason. Prices are seconds; ``recompute_s`` is what the load saves."""

    tokens: int
    local_tokens: int
    sources: tuple[Source, ...] = ()
    load_s: float = 0.0
    recompute_s: float = 0.0
    why: str = ""


class Kind(enum.StrEnum):
    """What an operation does."""

    SAVE = "save"
    LOAD = "load"
    DEMOTE = "demote"
    PROMOTE = "promote"
    WRITE = "write"  # a copy to a tier below or shared, beside the one above
    SEAL = "seal"


class Save(msgspec.Struct, frozen=True, tag=True):
    """Copy units out of an engine."""

    op: int
    worker: str
    request: str
    tier: Tier
    units: tuple[Unit, ...]
    until: float


class Load(msgspec.Struct, frozen=True, tag=True):
    """Copy units into an engine, so that the request can go on at ``end`` instead of ``start``;
    for a `Take` both are 0."""

    op: int
    worker: str
    request: str
    start: int
    end: int
    sources: tuple[Source, ...]
    until: float


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy units from one tier to another."""

    op: int
    kind: Kind
    source: Source
    target: Tier
    until: float


class Seal(msgspec.Struct, frozen=True, tag=True):
    """Write the records of these positions (block keys): all that they need is written."""

    op: int
    tier: Tier
    keys: tuple[bytes, ...]
    until: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Give an operation up. `Done` is due as soon as it touches nothing any more; one that comes
    later than the grace must be kept from writing (by its number)."""

    op: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """The bytes of these units are free, before anything that is asked for later is written."""

    tier: Tier
    names: tuple[bytes, ...]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The request can go on at ``tokens``; nothing writes to its blocks any more."""

    worker: str
    request: str
    tokens: int


class Lent(msgspec.Struct, frozen=True, tag=True):
    """What may be read of what a peer asked for."""

    owner: str
    names: tuple[bytes, ...]


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Tell the directory, in this order."""

    events: tuple[Event, ...]


Effect = Save | Load | Copy | Seal | Stop | Drop | Ready | Lent | Announce
