"""Loads over several ways to a store: how they are split and priced, beside those of others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core.cost import PRIOR_LATENCY_S, EngineCost, PoolCost
from kvatlas.core.load_ways import Load, LoadWays, StoreWay, split
from kvatlas.core.records import Publisher, Tier
from kvatlas.workload.models import load_layout

LAYOUT = load_layout("qwen3-32b", engine="vllm")
COST = EngineCost(PoolCost(LAYOUT, 8000.0))
P0, P1, A0, A1, D = (Publisher(name) for name in ("p0", "p1", "a0", "a1", "d"))
TOKENS = 8192
BYTES = LAYOUT.load_bytes(TOKENS)
STORED = (0, 0, 0, TOKENS, 0)  # by tier
RATE = 10e9


@given(
    st.dictionaries(
        st.integers(0, 7),
        st.tuples(st.floats(0, 1), st.floats(1e-11, 1e-8)),
        min_size=1,
    ),
    st.floats(1e6, 1e11),
)
def test_all_parts_end_together_and_are_the_whole(
    ways: dict[int, tuple[float, float]], size_bytes: float
) -> None:
    begins = {way: begin for way, (begin, _) in ways.items()}
    slopes = {way: slope for way, (_, slope) in ways.items()}
    end_s, parts = split(begins, slopes, size_bytes)
    assert sum(parts.values()) == pytest.approx(size_bytes, rel=1e-5)
    for way, part in parts.items():
        assert begins[way] + slopes[way] * part == pytest.approx(end_s)
    alone_s = min(begins[way] + slopes[way] * size_bytes for way in ways)
    assert end_s <= alone_s * (1 + 1e-9)  # never worse than the best way alone
    assert all(begins[way] >= end_s for way in ways if way not in parts)


def ways_of(two: bool = True) -> LoadWays:
    """One or two prefill nodes with cards of their own, and a decode node's that both share."""
    ways = LoadWays()
    ways.settle(A0, (P0,), (StoreWay(A0, RATE), StoreWay(D, RATE)))
    if two:
        ways.settle(A1, (P1,), (StoreWay(A1, RATE), StoreWay(D, RATE)))
    return ways


def begun(ways: LoadWays, engine: Publisher) -> Load:
    load = ways.begin(engine, COST, STORED)
    assert load is not None
    return load


def test_two_ways_take_half_of_the_time() -> None:
    ways = ways_of()
    assert ways.load_s(P0, COST, STORED) == pytest.approx(PRIOR_LATENCY_S + BYTES / RATE / 2)
    load = begun(ways, P0)
    assert {card for card, _ in load.parts} == {A0, D}


def test_others_loads_over_the_shared_card_are_waited_for_ones_own_are_not() -> None:
    ways = ways_of()
    free_s = ways.load_s(P0, COST, STORED)
    load = begun(ways, P1)
    assert free_s < ways.load_s(P0, COST, STORED) < PRIOR_LATENCY_S + BYTES / RATE
    assert ways.load_s(P1, COST, STORED) == free_s  # it is in the engine's queue already
    ways.end(load)
    assert ways.load_s(P0, COST, STORED) == free_s


def test_a_card_that_is_busy_for_longer_is_left_alone() -> None:
    ways = ways_of()
    for _ in range(8):
        begun(ways, P1)
    load = begun(ways, P0)
    assert [card for card, _ in load.parts] == [A0]
    assert ways.load_s(P0, COST, STORED) == pytest.approx(PRIOR_LATENCY_S + BYTES / RATE)


def test_what_is_not_of_a_store_with_several_ways_is_priced_as_ever() -> None:
    ways = ways_of(two=False)
    for engine, tiers in ((P0, (0, TOKENS)), (P0, (0, 0, TOKENS)), (P1, STORED), (P0, ())):
        assert ways.load_s(engine, COST, tiers) == COST.load_s(tiers)
        assert ways.begin(engine, COST, tiers) is None
    ways.end(None)
    both = (0, TOKENS, 0, TOKENS, 0)
    store_s = ways.load_s(P0, COST, STORED)
    assert ways.load_s(P0, COST, both) == pytest.approx(store_s + COST.load_s((0, TOKENS)))


def test_rates_that_were_told_wrong_are_learnt() -> None:
    ways = ways_of()
    told_s = ways.load_s(P0, COST, STORED)
    for _ in range(200):
        ways.end(begun(ways, P0), 3 * told_s)
    assert ways.load_s(P0, COST, STORED) == pytest.approx(3 * told_s, rel=0.1)
    assert ways.load_s(P1, COST, STORED) == told_s  # of another node nothing is learnt


def test_of_a_load_among_others_nothing_is_learnt() -> None:
    ways = ways_of()
    told_s = ways.load_s(P0, COST, STORED)
    other = begun(ways, P1)
    for _ in range(50):
        ways.end(begun(ways, P0), 10 * told_s)
    ways.end(other)
    assert ways.load_s(P0, COST, STORED) == told_s


def test_an_agent_that_leaves_takes_its_ways_and_loads_still_end() -> None:
    ways = ways_of()
    load = begun(ways, P0)
    ways.remove(A0)
    assert ways.load_s(P0, COST, STORED) == COST.load_s(STORED)
    ways.end(load, 1.0)
    ways.settle(A0, (P0,), (StoreWay(A0, RATE), StoreWay(D, RATE)))
    assert ways.load_s(P0, COST, STORED) == ways.load_s(P1, COST, STORED)
    assert Tier.OBJECT == 3  # as the splits above are written
