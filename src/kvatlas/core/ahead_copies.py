"""In `core.ahead`, its copies: what one may cost, where it stands, and what came of it.

A copy is *ordered*, and *arrives*, *fails*, comes *late* or is *recalled*: one of these, once. One
that arrived is watched for a while: requests that go by it are counted, with what the next best
plan elsewhere was priced at; without any it was *unused*.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated

import msgspec

from kvatlas.core.cost import PRIOR_BYTES_PER_S, PRIOR_LATENCY_S, Line
from kvatlas.core.keys import PUBLIC, Scope
from kvatlas.core.records import Publisher, Tier

WATCHED_MAX = 4096  # copies that arrived and are watched
LATE = 8.0  # times what a copy should take: then it is late…
LATE_S = 5.0  # …and so long beyond
WATCH = 5.0  # horizons for which a copy is watched: a next turn may take its time


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``replicate``: prefixes that many wait for are copied to idle nodes; ``push``: prompts to
    where their next turn will go; ``move``: what a node that drains has of prompts that were asked
    for lately goes to others. ``copies_max``: under way at a time; ``bandwidth_share``: of each
    node's time, what copies may take in the long run; ``horizon_s``: over which the past counts (an
    observation fades by e), and for five times of which a copy is watched. ``bytes_per_s``: between
    nodes, until copies were measured: with too low a rate none may ever be."""

    replicate: bool = False
    push: bool = False
    move: bool = False
    copies_max: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    bandwidth_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    horizon_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 60.0
    bytes_per_s: Annotated[float, msgspec.Meta(ge=1e6, le=1e13)] = PRIOR_BYTES_PER_S[Tier.PEER]

    @property
    def on(self) -> bool:
        """Whether there is anything to do."""
        return self.replicate or self.push or self.move


class Why(enum.StrEnum):
    """What a copy is for."""

    REPLICATE = "replicate"
    PUSH = "push"
    MOVE = "move"


class Copy(msgspec.Struct, frozen=True, tag=True):
    """An order: ``agent`` brings the blocks ``keys`` into its node's dram, from wherever it finds
    them (``source`` has them). ``engine``: one of its node, whose keys they are; ``scope``: the
    only one that can use them. ``expected_s``: what it is worth. Answered by `Copied` of its id."""

    id: str
    why: Why
    agent: Publisher
    source: Publisher
    engine: Publisher
    keys: tuple[bytes, ...]
    tokens: int
    size_bytes: int
    expected_s: float
    until: float
    scope: Scope = PUBLIC


class Recall(msgspec.Struct, frozen=True, tag=True):
    """The copy is not wanted any more."""

    id: str
    agent: Publisher
    reason: str


Effect = Copy | Recall


class Copied(msgspec.Struct, frozen=True, tag=True):
    """A copy is over. ``moved_bytes`` arrived; ``error``: why it is not whole."""

    id: str
    moved_bytes: int = 0
    error: str = ""


class Tally(msgspec.Struct):
    """What copies of one kind came to. ``ended`` by how: arrived, late, recalled, failed;
    ``denied`` by why none was ordered; ``recalled`` by reason. ``served``: requests that went by a
    copy. Of those whose first token was timed, what this saved them against the next best plan
    elsewhere: ``predicted_s`` when they were sent, ``measured_s`` at their end."""

    ordered: int = 0
    expected_s: float = 0.0
    ended: Counter[str] = msgspec.field(default_factory=Counter)
    recalled: Counter[str] = msgspec.field(default_factory=Counter)
    denied: Counter[str] = msgspec.field(default_factory=Counter)
    moved_bytes: int = 0
    used: int = 0
    unused: int = 0
    served: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0


class Account(msgspec.Struct):
    """One copy. ``fades_at``: when what it is for is not worth it any more."""

    order: Copy
    ordered_at: float
    fades_at: float
    arrived_at: float = -1.0
    uses: int = 0

    @property
    def tally_end_at(self) -> float:
        """When an order that nobody answered is over."""
        return min(self.order.until, self.fades_at)


