"""The cache without time and its oracles, on traces small enough to think through."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.core.policy.registry import POLICIES, make_policy
from kvatlas.core.policy.speculative import Speculative
from kvatlas.core.records import Tier
from kvatlas.errors import ConfigError
from kvatlas.sim.cache import Cache, Counts, Level, Work, prefill_seconds, prepare
from kvatlas.sim.cache import run as replay
from kvatlas.sim.oracles import endless, optimal
from kvatlas.workload.device import device
from kvatlas.workload.models import load_layout
from kvatlas.workload.trace import TraceRequest

BLOCK = 16


def request(index: int, *ids: int, tokens: int = 0, at: float | None = None) -> TraceRequest:
    tokens = tokens or BLOCK * len(ids)
    return TraceRequest(index, float(index) if at is None else at, tokens, 1, ids)


def work_of(*prompts: tuple[int, ...]) -> Work:
    return prepare((request(n, *ids) for n, ids in enumerate(prompts)), BLOCK)


def cache_of(policy: str, *capacities: int, unit_tokens: bool = False) -> Cache:
    levels = [Level(make_policy(policy, Tier(n)), cap) for n, cap in enumerate(capacities)]
    return Cache(levels, block_tokens=BLOCK, unit_tokens=unit_tokens)


def test_a_hit_ends_at_the_first_missing_block() -> None:
    cache = cache_of("lru", 10)
    work = work_of((1, 2, 3), (1, 9, 3), (1, 2, 3, 4))
    assert [cache.serve(prompt) for prompt in work.prompts] == [0, 1, 3]
    assert cache.counts.hit_blocks == 4
    assert cache.counts.held_blocks == 5, "block 3 was held, behind a missing one"


def test_tokens_and_full_hits() -> None:
    work = prepare(
        [request(0, 1, 2, tokens=20), request(1, 1, 2, tokens=20), request(2, 1, 3, tokens=32)],
        BLOCK,
    )
    counts = replay(cache_of("lru", 10), work)
    assert (counts.hit_tokens, counts.tokens, counts.full_hits) == (20 + 16, 72, 1)
    assert counts.token_hit_rate == 36 / 72


def test_capacity_in_tokens_weighs_the_last_block_by_its_tokens() -> None:
    work = prepare([request(0, 1, 2, tokens=17), request(1, 1, 2, tokens=17)], BLOCK)
    cache = cache_of("lru", 17, unit_tokens=True)
    assert [cache.serve(p) for p in work.prompts] == [0, 2]
    assert cache.levels[0].used == 17
    assert replay(cache_of("lru", 16, unit_tokens=True), work).hit_blocks == 0


def test_plain_lru_eats_the_start_of_a_prompt_and_leaf_lru_its_end() -> None:
    work = work_of((1, 2, 3), (7,), (1, 2, 3))
    assert replay(cache_of("lru", 3), work).hit_blocks == 0
    counts = replay(cache_of("leaf_lru", 3), work)
    assert counts.hit_blocks == 2


def test_a_prompt_larger_than_the_cache_keeps_its_start_where_the_tree_is_known() -> None:
    work = work_of((1, 2, 3, 4, 5), (1, 2, 3, 4, 5))
    cache = cache_of("leaf_lru", 3)
    assert [cache.serve(p) for p in work.prompts] == [0, 3]
    assert cache.counts.refused_blocks == 4
    assert replay(cache_of("lru", 3), work).hit_blocks == 0


def test_equal_ids_of_two_tenants_are_two_blocks() -> None:
    one, two = request(0, 1, 2), request(1, 1, 2)
    apart = TraceRequest(1, 1.0, 32, 1, (1, 2), scope="b")
    assert replay(cache_of("lru", 9), prepare([one, two], BLOCK)).hit_blocks == 2
    assert replay(cache_of("lru", 9), prepare([one, apart], BLOCK)).hit_blocks == 0


def test_merged_blocks() -> None:
    work = prepare([request(0, 1, 2, 3, tokens=40), request(1, 1, 2, 9, tokens=48)], BLOCK, merge=2)
    assert work.block_tokens == 32
    assert [p.keys for p in work.prompts] == [(0, 1), (0, 2)]
    assert [p.last_tokens for p in work.prompts] == [8, 16]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: prepare([], BLOCK), "no requests"),
        (lambda: prepare([request(0, 1, 2, 3)], BLOCK, blocks_max=2), "more than 2 times"),
        (lambda: Cache([], block_tokens=BLOCK), "at least one tier"),
        (lambda: cache_of("lru", 0), "capacity of 1"),
        (lambda: optimal(work_of((1,)), 0), "capacity of 1"),
        (lambda: make_policy("best"), "unknown policy 'best'"),
        (lambda: make_policy("attention"), "measured scores"),
        (lambda: prefill_seconds(load_layout("32", engine="vllm"), device("H20"), 1), "not known"),
    ],
)
def test_what_cannot_be(make: object, reason: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=reason):
        make()


def test_a_hit_below_comes_up_and_the_oldest_above_goes_down() -> None:
    cache = cache_of("lru", 1, 1)
    one, two, three = work_of((1,), (2,), (3,)).prompts
    cache.serve(one)
    cache.serve(two)
    assert cache.counts.demoted == 1
    assert cache.serve(one) == 1
    assert (cache.counts.promoted, cache.counts.demoted) == (1, 2)
    assert cache.counts.tier_blocks == [0, 1]
    cache.serve(three)
    assert cache.counts.dropped_blocks == 1
    assert len(cache) == 2
    assert one.keys[0] in cache
    assert two.keys[0] not in cache


def test_seconds_saved_follow_the_position() -> None:
    seconds = prefill_seconds(load_layout("deepseek-v4-flash", engine="vllm"), device("H100"), 8)
    cache = Cache([Level(make_policy("gdsf"), 100)], block_tokens=BLOCK, seconds=seconds)
    work = work_of(tuple(range(50)), tuple(range(50)))
    counts = replay(cache, work)
    assert counts.saved_s == pytest.approx(seconds(50 * BLOCK))
    assert counts.whole_s == pytest.approx(2 * seconds(50 * BLOCK))


prompts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=25
)


def chained(paths: list[tuple[int, ...]]) -> Work:
    """Each block's id stands for the whole prefix, as in a trace."""
    return work_of(*(tuple(hash(p[: n + 1]) & 0xFFFFFF for n in range(len(p))) for p in paths))


