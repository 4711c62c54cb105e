"""The directory: claims from engine events to resume positions."""

from __future__ import annotations

import array

import pytest

from kvatlas.core.directory import Directory, Limits
from kvatlas.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvatlas.core.keys import Keyring, Scope, salt_scope
from kvatlas.core.layout import Group, Layout, plain
from kvatlas.core.records import Publisher, Resume, Tier
from kvatlas.errors import LayoutError

RING = Keyring(b"a secret for the tests")
FP = b"\1" * 32
W1, W2, W3 = Publisher("w1"), Publisher("w2"), Publisher("w3")
BLOCK = 4


def ids(*numbers: int) -> bytes:
    return array.array("I", numbers).tobytes()


def span(*letters: str) -> bytes:
    """Tokens of named blocks: each letter stands for BLOCK ids."""
    return b"".join(ids(*range(ord(c) * 100, ord(c) * 100 + BLOCK)) for c in letters)


def keys_of(*letters: str, scope: Scope | None = None) -> list[bytes]:
    return RING.chain(RING.root(FP, scope or Scope()), span(*letters), BLOCK)


def stored(*letters: str, parent: int | None = None, tier: Tier = Tier.HBM) -> BlockStored:
    return BlockStored(tuple(map(ord, letters)), parent, span(*letters), BLOCK, tier)


