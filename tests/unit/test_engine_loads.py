"""Loads from outside the pool, hand-offs and holds: what happens when. The model tests say that
nothing is lost or wrong on the way."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from kvatlas.core.events import BlockStored
from kvatlas.core.layout import Component, Group, Layout, Rule
from kvatlas.workload.engine import Engine
from kvatlas.workload.prompt_keys import PromptKeys
from kvatlas.workload.protocol import (
    Abort,
    Admitted,
    Arrive,
    BlockRef,
    ClearCache,
    Cleared,
    Computed,
    Effect,
    HandedOff,
    HandOff,
    Held,
    Hold,
    Loaded,
    Loading,
    Produced,
    Published,
    Rejected,
    Release,
)
from kvatlas.workload.spec import EngineSpec

GQA = Layout("m", "vllm", "", 32, (), (Group("kv", "full_attention", 32),))
SWA = Layout(
    "m",
    "vllm",
    "",
    32,
    (Component("swa", Rule.WINDOW, 1, 16, 64, 4.0, 64, "swa", least_blocks=1),),
    (Group("kv", "full_attention", 32), Group("swa", "sliding_window", 16, 64)),
)


class Offer:
    """Offers the same position for everything and notes what it was asked."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked: list[tuple[str, int]] = []

    def external(self, request: Arrive, local_tokens: int) -> int:
        self.asked.append((request.id, local_tokens))
        return self.tokens


def engine(layout: Layout = GQA, offer: int = 0, **changes: Any) -> tuple[Engine, Offer]:
    fields: dict[str, Any] = {"blocks": 100, "step_tokens": 256}
    fields |= {"prefill_tokens_per_s": 1000.0, "decode_step_s": 0.01, "step_overhead_s": 0.0}
    connector = Offer(offer)
    return Engine(layout, EngineSpec(**{**fields, **changes}), connector=connector), connector


def ids(count: int, seed: int = 0) -> bytes:
    return struct.pack(f"<{count}I", *((i * 7919 + seed * 31) % 30000 for i in range(count)))


def drain(engine: Engine) -> list[Effect]:
    effects: list[Effect] = []
    while (due := engine.next_deadline()) is not None:
        effects += engine.tick(due)
    return effects


def one(effects: list[Effect], kind: type) -> Any:
    (found,) = (e for e in effects if isinstance(e, kind))
    return found


def test_a_load_waits_apart_and_others_overtake_it() -> None:
    made, offer = engine(offer=64)
    made.handle(Arrive("a", ids(100), 1), 0.0)
    offer.tokens = 64
    loading = one(list(made.tick(0.0)), Loading)
    assert (loading.id, loading.start, loading.end) == ("a", 0, 64)
    assert [(ref.group, ref.index) for ref in loading.blocks] == [(0, 0), (0, 1)]
    assert (made.running, made.waiting, made.next_deadline()) == (0, 1, None)
    assert made.cached_blocks == 0
    offer.tokens = 0
    made.handle(Arrive("b", ids(100, seed=1), 1), 1.0)
    assert [e.id for e in drain(made) if isinstance(e, Produced)] == ["b"]
    made.handle(Loaded("a", 64), 5.0)
    effects = drain(made)
    admitted = one(effects, Admitted)
    assert (admitted.cached_tokens, admitted.loaded_tokens) == (64, 64)
    assert [r.block_id for r in admitted.resumed] == [r.block_id for r in loading.blocks]
    assert (one(effects, Computed).start, one(effects, Computed).end) == (64, 100)
    assert made.free_share == 1.0
    assert offer.asked == [("a", 0), ("b", 0)]


