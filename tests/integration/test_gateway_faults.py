"""The gateway when something is wrong: with a request, an engine, a client or a stream."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import pytest
from gateway_kit import (
    STREAM_END,
    STREAM_HEAD,
    Behave,
    Client,
    Engine,
    Got,
    Seen,
    answer_plainly,
    ask,
    chunk,
    completion,
    eventually,
    stand,
    whole,
)

CHAT = "/v1/chat/completions"
STREAM = {"model": "m", "stream": True}
ASKED = {**STREAM, "stream_options": {"include_usage": True}}

USAGE_EVENT = b'data: {"choices":[],"usage":' + (
    json.dumps(json.loads(completion(prompt=20, cached=16, output=17))["usage"]).encode() + b"}"
)


def twenty_events() -> tuple[bytes, bytes]:
    """vllm-project/aibrix#2638: the stream, and the same without its usage-only event."""
    texts = ["你好", "\U0001f9ed", "é", "日本語", "한국어", "\U0001f469‍\U0001f680", "a", "b", "c"]
    events = [b": opened\n\n", b": ping\r\n\r\n", b"\ndata: {}\n\n"]
    for index in range(15):
        data = json.dumps(
            {"choices": [{"delta": {"content": texts[index % 9]}}]}, ensure_ascii=False
        )
        name, end = (b"data:", b"\r\n\r\n") if index % 3 == 0 else (b"data: ", b"\n\n")
        events.append(name + data.encode() + end)
    done = b"data: [DONE]\n\n"
    assert len(events) + 2 == 20
    return b"".join((*events, USAGE_EVENT, b"\r\n\r\n", done)), b"".join((*events, done))


WHOLE, WITHOUT_USAGE = twenty_events()


async def turns(count: int = 4) -> None:
    """Lets the gateway, which runs on this very loop, read what was just written."""
    for _ in range(count):
        await asyncio.sleep(0)


async def send_in_pieces(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    cut = got.json()["cut"]
    places = range(1, len(WHOLE)) if cut == "bytes" else [cut]
    start = 0
    for place in [*places, len(WHOLE)]:  # type: ignore[list-item]
        if place > start:
            writer.write(chunk(WHOLE[start:place]))
            await turns()
            start = place
    writer.write(STREAM_END)


@pytest.mark.parametrize("asked", [False, True])
async def test_a_stream_means_the_same_however_it_is_cut(asked: bool) -> None:
    """Every two-way split, one byte at a time, one write: the same bytes and the same counters."""
    expected = WHOLE if asked else WITHOUT_USAGE
    cuts: list[object] = ["bytes", *range(len(WHOLE) + 1)]
    async with stand(send_in_pieces) as s:

        async def one(client: Client, cut: object) -> None:
            body = json.dumps({**(ASKED if asked else STREAM), "cut": cut}).encode()
            await client.send("POST", CHAT, body)
            seen = await client.rest(await client.head())
            assert (seen.status, seen.complete) == (200, True), cut
            assert seen.body == expected, cut

        async with Client.to(s.port) as client:
            for cut in cuts:
                await one(client, cut)
        await s.settled()
        assert s.metric("kvatlas_prompt_tokens_total") == 20 * len(cuts)
        assert s.metric("kvatlas_cached_tokens_total") == 16 * len(cuts)
        assert s.metric("kvatlas_completion_tokens_total") == 17 * len(cuts)
        for outcome in s.steer.outcomes:
            counts = (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens)
            assert counts == (20, 16, 17)


FIRST = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'


HALVES = [b'data: {"choices":[{"de', b"data: [DO", b'data: {"usage":{']
ENDINGS = ["chunked, cut", "chunked, ended", "until closed"]
# Without half an event and with the last chunk the engine says itself that all is complete.
STOPS = [(half, end) for half in (b"", *HALVES) for end in ENDINGS if half or end != ENDINGS[1]]


@pytest.mark.parametrize("body", [STREAM, ASKED])
@pytest.mark.parametrize(("half", "ending"), STOPS)
async def test_a_stream_that_stops_short_is_never_a_silent_success(
    body: dict[str, object], half: bytes, ending: str
) -> None:
    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        if ending == "until closed":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + FIRST)
            await turns()
            writer.write(half)
        else:
            writer.write(STREAM_HEAD + chunk(FIRST))
            await turns()
            writer.write(chunk(half) if half else b"")
        await turns()
        if ending == "chunked, ended":
            writer.write(STREAM_END)
        else:
            writer.close()

    async with stand(behave, answer_plainly) as s:
        seen = await ask(s.port, CHAT, body)
        assert seen.status == 200
        assert not seen.complete
        rest = seen.body.removeprefix(FIRST)
        if body is ASKED and half:
            assert rest == half  # the client has half an event: nothing can follow it
        else:
            error = json.loads(rest.removeprefix(b"data: "))["error"]
            assert error["code"] == "engine_failed"
            assert "w0" in error["message"]
        await s.settled()
        assert s.steer.outcomes[0].status == 502
        assert not s.engines[1].got  # no second try after the first byte


