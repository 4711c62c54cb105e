"""One deadline for all of a request, and what it falls back to before: through the public wire.

Nobody waits: the clock jumps to the next timer where nothing is to be read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import warp
from harness import COMPLETION, Answer, FakeWorker, Product, answer, fresh_tokens
from pairs_kit import decode, hangs, nixl_prefill, prefill
from test_pairs_concurrent import BOTH, Rooms, WithBootstrap

from kvatlas.config import GatewayConfig, PairingProtocol, RouterConfig
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply

DEADLINE_S = 2.0
DEADLINE = {"x-kvatlas-deadline-ms": "2000"}
STREAMS = pytest.mark.parametrize("stream", [False, True])


class Stood(Product):
    """Notes how long each request took."""

    took_s = 0.0

    async def within(self, headers: dict[str, str] = DEADLINE, **more: Any) -> Answer:
        began_s = time.perf_counter()
        body = {"model": "m", "prompt": fresh_tokens(100), "max_tokens": 4} | more
        got = await self.post(COMPLETION, body, headers)
        self.took_s = time.perf_counter() - began_s
        assert self.took_s < DEADLINE_S + 0.1
        return got

    async def left_behind(self, *workers: FakeWorker) -> None:
        """Nothing: no request is anywhere any more."""
        await self.until_equal(self.in_flight, {})
        async with asyncio.timeout(1.0):  # each engine was told to stop
            while any(worker.busy for worker in workers):
                await asyncio.sleep(0.01)

    async def explained(self) -> str:
        return (await self.get("/kvatlas/explain/last")).body.decode()


def worker(name: str, behave: Callable[..., Any] | None = None) -> FakeWorker:
    return FakeWorker(name, behave, publishes=False)


async def freezes(worker: FakeWorker, request: Request, reply: Reply) -> None:
    """Real engines send the head of a stream before they have begun to compute."""
    if json.loads(request.body).get("stream"):
        reply.start(200, [(b"content-type", b"text/event-stream")])
    await hangs(worker, request, reply)


def decodes_for(seconds: float) -> Callable[..., Any]:
    """Answers then; all the while its own count of tokens grows."""

    async def behave(worker: FakeWorker, request: Request, reply: Reply) -> None:
        for made in range(round(10 * seconds)):
            worker.metrics = [f"vllm:generation_tokens_total {made}"]
            await asyncio.sleep(0.1)
        await answer(worker, request, reply)

    return behave


async def freezes_in_mid_answer(worker: FakeWorker, request: Request, reply: Reply) -> None:
    reply.start(200, [(b"content-type", b"text/event-stream")])
    reply.write(b'data: {"choices": [{"text": "a"}]}\n\n')
    await asyncio.Event().wait()


@STREAMS
def test_a_frozen_first_half_costs_half_of_what_is_left(stream: bool) -> None:
    async def main() -> None:
        async with (
            worker("p", hangs) as p,
            worker("d") as d,
            Stood([prefill(p), decode(d)]) as product,
        ):
            await product.settled()
            got = await product.within(stream=stream)
            assert (got.status, got.worker) == (200, "d")
            assert got.fallback == "prefill: timeout"
            assert product.took_s == pytest.approx(DEADLINE_S / 2, abs=0.05)
            labels = {"rung": "prefill", "reason": "timeout", "to": "engine", "worker": "p"}
            assert await product.metric("kvatlas_fallbacks_total", **labels) == 1
            cost_s = await product.metric("kvatlas_fallback_seconds_total", **labels)
            assert cost_s == pytest.approx(DEADLINE_S / 2, abs=0.05)
            told = "fell back from the prefill half p after 1.0"
            assert told in await product.explained()
            await product.left_behind(p, d)

    warp.run(main())


@STREAMS
def test_a_frozen_second_half_is_left_in_time(stream: bool) -> None:
    async def main() -> None:
        async with (
            worker("p", nixl_prefill) as p,
            worker("d", freezes) as d,
            Stood([prefill(p), decode(d)]) as product,
        ):
            await product.settled()
            got = await product.within(stream=stream)
            assert (got.status, got.worker) == (200, "p")
            assert got.fallback == "decode: timeout"
            assert (b"[DONE]" in got.body) is stream
            labels = {"rung": "decode", "reason": "timeout", "to": "engine", "worker": "d"}
            cost_s = await product.metric("kvatlas_fallback_seconds_total", **labels)
            assert cost_s == pytest.approx(DEADLINE_S / 2, abs=0.05)
            await product.left_behind(p, d)

    warp.run(main())


@pytest.mark.parametrize("ends_s", [0.9 * DEADLINE_S, 2 * DEADLINE_S])
def test_who_gets_on_with_an_answer_that_is_no_stream_keeps_it(ends_s: float) -> None:
    """Nobody knows when it is due: that it is slow is no reason to begin again."""

    async def main() -> None:
        async with (
            worker("p", nixl_prefill) as p,
            worker("d", decodes_for(ends_s)) as d,
            Stood([prefill(p), decode(d)]) as product,
        ):
            await product.settled()
            got = await product.within()
            if ends_s < DEADLINE_S:
                assert (got.status, got.worker, got.fallback) == (200, "d", "")
                assert product.took_s == pytest.approx(ends_s, abs=0.05)
                return
            assert (got.status, got.error["code"]) == (504, "deadline_exceeded")
            assert "2 s ended at the decode half d" in got.error["message"]
            assert got.headers["retry-after"] == "1"
            assert got.fallback == "decode: deadline"
            assert product.took_s == pytest.approx(DEADLINE_S, abs=0.05)
            assert "(deadline) to an error" in await product.explained()
            await product.left_behind(p, d)

    warp.run(main())


def test_an_engine_that_nobody_can_reach_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its packets are dropped. That an answer is no stream does not matter: it was not asked."""
    connect = asyncio.BaseEventLoop.create_connection

    async def dropped(
        loop: Any, factory: Any, host: Any = None, port: Any = None, **more: Any
    ) -> Any:
        if port == lost[0]:
            await asyncio.Event().wait()
        return await connect(loop, factory, host, port, **more)

    lost = [0]

    async def main() -> None:
        async with worker("w1") as w1, worker("w2") as w2:
            w2.running = 50
            gateway = GatewayConfig(port=0, connect_timeout_s=10.0)
            async with Stood([w1.config(), w2.config()], gateway=gateway) as product:
                await product.settled()
                lost[0] = int(w1.config().url.rpartition(":")[2])
                got = await product.within()
                assert (got.status, got.worker, got.fallback) == (200, "w2", "engine: connect")
                assert product.took_s == pytest.approx(DEADLINE_S / 2, abs=0.05)
                assert not w1.got

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", dropped)
    warp.run(main())


