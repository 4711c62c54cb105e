"""Field reports of class E, protocol and figures, on the assembled product.

Every cut of a stream and every fault of an engine: tests/integration/test_gateway*.py.
"""

from __future__ import annotations

import asyncio
import json
from array import array

import pytest
from harness import CHAT, FakeWorker, Product, announce, fresh_tokens
from stub_publisher import BLOCK, block_tokens, stored

from kvatlas.config import WorkerConfig
from kvatlas.connectors.child import free_ports
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply

USAGE = {
    "prompt_tokens": 13,
    "completion_tokens": 19,
    "total_tokens": 32,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def twenty_events() -> tuple[list[bytes], bytes]:
    """Events in every dress that servers give them; and the one that tells the usage."""
    events = []
    for index, text in enumerate(["é", "你好", "👩‍👩‍👧‍👦", "\\n", "z"] * 3 + ["a", "b", "c"]):
        data = json.dumps({"choices": [{"index": 0, "text": text}]}, ensure_ascii=index % 2 == 0)
        space, end = (" ", "") if index % 3 else ("", "\r")
        events.append(f"data:{space}{data}{end}\n{end}\n".encode())
    events.insert(7, b": a comment\n\n")
    usage = json.dumps({"choices": [], "usage": USAGE}).encode()
    return events, b"data: " + usage + b"\n\n"


EVENTS, USAGE_EVENT = twenty_events()
WHOLE = b"".join([*EVENTS, USAGE_EVENT, b"data: [DONE]\n\n"])
CUTS = {
    "in one write": [WHOLE],
    "byte by byte": [WHOLE[i : i + 1] for i in range(len(WHOLE))],
    "in the middle of a character": [WHOLE[:100], WHOLE[100:101], WHOLE[101:]],
    "usage apart from the end": [WHOLE[:-14], WHOLE[-14:]],
    "usage in two": [WHOLE[:-60], WHOLE[-60:]],
    "no newline at the end": [WHOLE[:-2]],
}


class Cut:
    """Streams in the pieces that it is given."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    async def __call__(self, worker: FakeWorker, request: Request, reply: Reply) -> None:
        reply.start(200, [(b"content-type", b"text/event-stream")])
        for piece in self.pieces:
            reply.write(piece)
            await asyncio.sleep(0)
        reply.end()


@pytest.mark.parametrize("asked", [True, False])
async def test_aibrix_2638_cuts_of_a_stream_mean_nothing(asked: bool) -> None:
    cut = Cut()
    async with FakeWorker("w1", cut) as w1, Product([w1.config()]) as product:
        await product.settled()
        w1.events.publish(stored("AB", 2))
        await product.answers("AB", {"w1": 2})
        options = {"stream_options": {"include_usage": True}} if asked else {}
        prompt = [*block_tokens("ABC"), 1]
        for count, (name, pieces) in enumerate(CUTS.items(), 1):
            cut.pieces = pieces
            got = await product.complete(prompt, stream=True, **options)
            expected = b"".join(pieces)
            if not asked:  # it gets no extra event, and the figures are right all the same
                expected = expected.replace(USAGE_EVENT, b"")
            assert (got.status, got.body, got.expected) == (200, expected, 2 * BLOCK), name
            for metric, figure in (("prompt", 13), ("completion", 19), ("cached", 8)):
                found = await product.metric(f"kvatlas_{metric}_tokens_total", worker="w1")
                assert found == count * figure, name
            explained = (await product.get("/kvatlas/explain/last")).body.decode()
            assert "engine reused 8 tokens" in explained, name


@pytest.mark.parametrize("end", [b'data: {"choices": [{"te', b'data: {"choices": []}'])
async def test_aibrix_2638_half_an_event_is_no_success(end: bytes) -> None:
    async def half(worker: FakeWorker, request: Request, reply: Reply) -> None:
        reply.start(200, [(b"content-type", b"text/event-stream")])
        reply.write(b"data: {}\n\n" + end)
        await asyncio.sleep(0)
        reply.abort()

    async with FakeWorker("w1", half) as w1, Product([w1.config()]) as product:
        await product.settled()
        got = await product.chat([{"role": "user", "content": "q"}], stream=True)
        assert got.broken
        assert await product.in_flight() == {}
        assert await product.metric("kvatlas_worker_outcomes_total", status="502") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_sglang_25972_impossible_figures_are_flagged_and_not_counted(stream: bool) -> None:
    async with FakeWorker("w1") as w1, Product([w1.config()]) as product:
        await product.settled()
        w1.cached_tokens = 50
        got = await product.complete([1] * 20, stream=stream)  # 20 prompt tokens, 50 of them cached
        assert got.status == 200
        assert "usage_violations" in await product.flags()
        assert await product.metric("kvatlas_cached_tokens_total") == 0
        explained = (await product.get("/kvatlas/explain/last")).body.decode()
        assert "engine reused not reported" in explained


@pytest.mark.parametrize("stream", [True, False])
async def test_sglang_25972_a_fallback_counts_the_second_workers_figures_once(stream: bool) -> None:
    """Ten prompts of 100 tokens, 60 of them found; each is refused by others first."""

    async def refuse(worker: FakeWorker, request: Request, reply: Reply) -> None:
        usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 100}}
        reply.send_json(503, {"error": {"message": "full"}, "usage": usage})

    nobody = WorkerConfig("gone", f"http://127.0.0.1:{free_ports(1)[0]}", layout=str(BLOCK))
    async with FakeWorker("full", refuse) as full, FakeWorker("w2") as w2:
        prompts = [fresh_tokens(100, seed) for seed in range(10)]
        for prompt in prompts:
            announce(full.events, array("I", prompt).tobytes(), str(prompt[0]))
        full.events.publish(stored("A"))
        w2.cached_tokens = 60
        async with Product([full.config(), w2.config(), nobody]) as product:
            await product.answers("A", {"full": 1})
            answers = [await product.complete(prompt, stream=stream) for prompt in prompts]
            assert {(a.status, a.worker) for a in answers} == {(200, "w2")}
            if not stream:
                assert {a.cached for a in answers} == {60}
            assert len(full.got) == 10
            assert await product.metric("kvatlas_prompt_tokens_total") == 1000
            assert await product.metric("kvatlas_cached_tokens_total") == 600
            assert await product.metric("kvatlas_completion_tokens_total") == 30
            assert await product.in_flight() == {}


async def test_usage_figures_pass_as_the_engine_told_them() -> None:
    async with FakeWorker("w1") as w1, Product([w1.config()]) as product:
        await product.settled()
        w1.cached_tokens = 12
        whole = await product.complete([1] * 20)
        stream = await product.complete(
            [1] * 20, stream=True, stream_options={"include_usage": True}
        )
        assert whole.usage == stream.usage
        assert (whole.usage["prompt_tokens"], whole.cached) == (20, 12)
        assert 0 <= whole.cached <= whole.usage["prompt_tokens"]
        assert (await product.post(CHAT, {"model": "m", "messages": []})).status == 200
