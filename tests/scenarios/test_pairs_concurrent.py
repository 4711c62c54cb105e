"""Prefill and decode on two engines whose halves are asked at once: vLLM's Mooncake and SGLang.

The engines are fakes that meet in this process under the number that the gateway drew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from harness import FakeWorker, Product, answer, fresh_tokens
from pairs_kit import bodies, body_of, breaks, decode, fails, hangs, ids, prefill

from kvatlas.config import GatewayConfig, PairingProtocol
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply

PROMPT = fresh_tokens(100)
BOTH = pytest.mark.parametrize("protocol", ["mooncake", "sglang"])


class Rooms:
    """Where halves meet: by name of the transfer, or number of the room."""

    def __init__(self) -> None:
        self._rooms: dict[object, asyncio.Event] = {}
        self.met: list[object] = []

    def _room(self, body: dict[str, Any]) -> object:
        params = body.get("kv_transfer_params")
        return body["bootstrap_room"] if params is None else params["transfer_id"]

    async def first(self, worker: FakeWorker, request: Request, reply: Reply) -> None:
        room = self._room(body_of(request))
        self._rooms.setdefault(room, asyncio.Event()).set()
        reply.send_json(200, {"choices": [{"text": "x"}], "usage": None})

    async def second(self, worker: FakeWorker, request: Request, reply: Reply) -> None:
        body = body_of(request)
        if "bootstrap_room" in body or "kv_transfer_params" in body:
            room = self._room(body)
            await self._rooms.setdefault(room, asyncio.Event()).wait()
            self.met.append(room)
        await answer(worker, request, reply)


class WithBootstrap(FakeWorker):
    """Its bootstrap server tells which engine it is, as Mooncake's."""

    def _tell(self, path: str, reply: Reply) -> None:
        if path == "/query":
            reply.send_json(200, {"0": {"engine_id": f"engine-of-{self.name}", "worker_addr": {}}})
        else:
            super()._tell(path, reply)

    def half(self, protocol: PairingProtocol) -> Any:
        return prefill(self, pairing=protocol, bootstrap=f"http://127.0.0.1:{self._port}")


@BOTH
async def test_both_halves_meet(protocol: PairingProtocol) -> None:
    rooms = Rooms()
    gateway = GatewayConfig(port=0, deadline_s=60.0)
    async with (
        WithBootstrap("p", rooms.first) as p,
        FakeWorker("d", rooms.second) as d,
        Product([p.half(protocol), decode(d, pairing=protocol)], gateway=gateway) as product,
    ):
        for n in range(3):
            got = await product.complete(fresh_tokens(100, n), stream=True)
            assert (got.status, got.worker) == (200, "d")
            assert got.headers["x-kvatlas-prefilled-by"] == "p"
        assert len(set(rooms.met)) == 3
        assert ids(p) == ids(d)
        first, second = bodies(p)[0], bodies(d)[0]
        if protocol == "sglang":
            assert first == second
            port = int(p.config().url.rpartition(":")[2])
            assert (first["bootstrap_host"], first["bootstrap_port"]) == ("127.0.0.1", port)
        else:
            transfer = first["kv_transfer_params"]["transfer_id"]
            assert (first["max_tokens"], first["stream"]) == (1, False)
            assert second["kv_transfer_params"] == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer,
                "remote_engine_id": "engine-of-p",
                "remote_bootstrap_addr": p.config().url,
            }
        assert await product.metric("kvatlas_pairs_total") == 3
        assert await product.metric("kvatlas_fallbacks_total") == 0
        assert await product.in_flight() == {}


@BOTH
@pytest.mark.parametrize(
    ("behave", "reason"), [(fails(500), "failed"), (breaks, "failed"), (hangs, "timeout")]
)
async def test_a_first_half_that_fails_ends_the_second(
    protocol: PairingProtocol, behave: Callable[..., Any], reason: str
) -> None:
    rooms = Rooms()
    gateway = GatewayConfig(port=0, prefill_timeout_s=0.3)
    async with (
        WithBootstrap("p", behave) as p,
        FakeWorker("d", rooms.second) as d,
        FakeWorker("c") as c,
    ):
        c.running = 1000  # by price the pair comes first
        workers = [p.half(protocol), decode(d, pairing=protocol), c.config()]
        async with Product(workers, gateway=gateway) as product:
            await product.settled()
            got = await product.complete(PROMPT)
            assert (got.status, got.headers["x-kvatlas-fallback"]) == (
                200,
                f"prefill: {reason}",
            )
            # SGLang's decode half cannot prefill; vLLM's can.
            assert got.worker == ("c" if protocol == "sglang" else "d")
            assert not rooms.met
            async with asyncio.timeout(1.0):  # both were told to stop
                while p.busy or d.busy:
                    await asyncio.sleep(0.01)
            assert await product.in_flight() == {}


