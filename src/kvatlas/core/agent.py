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

from kvatlas.core.agent_drain import Drained
from kvatlas.core.agent_ends import Ends
from kvatlas.core.agent_forget import forget, stored, under_way
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
    Drain,
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
    Rest,
    Retain,
    Source,
    Take,
    Told,
)
from kvatlas.core.events import Event
from kvatlas.core.inventory import OWN, Place, Reach, sources_of
from kvatlas.core.ledger import Ledger
from kvatlas.core.node import Node, Worker
from kvatlas.core.operations import Operation
from kvatlas.core.placement import best_offer
from kvatlas.core.policy.base import Policy
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit, name_of
from kvatlas.errors import ConfigError


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
        self._drained = Drained(self._node, self._ends)

    # -- the machine ----------------------------------------------------------------------------

    def handle(self, event: Input, now: float) -> tuple[Effect, ...]:
        """Take one input in."""
        self._begin(now)
        match event:
            case Filled() if self._node.draining:
                self._node.counts["save_draining"] += 1
            case Filled() if self._node.floors.forgotten(event.tenant):
                self._node.counts["forgotten"] += 1
            case Filled(worker, _, keys):
                self._saves.filled(event)
                self._ends.again(worker, keys, event.tenant)
            case Fetch():
                self._fetch(event)
            case Take():
                self._take(event)
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
            case Rest():
                self._node.rest(event)
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
        node.expire()

    def _end(self) -> tuple[Effect, ...]:
        node = self._node
        node.relieve()
        self._ends.retry()
        self._drained.pump()
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

    def held(self) -> tuple[Event, ...]:
        """All that was announced and is so still, for whoever lost track. Changes nothing."""
        return self._node.inventory.all_said()

    def unknown(self, ask: Ask, tokens: int) -> list[tuple[Unit, ...]]:
        """Block by block from ``tokens`` on, the units of a prompt that no tier is known to have:
        what may be looked for in shared ones. Changes nothing."""
        worker = self._node.workers.get(ask.worker)
        if worker is None:
            return []
        return self._node.unknown(ask.keys, max(tokens, 0) // worker.sizes.grid_tokens, worker)

    def present(self, name: str, keys: Sequence[bytes], first: int) -> tuple[int, tuple[int, ...]]:
        """Of a prompt's blocks from ``first`` on: how many lie here in a row, and at which counts
        of blocks an engine that has those before ``first`` can resume. Changes nothing."""
        worker = self._node.workers.get(name)
        if worker is None:
            return 0, ()
        reach = self._node.inventory.reach(keys, first, worker.sizes, self._node.order)
        return len(reach.bodies), tuple(reach.positions)

    def _reach(self, ask: Ask, worker: Worker) -> Reach:
        start = max(ask.local_tokens, 0) // worker.sizes.grid_tokens
        return self._node.inventory.reach(ask.keys, start, worker.sizes, self._node.order)

    # -- engines --------------------------------------------------------------------------------

    def _attach(self, event: Attach) -> None:
        worker = Worker(event)  # raises before anything changes
        if event.worker in self._node.workers:
            self._detach(event.worker)
        self._node.workers[event.worker] = worker

    def _detach(self, name: str) -> None:
        """The process is gone: it fills no room and reads nothing any more."""
        self._saves.forget(name)
        for operation in [o for o in self._node.operations if o.worker == name]:
            self._ends.give_up(operation, ready=False)
        self._node.workers.pop(name, None)

    def _fetch(self, event: Fetch) -> None:
        """Load exactly as far as the engine made room for, or not at all."""
        ask, node = event.ask, self._node
        worker = self._asks(ask)
        if worker is None:
            return
        position, rest = divmod(event.tokens, worker.sizes.grid_tokens)
        reach = self._reach(ask, worker)
        sources: tuple[Source, ...] = ()
        if not rest and position in reach.positions:
            sources = node.paths.spread(reach.sources(position))
        # As long as it would take to compute what it brings: then computing is the sooner way.
        prompt_tokens = max(ask.prompt_tokens, event.tokens)
        saves_s = worker.cost.recompute_s(ask.local_tokens, prompt_tokens)
        saves_s -= worker.cost.recompute_s(event.tokens, prompt_tokens)
        within_s = min(ask.deadline_s, max(saves_s, node.config.load_least_s))
        ask = msgspec.structs.replace(ask, deadline_s=within_s)
        self._load(ask, sources, ask.keys[:position], ask.local_tokens, event.tokens)

    def _take(self, event: Take) -> None:
        """Load what there is of it."""
        node = self._node
        worker = self._asks(event)
        if worker is None:
            return
        of = worker.sizes.body if event.part is Part.BODY else worker.sizes.point
        found: dict[Place, list[Unit]] = {}
        for index in range(event.first, len(event.keys)):
            unit = of(event.keys, index)
            place = node.inventory.place(unit.name, node.order)
            if place is not None and unit.size_bytes:
                found.setdefault(place, []).append(unit)
        self._load(event, sources_of(found), event.keys, 0, 0)

    def _asks(self, asked: Ask | Take) -> Worker | None:
        """Who asks for a load; None: it is not to be answered."""
        node = self._node
        worker = node.worker(asked.worker)
        if worker is None:
            return None
        if node.operations.load_of(asked.worker, asked.request) is not None:
            node.counts["load_twice"] += 1  # its `Ready` is still to come
            return None
        return worker

    def _load(
        self,
        asked: Ask | Take,
        sources: tuple[Source, ...],
        keys: tuple[bytes, ...],
        start: int,
        end: int,
    ) -> None:
        """Begin it, or say at once that nothing comes: of no sources, or where it cannot be."""
        node = self._node
        busy = node.operations.running[Kind.LOAD] >= node.config.loads_max
        until = node.now + min(node.config.load_s, max(asked.deadline_s, 0.0))
        if node.floors.forgotten(asked.tenant):
            node.counts["forgotten"] += 1
            sources = ()
        leases = None
        if sources and not busy:
            # A read that is given up may still go on for as long as the grace.
            leases = node.lease(sources, until + node.config.grace_s)
        if leases is None:
            node.counts["load_busy" if busy else "load_gone"] += 1
            node.out.append(Ready(asked.worker, asked.request, start))
            return
        operation = Operation(
            number=node.operations.next(),
            kind=Kind.LOAD,
            since=node.now,
            until=until,
            sources=sources,
            worker=asked.worker,
            request=asked.request,
            tenant=asked.tenant,
            keys=keys,
            start=start,
            end=end,
            leases=leases,
        )
        node.begin(operation)
        node.out.append(
            Load(operation.number, asked.worker, asked.request, start, end, sources, until)
        )

    def _cancel(self, event: Cancel) -> None:
        operation = self._node.operations.load_of(event.worker, event.request)
        if operation is not None:
            self._node.stop(operation)

    # -- ahead of time --------------------------------------------------------------------------

    def _wish(self, event: Input) -> None:
        """What somebody asks of this node, beyond serving its engines."""
        node = self._node
        match event:
            case Pull(worker, keys, tenant, owner):
                for source in self._held_of(worker, keys, node.order):
                    self._ends.promote(source, tenant, keys, owner)
            case Push(worker, keys, tier, tenant, owner):
                for source in self._held_of(worker, keys, OWN):
                    self._ends.write(source, tier, tenant, owner)
            case Keep(owner, keys, until):
                names = (name_of(key, part) for key in keys for part in Part)
                self._lease_all(owner, names, until, node.inventory.ledgers)
            case Lend(owner, names, until):
                have = self._lease_all(owner, names, until, (Tier.DRAM,))
                node.out.append(Lent(owner, have))
            case Release(owner):
                self._ends.recall(owner)
                for tier, ledger in node.inventory.ledgers.items():
                    node.freed(tier, ledger.forget(_owner(owner)).entries)
            case Quota():
                node.set_quota(event)
            case Retain(terms):
                node.retain(terms)
            case Resize(tier, capacity_bytes):
                if (resized := node.ledger(tier)) is not None:
                    resized.resize(capacity_bytes)
            case Drain():
                node.draining = True
                self._saves.forget_all()
            case Forget():
                forget(node, self._saves, self._ends, event)

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

    def forgetting(self, event: Forget) -> int:
        """Operations that touch what is meant, and have not ended: then nothing of it arrives."""
        return under_way(self._node, event)

    def forgotten(self, owner: str) -> bool:
        """Whether nothing of this owner may be used. Changes nothing."""
        return self._node.floors.forgotten(owner)

    def stored(self, event: Forget) -> frozenset[bytes]:
        """Of what is meant, the names that this node knows to be in the store: those that it put
        there. To be asked before it forgets."""
        return stored(self._node, event)

    def under_way(self, owner: str) -> int:
        """Copies that were asked for ahead of time by ``owner`` and have not ended."""
        return self._ends.under_way(owner)

    def depths(self, name: str, keys: tuple[bytes, ...]) -> tuple[int, dict[Tier, int]]:
        """How many tokens of a prompt an engine could resume from all tiers together, and from each
        by itself. Changes nothing."""
        worker = self._node.workers.get(name)
        if worker is None:
            return 0, {}
        reach, grid = self._node.inventory.reach, worker.sizes.grid_tokens
        ends = {
            order: max(reach(keys, 0, worker.sizes, order).positions, default=0) * grid
            for order in (tuple(self._node.order), *((tier,) for tier in self._node.order))
        }
        alone = {tier: ends[tier,] for tier in self._node.order if ends[tier,]}
        return ends[tuple(self._node.order)], alone

    def expects(self, tier: Tier, name: bytes) -> bool:
        """Whether a unit is held in an own tier, or on its way to one. Changes nothing."""
        ledger = self._node.inventory.ledgers.get(tier)
        held = ledger is not None and ledger.peek(name) is not None
        return held or self._node.inventory.coming(name)

    def held_bytes(self, keys: Iterable[bytes]) -> dict[Tier, int]:
        """What of a prompt lies in each own tier. Changes nothing."""
        names = [name_of(key, part) for key in keys for part in Part]
        found = {}
        for tier, ledger in self._node.inventory.ledgers.items():
            entries = (ledger.peek(name) for name in names)
            found[tier] = sum(e.facts.size_bytes for e in entries if e is not None)
        return found

    @property
    def draining(self) -> bool:
        """Whether it is about to end."""
        return self._node.draining

    @property
    def drained(self) -> bool:
        """It is draining, and all that could be brought to disk is there."""
        return self._node.draining and self._drained.over and not self.busy

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
