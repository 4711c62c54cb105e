"""Running estimates of what time is worth: parts, pools, and engines that are different."""

from __future__ import annotations

import random

import pytest

from kvatlas.core.cost import PRIOR_LATENCY_S, EngineCost, Line, Parts, PoolCost, Work
from kvatlas.core.layout import Component, Compute, Group, Layout, Rule
from kvatlas.core.measured import Answer, Measured
from kvatlas.workload.profiles import prefill_flops_per_s

GROUP = Group("kv", "full_attention", 16)
PLAIN = Layout("m", "vllm", "", 16, (), (GROUP,))
RICH = Layout(
    "m",
    "vllm",
    "",
    16,
    (Component("kv", Rule.CHAIN, 1, 16, 16 << 10, 1024.0, group="kv"),),
    (GROUP,),
    Compute(linear=1e9, attention=1e6),
)
RATE = 1000.0  # tokens/s, the prior


def prompts(seed: int = 0) -> tuple[int, int, int]:
    """start, end, requests beside: of all sizes."""
    draw = random.Random(seed)
    start = draw.choice([0, 0, draw.randrange(20_000)])
    return start, start + draw.randrange(50, 8000), draw.randrange(30)


def taken(work: Work, slower: float = 1.0) -> float:
    """What an engine takes: not the prior's shape, nor its speed."""
    _, linear, attention, beside = work
    return slower * (0.004 + 3e-14 * linear + 9e-14 * attention + 0.0003 * beside)


def learnt(pool: PoolCost, count: int = 400, slower: float = 1.0) -> EngineCost:
    cost = EngineCost(pool)
    for number in range(count):
        work = pool.work(*prompts(number))
        cost.observe_prefill(work, taken(work, slower))
    return cost


