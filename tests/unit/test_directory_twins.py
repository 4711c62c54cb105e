"""Blocks that an engine holds twice, and hits that it reports as if it had stored them again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from kvatlas.core.claims import Applied
from kvatlas.core.directory import Directory
from kvatlas.core.events import BlockRemoved, BlockStored, Event
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import Group, Layout
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.windows import SHARED_MAX

RING = Keyring(b"a secret for the tests")
FP = b"\1" * 32
W1 = Publisher("w1")
A = list(range(100, 180))
B = [*A[:12], *range(500, 560)]  # parts from A inside its first grid block


def layout(*groups: Group) -> Layout:
    return Layout("m", "vllm", "", 16, (), groups)


CHAIN = Group("kv", "full_attention", 16)
WIDE = Group("swa", "sliding_window", 16, 40)  # a window of three blocks
FINE = Group("swa", "sliding_window", 4, 16)  # of four
CHAIN_ONLY = layout(CHAIN)
WIDE_FIRST = layout(WIDE, CHAIN)
CHAIN_FIRST = layout(CHAIN, FINE)
FINE_FIRST = layout(FINE, CHAIN)


def name(tokens: Sequence[int], end: int) -> int:
    return hash(tuple(tokens[:end])) & 0xFFFF_FFFF_FFFF_FFFF


class Engine:
    """Announces what one request stores or reports, group by group, in the layout's order."""

    def __init__(self, shape: Layout) -> None:
        self.directory = Directory(RING)
        self.directory.register(W1, shape, FP)
        self.groups = shape.groups

    def tells(
        self, tokens: Sequence[int], end: int, *, start: int = 0, tail: int | None = None
    ) -> Applied:
        """Blocks of ``tokens`` from ``start`` to ``end``; of windows only the last ``tail``."""
        events: list[Event] = []
        for index, group in enumerate(self.groups):
            ends = list(range(start + group.block_tokens, end + 1, group.block_tokens))
            if not ends:
                continue
            kept = ends if group.window_tokens is None or tail is None else ends[-tail:]
            event = BlockStored(
                tuple(name(tokens, e) for e in kept),
                name(tokens, start) if start else None,
                array("I", tokens[start : ends[-1]]).tobytes(),
                group.block_tokens,
                group=index,
                kind=group.kind,
                window_tokens=group.window_tokens,
            )
            events.append(event)
        applied = self.directory.apply(W1, events)
        assert (applied.undeclared, applied.malformed, applied.orphans) == (0, 0, 0)
        return applied

    def removes(self, group: int, tokens: Sequence[int], *ends: int) -> Applied:
        gone = [BlockRemoved((name(tokens, end),), Tier.HBM, group) for end in ends]
        return self.directory.apply(W1, gone)

    def resume(self, tokens: Sequence[int]) -> int:
        keys = RING.chain(RING.root(FP), array("I", tokens).tobytes(), 16)
        found = self.directory.peek(keys, FP)
        return found[0].tokens if found else 0


def test_a_prompt_of_one_block_is_computed_again_each_time() -> None:
    """One token must be computed, so such a prompt can resume nothing: its block is twice there."""
    engine = Engine(CHAIN_ONLY)
    engine.tells(A, 48)
    engine.tells(A, 16)
    engine.removes(0, A, 16)
    assert engine.resume(A[:48]) == 48
    engine.removes(0, A, 16)
    assert engine.resume(A[:48]) == 0


def test_a_chain_that_is_told_again_was_only_reported() -> None:
    """More than one block, all of them held: then the engine would have resumed after them."""
    engine = Engine(CHAIN_ONLY)
    engine.tells(A, 48)
    engine.tells(A, 16)  # unsure so far
    engine.tells(A, 48)
    engine.removes(0, A, 16)
    assert engine.resume(A[:48]) == 0
    engine.tells(A, 48)
    engine.tells(A, 16)  # no longer unsure: this engine reports its hits
    engine.removes(0, A, 16)
    assert engine.resume(A[:48]) == 0


def test_a_chain_of_which_some_is_new_was_computed() -> None:
    """A request may refuse to read the cache (prompt logprobs): all of it is stored again."""
    engine = Engine(CHAIN_ONLY)
    engine.tells(A, 32)
    engine.tells(A, 48)
    engine.removes(0, A, 16, 32)
    assert engine.resume(A[:48]) == 48