@STREAMS
@pytest.mark.parametrize("frozen", [1, 2])
def test_a_frozen_engine_is_left_for_the_next(frozen: int, stream: bool) -> None:
    async def main() -> None:
        names = ["w1", "w2"]
        async with worker("w1", freezes) as w1, worker("w2") as w2:
            w2.behave = freezes if frozen == 2 else answer
            w2.running = 50  # by load the other one comes first
            async with Stood([w1.config(), w2.config()]) as product:
                await product.settled()
                got = await product.within(stream=stream)
                if frozen == 1:
                    assert (got.status, got.worker, got.fallback) == (200, "w2", "engine: timeout")
                    assert product.took_s == pytest.approx(DEADLINE_S / 2, abs=0.05)
                else:
                    assert (got.status, got.error["code"]) == (504, "deadline_exceeded")
                    assert got.fallback == "engine: timeout, engine: deadline"
                    assert product.took_s == pytest.approx(DEADLINE_S, abs=0.05)
                assert [len(w.got) for w in (w1, w2)] == [1, 1], names
                await product.left_behind(w1, w2)

    warp.run(main())


def test_without_a_deadline_a_frozen_engine_is_waited_for() -> None:
    """As long as it may be silent: it has the request, and nobody said that time matters."""

    async def main() -> None:
        gateway = GatewayConfig(port=0, engine_idle_timeout_s=1.5)
        async with worker("w1", freezes) as w1, worker("w2") as w2:
            w2.running = 50
            async with Stood([w1.config(), w2.config()], gateway=gateway) as product:
                await product.settled()
                got = await product.within({}, stream=True)
                assert (got.status, got.error["code"]) == (504, "engine_timeout")
                assert (len(w1.got), len(w2.got)) == (1, 0)

    warp.run(main())


def test_the_configured_deadline_stands_where_the_client_names_none() -> None:
    async def main() -> None:
        gateway = GatewayConfig(port=0, deadline_s=DEADLINE_S)
        async with (
            worker("w1", hangs) as w1,
            Stood([w1.config()], gateway=gateway) as product,
        ):
            await product.settled()
            got = await product.within({})
            assert (got.status, got.error["code"]) == (504, "deadline_exceeded")
            assert product.took_s == pytest.approx(DEADLINE_S, abs=0.05)
            await product.left_behind(w1)

    warp.run(main())


