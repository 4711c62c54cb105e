"""The books of one node as its agent works on them: room, leases, copies between tiers, drops.

What a call changes is booked at once; what has to be done for it is put into ``out``, in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvatlas.core.agent_values import (
    Attach,
    Config,
    Copy,
    Drop,
    Effect,
    Kind,
    Quota,
    Rest,
    Seal,
    Source,
    Stop,
)
from kvatlas.core.cost import EngineCost, PoolCost
from kvatlas.core.forgetting import Floors
from kvatlas.core.inventory import Inventory, name_in, unit_of
from kvatlas.core.ledger import Ledger
from kvatlas.core.ledger_values import Entry, Refusal, Reservation, Why
from kvatlas.core.operations import Operation, Operations
from kvatlas.core.placement import Paths
from kvatlas.core.policy.base import Facts, Heat
from kvatlas.core.records import Tier
from kvatlas.core.retention import Terms
from kvatlas.core.units import Part, Sizes, Unit, name_of
from kvatlas.errors import LedgerError


class Worker:
    """One engine of the node, or what was known of it."""

    def __init__(self, attach: Attach) -> None:
        """Raises LayoutError where the layout does not say how large its blocks are."""
        self.attach = attach
        self.sizes = Sizes(attach.layout, minimal=attach.minimal)
        self.cost = EngineCost(PoolCost(attach.layout, attach.prefill_tokens_per_s))


class Node:
    """Shared by the parts of one agent."""

    def __init__(self, config: Config, ledgers: dict[Tier, Ledger]) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self.inventory = Inventory(ledgers, config.known_max, self.counts)
        self.operations = Operations(config.grace_s)
        self.paths = Paths(config)
        self.order = self.paths.order()
        self.workers: dict[str, Worker] = {}
        self.moved: Counter[tuple[Kind, Tier]] = Counter()  # bytes that arrived, by path
        self.out: list[Effect] = []
        self.now = 0.0
        self.frees = 0  # times that room was given back
        self.draining = False
        self.floors = Floors()

    def ledger(self, tier: Tier) -> Ledger | None:
        """The books of an own tier; None where the node has no such tier."""
        return self.inventory.ledgers.get(tier)

    def worker(self, name: str) -> Worker | None:
        """An engine of this node; a name that is none is counted."""
        worker = self.workers.get(name)
        if worker is None:
            self.counts["unknown_worker"] += 1
        return worker

    # -- shared tiers ---------------------------------------------------------------------------

    def rest(self, event: Rest) -> None:
        """A shared tier is left alone, or not any more."""
        if event.tier not in self.inventory.known:
            self.counts["unknown_tier"] += 1
            return
        (self.paths.resting.add if event.rests else self.paths.resting.discard)(event.tier)
        self.order = self.paths.order()

    def unknown(self, keys: Sequence[bytes], start: int, worker: Worker) -> list[tuple[Unit, ...]]:
        """Units of a prompt from block ``start`` on that are in no tier, block by block."""
        sizes, place = worker.sizes, self.inventory.place
        blocks = []
        for index in range(start, len(keys)):
            units = [sizes.body(keys, index)]
            if sizes.has_points:
                units.append(sizes.point(keys, index))
            blocks.append(tuple(u for u in units if place(u.name, self.order) is None))
        return blocks

    # -- room -----------------------------------------------------------------------------------

    def reserve(
        self, tier: Tier, units: Mapping[Unit, Facts], tenant: str
    ) -> dict[bytes, int] | Refusal:
        """Room for all of them, or for none. What is there already or being written is left out,
        since that is what was wanted."""
        ledger = self.inventory.ledgers[tier]
        rooms: dict[bytes, int] = {}
        for unit, facts in units.items():
            made = ledger.reserve(unit.name, facts, self.now, tenant=tenant)
            if isinstance(made, Reservation):
                rooms[unit.name] = made.number
            elif made.why not in (Why.HELD, Why.WRITING, Why.LEAVING):
                for number in rooms.values():
                    ledger.abort(number)
                return made
        return rooms

    def roomy(
        self, tier: Tier, units: Mapping[Unit, Facts], tenant: str
    ) -> dict[bytes, int] | Refusal:
        """The same, after making room where there is too little. What must be copied away first
        makes room only later: then the answer is still no."""
        rooms = self.reserve(tier, units, tenant)
        if isinstance(rooms, Refusal) and rooms.why in (Why.FULL, Why.QUOTA):
            ledger = self.inventory.ledgers[tier]
            need = sum(u.size_bytes for u in units if not self.inventory.held(u.name, (tier,)))
            if rooms.why is Why.QUOTA:
                self.make_room(tier, need, tenant)
            if need > ledger.free_bytes:
                self.make_room(tier, need)
            rooms = self.reserve(tier, units, tenant)
        return rooms

    def make_room(self, tier: Tier, need_bytes: int = 0, tenant: str | None = None) -> None:
        """Let the least valuable go: down, where a copy pays, else altogether."""
        ledger = self.inventory.ledgers[tier]
        victims = ledger.begin_eviction(self.now, need_bytes, tenant=tenant)
        by_tenant: dict[str, dict[Unit, Facts]] = {}
        for entry in victims:
            if self._goes_down(tier, entry):
                by_tenant.setdefault(entry.tenant, {})[unit_of(entry)] = carried(entry)
            else:
                self.let_go(tier, name_in(entry))
        for whose, units in by_tenant.items():
            self._demote(tier, units, whose)

    def relieve(self) -> None:
        """Bring every tier below its high watermark; the lowest first, which the others need."""
        for tier in sorted(self.inventory.ledgers, reverse=True):
            if self.inventory.ledgers[tier].over_bytes():
                self.make_room(tier)

    def _goes_down(self, tier: Tier, entry: Entry) -> bool:
        """Does a victim deserve the write to the tier below?"""
        if tier is not Tier.DRAM or Tier.DISK not in self.inventory.ledgers:
            return False
        name = name_in(entry)
        if not self.config.demote or self.inventory.held(name, (Tier.DISK,)):
            return False
        if name[-1] == Part.POINT and name not in self.inventory.sealed[tier]:
            return False
        if self.operations.running[Kind.DEMOTE] >= self.config.copies_max:
            self.counts["demotion_busy"] += 1
            return False
        return self.pays(Tier.DISK, entry.facts.saves_s, entry.facts.size_bytes)

    def pays(self, tier: Tier, saves_s: float, size_bytes: int) -> bool:
        """Is a write to a tier worth the time that it keeps the way there busy?"""
        return saves_s * self.config.hit_share >= self.paths.write_s(tier, size_bytes)

    def _demote(self, tier: Tier, units: dict[Unit, Facts], tenant: str) -> None:
        rooms = self.roomy(Tier.DISK, units, tenant)
        if isinstance(rooms, Refusal):
            self.counts["demotion_refused"] += len(units)
            rooms = {}
        going = tuple(unit for unit in units if unit.name in rooms)
        for unit in units:
            if unit.name not in rooms:
                self.let_go(tier, unit.name)
        if going:
            self.copy(Kind.DEMOTE, Source(tier, going), Tier.DISK, rooms, tenant=tenant)

    # -- what tenants may -----------------------------------------------------------------------

    def set_quota(self, event: Quota) -> None:
        """Another limit of one tenant."""
        for tier, ledger in self.inventory.ledgers.items():
            if event.tier not in (None, tier):
                continue
            quotas = {t: q for t, q in ledger.limits.quotas.items() if t != event.tenant}
            if event.size_bytes is not None:
                quotas[event.tenant] = event.size_bytes
            ledger.limits = msgspec.structs.replace(ledger.limits, quotas=quotas)

    def retain(self, terms: Mapping[str, Terms]) -> None:
        """Other terms of all tenants."""
        for ledger in self.inventory.ledgers.values():
            ledger.retain(terms)
        self.expire()

    def expire(self) -> None:
        """Nothing is found from now on whose life is over."""
        for tier, ledger in self.inventory.ledgers.items():
            ended, gone = ledger.expire(self.now)
            for entry in ended:
                self.inventory.hidden(tier, name_in(entry))
            if ended:
                self.counts["expired"] += len(ended)
            self.freed(tier, gone)

    # -- operations -----------------------------------------------------------------------------

    def copy(
        self,
        kind: Kind,
        source: Source,
        target: Tier,
        rooms: dict[bytes, int],
        *,
        tenant: str,
        owner: str = "",
        leases: list[tuple[Tier, int]] | None = None,
    ) -> None:
        """Start a copy between tiers."""
        until = self.now + self.config.copy_s
        operation = Operation(
            number=self.operations.next(),
            kind=kind,
            since=self.now,
            until=until,
            sources=(source,),
            target=target,
            tenant=tenant,
            owner=owner,
            rooms=rooms,
            leases=leases or [],
        )
        self.begin(operation)
        self.out.append(Copy(operation.number, kind, source, target, until))

    def begin(self, operation: Operation) -> None:
        """Book an operation that is about to be asked for."""
        self.operations.open(operation)
        paths, target = self.paths, operation.target
        operation.alone = not any(paths.reading[paths.way(s)] for s in operation.sources)
        operation.alone = operation.alone and (target is None or not paths.writing[target])
        self._queue(operation, 1)

    def close(self, number: int) -> Operation | None:
        """End one: leases go back, room that was not filled is still its own."""
        operation = self.operations.end(number)
        if operation is None:
            return None
        self._queue(operation, -1)
        self.end_leases(operation.leases)
        return operation

    def stop(self, operation: Operation) -> None:
        """Ask the driver to give it up."""
        if self.operations.stop(operation, self.now):
            self.out.append(Stop(operation.number))

    def seal(self, tier: Tier, names: Sequence[bytes], tenant: str) -> None:
        """All that these points need is written: make them count."""
        if not names:
            return
        if tier is Tier.DRAM:  # its records live and die with the agent's own memory
            for name in names:
                self.inventory.seal(tier, name)
            return
        until = self.now + self.config.copy_s
        units = tuple(Unit(name[:-1], Part.POINT, 0, 0) for name in names)
        number = self.operations.next()
        self.begin(
            Operation(
                number,
                Kind.SEAL,
                self.now,
                until,
                (Source(tier, units),),
                target=tier,
                tenant=tenant,
            )
        )
        self.out.append(Seal(number, tier, tuple(name[:-1] for name in names), until))

    def _queue(self, operation: Operation, sign: int) -> None:
        for source in operation.sources:
            if operation.kind is not Kind.SAVE:
                self.paths.reading[self.paths.way(source)] += sign * source.size_bytes
        if operation.target is not None:
            self.paths.writing[operation.target] += sign * operation.size_bytes

    # -- units ----------------------------------------------------------------------------------

    def lease(self, sources: Iterable[Source], until: float) -> list[tuple[Tier, int]] | None:
        """Rights to find all of them until then; None where one of them is gone."""
        made: list[tuple[Tier, int]] = []
        for source in sources:
            ledger = self.ledger(source.tier)
            if ledger is None:
                continue  # a shared tier: others look after it
            for unit in source.units:
                lease = ledger.lease(unit.name, until, self.now)
                if lease is None:
                    self.end_leases(made)
                    return None
                made.append((source.tier, lease.number))
        return made

    def end_leases(self, leases: Iterable[tuple[Tier, int]]) -> None:
        """Give rights back, and let go what nothing else kept."""
        for tier, number in leases:
            self.freed(tier, [self.inventory.ledgers[tier].end_lease(number)])

    def commit(self, operation: Operation, unit: Unit) -> bool:
        """The bytes of a unit are there; False where nothing was to come."""
        tier = operation.target
        if tier is None:
            return False
        if tier in self.inventory.ledgers:
            number = operation.rooms.pop(unit.name, None)
            if number is None:
                return False
            since = self.inventory.since(unit.name, operation.tenant)
            self.inventory.ledgers[tier].commit(number, self.now, since=since)
            self.inventory.arrived(tier, unit)
        elif unit.part is Part.BODY:
            self.inventory.know(tier, unit.name, "", ours=True, owner=operation.tenant)
        self.moved[operation.kind, tier] += unit.size_bytes
        return True

    def abort(self, operation: Operation) -> None:
        """Give back all room of an operation that was not filled."""
        if not operation.rooms or operation.target is None:
            return
        for number in operation.rooms.values():
            self.inventory.ledgers[operation.target].abort(number)
        names = tuple(operation.rooms)
        operation.rooms = {}
        self.free(operation.target, names)

    def let_go(self, tier: Tier, name: bytes) -> None:
        """A victim of eviction goes, unless somebody asked for it meanwhile."""
        ledger = self.inventory.ledgers[tier]
        try:
            gone = ledger.end_eviction(name, self.now)
        except LedgerError:
            return  # deleted meanwhile, or kept
        if gone:
            self.inventory.hidden(tier, name)
            self.free(tier, (name,))
            self.counts["evicted"] += 1

    def drop(self, tier: Tier, name: bytes) -> None:
        """Delete a unit: nobody finds it from now on; its bytes go when nobody reads them."""
        ledger = self.ledger(tier)
        if ledger is None or name not in ledger:
            return
        self.inventory.hidden(tier, name)
        self.freed(tier, [ledger.drop(name)])

    def freed(self, tier: Tier, entries: Iterable[Entry | None]) -> None:
        """The ledger let these go: so must the driver."""
        names = tuple(name_in(entry) for entry in entries if entry is not None)
        for name in names:
            self.inventory.hidden(tier, name)
        if names:
            self.free(tier, names)

    def free(self, tier: Tier, names: tuple[bytes, ...]) -> None:
        """Room is free again, which those may wait for that want to save."""
        self.frees += 1
        self.out.append(Drop(tier, names))


def facts_of(unit: Unit, keys: Sequence[bytes], saves_s: float, *, uses: int = 0) -> Facts:
    """What a policy is told of a unit of a prompt."""
    parent: bytes | None = None
    if unit.part is Part.POINT:
        parent = name_of(unit.key, Part.BODY)
    elif unit.index:
        parent = name_of(keys[unit.index - 1], Part.BODY)
    heat = Heat.SINK if unit.index == 0 and unit.part is Part.BODY else Heat.COLD
    return Facts(unit.size_bytes, parent, unit.index, saves_s, heat, uses)


def carried(entry: Entry) -> Facts:
    """The same facts one tier on."""
    f = entry.facts
    return Facts(f.size_bytes, f.parent, f.index, f.saves_s, f.heat, f.uses + entry.uses)
