"""The endpoint picker as a real Envoy asks it: Envoy carries the bytes, kvatlas says where."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from harness import Answer, FakeWorker, Product
from install import missing, venv_of
from picker_kit import Proxy, picking
from stub_publisher import block_tokens, stored

from kvatlas.connectors.child import Child, free_ports

pytestmark = pytest.mark.engine

CONFIG = Path(__file__).with_name("envoy.yaml")
DUPLEX = "FULL_DUPLEX_STREAMED"


class Stage:
    """Two engines, kvatlas, Envoy, and a client that knows Envoy alone."""

    def __init__(
        self, workers: list[FakeWorker], product: Product, proxy: Proxy, port: int
    ) -> None:
        self.workers, self.product, self.proxy, self.port = workers, product, proxy, port

    async def complete(self, path: str, model: str = "m", **more: object) -> Answer:
        body = {"model": model, "prompt": [*block_tokens(path), 0], "max_tokens": 4} | more
        own = self.product.port
        self.product.port = self.port
        try:
            return await self.product.post("/v1/completions", body)
        finally:
            self.product.port = own

    async def busy(self) -> int:
        return sum(worker.busy for worker in self.workers)

    async def at_rest(self) -> None:
        async def so() -> bool:
            flight = await self.product.metric("kvatlas_requests_in_flight")
            return not await self.product.in_flight() and not flight

        await self.product.until(so)


@contextlib.asynccontextmanager
async def stage(
    folder: Path, request_mode: str = DUPLEX, response_mode: str = DUPLEX
) -> AsyncIterator[Stage]:
    if why := missing("envoy"):
        pytest.skip(why)
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(f"W{i}")) for i in range(2)]
        product = await stack.enter_async_context(Product([w.config() for w in workers]))
        for worker in workers:
            await worker.heard()
        await product.settled()
        proxy = await stack.enter_async_context(picking(product))
        listen, admin = free_ports(2)
        ports = [worker.config().url.rpartition(":")[2] for worker in workers]
        text = CONFIG.read_text("utf-8")
        for name, value in (
            *(("LISTEN", listen), ("ADMIN", admin), ("PICKER", proxy.picker.port)),
            *(("FIRST", ports[0]), ("SECOND", ports[1])),
            *(("REQUEST_MODE", request_mode), ("RESPONSE_MODE", response_mode)),
        ):
            text = text.replace(name, str(value))
        (folder / "envoy.yaml").write_text(text)
        program = str(venv_of("envoy") / "bin" / "envoy")
        argv = [program, "-c", str(folder / "envoy.yaml"), "--concurrency", "1"]
        argv += ["--use-dynamic-base-id", "--log-level", "warning"]
        url = f"http://127.0.0.1:{admin}"
        child = Child("envoy", argv, log=folder / "envoy.log", url=url, health="/ready")
        child.start()
        try:
            await asyncio.to_thread(child.wait_ready, 60.0)
            yield Stage(workers, product, proxy, listen)
        finally:
            await asyncio.to_thread(child.stop)


@pytest.mark.parametrize(
    ("request_mode", "response_mode"), [(DUPLEX, DUPLEX), ("BUFFERED", "STREAMED")]
)
async def test_envoy_sends_each_prompt_to_its_holder(
    tmp_path: Path, request_mode: str, response_mode: str
) -> None:
    async with stage(tmp_path, request_mode, response_mode) as on:
        on.workers[0].events.publish(stored("ab", 2))
        on.workers[1].events.publish(stored("cd", 2))
        await on.product.answers("ab", {"W0": 2})
        await on.product.answers("cd", {"W1": 2})
        for path, name in [("ab", "W0"), ("cd", "W1"), ("ab", "W0"), ("cd", "W1")]:
            answer = await on.complete(path)
            assert (answer.status, answer.worker) == (200, name)
            assert answer.json()["choices"][0]["text"] == name
            assert answer.headers["x-kvatlas-expected-hit-tokens"] == "8"
        streamed = await on.complete("cd", stream=True)
        assert streamed.worker == "W1"
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        assert b"usage" not in streamed.body
        asked = json.loads(on.workers[1].got[-1].body)
        assert asked["stream_options"] == {"include_usage": True}
        long = await on.complete("ab", user="x" * 400_000)
        assert (long.status, long.worker) == (200, "W0")
        assert json.loads(on.workers[0].got[-1].body)["user"] == "x" * 400_000
        await on.at_rest()
        metric = on.product.metric
        assert await metric("kvatlas_worker_outcomes_total", status="200") == 6
        assert await metric("kvatlas_usage_unreported_total") == 0


async def test_refusals_reach_the_client_through_envoy(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        wrong = await on.complete("ab", model="other")
        assert (wrong.status, wrong.error["code"]) == (404, "model_not_found")
        assert not any(worker.got for worker in on.workers)
        await on.at_rest()


async def test_envoy_goes_down_the_list(tmp_path: Path) -> None:
    """The holder cannot be connected to, and no look has said so yet. Envoy tells who answered."""
    async with stage(tmp_path) as on:
        on.workers[0].events.publish(stored("ab", 2))
        await on.product.answers("ab", {"W0": 2})
        await on.workers[0].close()
        answer = await on.complete("ab")
        assert answer.status == 200
        assert answer.json()["choices"][0]["text"] == answer.worker == "W1"
        await on.at_rest()
        outcomes = "kvatlas_worker_outcomes_total"
        assert await on.product.metric(outcomes, worker="W1", status="200") == 1


async def test_a_client_that_leaves_envoy_frees_everything(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        for worker in on.workers:
            worker.gate = asyncio.Event()
        asking = asyncio.create_task(on.complete("ab", stream=True))
        await on.product.until_equal(on.busy, 1)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await on.at_rest()
        metric = on.product.metric
        assert await metric("kvatlas_worker_outcomes_total", status="499") == 1


@pytest.mark.parametrize(("request_mode", "status"), [("BUFFERED", 200), (DUPLEX, 500)])
async def test_without_the_picker_envoy_goes_on(
    tmp_path: Path, request_mode: str, status: int
) -> None:
    """Only where it still has the body: in full duplex it has handed that over (Envoy 1.40)."""
    async with stage(tmp_path, request_mode, "STREAMED") as on:
        await on.proxy.picker.close()
        answer = await on.complete("ab")
        assert answer.status == status
        assert "x-kvatlas-worker" not in answer.headers