@BOTH
@pytest.mark.parametrize("behave", [fails(500), fails(503), breaks])
async def test_a_second_half_that_fails_ends_the_first(
    protocol: PairingProtocol, behave: Callable[..., Any]
) -> None:
    async with (
        WithBootstrap("p", hangs) as p,
        FakeWorker("d", behave) as d,
        FakeWorker("c") as c,
    ):
        c.running = 1000
        workers = [p.half(protocol), decode(d, pairing=protocol), c.config()]
        async with Product(workers) as product:
            await product.settled()
            got = await product.complete(PROMPT)
            assert (got.status, got.worker) == (200, "c")
            assert got.headers["x-kvatlas-fallback"].startswith("decode: ")
            async with asyncio.timeout(1.0):
                while p.busy:
                    await asyncio.sleep(0.01)
            assert await product.in_flight() == {}


@BOTH
async def test_a_second_half_that_refuses_once(protocol: PairingProtocol) -> None:
    """The next pair is tried, under another number, and the books are right meanwhile."""
    rooms = Rooms()
    busy: list[dict[str, int]] = []

    async def second(worker: FakeWorker, request: Request, reply: Reply) -> None:
        if len(worker.got) == 1:
            reply.send_json(503, {"error": {"message": "not now"}})
            return
        busy.append(await product.in_flight())
        await rooms.second(worker, request, reply)

    async with (
        WithBootstrap("p1", rooms.first) as p1,
        WithBootstrap("p2", rooms.first) as p2,
        FakeWorker("d", second) as d,
        Product([p1.half(protocol), p2.half(protocol), decode(d, pairing=protocol)]) as product,
    ):
        await product.settled()
        got = await product.complete(PROMPT)
        assert (got.status, got.worker) == (200, "d")
        assert got.headers["x-kvatlas-prefilled-by"] in ("p1", "p2")
        assert got.headers["x-kvatlas-fallback"] == "decode: refused"
        assert await product.metric("kvatlas_fallbacks_total", to="pair", worker="d") == 1
        numbers = [str(b.get("kv_transfer_params") or b["bootstrap_room"]) for b in bodies(d)]
        assert len(set(numbers)) == 2
        assert [counts["d"] for counts in busy] == [1]
        assert await product.in_flight() == {}


@BOTH
async def test_a_client_that_leaves_ends_both(protocol: PairingProtocol) -> None:
    async with (
        WithBootstrap("p", hangs) as p,
        FakeWorker("d", hangs) as d,
        Product([p.half(protocol), decode(d, pairing=protocol)]) as product,
    ):
        request = asyncio.create_task(product.complete(PROMPT))
        async with asyncio.timeout(30):
            while not (p.busy and d.busy):
                await asyncio.sleep(0.01)
            request.cancel()
            while p.busy or d.busy or await product.in_flight():
                await asyncio.sleep(0.01)


async def test_mooncake_without_its_bootstrap_server() -> None:
    rooms = Rooms()
    async with FakeWorker("p", rooms.first) as p, FakeWorker("d", rooms.second) as d:
        half = prefill(p, pairing="mooncake", bootstrap=p.config().url)  # it knows no /query
        async with Product([half, decode(d, pairing="mooncake")]) as product:
            got = await product.complete(PROMPT)
            assert (got.status, got.worker) == (200, "d")
            assert got.headers["x-kvatlas-fallback"] == "prefill: bootstrap"


async def test_sglang_alone_cannot_serve_what_cannot_be_split() -> None:
    rooms = Rooms()
    async with (
        WithBootstrap("p", rooms.first) as p,
        FakeWorker("d", rooms.second) as d,
        Product([p.half("sglang"), decode(d, pairing="sglang")]) as product,
    ):
        got = await product.complete(PROMPT, n=2)
        assert (got.status, got.error["code"]) == (400, "not_pairable")
