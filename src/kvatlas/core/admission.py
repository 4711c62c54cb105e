"""Admission: whether a request is taken at all, and what its client's objective makes of the plans.

A request is refused for slowness only where waiting is what makes it late: every engine that it
could go to has a queue, and none of them is predicted to answer in time. So coming back
later helps, and short requests pass where long ones do not. A request counts in a queue from the
moment it is taken: at overload queues stay as long as the objective allows, and nothing swings.
Those who are refused together are told different times, or they would come back together.
Who states no objective is never refused for slowness, nor anybody before enough was answered to
know what a prediction is worth (`core.promises`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import msgspec

from kvatlas.core.records import Publisher, Refusal
from kvatlas.core.rivals import chance
from kvatlas.core.router import Decision, Plan

#: Of an engine: what a predicted second may become; None where too little is known to tell.
Lateness = Callable[[Publisher], float | None]

_RETRY_MIN_S = 1.0


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``by_slo``: whether a request that cannot make its objective is refused; ``in_flight_max``:
    requests between their decision and their end, half of a pair while it runs."""

    by_slo: bool = True
    in_flight_max: Annotated[int, msgspec.Meta(ge=1)] = 100_000


def admitted(
    decision: Decision, ttft_slo_s: float, in_flight: int, rules: Rules, lateness: Lateness
) -> Decision:
    """The decision with its objective (seconds; inf: none): plans that make it come first, in the
    order of their prices; or refused. ``in_flight``: requests there are already."""
    if in_flight >= rules.in_flight_max:
        full = Refusal("in_flight_max", _retry_after_s(decision.id, _RETRY_MIN_S))
        return msgspec.structs.replace(decision, refusal=full)
    if math.isinf(ttft_slo_s):
        return decision
    decision = msgspec.structs.replace(decision, ttft_slo_s=ttft_slo_s)
    refusal = _too_late(decision, lateness) if rules.by_slo else None
    return msgspec.structs.replace(in_time_first(decision, lateness), refusal=refusal)


def in_time_first(decision: Decision, lateness: Lateness) -> Decision:
    """Plans that make the objective before the others, else in the order given. Where load alone
    decides, or somebody else's rule, nothing changes."""
    if not decision.ttft_slo_s or decision.unkeyed or decision.policy != "price":
        return decision

    def misses(plan: Plan) -> bool:
        stretch = lateness(plan.publisher)
        ttft_s = plan.price.ttft_s * (1.0 if stretch is None else stretch)
        return ttft_s > decision.ttft_slo_s

    return msgspec.structs.replace(decision, plans=tuple(sorted(decision.plans, key=misses)))


def _too_late(decision: Decision, lateness: Lateness) -> Refusal | None:
    """None where some engine may make it, has no queue, or is not known well enough to tell."""
    late_s, soonest = math.inf, (math.inf, Publisher(""))
    for plan in decision.plans:
        stretch = lateness(plan.publisher)
        if stretch is None:
            return None
        wait_s = stretch * plan.price.wait_s
        # Of a prompt that could not be looked up only the wait is known.
        ttft_s = wait_s if decision.unkeyed else stretch * plan.price.ttft_s
        late_s = min(late_s, wait_s, ttft_s - decision.ttft_slo_s)
        soonest = min(soonest, (ttft_s, plan.publisher))
    if late_s <= 0 or not decision.plans:
        return None
    ttft_s, publisher = soonest
    retry_after_s = _retry_after_s(decision.id, max(_RETRY_MIN_S, late_s))
    return Refusal("slo_unreachable", retry_after_s, publisher, ttft_s)


def _retry_after_s(id: str, soonest_s: float) -> float:
    """Whole seconds, as the wire has them, from ``soonest_s`` up to twice as many, by the id."""
    soonest = math.ceil(soonest_s)
    return float(soonest + math.floor(chance(id) * (soonest + 1)))
