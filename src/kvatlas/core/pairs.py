"""Prefill and decode on different engines: what a pair costs beside one engine that does it all.

A pair pays the prefill half's queue and prefill, the hand-off of the state as measured between the
two (`core.transports`), and the crowd where it decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence

import msgspec

from kvatlas.core.plans import Ask, Decision, Plan, holder_first
from kvatlas.core.records import Publisher
from kvatlas.core.router import CROWD, Router
from kvatlas.core.transports import Transports

HALF = "half of a pair"  # why the second half of a request is not looked up


class HandOff(msgspec.Struct):
    """One, of ``size_bytes``: what it should take and how far from that this pair usually is, and
    what it took, from the request to the decode half to its first token; None where that cannot be
    told: of halves that run at once it would have the prefill in it."""

    prefill: str
    size_bytes: int
    foreseen_s: float
    error_s: float
    took_s: float | None = None


def by_price(
    prefill: Publisher,
    decoders: Sequence[Plan],
    transports: Transports,
    size_bytes: int,
    now: float,
) -> list[Plan]:
    """Plans of decode halves as the second half after ``prefill``, the cheapest first."""
    priced = [
        msgspec.structs.replace(
            plan,
            price=msgspec.structs.replace(
                plan.price,
                hand_off_s=transports.seconds(prefill, plan.publisher, size_bytes, now),
                load_s=0.0,
                recompute_s=0.0,
                charge_s=0.0,
            ),
        )
        for plan in decoders
    ]
    # Here the whole crowd counts: all that is done there is decoding. Equal prices keep the order
    # that they came in: the least loaded first.
    return sorted(priced, key=lambda plan: round(plan.price.ttft_s + plan.price.crowd_s / CROWD, 6))


def first_halves(decision: Decision, prefills: Container[Publisher]) -> list[Publisher]:
    """Those of a decision that are to stand at the price of their pair; none where it is not by
    price."""
    if decision.unkeyed or decision.policy != "price":
        return []
    return [plan.publisher for plan in decision.plans if plan.publisher in prefills]


def second_halves(
    router: Router, id: str, among: Collection[Publisher], now: float
) -> tuple[Plan, ...]:
    """What decoding would cost there. Changes nothing."""
    return router.peek(Ask(id, -1, {}, (), HALF), now, among=among).plans


def priced(
    decision: Decision,
    decoders: Mapping[Publisher, Sequence[Plan]],
    transports: Transports,
    size_bytes: Callable[[Publisher], int],
    now: float,
) -> Decision:
    """The same with pairs at the price of pairs, in that order. ``decoders``: per first half the
    `second_halves` that it may pair with; ``size_bytes``: what it hands over."""
    second = {
        prefill: ranked[0]
        for prefill, plans in decoders.items()
        if (ranked := by_price(prefill, plans, transports, size_bytes(prefill), now))
    }
    plans = with_pairs(decision.plans, second, decoders)
    return msgspec.structs.replace(decision, plans=tuple(plans))


def with_pairs(
    plans: Sequence[Plan],
    second: Mapping[Publisher, Plan],
    halves: Container[Publisher],
) -> list[Plan]:
    """A decision's plans in the order of their prices as what they are: of a prefill half
    (``halves``) the price is that of its pair, with the cheapest ``second``.

    One without a second half comes last: it can only be tried as one engine that does it all.
    """
    priced = [
        _paired(plan, second[plan.publisher]) if plan.publisher in second else plan
        for plan in plans
    ]
    ranked = sorted(priced, key=lambda plan: (plan.over_share, round(plan.price.total_s, 6)))
    whole = [p for p in ranked if p.publisher in second or p.publisher not in halves]
    return holder_first(whole) + [p for p in ranked if p not in whole]


def _paired(plan: Plan, second: Plan) -> Plan:
    price = msgspec.structs.replace(
        plan.price,
        hand_off_s=second.price.hand_off_s,
        wait_s=plan.price.wait_s + second.price.wait_s,
        crowd_s=second.price.crowd_s,  # it decodes there, not here
    )
    return msgspec.structs.replace(plan, price=price)
