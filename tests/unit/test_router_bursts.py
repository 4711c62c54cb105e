"""The figure that docs/decisions/004-router.md promises for bursts on one new prefix."""

from __future__ import annotations

import math

import pytest

from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher, Resume
from kvatlas.core.router import FAIR_SHARE_FLOOR, Ask, Decision, Params, Router

BLOCK = 50
PREFIX = [b"%016d" % i for i in range(80)]
ENGINE = b"one fingerprint"


def router(engines: int) -> Router:
    made = Router(Params(prefill_tokens_per_s=1000.0))
    for index in range(engines):
        made.add(Publisher(f"w{index}"), plain(BLOCK), ENGINE)
    return made


def send(made: Router, number: int, resumes: tuple[Resume, ...] = ()) -> Decision:
    """One request of 4,050 tokens, 4,000 of them the common prefix, 1.5 ms after the last."""
    ask = Ask(str(number), 4050, {ENGINE: PREFIX}, resumes)
    decision = made.peek(ask, number * 0.0015)
    made.begin(ask, decision.plans[0], number * 0.0015)
    return decision


@pytest.mark.parametrize("engines", [3, 4, 5, 8, 16, 64])
@pytest.mark.parametrize("per_engine", [1, 2, 4])
def test_a_new_prefix_is_computed_on_half_of_the_engines_at_most(
    engines: int, per_engine: int
) -> None:
    made = router(engines)
    computing = set()
    for number in range(engines * per_engine):
        plan = send(made, number).plans[0]
        if not plan.expected_tokens:
            computing.add(plan.publisher)
        bound = max(FAIR_SHARE_FLOOR, math.ceil(2 * (number + 1) / engines))
        assert max(made.in_flight().values()) <= bound
    assert len(computing) <= math.ceil(engines / 2)


def test_a_few_requests_stay_together() -> None:
    made = router(16)
    used = {send(made, number).plans[0].publisher for number in range(FAIR_SHARE_FLOOR)}
    assert len(used) == 1


def test_holders_beyond_the_first_few_are_found_when_those_are_full() -> None:
    """Twenty engines hold the prefix, named so that the full ones come first."""
    made = router(64)
    held = tuple(Resume(Publisher(f"w{i}"), 4000, 4000, (4000,)) for i in range(20))
    for number in range(20 * FAIR_SHARE_FLOOR):
        assert send(made, number, held).plans[0].resume_tokens == 4000


def test_no_engine_stands_idle_in_a_crowd() -> None:
    """Twice the fair share alone would let half of the engines take them all."""
    made = router(8)
    held = (Resume(Publisher("w0"), 4000, 4000, (4000,)),)
    for number in range(480):
        send(made, number, held)
        loads = made.in_flight().values()
        assert min(loads) > 0 or max(loads) <= FAIR_SHARE_FLOOR
    assert min(made.in_flight().values()) > 0
