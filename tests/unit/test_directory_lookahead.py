"""What a draft head and twin blocks do to the directory's promises, and where positions lie."""

from __future__ import annotations

import array
from collections.abc import Sequence

import pytest

from kvatlas.core.directory import Directory
from kvatlas.core.events import BlockRemoved, BlockStored, Event
from kvatlas.core.keys import Keyring
from kvatlas.core.lanes import lanes_of
from kvatlas.core.layout import Group, Layout, drafted, plain
from kvatlas.core.records import Publisher, Tier
from kvatlas.workload.models import load_layout

RING = Keyring(b"a secret for the tests")
FP = b"\1" * 32
W1 = Publisher("w1")
SWA = "sliding_window_mla"

# As vLLM lays V4 out, at a sixteenth of the sizes: grid 16, window of two blocks of 4.
V4 = Layout(
    model="v4",
    engine="vllm",
    kv_dtype="",
    grid_tokens=16,
    components=(),
    groups=(
        Group("swa", SWA, 4, 8, copies=2, lookahead=1),
        Group("kv", "mla_attention", 16),
        Group("c4_state", SWA, 2, 4),
    ),
)


def ids(numbers: Sequence[int]) -> bytes:
    return array.array("I", numbers).tobytes()


def name(tokens: Sequence[int], end: int) -> int:
    """An engine hash of the prefix that ends at ``end``."""
    return hash(tuple(tokens[:end])) & 0xFFFF_FFFF_FFFF_FFFF


class Engine:
    """Announces one prompt at a time, group by group, as vLLM does in one step."""

    def __init__(self, layout: Layout = V4) -> None:
        self.directory = Directory(RING)
        self.directory.register(W1, layout, FP)
        self.grid = layout.grid_tokens
        self.layout = layout

    def window(
        self, tokens: Sequence[int], ends: Sequence[int], group: int, block: int, start: int = 0
    ) -> BlockStored:
        """Kept blocks of a windowed group that end at ``ends``."""
        return BlockStored(
            tuple(name(tokens, end) for end in ends),
            name(tokens, start) if start else None,
            b"",
            block,
            group=group,
            kind=SWA,
            window_tokens=2 * block,
            range_tokens=(len(tokens) - start) // block * block,
        )

    def chain(self, tokens: Sequence[int], start: int = 0) -> BlockStored:
        end = len(tokens) // self.grid * self.grid
        return BlockStored(
            tuple(name(tokens, e) for e in range(start + self.grid, end + 1, self.grid)),
            name(tokens, start) if start else None,
            ids(tokens[start:end]),
            self.grid,
            group=2 if self.layout is V4 else None,
            kind="mla_attention" if self.layout is V4 else None,
        )

    def prompt(self, tokens: Sequence[int], at: int, *, ahead: bool = True) -> list[Event]:
        """All groups of a prompt whose windows are kept at ``at``."""
        ends = [at - 4, at, at + 4] if ahead else [at - 4, at]
        return [
            self.window(tokens, ends, 0, 4),
            self.window(tokens, ends, 1, 4),
            self.chain(tokens),
            self.window(tokens, [at - 2, at], 3, 2),
        ]

    def apply(self, *events: Event) -> None:
        applied = self.directory.apply(W1, events)
        assert (applied.undeclared, applied.malformed, applied.orphans, applied.refused) == (0,) * 4

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        usable = self.layout.asked_blocks(len(tokens)) * self.grid
        return RING.chain(RING.root(FP), ids(tokens[:usable]), self.grid)

    def resume(self, tokens: Sequence[int]) -> int:
        found = self.directory.peek(self.keys(tokens), FP)
        where = self.directory.positions(W1, self.keys(tokens))
        assert where is not None
        promised = found[0].tokens if found else 0
        assert where.deepest() == promised
        return promised


A = list(range(62))