def test_a_body_that_comes_slowly_takes_of_the_deadline() -> None:
    async def main() -> None:
        async with worker("w1", hangs) as w1, Stood([w1.config()]) as product:
            await product.settled()
            reader, writer = await asyncio.open_connection("127.0.0.1", product.port)
            body = json.dumps({"model": "m", "prompt": fresh_tokens(100)})
            head = f"POST {COMPLETION} HTTP/1.1\r\nhost: k\r\ncontent-length: {len(body)}\r\n"
            began_s = time.perf_counter()
            writer.write(f"{head}x-kvatlas-deadline-ms: 2000\r\n\r\n{body[:10]}".encode())
            await asyncio.sleep(1.5)
            writer.write(body[10:].encode())
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 504 ")
            assert time.perf_counter() - began_s == pytest.approx(DEADLINE_S, abs=0.05)
            writer.close()
            await product.left_behind(w1)

    warp.run(main())


def test_after_the_first_byte_the_answer_breaks_with_an_error_event() -> None:
    async def main() -> None:
        async with worker("w1", freezes_in_mid_answer) as w1, worker("w2") as w2:
            w2.running = 50
            async with Stood([w1.config(), w2.config()]) as product:
                await product.settled()
                reader, writer = await asyncio.open_connection("127.0.0.1", product.port)
                body = json.dumps({"model": "m", "prompt": fresh_tokens(100), "stream": True})
                head = f"POST {COMPLETION} HTTP/1.1\r\nhost: k\r\ncontent-length: {len(body)}\r\n"
                writer.write(f"{head}x-kvatlas-deadline-ms: 2000\r\n\r\n{body}".encode())
                seen = (await reader.read()).decode()
                writer.close()
                assert seen.startswith("HTTP/1.1 200 ")
                assert '"text": "a"' in seen
                assert '"code":"deadline_exceeded"' in seen
                assert "at engine w1" in seen
                assert not seen.endswith("0\r\n\r\n")  # it cannot be taken for the whole
                assert (len(w1.got), len(w2.got)) == (1, 0)
                assert "ended with status 504 on w1" in await product.explained()
                await product.left_behind(w1, w2)

    warp.run(main())


def test_a_lookup_that_takes_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with worker("w1") as w1, Stood([w1.config()]) as product:
            await product.settled()
            monkeypatch.setattr(product.assembly.tokenizer, "prompt", never)
            got = await product.within()
            assert (got.status, got.fallback) == (200, "lookup: late")
            assert product.took_s == pytest.approx(DEADLINE_S / 2, abs=0.05)
            monkeypatch.setattr(product.assembly.steering, "choose", never)
            got = await product.within()
            assert (got.status, got.error["code"]) == (504, "deadline_exceeded")
            labels = {"rung": "lookup", "reason": "deadline", "to": "error"}
            assert await product.metric("kvatlas_fallbacks_total", **labels) == 1
            assert len(w1.got) == 1

    warp.run(main())


@BOTH
@pytest.mark.parametrize("leg", ["p", "d"])
def test_a_frozen_leg_of_halves_that_run_at_once(protocol: PairingProtocol, leg: str) -> None:
    """A hundred requests."""
    rooms = Rooms()

    async def main() -> None:
        async with (
            WithBootstrap("p", hangs if leg == "p" else rooms.first, publishes=False) as p,
            worker("d", freezes if leg == "d" else rooms.second) as d,
            worker("c") as c,
        ):
            c.running = 1000  # by price the pair comes first
            halves = [p.half(protocol), decode(d, pairing=protocol), c.config()]
            router = RouterConfig(prefill_tokens_per_s=1e6)  # no queue is too long
            async with Stood(halves, router=router) as product:
                await product.settled()
                answers = await asyncio.gather(*(product.within(stream=True) for _ in range(100)))
                half = "prefill" if leg == "p" else "decode"
                met = [got for got in answers if got.fallback]  # the others went to c at once
                assert {got.status for got in answers} == {200}
                assert {got.fallback for got in met} == {f"{half}: timeout"}
                assert not any("x-kvatlas-prefilled-by" in got.headers for got in answers)
                await product.left_behind(p, d, c)

    warp.run(main())


def test_a_frozen_first_half_with_nobody_below_it() -> None:
    """SGLang's halves cannot do all of it: the pair gets all of the time, and is named."""
    rooms = Rooms()

    async def main() -> None:
        async with (
            WithBootstrap("p", hangs, publishes=False) as p,
            worker("d", rooms.second) as d,
            Stood([p.half("sglang"), decode(d, pairing="sglang")]) as product,
        ):
            await product.settled()
            got = await product.within(stream=True)
            assert (got.status, got.error["code"]) == (504, "deadline_exceeded")
            assert "2 s ended at the prefill half p" in got.error["message"]
            assert got.fallback == "prefill: deadline"
            assert "x-kvatlas-prefilled-by" not in got.headers
            await product.left_behind(p, d)

    warp.run(main())
