"""Figures of a trace: against a slow twin on random prefix traces, and on the public traces."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.workload.trace import Trace, TraceRequest, open_trace
from kvatlas.workload.trace_stats import Counting, TraceStats, stats

BLOCK = 16


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace("t", "made", BLOCK, lambda: iter(requests))


def figures(*requests: TraceRequest) -> TraceStats:
    found = stats(trace_of(*requests))
    assert found is not None
    return found


@st.composite
def prefix_traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Prompts out of a random tree of blocks: an id stands for its whole prefix."""
    paths = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=40))
    names: dict[tuple[int, ...], int] = {}
    return [
        TraceRequest(
            index,
            float(index),
            len(path) * BLOCK - index % BLOCK,
            1,
            tuple(names.setdefault(tuple(path[: end + 1]), len(names)) for end in range(len(path))),
            session=str(path[0]),
        )
        for index, path in enumerate(paths)
    ]


def lru_hits(requests: list[TraceRequest], capacity: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for id in request.hash_ids:
            hits += id in held
            held[id] = None
            held.move_to_end(id)
            if len(held) > capacity:
                held.popitem(last=False)
    return hits


@given(prefix_traces())
def test_reuse_is_that_of_lru_at_every_capacity(requests: list[TraceRequest]) -> None:
    counting = Counting(BLOCK)
    for request in requests:
        counting.add(request)
    blocks = sum(len(request.hash_ids) for request in requests)
    for capacity in range(1, 30) if requests else ():
        assert counting.lru_hit_rate(capacity) * blocks == pytest.approx(
            lru_hits(requests, capacity)
        )


@given(prefix_traces())
def test_the_rest_is_what_a_slow_count_gives(requests: list[TraceRequest]) -> None:
    found = stats(trace_of(*requests))
    if found is None:
        assert not requests
        return
    maker: dict[int, str] = {}
    touches: dict[int, list[int]] = {}
    hits = own = tokens = 0
    for request in requests:
        for place, id in enumerate(request.hash_ids):
            if id in maker:
                hits += 1
                own += maker[id] == request.session
                tokens += min(BLOCK, request.input_tokens - place * BLOCK)
            maker.setdefault(id, request.session)
            touches.setdefault(id, []).append(request.index)
    blocks = sum(len(request.hash_ids) for request in requests)
    assert found.unique_blocks == len(maker)
    assert found.block_hit_rate == pytest.approx(hits / blocks)
    assert found.token_hit_rate == pytest.approx(
        tokens / sum(request.input_tokens for request in requests)
    )
    assert found.hits_in_session == (pytest.approx(own / hits) if hits else None)
    live = [sum(at[0] <= now < at[-1] for at in touches.values()) for now in range(len(requests))]
    assert found.peak_live_blocks == max(live)


def test_percentiles_gaps_and_sessions() -> None:
    requests = [
        TraceRequest(n, n * 10.0, (n + 1) * BLOCK, n, tuple(range(n + 1)), "s", n * 2.0)
        for n in range(10)
    ]
    found = figures(*requests)
    assert (found.duration_s, found.requests_per_s) == (90, pytest.approx(1 / 9))
    prompts = found.prompt_tokens
    assert (prompts.p50, prompts.p90, prompts.p99, prompts.max) == (80, 144, 160, 160)
    assert found.turn_gap_s is not None
    assert found.turn_gap_s.p50 == 10
    assert found.think_s is not None
    assert found.think_s.max == 18
    assert found.turns_per_session is not None
    assert (found.sessions, found.turns_per_session.max) == (1, 10)
    assert found.hits_in_session == 1


def test_scopes_share_nothing_and_a_block_twice_in_a_prompt_is_no_reuse() -> None:
    two = figures(
        TraceRequest(0, 0.0, 32, 1, (1, 2), scope="a"),
        TraceRequest(1, 1.0, 32, 1, (1, 2), scope="b"),
    )
    assert (two.block_hit_rate, two.unique_blocks, two.scopes) == (0, 4, 2)
    twice = figures(TraceRequest(0, 0.0, 48, 1, (1, 1, 2)))
    assert (twice.block_hit_rate, twice.unique_blocks) == (0, 2)


def test_a_trace_without_requests_has_no_figures() -> None:
    assert stats(trace_of()) is None


def test_the_conversation_trace_has_its_published_figures(
    shared_file: Callable[[str], Path],
) -> None:
    """Exact: Mooncake's trace as its authors count it, and plain LRU on it."""
    found = stats(open_trace(shared_file("traces/mooncake_conversation.jsonl.xz")))
    assert found is not None
    assert (found.requests, found.prompt_tokens.total) == (12_031, 144_793_823)
    assert found.unique_blocks == 182_790
    assert round(found.block_hit_rate, 4) == 0.3664
    assert round(found.token_hit_rate, 4) == 0.3736
    assert [round(point.block_hit_rate, 3) for point in found.lru] == [
        0.052, 0.195, 0.278, 0.353, 0.363,
    ]  # fmt: skip


def quartiles(values: Iterator[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[int(len(ordered) * share)] for share in (0.25, 0.5, 0.75)]


@pytest.mark.long
def test_the_sessions_have_their_published_quartiles(shared_file: Callable[[str], Path]) -> None:
    """Stated are hits of .919/.954/.971 and 18/45/94 requests per session; how sessions were chosen
    for that is not. All 355 sessions of the file give .912/.952/.972 and 15/43/93."""
    trace = open_trace(shared_file("traces/claude_code_sessions_compact.jsonl.xz"))
    sessions: dict[str, Counting] = {}
    thinks: list[float] = []
    for request in trace:
        name = request.session.partition("/")[0]
        sessions.setdefault(name, Counting(trace.block_tokens)).add(request)
        if request.think_s is not None:
            thinks.append(request.think_s)
    found = [figures for counting in sessions.values() if (figures := counting.result())]
    assert len(found) == 355
    hits = quartiles(figures.block_hit_rate for figures in found)
    assert hits == pytest.approx([0.919, 0.954, 0.971], abs=0.008)
    counts = quartiles(float(figures.requests) for figures in found)
    assert counts == pytest.approx([18, 45, 94], abs=3)
    assert sorted(thinks)[len(thinks) // 2] == 10


def test_some_sessions_share_tools(shared_file: Callable[[str], Path]) -> None:
    path = shared_file("traces/claude_code_sessions_compact.jsonl.xz")
    found = stats(trace := open_trace(path), itertools.islice(trace, 600))
    assert found is not None
    assert found.hits_in_session is not None
    assert 0.5 < found.hits_in_session < 1
