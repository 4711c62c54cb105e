"""The block pool: what can be resumed where, what is kept, what is announced, what is evicted."""

from __future__ import annotations

import struct

import pytest

from kvatlas.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.core.layout import Component, Group, Layout, Rule
from kvatlas.errors import ConfigError
from kvatlas.workload.holding import Holding
from kvatlas.workload.pool import Pool, pool_blocks


def layout(grid: int, *groups: Group, components: tuple[Component, ...] = ()) -> Layout:
    return Layout("test", "vllm", "", grid, components, groups)


GQA = layout(32, Group("kv", "full_attention", 32))
GEMMA = layout(
    32, Group("swa", "sliding_window", 32, 64, copies=2), Group("full", "full_attention", 32)
)
V4 = layout(
    256,
    Group("swa", "sliding_window_mla", 64, 128, copies=2),
    Group("global", "mla_attention", 256),
    Group("c4-state", "sliding_window_mla", 4, 8),
    Group("c128-state", "sliding_window_mla", 8, 128),
)


def ids(count: int, seed: int = 0) -> bytes:
    return struct.pack(f"<{count}I", *((i * 7919 + seed * 31) % 30000 for i in range(count)))


def play(
    pool: Pool, tokens: bytes, *, salt: str = "", adapter: str = "", keep: bool = False
) -> int:
    """Prefill a prompt in one chunk and end it. Returns the tokens that were hit."""
    return start(pool, tokens, salt=salt, adapter=adapter, keep=keep)[0]


def start(
    pool: Pool, tokens: bytes, *, salt: str = "", adapter: str = "", keep: bool = True
) -> tuple[int, Holding]:
    holding = pool.open(tokens, salt=salt, adapter=adapter)
    hit = pool.lookup(holding)
    assert pool.admit(holding, hit, holding.size)
    if not keep:
        pool.release(holding)
    return hit.tokens, holding


# What a second prompt that shares 590, 520, 400 or 300 of 600 tokens hits: measured on vLLM 0.32
# with tiny models of these shapes, under its default retention and a dense one.
@pytest.mark.parametrize(
    ("shape", "retention", "expected"),
    [
        (GQA, 0, [576, 512, 384, 288]),
        (GEMMA, 0, [576, 0, 0, 0]),
        (GEMMA, 64, [576, 512, 384, 288]),
        (GEMMA, None, [576, 512, 384, 288]),
        (V4, 0, [512, 512, 0, 0]),
        (V4, 256, [512, 512, 256, 256]),
        (V4, None, [512, 512, 256, 256]),
    ],
)
def test_shared_prefixes_resume_only_where_every_group_is_kept(
    shape: Layout, retention: int | None, expected: list[int]
) -> None:
    found = []
    for shared in (590, 520, 400, 300):
        pool = Pool(shape, 4000, retention=retention)
        play(pool, ids(600))
        found.append(play(pool, ids(600)[: shared * 4] + ids(200, seed=9)))
    assert found == expected


@pytest.mark.parametrize(("size", "resume"), [(1000, 768), (1024, 768), (1025, 1024)])
def test_the_window_before_the_last_prompt_token_is_kept(size: int, resume: int) -> None:
    pool = Pool(V4, 4000)
    play(pool, ids(size))
    kept = [e for e in pool.take_events() if isinstance(e, BlockStored) and e.group == 0]
    assert len(kept[0].hashes) == 2
    assert play(pool, ids(size)) == resume


def test_a_repeat_always_computes_at_least_one_token() -> None:
    pool = Pool(GQA, 100)
    play(pool, ids(64))
    assert play(pool, ids(64)) == 32
    assert play(pool, ids(65)) == 64


def test_the_first_sharer_reveals_a_junction_and_the_second_resumes_there() -> None:
    pool = Pool(V4, 8000)
    play(pool, ids(2000))
    hits = [play(pool, ids(2000)[: 1100 * 4] + ids(300, seed=s)) for s in (1, 2)]
    assert hits == [0, 1024]


def test_salt_and_adapter_keep_equal_texts_apart() -> None:
    pool = Pool(GQA, 100)
    play(pool, ids(200), salt="a")
    assert play(pool, ids(200)) == 0
    assert play(pool, ids(200), adapter="a") == 0
    assert play(pool, ids(200), salt="b") == 0
    assert play(pool, ids(200), salt="a") == 192


def test_groups_share_the_key_of_a_position() -> None:
    pool = Pool(V4, 4000, retention=None)
    play(pool, ids(600))
    last = {
        e.group: e.hashes[-1] for e in pool.take_events() if isinstance(e, BlockStored) and e.hashes
    }
    assert set(last) == {0, 1, 2, 3, 4}
    assert len(set(last.values())) == 1


def test_a_stored_event_names_kept_blocks_whole_range_and_parent() -> None:
    pool = Pool(V4, 4000)
    holding = pool.open(ids(1025), salt="tenant")
    assert pool.admit(holding, pool.lookup(holding), 512)
    assert pool.grow(holding, 512, 1025)
    stored = [e for e in pool.take_events() if isinstance(e, BlockStored)]
    first, second = stored[:5], stored[5:]
    assert [len(e.hashes) for e in first] == [0, 0, 2, 0, 0]
    assert [len(e.hashes) for e in second] == [2, 2, 2, 2, 16]
    assert all(e.parent is None and e.tokens == ids(512) for e in first)
    assert {e.parent for e in second} == {first[2].hashes[-1]}
    assert all(e.tokens == ids(1025)[512 * 4 : 1024 * 4] for e in second)
    assert [e.block_tokens for e in second] == [64, 64, 256, 4, 8]
    assert [e.window_tokens for e in second] == [128, 128, None, 8, 128]
    # The salt goes out only with the first block of the sequence, and only where that is kept.
    assert [e.salt for e in first] == ["", "", "tenant", "", ""]


