"""What a scenario has besides its single faults and chance prompts: things that come together.

Faults that meet on one engine find what each alone does not (a restart during a replay after a
partition); prompts that are nearly alike, or begin in the middle of others, find keys and parents
that are taken too lightly; an outage of all engines at once finds what relies on one of them.
It draws from a stream of its own, and only in a part of the seeds.
"""

from __future__ import annotations

import random

import msgspec

from kvatlas.sim import faults
from kvatlas.sim.faults import Ask, Fault, Scenario

_TOGETHER_S = 8.0  # within which faults of one cluster begin
_NEAR_MAX = 8  # prompts that are nearly others


def scenario(seed: int) -> Scenario:
    """The world of this seed: `faults.scenario`, and what comes together in it."""
    plan = faults.scenario(seed)
    draw = random.Random(f"kvatlas.faults.close.1/{seed}")
    kind = draw.choice(("", "faults", "prompts", "both"))
    happens, asks = list(plan.faults), list(plan.asks)
    if kind in ("faults", "both"):
        happens = _together(draw, plan)
        if draw.random() < 0.3:
            happens += _blackout(draw, plan)
    if kind in ("prompts", "both"):
        unit = max(member.layout.grid_tokens for member in plan.members)
        asks += _nearly(draw, plan, unit)
    asks += _crowd(random.Random(f"kvatlas.faults.crowd.1/{seed}"), plan)
    asks.sort(key=lambda ask: ask.at)
    return msgspec.structs.replace(faults.happening(plan, happens), asks=tuple(asks))


def _together(draw: random.Random, plan: Scenario) -> list[Fault]:
    """The same faults on one engine, in one or two short times (bursts belong to requests)."""
    target = draw.choice(plan.members).name
    last = max(3.0, plan.heal_at - _TOGETHER_S - 1.0)
    starts = [draw.uniform(2.0, last) for _ in range(2)]
    return [
        fault
        if fault.kind == "burst"
        else msgspec.structs.replace(
            fault,
            at=draw.choice(starts) + draw.uniform(0.0, _TOGETHER_S),
            target=target if fault.target else "",
        )
        for fault in plan.faults
    ]


def _blackout(draw: random.Random, plan: Scenario) -> list[Fault]:
    """Nobody is reached, for longer than it takes to notice."""
    at, duration_s = draw.uniform(5.0, plan.heal_at), draw.uniform(6.0, 15.0)
    return [Fault(at, "partition", member.name, duration_s) for member in plan.members]


def _crowd(draw: random.Random, plan: Scenario) -> list[Ask]:
    """In a quarter of the worlds many requests come at once, with nothing in common and answers
    so long that pools are full in the middle of them: some are thrown out while others wait."""
    if draw.random() >= 0.25:
        return []
    unit = max(member.layout.grid_tokens for member in plan.members)
    at = draw.uniform(2.0, plan.heal_at)
    most = 6 + 3 * plan.members[0].spec.max_running  # else some wait until they are given up
    return [
        Ask(
            f"c{number}",
            at + draw.uniform(0.0, 0.1),
            draw.randbytes(4 * (draw.randint(3 * unit, 6 * unit) | 1)),  # see `faults.GRID_LEAST`
            40,
            "",
            "",
        )
        for number in range(draw.randint(6, most))
    ]


def _nearly(draw: random.Random, plan: Scenario, unit: int) -> list[Ask]:
    """Further requests: one token differs from another prompt, two are exchanged, or the prompt
    begins where a later block of the other does."""
    made: list[Ask] = []
    for number in range(draw.randint(2, _NEAR_MAX)):
        other = draw.choice(plan.asks)
        words = [other.tokens[i : i + 4] for i in range(0, len(other.tokens), 4)]
        blocks, at = len(words) // unit, draw.randrange(len(words))
        match draw.choice(("changed", "exchanged", "middle", "middle")):
            case "changed":
                words[at] = draw.randbytes(4)
            case "exchanged":
                to = min(at // unit * unit + draw.randrange(unit), len(words) - 1)
                words[at], words[to] = words[to], words[at]
            case "middle" if blocks > 1:
                words = words[unit * draw.randint(1, blocks - 1) :]
        later = draw.uniform(other.at, max(other.at, plan.heal_at - 1.0))
        when = later if draw.random() < 0.7 else other.at + 0.5
        ask = msgspec.structs.replace(other, id=f"n{number}", at=when, tokens=b"".join(words))
        made.append(ask)
    return made
