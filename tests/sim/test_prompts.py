"""Cheap token ids decide as real ones do."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_kit import chats, cluster_of

from kvatlas.sim import world
from kvatlas.sim.prompts import prompt_tokens
from kvatlas.sim.world import simulate
from kvatlas.workload.trace import TraceRequest, tokens_of


@pytest.mark.parametrize("model", ["deepseek-v4-flash", "llama-3.1-70b"])
def test_the_same_run_as_with_real_tokens(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(model=model, devices=4, blocks=5000, count=3)
    trace = chats(150, sessions=40, rate_per_s=10.0)
    cheap = simulate(cluster, trace)
    monkeypatch.setattr(
        world, "prompt_tokens", lambda request, size: tokens_of(request, block_tokens=size)
    )
    real = simulate(cluster, trace)
    assert msgspec.json.encode(cheap) == msgspec.json.encode(real)
    assert sum(cheap.tokens.hits.values()) > 0


def request(ids: list[int], cut: int, size: int) -> TraceRequest:
    return TraceRequest(0, 0.0, max(1, len(ids) * size - cut % size), 1, tuple(ids))


@given(
    st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=6),
    st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=6),
    st.sampled_from([2, 3, 16, 512]),
    st.integers(0, 600),
)
def test_equal_ids_equal_tokens_and_others_others(
    one: list[int], other: list[int], size: int, cut: int
) -> None:
    first, second = request(one, cut, size), request(other, 0, size)
    mine, theirs = prompt_tokens(first, size), prompt_tokens(second, size)
    assert len(mine) == 4 * first.input_tokens
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    whole = min(common, first.input_tokens // size) * size * 4
    assert mine[:whole] == theirs[:whole]
    if common < len(one) and common < len(other) and len(mine) >= common * size * 4 + 8:
        assert mine[: common * size * 4 + 8] != theirs[: common * size * 4 + 8]


def test_blocks_of_one_token() -> None:
    assert prompt_tokens(request([5, 5, 6], 0, 1), 1) == tokens_of(
        request([5, 5, 6], 0, 1), block_tokens=1
    )
