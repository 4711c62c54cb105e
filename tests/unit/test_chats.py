"""Generated chats: the same everywhere, of the asked size, shared where they should be."""

from __future__ import annotations

import pytest

from kvatlas.workload.chats import Shape, generate

SHAPE = Shape(
    sessions=9, groups=3, turns=4, system_words=500, turn_words=90, arrival_s=6.0, think_s=2.0
)


def test_a_seed_gives_the_same_chats_and_another_seed_gives_others():
    assert generate(SHAPE, 7) == generate(SHAPE, 7)
    assert generate(SHAPE, 7) != generate(SHAPE, 8)


def test_sessions_of_a_group_share_its_system_prompt_and_nothing_else():
    chats = generate(SHAPE)
    assert len({chat.system for chat in chats}) == SHAPE.groups
    for chat in chats:
        same = {other.system for other in chats if other.group == chat.group}
        assert same == {chat.system}
    texts = [turn.text for chat in chats for turn in chat.turns]
    assert len(set(texts)) == len(texts) == SHAPE.sessions * SHAPE.turns


@pytest.mark.parametrize("words", [60, 500, 3000])
def test_sizes_are_what_was_asked_for_within_one_sentence(words: int):
    shape = Shape(
        sessions=2,
        groups=1,
        turns=2,
        system_words=words,
        turn_words=words,
        arrival_s=1.0,
        think_s=1.0,
    )
    for chat in generate(shape):
        assert words <= len(chat.system.split()) <= words + 15
        for turn in chat.turns:
            assert words <= len(turn.text.split()) <= words + 15


def test_starts_are_in_order_and_pauses_within_their_bounds():
    chats = generate(SHAPE)
    starts = [chat.start_s for chat in chats]
    assert starts == sorted(starts)
    assert 0 <= starts[0] <= starts[-1] <= SHAPE.arrival_s
    for chat in chats:
        assert chat.turns[0].think_s == 0.0
        for turn in chat.turns[1:]:
            assert 0.5 * SHAPE.think_s <= turn.think_s <= 1.5 * SHAPE.think_s