def error(cost: EngineCost, slower: float = 1.0, seeds: range = range(1000, 1100)) -> float:
    """The median of the relative errors."""
    errors = []
    for seed in seeds:
        truth = taken(cost.pool.work(*prompts(seed)), slower)
        errors.append(abs(cost.recompute_s(*prompts(seed)) - truth) / truth)
    return sorted(errors)[len(errors) // 2]


def test_the_prior_is_a_rate_until_something_is_measured() -> None:
    cost = EngineCost(PoolCost(PLAIN, RATE))
    assert cost.recompute_s(0, 2048) == pytest.approx(2.05, abs=0.01)
    cost.observe_prefill(cost.pool.work(0, 100), float("nan"))
    cost.observe_prefill(cost.pool.work(0, 100), float("inf"))
    cost.observe_prefill(cost.pool.work(0, 100), 0.0)
    cost.observe_prefill(cost.pool.work(0, 100), -1.0)
    assert cost.pool.prefill.count == 0
    assert cost.recompute_s(0, 2048) == pytest.approx(2.05, abs=0.01)


def test_the_prior_may_be_what_a_device_reaches() -> None:
    flops = prefill_flops_per_s("H20", "", "fp8", 2)
    assert flops == 2 * 296e12 * 0.45
    once, *work, _ = PoolCost(RICH, RATE).work(0, 4000)
    priced = PoolCost(RICH, RATE, flops).recompute_s(0, 4000)
    assert priced == pytest.approx(PRIOR_LATENCY_S * once + sum(work) / flops)
    # of a model whose operations are not known only the tokens count
    assert PoolCost(PLAIN, RATE, flops).recompute_s(0, 4000) == pytest.approx(
        PRIOR_LATENCY_S + 4000 / RATE
    )


def test_parts_are_told_apart() -> None:
    cost = learnt(PoolCost(RICH, RATE))
    assert error(cost) < 0.001
    assert cost.pool.prefill.usual <= 0.02
    # Each by itself, far from what was seen too.
    for start, end, beside in ((100_000, 100_100, 0), (0, 100_000, 0), (0, 0, 200)):
        work = cost.pool.work(start, end, beside)
        assert cost.recompute_s(start, end, beside) == pytest.approx(taken(work), rel=0.02)


def test_a_model_that_is_not_known_is_priced_by_tokens() -> None:
    cost = EngineCost(PoolCost(PLAIN, RATE))
    for number in range(200):
        start, end, _ = prompts(number)
        cost.observe_prefill(cost.pool.work(start, end), 0.02 + (end - start) / 8000)
    assert cost.recompute_s(0, 2048) == pytest.approx(0.02 + 2048 / 8000, rel=0.02)


def test_a_change_is_believed_after_a_few_observations_and_a_hiccup_is_not() -> None:
    cost = learnt(PoolCost(RICH, RATE))
    draw = random.Random(5)

    def observe(slower: float) -> None:
        work = cost.pool.work(*prompts(draw.randrange(1 << 30)))
        cost.observe_prefill(work, taken(work, slower))

    observe(50.0)
    assert error(cost) < 0.05
    for _ in range(20):
        observe(1.0)
    assert error(cost) < 0.02
    for count in (10, 5):  # slower, and fast again
        slower = {10: 2.0, 5: 1.0}[count]
        for _ in range(12):
            observe(slower)
        assert error(cost, slower) < 0.1


def test_noise_does_not_move_the_estimates() -> None:
    pool = PoolCost(RICH, RATE)
    cost, draw = EngineCost(pool), random.Random(1)
    for number in range(600):
        work = pool.work(*prompts(number))
        cost.observe_prefill(work, taken(work) * draw.lognormvariate(0.0, 0.15))
    assert error(cost) < 0.06


def bandwidth(line: Line, draw: random.Random, slower: float, count: int) -> None:
    for _ in range(count):
        size_bytes = draw.uniform(2e7, 5e8)
        seconds = (0.004 + slower * size_bytes / 3e9) * draw.lognormvariate(0.0, 0.1)
        line.observe(size_bytes, seconds)


@pytest.mark.parametrize("slower", [0.1, 0.5, 2.0, 10.0])
def test_a_new_bandwidth_is_believed_after_some_twenty_loads(slower: float) -> None:
    line, draw = Line(0.005, 1 / 5e9, 100e6, follows=True), random.Random(3)
    bandwidth(line, draw, 1.0, 100)
    assert line.at(3e8) == pytest.approx(0.104, rel=0.05)
    bandwidth(line, draw, slower, 25)
    assert line.at(3e8) == pytest.approx(0.004 + slower * 0.1, rel=0.2)


def test_one_load_that_hangs_does_not_bend_the_line() -> None:
    line, draw = Line(0.005, 1 / 5e9, 100e6, follows=True), random.Random(3)
    bandwidth(line, draw, 1.0, 100)
    line.observe(3e8, 30.0)
    assert line.at(3e8) == pytest.approx(0.104, rel=0.15)
    bandwidth(line, draw, 1.0, 10)
    assert line.at(3e8) == pytest.approx(0.104, rel=0.1)


def test_rates_stay_above_zero_whatever_is_measured() -> None:
    parts, draw = Parts((0.005, 1.0, 1.0, 0.0001)), random.Random(2)
    for _ in range(2000):
        work = (1.0, draw.random(), draw.random() * 100, float(draw.randrange(3)))
        parts.observe(work, draw.choice([1e-9, 1e9, draw.random()]))
        alone = ((1, 0.0, 0, 0), (0, 1.0, 0, 0), (0, 0.0, 1, 0), (0, 0.0, 0, 1))
        assert all(parts.at(one) > 0 for one in alone)
        assert parts.at(work) > 0


def test_engines_of_a_pool_learn_from_each_other_and_slow_ones_stand_out() -> None:
    pool = PoolCost(RICH, RATE)
    fast, slow, new = EngineCost(pool), EngineCost(pool), EngineCost(pool)
    for number in range(200):
        for cost, slower in ((fast, 1.0), (slow, 2.0)):
            work = pool.work(*prompts(number))
            cost.observe_prefill(work, taken(work, slower))
    assert error(fast, 1.0) < 0.05
    assert error(slow, 2.0) < 0.05
    assert fast.recompute_s(0, 2000) < new.recompute_s(0, 2000) < slow.recompute_s(0, 2000)


def test_equal_engines_are_equal() -> None:
    """Chance is no reason to prefer one: light load would gather there."""
    pool, draw = PoolCost(RICH, RATE), random.Random(3)
    engines = [EngineCost(pool) for _ in range(8)]
    for number in range(1600):
        work = pool.work(*prompts(number))
        engines[number % 8].observe_prefill(work, taken(work) * draw.lognormvariate(0.0, 0.15))
    prices = [cost.recompute_s(0, 2000) for cost in engines]
    assert max(prices) < 1.06 * min(prices)


# --- what first tokens tell -----------------------------------------------------------------------


def answer(sent_at: float, tokens: int = 2000, expected: int = 0, **more: object) -> Answer:
    values: dict[str, object] = {"sure": True, "below": (expected,), "beside": 0}
    return Answer(sent_at, tokens, expected, **(values | more))  # type: ignore[arg-type]


def count(cost: EngineCost) -> int:
    return cost.pool.prefill.count


def test_an_answer_is_learnt_from_as_soon_as_none_can_join_it() -> None:
    cost = EngineCost(PoolCost(PLAIN, RATE))
    measured = Measured(cost)
    measured.began(answer(0.0), 1.0)
    assert count(cost) == 0
    measured.began(answer(1.5), 2.5)
    assert count(cost) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_what_comes_out_of_one_step_is_one_measurement(order: tuple[int, ...]) -> None:
    """Whichever first token is heard of first."""
    one, all_ = (EngineCost(PoolCost(RICH, RATE)) for _ in range(2))
    measured = Measured(all_)
    answers = [answer(0.1 * number, 1000 + number) for number in range(3)]
    answers[0].beside = 7
    for number in order:
        measured.began(answers[number], 4.0)
    for each in reversed(answers):
        measured.ended(each, ok=True, cached_tokens=0)
    assert count(all_) == 1
    works = [one.pool.work(0, 1000 + number) for number in range(3)]
    whole = (1.0, sum(w[1] for w in works), sum(w[2] for w in works), 7.0)
    one.observe_prefill(whole, 4.0)
    assert all_.recompute_s(0, 4000) == one.recompute_s(0, 4000)


def test_time_that_another_prefill_took_is_not_its_own() -> None:
    measured = Measured(EngineCost(PoolCost(PLAIN, RATE)))
    first, second = answer(0.0), answer(0.5)
    measured.began(first, 1.0)
    measured.began(second, 2.0)
    assert (first.seconds, second.seconds) == (1.0, 1.0)


def test_an_engine_that_breaks_promises_is_believed_at_the_end_only() -> None:
    cost = EngineCost(PoolCost(PLAIN, RATE))
    measured = Measured(cost)
    broken = answer(0.0, 2000, expected=1600)
    measured.began(broken, 2.0)
    measured.ended(broken, ok=True, cached_tokens=0)
    assert count(cost) == 1
    later = [answer(at, 2000, expected=1600) for at in (3.0, 13.0)]
    for each in later:
        measured.began(each, each.sent_at + 2)
    assert count(cost) == 1
    before = cost.recompute_s(0, 2000)
    for each in later:
        measured.ended(each, ok=True, cached_tokens=0)
    assert count(cost) == 3
    assert cost.recompute_s(0, 2000) == pytest.approx(before, rel=0.05)  # 2,000 tokens in 2 s


def test_what_is_not_sure_not_known_or_broken_off_teaches_nothing_at_once() -> None:
    cost = EngineCost(PoolCost(PLAIN, RATE))
    measured = Measured(cost)
    unknown, unsure, gone = answer(0.0, -1), answer(10.0, sure=False), answer(20.0)
    for each in (unknown, unsure, gone):
        measured.began(each, each.sent_at + 1)
    measured.ended(gone, ok=False, cached_tokens=-1)
    measured.began(answer(30.0), 31.0)
    assert count(cost) == 0
    measured.ended(unknown, ok=True, cached_tokens=-1)
    assert count(cost) == 0
    measured.ended(unsure, ok=True, cached_tokens=0)
    assert count(cost) == 1


def test_what_lies_beyond_the_prefill_is_the_load() -> None:
    cost = EngineCost(PoolCost(RICH, RATE))
    measured = Measured(cost)
    before = cost.load_s((0, 1600))
    for number in range(120):
        loaded = answer(10.0 * number, 2000, expected=1600, below=(0, 1600))  # from dram
        measured.began(loaded, loaded.sent_at + 1.0 + cost.recompute_s(1600, 2000))
        measured.ended(loaded, ok=True, cached_tokens=1600)
    assert before < 0.1
    assert cost.load_s((0, 1600)) == pytest.approx(1.0, rel=0.1)
    assert count(cost) == 0
