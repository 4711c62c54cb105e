"""The lifecycle machine of one node: what is saved, where it lies, what is loaded, what has to go.

It decides and moves no byte. A driver (the node's agent in real time, the simulator in virtual
time) tells it what happens by `handle`, performs the effects in their order, and ends each
operation with one `Done`. What is not whole is never offered; what failed, came late or never, is
counted, gives its room back, and ends as a recompute.

States of a unit in a tier: room reserved → committed (a body can be read) → sealed (a point can
be used) → leaving (still readable, while it is copied down) → gone. See
docs/understanding/lifecycle.md.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvatlas.core.agent_ends import Ends
from kvatlas.core.agent_saves import Saves
from kvatlas.core.agent_state import decoded, encoded, fill
from kvatlas.core.agent_values import (
    Announce,
    Ask,
    Attach,
    Cancel,
    Config,
    Damaged,
    Detach,
    Done,
    Effect,
    Evicted,
    Fetch,
    Filled,
    Forget,
    Found,
    Input,
    Keep,
    Kind,
    Lend,
    Lent,
    Load,
    Lose,
    Offer,
    Pull,
    Push,
    Quota,
    Ready,
    Release,
    Resize,
    Resync,
    Source,
    Told,
)
from kvatlas.core.cost import EngineCost, PoolCost
from kvatlas.core.events import AllBlocksCleared
from kvatlas.core.inventory import OWN, Reach
from kvatlas.core.ledger import Ledger
from kvatlas.core.node import Node, Worker
from kvatlas.core.operations import Operation
from kvatlas.core.placement import best_offer
from kvatlas.core.policy.base import Policy
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, name_of
from kvatlas.errors import ConfigError

_POOLS_MAX = 64  # fingerprints of which prices are remembered


class Agent:
    """One node. Not for threads: one caller, in whose time ``now`` never goes back."""

    def __init__(self, ledgers: Mapping[Tier, Ledger], config: Config | None = None) -> None:
        """``ledgers``: empty books of the node's own tiers, `dram` and `disk`, one or both.

        Raises ConfigError for others.
        """
        if not ledgers or not set(ledgers) <= set(OWN):
            raise ConfigError("an agent has books of dram, of disk, or of both, and of no other")
        self.config = config or Config()
        self._node = Node(self.config, {tier: ledgers[tier] for tier in sorted(ledgers)})
        self._saves = Saves(self._node)
        self._ends = Ends(self._node)
        self._pools: dict[bytes, PoolCost] = {}

    # -- the machine ----------------------------------------------------------------------------

    def handle(self, event: Input, now: float) -> tuple[Effect, ...]:
        """Take one input in."""
        self._begin(now)
        match event:
            case Filled():
                self._saves.filled(event)
            case Fetch():
                self._fetch(event)
            case Done():
                self._ends.done(event)
            case Cancel():
                self._cancel(event)
            case Evicted():
                self._saves.forget(event.worker, event.keys)
            case Attach():
                self._attach(event)
            case Detach():
                self._detach(event.worker)
            case Damaged() | Lose() | Told() | Found():
                self._ends.learn(event)
            case Resync():
                self._node.inventory.say_all()
                self._node.out.append(Announce((AllBlocksCleared(),)))
            case _:
                self._wish(event)
        return self._end()

    def tick(self, now: float) -> tuple[Effect, ...]:
        """Do what is due: operations that are too late, leases and lives that ended."""
        self._begin(now)
        node = self._node
        while (operation := node.operations.due(node.now)) is not None:
            if operation.stopping:
                self._ends.give_up(operation)
            else:
                node.counts[f"{operation.kind}_late"] += 1
                node.stop(operation)
        self._saves.expire()
        for tier, ledger in node.inventory.ledgers.items():
            node.freed(tier, ledger.tick(node.now).entries)
        return self._end()

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None: nothing is due."""
        node = self._node
        due = [node.operations.next_deadline(), self._saves.next_deadline()]
        due += [ledger.next_deadline() for ledger in node.inventory.ledgers.values()]
        return min((at for at in due if at is not None), default=None)

    def _begin(self, now: float) -> None:
        node = self._node
        if not math.isfinite(now) or now < node.now:
            node.counts["clock_steps"] += 1
        else:
            node.now = now

    def _end(self) -> tuple[Effect, ...]:
        node = self._node
        node.relieve()
        self._ends.retry()
        self._saves.pump()
        said = node.inventory.take_said()
        if said:
            node.out.append(Announce(said))
        out, node.out = node.out, []
        return tuple(out)

    # -- questions ------------------------------------------------------------------------------

    def offer(self, ask: Ask) -> Offer:
        """Up to where a prompt should be loaded, from where and at what price. Changes nothing."""
        worker = self._node.workers.get(ask.worker)
        if worker is None:
            return Offer(ask.local_tokens, ask.local_tokens, why="unknown engine")
        reach = self._reach(ask, worker)
        return best_offer(ask, worker.sizes, worker.cost, reach, self._node.paths)

    def sources(self, ask: Ask, tokens: int) -> tuple[Source, ...]:
        """From where a load up to ``tokens`` would come, if it could. Changes nothing."""
        worker = self._node.workers.get(ask.worker)
        if worker is None or tokens % worker.sizes.grid_tokens:
            return ()
        reach, position = self._reach(ask, worker), tokens // worker.sizes.grid_tokens
        return reach.sources(position) if position in reach.positions else ()

    def _reach(self, ask: Ask, worker: Worker) -> Reach:
        start = max(ask.local_tokens, 0) // worker.sizes.grid_tokens
        return self._node.inventory.reach(ask.keys, start, worker.sizes, self._node.order)

    # -- engines --------------------------------------------------------------------------------

    def _attach(self, event: Attach) -> None:
        if event.worker in self._node.workers:
            self._detach(event.worker)
        pool = self._pools.get(event.fingerprint)
        if pool is None:
            pool = PoolCost(event.layout, event.prefill_tokens_per_s)
            self._pools[event.fingerprint] = pool
            if len(self._pools) > _POOLS_MAX:
                del self._pools[next(iter(self._pools))]
        self._node.workers[event.worker] = Worker(event, EngineCost(pool))

    def _detach(self, name: str) -> None:
        """The process is gone: it fills no room and reads nothing any more."""
        self._saves.forget(name)
        for operation in [o for o in self._node.operations if o.worker == name]:
            self._ends.give_up(operation, ready=False)
        self._node.workers.pop(name, None)

    def _fetch(self, event: Fetch) -> None:
        """Load exactly as far as the engine made room for, or not at all."""
        ask, node = event.ask, self._node
        worker = node.worker(ask.worker)
        if worker is None:
            return
        position, rest = divmod(event.tokens, worker.sizes.grid_tokens)
        if node.operations.load_of(ask.worker, ask.request) is not None:
            node.counts["load_twice"] += 1  # its `Ready` is still to come
            return
        busy = node.operations.running[Kind.LOAD] >= node.config.loads_max
        reach = self._reach(ask, worker)
        leases = None
        until = node.now + min(node.config.load_s, max(ask.deadline_s, 0.0))
        if not rest and position in reach.positions and not busy:
            sources = reach.sources(position)
            # A read that is given up may still go on for as long as the grace.
            leases = node.lease(sources, until + node.config.grace_s)
        if leases is None:
            node.counts["load_busy" if busy else "load_gone"] += 1
            node.out.append(Ready(ask.worker, ask.request, ask.local_tokens))
            return
        number = node.operations.next()
        start = ask.local_tokens
        operation = Operation(
            number=number,
            kind=Kind.LOAD,
            since=node.now,
            until=until,
            sources=sources,
            worker=ask.worker,
            request=ask.request,
            tenant=ask.tenant,
            keys=ask.keys[:position],
            start=start,
            end=event.tokens,
            leases=leases,
        )
        node.begin(operation)
        node.out.append(Load(number, ask.worker, ask.request, start, event.tokens, sources, until))

    def _cancel(self, event: Cancel) -> None:
        operation = self._node.operations.load_of(event.worker, event.request)
        if operation is not None:
            self._node.stop(operation)

    # -- ahead of time --------------------------------------------------------------------------

    def _wish(self, event: Input) -> None:
        """What somebody asks of this node, beyond serving its engines."""
        node = self._node
        match event:
            case Pull(worker, keys, tenant):
                for source in self._held_of(worker, keys, node.order):
                    self._ends.promote(source, tenant, keys)
            case Push(worker, keys, tier, tenant):
                for source in self._held_of(worker, keys, OWN):
                    self._ends.write(source, tier, tenant)
            case Keep(owner, keys, until):
                names = (name_of(key, part) for key in keys for part in Part)
                self._lease_all(owner, names, until, node.inventory.ledgers)
            case Lend(owner, names, until):
                have = self._lease_all(owner, names, until, (Tier.DRAM,))
                node.out.append(Lent(owner, have))
            case Release(owner):
                for tier, ledger in node.inventory.ledgers.items():
                    node.freed(tier, ledger.forget(_owner(owner)).entries)
            case Quota(tenant, size_bytes):
                self._set_quota(tenant, size_bytes)
            case Resize(tier, capacity_bytes):
                if (resized := node.ledger(tier)) is not None:
                    resized.resize(capacity_bytes)
            case Forget(tenant):
                self._saves.forget_tenant(tenant)
                self._ends.forget_tenant(tenant)

    def _lease_all(
        self, owner: str, names: Iterable[bytes], until: float, tiers: Iterable[Tier]
    ) -> tuple[bytes, ...]:
        """Leases on what can be read of ``names``; says of what."""
        node = self._node
        if not node.now < until < math.inf:
            node.counts["lease_refused"] += 1
            return ()
        leased: dict[bytes, None] = {}
        for name in names:
            for tier in tiers:
                ledger = node.ledger(tier)
                if ledger is None or node.inventory.place(name, (tier,)) is None:
                    continue
                if ledger.lease(name, until, node.now, owner=_owner(owner)) is not None:
                    leased[name] = None
        return tuple(leased)

    def _set_quota(self, tenant: str, size_bytes: int | None) -> None:
        for ledger in self._node.inventory.ledgers.values():
            quotas = {t: q for t, q in ledger.limits.quotas.items() if t != tenant}
            if size_bytes is not None:
                quotas[tenant] = size_bytes
            ledger.limits = msgspec.structs.replace(ledger.limits, quotas=quotas)

    def _held_of(
        self, name: str, keys: tuple[bytes, ...], order: Sequence[Tier]
    ) -> tuple[Source, ...]:
        """What an engine could load of a prompt that it has nothing of."""
        worker = self._node.worker(name)
        if worker is None:
            return ()
        reach = self._node.inventory.reach(keys, 0, worker.sizes, order)
        return reach.sources(reach.positions[-1]) if reach.positions else ()

    # -- the whole ------------------------------------------------------------------------------

    @property
    def counts(self) -> Counter[str]:
        """What was dropped, refused, given up or found damaged, by reason."""
        return self._node.counts

    @property
    def moved(self) -> Counter[tuple[Kind, Tier]]:
        """Bytes that arrived, by what was done and by tier: where they came from for a load and
        a promotion, else where they went."""
        return self._node.moved

    @property
    def busy(self) -> int:
        """Operations under way, and saves and promotions that wait."""
        return len(self._node.operations) + len(self._saves) + len(self._ends)

    def snapshot(self) -> bytes:
        """All that it knows, for `restore`; not what policies and prices have learnt."""
        return encoded(self._node, self._saves, self._ends)

    @classmethod
    def restore(
        cls, data: bytes, policies: Mapping[Tier, Policy], config: Config | None = None
    ) -> Agent:
        """The agent that `snapshot` was taken of, over empty policies, one per own tier.

        Raises LedgerError when the data is no snapshot, KeyError where a policy is missing.
        """
        state = decoded(data)
        ledgers = {t: Ledger.restore(books, policies[t]) for t, books in state.ledgers.items()}
        made = cls(ledgers, config)
        for attach in state.workers:
            made._attach(attach)
        fill(made._node, made._saves, made._ends, state)
        return made

    def digest(self) -> str:
        """Hex digest of all that `snapshot` holds: equal where two agents are in the same state."""
        return hashlib.sha256(b"kvatlas.agent.1\0" + self.snapshot()).hexdigest()[:16]

    def ledger(self, tier: Tier) -> Ledger:
        """The books of an own tier, to read. Raises KeyError where there is no such tier."""
        return self._node.inventory.ledgers[tier]


def _owner(name: str) -> str:
    """Leases for others are apart from those of operations."""
    return f"for {name}"
