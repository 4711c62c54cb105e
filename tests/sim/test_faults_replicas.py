"""Several gateways of a world: who asks where, what a killed one leaves, what a new one knows."""

from __future__ import annotations

import msgspec
import pytest

from kvatlas.core.forgetting import Floor
from kvatlas.core.register_values import Answer, Raise
from kvatlas.sim.checkers_register import RegisterWatch
from kvatlas.sim.checkers_view import Judge
from kvatlas.sim.faults import Fault, Scenario
from kvatlas.sim.faults_cluster import scenario
from kvatlas.sim.faults_register import SimRegister
from kvatlas.sim.faults_world import FaultWorld
from kvatlas.sim.timeline import Timeline

PLAN = next(
    plan
    for plan in map(scenario, range(100))
    if plan.replicas == 3 and plan.register and not plan.tiers and plan.roomy
)


class Stage:
    """A world with three gateways in which only the given faults happen."""

    def __init__(self, *faults: Fault, until: float = 60.0) -> None:
        plan: Scenario = msgspec.structs.replace(PLAN, faults=faults)
        self.checkers = Judge(lambda: self.world.timeline.now)
        self.world = FaultWorld(plan, self.checkers)
        assert self.world.members is not None
        self.members = self.world.members
        RegisterWatch(self.checkers, self.world, self.members)
        for ask in plan.asks:
            self.checkers.will_ask(ask)
        self.world.begin()
        self.world.run(until)


def test_requests_go_to_all_gateways_and_all_hear_every_engine() -> None:
    stage = Stage()
    assert {host for host, _ in stage.checkers.homes.values()} == {
        replica.host for replica in stage.world.replicas
    }
    digests = {replica.dispatcher.directory.digest() for replica in stage.world.replicas}
    assert len(digests) == 1
    assert stage.world.replicas[0].dispatcher.directory.holders > 0
    assert not stage.checkers.found


@pytest.mark.parametrize("warm_s", [0.0, 0.2])
def test_a_killed_gateway_leaves_nothing_and_a_new_one_learns_all(warm_s: float) -> None:
    calm = Stage().checkers
    spans = [span for id, span in calm.spans.items() if calm.homes[id][0] == "gateway-1"]
    begin, end = max(spans, key=lambda span: span[1] - span[0])
    crash = Fault((begin + end) / 2, "gateway_crash", "gateway-1", 1.0, warm_s)
    stage = Stage(crash, until=PLAN.heal_at + 60.0)
    first, killed, _ = stage.world.replicas
    assert (killed.life, killed.name, killed.up) == (2, "gateway-1~2", True)
    assert killed.warm is (warm_s > 0.0)
    assert killed.dispatcher.directory.digest() == first.dispatcher.directory.digest()
    clients = stage.world.clients
    assert clients.moved or clients.broken
    assert {ask.id.partition("~")[0] for ask in clients.again} == clients.moved
    assert not stage.checkers.found
    assert not any(engine.model.running for engine in stage.world.engines.values())


def test_where_no_gateway_is_left_clients_are_told() -> None:
    crashes = [Fault(5.0, "gateway_crash", r.host, 50.0) for r in Stage(until=0.0).world.replicas]
    stage = Stage(*crashes, until=30.0)
    assert not stage.world.listening
    assert stage.world.clients.alone
    assert all(stage.world.clients.ends[id] == 1 for id in stage.world.clients.alone)


def test_one_gateway_leads_and_another_after_it_died() -> None:
    stage = Stage(until=30.0)
    leads = [name for name, member in stage.members.living.items() if member.leads()]
    assert len(leads) == 1
    other = Stage(Fault(30.0, "gateway_crash", leads[0], 100.0), until=70.0)
    follows = [name for name, member in other.members.living.items() if member.leads()]
    assert len(follows) == 1
    assert follows != leads
    assert not other.checkers.found


def test_what_members_say_is_judged() -> None:
    """A second leader, a floor that nobody heard of, and a stranger among the members are found."""
    stage = Stage(until=30.0)
    members = stage.members
    for member in members.living.values():
        lease = member.core._leases.get("controller")
        if lease is not None:
            lease.token, lease.until_s = 1, 1e9
    floor = Fault(30.0, "purge", "gateway", 0.0, 0.5)
    members.inject(floor)
    for member in members.living.values():
        member.core._floors = type(member.core._floors)()
        member.core._known["floors"] = 10**15
    stage.world.run(31.0)
    assert stage.checkers.found["two-leaders"]
    members.living["gateway-1"].identity = "another secret"
    stage.world.run(34.0)
    assert stage.checkers.found["membership"]


def test_a_register_that_falls_back_lacks_the_last_writes_and_an_empty_one_everything() -> None:
    timeline = Timeline()
    register = SimRegister(timeline, 0)
    old, new = Floor("a" * 24, 1), Floor("b" * 24, 1)
    heard: list[Answer] = []
    for at, floor in ((1.0, old), (5.0, new)):
        timeline.at(at, register.ask, "gateway", Raise((floor,)), heard.append)
    while timeline.step():
        pass
    assert len(heard) == 2
    assert register.floors().has(new)
    register.fall_back(2.0, 1.0)
    assert (register.floors().has(old), register.floors().has(new)) == (True, False)
    before = register.core.created
    register.empty(2.0)
    assert register.core.created != before
    assert not register.floors().has(old)
    register.ask("gateway", Raise((new,)), heard.append)
    while timeline.step():
        pass
    assert len(heard) == 2, "it is away: nothing is answered"
