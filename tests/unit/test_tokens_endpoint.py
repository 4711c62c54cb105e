"""Token ids by the engine's endpoint: to stand in for ours, and to check ours."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokens_kit import (
    URL,
    FakeEngine,
    answers,
    ids,
    load,
    user,
)

from kvatlas.errors import EngineError
from kvatlas.service.chat_messages import Unkeyable
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
