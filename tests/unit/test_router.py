"""The router: prices in seconds, affinity without hot spots."""

from __future__ import annotations

from typing import get_args

import pytest

from kvatlas.core.cost import Line
from kvatlas.core.layout import Group, Layout, plain
from kvatlas.core.records import Publisher, Resume
from kvatlas.core.router import Ask, Decision, Params, Policy, Router
from kvatlas.workload.models import load_layout

FP = b"\1" * 32
BLOCK = 50
RATE = 1000.0  # tokens/s


def keys(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{i}".encode().ljust(16, b".") for i in range(blocks)]


def ask(number: int, tokens: int, prefix: list[bytes], resumes: tuple[Resume, ...] = ()) -> Ask:
    own = keys(f"own{number}-", max(0, (tokens - 1) // BLOCK - len(prefix)))
    return Ask(str(number), tokens, {FP: prefix + own}, resumes)


def router(count: int, *, policy: Policy = "price", layout: Layout | None = None) -> Router:
    made = Router(Params(policy=policy, prefill_tokens_per_s=RATE))
    for i in range(count):
        made.add(Publisher(f"w{i}"), layout or plain(BLOCK), FP)
    return made


def choose(made: Router, request: Ask, now: float = 0.0) -> Decision:
    decision = made.peek(request, now)
    made.begin(request, decision.plans[0], now)
    return decision


def test_the_holder_wins_at_equal_load_and_loses_when_busy() -> None:
    made = router(2)
    held = (Resume(Publisher("w1"), 2000, 2000, (2000,)),)
    decision = choose(made, ask(1, 2050, keys("p", 40), held))
    assert decision.plans[0].publisher.worker == "w1"
    assert decision.plans[0].price.recompute_s == pytest.approx(0.055, abs=0.01)
    for number in range(2, 8):  # six other long prompts queue up on w1: 12 s, to save 2 s
        request = ask(number, 2000, keys(f"q{number}", 1))
        plan = next(p for p in made.peek(request, 0.0).plans if p.publisher.worker == "w1")
        made.begin(request, plan, 0.0)
    decision = made.peek(ask(9, 2050, keys("p", 40), held), 0.0)
    assert decision.plans[0].publisher.worker == "w0"
    assert decision.plans[1].price.wait_s > 3


def test_tiers_are_priced_nearest_first() -> None:
    """sglang#39108: with equal load host beats cold, device beats host."""
    layout = plain(BLOCK)
    made = router(3)
    dram = Resume(Publisher("w1"), 2000, 2000, (0, 2000, 0, 0, 0))
    hbm = Resume(Publisher("w2"), 2000, 2000, (2000,))
    assert made.peek(ask(1, 2050, keys("p", 40), (dram,)), 0.0).plans[0].publisher.worker == "w1"
    both = made.peek(ask(1, 2050, keys("p", 40), (dram, hbm)), 0.0)
    assert [p.publisher.worker for p in both.plans] == ["w2", "w1", "w0"]
    assert layout.resume_bytes(2000) == 0


def test_a_load_that_is_dearer_than_computing_is_neither_priced_nor_promised() -> None:
    sized = load_layout("llama-3.1-70b", engine="vllm")
    made = Router(Params(prefill_tokens_per_s=1e6))  # computes a block sooner than a disk reads it
    for i in range(2):
        made.add(Publisher(f"w{i}"), sized, FP)
    held = Resume(Publisher("w1"), 4000, 4000, (800, 0, 3200), own_tokens=800)
    (first, second) = made.peek(Ask("1", 4016, {FP: keys("p", 250)}, (held,)), 0.0).plans
    assert first.publisher.worker == "w1"  # for what is in hbm
    assert (first.resume_tokens, first.tier_tokens, first.price.load_s) == (800, (800,), 0.0)
    assert first.chain_tokens == 4000
    assert first.price.recompute_s < second.price.recompute_s
    slow = Router(Params(prefill_tokens_per_s=1e3))
    slow.add(Publisher("w1"), sized, FP)
    (plan,) = slow.peek(Ask("1", 4016, {FP: keys("p", 250)}, (held,)), 0.0).plans
    assert (plan.resume_tokens, plan.tier_tokens) == (4000, (800, 0, 3200))
    assert 0 < plan.price.load_s < 4.0
    itself = Resume(Publisher("w1"), 4000, 4000, (800, 0, 3200))  # the engine's own tier: it loads
    (idle, plan) = made.peek(Ask("1", 4016, {FP: keys("p", 250)}, (itself,)), 0.0).plans
    assert idle.publisher.worker == "w0"
    assert (plan.resume_tokens, plan.price.load_s > 0) == (4000, True)


def test_a_burst_on_one_new_prefix_is_computed_on_two_engines() -> None:
    """llm-d-router#1726: 32 requests, a 4,000-token prefix, 50-token tails, no event yet."""
    made = router(4)
    prefix = keys("p", 80)
    computed = 0
    per_engine: dict[str, int] = {}
    for number in range(32):
        plan = choose(made, ask(number, 4050, prefix), now=number * 0.0015).plans[0]
        computed += 4050 - plan.expected_tokens
        per_engine[plan.publisher.worker] = per_engine.get(plan.publisher.worker, 0) + 1
    assert computed <= 9600
    assert len(per_engine) == 2
    assert max(per_engine.values()) <= 16


def test_held_requests_spread_over_all_engines() -> None:
    """vllm-project/router#179: 480 concurrent requests with one short shared prefix."""
    made = router(8)
    prefix = keys("p", 4)
    held = tuple(Resume(Publisher("w0"), 200, 200, (200,)) for _ in range(1))
    for number in range(480):
        choose(made, ask(number, 230, prefix, held), now=number * 1e-4)
    counts = made.in_flight().values()
    assert min(counts) > 0
    assert max(counts) <= 120
    for number in range(480):
        made.end(str(number), 5.0, ok=True)
    assert set(made.in_flight().values()) == {0}


def test_unique_prompts_avoid_an_engine_that_others_overload() -> None:
    made = router(8)
    made.set_load(Publisher("w0"), 400)
    for number in range(70):
        choose(made, ask(number, 500, []), now=0.0)
    assert made.in_flight()[Publisher("w0")] == 0
    assert max(made.in_flight().values()) == 10


def test_a_failed_first_request_leaves_no_expectation() -> None:
    made = router(2)
    prefix = keys("p", 80)
    first = choose(made, ask(1, 4050, prefix)).plans[0]
    waiting = made.peek(ask(2, 4050, prefix), 0.0).plans[0]
    assert (waiting.publisher, waiting.expected_tokens) == (first.publisher, 4000)
    made.end("1", 1.0, ok=False)
    after = made.peek(ask(2, 4050, prefix), 1.0)
    assert all(p.expected_tokens == 0 and p.price.wait_s == 0 for p in after.plans)


def test_windowed_layouts_expect_only_the_end_of_a_prompt() -> None:
    layout = Layout(
        "v4", "vllm", "", BLOCK, (), (Group("kv", "*", BLOCK), Group("swa", "w", BLOCK, 50))
    )
    made = router(2, layout=layout)
    prefix = keys("p", 80)
    choose(made, ask(1, 4050, prefix))
    assert made.peek(ask(2, 8050, prefix), 0.0).plans[0].expected_tokens == 4000
    choose(made, ask(3, 8050, prefix))
    fresh = router(2, layout=layout)
    choose(fresh, ask(1, 4550, prefix))
    assert all(p.expected_tokens == 0 for p in fresh.peek(ask(2, 4050, prefix), 0.0).plans)


def test_round_robin_takes_turns_and_a_down_engine_is_the_last_resort() -> None:
    made = router(3, policy="round_robin")
    seen = [choose(made, ask(i, 100, [])).plans[0].publisher.worker for i in range(6)]
    assert seen == ["w0", "w1", "w2"] * 2
    for i in range(2):
        made.set_up(Publisher(f"w{i}"), False)
    assert [p.publisher.worker for p in made.peek(ask(9, 100, []), 0.0).plans] == ["w2"]
    made.set_up(Publisher("w2"), False)
    assert len(made.peek(ask(9, 100, []), 0.0).plans) == 3
    assert made.peek(ask(9, 100, []), 0.0, among=[]).plans == ()


def test_peek_changes_nothing_and_removal_frees_the_books() -> None:
    made = router(2)
    choose(made, ask(1, 4050, keys("p", 80)))
    before = [made.peek(ask(2, 4050, keys("p", 80)), 0.5) for _ in range(3)]
    assert before[0] == before[1] == before[2]
    for number in (1, 1):
        made.end(str(number), 1.0, ok=True)
    made.remove(Publisher("w0"))
    made.remove(Publisher("w0"))
    assert not made._expected
    assert not made._flights


def test_what_ends_with_its_first_token_teaches_nothing_of_decoding() -> None:
    """As the prefill half of a pair does; the crowd would look free in no time."""
    made = router(1)
    choose(made, ask(0, 100, []))
    before = made.peek(ask(1, 100, []), 0.0).plans[0].price.crowd_s
    assert before > 0
    for number in range(1, 100):
        now = float(number)
        choose(made, ask(number, 100, []), now)
        made.first_token(str(number), now + 0.1)
        made.end(str(number), now + 0.1, ok=True)
    assert made.peek(ask(100, 100, []), 100.0).plans[0].price.crowd_s == before


def test_a_hiccup_does_not_bend_the_line_but_what_stays_does() -> None:
    line = Line(0.005, 0.001, 2000.0)
    for _ in range(20):
        for x in (100, 1000, 2000):
            line.observe(x, 0.005 + 0.001 * x)
    line.observe(100, 30.0)
    assert line.at(100) < 0.3
    for _ in range(60):
        for x in (100, 1000, 2000):
            line.observe(x, 0.010 + 0.004 * x)
    assert line.at(2000) == pytest.approx(8.0, rel=0.05)


def test_line_never_goes_below_zero() -> None:
    line = Line(0.0, 1.0, 10.0)
    for x, y in ((1, 9.0), (2, 8.0), (3, 7.0)) * 50:
        line.observe(x, y)
    assert line.slope == 0.0
    assert line.at(100) == pytest.approx(8.0, abs=0.5)


@pytest.mark.parametrize("policy", get_args(Policy))
def test_few_engines_are_all_there_to_fall_back_on(policy: Policy) -> None:
    """Found by the fault simulation: four of five engines refused, and nobody asked the fifth."""
    decision = router(5, policy=policy).peek(ask(1, 100, []), 0.0)
    assert {plan.publisher.worker for plan in decision.plans} == {f"w{i}" for i in range(5)}
    assert len(router(40, policy=policy).peek(ask(1, 100, []), 0.0).plans) < 13
