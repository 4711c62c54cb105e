"""From a request's body to token ids: in process, from the engine, or the reason why not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from chat_cases import TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_bpe import USER
from tokens_kit import (
    FakeEngine,
    answers,
    ids,
    load,
    user,
)

from kvatlas.errors import ConfigError
from kvatlas.service.tokens import Prompt, Tokenizer
from kvatlas.service.verify import (
    CHAT,
    COMPLETION,
    GOLDEN,
)


class TestLocal:
    async def test_exactly_one_start_token(self, local: Tokenizer) -> None:
        for _, path, fields in GOLDEN:
            prompt = await local.prompt(path, {"model": "m", **fields})
            assert prompt.reason == ""
            assert prompt.source == "local"
            wanted = 0 if fields.get("add_special_tokens") is False else 1
            assert ids(prompt).count(0) == wanted, fields
            assert prompt.count == len(ids(prompt))

    async def test_add_special_tokens_of_a_chat_is_the_clients_own_wish(
        self, local: Tokenizer
    ) -> None:
        assert ids(await local.prompt(CHAT, user(add_special_tokens=True)))[:2] == [0, 0]

    @pytest.mark.parametrize(
        "messages",
        [
            user()["messages"] * 5000,
            [{"role": "user", "content": [{"type": "text", "text": "hello"}] * 5000}],
        ],
    )
    async def test_a_chat_of_very_many_pieces_holds_nobody_up(
        self, local: Tokenizer, messages: list[object]
    ) -> None:
        asked = asyncio.create_task(local.prompt(CHAT, {"messages": messages}))
        turns = 0
        while not asked.done():
            await asyncio.sleep(0)
            turns += 1
        assert asked.result().reason == ""
        assert turns > 2  # of others

    async def test_next_turn_begins_with_the_turn_before(self, local: Tokenizer) -> None:
        first = await local.prompt(CHAT, user(add_generation_prompt=False))
        longer = user()
        longer["messages"] += [{"role": "assistant", "content": "a"}]
        second = await local.prompt(CHAT, longer)
        assert second.tokens.startswith(first.tokens)

    async def test_forms_of_a_completions_prompt(self, local: Tokenizer) -> None:
        one = await local.prompt(COMPLETION, {"prompt": "hello"})
        two = await local.prompt(COMPLETION, {"prompt": "the fox"})
        both = await local.prompt(COMPLETION, {"prompt": ["hello", "the fox"]})
        assert (both.tokens, both.others) == (one.tokens, (two.tokens,))
        given_ids = await local.prompt(COMPLETION, {"prompt": [1, 2, 2**32 - 1]})
        assert (ids(given_ids), given_ids.source) == ([1, 2, 2**32 - 1], "given")
        lists = await local.prompt(COMPLETION, {"prompt": [[1, 2], [3]]})
        assert (ids(lists), [ids(o) for o in lists.others]) == ([1, 2], [[3]])
        assert ids(await local.prompt(COMPLETION, {"prompt": ""})) == [0]

    @pytest.mark.parametrize(
        ("reason", "path", "body"),
        [
            ("malformed", COMPLETION, {}),
            ("malformed", COMPLETION, {"prompt": []}),
            ("malformed", COMPLETION, {"prompt": ["a", 1]}),
            ("malformed", COMPLETION, {"prompt": [1, "a"]}),
            ("malformed", COMPLETION, {"prompt": [-1]}),
            ("malformed", COMPLETION, {"prompt": [2**32]}),
            ("malformed", COMPLETION, {"prompt": [1.5]}),
            ("malformed", COMPLETION, {"prompt": ["a"] * 2000}),
            ("malformed", COMPLETION, {"prompt": "a", "add_special_tokens": "yes"}),
            ("malformed", COMPLETION, {"prompt": "\ud800"}),
            ("malformed", CHAT, user("\udfff")),
            ("prompt_embeds", COMPLETION, {"prompt_embeds": "AAAA"}),
            ("truncated", COMPLETION, {"prompt": "a", "truncate_prompt_tokens": 3}),
            ("truncated", CHAT, user(truncate_prompt_tokens=-1)),
            ("suffix", COMPLETION, {"prompt": "a", "suffix": "b"}),
            ("own_template", CHAT, user(chat_template="x")),
            ("unknown_path", "/v1/embeddings", {"input": "a"}),
        ],
    )
    async def test_without_ids_there_is_a_reason(
        self, model_dir: Path, reason: str, path: str, body: dict[str, Any]
    ) -> None:
        engine = FakeEngine()  # must not be asked: it could not know either
        tokenizer = load(model_dir, engine.endpoint())
        prompt = await tokenizer.prompt(path, body)
        assert prompt == Prompt(reason=reason)
        assert prompt.count == -1
        assert tokenizer.state().unkeyed == {reason: 1}
        assert engine.asked == []
        await tokenizer.close()

    async def test_large_texts_leave_the_event_loop(
        self, local: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: list[str] = []
        encoder = local._encoder
        assert encoder is not None
        real = encoder.encode

        def spy(text: str, special: bool) -> bytes:
            import threading

            threads.append(threading.current_thread().name)
            return real(text, special)

        monkeypatch.setattr(encoder, "encode", spy)
        small = await local.prompt(COMPLETION, {"prompt": "fox " * 10})
        large = await local.prompt(COMPLETION, {"prompt": "fox " * 70_000})
        assert threads[0] == "MainThread"
        assert threads[1].startswith("tokenize")
        assert large.count > 1000 * small.count

    async def test_a_library_that_gives_up_is_a_reason_too(
        self, local: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(text: str, special: bool) -> bytes:
            raise RuntimeError("match limit")

        monkeypatch.setattr(local._encoder, "encode", fails)
        assert (await local.prompt(CHAT, user())).reason == "encode_failed"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = (
    *("model", "messages", "prompt", "tools", "role", "content", "type", "text", "function"),
    *("name", "arguments", "tool_calls", "chat_template_kwargs", "documents", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "tool_call_id"),
)
nested = st.recursive(
    json_values | st.sampled_from(["user", "assistant", "tool", "text", "function", "developer"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(max_examples=400, deadline=None)
@given(
    path=st.sampled_from([CHAT, COMPLETION]),
    body=st.dictionaries(st.sampled_from(FIELDS), nested, max_size=6),
)
def test_no_body_raises(local: Tokenizer, path: str, body: dict[str, Any]) -> None:
    prompt = asyncio.run(local.prompt(path, body))
    assert (prompt.reason == "") == (prompt.source != "none")


@settings(max_examples=400, deadline=None)
@given(messages=st.lists(st.dictionaries(st.sampled_from(FIELDS), nested, max_size=5), max_size=3))
def test_no_messages_raise(local: Tokenizer, messages: list[Mapping[str, Any]]) -> None:
    asyncio.run(local.prompt(CHAT, {"messages": messages}))


async def test_chats_of_a_program_go_to_the_engine(model_dir: Path, tmp_path: Path) -> None:
    """DeepSeek V4's chats are no template: completions are keyed here, chats by the endpoint."""
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}', "utf-8")
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    engine = FakeEngine()
    engine.override = lambda question: answers([7, 8, 9])
    tokenizer = load(tmp_path, engine.endpoint())
    state = tokenizer.state()
    assert (state.chat, state.completion) == ("endpoint", "local")
    assert ids(await tokenizer.prompt(CHAT, user())) == [7, 8, 9]
    assert (await tokenizer.prompt(COMPLETION, {"prompt": "hello"})).source == "local"
    await tokenizer.close()


async def test_nothing_at_hand() -> None:
    tokenizer = load("")
    assert tokenizer.state().chat == "none"
    assert (await tokenizer.prompt(CHAT, user())).reason == "no_tokenizer"
    await tokenizer.close()


def test_a_path_without_tokenizer_is_the_operators_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load(tmp_path)


async def test_override_template(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(TEMPLATES["chatml"], "utf-8")
    tokenizer = load(model_dir, chat_template=str(path))
    prompt = await tokenizer.prompt(CHAT, user())
    plain = await tokenizer.prompt(COMPLETION, {"prompt": USER, "add_special_tokens": False})
    assert plain.tokens not in prompt.tokens
    await tokenizer.close()
