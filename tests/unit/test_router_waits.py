"""How long an engine that is late still takes, and who is first where prices are equal."""

from __future__ import annotations

import pytest

from kvatlas.core.cost import Price
from kvatlas.core.layout import plain
from kvatlas.core.plans import EQUAL, Plan, holder_first
from kvatlas.core.records import Publisher, Resume
from kvatlas.core.router import Ask, Params, Router

FP = b"\1" * 32
BLOCK = 50


def router(count: int) -> Router:
    made = Router(Params(prefill_tokens_per_s=1000.0))
    for i in range(count):
        made.add(Publisher(f"w{i}"), plain(BLOCK), FP)
    return made


def ask(id: str, tokens: int, *resumes: Resume) -> Ask:
    keys = [f"{id}-{i}".encode().ljust(16, b".") for i in range((tokens - 1) // BLOCK)]
    return Ask(id, tokens, {FP: keys}, resumes)


def begin(made: Router, request: Ask, worker: str, now: float) -> float:
    """Send it there; returns its predicted time to the first token."""
    plans = made.peek(request, now).plans
    plan = next(p for p in plans if p.publisher.worker == worker)
    made.begin(request, plan, now)
    return plan.price.ttft_s


def test_who_is_late_is_expected_to_be_late_by_as_much_again() -> None:
    made = router(1)
    due = 10.0 + begin(made, ask("a", 2000), "w0", 10.0)
    w0 = Publisher("w0")
    assert made.waits(due - 0.5)[w0] == pytest.approx(0.5)
    assert made.waits(due)[w0] == pytest.approx(0.0)
    assert made.waits(due + 0.7)[w0] == pytest.approx(0.7)
    assert made.waits(due + 60.0)[w0] == pytest.approx(60.0)
    made.first_token("a", due + 60.0)
    assert made.waits(due + 60.0)[w0] == made.waits(due + 90.0)[w0] == 0.0


def test_an_engine_that_hangs_gets_nothing_more_from_those_whose_prompts_it_holds() -> None:
    made = router(2)
    held = Resume(Publisher("w0"), 2000, 2000, (2000,))
    due = begin(made, ask("a", 2000), "w0", 0.0)
    first = made.peek(ask("b", 2050, held), due).plans[0]
    assert first.publisher.worker == "w0"
    later = made.peek(ask("c", 2050, held), due + 30.0).plans[0]
    assert later.publisher.worker == "w1"


def test_a_failed_request_leaves_nobody_late() -> None:
    made = router(1)
    begin(made, ask("a", 2000), "w0", 0.0)
    begin(made, ask("b", 700), "w0", 0.0)
    made.end("a", 1.0, ok=False)
    made.end("b", 1.0, ok=False)
    assert made.waits(100.0)[Publisher("w0")] == 0.0


def test_of_equal_prices_who_holds_most_is_first_and_of_unequal_ones_the_cheaper() -> None:
    made = router(2)
    held = Resume(Publisher("w0"), 2000, 2000, (2000,))
    alone = {p.publisher.worker: p.price.total_s for p in made.peek(ask("x", 4050), 0.0).plans}
    saved_s = alone["w0"] - made.peek(ask("y", 4050, held), 0.0).plans[0].price.total_s
    assert saved_s > 2 * EQUAL * alone["w1"]
    # Requests queue up on the holder: it stays first while it is within a tenth of the other.
    seen = []
    for number in range(14):
        plans = made.peek(ask(f"p{number}", 4050, held), 0.0).plans
        by_worker = {p.publisher.worker: p.price.total_s for p in plans}
        dearer = by_worker["w0"] / by_worker["w1"] - 1
        seen.append((dearer, plans[0].publisher.worker))
        begin(made, ask(f"q{number}", 450), "w0", 0.0)
    assert {who for dearer, who in seen if dearer <= EQUAL} == {"w0"}
    assert {who for dearer, who in seen if dearer > EQUAL + 1e-9} == {"w1"}
    assert any(0 < dearer <= EQUAL for dearer, _ in seen)


@pytest.mark.parametrize(
    ("cheapest_s", "holder_s", "first"),
    [
        (0.05, 0.05 * (1 + 0.99 * EQUAL), "holder"),
        (0.05, 0.05 * (1 + 1.01 * EQUAL), "other"),
        (1.0, 1 + 0.99 * EQUAL, "holder"),
        (1.0, 1 + 1.01 * EQUAL, "other"),
    ],
)
def test_equal_is_a_share_of_the_price(cheapest_s: float, holder_s: float, first: str) -> None:
    def plan(name: str, total_s: float, held: int) -> Plan:
        price = Price(wait_s=total_s, load_s=0.0, recompute_s=0.0, crowd_s=0.0, charge_s=0.0)
        return Plan(Publisher(name), held, held, held, (), 0, False, price)

    plans = [plan("other", cheapest_s, 0), plan("holder", holder_s, 512), plan("far", 99.0, 4096)]
    ordered = [p.publisher.worker for p in holder_first(plans)]
    assert ordered[0] == first
    assert ordered[-1] == "far"
    assert holder_first([]) == []


@pytest.mark.parametrize("gap_s", [0.0, 0.002, 0.02, 0.2])
def test_who_is_late_does_not_look_sooner_for_one_request_more(gap_s: float) -> None:
    """Nobody answers, and nothing is known of the prompts: all of them get as many."""
    made = router(8)
    counts = dict.fromkeys((Publisher(f"w{i}") for i in range(8)), 0)
    for number in range(480):
        now = 1.0 + gap_s * number
        request = Ask(f"r{number}", -1, {}, (), "no_prompt")
        plan = made.peek(request, now).plans[0]
        made.begin(request, plan, now)
        counts[plan.publisher] += 1
    assert max(counts.values()) <= 480 / 8 + 1, counts


def test_who_is_late_and_gets_one_more_is_later_by_what_it_takes() -> None:
    made = router(1)
    w0 = Publisher("w0")
    due = begin(made, ask("a", 2000), "w0", 0.0)
    one_s = made.peek(ask("b", 700), due + 3.0).plans[0].price.service_s
    begin(made, ask("b", 700), "w0", due + 3.0)
    assert made.waits(due + 3.0)[w0] == pytest.approx(3.0 + one_s)
    assert made.waits(due + 5.0)[w0] == pytest.approx(5.0 + one_s)
    made.first_token("a", due + 6.0)
    assert made.waits(due + 6.0)[w0] == pytest.approx(one_s)