# ---- the request is at fault


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"model" "m"}', "byte 9"),
        (b'{"model":"m"', "truncated"),
        (b"[]", "not an object"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b"not json", "byte "),
        (b"{}" * 2, "trailing"),
    ],
)
async def test_malformed_bodies_are_refused_with_the_place(raw: bytes, said: str) -> None:
    async with stand(answer_plainly) as s:
        for endpoint in (CHAT, "/v1/completions", "/v1/embeddings", "/v1/other"):
            headers = {"content-type": "application/json", "x-request-id": "r1"}
            seen = await ask(s.port, endpoint, raw, headers=headers)
            assert seen.status == 400
            assert seen.error()["type"] == "invalid_request_error"
            assert said in str(seen.error()["message"])
            assert seen.headers["x-request-id"] == "r1"
        assert not s.engines[0].got
        assert not s.steer.asked


@pytest.mark.parametrize(
    ("method", "target", "body", "status"),
    [
        ("POST", CHAT, b"", 400),
        ("GET", CHAT, b"", 405),
        ("DELETE", CHAT, b"", 405),
        ("GET", "/nothing", b"", 404),
        ("POST", "/tokenize", b"{}", 404),
        ("GET", "/v1", b"", 404),
        ("GET", "/v1/../reset_prefix_cache", b"", 404),
        ("GET", "/v1/%2e%2E/reset_prefix_cache", b"", 404),
        ("POST", CHAT, b'{"model":"' + b"m" * 2000 + b'"}', 413),
    ],
)
async def test_wrong_methods_paths_and_sizes(
    method: str, target: str, body: bytes, status: int
) -> None:
    async with stand(answer_plainly, max_body_bytes=1000) as s:
        seen = await ask(s.port, target, body, method=method)
        assert seen.status == status
        assert seen.error()["message"]
        assert not s.engines[0].got


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
async def test_an_engines_own_error_passes_unchanged(status: int) -> None:
    text = b'{"error": {"message": "\\u00e9 max_tokens  is 1.0", "code": 7}}'

    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(text, status, extra="retry-after: 3\r\n"))

    async with stand(behave) as s:
        for body in (STREAM, {"model": "m"}):
            seen = await ask(s.port, CHAT, body)
            assert (seen.status, seen.body) == (status, text)
            assert seen.headers["retry-after"] == "3"
        await s.settled()
        assert {outcome.status for outcome in s.steer.outcomes} == {status}
        assert not s.steer.firsts
        assert s.metric("kvatlas_usage_unreported_total") == 0


# ---- the engine is at fault


def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


async def test_the_next_target_is_tried_when_one_cannot_be_reached() -> None:
    async with stand(answer_plainly, engines_more={"dead": closed_port()}) as s:
        seen = await ask(s.port, CHAT, {"model": "m"})
        assert seen.status == 200
        assert seen.headers["x-kvatlas-worker"] == "w0"
        await s.settled()
        step = {"rung": "engine", "reason": "connect", "to": "engine", "worker": "dead"}
        assert s.metric("kvatlas_fallbacks_total", **step) == 1
        assert s.steer.outcomes[0].target.worker == "w0"
        assert s.steer.not_reached == ["dead"]


@pytest.mark.parametrize("how", ["dead", "refuses"])
async def test_when_the_plans_are_used_up_the_others_are_tried(how: str) -> None:
    async def refuse(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(completion(prompt=2000, cached=2000), 503))

    async with stand(answer_plainly, refuse, engines_more={"dead": closed_port()}) as s:
        targets = {target.worker: target for target in s.steer._targets}
        s.steer._targets = (targets["dead" if how == "dead" else "w1"],)
        s.steer.rest = (targets["dead"], targets["w0"])
        seen = await ask(s.port, CHAT, {"model": "m"})
        assert (seen.status, seen.headers["x-kvatlas-worker"]) == (200, "w0")
        seen = await ask(s.port, CHAT, {"model": "m"})  # nobody is left
        assert seen.status == (502 if how == "dead" else 503)


async def test_the_last_one_that_was_left_goes_meanwhile() -> None:
    async def refuse(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(completion(prompt=2000, cached=2000), 503))

    async with stand(refuse) as s:
        s.steer.left = lambda route: True  # type: ignore[method-assign]
        seen = await ask(s.port, CHAT, {"model": "m"})
        assert (seen.status, seen.error()["code"]) == (503, "engine_refused")


