"""What is asked of the router, what it answers, and which prices count as equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvatlas.core.cost import Price
from kvatlas.core.records import Publisher, Refusal, Resume

EQUAL = 0.2  # prices within this share of the lowest are equal: who holds most is first


class Ask(msgspec.Struct, frozen=True):
    """What is to be routed. ``keys``: per fingerprint the block keys of the prompt's blocks that
    may be resumed; ``below``: those that agents know them by, where they are others. ``unkeyed``
    says why there are none (then load alone decides)."""

    id: str
    prompt_tokens: int
    keys: Mapping[bytes, Sequence[bytes]]
    resumes: Sequence[Resume] = ()
    unkeyed: str = ""
    below: Mapping[bytes, Sequence[bytes]] = {}

    def lower(self, fingerprint: bytes) -> Sequence[bytes]:
        """The block keys by which agents know the prompt."""
        keys = self.below.get(fingerprint)
        return self.keys.get(fingerprint, ()) if keys is None else keys


class Plan(msgspec.Struct, frozen=True):
    """One candidate. ``resume_tokens`` counts what it holds, ``expected_tokens`` also what
    requests in flight there are computing right now."""

    publisher: Publisher
    resume_tokens: int
    expected_tokens: int
    chain_tokens: int
    tier_tokens: tuple[int, ...]
    in_flight: int
    over_share: bool
    price: Price


class Decision(msgspec.Struct, frozen=True):
    """Plans in the order in which they are tried; the first is the choice. ``ttft_slo_s``: within
    what time the client wants the first token, 0 where it does not say; ``refusal``: why nothing
    of it is done (`core.admission`)."""

    id: str
    at: float
    prompt_tokens: int
    policy: str
    unkeyed: str
    plans: tuple[Plan, ...]
    considered: int
    ttft_slo_s: float = 0.0
    refusal: Refusal | None = None


def holder_first(plans: list[Plan]) -> list[Plan]:
    """Plans, the cheapest first, with the one that holds most of the prompt before those whose
    price equals its own; of those that hold as much the cheapest.

    Predictions are off by a share of the price, so smaller differences tell nothing.
    """
    if not plans:
        return plans
    over_share, total_s = plans[0].over_share, plans[0].price.total_s
    limit = over_share, (1 + EQUAL) * total_s
    near = [plan for plan in plans if (plan.over_share, plan.price.total_s) <= limit]
    best = max(near, key=lambda plan: plan.expected_tokens)
    return [best, *(plan for plan in plans if plan is not best)]