def best_by_trying(work: Work, capacity: int) -> int:
    """The most hits of any choice of what to keep after each use; for tiny traces only."""
    uses = [key for prompt in work.prompts for key in prompt.keys]
    states = {frozenset[int](): 0}
    for key in uses:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            score = hits + (key in held)
            everything = held | {key}
            for size in range(min(capacity, len(everything)) + 1):
                for kept in itertools.combinations(sorted(everything), size):
                    state = frozenset(kept)
                    following[state] = max(following.get(state, 0), score)
        states = following
    return max(states.values())


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), max_size=6),
    st.integers(1, 3),
)
def test_optimal_is_what_trying_everything_finds(
    paths: list[tuple[int, ...]], capacity: int
) -> None:
    work = chained([(0,), *paths])
    counts = optimal(work, capacity)
    assert counts.held_blocks == best_by_trying(work, capacity)
    assert counts.hit_blocks == counts.held_blocks, "it never keeps what cannot be reached"


@given(prompts, st.integers(1, 12))
def test_no_policy_beats_the_oracles_and_a_large_cache_is_endless(
    paths: list[tuple[int, ...]], capacity: int
) -> None:
    work = chained(paths)
    best, end = optimal(work, capacity), endless(work)
    assert best.hit_blocks <= end.hit_blocks
    for name in POLICIES:
        if name == "attention":
            continue
        counts = replay(cache_of(name, capacity), work)
        assert counts.hit_blocks <= best.hit_blocks, name
        assert counts.hit_blocks <= counts.held_blocks
        large = replay(cache_of(name, work.unique_blocks), work)
        assert (large.hit_blocks, large.hit_tokens, large.full_hits) == (
            end.hit_blocks,
            end.hit_tokens,
            end.full_hits,
        )
        assert large.dropped_blocks == large.refused_blocks == 0


@given(prompts, st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_exclusive_tiers_of_lru_are_one_lru(
    paths: list[tuple[int, ...]], capacities: list[int]
) -> None:
    work = chained(paths)
    one, many = cache_of("lru", sum(capacities)), cache_of("lru", *capacities)
    for prompt in work.prompts:
        assert one.serve(prompt) == many.serve(prompt)
    assert one.counts.dropped_blocks == many.counts.dropped_blocks


@given(prompts, st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans())
def test_books_balance_in_every_tier(
    paths: list[tuple[int, ...]], capacities: list[int], unit_tokens: bool
) -> None:
    work = chained(paths)
    for name in POLICIES:
        if name == "attention":
            continue
        caps = [cap * BLOCK if unit_tokens else cap for cap in capacities]
        cache = cache_of(name, *caps, unit_tokens=unit_tokens)
        for prompt in work.prompts:
            cache.serve(prompt)
            for level in cache.levels:
                assert 0 <= level.used <= level.capacity
            assert len(cache) == sum(len(level.policy) for level in cache.levels)
        counts = cache.counts
        assert (
            counts.blocks - counts.held_blocks
            == (len(cache) + counts.dropped_blocks + counts.refused_blocks)
            or len(capacities) > 1
        )
        assert sum(counts.tier_blocks) == counts.hit_blocks


def test_the_next_turn_is_brought_up_before_it_comes() -> None:
    """Conversations that come back after ten seconds each, and one-time prompts between them that
    push them down."""
    requests = []
    for turn in range(12):
        at = turn * 10.0
        requests.append(request(len(requests), *range(100, 103 + turn), at=at))
        for noise in range(4):
            ids = (1000 + 40 * turn + 10 * noise, 1001 + 40 * turn + 10 * noise)
            requests.append(request(len(requests), *ids, at=at + 1))
    work = prepare(requests, BLOCK)
    plain = replay(cache_of("lru", 16, 100), work)
    cache = cache_of("lru", 16, 100)
    ahead = Speculative(confidence_min=0.3)
    counts = replay(cache, work, ahead=ahead)
    assert counts.hit_blocks == plain.hit_blocks, "it moves blocks, and finds the same ones"
    assert counts.tier_blocks[0] > plain.tier_blocks[0]
    assert 0 < counts.prefetched_used <= counts.prefetched
    assert isinstance(counts, Counts)


def test_a_prompt_larger_than_the_top_tier_lives_on_below() -> None:
    work = work_of(tuple(range(6)), tuple(range(6)), tuple(range(6)))
    for name in ("leaf_lru", "prefix_tree", "gdsf"):
        cache = cache_of(name, 2, 2, 2)
        assert [cache.serve(p) for p in work.prompts] == [0, 6, 6]
        assert cache.counts.tier_blocks == [4, 4, 4]
        assert cache.counts.refused_blocks == cache.counts.dropped_blocks == 0
        assert cache.counts.promoted == 0, "what stays below is not counted as brought up"
        small = cache_of(name, 2, 2)
        assert [small.serve(p) for p in work.prompts] == [0, 4, 4]
