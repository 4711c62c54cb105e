"""What is looked at beside hits: whether promises are true, and what lies in the media."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvatlas.core.inventory import name_in
from kvatlas.core.plans import Plan
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, name_of
from kvatlas.sim.tier_units import Kept
from kvatlas.validate.isolation.engine import CachingEngine
from kvatlas.validate.isolation.marks import Mark, Prompt, decode, wrong_with
from kvatlas.validate.isolation.node import TIERS, Node

if TYPE_CHECKING:
    from kvatlas.validate.isolation.world import World

_PROMPTS_MAX = 1024  # remembered after their end: a step in flight may still name them


def judge_promise(world: World, prompt: Prompt, plan: Plan) -> None:
    """Every block that a plan counts on must be there, and may be used by this prompt.

    What the store once held under that very name and let go since is a promise too late, of the
    prompt's own state: stores tell nobody, and whoever tries to load it finds out.
    """
    if not plan.resume_tokens:
        return
    engine = next(e for e in world.engines if e.publisher == plan.publisher)
    held = engine.holds(prompt, prompt.salt)
    if plan.resume_tokens <= held or engine.evicting:
        return
    keys = world.keys(engine, prompt, prompt.salt)
    grid = engine.layout.grid_tokens
    for index in range(held // grid, plan.resume_tokens // grid):
        name, end = name_of(keys[index], Part.BODY), (index + 1) * grid
        kept = _below(engine, name)
        if kept is None and any(name in node.shed for node in world.nodes):
            world.judge.late += 1
            return
        if kept is None:
            what = f"{plan.publisher} promises {plan.resume_tokens} of {prompt.id}"
            world.judge.report(_blame(engine, prompt, end), what)
            return
        world.judge.hit("promise", prompt, engine.model, end, kept.data[-1])


def _below(engine: CachingEngine, name: bytes) -> Kept | None:
    found = (engine.node.readable(tier, name) for tier in TIERS)
    return next((kept for kept in found if kept is not None), None)


def _blame(engine: CachingEngine, prompt: Prompt, end: int) -> str:
    """A promise that nobody can keep: is it of what somebody else has there?"""
    digest = prompt.digest(end)
    marks = map(decode, engine.memory.blocks.values())
    wrong = {wrong_with(prompt, engine.model, end, m) for m in marks if m.digest == digest}
    return min(wrong - {""}, default="unbacked")


def audit(world: World) -> None:
    """Look through all media: nothing of whom was purged, each unit under its owner's name."""
    for node in world.nodes:
        for tier in node.own:
            _audit_tier(world, node, tier)
    if world.store is not None:
        _audit_tier(world, world.nodes[0], Tier.OBJECT)
    for id in list(world.prompts)[:-_PROMPTS_MAX]:
        if id not in world.flights:
            del world.prompts[id]


def _audit_tier(world: World, node: Node, tier: Tier) -> None:
    judge, where = world.judge, f"{node.name} {tier.name.lower()}"
    tags = {tenant.number: tenant.tag for tenant in world.cast.tenants}
    booked: dict[bytes, str] = {}
    if tier in node.own:
        booked = {name_in(entry): entry.tenant for entry in node.agent.ledger(tier).entries()}
    sums: Counter[str] = Counter()
    for name, kept in node.held(tier).items():
        labels = {kept.tenant, booked.get(name, kept.tenant)}
        sums[booked.get(name, "").partition(".")[0]] += kept.unit.size_bytes
        for mark in _private(kept):
            tag = tags.get(mark.tenant, "")
            if tag and not all(label.startswith(tag) for label in labels):
                judge.report("label", f"{where}: {mark} lies under {labels}")
            left = bool(tag) and mark.at <= world.purged.get(mark.tenant, -1)
            if left and (name in booked or name not in node.leaving(tier)):
                judge.report("residual", f"{where}: {mark}, whose tenant was purged")
    for tag, size_bytes in sums.items():
        if size_bytes > world.quotas.get(tag, math.inf):
            judge.report("quota", f"{where}: {size_bytes} bytes of {tag}")


def _private(kept: Kept) -> Iterator[Mark]:
    """Marks of what is not public; most of a unit's blocks have the same."""
    return (mark for mark in map(decode, dict.fromkeys(kept.data)) if not mark.open)