async def test_no_engine_can_be_reached() -> None:
    dead = {"dead-1": closed_port(), "dead-2": closed_port()}
    async with stand(engines_more=dead) as s:
        seen = await ask(s.port, CHAT, STREAM)
        assert (seen.status, seen.error()["code"]) == (502, "engine_unreachable")
        for said in ("dead-1", "dead-2", "refused"):
            assert said in str(seen.error()["message"])
        await s.settled()
        assert [outcome.status for outcome in s.steer.outcomes] == [502]


async def test_a_refusing_engines_figures_are_not_counted() -> None:
    """sgl-project/sglang#25972: after a fall-back, the figures of the one that answered, once."""

    async def refuse(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(completion(prompt=2000, cached=2000), 503))

    async with stand(refuse, answer_plainly, answer_plainly) as s:
        for body in ({"model": "m"}, STREAM):
            s.steer._next = 0
            seen = await ask(s.port, CHAT, body)
            assert (seen.status, seen.headers["x-kvatlas-worker"]) == (200, "w1")
        await s.settled()
        assert not s.engines[2].got
        assert s.metric("kvatlas_prompt_tokens_total") == 20
        assert s.metric("kvatlas_cached_tokens_total") == 8
        assert [o.cached_tokens for o in s.steer.outcomes] == [4, 4]


