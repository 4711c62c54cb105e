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
from kvatlas.workload.prompt_keys import Origin, PromptKeys, TraceKeys
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
    monkeypatch.setattr(world, "Origin", lambda ids, size: None)
    hashed = simulate(cluster, trace)
    assert msgspec.json.encode(cheap) == msgspec.json.encode(real) == msgspec.json.encode(hashed)
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


IDS = st.lists(st.sampled_from([0, 1, 2, (1 << 63) - 1]), min_size=1, max_size=6)


@given(IDS, IDS, st.sampled_from([6, 16, 24]), st.sampled_from([8, 16]), st.sampled_from(["", "t"]))
def test_keys_by_hash_ids_are_equal_where_those_by_tokens_are(
    one: list[int], other: list[int], size: int, step: int, salt: str
) -> None:
    """Also of prefixes that end inside a block or a step, but not in the first half of an id."""
    sides = []
    for ids, scope in ((one, ""), (other, salt)):
        tokens = prompt_tokens(request(ids, 0, size), size)
        origin = Origin(tuple(ids), size)
        by_ids = TraceKeys(origin, tokens, step, salt=scope)
        assert by_ids.belong(tokens, step, scope, "")
        sides.append((by_ids, PromptKeys(tokens, step, salt=scope)))
    (mine, mine_hashed), (theirs, theirs_hashed) = sides
    ends = [[at for at in range(1, len(ids) * size + 1) if at % size != 1] for ids in (one, other)]
    for at in ends[0]:
        for there in ends[1]:
            equal = mine_hashed.key(at) == theirs_hashed.key(there)
            assert (mine.key(at) == theirs.key(there)) == equal
    whole = len(one) * size // step
    assert mine.chain(whole)[:whole] == [mine.key(at * step) for at in range(1, whole + 1)]
    assert mine.run(2, 1, 4) == tuple(mine.key(at) for at in range(2, 6))
    assert len(mine.digest(whole)) == len(mine_hashed.digest(whole))
