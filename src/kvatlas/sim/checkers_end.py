"""What must hold when everything is healed, over and at rest."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Dispatcher, Finished, Join, Question, Settle
from kvatlas.core.events import BlockStored
from kvatlas.core.keys import salt_scope
from kvatlas.core.native import KeyTable, NameTable
from kvatlas.core.router import Plan, Router
from kvatlas.sim.checkers import BACK_S, Checkers, own_tokens
from kvatlas.sim.engines import SimEngine
from kvatlas.sim.faults import Ask
from kvatlas.sim.faults_replicas import Replica
from kvatlas.sim.faults_world import FaultWorld
from kvatlas.sim.gateway import Outcome

#: Entries that may be left in all maps and queues when nothing is held: bits, last of their kind.
LEFT_MAX = 100
ALIKE_MAX = 30  # requests whose decisions two cores are compared by
_LEAVES = frozenset((bytes, int, float, str, bool, type(None)))  # of which most of it consists
_INTERNED = ("_masks",)  # holder sets that were seen, which have a limit of their own
_NO_ENGINE = ("the engine broke off", "the engine fell silent")


def check_endings(checkers: Checkers, world: FaultWorld, asks: Iterable[Ask]) -> None:
    """Every request ended once, with its whole answer or an error that an outage explains."""
    clients = world.clients
    for ask in asks:
        outcome, told = checkers.outcomes.get(ask.id), clients.ends[ask.id]
        if ask.id in clients.moved or ask.id in clients.broken or ask.id in clients.alone:
            if outcome is not None or told != (ask.id not in clients.moved):
                checkers.report("endings", f"{ask.id}: its gateway is gone, and its end is told")
        elif outcome is None or told != 1:
            checkers.report("endings", f"{ask.id}: its client was told {told} times how it ended")
        elif outcome.fault:
            _check_fault(checkers, world, outcome)
        elif outcome.output_tokens != ask.output_tokens:
            checkers.report(
                "endings",
                f"{ask.id}: counts as answered with {outcome.output_tokens} of "
                f"{ask.output_tokens} tokens",
            )
        if outcome is not None and outcome.cached_tokens >= outcome.prompt_tokens:
            checkers.report("endings", f"{ask.id}: more is reported as cached than the prompt has")


def _check_fault(checkers: Checkers, world: FaultWorld, outcome: Outcome) -> None:
    start, end = checkers.spans[outcome.id]
    host, name = checkers.homes[outcome.id]
    if outcome.fault == "the client left":
        if outcome.id not in world.clients.left:
            checkers.report("unexplained-error", f"{outcome.id}: {outcome.fault}, it is said")
        return
    if outcome.fault == "in_flight_max":
        there = sum(
            begin <= start <= over and checkers.homes[id][1] == name
            for id, (begin, over) in checkers.spans.items()
            if id not in checkers.outcomes or checkers.outcomes[id].tried
        )
        if there < world.scenario.in_flight_max:
            checkers.report("unexplained-error", f"{outcome.id}: refused, with {there} in flight")
        return
    if outcome.fault in _NO_ENGINE:
        if not world.outages.touched(outcome.tried[-1], host, start, end):
            checkers.report("unexplained-error", f"{outcome.id}: {outcome.fault}, and it did not")
        return
    for engine in world.engines:
        if (outcome.id, engine) in checkers.declined:
            continue
        if not world.outages.touched(engine, host, start - BACK_S, end):
            checkers.report(
                "unexplained-error",
                f"{outcome.id} fails ({outcome.fault}) after {', '.join(outcome.tried) or 'none'} "
                f"by way of {name}; {engine} was there",
            )


def check_rest(checkers: Checkers, world: FaultWorld, asks: Iterable[Ask]) -> None:
    """Nothing is booked any more, in gateways and engines, and of copies."""
    leak = "leak"
    for replica in world.replicas:
        name, dispatcher, ahead = replica.name, replica.dispatcher, replica.ahead
        if ahead is not None and ahead.core.under_way:
            checkers.report(leak, f"{name}: {ahead.core.under_way} copies ahead of need never end")
        for publisher, count in dispatcher.router.in_flight().items():
            if count:
                checkers.report(leak, f"{name}: the router counts {count} requests on {publisher}")
        for ask in asks:
            if any(dispatcher.plan(ask.id, e.publisher) for e in world.engines.values()):
                checkers.report(leak, f"{name}: {ask.id} is over, its decision is still pending")
    for name, engine in world.engines.items():
        model, witness = engine.model, checkers.witnesses[name]
        if model.running or model.waiting or witness.active:
            checkers.report(leak, f"{name} still works on {model.running + model.waiting} requests")
        if model.free_share != 1.0:
            checkers.report(leak, f"{name}: blocks are in use by nobody")


def check_promises(
    checkers: Checkers, world: FaultWorld, replica: Replica, asks: Iterable[Ask]
) -> None:
    """For every prompt and engine: the promise is what the engine's own pool would give, nothing
    is expected to come, nobody waits."""
    exact = world.scenario.roomy
    for ask in asks:
        for plan in plans(world, replica, ask):
            engine = world.engines[plan.publisher.worker]
            pool = engine.model.pool
            keys = checkers.prompt(ask, engine.layout).keys
            holding = pool.open(ask.tokens, salt=ask.scope, adapter=ask.adapter, keys=keys)
            true = pool.lookup(holding).tokens
            promised = own_tokens(plan)
            what = (
                f"{ask.id} of ({ask.scope!r}, {ask.adapter!r}) by {replica.name}: "
                f"{plan.publisher} promises {promised} tokens, its pool gives {true}"
            )
            if promised > true:
                checkers.report(checkers.kind_of(ask, plan.publisher, promised), what)
            elif exact and promised < true and not told_twice(checkers, world, ask, engine, true):
                checkers.report("convergence", what)
            if plan.expected_tokens != plan.resume_tokens:
                checkers.report("leak", f"{ask.id}: {plan.publisher} is expected to compute it")
            if plan.in_flight or plan.price.wait_s > 1e-6:
                checkers.report(
                    "leak",
                    f"{plan.publisher}: {plan.in_flight} requests and {plan.price.wait_s:.3f} s "
                    "are counted as waiting where nobody is",
                )


def told_twice(
    checkers: Checkers, world: FaultWorld, ask: Ask, engine: SimEngine, tokens: int
) -> bool:
    """Did the engine announce a block of this prompt again while it had it? One that loads the
    same prefix for two requests at once does; it looks like the report of a hit, and then the
    directory may know less than there is."""
    if world.nodes is None:
        return False
    counts = Counter(
        (event.group or 0, each)
        for batch in engine.history
        for event in batch.events
        if isinstance(event, BlockStored)
        for each in event.hashes
    )
    prompt = checkers.prompt(ask, engine.layout)
    blocks = [*prompt.chains, *((slot, size) for slot, size, _ in prompt.windows)]
    return any(
        counts[slot, prompt.key(end)] > 1
        for slot, size in blocks
        for end in range(size, tokens + 1, size)
    )


def plans(world: FaultWorld, replica: Replica, ask: Ask) -> tuple[Plan, ...]:
    """What the core would decide now for such a request; it is not sent."""
    dispatcher, now = replica.dispatcher, replica.loop.now
    scope = salt_scope(ask.scope)
    among = tuple((engine.publisher, ask.adapter) for engine in world.engines.values())
    decision = dispatcher.handle(Question("check", among, ask.tokens, scope), now)
    assert decision is not None
    dispatcher.handle(Finished(decision.id, among[0][0], False), now)
    return decision.plans


def new_core(world: FaultWorld, *, told: bool, backwards: bool = False) -> Dispatcher:
    """One that knows this world's engines and agents; ``told``: and all that they ever said.
    ``backwards``: the last engine first."""
    core = Dispatcher(Directory(world.keyring), Router(), world.keyring)
    order = -1 if backwards else 1
    for node in list(world.nodes or ())[::order]:
        engines = tuple(world.engines[name].publisher for name in node.engines)
        core.handle(Settle(node.publisher, engines), 0.0)
        for batch in node.history if told else ():
            core.apply(node.publisher, batch.events)
    for engine in list(world.engines.values())[::order]:
        core.handle(Join(engine.publisher, engine.layout, engine.identity), 0.0)
        for batch in engine.history if told else ():
            core.apply(engine.publisher, batch.events)
    return core


def check_convergence(
    checkers: Checkers, world: FaultWorld, replica: Replica, heard: Dispatcher
) -> None:
    """The directory is what that of a new core is which heard each present history as a whole."""
    limits = world.scenario.directory
    directory = replica.dispatcher.directory
    if directory.holders > limits.holders_max:
        checkers.report("bounds", f"{directory.holders} holders, {limits.holders_max} are allowed")
    for engine in world.engines.values():
        count = directory.holders_of(engine.publisher)
        if count > limits.holders_per_publisher_max:
            checkers.report("bounds", f"{engine.publisher} has {count} holders, more than allowed")
    fresh = heard.directory
    shared = world.nodes is not None and world.nodes.tiers.store is not None
    if world.scenario.roomy and not shared and fresh.digest() != directory.digest():
        checkers.report(
            "convergence", f"{replica.name}: {directory.holders} holders, not {fresh.holders}"
        )


def check_alike(checkers: Checkers, world: FaultWorld, heard: Dispatcher, asks: list[Ask]) -> None:
    """Two that heard the same, each engine's words in their order, know the same and decide the
    same."""
    other = new_core(world, told=True, backwards=True)
    if other.directory.digest() != heard.directory.digest():
        checkers.report("replicas-differ", "two that heard the same have other digests")
    among = tuple(engine.publisher for engine in world.engines.values())
    for ask in asks[:ALIKE_MAX]:
        question = Question(
            "alike",
            tuple((publisher, ask.adapter) for publisher in among),
            ask.tokens,
            salt_scope(ask.scope),
        )
        told = [core.handle(question, 1.0) for core in (heard, other)]
        if told[0] != told[1]:
            checkers.report("replicas-differ", f"{ask.id}: {told[0]} by one, {told[1]} by another")
        for core in (heard, other):
            core.handle(Finished("alike", among[0], False), 1.0)


def check_memory(checkers: Checkers, world: FaultWorld, replica: Replica) -> None:
    """No engine holds anything any more: nor does any map or queue of the core."""
    fresh = new_core(world, told=False)
    kept, least = census(replica.dispatcher), census(fresh)
    if kept > least + LEFT_MAX:
        checkers.report(
            "bounds",
            f"{kept} entries are kept where no engine holds anything, at first {least}",
        )
    if holders := replica.dispatcher.directory.holders:
        checkers.report("leak", f"{holders} holders are counted where there is none")


def census(root: object) -> int:
    """Entries of all that can grow and that an object of the core reaches by its attributes."""
    seen: set[int] = set()
    found, waiting = 0, [root]
    while waiting:
        thing = waiting.pop()
        if type(thing) in _LEAVES or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            found += len(thing)
            waiting += [*thing, *thing.values()]
        elif isinstance(thing, list | deque | set):
            found += len(thing)
            waiting += thing
        elif isinstance(thing, tuple):  # does not grow: whoever keeps many of them is counted
            waiting += thing
        elif isinstance(thing, KeyTable | NameTable):
            found += len(thing)
        elif type(thing).__module__.startswith("kvatlas.core"):
            names = [
                name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())
            ]
            waiting += [getattr(thing, name, None) for name in names]
            kept = getattr(thing, "__dict__", {})
            waiting += [each for name, each in kept.items() if name not in _INTERNED]
    return found
