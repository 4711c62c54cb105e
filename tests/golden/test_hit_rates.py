"""Exact hit rates of the conversation trace, from what was computed of it independently.

The trace is Mooncake's (FAST'25, Apache-2.0), 12,031 requests in blocks of 512 tokens. The cache
without time must give these figures to the last digit that is written here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from kvatlas.core.policy.registry import make_policy
from kvatlas.core.records import Tier
from kvatlas.sim.cache import Cache, Counts, Level, Work, prepare
from kvatlas.sim.cache import run as replay
from kvatlas.sim.oracles import endless, optimal
from kvatlas.workload.trace import open_trace

TRACE = "traces/mooncake_conversation.jsonl.xz"


@functools.cache
def read(path: Path) -> Work:
    trace = open_trace(path)
    return prepare(trace, trace.block_tokens)


@pytest.fixture
def work(shared_file: Callable[[str], Path]) -> Work:
    return read(shared_file(TRACE))


def counted(work: Work, policy: str, *capacities: int, unit_tokens: bool = False) -> Counts:
    levels = [Level(make_policy(policy, Tier(n)), cap) for n, cap in enumerate(capacities)]
    cache = Cache(levels, block_tokens=work.block_tokens, unit_tokens=unit_tokens)
    return replay(cache, work)


def half_rate(work: Work, policy: str, capacity: int) -> float:
    """Token hit rate of the second half, in percent, as kvcache-simulator measures it."""
    half = len(work.prompts) // 2
    if policy == "optimal":
        return 100 * optimal(work, capacity, measure_from=half).token_hit_rate
    cache = Cache([Level(make_policy(policy), capacity)], block_tokens=work.block_tokens)
    return 100 * replay(cache, work, measure_from=half).token_hit_rate


def cut(value: float, digits: int) -> float:
    """To so many digits, the rest left away (as the published figures are)."""
    return int(value * 10**digits) / 10**digits


def test_an_endless_cache(work: Work) -> None:
    assert (work.unique_blocks, work.tokens, len(work.prompts)) == (182_790, 144_793_823, 12_031)
    counts = endless(work)
    assert round(counts.block_hit_rate, 4) == 0.3664
    assert round(counts.token_hit_rate, 4) == 0.3736
    assert counts.held_blocks == work.blocks - work.unique_blocks
    assert counts.hit_blocks == counts.held_blocks, "no block is held behind a missing one"


@pytest.mark.parametrize(
    ("percent", "rate"), [(1, 0.052), (5, 0.195), (10, 0.278), (25, 0.353), (50, 0.363)]
)
def test_plain_lru_by_share_of_the_distinct_blocks(work: Work, percent: int, rate: float) -> None:
    counts = counted(work, "lru", round(work.unique_blocks * percent / 100))
    assert cut(counts.block_hit_rate, 3) == rate


@pytest.mark.parametrize(
    ("percent", "rate", "full"),
    [(25, 0.3536, 0.0097), (50, 0.3634, 0.0098), (75, 0.3660, 0.0098), (100, 0.3664, 0.0098)],
)
def test_lru_with_a_capacity_in_tokens(work: Work, percent: int, rate: float, full: float) -> None:
    """Blocks weigh their tokens, the last of a prompt less; all distinct blocks are 100 %."""
    capacity = work.unique_blocks * work.block_tokens * percent // 100
    counts = counted(work, "lru", capacity, unit_tokens=True)
    assert round(counts.block_hit_rate, 4) == rate
    assert round(counts.full_hits / counts.requests, 4) == full


PREFIX = {  # blocks held: LRU, FIFO, LFU
    1_000: (0.0445, 0.0434, 0.0481),
    3_000: (0.0650, 0.0627, 0.0747),
    10_000: (0.2112, 0.1815, 0.1318),
    30_000: (0.3257, 0.2944, 0.2759),
    50_000: (0.3546, 0.3335, 0.3438),
    100_000: (0.3637, 0.3563, 0.3631),
}
#: One of each in every run; the rest in `make test-long`.
QUICK = {(1_000, "lfu"), (10_000, "fifo"), (100_000, "lru")}


@pytest.mark.parametrize(
    ("blocks", "policy", "rate"),
    [
        pytest.param(
            blocks,
            policy,
            rate,
            marks=() if (blocks, policy) in QUICK else pytest.mark.long,
            id=f"{policy}-{blocks}",
        )
        for blocks, rates in PREFIX.items()
        for policy, rate in zip(("lru", "fifo", "lfu"), rates, strict=True)
    ],
)
def test_prefix_hits(work: Work, blocks: int, policy: str, rate: float) -> None:
    assert round(counted(work, policy, blocks).block_hit_rate, 4) == rate


def test_exclusive_tiers_with_promotion_are_one_lru(work: Work) -> None:
    one = counted(work, "lru", 10_000)
    three = counted(work, "lru", 1_000, 2_000, 7_000)
    assert three.hit_blocks == one.hit_blocks == sum(three.tier_blocks)
    assert three.dropped_blocks == one.dropped_blocks
    assert min(three.tier_blocks) > 0


@pytest.mark.long
def test_so_are_tiers_of_leaf_lru(work: Work) -> None:
    one = counted(work, "leaf_lru", 10_000)
    assert counted(work, "leaf_lru", 1_000, 2_000, 7_000).hit_blocks == one.hit_blocks


HALF = {  # GiB: blocks, FIFO, LRU, OPTIMAL, in percent
    8: (5_027, 10.9, 11.4, 36.4),
    16: (10_054, 18.4, 22.0, 39.8),
    32: (20_108, 26.7, 30.4, 39.8),
    64: (40_216, 33.1, 37.2, 39.8),
    128: (80_432, 36.9, 38.8, 39.8),
}


@pytest.mark.parametrize(
    "gib", [8, *(pytest.param(gib, marks=pytest.mark.long) for gib in (16, 32, 64, 128))]
)
def test_what_kvcache_simulator_says_of_the_second_half(work: Work, gib: int) -> None:
    """kvcache-simulator 0.1.3, V4 Flash, fp8 KV and fp4 indexer: 1,708,739 bytes per block."""
    blocks, *expected = HALF[gib]
    assert blocks == int(gib * 2**30 / 1_708_738.8875778979)
    rates = [half_rate(work, policy, blocks) for policy in ("fifo", "leaf_lru", "optimal")]
    assert [round(rate, 1) for rate in rates] == expected


def test_round_robin_over_eight_workers(work: Work) -> None:
    """Without any timing .1155; Dynamo's replay, with it, .1158 (ai-dynamo-runtime 1.6.1)."""
    caches = [Cache([Level(make_policy("lru"), 5_859)], block_tokens=512) for _ in range(8)]
    for number, prompt in enumerate(work.prompts):
        caches[number % 8].serve(prompt)
    rate = sum(c.counts.hit_tokens for c in caches) / work.tokens
    assert round(rate, 4) == 0.1155
    assert abs(rate - 0.1158) < 0.001


@pytest.mark.long
def test_the_peers_themselves(
    work: Work, shared_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the token, beside the packages as they are on PyPI."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import hit_rate

    path = shared_file(TRACE)
    theirs = hit_rate.peer("kvcache", path, *hit_rate.CAPACITIES)
    for name, policy in hit_rate.OURS.items():
        for capacity in hit_rate.CAPACITIES:
            mine = hit_rate.ours(work, policy, capacity)
            assert mine == theirs[f"{name}/{capacity}"], (name, capacity)
    reused = hit_rate.peer("dynamo", path)["reused"]
    assert abs(hit_rate.round_robin(work) - reused) < 0.001


@pytest.mark.parametrize("policy", ["lru", "leaf_lru", "s3fifo", "gdsf", "prefix_tree", "lru_sink"])
@pytest.mark.long
def test_nothing_beats_the_optimum(work: Work, policy: str) -> None:
    best = optimal(work, 9_140).hit_blocks
    assert counted(work, policy, 9_140).hit_blocks <= best <= endless(work).hit_blocks