def test_lanes_of_a_draft() -> None:
    flash = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8", draft=True)
    lanes = [(lane.group.name, lane.span, lane.units, lane.ahead) for lane in lanes_of(flash)]
    assert lanes == [
        ("swa", 1, 3, 1),
        ("swa", 1, 3, 1),
        ("global", None, 1, 0),
        ("c4_state", 1, 2, 0),
        ("c128_state", 1, 16, 0),
    ]
    wide = Layout("", "vllm", "", 16, (), (Group("s", "*", 16, 128, lookahead=1),))
    assert [(lane.span, lane.units, lane.ahead) for lane in lanes_of(wide)] == [(9, 1, 1)]
    assert flash.asked_blocks(1024) == 4  # the last block must be found, and is computed again
    assert load_layout("deepseek-v4-flash", engine="vllm").asked_blocks(1024) == 3


def test_a_window_counts_with_the_block_beyond_it() -> None:
    engine = Engine()
    engine.apply(*engine.prompt(A, 32))
    assert engine.resume(A) == 32
    assert engine.resume(A[:48]) == 32  # its last block is found, and it resumes before it
    assert engine.resume(A[:47]) == 0  # vLLM would find the block that ends at 36; no key shows it
    without = Engine()
    without.apply(*without.prompt(A, 32, ahead=False))
    assert without.resume(A) == 0
    assert without.directory.missing(W1, without.keys(A), 32) == "swa"


@pytest.mark.parametrize(("group", "end"), [(0, 28), (1, 32), (0, 36), (1, 36), (3, 30)])
def test_any_part_of_it_can_go(group: int, end: int) -> None:
    engine = Engine()
    engine.apply(*engine.prompt(A, 32))
    engine.apply(BlockRemoved((name(A, end),), Tier.HBM, group))
    assert engine.resume(A) == 0


def test_a_prompt_that_leaves_inside_the_look_ahead_is_promised_nothing() -> None:
    """vLLM matches the block beyond 32 by its tokens: those of A are not those of B."""
    b = A[:34] + [900 + i for i in range(28)]
    engine = Engine()
    engine.apply(*engine.prompt(A, 32))
    engine.apply(engine.chain(b, 32))  # the chain of B is held too, and none of its windows
    assert engine.resume(A) == 32
    assert engine.resume(b) == 0


def test_windows_of_one_request_are_not_taken_for_anothers() -> None:
    """A ends inside the block after 32 and has no chain block there; B's comes next."""
    b = A[:34] + [900 + i for i in range(28)]
    engine = Engine()
    engine.apply(*engine.prompt(A[:40], 32))
    assert engine.resume(A[:40]) == 0
    engine.apply(
        engine.window(b, [], 0, 4, 32), engine.window(b, [], 1, 4, 32), engine.chain(b, 32)
    )
    assert engine.resume(b) == 0


def test_a_draft_that_is_not_described_costs_every_group_a_block() -> None:
    engine = Engine(drafted(plain(16, engine="vllm")))
    engine.apply(engine.chain(A))
    assert engine.resume(A) == 32
    assert engine.resume(A[:48]) == 32
    assert engine.resume(A[:20]) == 0
    where = engine.directory.positions(W1, engine.keys(A))
    assert where is not None
    assert (where.hbm, where.chain_tokens) == ((16, 32), 48)


# Twins: vLLM stores a block again that it holds, and later removes both


def test_one_of_two_equal_blocks_may_go() -> None:
    engine = Engine(plain(16, engine="vllm"))
    engine.apply(engine.chain(A[:32]), engine.chain(A, 32), engine.chain(A, 32))
    removed = BlockRemoved((name(A, 48),))
    engine.apply(removed)
    assert engine.resume(A) == 48
    engine.apply(removed)
    assert engine.resume(A) == 32
    engine.apply(removed)
    assert engine.resume(A) == 32


def test_what_is_reported_again_from_the_start_is_no_second_block() -> None:
    """kv_cache_report_mode=full repeats a hit from position 0, without any new block."""
    engine = Engine(plain(16, engine="vllm"))
    for _ in range(3):
        engine.apply(engine.chain(A))
    engine.apply(BlockRemoved((name(A, 48),)))
    assert engine.resume(A) == 32


