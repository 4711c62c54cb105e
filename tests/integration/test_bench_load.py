"""What the load player does for `kvatlas bench`: chats, any server's events, closed loops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
import pytest

from kvatlas.errors import ConfigError
from kvatlas.service import load, load_answer
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.load import LoadPlan, Prompt, Record, run_load
from kvatlas.workload.trace import TraceRequest

SSE = [(b"content-type", b"text/event-stream")]
USAGE = b'"usage": {"prompt_tokens": 9, "completion_tokens": 2}'


@contextlib.asynccontextmanager
async def server(answer: Callable[[Request, Reply], Awaitable[None]]) -> AsyncIterator[str]:
    running = HttpServer(answer)
    await running.start()
    try:
        yield f"http://127.0.0.1:{running.port}"
    finally:
        await running.close()


def request(index: int, arrival_s: float = 0.0, **more: object) -> TraceRequest:
    return msgspec.structs.replace(TraceRequest(index, arrival_s, 16, 2, (index,)), **more)


async def played(
    events: list[bytes], headers: Sequence[tuple[bytes, bytes]] = SSE, status: int = 200
) -> Record:
    """What a replay of one request makes of these events."""

    async def answer(asked: Request, reply: Reply) -> None:
        reply.start(status, list(headers))
        for event in events:
            reply.write(event)
            await asyncio.sleep(0.001)
        reply.end()

    records: list[Record] = []
    async with server(answer) as url:
        await run_load(LoadPlan(url, "m"), [request(0)], on_record=records.append)
    return records[0]


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
LAST = b'data: {"choices":[],' + USAGE + b"}\n\n"
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("events", "tokens_seen"),
    [
        ([ROLE, WORD, WORD, LAST, DONE], 2),
        ([WORD, WORD, LAST, DONE], 2),
        # the role and the first word in one; a word of thought
        ([ROLE.replace(b'""', b'"a"'), WORD, LAST, DONE], 2),
        ([ROLE.replace(b'"content":""', b'"reasoning_content":"a"'), WORD, LAST, DONE], 2),
        # usage on the last word, with spaces, and at none
        ([ROLE, WORD, WORD.replace(b"}]}", b"}], " + USAGE + b"}"), DONE], 2),
        ([WORD.replace(b"}]}", b'}], "usage": null}'), WORD, LAST, DONE], 2),
        ([e.replace(b"\n", b"\r\n") for e in (ROLE, WORD, WORD, LAST, DONE)], 2),
        ([WORD[:-2] + b"\r\n\r", b"\n" + WORD, LAST, DONE], 2),
        # other fields of an event, a comment, data in two lines
        ([b"event: message\nid: 1\n" + WORD, b": wait\n\n", WORD, LAST, DONE], 2),
        ([b"data: {\n" + WORD.replace(b"data: {", b"data: "), WORD, LAST, DONE], 2),
        # counts that are none: the words that were seen count
        ([WORD, WORD, LAST.replace(b": 2", b": " + b"9" * 400), DONE], 2),
        ([WORD, WORD, LAST.replace(b": 2", b": -2").replace(b": 9", b": true"), DONE], 2),
    ],
)
async def test_a_token_is_what_a_reader_sees(events: list[bytes], tokens_seen: int) -> None:
    record = await played(events)
    assert record.timing is not None
    assert len(record.timing.gaps_s) == tokens_seen - 1
    if LAST in events:
        assert (record.prompt_tokens, record.timing.output_tokens) == (9, 2)


@pytest.mark.parametrize(
    ("events", "error", "said"),
    [
        ([DONE], "error in answer", "no output"),
        ([LAST, DONE], "error in answer", "no output"),
        ([b"data: xyz\n\n", WORD, DONE], "error in answer", "not JSON"),
        ([b'data: {"choices": [{"te\n\n', DONE], "error in answer", "not JSON"),
        ([b'data: {"choices": 3}\n\n', DONE], "error in answer", "another form"),
        ([WORD, b'data: {"usage":' + b"[" * 100_000 + b"\n\n", DONE], "error in answer", "depth"),
        ([WORD, b"data: " + b"x" * load_answer.EVENT_BYTES_MAX], "broken off", "is longer than"),
        ([WORD, LAST], "broken off", "without [DONE]"),
    ],
)
async def test_a_broken_answer_is_none(events: list[bytes], error: str, said: str) -> None:
    record = await played(events)
    assert (record.timing, record.error) == (None, error)
    assert said in record.detail


@pytest.mark.parametrize(
    ("status", "headers", "body", "said"),
    [
        (307, [(b"location", b"http://b/v1")], b"", "it leads to http://b/v1"),
        (404, [], b'{"detail": "Not Found"}', "Not Found"),
        (500, [], b"", "it is empty"),
        (502, SSE, b"no healthy upstream", "no healthy upstream"),
        (200, [], b"{}", "no output"),
        (200, [], b"<html>", "not JSON"),
        (500, [], b'{"error": {"message": "\\u001b[2J\\na\\u202eb"}}', "0: \ufffd[2J a\ufffdb"),
    ],
)
async def test_what_a_refusal_says(
    status: int, headers: list[tuple[bytes, bytes]], body: bytes, said: str
) -> None:
    record = await played([body], headers, status)
    assert record.error == ("error in answer" if status == 200 else f"http {status}")
    assert said in record.detail
    assert record.detail.isprintable()


async def test_a_streams_type_and_an_endless_count_in_its_head() -> None:
    headers = [
        (b"content-type", b"Text/Event-Stream; charset=UTF-8"),
        (b"x-kvatlas-expected-hit-tokens", b"9" * 5000),
        (b"x-kvatlas-worker", b"w\x1b[2J".replace(b"\x1b", b"\xc2\x9b")),
    ]
    record = await played([WORD, LAST, DONE], headers)
    assert record.timing is not None
    assert (record.expected_tokens, record.error) == (None, "")
    assert record.worker is not None
    assert record.worker.isprintable()


async def test_prompts_headers_and_bodies_are_those_that_were_asked() -> None:
    asked: list[Request] = []

    async def answer(request: Request, reply: Reply) -> None:
        asked.append(request)
        reply.send_json(200, {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3}})

    def chat(of: TraceRequest) -> Prompt:
        return Prompt("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})

    async with server(answer) as url:
        plan = LoadPlan(url, "m", stream=False, ignore_eos=False)
        await run_load(
            plan, [request(0)], prompt_of=chat, headers=[(b"authorization", b"Bearer k")]
        )
    (one,) = asked
    assert (one.path, one.header("authorization")) == ("/v1/chat/completions", "Bearer k")
    assert msgspec.json.decode(one.body) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "temperature": 0,
    }


async def test_each_request_is_told_as_it_ended() -> None:
    async def answer(asked: Request, reply: Reply) -> None:
        if b"[1" in asked.body:
            reply.send_json(500, {"error": {"message": "no"}})
            return
        details = {"cached_tokens": 4}
        usage = {"prompt_tokens": 16, "completion_tokens": 2, "prompt_tokens_details": details}
        reply.send_json(200, {"choices": [{"text": "a"}], "usage": usage})

    def ids(of: TraceRequest) -> Prompt:
        return Prompt("/v1/completions", {"prompt": [of.index]})

    records: list[Record] = []
    async with server(answer) as url:
        plan = LoadPlan(url, "m", stream=False, max_in_flight=1)
        requests = [request(0, session="a"), request(1, 0.001)]
        await run_load(plan, requests, prompt_of=ids, on_record=records.append)
    good, bad = records
    assert (good.index, good.session, good.due_s) == (0, "a", 0.0)
    assert (good.prompt_tokens, good.cached_tokens, good.expected_tokens) == (16, 4, None)
    assert good.timing is not None
    assert (bad.timing, bad.error, bad.detail) == (None, "http 500", "request 1: no")
    assert bad.due_s == pytest.approx(0.001)


async def test_turns_of_a_closed_loop_wait_for_the_answer_before() -> None:
    order: list[int] = []
    running: set[int] = set()
    together: set[int] = set()

    async def answer(asked: Request, reply: Reply) -> None:
        (number,) = msgspec.json.decode(asked.body)["prompt"]
        order.append(number)
        running.add(number)
        together.update({0, 1} if {0, 1} <= running else ())
        await asyncio.sleep(0.005)
        running.discard(number)
        reply.send_json(200, {"choices": [{"text": "a"}]})

    def ids(of: TraceRequest) -> Prompt:
        return Prompt("/v1/completions", {"prompt": [of.index]})

    # The first session's second turn is written far behind: it goes as soon as it can.
    requests = [
        request(0, session="a"),
        request(1, 9.0, session="a", think_s=0.001),
        request(2, 0.0, session="b"),
    ]
    records: list[Record] = []
    async with server(answer) as url:
        plan = LoadPlan(url, "m", stream=False, closed_loop=True)
        result = await run_load(plan, requests, prompt_of=ids, on_record=records.append)
    assert not together
    assert order.index(0) < order.index(1)
    assert result.latency.requests == 3
    turn = next(r for r in records if r.index == 1)
    assert turn.due_s < 9.0


async def test_a_closed_loop_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "CLOSED_LOOP_MAX", 2)
    plan = LoadPlan("http://127.0.0.1:1", "m", closed_loop=True)
    with pytest.raises(ConfigError, match="more than 2 requests"):
        await run_load(plan, [request(i, 60.0) for i in range(3)])
