"""From a request's body to token ids: in process, from the engine, or the reason why not."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from chat_cases import TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_bpe import END, START, USER, train

from kvatlas.config import TokenizerConfig
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service.chat_messages import Dialect, Unkeyable
from kvatlas.service.http_client import StatusError
from kvatlas.service.tokens import Prompt, Tokenizer
from kvatlas.service.verify import (
    CHAT,
    COMPLETION,
    GOLDEN,
    Endpoint,
    difference,
    questions_for,
    to_bytes,
)

URL = "http://engine:8000"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|user|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
Answer = Callable[[dict[str, Any]], Awaitable[object]]


def ids(prompt: Prompt | bytes) -> list[int]:
    return array("I", prompt if isinstance(prompt, bytes) else prompt.tokens).tolist()


def user(text: str = "the quick brown fox", **fields: object) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


class FakeEngine:
    """What an engine's /tokenize would say: by another Tokenizer, or as told."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self.asked: list[dict[str, Any]] = []
        self.asked_urls: list[str] = []
        self.now = 0.0
        self.override: Answer | None = None
        self.urls = [URL]

    async def post_json(self, url: str, obj: object, *, timeout_s: float) -> Any:
        assert url.removesuffix("/tokenize") in self.urls
        assert 0 < timeout_s <= 1.0
        question = json.loads(json.dumps(obj))
        self.asked.append(question)
        self.asked_urls.append(url.removesuffix("/tokenize"))
        if self.override is not None:
            return await self.override(question)
        assert self.tokenizer is not None
        path = CHAT if "messages" in question else COMPLETION
        prompt = await self.tokenizer.prompt(path, question)
        if prompt.reason:
            raise StatusError(prompt.reason, status=400)
        return {"tokens": ids(prompt), "count": prompt.count}

    def endpoint(self, dialect: Dialect = "vllm") -> Endpoint:
        return Endpoint(self.post_json, lambda: self.urls, dialect=dialect, clock=lambda: self.now)


