"""Generated workloads: the same by seed, prefixes that hold, exact sums where they are dealt."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import ConfigError
from kvatlas.workload.families import Family, Lengths, always, generate, spread
from kvatlas.workload.presets import FAMILIES, PRESETS
from kvatlas.workload.trace import TraceRequest
from kvatlas.workload.trace_stats import stats

CHATS = Family(
    requests=400,
    duration_s=100,
    block_tokens=16,
    first_tokens=spread(50, 400),
    output_tokens=spread(20, 90, 1),
    groups=5,
    group_skew=1,
    ungrouped=0.2,
    system_tokens=spread(100, 300, 10),
    example_sets=3,
    example_tokens=spread(40, 80),
    turns=spread(3, 9, 1),
    append_tokens=spread(20, 100, 1),
    pace_sigma=0.5,
    think_s=spread(5, 60, 1),
    context_max=3000,
)
families = st.builds(
    Family,
    requests=st.integers(1, 200),
    duration_s=st.floats(0, 1000),
    block_tokens=st.sampled_from([1, 16, 100, 512]),
    first_tokens=st.just(spread(30, 500)),
    output_tokens=st.just(spread(20, 90)),
    groups=st.integers(1, 9),
    ungrouped=st.floats(0, 1),
    system_tokens=st.sampled_from([always(0), always(64), spread(20, 100)]),
    example_sets=st.integers(1, 4),
    example_tokens=st.sampled_from([always(0), spread(20, 100)]),
    turns=st.sampled_from([always(1), spread(3, 12, 1)]),
    append_tokens=st.just(spread(9, 80)),
    think_s=st.sampled_from([always(0), spread(5, 60)]),
    context_max=st.integers(1, 2000),
    dealt=st.booleans(),
)


def requests_of(family: Family, seed: int = 0) -> list[TraceRequest]:
    return list(generate(family, seed))


@given(families, st.integers(0, 3))
def test_what_comes_out_is_a_trace(family: Family, seed: int) -> None:
    """It obeys what files must obey, and an id has one place and one id before it."""
    requests = requests_of(family, seed)
    assert [r.index for r in requests] == list(range(family.requests))
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    before: dict[int, tuple[int, int]] = {}
    for request in requests:
        assert 1 <= request.input_tokens <= family.context_max
        assert request.output_tokens >= 1
        assert len(request.hash_ids) == -(-request.input_tokens // family.block_tokens)
        for place, (last, id) in enumerate(itertools.pairwise((-1, *request.hash_ids))):
            assert before.setdefault(id, (place, last)) == (place, last)


def test_sessions_grow_and_wait() -> None:
    turns: dict[str, list[TraceRequest]] = {}
    for request in requests_of(CHATS, 3):
        turns.setdefault(request.session, []).append(request)
    assert max(map(len, turns.values())) > 3
    for session in turns.values():
        assert session[0].think_s is None
        for one, two in itertools.pairwise(session):
            assert two.input_tokens > one.input_tokens + one.output_tokens
            kept = one.input_tokens // CHATS.block_tokens
            assert two.hash_ids[:kept] == one.hash_ids[:kept]
            assert two.think_s is not None
            assert two.arrival_s >= one.arrival_s + two.think_s


def test_a_seed_is_a_workload() -> None:
    assert requests_of(CHATS, 1) == requests_of(CHATS, 1) != requests_of(CHATS, 2)
    trace = generate(CHATS, 1)
    assert list(trace) == list(trace)


def test_groups_are_chosen_as_told() -> None:
    weights = (6.0, 3.0, 1.0)
    family = msgspec.structs.replace(
        CHATS, requests=3000, turns=always(1), groups=3, group_weights=weights, ungrouped=0
    )
    first = Counter(request.hash_ids[0] for request in requests_of(family))
    shares = [count / 3000 for _, count in first.most_common(3)]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.04)


def test_lengths_have_the_quantiles_that_they_say() -> None:
    lengths = spread(375, 1641, 1, p90=800)
    table = lengths.table()
    assert sum(value < 375 for value in table) / len(table) == pytest.approx(0.5, abs=0.001)
    assert sum(value < 800 for value in table) / len(table) == pytest.approx(0.9, abs=0.001)
    assert sum(value < 1641 for value in table) / len(table) == pytest.approx(0.99, abs=0.001)
    assert always(7).mean() == pytest.approx(7)


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((0.0, 1.0),),
        ((0.1, 1.0), (1.0, 2.0)),
        ((0.0, 1.0), (0.9, 2.0)),
        ((0.0, 2.0), (1.0, 1.0)),
        ((0.0, -1.0), (1.0, 1.0)),
        ((0.0, 1.0), (0.5, 1.0), (0.5, 2.0), (1.0, 3.0)),
        ((0.0, 1.0), (1.0, float("inf"))),
        ((0.0, float("nan")), (1.0, float("nan"))),
    ],
)
def test_lengths_that_cannot_be(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError, match="quantiles must"):
        Lengths(points)


@pytest.mark.parametrize(
    "change",
    [
        {"requests": 0},
        {"duration_s": -1.0},
        {"duration_s": float("nan")},
        {"block_tokens": 0},
        {"groups": 0},
        {"groups": 1 << 30},
        {"example_sets": 0},
        {"ungrouped": 1.5},
        {"group_weights": (1.0,)},
        {"group_weights": (1.0, 2.0, 3.0, 4.0, -1.0)},
        {"context_max": 1 << 40},
        {"pace_sigma": 9.0},
    ],
)
def test_families_that_cannot_be(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        generate(msgspec.structs.replace(CHATS, **change))


def test_memory_is_that_of_the_sessions_under_way() -> None:
    family = msgspec.structs.replace(CHATS, requests=1 << 20, duration_s=1e9)
    stream = iter(generate(family))
    peaks = []
    for size in (500, 3000):
        tracemalloc.start()
        for _ in itertools.islice(stream, size):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0] + 100_000


def test_the_four_families_are_what_they_are_called() -> None:
    small = {
        name: stats(generate(msgspec.structs.replace(family, requests=600), 1))
        for name, family in FAMILIES.items()
    }
    assert list(small) == ["random", "shared-prompt", "multi-turn", "agent"]
    random, shared, turns, agent = (found for found in small.values() if found is not None)
    assert random.block_hit_rate == 0
    assert shared.block_hit_rate > 0.3
    assert shared.hits_in_session == 0
    assert turns.hits_in_session is not None
    assert turns.hits_in_session > 0.5
    assert agent.turns_per_session is not None
    assert agent.turns_per_session.p50 > 10
    assert agent.block_hit_rate > 0.8


def test_seed_003_has_the_exact_sums_of_chapter_8() -> None:
    """20 × 8,000 + 80 × 2,000 tokens; 1,500 × 99 + 500 × 19 × 5 = 196,000 need no computing."""
    trace = generate(PRESETS["seed-003"])
    requests = list(trace)
    assert Counter(r.input_tokens for r in requests) == {8000: 20, 2000: 80}
    found = stats(trace)
    assert found is not None
    assert found.token_hit_rate * found.prompt_tokens.total == pytest.approx(196_000)
    system = {r.hash_ids[:375] for r in requests}
    sets = Counter(r.hash_ids[375:500] for r in requests)
    assert len(system) == 1
    assert sorted(sets.values()) == [20] * 5
