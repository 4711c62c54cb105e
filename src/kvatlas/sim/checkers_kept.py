"""What the core counts and keeps: counts against what is there, memory against what is held."""

from __future__ import annotations

from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.lanes import lanes_of
from kvatlas.core.records import Tier
from kvatlas.sim.checkers import Checkers
from kvatlas.sim.checkers_end import census
from kvatlas.sim.faults_replicas import Replica
from kvatlas.sim.faults_world import FaultWorld

#: Entries beyond those of a new core that heard the same: bits, the last of their kind.
SPARE_MAX = 8


def check_counts(checkers: Checkers, world: FaultWorld, replica: Replica) -> None:
    """Every count of block-holders is the number of those that are there."""
    directory, total = replica.dispatcher.directory, 0
    for engine in world.engines.values():
        publisher = engine.publisher
        there = sum(1 for _ in directory.holdings(publisher))
        total += there
        counts = {
            directory.holders_of(publisher),
            sum(sum(tiers.values()) for tiers in directory.held(publisher).values()),
        }
        if counts != {there}:
            checkers.report("bounds", f"{publisher}: {there} holders are counted as {counts}")
    if directory.holders != total:
        checkers.report("bounds", f"{total} holders are counted as {directory.holders}")


def check_kept(checkers: Checkers, world: FaultWorld, replica: Replica, heard: Dispatcher) -> None:
    """At rest no more is kept than a new core keeps that ``heard`` all histories as a whole. Where
    limits are reached it depends on the order what is refused, and what waits for it in vain."""
    if not world.scenario.roomy:
        return
    kept, least = (
        census(each) - census(each.directory.shelves) for each in (replica.dispatcher, heard)
    )
    spare = SPARE_MAX * (1 if world.nodes is None else 3) + _empty_books(world)
    if replica.warm:  # while it was taken up each engine had two bits, and names for both
        spare += 2 * len(world.engines)
    if kept > least + spare:
        checkers.report("bounds", f"{kept} entries are kept at rest, {least} are needed")


def _empty_books(world: FaultWorld) -> int:
    """Entries for lanes that only a layout had which nobody has any more: a table per tier."""
    swapped = world.injected["swap"] > 0
    ever = [len(lanes_of(m.other[0] if swapped else m.layout)) for m in world.scenario.members]
    ever += [len(lanes_of(member.layout)) for member in world.scenario.members]
    now = max(len(lanes_of(engine.layout)) for engine in world.engines.values())
    return (max(ever) - now) * (len(Tier) + 1)


def check_waiting(checkers: Checkers, replica: Replica, source: str) -> None:
    """What waits of one engine's events is no more than may."""
    limits = replica.plan.feed
    batches, size_bytes = replica.gateway.feed(source).sequencer.waiting()
    if batches > limits.waiting_batches_max or size_bytes > limits.waiting_bytes_max:
        checkers.report("bounds", f"{source}: {batches} batches wait, {size_bytes} bytes")


def check_flights(checkers: Checkers, replica: Replica) -> None:
    """After a request was sent: no more are booked than may be."""
    booked, most = sum(replica.dispatcher.router.in_flight().values()), replica.plan.in_flight_max
    if booked > most:
        checkers.report("bounds", f"{booked} requests are booked, {most} are allowed")