async def answers(tokens: object) -> object:
    return {"tokens": tokens}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template renders the start token itself; plain text gets it from the tokenizer."""
    directory = train(tmp_path_factory.mktemp("model"), split=True, start=True)
    config = {"bos_token": START, "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return directory


@pytest.fixture(scope="module")
def other_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same vocabulary with another version of the template."""
    directory = tmp_path_factory.mktemp("other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((model_dir / name).read_bytes())
    changed = TEMPLATE.replace("{{ m.role }}\n", "{{ m.role }}:\n")
    (directory / "chat_template.jinja").write_text(changed, "utf-8")
    return directory


def load(directory: Path | str, endpoint: Endpoint | None = None, **fields: Any) -> Tokenizer:
    dialect = endpoint.dialect if endpoint else "vllm"
    config = TokenizerConfig(path=str(directory), **fields)
    return Tokenizer.load(config, endpoint=endpoint, dialect=dialect)


@pytest.fixture(scope="module")
def local(model_dir: Path) -> Tokenizer:
    return load(model_dir)


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


class TestEndpoint:
    async def test_stands_in_without_a_tokenizer(self, local: Tokenizer) -> None:
        engine = FakeEngine(local)
        tokenizer = load("", engine.endpoint())
        body = user(tools=[{"type": "function", "function": {"name": "f"}}])
        prompt = await tokenizer.prompt(CHAT, body)
        assert prompt.source == "endpoint"
        assert prompt.tokens == (await local.prompt(CHAT, body)).tokens
        batch = await tokenizer.prompt(COMPLETION, {"prompt": ["a", "b"]})
        assert batch.others == (await local.prompt(COMPLETION, {"prompt": ["a", "b"]})).others
        state = tokenizer.state()
        assert (state.encoder, state.chat, state.completion) == ("", "endpoint", "endpoint")
        await tokenizer.close()

    async def test_asks_the_same_only_once(self, local: Tokenizer) -> None:
        engine = FakeEngine(local)
        tokenizer = load("", engine.endpoint())
        for _ in range(3):
            await tokenizer.prompt(CHAT, user())
        assert len(engine.asked) == 1
        assert (await tokenizer.prompt(CHAT, user("other"))).source == "endpoint"
        assert len(engine.asked) == 2
        await tokenizer._endpoint.tokens(CHAT, user(), [], url=URL)  # type: ignore[union-attr]
        assert len(engine.asked) == 3  # a check is never answered from memory
        await tokenizer.close()

    async def test_answers_are_kept_within_their_bytes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Endpoint, "_CACHE_BYTES", 4000)
        engine = FakeEngine()
        engine.override = lambda question: answers([1] * 100)
        endpoint = engine.endpoint()
        for number in range(50):
            await endpoint.tokens(COMPLETION, {}, [f"text {number}"])
            assert endpoint._answers_bytes <= 4000
        assert endpoint._answers_bytes == 656 * len(endpoint._answers)

    @pytest.mark.parametrize(
        "wrong", [{}, [], None, {"tokens": "x"}, {"tokens": [-1]}, {"tokens": ["a"]}]
    )
    async def test_wrong_answers_are_failures(self, wrong: object) -> None:
        engine = FakeEngine()

        async def answer(question: dict[str, Any]) -> object:
            return wrong

        engine.override = answer
        tokenizer = load("", engine.endpoint())
        assert (await tokenizer.prompt(CHAT, user())).reason == "endpoint_failed"
        assert tokenizer.state().endpoint_failures == 1
        await tokenizer.close()

    async def test_rests_after_failures_and_tries_again(self, local: Tokenizer) -> None:
        engine = FakeEngine(local)

        async def down(question: dict[str, Any]) -> object:
            raise EngineError("connection refused")

        engine.override = down
        tokenizer = load("", engine.endpoint())
        for _ in range(20):
            assert (await tokenizer.prompt(CHAT, user())).reason == "endpoint_failed"
        assert len(engine.asked) == 3
        assert tokenizer.state().endpoint_failing
        engine.override = None
        assert (await tokenizer.prompt(CHAT, user())).reason == "endpoint_failed"
        engine.now += 5.0
        assert (await tokenizer.prompt(CHAT, user())).source == "endpoint"
        assert not tokenizer.state().endpoint_failing
        assert tokenizer.state().unkeyed == {"endpoint_failed": 21}
        await tokenizer.close()

    async def test_single_failures_do_not_rest_it(self) -> None:
        engine = FakeEngine()

        async def every_other(question: dict[str, Any]) -> object:
            if len(engine.asked) % 2:
                raise EngineError("connection reset")
            return {"tokens": [1]}

        engine.override = every_other
        tokenizer = load("", engine.endpoint())
        reasons = [(await tokenizer.prompt(CHAT, user(str(n)))).reason for n in range(12)]
        assert reasons == ["endpoint_failed", ""] * 6
        await tokenizer.close()

    async def test_requests_that_the_engine_refuses_are_no_failures(self) -> None:
        """Otherwise a client with invalid requests could rest the endpoint for everybody."""
        engine = FakeEngine()
        statuses = [*(400, 413, 422) * 3, 404, 500, 503, 503]

        async def refuses(question: dict[str, Any]) -> object:
            raise StatusError("no", status=statuses[len(engine.asked) - 1])

        engine.override = refuses
        tokenizer = load("", engine.endpoint())
        reasons = [(await tokenizer.prompt(CHAT, user())).reason for _ in statuses]
        assert reasons == ["engine_refuses"] * 9 + ["endpoint_failed"] * 4
        assert tokenizer.state().endpoint_failures == 3
        assert len(engine.asked) == 12  # then it rests
        await tokenizer.close()

    async def test_no_engine_to_ask(self) -> None:
        engine = FakeEngine()
        engine.urls = []
        tokenizer = load("", engine.endpoint())
        assert (await tokenizer.prompt(CHAT, user())).reason == "endpoint_failed"
        assert engine.asked == []
        await tokenizer.close()

    async def test_one_deadline_for_a_whole_batch(self) -> None:
        engine = FakeEngine()

        async def slow(question: dict[str, Any]) -> object:
            engine.now += 0.4
            return {"tokens": [1]}

        engine.override = slow
        endpoint = engine.endpoint()
        with pytest.raises(Unkeyable, match="endpoint_failed"):
            await endpoint.tokens(COMPLETION, {}, [str(n) for n in range(10)])
        assert (len(engine.asked), endpoint.calls, endpoint.failures) == (3, 3, 0)

    async def test_not_more_than_so_many_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Endpoint, "_IN_FLIGHT_MAX", 2)
        engine = FakeEngine()
        hold = asyncio.Event()

        async def held(question: dict[str, Any]) -> object:
            await hold.wait()
            return {"tokens": [1]}

        engine.override = held
        tokenizer = load("", engine.endpoint())
        tasks = [asyncio.create_task(tokenizer.prompt(CHAT, user(str(n)))) for n in range(3)]
        await tasks[2]
        assert tasks[2].result().reason == "endpoint_busy"
        hold.set()
        assert [(await task).reason for task in tasks[:2]] == ["", ""]
        assert (await tokenizer.prompt(CHAT, user("later"))).reason == ""
        await tokenizer.close()

    def test_questions_in_each_engines_form(self) -> None:
        body = user(
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice="auto",
            reasoning_effort="low",
            documents=[{"text": "t"}],
            chat_template_kwargs={"x": 1},
            stream=True,
            max_tokens=5,
        )
        assert questions_for(CHAT, body, [], "vllm") == [
            {
                "model": "m",
                "messages": body["messages"],
                "add_generation_prompt": True,
                "continue_final_message": False,
                "add_special_tokens": False,
                "tools": body["tools"],
                "chat_template_kwargs": {
                    "x": 1,
                    "documents": [{"text": "t"}],
                    "reasoning_effort": "low",
                    "enable_thinking": True,
                },
            }
        ]
        keys = {"model", "messages", "tools", "tool_choice", "reasoning_effort"}
        (sglang,) = questions_for(CHAT, body, [], "sglang")
        assert sglang.keys() == keys | {"chat_template_kwargs"}
        assert questions_for(COMPLETION, {"model": "m"}, ["a", "b"], "sglang") == [
            {"model": "m", "prompt": "a", "add_special_tokens": True},
            {"model": "m", "prompt": "b", "add_special_tokens": True},
        ]


