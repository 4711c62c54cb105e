"""Traces as text and chats: what is equal stays equal, what is not does not; which requests go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.connectors.stub_text import WordTokenizer
from kvatlas.errors import ConfigError
from kvatlas.validate.bench.texts import Form, Prompts, words_of
from kvatlas.validate.bench.workload import Workload, own_rate, time_scale
from kvatlas.workload.families import Family, generate
from kvatlas.workload.presets import FAMILIES
from kvatlas.workload.trace import TraceRequest, open_trace

BLOCK = 16


def some(name: str, count: int = 60) -> list[TraceRequest]:
    family = msgspec.structs.replace(FAMILIES[name], requests=count, duration_s=60.0)
    return list(generate(family, 3))


def prompts(requests: list[TraceRequest], form: Form, tag: str = "") -> dict[int, Any]:
    make = Prompts(requests, form=form, block_tokens=BLOCK, tokens_per_word=1.25, tag=tag)
    told = {r.index: make(r).members for r in requests}
    return {i: m.get("prompt") or m["messages"] for i, m in told.items()}


def common(one: Any, other: Any) -> int:
    """Leading items that are equal."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_equal_blocks_are_equal_words_and_no_others(name: str) -> None:
    requests = some(name)
    texts = {i: text.split() for i, text in prompts(requests, "text").items()}
    first = requests[0]
    for other in requests[1:]:
        blocks = common(first.hash_ids, other.hash_ids)
        shared = common(texts[first.index], texts[other.index])
        # 12.8 words a block, and what the next one shares by chance
        assert blocks * 12.8 - 1 <= shared <= blocks * 12.8 + 6


def test_lengths_are_met_by_the_measured_tokens_per_word() -> None:
    requests = some("multi-turn")
    texts = prompts(requests, "text")
    for request in requests:
        assert len(texts[request.index].split()) == pytest.approx(
            request.input_tokens / 1.25, abs=1.5
        )
    plain = Prompts(requests, form="text", block_tokens=BLOCK, tokens_per_word=1.0)
    text = plain(requests[0]).members["prompt"]
    assert isinstance(text, str)
    assert len(WordTokenizer().encode(text, special=False)) // 4 == requests[0].input_tokens


def test_words_are_sentences_the_same_everywhere() -> None:
    assert words_of("", 7, 9) == "A silver captain reads this harvest above one bakery."
    text = words_of("", 7, 40)
    assert text[0].isupper()
    assert text.endswith(".")
    assert text.count(".") >= 4
    assert words_of("", 7, 1).endswith(".")


@pytest.mark.parametrize("form", ["text", "chat", "ids"])
def test_another_tag_is_other_text_of_the_same_shape(form: Form) -> None:
    requests = some("shared-prompt", 30)
    one, other = prompts(requests, form), prompts(requests, form, "x")
    assert prompts(requests, form, "x") == other
    for request in requests:
        mine, theirs = one[request.index], other[request.index]
        assert len(mine) == pytest.approx(len(theirs), rel=0.2)
        if form == "chat":
            mine, theirs = mine[0]["content"].split(), theirs[0]["content"].split()
        elif form == "text":
            mine, theirs = mine.split(), theirs.split()
        assert common(mine, theirs) < 8
    first = requests[0]
    akin = next(r for r in requests[1:] if r.hash_ids[0] == first.hash_ids[0])
    mine, theirs = other[first.index], other[akin.index]
    if form == "chat":
        mine, theirs = mine[0]["content"], theirs[0]["content"]
    assert common(mine, theirs) >= common(first.hash_ids, akin.hash_ids) * 10


def test_chats_have_a_system_message_and_turns_that_grow() -> None:
    requests = some("multi-turn", 120)
    chats = prompts(requests, "chat")
    turns: dict[str, list[TraceRequest]] = {}
    for request in requests:
        turns.setdefault(request.session, []).append(request)
    longest = max(turns.values(), key=len)
    assert len(longest) >= 4
    before: list[dict[str, str]] = []
    for number, request in enumerate(longest):
        messages = chats[request.index]
        roles = [m["role"] for m in messages]
        bare = roles[1:] if roles[0] == "system" else roles
        assert bare == ["user", "assistant"] * number + ["user"]
        assert all(m["content"] for m in messages)
        # All that was said before stays, but for what the last block was cut short to.
        if before:
            assert messages[: len(before) - 1] == before[:-1]
            assert before[-1]["content"].startswith(messages[len(before) - 1]["content"][:40])
        before = messages
    systems = {
        chats[r.index][0]["content"] for r in requests if chats[r.index][0]["role"] == "system"
    }
    assert 2 <= len(systems) <= 20


