"""Tiers below the engines of a scenario, and what goes wrong with them.

Some of the seeds get one to three nodes with a little dram, disk and a store, so small that units
are handed down, pushed out and read back all the time, and links so slow that moves are still
under way when something happens to them. It draws from a stream of its own.
"""

from __future__ import annotations

import random

import msgspec

from kvatlas.core.agent_values import Config
from kvatlas.core.ahead_copies import Params
from kvatlas.core.layout import Layout
from kvatlas.core.policy.registry import POLICIES
from kvatlas.core.records import Tier
from kvatlas.core.units import Sizes
from kvatlas.sim import faults_close
from kvatlas.sim.faults import (
    GRID_LEAST,
    TIER_KINDS,
    Ask,
    Fault,
    Member,
    NodePlan,
    Scenario,
    TierPlan,
    happening,
)
from kvatlas.sim.links import LinkSpec
from kvatlas.sim.tier_spec import TierSpec
from kvatlas.workload.models import load_layout

SHARE = 0.4  # of the seeds that have tiers
_UNITS = (4, 12, 40, 150)  # that fit into a tier
_TURNS = 5
_OF_ENGINES = ("crash", "vanish", "pause")
_STRIKING = (*TIER_KINDS, *_OF_ENGINES)
_FEED = ("partition", "loss", "reorder", "duplicate", "reconnect")  # of an agent's events


def scenario(seed: int) -> Scenario:
    """The world of this seed: `faults_close.scenario`, and tiers in some of them."""
    plan = faults_close.scenario(seed)
    draw = random.Random(f"kvatlas.faults.tiers.1/{seed}")
    if draw.random() >= SHARE:
        return plan
    members = tuple(_sized(draw, member) for member in plan.members)
    tiers = _tiers(draw, members)
    tiers = msgspec.structs.replace(tiers, ahead=_ahead(seed, tiers))
    happens = [*plan.faults, *_faults(draw, tiers, plan.heal_at - 1.0)]
    strikes = random.Random(f"kvatlas.faults.strikes.1/{seed}")
    happens += _striking(strikes, tiers, plan.heal_at - 1.0)
    if tiers.ahead.on:
        plan = msgspec.structs.replace(plan, asks=_wanted_again(plan))
    return msgspec.structs.replace(happening(plan, happens), members=members, tiers=tiers)


def _sized(draw: random.Random, member: Member) -> Member:
    """What tiers keep has a size, which a plain layout does not tell; now and then an engine has
    other weights than its neighbours."""
    identity = b"weights 3" if draw.random() < 0.15 else member.identity
    layout, spec, other = member.other
    return msgspec.structs.replace(
        member,
        layout=_with_bytes(member.layout),
        identity=identity,
        other=(_with_bytes(layout), spec, other),
    )


def _with_bytes(layout: Layout) -> Layout:
    return layout if layout.components else load_layout("llama-3.1-70b", engine="vllm")


def _tiers(draw: random.Random, members: tuple[Member, ...]) -> TierPlan:
    names = [member.name for member in members]
    count = draw.randint(1, min(3, len(names)))
    nodes = tuple(NodePlan(f"n{i}", tuple(names[i::count])) for i in range(count))
    sizes = [Sizes(member.layout) for member in members]
    body = max(size.body_bytes for size in sizes)
    unit = body + max(size.point_bytes(100) for size in sizes)
    object_bytes = unit * draw.choice(_UNITS) if draw.random() < 0.5 else 0
    dram, disk = (unit * draw.choice(_UNITS) for _ in range(2))
    if draw.random() < 0.4:
        dram, disk = draw.choice(((dram, 0), (0, disk)))
    through = [Tier.DISK] if disk and dram and draw.random() < 0.4 else []
    through += [Tier.OBJECT] if object_bytes else []
    computed_s = max(sizes[0].grid_tokens / (members[0].spec.prefill_tokens_per_s or 1.0), 1e-3)

    def link() -> LinkSpec:
        """One on which a unit takes a small part of the time that it takes to compute it."""
        share = draw.choice((0.01, 0.1, 0.4))
        return LinkSpec(unit / (computed_s * share), draw.choice((0.0, 0.001)))

    return TierPlan(
        nodes,
        TierSpec(
            dram_bytes=dram,
            disk_bytes=disk,
            object_bytes=object_bytes,
            peers=count > 1 and draw.random() < 0.5,
            policy=draw.choice([name for name in POLICIES if name != "attention"]),
            high=draw.choice((0.95, 0.8)),
            low=draw.choice((0.8, 0.5)),
            quotas={"red": unit * draw.choice(_UNITS)} if draw.random() < 0.3 else {},
            host_link=link(),
            disk_read_link=link(),
            disk_write_link=link(),
            store_link=link(),
            record_s=draw.choice((0.0001, 0.05, 0.8)),
            load_deadline_s=draw.choice((0.5, 5.0)),
            agent=Config(
                save_s=draw.choice((1.0, 8.0)),
                load_s=draw.choice((0.5, 5.0)),
                copy_s=draw.choice((1.0, 8.0)),
                queue_s=draw.choice((2.0, 15.0)),
                grace_s=draw.choice((0.5, 5.0)),
                saves_max=draw.choice((1, 64)),
                copies_max=draw.choice((1, 64)),
                loads_max=draw.choice((1, 64)),
                queue_max=draw.choice((1, 100)),
                hit_share=1.0,
                promote_after=draw.choice((0, 1, 1, 2)),
                exclusive=draw.random() < 0.3,
                write_through=tuple(through),
            ),
        ),
        card=link(),
    )