def test_the_end_of_a_prompt_inside_a_coarse_block_gets_a_second_name() -> None:
    pool = Pool(V4, 4000)
    _, holding = start(pool, ids(1000))
    pool.take_events()
    for position in range(1000, 1024):
        holding.append(position)
        assert pool.grow(holding, position, position + 1)
    alias = [e for e in pool.take_events() if isinstance(e, BlockStored) and e.group == 2][1]
    assert (alias.hashes, alias.block_tokens) == ((holding.key(996),), 4)
    assert alias.tokens == ids(1000)[992 * 4 : 996 * 4]
    pool.release(holding)


def test_eviction_takes_the_oldest_and_the_ends_of_sequences_first() -> None:
    pool = Pool(GQA, 10)
    play(pool, ids(129))
    play(pool, ids(129, seed=1))
    play(pool, ids(129))  # touched again: seed 1 is the oldest now
    pool.take_events()
    old = pool.open(ids(129, seed=1))
    play(pool, ids(192, seed=2))
    removed = [e.hashes[0] for e in pool.take_events() if isinstance(e, BlockRemoved)]
    assert removed == [old.key(p) for p in (128, 96, 64, 32)]
    assert play(pool, ids(129)) == 128


def test_a_block_computed_twice_is_stored_twice_and_its_first_removal_leaves_the_other() -> None:
    """As in vLLM: a prompt that ends on the grid is never hit whole, so a repeat makes a twin."""
    pool = Pool(GQA, 6)
    play(pool, ids(128))
    play(pool, ids(128))
    twin = pool.open(ids(128)).key(128)
    events = pool.take_events()
    assert sum(twin in e.hashes for e in events if isinstance(e, BlockStored)) == 2
    play(pool, ids(64, seed=1))
    assert BlockRemoved((twin,), group=0) in pool.take_events()
    assert play(pool, ids(130)) == 128


def test_blocks_in_use_are_never_evicted() -> None:
    pool = Pool(GQA, 6)
    _, held = start(pool, ids(128))
    other = pool.open(ids(128, seed=1))
    assert not pool.admit(other, pool.lookup(other), 128)
    assert pool.free == 2
    pool.release(held)
    assert pool.admit(other, pool.lookup(other), 128)


def test_windowed_blocks_are_given_back_while_the_request_runs() -> None:
    pool = Pool(V4, 4000)
    _, holding = start(pool, ids(2000))
    high = pool.free
    holding.append(1)
    assert pool.grow(holding, 2000, 2001)
    # Left: 8 chain blocks, and of each windowed group what covers the last window and a token.
    in_use = pool.capacity - pool.free
    assert pool.free > high
    assert in_use == 8 + 2 * 3 + 3 + 17
    pool.release(holding)
    assert pool.free == pool.capacity


def test_a_request_that_fits_only_in_parts_is_not_let_in() -> None:
    pool = Pool(GQA, 6)
    holding = pool.open(ids(32 * 7))
    assert not pool.admit(holding, pool.lookup(holding), 32)
    assert pool.free == 6


def test_blocks_that_a_hit_takes_out_of_the_free_ones_are_counted() -> None:
    pool = Pool(GQA, 8)
    play(pool, ids(129)[:512])
    start(pool, ids(60, seed=1))
    assert (pool.free, pool.cached) == (6, 5)
    request = pool.open(ids(129)[:512] + ids(32 * 3, seed=2))
    hit = pool.lookup(request)
    assert hit.tokens == 128
    assert not pool.admit(request, hit, 160)  # 3 to allocate and 4 of the 6 free ones to keep
    assert pool.free == 6


def test_clear_is_refused_while_blocks_are_in_use() -> None:
    pool = Pool(GQA, 20)
    _, holding = start(pool, ids(128))
    assert not pool.clear()
    pool.release(holding)
    pool.take_events()
    assert pool.clear()
    assert pool.take_events() == (AllBlocksCleared(),)
    assert (pool.cached, pool.free) == (0, 20)
    assert play(pool, ids(128)) == 0


def test_an_optional_group_never_holds_a_hit_back() -> None:
    shape = layout(
        32,
        Group("kv", "full_attention", 32),
        Group("draft", "sliding_window", 32, 64, required=False),
    )
    pool = Pool(shape, 40)
    play(pool, ids(400))
    assert play(pool, ids(400)[: 200 * 4] + ids(100, seed=3)) == 192


def test_a_pool_is_sized_by_the_largest_group() -> None:
    parts = tuple(
        Component(name, Rule.CHAIN, 1, 256, size, 1.0, group=group)
        for name, group, size in (("a", "one", 600), ("b", "one", 402), ("c", "two", 1600))
    )
    shape = layout(
        256, Group("one", "x", 256), Group("two", "y", 64, 128, copies=2), components=parts
    )
    assert pool_blocks(shape, 100_200) == 100
    with pytest.raises(ConfigError, match="state the block count"):
        pool_blocks(GQA, 1000)


@pytest.mark.parametrize(
    ("shape", "blocks", "retention", "complaint"),
    [
        (GQA, 0, 0, "at least 1 block"),
        (GQA, 9, 33, "multiple of the grid"),
        (GQA, 9, -32, "multiple of the grid"),
        (layout(32, Group("kv", "x", 24)), 9, 0, "do not divide"),
    ],
)
def test_parameters_that_cannot_work_are_refused(
    shape: Layout, blocks: int, retention: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Pool(shape, blocks, retention=retention)