def test_a_chat_that_starts_over_is_one_message() -> None:
    def turn(index: int, ids: tuple[int, ...]) -> TraceRequest:
        return TraceRequest(index, index, len(ids) * BLOCK, 4, ids, "s")

    chats = prompts([turn(0, (1, 2)), turn(1, (1, 2, 3)), turn(2, (9, 10, 11))], "chat")
    assert [len(chats[i]) for i in range(3)] == [1, 3, 1]
    assert [m["role"] for m in chats[1]] == ["user", "assistant", "user"]
    assert chats[1][0] == chats[0][0]
    assert chats[1][1]["content"] == "Yes."  # the answer was shorter than a block


def test_without_sessions_a_chat_is_one_question() -> None:
    (only,) = prompts([TraceRequest(0, 0.0, 32, 4, (1, 2))], "chat")[0]
    assert only["role"] == "user"


# -- which requests -------------------------------------------------------------------------------


def workload(name: str, **more: Any) -> Workload:
    family = msgspec.structs.replace(FAMILIES[name], **more)
    return Workload(name, family, seed=5, output_max=32)


def test_the_first_round_of_a_family_is_the_trace_that_generate_makes() -> None:
    family = FAMILIES["agent"]
    scaled = msgspec.structs.replace(family, requests=50, duration_s=family.duration_s / 20)
    made = workload("agent")
    assert made.requests(0, 50) == list(generate(scaled, 5))
    assert made.requests(1, 50) == list(generate(scaled, 6))
    assert (made.seed_of(0), made.seed_of(3)) == (5, 8)
    warm = made.warm_up(3)
    assert [r.arrival_s for r in warm] == [0.0] * 3
    assert warm[0].hash_ids != made.requests(0, 50)[0].hash_ids or warm != made.requests(0, 3)


def test_prompts_fit_the_context() -> None:
    made = workload("agent")
    made.fit(4096)
    kept = made.requests(0, 80)
    assert max(r.input_tokens + min(r.output_tokens, 32) for r in kept) <= 4096
    assert sum(made.left_out.values()) + len(kept) == 80


def traced(tmp_path: Path, lengths: list[int]) -> Workload:
    path = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": i * 500, "input_length": n, "output_length": 4, "hash_ids": [i]}
        for i, n in enumerate(lengths)
    ]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    return Workload("t", open_trace(path), seed=0, output_max=32)


def test_rounds_are_windows_of_a_trace_and_begin_anew(tmp_path: Path) -> None:
    made = traced(tmp_path, [100 + i for i in range(7)])
    tokens = [[r.input_tokens for r in made.requests(n, 3)] for n in range(3)]
    assert tokens == [[100, 101, 102], [103, 104, 105], [100, 101, 102]]
    assert made.repeated
    second = made.requests(1, 3)
    assert [(r.index, r.arrival_s) for r in second] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert len(made.requests(4, 100)) == 7
    assert not traced(tmp_path, [9] * 7).repeated


def test_what_is_too_long_is_left_out_of_a_trace(tmp_path: Path) -> None:
    made = traced(tmp_path, [100, 500, 100])
    made.fit(200)
    assert [r.input_tokens for r in made.requests(0, 3)] == [100, 100]
    assert made.left_out == {0: 1}
    made.fit(50)
    with pytest.raises(ConfigError, match="none fits into 50 tokens"):
        made.requests(0, 3)


def test_a_wider_context_does_not_undo_a_narrower_one(tmp_path: Path) -> None:
    made = traced(tmp_path, [100, 500, 100])
    made.fit(200)  # what was asked for
    made.fit(4096)  # what the endpoint states
    assert [r.input_tokens for r in made.requests(0, 3)] == [100, 100]


def test_rates() -> None:
    requests = [TraceRequest(i, i / 4, 16, 1, (i,)) for i in range(9)]
    assert own_rate(requests) == 4
    assert time_scale(requests, 8) == 0.5
    assert own_rate(requests[:1]) is None
    with pytest.raises(ConfigError, match="all come at once"):
        time_scale(requests[:1], 8)
    assert isinstance(FAMILIES["random"], Family)