async def test_an_endless_refusal_is_cut_off() -> None:
    async def refuse(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 X\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(chunk(b"x" * 65536))
            await writer.drain()

    async with stand(refuse, answer_plainly) as s:
        assert (await ask(s.port, CHAT, {"model": "m"})).status == 200
        await s.settled()


async def close_at_once(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def speak_nonsense(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\x01 nonsense\r\n\r\n")


async def say_nothing(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("behave", "status", "code"),
    [
        (close_at_once, 502, "engine_failed"),
        (speak_nonsense, 502, "engine_failed"),
        (say_nothing, 504, "engine_timeout"),
    ],
)
async def test_an_engine_that_fails_before_its_first_byte(
    behave: Behave, status: int, code: str
) -> None:
    """It has the request, and perhaps died of it: nobody else gets it."""
    async with stand(behave, answer_plainly, engine_idle_timeout_s=0.1) as s:
        seen = await ask(s.port, CHAT, STREAM)
        assert (seen.status, seen.error()["code"]) == (status, code)
        assert "w0" in str(seen.error()["message"])
        await s.settled()
        assert s.steer.outcomes[0].status == status
        assert not s.engines[1].got


async def test_an_engine_that_falls_silent_within_a_stream() -> None:
    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(FIRST))
        await asyncio.Event().wait()

    async with stand(behave, engine_idle_timeout_s=0.1) as s:
        seen = await ask(s.port, CHAT, STREAM)
        assert not seen.complete
        error = json.loads(seen.body.removeprefix(FIRST + b"data: "))["error"]
        assert error["code"] == "engine_timeout"
        await s.settled()
        assert s.steer.outcomes[0].status == 504
        await eventually(lambda: s.engines[0].left == 1)


@pytest.mark.parametrize("framed", [True, False])
async def test_a_whole_answer_that_stops_short(framed: bool) -> None:
    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        answer = whole(completion())[:-5]
        writer.write(answer if framed else re.sub(b"content-length: .*\r\n", b"", answer))
        await turns()
        writer.close()

    async with stand(behave) as s:
        seen = await ask(s.port, CHAT, {"model": "m"})
        assert not seen.complete
        await s.settled()
        assert s.steer.outcomes[0].status == 502
        assert s.steer.outcomes[0].prompt_tokens == -1
        assert s.metric("kvatlas_prompt_tokens_total") == 0


async def test_a_whole_answer_without_framing_passes() -> None:
    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(re.sub(b"content-length: .*\r\n", b"", whole(completion())))
        await turns()
        writer.close()

    async with stand(behave) as s:
        seen = await ask(s.port, CHAT, {"model": "m"})
        assert seen.complete
        assert seen.body == completion()
        assert s.metric("kvatlas_prompt_tokens_total") == 10


# ---- the client leaves


async def leave_in_queue(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
    raise AssertionError("the request never got here")


async def wait_with_the_first_token(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    await asyncio.Event().wait()


async def stream_for_ever(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    while True:
        writer.write(chunk(FIRST))
        await asyncio.sleep(0.001)


async def send_half_an_answer(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(completion())[:-5])
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    "behave", [say_nothing, wait_with_the_first_token, stream_for_ever, send_half_an_answer]
)
async def test_a_client_that_leaves_frees_the_engine_within_a_second(behave: Behave) -> None:
    async with stand(behave) as s:
        async with Client.to(s.port) as client:
            await client.send("POST", CHAT, json.dumps(STREAM).encode())
            await eventually(lambda: len(s.engines[0].got) == 1)
            if behave in (stream_for_ever, send_half_an_answer):
                await client.head()
            if behave is stream_for_ever:
                assert await client.chunk()
        await eventually(lambda: s.engines[0].left == 1, within_s=1.0)
        await s.settled()
        assert [outcome.status for outcome in s.steer.outcomes] == [499]
        assert s.metric("kvatlas_requests_in_flight") == 0
        assert 'status="499"' in s.gateway.metrics.text().decode()


@pytest.mark.parametrize("behave", [say_nothing, wait_with_the_first_token, stream_for_ever])
async def test_a_deadline_frees_the_engine_within_a_second(behave: Behave) -> None:
    async with stand(behave, deadline_s=0.1) as s:
        async with Client.to(s.port) as client:
            await client.send("POST", CHAT, json.dumps(STREAM).encode())
            seen = await client.rest(await client.head())
        if behave is stream_for_ever:
            assert (seen.status, seen.complete) == (200, False)
            assert b'"code":"deadline_exceeded"' in seen.body
        else:
            assert (seen.status, seen.error()["code"]) == (504, "deadline_exceeded")
        await eventually(lambda: s.engines[0].left == 1, within_s=1.0)
        await s.settled()
        assert [outcome.status for outcome in s.steer.outcomes] == [504]
        step = {"rung": "engine", "reason": "deadline", "to": "error"}
        assert s.metric("kvatlas_fallbacks_total", **step) == 1


async def test_a_client_that_leaves_while_its_engine_is_being_chosen() -> None:
    async with stand(leave_in_queue) as s:
        s.steer.hold = asyncio.Event()
        async with Client.to(s.port) as client:
            await client.send("POST", CHAT, json.dumps(STREAM).encode())
            await eventually(lambda: len(s.steer.asked) == 1)
        await eventually(lambda: s.gateway._server.active == 0, within_s=1.0)
        s.steer.hold.set()
        await turns()
        assert not s.steer.routes
        assert not s.engines[0].got
        await s.settled()


async def test_a_hundred_leavers_in_a_row_leave_nothing_behind() -> None:
    behaves = [say_nothing, wait_with_the_first_token, stream_for_ever, send_half_an_answer]
    async with stand(*behaves) as s:
        for count in range(1, 101):
            async with Client.to(s.port) as client:
                await client.send("POST", CHAT, json.dumps(STREAM).encode())
                await eventually(lambda n=count: sum(len(e.got) for e in s.engines) == n)
        await eventually(lambda: sum(engine.left for engine in s.engines) == 100)
        await s.settled()
        assert {outcome.status for outcome in s.steer.outcomes} == {499}
        assert len(s.steer.outcomes) == 100
        await eventually(lambda: not s.gateway._server.connections)
        assert s.gateway._server.bodies_bytes == 0


async def test_a_leaver_touches_nobody_else() -> None:
    release = asyncio.Event()

    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(FIRST))
        await release.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + STREAM_END)

    async with stand(behave) as s:

        async def stay() -> Seen:
            return await ask(s.port, CHAT, STREAM)

        staying = [asyncio.ensure_future(stay()) for _ in range(5)]
        await eventually(lambda: len(s.engines[0].got) == 5)
        async with Client.to(s.port) as client:
            await client.send("POST", CHAT, json.dumps(STREAM).encode())
            await client.head()
        await eventually(lambda: s.engines[0].left == 1)
        release.set()
        for seen in await asyncio.gather(*staying):
            assert (seen.complete, seen.body) == (True, FIRST + b"data: [DONE]\n\n")
        await s.settled()


# ---- the client is slow


async def test_a_slow_client_holds_its_engine_back_and_gets_every_byte() -> None:
    total = 24 << 20
    written = 0

    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(STREAM_HEAD)
        block = chunk((b"data: " + b"x" * 1016 + b"\n\n") * 64)
        while written < total:
            writer.write(block)
            written += 65536
            await writer.drain()
        writer.write(chunk(b"data: [DONE]\n\n") + STREAM_END)

    async with stand(behave) as s, Client.to(s.port) as client:
        await client.send("POST", CHAT, json.dumps(STREAM).encode())
        seen = await client.head()
        before = -1
        while before != written or not written:  # until nothing moves any more
            before = written
            await asyncio.sleep(0.05)
        assert written < total - (
            8 << 20
        )  # what sockets hold; the gateway keeps no more than a buffer
        await client.rest(seen)
        assert seen.complete
        assert len(seen.body) == written + len(b"data: [DONE]\n\n")
        await s.settled()


async def test_slow_clients_do_not_slow_others() -> None:
    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        if not got.json().get("flood"):
            await answer_plainly(engine, got, writer)
            return
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunk(b"x" * 65536))
            await writer.drain()

    async with stand(behave) as s, Client.to(s.port) as slow:
        await slow.send("POST", CHAT, json.dumps({**STREAM, "flood": True}).encode())
        await slow.head()
        for _ in range(20):
            assert (await ask(s.port, CHAT, STREAM)).complete
