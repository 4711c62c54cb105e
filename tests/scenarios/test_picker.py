"""The endpoint picker on the assembled product, asked as Envoy asks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpc_health.v1 import health_pb2
from harness import FakeWorker, Product, fresh_tokens
from picker_kit import Proxy, picking
from stub_publisher import BLOCK, block_tokens, stored

from kvatlas.config import GatewayConfig
from kvatlas.service.http import Limits

USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 16},
}
WHOLE = json.dumps({"choices": [{"text": "x"}], "usage": USAGE}).encode()
EVENTS = [b'data: {"choices": [{"text": "%d"}]}\n\n' % i for i in range(3)]
USAGE_EVENT = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def stage(
    count: int = 2, *, gateway: GatewayConfig | None = None, **picker: Any
) -> AsyncIterator[tuple[list[FakeWorker], Product, Proxy]]:
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(f"W{i}")) for i in range(count)]
        product = await stack.enter_async_context(
            Product([w.config() for w in workers], gateway=gateway)
        )
        for worker in workers:
            await worker.heard()
        await product.settled()
        yield workers, product, await stack.enter_async_context(picking(product, **picker))


def prompt(path: str) -> list[int]:
    return [*block_tokens(path), 0]


def ask(path: str = "ab", **more: object) -> dict[str, object]:
    return {"model": "m", "prompt": prompt(path), "max_tokens": 4} | more


def endpoint(worker: FakeWorker) -> str:
    return worker.config().url.removeprefix("http://")


async def at_rest(product: Product) -> None:
    """No request is counted anywhere."""

    async def so() -> bool:
        flight = await product.metric("kvatlas_requests_in_flight")
        return not await product.in_flight() and not flight

    await product.until(so)


async def outcomes(product: Product, status: int) -> float:
    return await product.metric("kvatlas_worker_outcomes_total", status=str(status))


# -- picking --------------------------------------------------------------------------------------


async def test_a_request_goes_to_the_holder_and_what_came_of_it_is_learnt() -> None:
    async with stage() as (workers, product, proxy):
        workers[1].events.publish(stored("ab", 2))
        await product.answers("ab", {"W1": 2})
        async with proxy.stream() as stream:
            head = {"x-request-id": "r1", "accept-encoding": "gzip", "x-kvatlas-cache-salt": ""}
            told = await stream.ask(ask(), headers=head)
            assert told.endpoints == [endpoint(workers[1]), endpoint(workers[0])]
            assert told.clears_route
            assert json.loads(told.body) == ask()
            assert {"accept-encoding", "x-kvatlas-cache-salt"} <= set(told.removed)
            assert "x-request-id" not in told.headers
            assert await product.in_flight() == {"W1": 1}
            got = await stream.answer([WHOLE[:20], WHOLE[20:]])
            assert got.body == WHOLE
            assert got.headers["x-kvatlas-worker"] == "W1"
            assert got.headers["x-kvatlas-expected-hit-tokens"] == str(2 * BLOCK)
        await at_rest(product)
        assert await product.metric("kvatlas_cached_tokens_total", worker="W1") == 16
        assert await outcomes(product, 200) == 1
        text = (await product.get("/kvatlas/explain/r1")).body.decode()
        assert re.search(r"(?m)^→ W1 .*resumes at 8", text)
        assert "ended with status 200 on W1; engine reused 16 tokens" in text


async def test_decisions_are_those_of_the_gateway_for_the_same_state() -> None:
    """Each prefix lies at another depth in each of four engines: both rank them alike."""
    paths = ["abcdef", "ghijkl", "mnopqr", "stuvwx"]
    async with stage(4) as (workers, product, proxy):
        for turn, path in enumerate(paths):
            depths = {}
            for index, worker in enumerate(workers):
                depth = 1 + (index + turn) % 4
                worker.events.publish(stored(path[:depth], depth))
                depths[worker.name] = depth
            await product.answers(path, depths)
        names = {endpoint(worker): worker.name for worker in workers}
        for turn, path in enumerate(paths):
            body = ask(path, max_tokens=0)
            asked = await product.post("/v1/completions", body, {"x-request-id": f"g{turn}"})
            async with proxy.stream() as stream:
                told = await stream.ask(body, headers={"x-request-id": f"p{turn}"})
            await at_rest(product)
            texts = [
                (await product.get(f"/kvatlas/explain/{id}{turn}")).body.decode() for id in "gp"
            ]
            ranked = [re.findall(r"(?m)^[→ ] (W\d) .*resumes at (\d+)", text) for text in texts]
            assert ranked[0] == ranked[1]
            assert [names[e] for e in told.endpoints] == [worker for worker, _ in ranked[0]]
            assert asked.worker == names[told.endpoints[0]]


async def test_usage_is_asked_for_and_kept_from_a_client_that_did_not() -> None:
    async with stage() as (_, product, proxy):
        async with proxy.stream() as stream:
            told = await stream.ask(ask(stream=True))
            sent = json.loads(told.body)
            assert sent["stream_options"] == {"include_usage": True}
            assert told.headers["content-length"] == str(len(told.body))
            pieces = [*EVENTS, USAGE_EVENT[:30], USAGE_EVENT[30:], DONE]
            got = await stream.answer(pieces, kind="text/event-stream")
            assert got.body == b"".join(EVENTS) + DONE
        await at_rest(product)
        assert await product.metric("kvatlas_cached_tokens_total") == 16
        async with proxy.stream() as stream:  # one who asks gets it, and the body as it was
            body = ask(stream=True, stream_options={"include_usage": True})
            told = await stream.ask(body)
            assert json.loads(told.body) == body
            assert "content-length" not in told.headers
            got = await stream.answer([*EVENTS, USAGE_EVENT, DONE], kind="text/event-stream")
            assert USAGE_EVENT in got.body


async def test_a_long_body_goes_on_in_pieces_that_every_proxy_takes() -> None:
    async with stage() as (_, _, proxy), proxy.stream() as stream:
        told = await stream.ask(ask(user="x" * 300_000))
        assert json.loads(told.body) == ask(user="x" * 300_000)
        assert told.replies > 300_000 / 64_000


@contextlib.asynccontextmanager
async def halves(pairing: str, bootstrap: str) -> AsyncIterator[tuple[str, Product, Proxy]]:
    """A prefill half and a decode half; where the second one is."""
    async with contextlib.AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(FakeWorker(f"W{i}")) for i in range(2)]
        configs = [
            first.config(role="prefill", pairing=pairing, bootstrap=bootstrap),
            second.config(role="decode", pairing=pairing),
        ]
        product = await stack.enter_async_context(Product(configs))
        await product.settled()
        yield endpoint(second), product, await stack.enter_async_context(picking(product))


async def test_where_engines_are_halves_one_of_them_gets_all_of_it() -> None:
    """A proxy carries a request to one endpoint; the gateway would split it."""
    async with halves("nixl", "") as (second, product, proxy):
        async with proxy.stream() as stream:
            told = await stream.ask(ask(kv_transfer_params={"remote_host": "x"}))
            assert told.endpoints == [second]
            assert "kv_transfer_params" not in json.loads(told.body)
            assert await product.in_flight() == {"W1": 1}
            await stream.answer([WHOLE])
        await at_rest(product)
        assert await outcomes(product, 200) == 1


async def test_halves_that_cannot_serve_all_of_it_are_not_picked() -> None:
    async with (
        halves("sglang", "http://127.0.0.1:1") as (_, product, proxy),
        proxy.stream() as stream,
    ):
        told = await stream.ask(ask())
        assert (told.status, told.error()["code"]) == (503, "no_pair")
        await at_rest(product)


async def test_a_request_without_a_body_goes_by_load() -> None:
    async with stage() as (_, product, proxy):
        async with proxy.stream() as stream:
            await stream.ask_head("/v1/models", method="GET", end=True)
            reply = await stream.read()
            assert reply.WhichOneof("response") == "request_headers"
            got = await stream.answer([b"{}"])
            assert got.headers["x-kvatlas-fallback"] == "lookup: no_prompt"
        await at_rest(product)
        assert await outcomes(product, 200) == 1


async def test_trailers_end_a_body_too() -> None:
    trailers = ext_proc.HttpTrailers()
    async with stage() as (_, product, proxy):
        async with proxy.stream() as stream:
            await stream.ask_head()
            raw = json.dumps(ask()).encode()
            await stream.send(request_body=ext_proc.HttpBody(body=raw))
            await stream.send(request_trailers=trailers)
            kinds = [(await stream.read()).WhichOneof("response") for _ in range(3)]
            assert kinds == ["request_headers", "request_body", "request_trailers"]
            await stream.answer_head()
            await stream.send(response_body=ext_proc.HttpBody(body=WHOLE))
            await stream.send(response_trailers=trailers)
            assert (await stream.read()).response_body.response.body_mutation
            assert (await stream.read()).WhichOneof("response") == "response_trailers"
            assert await stream.code() == ("OK", "")
        await at_rest(product)
        assert await product.metric("kvatlas_cached_tokens_total") == 16


@pytest.mark.parametrize("stream_it", [False, True])
async def test_bodies_that_come_buffered_or_streamed(stream_it: bool) -> None:
    """One reply for each message; the head of a buffered request is changed with its body."""
    raw = json.dumps(ask(stream=stream_it)).encode()
    async with stage() as (workers, product, proxy):
        async with proxy.stream(("BUFFERED", "STREAMED")) as stream:
            await stream.ask_head(headers={"content-length": str(len(raw))})
            assert not (await stream.read()).request_headers.response.HasField("header_mutation")
            await stream.send(request_body=ext_proc.HttpBody(body=raw, end_of_stream=True))
            reply = await stream.read()
            assert reply.HasField("dynamic_metadata")
            common = reply.request_body.response
            named = {h.header.key: h.header.raw_value for h in common.header_mutation.set_headers}
            first = named["x-gateway-destination-endpoint"].decode().split(",")[0]
            assert first in {endpoint(w) for w in workers}
            body = common.body_mutation.body
            assert (b"include_usage" in body) == stream_it
            assert named.get("content-length") == (b"%d" % len(body) if stream_it else None)
            pieces = [*EVENTS, USAGE_EVENT, DONE] if stream_it else [WHOLE]
            await stream.answer_head(kind="text/event-stream" if stream_it else "application/json")
            for piece in pieces:
                body = ext_proc.HttpBody(body=piece, end_of_stream=piece == pieces[-1])
                await stream.send(response_body=body)
                mutation = (await stream.read()).response_body.response.body_mutation
                assert mutation.clear_body == (piece == USAGE_EVENT)
        await at_rest(product)
        assert await product.metric("kvatlas_cached_tokens_total") == 16


async def test_an_answer_that_is_not_shown_teaches_nothing() -> None:
    """Nor is usage asked for: nobody could keep that event from the client."""
    async with stage() as (_, product, proxy):
        async with proxy.stream(("FULL_DUPLEX_STREAMED", "NONE")) as stream:
            told = await stream.ask(ask(stream=True))
            assert json.loads(told.body) == ask(stream=True)
            got = await stream.answer_head(kind="text/event-stream")
            assert got.headers["x-kvatlas-worker"]
            assert await stream.code() == ("OK", "")
        await at_rest(product)
        assert await outcomes(product, 200) == 1
        assert await product.metric("kvatlas_usage_unreported_total") == 0
        assert await product.metric("kvatlas_prompt_tokens_total") == 0


# -- subsets and who answered ---------------------------------------------------------------------


@pytest.mark.parametrize("form", ["list", "text", "address"])
async def test_only_the_subset_is_picked_from(form: str) -> None:
    async with stage(3) as (workers, product, proxy):
        workers[1].events.publish(stored("ab", 2))
        await product.answers("ab", {"W1": 2})
        first, last = endpoint(workers[0]), endpoint(workers[2])
        subset: object = {"list": [first, last], "text": f"{first}, {last}"}.get(form, "127.0.0.1")
        async with proxy.stream() as stream:
            told = await stream.ask(ask(), subset=subset)
        expected = {first, last} if form != "address" else {endpoint(w) for w in workers}
        assert set(told.endpoints) == expected


@pytest.mark.parametrize("subset", [[], "", ["10.0.0.1:80"]])
async def test_nobody_of_the_subset_is_there(subset: object) -> None:
    async with stage() as (_, product, proxy), proxy.stream() as stream:
        told = await stream.ask(ask(), subset=subset)
        assert (told.status, told.error()["code"]) == (503, "no_engine")
        assert told.headers["retry-after"] == "1"
        assert await stream.code() == ("OK", "")
        await at_rest(product)


@pytest.mark.parametrize("told_by", ["served", "upstream"])
async def test_the_proxy_went_down_the_list(told_by: str) -> None:
    """Books and lessons go to who answered; an answer of somebody else teaches nothing."""
    async with stage() as (workers, product, proxy):
        async with proxy.stream() as stream:
            told = await stream.ask(ask())
            second = told.endpoints[1]
            name = next(w.name for w in workers if endpoint(w) == second)
            got = await stream.answer_head(**{told_by: second})
            assert got.headers["x-kvatlas-worker"] == name
            assert await product.in_flight() == {name: 1}
            await stream.send(response_body=ext_proc.HttpBody(body=WHOLE, end_of_stream=True))
            await stream.read()
        await at_rest(product)
        assert await product.metric("kvatlas_cached_tokens_total", worker=name) == 16
        assert await product.metric("kvatlas_fallbacks_total", reason="proxy") == 1
        async with proxy.stream() as stream:
            await stream.ask(ask("cd"))
            await stream.answer([WHOLE], served="10.9.9.9:80")
        await at_rest(product)
        assert await product.metric("kvatlas_cached_tokens_total") == 16
        assert await outcomes(product, 502) == 2


async def test_an_answer_of_somebody_whom_nobody_picked() -> None:
    """No engine of ours is named, and the usage event that we asked for stays ours."""
    async with stage() as (_, product, proxy):
        async with proxy.stream() as stream:
            assert b"include_usage" in (await stream.ask(ask(stream=True))).body
            pieces = [*EVENTS, USAGE_EVENT, DONE]
            got = await stream.answer(pieces, served="10.9.9.9:80", kind="text/event-stream")
            assert got.body == b"".join([*EVENTS, DONE])
            assert got.headers["x-request-id"]
            assert not {"x-kvatlas-worker", "x-kvatlas-expected-hit-tokens"} & set(got.headers)
        await at_rest(product)
        assert await outcomes(product, 502) == 1
        for name in ("cached_tokens_total", "usage_unreported_total", "ttft_seconds_count"):
            assert await product.metric(f"kvatlas_{name}") == 0


# -- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (ask(model="other"), 404, "model_not_found"),
        (b"{", 400, "bad_json"),
        (b"", 400, "bad_json"),
        (b"[" * 100_000, 400, "bad_json"),
    ],
)
async def test_refusals_are_those_of_the_gateway(body: object, status: int, code: str) -> None:
    async with stage() as (_, product, proxy), proxy.stream() as stream:
        told = await stream.ask(body)
        assert (told.status, told.error()["code"]) == (status, code)
        assert told.headers["content-type"] == "application/json"
        assert await product.metric("kvatlas_requests_total", status=str(status)) == 1


async def test_a_huge_body_whether_it_tells_its_length_or_not() -> None:
    async with stage(gateway=GatewayConfig(port=0, max_body_bytes=100_000)) as (_, _, proxy):
        async with proxy.stream() as stream:
            await stream.ask_head(headers={"content-length": "100001"})
            assert (await stream.told()).error()["code"] == "body_too_large"
        async with proxy.stream() as stream:
            await stream.ask_head()
            for _ in range(2):
                await stream.send(request_body=ext_proc.HttpBody(body=b" " * 60_000))
            assert (await stream.told()).status == 413


@pytest.mark.parametrize(
    ("modes", "head", "said"),
    [
        (("STREAMED", "STREAMED"), {}, "request_body_mode is STREAMED: set FULL_DUPLEX_STREAMED"),
        (("NONE", "NONE"), {}, "request_body_mode is NONE"),
        (None, {"observability_mode": True}, "observability_mode is on"),
    ],
)
async def test_a_proxy_that_is_set_up_wrongly_is_told_how(
    modes: tuple[str, str] | None, head: dict[str, Any], said: str
) -> None:
    async with stage() as (_, _, proxy), proxy.stream(modes) as stream:
        await stream.ask_head(**head)
        code, text = await stream.code()
        assert code == "FAILED_PRECONDITION"
        assert said in text


async def test_messages_out_of_order_end_the_stream_alone() -> None:
    body = ext_proc.HttpBody(body=b"{}", end_of_stream=True)
    async with stage() as (_, product, proxy):
        async with proxy.stream() as stream:
            await stream.send(request_body=body)
            assert (await stream.code())[0] == "FAILED_PRECONDITION"
        async with proxy.stream() as stream:
            await stream.ask(ask())
            await stream.send(request_body=body)
            assert (await stream.code())[0] == "FAILED_PRECONDITION"
        async with proxy.stream() as stream:
            await stream.ask(ask())
            assert (await stream.answer([WHOLE])).body == WHOLE
        await at_rest(product)


# -- who leaves, who waits, who is too many -------------------------------------------------------


@pytest.mark.parametrize("when", ["headers", "body", "picked", "answer head", "answer"])
async def test_a_client_that_leaves_frees_everything(when: str) -> None:
    async with stage() as (_, product, proxy):
        async with proxy.stream() as stream:
            if when in ("headers", "body"):
                await stream.ask_head()
                if when == "body":
                    await stream.send(request_body=ext_proc.HttpBody(body=b"{"))
            else:
                await stream.ask(ask(stream=True))
                if when != "picked":
                    await stream.answer_head(kind="text/event-stream")
                if when == "answer":
                    await stream.send(response_body=ext_proc.HttpBody(body=EVENTS[0]))
                    await stream.read()
        await at_rest(product)
        chosen = when not in ("headers", "body")
        await product.until_equal(lambda: outcomes(product, 499), int(chosen))


async def test_equal_ids_do_not_share_books() -> None:
    async with stage() as (_, product, proxy):
        async with proxy.stream() as one, proxy.stream() as two:
            head = {"x-request-id": "same"}
            first = await one.ask(ask(), headers=head)
            second = await two.ask(ask("cd"), headers=head)
            assert "x-request-id" not in first.headers
            assert second.headers["x-request-id"].startswith("same#")
            assert sum((await product.in_flight()).values()) == 2
            await one.answer([WHOLE])
            assert sum((await product.in_flight()).values()) == 1
            await two.answer([WHOLE])
        await at_rest(product)


async def test_streams_have_a_limit() -> None:
    async with stage(max_streams=1) as (_, product, proxy):
        async with proxy.stream() as one:
            await one.ask(ask())
            async with proxy.stream() as two:
                with contextlib.suppress(grpc.aio.AioRpcError):  # it may have ended before that
                    await two.ask_head()
                code, text = await two.code()
                assert (code, text) == ("RESOURCE_EXHAUSTED", "over picker.max_streams (1)")
            await one.answer([WHOLE])
        await at_rest(product)
        async with proxy.stream() as three:
            await three.ask(ask())


async def test_bodies_together_have_a_limit() -> None:
    limits = Limits(bodies_bytes_max=1000)
    async with stage(limits=limits) as (_, product, proxy):
        async with proxy.stream() as one, proxy.stream() as two:
            for stream in (one, two):
                await stream.ask_head()
                await stream.send(request_body=ext_proc.HttpBody(body=b" " * 600))
            codes = asyncio.as_completed([one.code(), two.code()])
            assert (await next(iter(codes)))[0] == "RESOURCE_EXHAUSTED"
        await at_rest(product)
        async with proxy.stream() as stream:  # what was held is free again
            await stream.ask(ask(user="x" * 600))


async def test_a_request_that_does_not_arrive_in_time() -> None:
    limits = Limits(body_timeout_s=0.05)
    async with stage(limits=limits) as (_, _, proxy), proxy.stream() as stream:
        await stream.ask_head()
        told = await stream.told()
        assert (told.status, told.error()["code"]) == (408, "timeout")


async def times_out(product: Product, proxy: Proxy, code: str) -> None:
    """An engine that does not go on: before its head, and after it."""
    async with proxy.stream() as stream:
        await stream.ask(ask())
        told = await stream.told()
        assert (told.status, told.error()["code"]) == (504, code)
    async with proxy.stream() as stream:
        await stream.ask(ask())
        await stream.answer_head()
        assert (await stream.code())[0] == "DEADLINE_EXCEEDED"
    await at_rest(product)
    assert await outcomes(product, 504) == 2


async def test_an_engine_that_falls_silent() -> None:
    quick = GatewayConfig(port=0, engine_idle_timeout_s=0.2)
    async with stage(gateway=quick) as (_, product, proxy):
        await times_out(product, proxy, "engine_timeout")


async def test_a_deadline_that_ends_at_an_engine() -> None:
    quick = GatewayConfig(port=0, deadline_s=0.3)
    async with stage(gateway=quick) as (_, product, proxy):
        await times_out(product, proxy, "deadline_exceeded")
        labels = {"rung": "engine", "reason": "deadline", "to": "error"}
        assert await product.metric("kvatlas_fallbacks_total", **labels) == 2


# -- fails open, health ---------------------------------------------------------------------------


async def test_a_prompt_that_cannot_be_keyed_goes_by_load() -> None:
    async with stage() as (_, _, proxy), proxy.stream() as stream:
        told = await stream.ask({"model": "m", "prompt": "text"})
        assert len(told.endpoints) == 2
        got = await stream.answer([WHOLE])
        assert got.headers["x-kvatlas-fallback"]


async def test_a_fault_of_ours_leaves_it_to_the_proxy() -> None:
    class Broken:
        async def choose(self, request: object) -> object:
            raise ValueError("planted")

    async with stage(steer=Broken()) as (_, product, proxy), proxy.stream() as stream:
        await stream.ask_head()
        body = json.dumps(ask()).encode()
        await stream.send(request_body=ext_proc.HttpBody(body=body, end_of_stream=True))
        assert (await stream.code())[0] == "INTERNAL"
        await product.until_equal(lambda: product.metric("kvatlas_requests_total", status="500"), 1)


async def test_health_is_told_by_grpc() -> None:
    async with stage(1) as (workers, product, proxy):
        check = proxy.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

        async def serving(service: str) -> bool:
            answer = await check(health_pb2.HealthCheckRequest(service=service))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        ready = ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
        for name in ("", "liveness", *ready):
            assert await serving(name)
        with pytest.raises(grpc.aio.AioRpcError, match="no service 'x'"):
            await serving("x")
        await workers[0].close()
        for name in ready:
            await product.until_equal(lambda name=name: serving(name), False)
        assert await serving("liveness")


async def test_many_at_once_come_back_to_zero() -> None:
    async with stage(3) as (_, product, proxy):

        async def one(index: int) -> None:
            async with proxy.stream() as stream:
                body = {"model": "m", "prompt": fresh_tokens(100, index)}
                await stream.ask(body)
                if index % 3:
                    await stream.answer([WHOLE])

        await asyncio.gather(*(one(i) for i in range(48)))
        await at_rest(product)
        assert await outcomes(product, 200) == 32
        assert await outcomes(product, 499) == 16