def ask(directory: Directory, *letters: str) -> dict[str, int]:
    return {str(r.publisher): r.tokens // BLOCK for r in directory.peek(keys_of(*letters), FP)}


@pytest.fixture
def directory() -> Directory:
    made = Directory(RING)
    for publisher in (W1, W2):
        made.register(publisher, plain(BLOCK), FP)
    return made


def test_a_chain_is_found_up_to_its_first_hole(directory: Directory) -> None:
    directory.apply(W1, [stored("A", "B"), stored("C", parent=ord("B"))])
    directory.apply(W2, [stored("A")])
    assert ask(directory, "A", "B", "C", "D") == {"w1": 3, "w2": 1}
    directory.apply(W1, [BlockRemoved((ord("B"),))])
    assert ask(directory, "A", "B", "C") == {"w1": 1, "w2": 1}


def test_a_removal_touches_only_its_sender(directory: Directory) -> None:
    """aibrix#2723, on the directory itself."""
    for publisher in (W1, W2):
        directory.apply(publisher, [stored("A", "B")])
    directory.apply(W1, [BlockRemoved((ord("B"),))])
    assert ask(directory, "A", "B") == {"w1": 1, "w2": 2}
    for publisher in (W1, W2, W3):
        directory.apply(publisher, [BlockRemoved((ord("B"),))] if publisher is not W2 else [])
        directory.apply(publisher, [BlockRemoved((999,))])
    assert directory.holders == 3
    assert ask(directory, "A", "B") == {"w1": 1, "w2": 2}


def test_an_orphan_never_becomes_a_root(directory: Directory) -> None:
    applied = directory.apply(W1, [stored("C", parent=ord("B")), stored("D", parent=ord("C"))])
    assert applied.orphans == 2
    assert ask(directory, "C") == {}
    directory.apply(W1, [stored("A", "B"), stored("C", parent=ord("B")), stored("D", parent=67)])
    assert ask(directory, "A", "B", "C", "D") == {"w1": 4}


def test_lower_tiers_carry_the_chain_on(directory: Directory) -> None:
    """sglang#39108, on the directory itself."""
    directory.apply(W1, [stored("A", "B"), stored("A", "B", tier=Tier.DRAM)])
    directory.apply(W1, [BlockRemoved((65, 66), Tier.HBM)])
    [resume] = directory.peek(keys_of("A", "B"), FP)
    assert resume == Resume(W1, 8, 8, (0, 8, 0, 0, 0))
    directory.apply(W1, [BlockRemoved((66,), Tier.DRAM)])
    assert ask(directory, "A", "B") == {"w1": 1}


def test_a_location_only_store_may_come_first(directory: Directory) -> None:
    directory.apply(W1, [BlockStored((65, 66), None, b"", BLOCK, Tier.DRAM)])
    assert ask(directory, "A", "B") == {}
    directory.apply(W1, [stored("A", "B"), BlockRemoved((65, 66), Tier.HBM)])
    assert ask(directory, "A", "B") == {"w1": 2}


def test_hbm_blocks_behind_a_lower_tier_do_not_count(directory: Directory) -> None:
    """The connector continues from the local hit: hbm cannot go on after it."""
    directory.apply(W1, [stored("A", "B", "C"), stored("A", tier=Tier.DRAM)])
    directory.apply(W1, [BlockRemoved((65,), Tier.HBM)])
    assert ask(directory, "A", "B", "C") == {"w1": 1}


def test_the_object_tier_is_shared_by_those_who_use_it(directory: Directory) -> None:
    directory.apply(W1, [stored("A", "B", tier=Tier.OBJECT)])
    assert ask(directory, "A", "B") == {"w1": 2}
    directory.apply(W2, [stored("Z", tier=Tier.OBJECT)])
    assert ask(directory, "A", "B") == {"w1": 2, "w2": 2}


def test_clear_and_reset_touch_one_publisher(directory: Directory) -> None:
    for publisher in (W1, W2):
        directory.apply(publisher, [stored("A", "B"), stored("A", tier=Tier.DRAM)])
    directory.apply(W1, [AllBlocksCleared()])
    assert ask(directory, "A", "B") == {"w2": 2}
    assert directory.holders == 3
    directory.apply(W1, [stored("A")])
    assert ask(directory, "A", "B") == {"w1": 1, "w2": 2}
    directory.reset(W2)
    directory.unregister(W1)
    assert ask(directory, "A", "B") == {}
    assert directory.holders == 0


def test_history_is_not_believed_before_it_has_caught_up(directory: Directory) -> None:
    directory.believe(W1, False)
    directory.apply(W1, [stored("A", "B")])
    directory.apply(W1, [AllBlocksCleared(), stored("A")])
    assert ask(directory, "A", "B") == {}
    directory.believe(W1, True)
    assert ask(directory, "A", "B") == {"w1": 1}
    directory.believe(W3, True)  # not registered: nothing happens


def test_scopes_and_adapters_do_not_meet(directory: Directory) -> None:
    salted = BlockStored((1,), None, span("A"), BLOCK, salt="x")
    adapted = BlockStored((2,), None, span("A"), BLOCK, adapter="lora")
    pictured = BlockStored((3,), None, span("A"), BLOCK, extras=(b"image",))
    directory.apply(W1, [salted, adapted, pictured])
    assert directory.holders == 3
    assert ask(directory, "A") == {}
    assert directory.peek(keys_of("A", scope=salt_scope("y")), FP) == []
    assert len(directory.peek(keys_of("A", scope=salt_scope("x")), FP)) == 1
    assert directory.peek(keys_of("A"), b"\2" * 32) == []


def test_limits_refuse_and_are_counted() -> None:
    directory = Directory(RING, Limits(holders_max=3))
    directory.register(W1, plain(BLOCK), FP)
    applied = directory.apply(W1, [stored("A", "B", "C", "D")])
    assert (applied.stored, applied.refused, directory.holders) == (3, 1, 3)
    applied = directory.apply(W1, [stored("E", parent=ord("D"))])
    assert (applied.orphans, applied.refused) == (0, 1)
    directory.apply(W1, [BlockRemoved((ord("C"),)), stored("Z")])
    assert directory.holders == 3


def test_retired_bits_are_not_reused_before_they_are_swept(directory: Directory) -> None:
    many = tuple(range(1, 5001))
    tokens = ids(*range(5000 * BLOCK))
    directory.apply(W1, [BlockStored(many, None, tokens, BLOCK)])
    for _ in range(5):
        directory.reset(W1)
        assert directory.peek(RING.chain(RING.root(FP), tokens, BLOCK), FP) == []
        directory.apply(W1, [stored("A")])
        assert ask(directory, "A") == {"w1": 1}
    while directory.sweep(10_000):
        pass
    assert directory.holders == 1
    assert sum(len(book) for tiers in directory._books for book in tiers) == 1


# -- windowed groups: the shapes of DeepSeek V4 on vLLM, scaled down by 64 ------------------------

V4 = Layout(
    model="v4",
    engine="vllm",
    kv_dtype="",
    grid_tokens=16,
    components=(),
    groups=(
        Group("swa", "sliding_window_mla", 4, 8, copies=2),
        Group("kv", "mla_attention", 16),
        Group("c4_state", "sliding_window_mla", 2, 4),
    ),
)


def v4_events(tokens: int, *, skip: str = "", tail_of: int | None = None) -> list[Event]:
    """What vLLM announces for a prompt of ``tokens``: every chain block, window tails at the end.

    The hash of a block is the number of its last token, shared between groups as in vLLM.
    """
    end = tokens - tokens % 16 if tail_of is None else tail_of
    data = ids(*range(tokens))
    events: list[Event] = []
    for group in (0, 1):
        if skip != f"swa{group}":
            kept = (end - 4, end) if skip != "half" else (end,)
            events.append(
                BlockStored(
                    kept, None, data, 4, group=group, kind="sliding_window_mla", window_tokens=8
                )
            )
    chain = tuple(range(16, tokens + 1, 16))
    events.append(BlockStored(chain, None, data, 16, group=2, kind="mla_attention"))
    if skip != "c4":
        events.append(
            BlockStored(
                (end - 2, end), None, data, 2, group=3, kind="sliding_window_mla", window_tokens=4
            )
        )
    return events


def v4_ask(directory: Directory, tokens: int = 64) -> list[Resume]:
    return directory.peek(RING.chain(RING.root(FP), ids(*range(tokens)), 16), FP)


@pytest.fixture
def v4() -> Directory:
    made = Directory(RING)
    made.register(W1, V4, FP)
    return made


def test_a_window_makes_a_resume_point(v4: Directory) -> None:
    v4.apply(W1, v4_events(50))
    [resume] = v4_ask(v4)
    assert (resume.tokens, resume.chain_tokens) == (48, 48)
    # a prompt that leaves before the checkpoint matches the chain but cannot be resumed
    [resume] = v4_ask(v4, 40)
    assert (resume.tokens, resume.chain_tokens) == (0, 32)
    assert v4.missing(W1, RING.chain(RING.root(FP), ids(*range(40)), 16), 32) == "swa, c4_state"


@pytest.mark.parametrize("skip", ["swa0", "swa1", "half", "c4"])
def test_one_missing_part_means_no_resume(v4: Directory, skip: str) -> None:
    v4.apply(W1, v4_events(50, skip=skip))
    [resume] = v4_ask(v4)
    assert (resume.tokens, resume.chain_tokens) == (0, 48)


@pytest.mark.parametrize(("group", "unit"), [(0, 48), (1, 44), (2, 16), (3, 46), (3, 48)])
def test_evicting_any_part_moves_the_resume_point_back(
    v4: Directory, group: int, unit: int
) -> None:
    v4.apply(W1, v4_events(34, tail_of=32))
    extension = BlockStored((48,), 32, ids(*range(32, 48)), 16, group=2, kind="mla_attention")
    v4.apply(W1, [e for e in v4_events(50) if getattr(e, "group", 0) != 2])
    v4.apply(W1, [extension])
    assert v4_ask(v4)[0].tokens == 48
    v4.apply(W1, [BlockRemoved((unit,), Tier.HBM, group)])
    resume = v4_ask(v4)
    assert (resume[0].tokens if resume else 0) == (0 if group == 2 else 32)


def test_windows_that_grow_token_by_token(v4: Directory) -> None:
    """During decode each small block comes in an event of its own, before its anchor is named."""
    for block in (1, 2, 3, 4):
        end = block * 4
        for group in (0, 1):
            before = end - 4 or None
            v4.apply(
                W1,
                [
                    BlockStored(
                        (end,),
                        before,
                        ids(*range(end - 4, end)),
                        4,
                        group=group,
                        kind="sliding_window_mla",
                        window_tokens=8,
                    )
                ],
            )
    for end in range(2, 17, 2):
        v4.apply(
            W1,
            [
                BlockStored(
                    (end,),
                    end - 2 or None,
                    ids(end - 2, end - 1),
                    2,
                    group=3,
                    kind="sliding_window_mla",
                    window_tokens=4,
                )
            ],
        )
    v4.apply(W1, [BlockStored((16,), None, ids(*range(16)), 16, group=2, kind="mla_attention")])
    assert [r.tokens for r in v4_ask(v4)] == [16]


def test_a_hole_between_two_checkpoints_is_seen(v4: Directory) -> None:
    """[12, 16, 32]: 28 is missing, so 16 must not be taken for it."""
    events = [e for e in v4_events(34) if getattr(e, "group", 0) == 2]
    for group in (0, 1):
        events.append(
            BlockStored(
                (12, 16, 32),
                None,
                ids(*range(34)),
                4,
                group=group,
                kind="sliding_window_mla",
                window_tokens=8,
            )
        )
    events.append(
        BlockStored(
            (14, 16, 30, 32),
            None,
            ids(*range(34)),
            2,
            group=3,
            kind="sliding_window_mla",
            window_tokens=4,
        )
    )
    v4.apply(W1, events)
    assert [r.tokens for r in v4_ask(v4)] == [16]


def test_a_full_report_of_a_hit_adds_nothing(v4: Directory) -> None:
    """vLLM's kv_cache_report_mode=full announces windowed blocks that do not exist."""
    v4.apply(W1, v4_events(50))
    data = ids(*range(48))
    full = tuple(range(4, 49, 4))
    report = [
        BlockStored(full, None, data, 4, group=g, kind="sliding_window_mla", window_tokens=8)
        for g in (0, 1)
    ]
    report.append(
        BlockStored(
            tuple(range(2, 49, 2)),
            None,
            data,
            2,
            group=3,
            kind="sliding_window_mla",
            window_tokens=4,
        )
    )
    applied = v4.apply(W1, report)
    assert applied.reannounced == 3
    assert v4_ask(v4, 40)[0].tokens == 0


def test_undeclared_groups_are_counted_and_silence_their_publisher(v4: Directory) -> None:
    v4.apply(W1, v4_events(50))
    applied = v4.apply(W1, [BlockStored((1,), None, ids(*range(8)), 8, group=7, kind="mamba")])
    assert applied.undeclared == 1
    assert (v4_ask(v4), v4.muted()) == ([], [W1])
    v4.reset(W1)
    v4.apply(W1, v4_events(50))
    assert (v4_ask(v4)[0].tokens, v4.muted()) == (48, [])


@pytest.mark.parametrize("block", [3, 5, 12, 1 << 31])
def test_blocks_that_do_not_divide_are_no_claim_and_silence_their_publisher(
    v4: Directory, block: int
) -> None:
    """Of a group that is declared, with other blocks than declared."""
    v4.apply(W1, v4_events(50))
    tokens = ids(*range(min(block, 12)))
    odd = BlockStored((1,), None, tokens, block, group=2, kind="mla_attention")
    applied = v4.apply(W1, [odd])
    assert (applied.undeclared, applied.stored) == (1, 0)
    assert (v4_ask(v4), v4.muted()) == ([], [W1])


@pytest.mark.parametrize("block", [0, 3, 5, 16])
def test_a_layout_whose_blocks_do_not_divide_its_grid_is_refused(block: int) -> None:
    group = Group("odd", "*", block)
    layout = Layout("m", "vllm", "", 8, (), (Group("kv", "*", 8), group))
    with pytest.raises(LayoutError, match=f"'odd': blocks of {block} tokens do not divide"):
        Directory(Keyring(b"secret" * 4)).register(W1, layout, b"f" * 32)


def test_a_draft_head_that_appears_later_silences_its_publisher(v4: Directory) -> None:
    """Its window is like the two that are declared, in a group of its own. An engine that was
    described without a draft resumes earlier with one: nothing may be promised of it."""
    v4.apply(W1, v4_events(50))
    window = BlockStored(
        (44, 48), None, ids(*range(50)), 4, group=4, kind="sliding_window_mla", window_tokens=8
    )
    assert v4.apply(W1, [window]).undeclared == 1
    assert (v4_ask(v4), v4.muted()) == ([], [W1])


def test_a_life_is_not_muted_for_what_the_one_before_said(v4: Directory) -> None:
    odd = BlockStored((1,), None, ids(*range(8)), 8, group=7, kind="mamba")
    assert v4.apply(W1, [odd, AllBlocksCleared(), *v4_events(50)]).undeclared == 1
    assert (v4_ask(v4)[0].tokens, v4.muted()) == (48, [])


def test_the_alias_of_a_last_block_is_no_claim_and_no_fault(v4: Directory) -> None:
    """vLLM 0.32 announces the end of a prompt once more at its finest block size."""
    alias = BlockStored((9,), None, ids(0, 1), 2, group=2, kind="mla_attention")
    applied = v4.apply(W1, [alias, BlockRemoved((9,), Tier.HBM, 2), *v4_events(50)])
    assert (applied.aliases, applied.undeclared, applied.unknown_removals) == (1, 0, 1)
    assert v4_ask(v4)[0].tokens == 48


GEMMA = Layout(
    model="gemma",
    engine="vllm",
    kv_dtype="",
    grid_tokens=4,
    components=(),
    groups=(Group("swa", "sliding_window", 4, 13), Group("kv", "full_attention", 4)),
)


def test_wide_windows_need_their_last_blocks_only() -> None:
    directory = Directory(RING)
    directory.register(W1, GEMMA, FP)
    data, hashes = ids(*range(40)), tuple(range(4, 41, 4))
    directory.apply(
        W1,
        [
            BlockStored(
                hashes[-3:], None, data, 4, group=0, kind="sliding_window", window_tokens=13
            ),
            BlockStored(hashes, None, data, 4, group=1, kind="full_attention"),
        ],
    )

    def resume(tokens: int) -> int:
        [r] = directory.peek(RING.chain(RING.root(FP), ids(*range(tokens)), 4), FP)
        return r.tokens

    assert (resume(40), resume(36)) == (40, 0)
    directory.apply(W1, [BlockRemoved((32,), Tier.HBM, 0)])
    assert resume(40) == 0


def test_reading_changes_nothing(v4: Directory) -> None:
    v4.apply(W1, v4_events(50))
    before = v4.digest()
    v4_ask(v4)
    v4.missing(W1, keys_of("A"), 4)
    list(v4.holdings(W1))
    assert v4.digest() == before