def _ahead(seed: int, tiers: TierPlan) -> Params:
    """Most of the nodes that read from each other have copies ahead of need, which fade soon or
    late and take a part of a node's time or all of it."""
    draw = random.Random(f"kvatlas.faults.ahead.1/{seed}")
    if not tiers.spec.peers or not tiers.spec.dram_bytes or draw.random() < 0.25:
        return Params()
    replicate = draw.random() < 0.8
    return Params(
        replicate=replicate,
        push=not replicate or draw.random() < 0.5,
        copies_max=draw.choice((1, 4, 64)),
        bandwidth_share=draw.choice((0.1, 1.0)),
        horizon_s=draw.choice((5.0, 60.0, 600.0)),
        bytes_per_s=1e13,
    )


def _wanted_again(plan: Scenario) -> tuple[Ask, ...]:
    """Some prompts are gone on from, turn by turn, and asked for by several at once: what copies
    ahead of need are for. No prompt becomes much longer: pools are small."""
    draw = random.Random(f"kvatlas.faults.again.1/{plan.seed}")
    asks = list(plan.asks)
    for base in draw.sample(plan.asks, min(6, len(plan.asks))):
        at, tokens = base.at, base.tokens
        for turn in range(_TURNS):
            at += draw.uniform(1.0, 8.0)
            tokens += draw.randbytes(4 * draw.randint(1, 8))
            if len(tokens) % (4 * GRID_LEAST) == 0:
                tokens = tokens[:-4]
            for each in range(draw.choice((1, 1, 8))):
                ask = Ask(f"{base.id}.{turn}.{each}", at, tokens, 3, base.scope, base.adapter)
                asks.append(msgspec.structs.replace(ask, at=at + draw.uniform(0.0, 0.2)))
    return tuple(sorted((ask for ask in asks if ask.at < plan.heal_at), key=lambda ask: ask.at))


def _faults(draw: random.Random, tiers: TierPlan, length_s: float) -> list[Fault]:
    share = draw.choice((0.2, 0.4, 0.8))
    kinds = [kind for kind in (*TIER_KINDS, *_FEED) if draw.random() < share] or ["node_restart"]
    return [_fault(draw, draw.choice(kinds), tiers, length_s) for _ in range(draw.randint(1, 10))]


def _striking(draw: random.Random, tiers: TierPlan, length_s: float) -> list[Fault]:
    """In half of the worlds, faults that happen just when something is under way on their node:
    copies are over in no time, and else seldom met."""
    if draw.random() < 0.5:
        return []
    kinds = draw.sample(_STRIKING, draw.randint(1, 4))
    faults = []
    for _ in range(draw.randint(4, 16)):
        fault = _fault(draw, draw.choice(kinds), tiers, length_s)
        if fault.kind in _OF_ENGINES:
            node = draw.choice(tiers.nodes)
            fault = msgspec.structs.replace(fault, target=draw.choice(node.engines))
        if fault.kind == "slow_store":  # so long that what waits for it is given up
            lasting_s = draw.uniform(1.0, 12.0)
            fault = msgspec.structs.replace(fault, amount=0.0, duration_s=lasting_s)
        delay_s = draw.choice((0.0, 0.0005, 0.005, 0.02))
        faults.append(msgspec.structs.replace(fault, strikes_s=delay_s))
    return faults


def _fault(draw: random.Random, kind: str, tiers: TierPlan, length_s: float) -> Fault:
    node = draw.choice(tiers.nodes)
    at = draw.uniform(5.0, max(6.0, length_s))
    target = node.agent if kind in (*_FEED, "agent_stall") else node.name
    duration_s = draw.uniform(0.01, draw.choice((0.5, 3.0, 12.0)))
    amount = 0.0
    match kind:
        case "disk_error":
            duration_s, amount = draw.uniform(1.0, 20.0), draw.choice((0.1, 0.5, 1.0))
        case "damaged":
            duration_s, amount = 0.0, draw.choice((0.05, 0.3, 1.0))
        case "slow_store":
            amount = draw.choice((0.0, 0.001, 0.05))
        case "lost_store" | "reconnect":
            duration_s, amount = 0.0, 0.0
        case "node_restart":
            amount = draw.choice((0.0, 1.0, 2.0))
        case "keep" | "forget":
            amount = draw.random()
        case "resize":
            amount = draw.choice((0.0, 0.1, 0.5))
        case "loss" | "reorder" | "duplicate":
            duration_s, amount = draw.uniform(1.0, 40.0), draw.choice((0.1, 0.5, 0.9))
    return Fault(at, kind, target, duration_s, amount)
