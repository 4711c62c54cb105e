"""How operations of a node end, and what else its agent learns about units.

Order is what makes a prefix whole or nothing: bodies count when they are committed, a point only
when every body before it can be read, and then only once its record is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from kvatlas.core.agent_values import Damaged, Done, Found, Kind, Lose, Ready, Source, Stop, Told
from kvatlas.core.inventory import OWN
from kvatlas.core.ledger_values import Refusal, Why
from kvatlas.core.node import Node, carried, facts_of
from kvatlas.core.operations import Operation
from kvatlas.core.policy.base import Facts
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit


class Later(msgspec.Struct, frozen=True):
    """A promotion that waits for room in dram."""

    source: Source
    tenant: str
    keys: tuple[bytes, ...]


class Ends:
    """Works on the books of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._later: OrderedDict[bytes, Later] = OrderedDict()
        self._seen = (0, 0)

    def __len__(self) -> int:
        """Promotions that wait for room."""
        return len(self._later)

    def waiting(self) -> list[Later]:
        """Them, the oldest first."""
        return list(self._later.values())

    def wait(self, later: Later) -> None:
        """One more; where there are too many the oldest goes."""
        self._later[later.source.units[0].name] = later
        if len(self._later) > self._node.config.copies_max:
            self._later.popitem(last=False)
            self._node.counts["promotion_busy"] += 1

    def retry(self) -> None:
        """Room was given back: those that wait for it may go on."""
        node = self._node
        changes = node.frees, node.operations.ended
        if self._seen == changes or not self._later:
            return
        self._seen = changes
        later, self._later = self._later, OrderedDict()
        for each in later.values():
            self.promote(each.source, each.tenant, each.keys)

    def done(self, event: Done) -> None:
        """An operation ended. One that was given up before counts for nothing."""
        node = self._node
        operation = node.close(event.op)
        if operation is None:
            node.counts["late"] += 1
            return
        if event.error:
            node.counts[f"{operation.kind}_failed"] += 1
        bad = {*event.failed, *event.damaged}
        failed = bool(event.error) or operation.void
        arrived = [] if failed else [u for _, u in operation.units() if u.name not in bad]
        self._blame(operation, event)
        match operation.kind:
            case Kind.LOAD:
                self._loaded(operation, arrived, whole=not failed and not bad)
            case Kind.SAVE:
                self._saved(operation, arrived)
            case Kind.SEAL:
                self._sealed(operation, arrived)
            case _:
                self._copied(operation, arrived)
        node.abort(operation)

    def give_up(self, operation: Operation, *, ready: bool = True) -> None:
        """It was not heard of in time, or whoever did it is gone."""
        node = self._node
        if node.close(operation.number) is None:
            return
        node.counts[f"{operation.kind}_given_up"] += 1
        node.out.append(Stop(operation.number))  # before its room is anybody else's
        if operation.kind is Kind.LOAD and ready:
            node.out.append(Ready(operation.worker, operation.request, operation.start))
        if operation.kind is Kind.SEAL:
            self._sealed(operation, [])
        if operation.kind is Kind.DEMOTE:
            self._copied(operation, [])
        node.abort(operation)

    def _blame(self, operation: Operation, event: Done) -> None:
        """What could not be read is not held: nobody is offered it again."""
        node = self._node
        bad = {*event.failed, *event.damaged}
        for source, unit in operation.units() if bad else ():
            if unit.name not in bad or operation.kind in (Kind.SAVE, Kind.SEAL):
                continue
            damaged = unit.name in event.damaged
            node.counts["damaged" if damaged else "not_read"] += 1
            if source.tier in node.inventory.ledgers:
                node.drop(source.tier, unit.name)
            else:
                node.inventory.unknow(source.tier, unit.name, source.node, ours=True)

    # -- loads ----------------------------------------------------------------------------------

    def _loaded(self, operation: Operation, arrived: Sequence[Unit], *, whole: bool) -> None:
        node = self._node
        tokens = operation.end if whole else operation.start
        worker = node.workers.get(operation.worker)
        if not whole and worker is not None and not worker.sizes.has_points:
            # Without windows each body ends at a position: what came in a row counts.
            have = {unit.name for unit in arrived}
            units = sorted((u for _, u in operation.units()), key=lambda u: u.index)
            for unit in units:
                if unit.name not in have:
                    break
                tokens += worker.sizes.grid_tokens
        node.out.append(Ready(operation.worker, operation.request, tokens))
        for source in operation.sources:
            ledger = node.ledger(source.tier)
            if whole:
                node.moved[Kind.LOAD, source.tier] += source.size_bytes
            if ledger is not None:
                for unit in source.units:
                    ledger.touch(unit.name, node.now)
        if whole:
            self._learn_speed(operation)
            for source in operation.sources:
                self._promote_used(source, operation)

    def _learn_speed(self, operation: Operation) -> None:
        """A copy that had its path for itself says how fast that is."""
        paths, target = self._node.paths, operation.target
        if not operation.alone or operation.stopping:
            return
        seconds = self._node.now - operation.since
        tiers = {source.tier for source in operation.sources}
        if target is not None:
            if not paths.writing[target]:
                paths.writes[target].observe(operation.size_bytes, seconds)
        elif len(tiers) == 1 and not any(paths.reading[tier] for tier in tiers):
            paths.reads[tiers.pop()].observe(operation.size_bytes, seconds)
            self._node.order = paths.order()

    def _promote_used(self, source: Source, operation: Operation) -> None:
        """Copy up what was used often enough where it lies."""
        node = self._node
        gate = node.config.promote_after
        if not gate or source.tier is Tier.DRAM:
            return
        ledger = node.ledger(source.tier)
        units = []
        for unit in source.units:
            entry = ledger.peek(unit.name) if ledger is not None else None
            if ledger is None or (entry is not None and entry.uses >= gate):
                units.append(unit)
        if units:
            part = Source(source.tier, tuple(units), source.node)
            self.promote(part, operation.tenant, operation.keys)

    def promote(self, source: Source, tenant: str, keys: tuple[bytes, ...]) -> None:
        """Copy units up to dram, where they are not there; later, where there is no room yet."""
        node = self._node
        if Tier.DRAM not in node.inventory.ledgers or source.tier is Tier.DRAM:
            return
        if node.operations.running[Kind.PROMOTE] >= node.config.copies_max:
            node.counts["promotion_busy"] += 1
            return
        units = {
            unit: self._facts(source.tier, unit, keys)
            for unit in source.units
            if not node.inventory.held(unit.name, (Tier.DRAM,))
        }
        going = Source(source.tier, tuple(units), source.node)
        leases = node.lease((going,), node.now + node.config.copy_s + node.config.grace_s)
        if not units or leases is None:
            return
        rooms = node.roomy(Tier.DRAM, units, tenant)
        if isinstance(rooms, Refusal):
            for tier, number in leases:
                node.freed(tier, [node.inventory.ledgers[tier].end_lease(number)])
            if rooms.why in (Why.FULL, Why.BUSY) and node.operations.running[Kind.DEMOTE]:
                self.wait(Later(source, tenant, keys))
            else:
                node.counts["promotion_refused"] += 1
            return
        node.copy(Kind.PROMOTE, going, Tier.DRAM, rooms, tenant=tenant, leases=leases)

    def _facts(self, tier: Tier, unit: Unit, keys: Sequence[bytes]) -> Facts:
        ledger = self._node.ledger(tier)
        entry = ledger.peek(unit.name) if ledger is not None else None
        return carried(entry) if entry is not None else facts_of(unit, keys, 0.0)

    # -- saves ----------------------------------------------------------------------------------

    def _saved(self, operation: Operation, arrived: Iterable[Unit]) -> None:
        node, tier = self._node, operation.target
        assert tier is not None
        kept: list[Unit] = []
        points: list[Unit] = []
        for unit in sorted(arrived, key=lambda u: (u.part, u.index)):
            if unit.part is Part.POINT:
                # A point without all that comes before it is of no use to anybody.
                if not node.inventory.whole(operation.keys, unit.index + 1, OWN_FIRST):
                    node.counts["save_not_whole"] += 1
                    continue
                points.append(unit)
            if node.commit(operation, unit):
                kept.append(unit)
        if kept:
            self._learn_speed(operation)
        node.seal(tier, [unit.name for unit in points if unit in kept])
        for further in node.config.write_through:
            if kept and further is not tier:
                self.write(Source(tier, tuple(kept)), further, operation.tenant)

    def write(self, source: Source, target: Tier, tenant: str) -> None:
        """Copy units on to a tier below or shared, beside where they are."""
        node = self._node
        ledger = node.ledger(target)
        if source.tier is target or (ledger is None and target not in node.inventory.known):
            return
        if node.operations.running[Kind.WRITE] >= node.config.copies_max:
            node.counts["write_busy"] += 1
            return
        if ledger is None:
            known = node.inventory.known[target]
            units = {
                u: self._facts(source.tier, u, ()) for u in source.units if u.name not in known
            }
        else:
            units = {
                u: self._facts(source.tier, u, ())
                for u in source.units
                if not node.inventory.held(u.name, (target,))
            }
        going = Source(source.tier, tuple(units), source.node)
        leases = node.lease((going,), node.now + node.config.copy_s + node.config.grace_s)
        if not units or leases is None:
            return
        rooms = node.roomy(target, units, tenant) if ledger is not None else {}
        if isinstance(rooms, Refusal):
            node.counts["write_refused"] += 1
            for tier, number in leases:
                node.freed(tier, [node.inventory.ledgers[tier].end_lease(number)])
            return
        node.copy(Kind.WRITE, going, target, rooms, tenant=tenant, leases=leases)

    # -- copies and records ---------------------------------------------------------------------

    def _copied(self, operation: Operation, arrived: Iterable[Unit]) -> None:
        node, tier = self._node, operation.target
        assert tier is not None
        (source,) = operation.sources
        ledger = node.ledger(source.tier)
        points = []
        for unit in sorted(arrived, key=lambda u: (u.part, u.index)):
            if ledger is not None and unit.name not in ledger:
                continue  # deleted meanwhile: so must be its copy
            if node.commit(operation, unit):
                if unit.part is Part.POINT:
                    points.append(unit.name)
                if operation.kind is Kind.PROMOTE and node.config.exclusive:
                    node.drop(source.tier, unit.name)
        node.seal(tier, points)
        if operation.kind is Kind.DEMOTE:
            for unit in source.units:
                node.let_go(source.tier, unit.name)

    def _sealed(self, operation: Operation, arrived: Sequence[Unit]) -> None:
        node, tier = self._node, operation.target
        assert tier is not None
        have = {unit.name for unit in arrived}
        for _, unit in operation.units():
            if unit.name not in have:
                node.drop(tier, unit.name)
            elif tier in node.inventory.ledgers:
                node.inventory.seal(tier, unit.name)
            else:
                node.inventory.know(tier, unit.name, "", ours=True)

    # -- what is learnt otherwise ---------------------------------------------------------------

    def learn(self, event: Damaged | Lose | Told | Found) -> None:
        """Somebody says what is held, or is not."""
        node, tier = self._node, event.tier
        own = tier in node.inventory.ledgers
        match event:
            case Damaged(_, names):
                node.counts["damaged"] += len(names)
                for name in names:
                    if own:
                        node.drop(tier, name)
                    elif tier is Tier.OBJECT:
                        node.inventory.unknow(tier, name, "", ours=True)
            case Told(_, units, gone, at) if not own and tier in node.inventory.known:
                for unit in units:
                    node.inventory.know(tier, unit.name, at, ours=False)
                for name in gone:
                    node.inventory.unknow(tier, name, at, ours=True)
            case Lose(_, at) if own:
                self._lose(tier)
            case Lose(_, at) if tier in node.inventory.known:
                node.inventory.lose(tier, at)
            case Found() if own:
                self._found(event)
            case _:
                node.counts["unknown_tier"] += 1

    def _lose(self, tier: Tier) -> None:
        """An own tier is empty now."""
        node = self._node
        for operation in node.operations:
            if operation.target is tier:
                operation.void = True
                node.stop(operation)
        names = [e.key for e in node.inventory.ledgers[tier].entries()]
        for name in names:
            assert isinstance(name, bytes)
            node.drop(tier, name)

    def _found(self, event: Found) -> None:
        """A catalogue says what is there: what is whole is taken over, the rest is garbage."""
        node = self._node
        sealed = set(event.sealed)
        garbage: list[bytes] = []
        for unit in event.units:
            point = unit.part is Part.POINT
            if point and unit.key not in sealed:
                garbage.append(unit.name)
                continue
            facts = Facts(unit.size_bytes, None, unit.index)
            made = node.inventory.ledgers[event.tier].reserve(
                unit.name, facts, node.now, tenant=event.tenant
            )
            if isinstance(made, Refusal):
                if made.why not in (Why.HELD, Why.WRITING, Why.LEAVING):
                    garbage.append(unit.name)
                continue
            node.inventory.ledgers[event.tier].commit(made.number, node.now)
            node.inventory.arrived(event.tier, unit)
            if point:
                node.inventory.seal(event.tier, unit.name)
        if garbage:
            node.counts["found_unusable"] += len(garbage)
            node.free(event.tier, tuple(garbage))

    def forget_tenant(self, tenant: str) -> None:
        """Delete all of a tenant, and what is on its way for it."""
        node = self._node
        for operation in node.operations:
            if operation.tenant == tenant and operation.kind is not Kind.LOAD:
                operation.void = True
                node.stop(operation)
        for tier, ledger in node.inventory.ledgers.items():
            names = [e.key for e in ledger.entries() if e.tenant == tenant]
            for name in names:
                assert isinstance(name, bytes)
                node.drop(tier, name)


OWN_FIRST = (*OWN, Tier.OBJECT, Tier.PEER)
