"""How operations of a node end, and what else its agent learns about units.

Order is what makes a prefix whole or nothing: bodies count when they are committed, a point only
when every body before it can be read, and then only once its record is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from kvatlas.core.agent_values import Damaged, Done, Found, Kind, Lose, Ready, Source, Stop, Told
from kvatlas.core.inventory import OWN, Place, name_in, sources_of
from kvatlas.core.ledger_values import Refusal, Why
from kvatlas.core.node import Node, carried, facts_of
from kvatlas.core.operations import Operation
from kvatlas.core.policy.base import Facts
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit, name_of


class Later(msgspec.Struct, frozen=True):
    """A promotion that waits for room in dram."""

    source: Source
    tenant: str
    keys: tuple[bytes, ...]
    owner: str = ""


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
            self.promote(each.source, each.tenant, each.keys, each.owner)

    def under_way(self, owner: str) -> int:
        """Copies that somebody asked for ahead of time, and those of them that wait."""
        running = sum(operation.owner == owner for operation in self._node.operations)
        return running + sum(later.owner == owner for later in self._later.values())

    def recall(self, owner: str) -> None:
        """They are not wanted any more: nothing is kept of what has not arrived."""
        for operation in [o for o in self._node.operations if o.owner == owner]:
            operation.void = True
            self._node.stop(operation)
        for name in [n for n, later in self._later.items() if later.owner == owner]:
            del self._later[name]

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
        missing = bad.union(event.refused)
        node.counts["not_taken"] += len(event.refused)
        failed = bool(event.error) or operation.void
        arrived = [] if failed else [u for _, u in operation.units() if u.name not in missing]
        if bad and operation.kind not in (Kind.SAVE, Kind.SEAL):
            self._blame(operation, bad, event.damaged)
        match operation.kind:
            case Kind.LOAD:
                self._loaded(operation, arrived, whole=not failed and not missing)
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

    def _blame(
        self, operation: Operation, bad: Collection[bytes], damaged: Collection[bytes]
    ) -> None:
        """What could not be read is not held: nobody is offered it again."""
        node = self._node
        for source, unit in operation.units():
            if unit.name not in bad:
                continue
            node.counts["damaged" if unit.name in damaged else "not_read"] += 1
            if source.tier in node.inventory.ledgers:
                node.drop(source.tier, unit.name)
            else:
                at = source.node if source.tier is Tier.PEER else ""  # whoever passed it on
                node.inventory.unknow(source.tier, unit.name, at, ours=True)

    # -- loads ----------------------------------------------------------------------------------

    def _loaded(self, operation: Operation, arrived: Sequence[Unit], *, whole: bool) -> None:
        node = self._node
        tokens = operation.end if whole else operation.start
        worker = node.workers.get(operation.worker)
        part = operation.end > operation.start  # else each unit counts for itself
        if part and not whole and worker is not None and not worker.sizes.has_points:
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
            self.again(operation.worker, operation.keys, operation.tenant)

    def _learn_speed(self, operation: Operation) -> None:
        """A copy that had its path for itself says how fast that is."""
        paths, target = self._node.paths, operation.target
        if not operation.alone or operation.stopping:
            return
        seconds = self._node.now - operation.since
        ways = {paths.way(source) for source in operation.sources}
        if target is not None:
            if not paths.writing[target]:
                paths.writes[target].observe(operation.size_bytes, seconds)
        elif len(ways) == 1 and not any(paths.reading[way] for way in ways):
            paths.reads[ways.pop()].observe(operation.size_bytes, seconds)
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

    # -- copies that begin ----------------------------------------------------------------------

    def promote(
        self, source: Source, tenant: str, keys: tuple[bytes, ...], owner: str = ""
    ) -> None:
        """Copy units up to dram, where they are not there; later, where there is no room yet."""
        refused = self._copy(Kind.PROMOTE, source, Tier.DRAM, tenant, keys, owner=owner)
        if refused is None:
            return
        waits = refused.why in (Why.FULL, Why.BUSY)
        if waits and self._node.operations.running[Kind.DEMOTE]:
            self.wait(Later(source, tenant, keys, owner))
        else:
            self._node.counts["promotion_refused"] += 1

    def write(self, source: Source, target: Tier, tenant: str, owner: str = "") -> None:
        """Copy units on to a tier below or shared, beside where they are."""
        if self._copy(Kind.WRITE, source, target, tenant, (), owner=owner) is not None:
            self._node.counts["write_refused"] += 1

    def again(self, worker: str, keys: Sequence[bytes], tenant: str) -> None:
        """A prompt is used of which the store has lost something that lies here still: write it
        again, if that is what it is kept there for."""
        node = self._node
        lost, used = node.inventory.lost, node.workers.get(worker)
        through = Tier.OBJECT in node.config.write_through and not node.draining
        if not lost or used is None or not through:
            return
        operations = (o for o in node.operations if o.target is Tier.OBJECT)
        wanted = lost.difference(unit.name for o in operations for _, unit in o.units())
        found: dict[Place, list[Unit]] = {}
        for part, make in ((Part.BODY, used.sizes.body), (Part.POINT, used.sizes.point)):
            for index, key in enumerate(keys):
                name = name_of(key, part)
                place = node.inventory.place(name, OWN) if name in wanted else None
                if place is not None:
                    found.setdefault(place, []).append(make(keys, index))
        for source in sources_of(found):
            self.write(source, Tier.OBJECT, tenant)

    def _copy(
        self,
        kind: Kind,
        source: Source,
        target: Tier,
        tenant: str,
        keys: Sequence[bytes],
        *,
        owner: str,
    ) -> Refusal | None:
        """Begin to copy what is not at ``target``; answers only where that has no room for it."""
        node = self._node
        own, known = target in node.inventory.ledgers, node.inventory.known.get(target)
        if source.tier is target or not (own or known is not None):
            return None
        if node.floors.forgotten(tenant):
            node.counts["forgotten"] += 1
            return None
        if target in node.paths.resting:
            node.counts["write_rests"] += 1
            return None
        if node.operations.running[kind] >= node.config.copies_max:
            node.counts["promotion_busy" if kind is Kind.PROMOTE else "write_busy"] += 1
            return None
        units = {
            unit: self._facts(source.tier, unit, keys)
            for unit in source.units
            if unit.name not in (known or ()) and not node.inventory.held(unit.name, (target,))
        }
        going = Source(source.tier, tuple(units), source.node)
        leases = node.lease((going,), node.now + node.config.copy_s + node.config.grace_s)
        if not units or leases is None:
            return None
        rooms = node.roomy(target, units, tenant) if own else {}
        if isinstance(rooms, Refusal):
            node.end_leases(leases)
            return rooms
        if own:  # what is deleted there and still read has no room: its bytes would be nobody's
            going = Source(source.tier, tuple(u for u in units if u.name in rooms), source.node)
        if not going.units:
            node.end_leases(leases)
            return None
        node.copy(kind, going, target, rooms, tenant=tenant, owner=owner, leases=leases)
        return None

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
                if not node.inventory.whole(operation.keys, unit.index + 1, node.order):
                    node.counts["save_not_whole"] += 1
                    continue
                points.append(unit)
            if node.commit(operation, unit):
                kept.append(unit)
        if kept:
            self._learn_speed(operation)
        node.seal(tier, [unit.name for unit in points if unit in kept], operation.tenant)
        for further in node.config.write_through:
            if kept and further is not tier:
                self.write(Source(tier, tuple(kept)), further, operation.tenant)

    # -- copies and records that end ------------------------------------------------------------

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
        node.seal(tier, points, operation.tenant)
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
                node.inventory.know(tier, unit.name, "", ours=True, owner=operation.tenant)

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
        for entry in list(node.inventory.ledgers[tier].entries()):
            node.drop(tier, name_in(entry))

    def _found(self, event: Found) -> None:
        """A catalogue says what is there: what is whole is taken over, the rest is garbage."""
        node = self._node
        sealed, forgotten = set(event.sealed), node.floors.forgotten(event.tenant)
        garbage: list[bytes] = []
        for unit in event.units:
            point = unit.part is Part.POINT
            if forgotten or (point and unit.key not in sealed):
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

    def forget_owners(self, meant: Callable[[str], bool]) -> None:
        """Nothing of some owners waits any more."""
        for name in [n for n, later in self._later.items() if meant(later.tenant)]:
            del self._later[name]
