"""Other routers' rules, as their makers publish them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher, Resume
from kvatlas.core.rivals import Knobs, Rival, Standing
from kvatlas.core.router import Ask, Params, Policy, Router

GRID = 16


def keys_of(prompt: int, count: int) -> list[bytes]:
    return [bytes([prompt, i]) * 8 for i in range(count)]


def standing(
    name: str, held: int = 0, load: int = 0, *, keys: list[bytes] | None = None
) -> Standing:
    return Standing(Publisher(name), keys or [], GRID, held, load, 0)


def first(rival: Rival, *standings: Standing, tokens: int = 160, id: str = "r") -> str:
    order = rival.order(id, tokens, standings)
    assert sorted(order) == sorted(s.publisher for s in standings)
    return order[0].worker


def test_longest_prefix_goes_where_most_lies() -> None:
    rival = Rival("longest_prefix", Knobs())
    assert first(rival, standing("a", 64, 9), standing("b", 96, 60), standing("c")) == "b"


def test_a_short_match_goes_to_the_emptiest_cache() -> None:
    rival = Rival("longest_prefix", Knobs(cache_threshold=0.3))
    rival.began("x", standing("a"), 1000)
    rival.began("y", standing("b", 900), 1000)  # 100 of it are new there
    assert first(rival, standing("a", 48), standing("b")) == "b"  # 48 of 160: no more than 0.3


def test_loads_far_apart_overrule_the_prefix() -> None:
    rival = Rival("longest_prefix", Knobs(balance_abs=64, balance_rel=1.5))
    assert first(rival, standing("a", 160, 64), standing("b")) == "a"
    assert first(rival, standing("a", 160, 65), standing("b")) == "b"
    assert first(rival, standing("a", 160, 265), standing("b", 0, 200)) == "a"  # ratio 1.3


def test_power_of_two_takes_the_idler_of_the_two_best() -> None:
    rival = Rival("power_of_two", Knobs())
    best = standing("a", 160, 5), standing("b", 96, 2), standing("c", 64, 0), standing("d")
    assert first(rival, *best) == "b"


def test_power_of_two_without_a_prefix_draws_two_by_the_id() -> None:
    rival = Rival("power_of_two", Knobs())
    idle = [standing(name) for name in "abcdefgh"]
    drawn = {first(rival, *idle, id=f"r{i}") for i in range(200)}
    assert drawn == set("abcdefgh")
    busy = [standing(name, load=0 if name == "a" else 9) for name in "abcdefgh"]
    share = sum(first(rival, *busy, id=f"r{i}") == "a" for i in range(800)) / 800
    assert 0.2 < share < 0.3  # the idle one is among two of eight in a quarter of the draws


def test_block_cost_counts_prefill_of_others_and_blocks_in_use() -> None:
    keys, others = keys_of(1, 10), keys_of(2, 4)
    rival = Rival("block_cost", Knobs())
    rival.began("x", standing("a", keys=others), 64)
    a, b = standing("a", 80, keys=keys), standing("b", 0, keys=keys)
    # a: (64 + 80) / 16 = 9 to prefill, 4 + 10 in use: 23; b: 10 + 10 = 20
    assert first(rival, a, b) == "b"
    rival.first_token("x")  # a: 5 + 14 = 19
    assert first(rival, a, b) == "a"
    rival.ended("x")
    assert first(rival, standing("a", 16, keys=keys), b) == "a"


def test_block_cost_counts_a_shared_block_once() -> None:
    keys = keys_of(1, 10)
    rival = Rival("block_cost", Knobs(overlap_weight=0.0))
    rival.began("x", standing("a", keys=keys), 160)
    rival.began("y", standing("a", keys=keys), 160)
    rival.began("z", standing("b", keys=keys_of(3, 2)), 32)
    assert first(rival, standing("a", keys=keys), standing("b", keys=keys)) == "a"  # 10, not 12
    rival.ended("x")
    assert first(rival, standing("a", keys=keys), standing("b", keys=keys)) == "a"
    rival.ended("y")
    rival.ended("z")
    assert first(rival, standing("a", keys=keys), standing("b", keys=keys)) == "a"


def test_a_temperature_draws() -> None:
    near = [standing("a", 16), standing("b")]
    cold, hot = Rival("block_cost", Knobs()), Rival("block_cost", Knobs(temperature=1.0))
    assert {first(cold, *near, id=f"r{i}") for i in range(50)} == {"a"}
    share = sum(first(hot, *near, id=f"r{i}") == "a" for i in range(1000)) / 1000
    assert 0.68 < share < 0.78  # 1 / (1 + exp(-1)) = 0.731


@given(
    st.sampled_from(("longest_prefix", "power_of_two", "block_cost")),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.sampled_from("sfe")), max_size=40),
)
def test_the_router_drives_each_and_all_books_end_empty(
    policy: Policy, steps: list[tuple[int, int, str]]
) -> None:
    router = Router(Params(policy=policy))
    layout = plain(GRID)
    for name in "abc":
        router.add(Publisher(name), layout, b"f")
    for i, (prompt, held, end) in enumerate(steps):
        keys = keys_of(prompt, 10)
        resume = Resume(Publisher("b"), held * GRID, held * GRID, (held * GRID,))
        ask = Ask(f"r{i}", 10 * GRID + 1, {b"f": keys}, (resume,) if held else ())
        decision = router.peek(ask, float(i))
        assert {plan.publisher.worker for plan in decision.plans} == set("abc")
        router.begin(ask, decision.plans[0], float(i))
        if end != "s":
            router.first_token(ask.id, i + 0.5)
        if end == "e":
            router.end(ask.id, i + 0.9, ok=True)
    for i in range(len(steps)):
        router.end(f"r{i}", 100.0, ok=False)
    rival = router._rival
    assert rival is not None
    assert not rival._flights
    assert all(not b.blocks and not b.prefill_tokens for b in rival._books.values())
