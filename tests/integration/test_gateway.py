"""The gateway through real sockets: what passes, byte for byte, and what each side is told."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from gateway_kit import (
    STREAM_END,
    STREAM_HEAD,
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

from kvatlas.errors import RequestError
from kvatlas.service.salts import own_salt
from kvatlas.service.steer import Route, Target

CHAT = "/v1/chat/completions"
JSON_ENDPOINTS = [CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank?x=1"]

# maximhq/bifrost#3362: nested schemas, number texts, raw and escaped text, null, unknown fields.
TOOLS = (
    b'{ "model" : "m","messages":[{"role":"user","content":"caf\\u00e9 '
    + "café 🧭 日本".encode()
    + b' \\/ \\ud83e\\udded"}],"tools":[{"type":"function","function":{"name":"z","parameters":'
    b'{"z":1.0,"a":1,"big":9007199254740993,"huge":123456789012345678901234567890,"e":1e2}}},'
    b'{"type":"function","function":{"name":"a","parameters":{"required":["y","x"],"n":null}}},'
    b'{"unknown_field":{"b":[ 1 , 2.50 ],"a":-0.0}}],\n\t"temperature":0.70'
)


@pytest.mark.parametrize("endpoint", JSON_ENDPOINTS)
async def test_the_request_body_reaches_the_engine_as_it_was_sent(endpoint: str) -> None:
    raw = TOOLS + b"}"
    for _ in range(3):  # a new gateway each time: nothing depends on a process's hash seed
        async with stand(answer_plainly) as s:
            for _ in range(17):
                seen = await ask(
                    s.port, endpoint, raw, headers={"content-type": "application/json"}
                )
                assert seen.status == 200
            assert [(got.method, got.target) for got in s.engines[0].got] == [
                ("POST", endpoint)
            ] * 17
            assert {got.body for got in s.engines[0].got} == {raw}
            assert s.steer.asked[0].body == json.loads(raw)
            await s.settled()


@pytest.mark.parametrize("options", [b"", b',"stream_options":{"x":1.0,"include_usage":false}'])
async def test_a_stream_gets_include_usage_spliced_in_and_nothing_else(options: bytes) -> None:
    raw = TOOLS + b',"stream": true' + options + b"}"
    async with stand(answer_plainly) as s:
        seen = await ask(s.port, CHAT, raw)
        assert b"usage" not in seen.body
        (got,) = s.engines[0].got
        if options:
            x = b'{"x":1.0,"include_usage":true}'
            expected_body = {**json.loads(raw), "stream_options": json.loads(x)}
            assert json.loads(got.body) == expected_body
            assert TOOLS[TOOLS.index(b'[{"type"') : TOOLS.index(b",\n")] in got.body
        else:
            assert got.body == b'{"stream_options":{"include_usage":true},' + raw[1:]
        await s.settled()
        (outcome,) = s.steer.outcomes
        counts = (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens)
        assert counts == (10, 4, 3)


async def test_a_client_that_asked_for_usage_gets_exactly_the_direct_bytes() -> None:
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    async with stand(answer_plainly) as s:
        direct = await ask(int(s.engines[0].url.rsplit(":", 1)[1]), CHAT, body)
        through = await ask(s.port, CHAT, body)
        assert through.body == direct.body
        assert b'"usage"' in through.body
        assert s.engines[0].got[0].body == s.engines[0].got[1].body
        assert through.headers["content-type"] == direct.headers["content-type"]
        plain = [
            (await ask(port, "/v1/completions", {"model": "m"})).body
            for port in (s.port, int(s.engines[0].url.rsplit(":", 1)[1]))
        ]
        assert plain[0] == plain[1] == completion()


async def test_every_answer_says_who_and_why() -> None:
    async with stand(answer_plainly) as s:
        seen = await ask(s.port, CHAT, {"model": "m"}, headers={"x-request-id": "abc-1"})
        assert seen.headers["x-request-id"] == "abc-1"
        assert seen.headers["x-kvatlas-worker"] == "w0"
        assert seen.headers["x-kvatlas-expected-hit-tokens"] == "0"
        assert seen.headers["x-kvatlas-fallback"] == "lookup: round_robin"
        assert s.engines[0].got[0].headers["x-request-id"] == "abc-1"
        for bad in ("", "a b", "x" * 129, "caf\u00e9"):
            seen = await ask(s.port, CHAT, {"model": "m"}, headers={"x-request-id": bad})
            assert len(seen.headers["x-request-id"]) == 32
            assert s.engines[0].got[-1].headers["x-request-id"] == seen.headers["x-request-id"]


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-kvatlas-deadline-ms"])
async def test_a_time_in_a_header_wins_over_the_configured_one(name: str) -> None:
    async with stand(answer_plainly, ttft_slo_s=2.5, deadline_s=60) as s:
        for given, told_s in (("250", 0.25), ("0.5", 0.0005), ("86400000", 86400.0), (None, 0.0)):
            headers = {name: given} if given else {}
            await ask(s.port, CHAT, {"model": "m"}, headers=headers)
            asked = s.steer.asked[-1]
            slo_s, deadline_s = (told_s, 60) if name == "x-slo-ttft-ms" else (2.5, told_s)
            assert asked.ttft_slo_s == (slo_s or 2.5)
            assert asked.deadline_s == (deadline_s or 60)
            assert s.steer.routes[-1].deadline_s == asked.deadline_s
    async with stand(answer_plainly) as s:
        await ask(s.port, CHAT, {"model": "m"})
        assert s.steer.asked[-1].ttft_slo_s == s.steer.asked[-1].deadline_s == math.inf


BAD_TIMES = ["", "0", "-1", "1e3", "0x10", "nan", "inf", "1,5", "1 s", "86400001", "9" * 400, "٢"]


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-kvatlas-deadline-ms"])
async def test_a_header_that_is_no_time_is_named(name: str) -> None:
    async with stand(answer_plainly) as s:
        for bad in BAD_TIMES:
            headers = {name: bad.encode().decode("latin-1")}
            seen = await ask(s.port, CHAT, {"model": "m"}, headers=headers)
            error = seen.error()
            assert (seen.status, error["code"], error["param"]) == (400, "bad_header", name)
            assert name in str(error["message"])
            assert len(str(error["message"])) < 300
        assert not s.steer.asked


async def test_a_priced_route_has_no_fallback_header_and_its_own_request_headers() -> None:
    async with stand(answer_plainly) as s:
        rank = (("X-Data-Parallel-Rank", "3"),)
        target = Target(worker="w0", url=s.engines[0].url, headers=rank, expected_hit_tokens=1536)

        async def choose(request: object) -> Route:
            s.steer.routes.append(Route(id="r", targets=(target,)))
            return s.steer.routes[-1]

        s.steer.choose = choose  # type: ignore[method-assign,assignment]
        headers = {
            "x-data-parallel-rank": "9",
            "authorization": "Bearer k",
            "accept-encoding": "gzip",
            "connection": "x-private, keep-alive",
            "x-private": "1",
            "te": "trailers",
            "x-kvatlas-anything": "1",
            "traceparent": "00-1-2-01",
        }
        seen = await ask(s.port, CHAT, {"model": "m"}, headers=headers)
        assert seen.headers["x-kvatlas-expected-hit-tokens"] == "1536"
        assert "x-kvatlas-fallback" not in seen.headers
        got = s.engines[0].got[0].headers
        assert got["x-data-parallel-rank"] == "3"
        assert got["authorization"] == "Bearer k"
        assert got["traceparent"] == "00-1-2-01"
        for name in ("accept-encoding", "connection", "x-private", "te", "x-kvatlas-anything"):
            assert name not in got
        assert s.metric("kvatlas_expected_hit_tokens_total") == 1536


async def test_headers_of_the_engine_pass_but_for_those_of_its_connection() -> None:
    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        extra = "Connection: X-Hop\r\nX-Hop: 1\r\nX-Kvatlas-Worker: forged\r\nX-Other: 2\r\n"
        extra += "X-Request-Id: another\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
        writer.write(whole(b"{}", extra=extra))

    async with stand(behave) as s:
        seen = await ask(s.port, CHAT, {"model": "m"}, headers={"x-request-id": "mine"})
        assert seen.headers["x-other"] == "2"
        assert "x-hop" not in seen.headers
        assert seen.headers["x-kvatlas-worker"] == "w0"
        assert seen.headers["x-request-id"] == "mine"


async def test_other_bodies_pass_as_they_are() -> None:
    """Multipart, and no body at all: routed by load, counted as the rest."""
    raw = b"--b\r\ncontent-disposition: form-data\r\n\r\n\x00\xff{\r\n--b--\r\n"
    form = {"content-type": "multipart/form-data; boundary=b"}
    async with stand(answer_plainly) as s:
        seen = await ask(s.port, "/v1/audio/transcriptions", raw, headers=form)
        assert seen.status == 200
        assert s.engines[0].got[0].body == raw
        assert s.steer.asked[0].body == {}
        assert (await ask(s.port, "/v1/loads")).status == 200
        assert s.engines[0].got[1].method == "GET"
        assert "content-length" not in s.engines[0].got[1].headers
        await s.settled()


async def test_chunk_boundaries_of_the_engine_do_not_matter() -> None:
    text = completion() * 1
    pieces = [text[i : i + 1] for i in range(len(text))]

    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        if got.json().get("whole"):
            writer.write(whole(text))
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(chunk(piece))
            await asyncio.sleep(0)
        writer.write(STREAM_END)

    async with stand(behave) as s:
        for body in ({"model": "m"}, {"model": "m", "whole": True}):
            seen = await ask(s.port, "/v1/completions", body)
            assert seen.body == text
        assert s.metric("kvatlas_prompt_tokens_total") == 20
        assert s.metric("kvatlas_cached_tokens_total") == 8


async def test_large_bodies_pass_both_ways() -> None:
    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(got.body))
        await writer.drain()

    raw = b'{"model":"m","messages":[{"content":"' + "é日🧭".encode() * 1_500_000 + b'"}]}'
    async with stand(behave) as s:
        seen = await ask(s.port, CHAT, raw)
        assert s.engines[0].got[0].body == raw
        assert seen.body == raw
        assert s.metric("kvatlas_usage_unreported_total") == 1


async def test_no_client_makes_an_engine_report_its_hits_as_stores() -> None:
    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(got.body))
        await writer.drain()

    head = b'{"model":"m","prompt":"a","vllm_xargs":'
    async with stand(behave) as s:
        await ask(s.port, "/v1/completions", head + b'{"x":1.0,"kv_cache_report_mode":"full"}}')
        await ask(s.port, "/v1/completions", head + b'{"x":1.0}}')
        bodies = [got.body for got in s.engines[0].got]
        assert bodies == [head + b'{"x":1.0}}'] * 2
        assert s.metric("kvatlas_reports_dropped_total") == 1


async def test_a_hundred_streams_at_once() -> None:
    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for index in range(20):
            writer.write(chunk(f"data: {got.json()['seed']}-{index} é\n\n".encode()))
            await asyncio.sleep(0)
        writer.write(chunk(b"data: [DONE]\n\n") + STREAM_END)

    async with stand(behave, behave) as s:
        bodies = [{"model": "m", "stream": True, "seed": i} for i in range(100)]
        seen = await asyncio.gather(*(ask(s.port, CHAT, body) for body in bodies))
        for index, one in enumerate(seen):
            events = [f"data: {index}-{i} é\n\n" for i in range(20)]
            assert one.body.decode() == "".join(events) + "data: [DONE]\n\n"
        assert [len(engine.got) for engine in s.engines] == [50, 50]
        await s.settled()


# ---- who is counted


@pytest.mark.parametrize(
    ("endpoint", "extra"),
    [
        (CHAT, {}),
        (CHAT, {"stream": True}),
        ("/v1/completions", {}),
        ("/v1/completions", {"prompt": [1, 2, 3], "stream": True}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/anything/else", {}),
    ],
)
async def test_requests_in_flight_are_counted_on_every_endpoint(
    endpoint: str, extra: dict[str, object]
) -> None:
    """vllm-project/router#179: pass-through requests were routed but never counted."""
    release = asyncio.Event()

    async def hold(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await answer_plainly(engine, got, writer)

    async with stand(*[hold] * 4) as s:
        asks = [
            asyncio.ensure_future(ask(s.port, endpoint, {"model": "m", **extra})) for _ in range(60)
        ]
        await eventually(lambda: sum(s.steer.in_flight.values()) == 60)
        assert s.metric("kvatlas_requests_in_flight") == 60
        assert set(s.steer.in_flight.values()) == {15}
        release.set()
        assert {seen.status for seen in await asyncio.gather(*asks)} == {200}
        await s.settled()
        assert len(s.steer.outcomes) == 60


# ---- salt


async def test_the_salt_of_the_header_reaches_engine_and_steer_alike() -> None:
    headers = {"x-kvatlas-cache-salt": "tenant-1"}
    async with stand(answer_plainly) as s:
        for raw in (TOOLS + b"}", TOOLS + b',"cache_salt":"forged"}'):
            assert (await ask(s.port, CHAT, raw, headers=headers)).status == 200
            got = s.engines[0].got[-1]
            assert got.json() == {**json.loads(raw), "cache_salt": "tenant-1"}
            assert "x-kvatlas-cache-salt" not in got.headers
            assert own_salt(s.steer.asked[-1]) == "tenant-1"
        raw = TOOLS + b',"cache_salt":"own"}'
        await ask(s.port, CHAT, raw)
        assert s.engines[0].got[-1].body == raw


async def test_a_salt_that_cannot_be_written_is_refused() -> None:
    headers = {"x-kvatlas-cache-salt": "t", "content-type": "multipart/form-data; boundary=b"}
    async with stand(answer_plainly) as s:
        seen = await ask(s.port, "/v1/audio/transcriptions", b"--b--\r\n", headers=headers)
        assert seen.status == 400
        assert seen.error()["code"] == "salt_without_json"
        assert not s.engines[0].got


# ---- the gateway's own pages


async def test_models_are_listed_and_looked_up() -> None:
    async with stand(answer_plainly) as s:
        s.steer._models = {"org/m": {"id": "org/m", "object": "model"}}
        listed = json.loads((await ask(s.port, "/v1/models")).body)
        assert listed == {"object": "list", "data": [{"id": "org/m", "object": "model"}]}
        one = json.loads((await ask(s.port, "/v1/models/org/m")).body)
        assert one == {"id": "org/m", "object": "model"}
        for seen in (
            await ask(s.port, "/v1/models/other"),
            await ask(s.port, CHAT, {"model": "other"}),
        ):
            assert seen.status == 404
            assert seen.error()["param"] == "model"
            assert "org/m" in str(seen.error()["message"])
        assert not s.engines[0].got
        assert (await ask(s.port, "/v1/models", b"{}")).status == 405


async def test_pages_of_the_service() -> None:
    async def explain(rest: str) -> object:
        if rest == "missing":
            raise RequestError("no request 'missing' is remembered", status=404, code="unknown_id")
        return {"id": rest}

    async def workers(rest: str) -> object:
        return "text"

    async with stand(pages={"/kvatlas/explain/": explain, "/kvatlas/workers": workers}) as s:
        assert json.loads((await ask(s.port, "/kvatlas/explain/a%2Fb")).body) == {"id": "a/b"}
        assert (await ask(s.port, "/kvatlas/explain/missing")).error()["code"] == "unknown_id"
        assert (await ask(s.port, "/kvatlas/workers")).body == b"text"
        assert (await ask(s.port, "/kvatlas/workers/x")).status == 404
        assert "version" in json.loads((await ask(s.port, "/version")).body)
        assert (await ask(s.port, "/metrics", b"{}")).status == 405


async def test_head_and_options() -> None:
    async with stand(answer_plainly) as s:
        async with Client.to(s.port) as client:
            await client.send("HEAD", "/health")
            assert int((await client.head()).headers["content-length"]) > 0
            for path in ("/health", CHAT, "*"):
                await client.send("OPTIONS", path)
                seen = await client.head()
                assert seen.status == 204
                assert "GET" in seen.headers["allow"]
            await client.send("GET", "/version")
            assert (await client.rest(await client.head())).status == 200
        assert not s.engines[0].got


async def test_metrics_count_what_happened() -> None:
    async with stand(answer_plainly) as s:
        await ask(s.port, CHAT, {"model": "m", "stream": True})
        await ask(s.port, "/v1/completions", {"model": "m"})
        await ask(s.port, "/v1/embeddings", {"model": "m"})
        await ask(s.port, CHAT, b"{")
        page = await ask(s.port, "/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = page.body.decode()
        assert 'kvatlas_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in text
        assert 'kvatlas_requests_total{endpoint="/v1/chat/completions",status="400"} 1.0' in text
        assert 'kvatlas_prompt_tokens_total{source="hbm",worker="w0"} 8.0' in text
        assert 'kvatlas_prompt_tokens_total{source="computed",worker="w0"} 12.0' in text
        assert 'kvatlas_cached_tokens_total{worker="w0"} 8.0' in text
        assert 'kvatlas_completion_tokens_total{worker="w0"} 6.0' in text
        labels = 'reason="round_robin",rung="lookup",to="by_load",worker=""'
        assert f"kvatlas_fallbacks_total{{{labels}}} 3.0" in text
        assert s.metric("kvatlas_ttft_seconds_count") == 3
        assert s.metric("kvatlas_route_seconds_count") == 3
        assert len(s.steer.firsts) == 3
        streamed, *whole = s.steer.outcomes
        assert streamed.e2e_s >= streamed.ttft_s > 0
        assert [outcome.ttft_s for outcome in whole] == [-1.0, -1.0]  # of three tokens the last


@pytest.mark.parametrize("stream", [False, True])
async def test_impossible_usage_is_counted_flagged_and_not_believed(stream: bool) -> None:
    """sgl-project/sglang#25972: cached tokens above prompt tokens."""
    text = completion(prompt=2000, cached=2001)

    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        if not stream:
            writer.write(whole(text))
            return
        event = json.dumps({"choices": [], "usage": json.loads(text)["usage"]}).encode()
        writer.write(STREAM_HEAD + chunk(b"data: " + event + b"\n\ndata: [DONE]\n\n") + STREAM_END)

    async with stand(behave) as s:
        assert json.loads((await ask(s.port, "/health")).body)["flags"] == []
        body: dict[str, object] = {"model": "m", "stream": stream}
        body["stream_options"] = {"include_usage": True}
        seen = await ask(s.port, CHAT, body)
        assert b"2001" in seen.body  # the engine's own bytes, for the client to see
        assert s.metric("kvatlas_usage_violations_total") == 1
        assert s.metric("kvatlas_cached_tokens_total") == 0
        assert s.steer.outcomes[0].cached_tokens == -1
        health = json.loads((await ask(s.port, "/health")).body)
        assert health["status"] == "degraded"
        assert "usage_violations" in health["flags"]
        assert "2001" in health["details"]["usage_violations"]["last"]


async def test_answers_without_usage_are_counted_as_such() -> None:
    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        if got.json()["model"] == "gzip":  # although nobody asked for it
            writer.write(whole(b"\x1f\x8b", extra="content-encoding: gzip\r\n"))
        else:
            writer.write(whole(b'{"choices":[]}'))

    async with stand(behave) as s:
        assert (await ask(s.port, CHAT, {"model": "gzip"})).body == b"\x1f\x8b"
        await ask(s.port, CHAT, {"model": "m"})
        assert s.metric("kvatlas_usage_unreported_total") == 2


# ---- draining


async def test_drain_fails_ready_refuses_new_work_and_lets_streams_end() -> None:
    release = asyncio.Event()

    async def hold(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await release.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + STREAM_END)

    async with stand(hold, drain_timeout_s=5.0) as s:
        assert (await ask(s.port, "/ready")).status == 200
        async with Client.to(s.port) as client:
            await client.send("POST", CHAT, b'{"model":"m","stream":true}')
            seen = await client.head()
            seen.body += await client.chunk()
            draining = asyncio.ensure_future(s.gateway.drain())
            await eventually(lambda: s.gateway._server.draining)
            assert (await ask(s.port, "/ready")).status == 503
            health = await ask(s.port, "/health")
            assert health.status == 200
            assert "draining" in json.loads(health.body)["flags"]
            refused = await ask(s.port, CHAT, {"model": "m"})
            assert (refused.status, refused.error()["code"]) == (503, "shutting_down")
            assert refused.headers["retry-after"] == "1"
            release.set()
            await client.rest(seen)
            assert seen.complete
            assert seen.body == b"data: 1\n\ndata: [DONE]\n\n"
            assert await draining


async def test_not_ready_without_an_engine() -> None:
    async with stand(engines_more={}) as s:
        assert (await ask(s.port, "/ready")).status == 503
        refused: Seen = await ask(s.port, CHAT, {"model": "m"})
        assert (refused.status, refused.error()["code"]) == (503, "no_engine")