class TestVerify:
    async def test_equal(self, model_dir: Path, local: Tokenizer) -> None:
        tokenizer = load(model_dir, FakeEngine(local).endpoint())
        assert await tokenizer.verify("m") == len(GOLDEN)
        state = tokenizer.state()
        assert (state.chat, state.completion) == ("local", "local")
        assert (state.compared, state.mismatches, state.last_mismatch) == (len(GOLDEN), 0, "")
        await tokenizer.close()

    async def test_another_template_on_the_worker(self, model_dir: Path, other_dir: Path) -> None:
        """Broken on purpose: seen at once, flagged, and every answer is right all the same."""
        engine = FakeEngine(load(other_dir))
        tokenizer = load(model_dir, engine.endpoint())
        await tokenizer.verify("m")
        state = tokenizer.state()
        assert (state.chat, state.completion) == ("endpoint", "local")
        assert state.mismatches > 5
        assert f"{URL}/v1/chat/completions (" in state.last_mismatch
        assert "first difference at token" in state.last_mismatch
        assert engine.tokenizer is not None
        prompt = await tokenizer.prompt(CHAT, user())
        assert prompt.source == "endpoint"
        assert prompt.tokens == (await engine.tokenizer.prompt(CHAT, user())).tokens
        # The worker comes back with our template: trusted again, the flag stays readable.
        engine.tokenizer = load(model_dir)
        await tokenizer.verify("m")
        assert (await tokenizer.prompt(CHAT, user())).source == "local"
        assert tokenizer.state().last_mismatch
        await tokenizer.close()

    async def test_one_odd_worker_among_several(
        self, model_dir: Path, other_dir: Path, local: Tokenizer
    ) -> None:
        """It is named; the others' ids go on being made here."""
        engine = FakeEngine()
        engine.urls = [URL, "http://odd:8000", "http://third:8000"]
        odd = load(other_dir)

        async def each(question: dict[str, Any]) -> object:
            asked = odd if engine.asked_urls[-1] == "http://odd:8000" else local
            path = CHAT if "messages" in question else COMPLETION
            return {"tokens": ids(await asked.prompt(path, question))}

        engine.override = each
        tokenizer = load(model_dir, engine.endpoint())
        assert await tokenizer.verify("m") == 3 * len(GOLDEN)
        assert tokenizer.state().chat == "local"
        assert tokenizer.state().last_mismatch.startswith("http://odd:8000/v1/chat/completions")
        await tokenizer.close()
        await odd.close()

    async def test_without_start_token_on_the_worker(
        self, model_dir: Path, local: Tokenizer
    ) -> None:
        engine = FakeEngine()

        async def without(question: dict[str, Any]) -> object:
            path = CHAT if "messages" in question else COMPLETION
            return {"tokens": [i for i in ids(await local.prompt(path, question)) if i != 0]}

        engine.override = without
        tokenizer = load(model_dir, engine.endpoint())
        await tokenizer.verify("m")
        state = tokenizer.state()
        assert (state.chat, state.completion) == ("endpoint", "endpoint")
        assert "first difference at token 0: here 0, engine" in state.last_mismatch
        await tokenizer.close()

    async def test_an_engine_that_cannot_answer_refutes_nothing(self, model_dir: Path) -> None:
        engine = FakeEngine()
        engine.override = lambda question: answers(None)
        tokenizer = load(model_dir, engine.endpoint())
        assert await tokenizer.verify("m") == 0
        assert tokenizer.state().chat == "local"
        assert await load(model_dir).verify("m") == 0  # nobody to ask
        await tokenizer.close()

    async def test_samples_find_a_change_while_serving(
        self, model_dir: Path, other_dir: Path, local: Tokenizer
    ) -> None:
        engine = FakeEngine(local)
        tokenizer = load(model_dir, engine.endpoint(), verify_every=2)

        async def serve(number: int) -> Prompt:
            prompt = await tokenizer.prompt(CHAT, user(f"question {number}"))
            if tokenizer._sampling is not None:
                await tokenizer._sampling
            return prompt

        for number in range(10):
            await serve(number)
        assert len(engine.asked) == 5
        assert tokenizer.state().mismatches == 0
        engine.tokenizer = load(other_dir)
        sources = [(await serve(number)).source for number in range(10, 20)]
        assert sources == ["local"] * 6 + ["endpoint"] * 4
        assert "(sample): first difference" in tokenizer.state().last_mismatch
        await tokenizer.close()

    async def test_one_sample_at_a_time_and_none_left_behind(self, model_dir: Path) -> None:
        engine = FakeEngine()
        hold = asyncio.Event()

        async def held(question: dict[str, Any]) -> object:
            await hold.wait()
            return {"tokens": []}

        engine.override = held
        tokenizer = load(model_dir, engine.endpoint(), verify_every=1)
        for number in range(5):
            await tokenizer.prompt(CHAT, user(f"question {number}"))
            await asyncio.sleep(0)
        assert len(engine.asked) == 1
        await tokenizer.close()
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    def test_difference_in_words(self) -> None:
        assert difference(to_bytes([1, 2]), to_bytes([1, 2])) == ""
        assert difference(to_bytes([1, 2]), to_bytes([1, 3, 4])) == (
            "first difference at token 1: here 2, engine 3 (2 tokens here, 3 there)"
        )
        assert "at token 2: here the end, engine 9" in difference(
            to_bytes([1, 2]), to_bytes([1, 2, 9])
        )


class TestSglang:
    async def test_plain_chats_here_the_rest_from_the_engine(
        self, model_dir: Path, local: Tokenizer
    ) -> None:
        engine = FakeEngine(local)
        tokenizer = load(model_dir, engine.endpoint("sglang"))
        assert (await tokenizer.prompt(CHAT, user())).source == "local"
        # SGLang heeds no add_special_tokens.
        plain = await tokenizer.prompt(COMPLETION, {"prompt": "a", "add_special_tokens": False})
        assert ids(plain)[0] == 0
        with_tools = user(tools=[{"type": "function", "function": {"name": "f"}}])
        assert (await tokenizer.prompt(CHAT, with_tools)).source == "endpoint"
        await tokenizer.close()


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
