"""What must hold below the engines: bytes, books, promises; judged from what the media hold.

`TierWitness` marks the bytes that leave an engine with whose tokens they are, so that whatever
comes back into an engine says whether it belongs there. At rest the agents' books are compared
with the simulated media, and the directory with both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvatlas.core.events import Batch, UnitsHeld
from kvatlas.core.inventory import OWN
from kvatlas.core.keys import salt_scope
from kvatlas.core.layout import Layout
from kvatlas.core.records import Resume, Tier
from kvatlas.core.units import Part, Sizes, name_of
from kvatlas.sim.checkers import Checkers
from kvatlas.sim.checkers_end import census, told_twice
from kvatlas.sim.engines import SimEngine
from kvatlas.sim.faults import Ask
from kvatlas.sim.faults_replicas import Replica
from kvatlas.sim.faults_world import FaultWorld, fingerprint
from kvatlas.sim.tier_node import SimNode
from kvatlas.sim.tier_side import TierSide
from kvatlas.workload.prompt_keys import PromptKeys

#: Entries that an agent without units may keep: prices, ghosts, what its heaps have not swept yet.
AGENT_LEFT_MAX = 12_000


class TierWatch:
    """Units by the engines' own prompts: what was ever announced of them by an agent that an
    engine can read from."""

    def __init__(self, checkers: Checkers, world: FaultWorld) -> None:
        self._world = world
        self._ever: dict[str, set[bytes]] = {}  # node → names; "" → those of the store
        self._keys: dict[tuple[str, bytes], list[bytes]] = {}
        self._homes = {name: node.name for node in world.nodes or () for name in node.engines}
        self._announced = checkers.announced
        checkers.could_read = self.could_read
        if world.nodes is not None:
            world.nodes.tiers.published = self._published

    def _published(self, node: SimNode, batch: Batch) -> None:
        self._announced(node, batch)
        for event in batch.events:
            if isinstance(event, UnitsHeld):
                place = "" if event.tier is Tier.OBJECT else node.name
                names = self._ever.setdefault(place, set())
                names.update(name_of(key, Part.BODY) for key in event.bodies)
                names.update(name_of(key, Part.POINT) for key in event.points)

    def could_read(self, engine: str, ask: Ask) -> bool:
        """Was anything of this prompt ever there for this engine, or for what it was before?"""
        ever = (self._ever.get(self._homes[engine], ()), self._ever.get("", ()))
        member = next(m for m in self._world.scenario.members if m.name == engine)
        layout, _, identity = member.other
        for each, weights in ((member.layout, member.identity), (layout, identity)):
            place = (ask.id, fingerprint(each, weights))
            if place not in self._keys:
                chain = keys_of(self._world, ask, place[1], each)
                self._keys[place] = [name_of(key, Part.BODY) for key in chain]
            if any(name in names for name in self._keys[place] for names in ever):
                return True
        return False


def check_books(checkers: Checkers, world: FaultWorld) -> None:
    """Nothing is under way, and each ledger is the sum of what its medium holds."""
    if world.nodes is None:
        return
    if world.nodes.flows:
        checkers.report("leak", f"{world.nodes.flows} copies are still on their way")
    for node in world.nodes:
        if node.moving or node.agent.busy:
            checkers.report("leak", f"{node.name}: {node.agent.busy} operations never ended")
        for tier in OWN:
            if node.has(tier):
                _check_ledger(checkers, node, tier)
    for name, engine in world.engines.items():
        side = engine.outside
        if isinstance(side, TierSide) and side.waiting:
            checkers.report("leak", f"{name} waits for {side.waiting} loads or saves for ever")
        if engine.model.held:
            checkers.report("leak", f"{name} holds {engine.model.held} blocks for nobody")
    store = world.nodes.tiers.store
    if store is not None:
        size_bytes = sum(kept.unit.size_bytes for kept in store.held.values())
        if not size_bytes == store.used_bytes <= store.capacity_bytes:
            checkers.report("bounds", f"store: {size_bytes} bytes, counted {store.used_bytes}")


def _check_ledger(checkers: Checkers, node: SimNode, tier: Tier) -> None:
    ledger, held = node.agent.ledger(tier), node.held(tier)
    usage, where = ledger.usage(), f"{node.name} {tier.name.lower()}"
    left = {
        "reservations": usage.reservations,
        "leases": usage.leases,
        "pins": usage.pins,
        "bytes reserved": usage.reserved_bytes,
        "bytes leaving": usage.leaving_bytes,
        "bytes doomed": usage.doomed_bytes,
        "bytes in use": usage.in_use_bytes,
    }
    if any(left.values()):
        told = ", ".join(f"{count} {what}" for what, count in left.items() if count)
        checkers.report("leak", f"{where}: {told} at rest")
    booked, there = {entry.key for entry in ledger.entries()}, set(held)
    if booked != there:
        checkers.report(
            "leak",
            f"{where}: {len(booked - there)} units are booked and not there, "
            f"{len(there - booked)} there and not booked",
        )
    sums = Counter[str]()
    for kept in held.values():
        sums[kept.tenant] += kept.unit.size_bytes
    if usage.committed_bytes != sums.total() or ledger.tenants() != dict(sums):
        checkers.report(
            "bounds", f"{where}: {ledger.tenants()} bytes by tenant are booked, {dict(sums)} there"
        )
    if sums.total() > usage.capacity_bytes:
        checkers.report("bounds", f"{where}: {sums.total()} bytes, {usage.capacity_bytes} allowed")


def check_damage(checkers: Checkers, world: FaultWorld) -> None:
    """What a reader found damaged is not there any more, and was counted."""
    nodes = world.nodes
    for node in nodes or ():
        for tier in (*OWN, Tier.OBJECT):
            for kept in node.held(tier).values():
                if id(kept) in node.found_damaged:
                    checkers.report("wrong-bytes", f"{node.name}: damaged units are kept")
        counted = node.agent.counts["damaged"] + (nodes.counts[node.name] if nodes else 0)
        if counted < len(node.found_damaged):
            checkers.report(
                "wrong-bytes",
                f"{node.name}: {counted} damaged units are counted, {len(node.found_damaged)} were",
            )


def check_shelves(checkers: Checkers, world: FaultWorld, replica: Replica) -> None:
    """What the directory believes of a node's own tiers is what they hold; what it believes of a
    store was written there."""
    shelves = replica.dispatcher.directory.shelves
    # The last words of an agent's life may be lost, and the next life does not know of them.
    again = any(node.life > 1 for node in world.nodes or ())
    for node in world.nodes or ():
        believed = shelves.names(node.publisher)
        for tier in OWN:
            limit = world.scenario.directory.holders_per_publisher_max
            exact = world.scenario.roomy  # else what is refused is not known, and is not an error
            if len(believed[tier]) > limit:
                checkers.report("bounds", f"{node.name}: {len(believed[tier])} of {limit} units")
            _compare(checkers, node, tier, believed[tier], exact)
        store = believed.get(Tier.OBJECT, set())
        lies = store - _readable(node, Tier.OBJECT)
        if world.nodes is not None and world.nodes.forgetful and world.nodes.tiers.store:
            missed = world.nodes.tiers.store.missed  # the first who asks finds it out
            lies = {name for name in lies if (node.name, name) in missed}
        if lies and not again:
            checkers.report("resurrected", f"{node.name}: {len(lies)} units are not in the store")


def _readable(node: SimNode, tier: Tier) -> set[bytes]:
    """Names of what can be used: of points those with a record."""
    return {n for n in node.held(tier) if n[-1] == Part.BODY or node.is_sealed(tier, n)}


def _compare(
    checkers: Checkers, node: SimNode, tier: Tier, believed: set[bytes], exact: bool
) -> None:
    there = _readable(node, tier)
    lies, missed = len(believed - there), len(there - believed)
    where = f"{node.name} {tier.name.lower()}"
    if lies:
        checkers.report("resurrected", f"{where}: {lies} units are promised and not there")
    if missed and exact:
        checkers.report("convergence", f"{where}: {missed} units are there and not known")


def check_reach(
    checkers: Checkers, world: FaultWorld, replica: Replica, asks: Iterable[Ask]
) -> None:
    """How far each prompt can be resumed, tiers included, is what the directory says; and the
    agents offer nothing that is of another scope, adapter or model."""
    if world.nodes is None:
        return
    homes = {name: node.name for node in world.nodes for name in node.engines}
    exact = world.scenario.roomy
    held = {node.name: _held(node) for node in world.nodes}
    for ask in asks:
        asked: dict[bytes, tuple[list[bytes], list[Resume]]] = {}  # by fingerprint
        for engine in world.engines.values():
            identity, prompt = engine.identity, checkers.prompt(ask, engine.layout)
            if identity not in asked:
                keys = keys_of(world, ask, identity, engine.layout)
                asked[identity] = keys, replica.dispatcher.directory.peek(keys, identity)
            keys, found = asked[identity]
            true = _resume(held[homes[engine.name]], engine, ask, keys, prompt.keys)
            told = next((r for r in found if r.publisher == engine.publisher), None)
            tokens = min(told.tokens if told else 0, _limit(engine, ask))
            store = told is not None and (_from_store(told) or world.nodes.forgetful)
            what = f"{ask.id}: {engine.publisher} promises {tokens} tokens, tiers give {true}"
            if tokens > true and not store:
                checkers.report("over-promise", what)
            elif (
                tokens < true
                and exact
                and world.nodes.tiers.store is None  # of which it may know less
                and not told_twice(checkers, world, ask, engine, true)
            ):
                checkers.report("convergence", what)


def _from_store(told: Resume) -> bool:
    return len(told.tier_tokens) > Tier.OBJECT and bool(told.tier_tokens[Tier.OBJECT])


def _limit(engine: SimEngine, ask: Ask) -> int:
    grid = engine.layout.grid_tokens
    return (len(ask.tokens) // 4 - 1) // grid * grid


def keys_of(world: FaultWorld, ask: Ask, identity: bytes, layout: Layout) -> list[bytes]:
    """Block keys of a prompt for engines of one fingerprint."""
    ring, grid = world.keyring, layout.grid_tokens
    scope = salt_scope(ask.scope)
    root = ring.root(identity, scope, ask.adapter)
    full = len(ask.tokens) // 4 // grid * grid
    return list(ring.chain(root, memoryview(ask.tokens)[: full * 4], grid))


def _held(node: SimNode) -> set[bytes]:
    """Names of what can be used of its tiers and the store."""
    held: set[bytes] = set()
    for tier in (*OWN, Tier.OBJECT):
        held |= _readable(node, tier)
    return held


def _resume(
    held: set[bytes], engine: SimEngine, ask: Ask, keys: list[bytes], own: PromptKeys
) -> int:
    """The deepest position that the engine's pool and the media of its node give; ``own``: the
    engine's keys of this prompt."""
    pool, grid = engine.model.pool, engine.layout.grid_tokens
    holding = pool.open(ask.tokens, salt=ask.scope, adapter=ask.adapter, keys=own)
    local = pool.lookup(holding).tokens
    points, best = Sizes(engine.layout).has_points, local
    for number in range(local // grid, _limit(engine, ask) // grid):
        if name_of(keys[number], Part.BODY) not in held:
            break
        if not points or name_of(keys[number], Part.POINT) in held:
            best = (number + 1) * grid
    return best


def check_empty(checkers: Checkers, world: FaultWorld, replica: Replica) -> None:
    """Every tier was emptied: nobody believes otherwise, and nothing is kept for it."""
    shelves = replica.dispatcher.directory.shelves
    for node in world.nodes or ():
        believed = {tier: len(names) for tier, names in shelves.names(node.publisher).items()}
        if any(node.life > 1 for node in world.nodes or ()):
            believed.pop(Tier.OBJECT, None)  # see `check_shelves`
        if any(believed.values()):
            checkers.report("leak", f"{node.name}: {believed} units are known where there is none")
        if (kept := census(node.agent)) > AGENT_LEFT_MAX:
            checkers.report("bounds", f"{node.name}: the agent keeps {kept} entries of nothing")