def test_a_window_that_was_lost_is_stored_again_and_not_reported() -> None:
    """The chain was held, the window was not: so nothing was resumed and all was computed."""
    engine = Engine(WIDE_FIRST)
    engine.tells(A, 64)  # an engine that keeps all windows
    engine.removes(0, A, 32)
    assert engine.resume(A[:64]) == 16
    engine.removes(0, A, 16)
    assert engine.resume(A[:64]) == 0
    applied = engine.tells(A, 64)
    assert applied.reannounced == 0
    assert engine.resume(A[:64]) == 64
    engine.removes(1, A, 16, 32, 48, 64)
    engine.removes(0, A, 48, 64)
    assert engine.resume(A[:64]) == 64
    engine.removes(0, A, 64)
    assert engine.resume(A[:64]) == 48


@pytest.mark.parametrize("shape", [WIDE_FIRST, CHAIN_FIRST, FINE_FIRST])
def test_a_reported_hit_is_held_once_whatever_the_order_of_the_groups(shape: Layout) -> None:
    engine = Engine(shape)
    chain, window = shape.groups.index(CHAIN), 1 - shape.groups.index(CHAIN)
    engine.tells(A, 64, tail=4)
    for _ in range(2):
        assert engine.tells(A, 64).reannounced == 1
    engine.removes(window, A, 64)
    assert engine.resume(A[:64]) in (0, 48)
    engine = Engine(shape)
    engine.tells(A, 64, tail=4)
    engine.tells(A, 64)
    engine.removes(chain, A, 16)
    assert engine.resume(A[:64]) == 0


def test_a_report_after_a_short_prompt_is_still_a_report() -> None:
    """The short prompt has no chain block: its windows say nothing of the next request."""
    engine = Engine(FINE_FIRST)
    engine.tells(A, 64, tail=4)
    engine.tells(list(range(900, 912)), 12)
    engine.tells(A, 64)
    engine.removes(1, A, 16)
    assert engine.resume(A[:64]) == 0


def test_a_short_report_is_told_by_what_could_have_been_resumed_before_it() -> None:
    """Three blocks fit into the window, so their list has no gaps either way."""
    engine = Engine(WIDE_FIRST)
    engine.tells(A, 64)
    engine.tells(A, 48)
    engine.removes(0, A, 16)
    engine.removes(1, A, 16)
    assert engine.resume(A[:64]) == 0


def test_prompts_that_part_inside_a_block_share_the_windows_beginning() -> None:
    engine = Engine(FINE_FIRST)
    engine.tells(A, 16)
    engine.tells(B, 16)
    assert engine.resume(A[:16]) == 16
    assert engine.resume(B[:16]) == 16
    engine.removes(0, A, 12)  # one of the two
    assert engine.resume(A[:16]) == engine.resume(B[:16]) == 16
    engine.removes(0, A, 12)
    assert engine.resume(A[:16]) == engine.resume(B[:16]) == 0
    assert engine.directory.held(W1) == {"kv": {Tier.HBM: 2}}
    engine.removes(0, A, 4, 4, 8, 8, 16)
    engine.removes(0, B, 16)
    engine.removes(1, A, 16)
    engine.removes(1, B, 16)
    assert engine.directory.holders == 0
    engine.tells(B, 16)
    assert engine.resume(B[:16]) == 16


def test_how_many_windows_share_a_block_is_limited() -> None:
    engine = Engine(FINE_FIRST)
    prompts = [[*A[:12], 1000 + i, 0, 0, 0] for i in range(SHARED_MAX + 10)]
    for prompt in prompts:
        engine.tells(prompt, 16)
    assert sum(engine.resume(prompt) > 0 for prompt in prompts) == SHARED_MAX + 1


def test_windows_outlive_their_chain_and_are_stored_once_more() -> None:
    """Blocks of a chain are evicted one by one. Whose first one is gone is computed from position
    0, its windows held or not: that is no report of a hit (found by the fault simulation)."""
    engine = Engine(WIDE_FIRST)
    engine.tells(A, 80)
    engine.removes(1, A, 16)
    assert engine.resume(A) == 0
    assert engine.tells(A, 80).reannounced == 0
    assert engine.resume(A) == 80
    engine.removes(0, A, 48, 64, 80)  # the older ones
    assert engine.resume(A) == 80
    engine.removes(0, A, 48, 64, 80)
    assert engine.resume(A) == 32  # the windows there were left alone