class Copies:
    """Those under way and those that are watched. Its effects wait in ``out``."""

    def __init__(self, params: Params) -> None:
        self.tallies = {why: Tally() for why in Why}
        self.out: list[Effect] = []
        self._params = params
        self._line = Line(PRIOR_LATENCY_S, 1 / params.bytes_per_s, 100e6)
        self._number = 0
        self._coming: dict[str, Account] = {}
        self._watched: OrderedDict[str, Account] = OrderedDict()  # in order of arrival
        self._by_key: dict[bytes, list[Account]] = {}  # last key → what is coming or watched
        self._debts: dict[Publisher, tuple[float, float]] = {}  # agent → (seconds owed, since)

    def cost_s(self, size_bytes: int) -> float:
        """Seconds that a copy of that size should take."""
        return self._line.at(size_bytes)

    @property
    def coming(self) -> int:
        """Under way."""
        return len(self._coming)

    @property
    def watched(self) -> int:
        """Arrived, and watched."""
        return len(self._watched)

    def of(self, key: bytes) -> Sequence[Account]:
        """Copies whose last block is this one."""
        return self._by_key.get(key, ())

    def within(self, keys: Collection[bytes]) -> list[Account]:
        """Copies of prefixes of a prompt."""
        if not self._by_key:
            return []
        return [each for key in self._by_key.keys() & keys for each in self._by_key[key]]

    def room(self, agents: Sequence[Publisher], now: float) -> str:
        """Why no copy may be ordered between these now; "" where one may."""
        if len(self._coming) >= self._params.copies_max:
            return "busy"
        return "bandwidth" if any(self._owed(agent, now) > 0 for agent in agents) else ""

    def order(
        self,
        why: Why,
        way: tuple[Publisher, Publisher, Publisher],
        keys: tuple[bytes, ...],
        *,
        tokens: int,
        size_bytes: int,
        expected_s: float,
        fades_at: float,
        scope: Scope,
        now: float,
    ) -> None:
        """Order one. ``way``: the agent that gets it, the one that has it, an engine of the
        first."""
        cost_s = self.cost_s(size_bytes)
        for agent in way[:2]:
            self._debts[agent] = self._owed(agent, now) + cost_s, now
        self._number += 1
        tally = self.tallies[why]
        tally.ordered += 1
        tally.expected_s += expected_s
        order = Copy(
            id=f"{why}-{self._number}",
            why=why,
            agent=way[0],
            source=way[1],
            engine=way[2],
            keys=keys,
            tokens=tokens,
            size_bytes=size_bytes,
            expected_s=expected_s,
            until=now + LATE * cost_s + LATE_S,
            scope=scope,
        )
        account = self._coming[order.id] = Account(order, now, fades_at)
        self._by_key.setdefault(keys[-1], []).append(account)
        self.out.append(order)

    def ended(self, event: Copied, now: float) -> None:
        """One came, or did not. Of one that was given up before only the bytes count."""
        why = Why(event.id.partition("-")[0])
        tally, account = self.tallies[why], self._coming.pop(event.id, None)
        tally.moved_bytes += event.moved_bytes
        if account is None:
            return
        if event.error:
            tally.ended["failed"] += 1
            self._drop(account)
            return
        tally.ended["arrived"] += 1
        if event.moved_bytes:
            self._line.observe(event.moved_bytes, now - account.ordered_at)
        account.arrived_at = now
        self._watched[event.id] = account
        if len(self._watched) > WATCHED_MAX:
            self._unwatch(next(iter(self._watched.values())))

    def recall(self, account: Account, reason: str) -> None:
        """It is not wanted any more; one that has arrived is not watched any longer."""
        order = account.order
        if self._coming.pop(order.id, None) is None:
            self._unwatch(account)
            return
        tally = self.tallies[order.why]
        tally.ended["late" if reason == "late" else "recalled"] += 1
        tally.recalled[reason] += 1
        self._drop(account)
        self.out.append(Recall(order.id, order.agent, reason))

    def gone(self, agent: Publisher) -> None:
        """This agent is gone, or lost what it held."""
        for account in [a for a in self._all() if a.order.agent == agent]:
            self.recall(account, "agent_gone")
        self._debts.pop(agent, None)

    def tick(self, now: float) -> None:
        """End what is due."""
        for account in [a for a in self._coming.values() if a.tally_end_at <= now]:
            self.recall(account, "late" if account.order.until <= now else "cooled")
        while self._watched:
            account = next(iter(self._watched.values()))
            if account.arrived_at + WATCH * self._params.horizon_s > now:
                break
            self._unwatch(account)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        due = [account.tally_end_at for account in self._coming.values()]
        if self._watched:
            first = next(iter(self._watched.values()))
            due.append(first.arrived_at + WATCH * self._params.horizon_s)
        return min(due, default=None)

    def _all(self) -> Iterator[Account]:
        yield from self._coming.values()
        yield from self._watched.values()

    def _owed(self, agent: Publisher, now: float) -> float:
        debt_s, since = self._debts.get(agent, (0.0, now))
        return max(0.0, debt_s - self._params.bandwidth_share * (now - since))

    def _unwatch(self, account: Account) -> None:
        if self._watched.pop(account.order.id, None) is None:
            return
        tally = self.tallies[account.order.why]
        if account.uses:
            tally.used += 1
        else:
            tally.unused += 1
        self._drop(account)

    def _drop(self, account: Account) -> None:
        key = account.order.keys[-1]
        rest = [a for a in self._by_key[key] if a is not account]
        if rest:
            self._by_key[key] = rest
        else:
            del self._by_key[key]