def test_what_was_loaded_is_announced_when_it_is_there() -> None:
    made, _ = engine(offer=64)
    made.handle(Arrive("a", ids(70), 1), 0.0)
    assert not [e for e in made.tick(0.0) if isinstance(e, Published)]
    made.handle(Loaded("a", 64), 1.0)
    stored = [e for e in one(drain(made), Published).events if isinstance(e, BlockStored)]
    assert [(len(e.hashes), len(e.tokens) // 4) for e in stored] == [(2, 64)]


def test_a_load_goes_on_from_the_local_hit_and_is_cut_to_the_grid() -> None:
    made, offer = engine()
    made.handle(Arrive("a", ids(70), 1), 0.0)
    drain(made)
    offer.tokens = 140
    made.handle(Arrive("b", ids(200), 1), 1.0)
    loading = one(list(made.tick(1.0)), Loading)
    assert (loading.start, loading.end) == (64, 128)
    assert [ref.index for ref in loading.blocks] == [2, 3]
    made.handle(Loaded("b", 128), 2.0)
    admitted = one(drain(made), Admitted)
    assert (admitted.cached_tokens, admitted.loaded_tokens) == (128, 64)


@pytest.mark.parametrize("offered", [-5, 0, 31, 64])
def test_an_offer_that_is_no_more_than_the_local_hit_is_none(offered: int) -> None:
    made, offer = engine()
    made.handle(Arrive("a", ids(70), 1), 0.0)
    drain(made)
    offer.tokens = offered
    made.handle(Arrive("b", ids(70), 1), 1.0)
    assert one(drain(made), Admitted).loaded_tokens == 0


@pytest.mark.parametrize(("arrived", "resumed"), [(70, 64), (128, 128), (1000, 128), (-1, 0)])
def test_a_chain_counts_up_to_where_its_load_came(arrived: int, resumed: int) -> None:
    made, offer = engine(offer=128)
    made.handle(Arrive("a", ids(200), 1), 0.0)
    made.tick(0.0)
    made.handle(Loaded("a", arrived), 1.0)
    admitted = one(drain(made), Admitted)
    assert (admitted.cached_tokens, admitted.loaded_tokens) == (resumed, resumed)
    assert len(offer.asked) == 1, "what failed is computed, not offered again"


def test_windows_that_came_in_part_are_worth_nothing() -> None:
    made, _ = engine(SWA, offer=128)
    made.handle(Arrive("a", ids(200), 1), 0.0)
    loading = one(list(made.tick(0.0)), Loading)
    assert [(r.group, r.index) for r in loading.blocks] == [
        *((0, i) for i in range(4)),
        *((1, i) for i in range(4, 8)),
    ]
    made.handle(Loaded("a", 127), 1.0)
    effects = drain(made)
    assert one(effects, Admitted).cached_tokens == 0
    assert one(effects, Computed).start == 0
    assert made.free_share == 1.0


def test_a_minimal_load_fills_less_and_what_it_lacks_is_not_found() -> None:
    made, offer = engine(SWA, offer=128, minimal_loads=True)
    made.handle(Arrive("a", ids(129), 1), 0.0)
    loading = one(list(made.tick(0.0)), Loading)
    assert [r.index for r in loading.blocks if r.group == 1] == [7]
    made.handle(Loaded("a", 128), 1.0)
    assert one(drain(made), Admitted).cached_tokens == 128
    offer.tokens = 0
    made.handle(Arrive("b", ids(129), 1), 2.0)
    assert one(drain(made), Admitted).cached_tokens == 0


def test_blocks_stay_until_the_transfer_is_over_though_the_client_left() -> None:
    made, _ = engine(offer=64)
    made.handle(Arrive("a", ids(100), 1), 0.0)
    made.tick(0.0)
    made.handle(Abort("a"), 1.0)
    made.handle(Abort("a"), 1.0)
    assert (made.waiting, made.free_share) == (0, 0.98)
    assert made.handle(ClearCache(), 1.0) == (Cleared(False),)
    (refused,) = made.handle(Arrive("a", ids(100), 1), 1.0)
    assert isinstance(refused, Rejected)
    made.handle(Loaded("a", 64), 2.0)
    assert (made.free_share, made.cached_blocks) == (1.0, 0)
    assert made.handle(Arrive("a", ids(100), 1), 3.0) == ()


def test_answers_that_nobody_waits_for_change_nothing() -> None:
    made, _ = engine(offer=64)
    made.handle(Arrive("a", ids(100), 5), 0.0)
    before = made.digest()
    ghosts = (BlockRef(0, 0, -1, 5), BlockRef(0, 0, 10**9, 5), BlockRef(0, 0, 3, 5))
    for event in (Loaded("a", 64), Loaded("x", 1), HandedOff("a"), HandedOff("x")):
        assert made.handle(event, 0.0) == ()
    assert made.handle(Hold(ghosts), 0.0) == (Held(()),)
    assert made.handle(Release(ghosts), 0.0) == ()
    assert made.digest() == before


def test_a_load_leaves_room_for_those_who_have_begun() -> None:
    """Else both would hold blocks, and the first could not go on before the second."""
    made, offer = engine(offer=64, blocks=12)
    made.handle(Arrive("a", ids(32 * 8), 1), 0.0)
    made.tick(0.0)  # holds two of its eight blocks
    offer.tokens = 32 * 5
    made.handle(Arrive("b", ids(32 * 6, seed=1), 1), 1.0)
    assert made.tick(1.0) == ()
    assert (made.waiting, made.next_deadline()) == (2, None)
    made.handle(Loaded("a", 64), 2.0)
    assert [e.id for e in drain(made) if isinstance(e, Produced)] == ["a"]
    made.handle(Loaded("b", 32 * 5), 3.0)
    assert [e.id for e in drain(made) if isinstance(e, Produced)] == ["b"]


def test_a_hand_off_keeps_the_prompt_on_one_side_and_fills_it_on_the_other() -> None:
    giving, _ = engine()
    taking, _ = engine(offer=1 << 40)
    giving.handle(Arrive("a", ids(100), 1, hand_off=True), 0.0)
    effects = drain(giving)
    assert one(effects, Produced).finished
    handed = one(effects, HandOff)
    assert (handed.tokens, [r.index for r in handed.blocks]) == (100, [0, 1, 2])
    assert all(ref.key for ref in handed.blocks)
    assert giving.free_share == 0.96
    taking.handle(Arrive("a", ids(100), 9), 1.0)
    loading = one(list(taking.tick(1.0)), Loading)
    assert (loading.start, loading.end, len(loading.blocks)) == (0, 100, 4)
    giving.handle(HandedOff("a"), 2.0)
    assert giving.free_share == 1.0
    taking.handle(Loaded("a", 100), 2.0)
    effects = drain(taking)
    admitted = one(effects, Admitted)
    assert (admitted.cached_tokens, admitted.loaded_tokens) == (99, 99)
    computed = [e for e in effects if isinstance(e, Computed)]
    assert (computed[0].start, computed[-1].end) == (99, 108)
    assert taking.cached_blocks == 3


@pytest.mark.parametrize(("missing", "hit"), [(False, 96), (True, 0)])
def test_a_window_that_did_not_come_whole_is_no_place_to_resume(missing: bool, hit: int) -> None:
    made, offer = engine(SWA, offer=100)
    made.handle(Arrive("a", ids(100), 1), 0.0)
    loading = one(list(made.tick(0.0)), Loading)
    windows = [ref for ref in loading.blocks if ref.group == 1]
    assert [ref.index for ref in windows] == [2, 3, 4, 5, 6]
    made.handle(Loaded("a", 100, tuple(windows[:1] if missing else ())), 1.0)
    assert one(drain(made), Admitted).loaded_tokens == 99
    offer.tokens = 0
    made.handle(Arrive("b", ids(100) + ids(9, seed=1), 1), 2.0)
    assert one(drain(made), Admitted).cached_tokens == hit


def test_a_hand_off_that_nobody_fetches_ends_with_its_lease() -> None:
    made, _ = engine(blocks=4)
    made.handle(Arrive("a", ids(100), 1, hand_off=True), 0.0)
    drain(made)
    made.handle(Arrive("b", ids(100, seed=1), 1), 1.0)
    assert drain(made) == []
    assert (made.waiting, made.next_deadline()) == (1, None)
    made.handle(Abort("a"), 2.0)
    assert one(drain(made), Produced).id == "b"


def test_held_blocks_are_not_evicted_and_there_is_a_limit() -> None:
    made, _ = engine(blocks=8, max_held=3)
    made.handle(Arrive("a", ids(128), 1), 0.0)
    filled = one(drain(made), Computed).filled
    assert len(filled) == 4
    assert made.handle(Hold(filled), 1.0) == (Held(filled[:3]),)
    made.handle(Arrive("b", ids(160, seed=1), 1), 2.0)
    made.handle(Arrive("c", ids(160, seed=2), 1), 2.0)
    drain(made)
    made.handle(Arrive("d", ids(97), 1), 3.0)
    assert one(drain(made), Admitted).cached_tokens == 96
    made.handle(Release(filled), 4.0)  # the fourth was never held
    assert (made.held, made.free_share) == (0, 1.0)
    made.handle(Release(filled), 4.0)
    assert made.held == 0


def test_a_block_that_is_another_one_by_now_is_not_held() -> None:
    made, _ = engine(blocks=4)
    made.handle(Arrive("a", ids(96), 1), 0.0)
    filled = one(drain(made), Computed).filled
    made.handle(Arrive("b", ids(127, seed=1), 1), 1.0)
    drain(made)
    (held,) = made.handle(Hold(filled), 2.0)
    assert isinstance(held, Held)
    assert held.blocks == ()


def test_keys_that_came_with_a_prompt_must_be_its_own() -> None:
    made, _ = engine()
    own, other = PromptKeys(ids(70), 32), PromptKeys(ids(70, seed=1), 32)
    assert made.handle(Arrive("a", ids(70), 1, keys=own), 0.0) == ()
    for wrong in (other, PromptKeys(ids(70), 16), PromptKeys(ids(70), 32, salt="x")):
        (refused,) = made.handle(Arrive("b", ids(70), 1, keys=wrong), 0.0)
        assert isinstance(refused, Rejected)
        assert "not those of this prompt" in refused.reason
    drain(made)
    made.handle(Arrive("c", ids(70), 1), 1.0)
    assert one(drain(made), Admitted).cached_tokens == 64


def test_engines_that_keep_different_windows_share_the_keys_of_a_prompt() -> None:
    prompt, other = ids(200), ids(100) + ids(60, seed=1)
    keys, other_keys = PromptKeys(prompt, 32), PromptKeys(other, 32)
    hits = []
    for retention in (0, 64, None):
        made, _ = engine(SWA, retention_tokens=retention)
        made.handle(Arrive("a", prompt, 1, keys=keys), 0.0)
        drain(made)
        made.handle(Arrive("b", other, 1, keys=other_keys), 1.0)
        hits.append(one(drain(made), Admitted).cached_tokens)
    assert hits == [0, 96, 96]
