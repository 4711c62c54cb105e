"""Several gateways over the same engines, the register, stores that forget: and what goes wrong
with them. Some of the seeds have that; it draws from streams of its own.
"""

from __future__ import annotations

import random

import msgspec

from kvatlas.core.membership import Params
from kvatlas.sim import faults_tiers
from kvatlas.sim.engines import GATEWAY
from kvatlas.sim.faults import (
    REGISTER_KINDS,
    REPLICA_KINDS,
    STORE_KINDS,
    Fault,
    Scenario,
    happening,
)

SHARE = 0.35  # of the seeds that have several gateways
WITH_REGISTER = 0.85  # of these
_NEW_LIVES = ("crash", "vanish", "renumber", "reset")
_OF_MEMBERS = ("register_cut", "member_clock", "namesake", "stranger", "purge")


def scenario(seed: int) -> Scenario:
    """The world of this seed: `faults_tiers.scenario`, and what is said above."""
    plan = _forgetful(faults_tiers.scenario(seed))
    draw = random.Random(f"kvatlas.faults.cluster.1/{seed}")
    if draw.random() >= SHARE:
        return plan
    plan = msgspec.structs.replace(plan, replicas=draw.randint(2, 3))
    hosts = hosts_of(plan)
    happens = [_anywhere(draw, fault, hosts) for fault in plan.faults]
    happens += _of_replicas(draw, plan)
    if draw.random() < WITH_REGISTER:
        params = Params(ttl_s=draw.choice((6.0, 10.0, 15.0)))
        plan = msgspec.structs.replace(plan, register=params)
        happens += _of_register(draw, plan)
    return happening(plan, happens)


def hosts_of(plan: Scenario) -> tuple[str, ...]:
    """Where its gateways run."""
    return (GATEWAY, *(f"{GATEWAY}-{number}" for number in range(1, plan.replicas)))


def _anywhere(draw: random.Random, fault: Fault, hosts: tuple[str, ...]) -> Fault:
    if fault.kind not in ("stall", "jump"):
        return fault
    return msgspec.structs.replace(fault, target=draw.choice(hosts))


def _of_replicas(draw: random.Random, plan: Scenario) -> list[Fault]:
    faults = []
    warm = random.Random(f"kvatlas.faults.warm.1/{plan.seed}")
    hosts, last_s = hosts_of(plan), max(6.0, plan.heal_at - 1.0)
    others = [member.name for member in plan.members]
    others += [node.agent for node in plan.tiers.nodes] if plan.tiers is not None else []
    for _ in range(draw.randint(1, 6)):
        at, kind = draw.uniform(2.0, last_s), draw.choice(list(REPLICA_KINDS))
        if kind == "gateway_crash":
            lasting_s = draw.uniform(0.05, draw.choice((0.5, 5.0, 30.0)))
            warm_s = warm.choice((0.0, 0.02, 0.5, 5.0)) * warm.random()
            faults.append(Fault(at, kind, draw.choice(hosts), lasting_s, warm_s))
            if warm_s > 0.1 and warm.random() < 0.5:  # what a peer told is not true any more
                engine = warm.choice(plan.members).name
                at += lasting_s + warm.uniform(0.0, warm_s)
                faults.append(Fault(at, warm.choice(_NEW_LIVES), engine, warm.uniform(0.01, 0.2)))
        else:
            lasting_s = draw.uniform(0.1, draw.choice((2.0, 10.0, 40.0)))
            way = f"{draw.choice(others)}@{draw.choice(hosts)}"
            faults.append(Fault(at, kind, way, lasting_s))
    return faults


def _of_register(draw: random.Random, plan: Scenario) -> list[Fault]:
    names = list(hosts_of(plan))
    names += [node.agent for node in plan.tiers.nodes] if plan.tiers is not None else []
    share = draw.choice((0.2, 0.5, 1.0))
    kinds = [kind for kind in REGISTER_KINDS if draw.random() < share] or ["register_empty"]
    faults = []
    for _ in range(draw.randint(3, 14)):
        kind = draw.choice((*kinds, "purge"))
        target = draw.choice(names) if kind in _OF_MEMBERS else "register"
        at = draw.uniform(3.0, max(6.0, plan.heal_at - 1.0))
        lasting_s = draw.uniform(0.05, draw.choice((1.0, 8.0, 40.0)))
        amount = draw.random()
        match kind:
            case "register_late":
                amount = draw.choice((0.3, 1.5, 3.0))
            case "register_behind":
                amount = draw.choice((0.2, 1.0))
            case "member_clock":
                amount = draw.choice((-600.0, -45.0, 45.0, 3600.0))
            case "purge":
                lasting_s = 0.0
        faults.append(Fault(at, kind, target, lasting_s, amount))
    return [*faults, *_just_before(plan, faults)]


def _just_before(plan: Scenario, faults: list[Fault]) -> list[Fault]:
    """Something is to be forgotten just when the register is going to forget it."""
    draw = random.Random(f"kvatlas.faults.behind.1/{plan.seed}")
    return [
        Fault(fault.at - draw.uniform(0.0, fault.amount), "purge", host, 0.0, draw.random())
        for fault in faults
        for host in draw.sample(hosts_of(plan), 1)
        if fault.kind == "register_behind" and draw.random() < 0.7
    ]


def _forgetful(plan: Scenario) -> Scenario:
    """Where nodes share a store, it forgets all without a word, or does not answer for a while."""
    draw = random.Random(f"kvatlas.faults.stores.1/{plan.seed}")
    if plan.tiers is None or not plan.tiers.spec.object_bytes or draw.random() < 0.4:
        return plan
    happens = list(plan.faults)
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(list(STORE_KINDS))
        at = draw.uniform(5.0, max(6.0, plan.heal_at - 1.0))
        lasting_s = draw.uniform(1.0, 40.0) if kind == "store_silent" else 0.0
        happens.append(Fault(at, kind, draw.choice(plan.tiers.nodes).name, lasting_s))
    return happening(plan, happens)