@pytest.mark.parametrize(("group", "end"), [(0, 28), (1, 36), (2, 16), (3, 32)])
def test_a_prompt_computed_twice_is_held_twice_in_every_group(group: int, end: int) -> None:
    """Nothing of it could be resumed, so all of it was stored again, from position 0."""
    engine = Engine()
    for _ in range(2):
        engine.apply(*engine.prompt(A, 32))
    removed = BlockRemoved((name(A, end),), Tier.HBM, group)
    engine.apply(removed)
    assert engine.resume(A) == 32
    engine.apply(removed)
    assert engine.resume(A) == 0


@pytest.mark.parametrize(("group", "end"), [(0, 28), (1, 36), (2, 16), (3, 32)])
def test_a_hit_that_is_reported_in_full_is_held_once(group: int, end: int) -> None:
    engine = Engine()
    engine.apply(*engine.prompt(A, 32))
    whole, hit = list(range(4, 33, 4)), A[:32]
    for _ in range(2):
        engine.apply(
            engine.window(hit, whole, 0, 4),
            engine.window(hit, whole, 1, 4),
            engine.chain(hit),
            engine.window(hit, list(range(2, 33, 2)), 3, 2),
        )
    assert engine.resume(A) == 32
    engine.apply(BlockRemoved((name(A, end),), Tier.HBM, group))
    assert engine.resume(A) == 0


def test_only_vllm_keeps_twins() -> None:
    engine = Engine(plain(16, engine="sglang"))
    engine.apply(engine.chain(A[:32]), engine.chain(A, 32), engine.chain(A, 32))
    engine.apply(BlockRemoved((name(A, 48),)))
    assert engine.resume(A) == 32


def test_a_new_life_has_no_twins() -> None:
    engine = Engine(plain(16, engine="vllm"))
    engine.apply(engine.chain(A[:32]), engine.chain(A, 32), engine.chain(A, 32))
    engine.directory.reset(W1)
    engine.apply(engine.chain(A[:32]), engine.chain(A, 32))
    engine.apply(BlockRemoved((name(A, 48),)))
    assert engine.resume(A) == 32


# Where a prompt can be resumed


def test_positions_and_what_is_missing() -> None:
    plain_v4 = Layout("v4", "vllm", "", 16, (), (Group("swa", SWA, 4, 8, copies=2), *V4.groups[1:]))
    engine = Engine(plain_v4)
    for end in (16, 48):
        for group, block in ((0, 4), (1, 4), (3, 2)):
            window = engine.window(A, [end - block, end], group, block)
            engine.apply(window)
    engine.apply(
        BlockStored((name(A, 30), name(A, 32)), None, b"", 2, Tier.HBM, 3, SWA, 4, range_tokens=60)
    )
    chain = engine.chain(A)
    engine.apply(BlockStored(chain.hashes, None, chain.tokens, 16, group=2, kind="mla_attention"))
    where = engine.directory.positions(W1, engine.keys(A))
    assert where is not None
    assert (where.hbm, where.lower, where.chain_tokens) == ((16, 48), (), 48)
    assert where.missing == ()
    engine.apply(BlockRemoved((name(A, 44),), Tier.HBM, 1))
    where = engine.directory.positions(W1, engine.keys(A))
    assert where is not None
    assert (where.hbm, where.deepest()) == ((16,), 16)
    assert where.missing == ((32, ("swa",)), (48, ("swa",)))
    assert engine.directory.positions(Publisher("w9"), []) is None


def test_positions_that_lower_tiers_add() -> None:
    engine = Engine(plain(16, engine="vllm"))
    engine.apply(engine.chain(A[:16]))
    chain = engine.chain(A)
    engine.apply(BlockStored(chain.hashes, None, chain.tokens, 16, Tier.DRAM))
    where = engine.directory.positions(W1, engine.keys(A))
    assert where is not None
    assert (where.hbm, where.lower) == ((16,), (32, 48))
    assert (where.chain_tokens, where.lower_chain_tokens) == (16, 48)
