"""KV that should go over RDMA and goes over TCP instead, with nothing that says so (nixl#909,
dynamo#1314, vllm#52636): seen in what engines and RDMA ports count, alarmed, and priced at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import FakeWorker, Product, answer, fresh_tokens
from pairs_kit import decode, nixl_prefill, prefill

from kvatlas.cli.main import main
from kvatlas.config import AgentConfig
from kvatlas.core.records import Publisher
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply

SIZE = 40_000_000  # what an engine counts per hand-off
FAST_S, SLOW_S = 0.002, 0.3


class Decoder(FakeWorker):
    """A decode half that takes state over, and counts it as vLLM's NixlConnector does."""

    def __init__(self, name: str, ports: Ports) -> None:
        super().__init__(name, self.take)
        self.ports = ports
        self.rdma = True
        self.bytes = self.transfers = self.seconds = 0.0
        self.count(0, 0.0)

    async def take(self, worker: FakeWorker, request: Request, reply: Reply) -> None:
        if self.rdma:
            self.ports.add(SIZE)
        else:
            await asyncio.sleep(SLOW_S)  # so long it takes over TCP
        self.transfers += 1
        self.count(SIZE, FAST_S if self.rdma else SLOW_S)
        await answer(worker, request, reply)

    def count(self, size_bytes: int, seconds: float) -> None:
        self.bytes += size_bytes
        self.seconds += seconds
        labels = '{engine="0",model_name="m"}'
        self.metrics = [
            f"vllm:nixl_bytes_transferred_sum{labels} {self.bytes}",
            f"vllm:nixl_bytes_transferred_count{labels} {self.transfers}",
            f"vllm:nixl_xfer_time_seconds_sum{labels} {self.seconds}",
            f"vllm:nixl_num_failed_transfers_total{labels} 3.0",
        ]


class Ports:
    """A folder as the kernel has it for one RDMA port."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folder = root / "mlx5_0/ports/1/counters"
        self._folder.mkdir(parents=True)
        (self._folder / "port_xmit_data").write_text("0\n")
        self._units = 1 << 40
        self.add(0)

    def add(self, size_bytes: int) -> None:
        self._units += size_bytes // 4
        new = self._folder / "new"
        new.write_text(f"{self._units}\n")
        new.rename(self._folder / "port_rcv_data")


class Stand(msgspec.Struct):
    product: Product
    d: Decoder
    e: Decoder
    prompts: int = 0

    async def ask(self) -> str:
        """One request of its own prompt: who decoded it."""
        self.prompts += 1
        got = await self.product.complete(fresh_tokens(100, self.prompts))
        assert got.status == 200, got.body
        assert got.headers["x-kvatlas-prefilled-by"] == "p"
        return got.worker

    async def pair(self, name: str = "d") -> dict[str, Any]:
        rows = (await self.product.get("/kvatlas/transports")).json()["pairs"]
        return next((row for row in rows if row["decode"] == name), {"seen": None})

    async def until_seen(self, seen: str) -> None:
        """Hand over until it is told."""

        async def so() -> bool:
            await self.ask()
            return bool((await self.pair())["seen"] == seen)

        await self.product.until(so)

    async def health(self, worker: Decoder, *, up: bool) -> None:
        worker.healthy = up

        async def so() -> bool:
            candidates = self.product.assembly.dispatcher.router.up()
            return (Publisher(worker.name) in candidates) is up

        await self.product.until(so)

    async def all_told(self) -> None:
        """What the engine counts has arrived."""

        async def told() -> float:
            return float((await self.pair())["told_bytes"])

        await self.product.until_equal(told, self.d.bytes)

    async def explain(self) -> str:
        return (await self.product.get("/kvatlas/explain/last")).body.decode()


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    """A prefill half on node one, two decode halves on node two."""
    async with AsyncExitStack() as stack:
        ports = Ports(tmp_path / "infiniband")
        p = await stack.enter_async_context(FakeWorker("p", nixl_prefill))
        d, e = [await stack.enter_async_context(Decoder(name, ports)) for name in "de"]
        settings = Settings(
            tmp_path / "agent.sock",
            4 << 20,
            secret=b"s" * 32,
            listen=("127.0.0.1", 0),
            infiniband=ports.root,
        )
        agent = await stack.enter_async_context(NodeAgent(settings))
        serving = asyncio.get_running_loop().create_task(agent.serve())
        stack.callback(serving.cancel)
        agents = [
            AgentConfig(name="one", url="http://127.0.0.1:1", workers=("p",)),
            AgentConfig(name="two", url=agent.front.url, workers=("d", "e")),
        ]
        workers = [
            half(w, transport="rdma") for half, w in ((prefill, p), (decode, d), (decode, e))
        ]
        product = await stack.enter_async_context(Product(workers, agents=agents))
        await product.settled()
        yield Stand(product, d, e)


async def test_a_pair_that_loses_rdma_is_degraded_dear_at_once_and_comes_back(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    product = stand.product
    assert await asyncio.to_thread(main, ["transports", "--url", product.url]) == 0
    assert "no pair has handed anything over yet" in capsys.readouterr().out
    await stand.health(stand.e, up=False)
    assert await stand.ask() == "d"
    assert "transport_degraded:p>d" not in await product.flags()
    await stand.until_seen("rdma")
    found = await stand.pair()
    assert (found["state"], found["expected"], found["rate_from"]) == ("ok", "rdma", "engine")
    told = {"prefill": "p", "decode": "d"}
    size = "kvatlas_transport_bytes_total"
    await stand.all_told()
    assert await product.metric(size, **told) == stand.d.bytes
    assert await product.metric(size, counted="split") == 0
    assert await product.metric("kvatlas_transport_info", seen="rdma", **told) == 1
    assert await product.metric("kvatlas_transport_degraded", **told) == 0
    assert await product.metric("kvatlas_transport_failures_total", worker="d") == 3

    stand.d.rdma = False
    await stand.until_seen("not rdma")
    assert "transport_degraded:p>d" in await product.flags()
    details = (await product.get("/health")).json()["details"]["transport_degraded"]
    assert details["p>d"].startswith("expected rdma, seen not rdma: ")
    assert await product.metric("kvatlas_transport_degraded", **told) == 1
    assert await asyncio.to_thread(main, ["transports", "--url", product.url]) == 1
    printed = capsys.readouterr().out
    assert "p → d" in printed
    assert details["p>d"] in " ".join(printed.split())
    assert await asyncio.to_thread(main, ["transports", "--json", "--url", product.url]) == 1
    assert json.loads(capsys.readouterr().out)["pairs"] == [await stand.pair()]
    assert await product.metric("kvatlas_transport_info", seen="not rdma", **told) == 1
    assert await stand.ask() == "d", "nobody else is there"
    text = await stand.explain()
    assert " + hand-off " in text
    assert "MB handed over by p: first token " in text

    await stand.health(stand.e, up=True)
    for _ in range(3):
        assert await stand.ask() == "e", await stand.explain()

    await stand.health(stand.e, up=False)
    stand.d.rdma = True
    await stand.until_seen("rdma")

    async def well() -> bool:
        await stand.ask()  # the engine's own times, too, have to be what they were
        return "transport_degraded:p>d" not in await product.flags()

    await product.until(well)
    assert await product.metric("kvatlas_transport_falls_total", **told) >= 1


async def test_a_metrics_page_that_lies_is_counted_and_believed_in_nothing(stand: Stand) -> None:
    product = stand.product
    await stand.health(stand.e, up=False)
    await stand.until_seen("rdma")
    await stand.all_told()
    before = await stand.pair()
    for value in ("NaN", "-5", "1e300", "many", "+Inf"):
        stand.d.metrics = [
            'vllm:nixl_bytes_transferred_sum{engine="0"} ' + value,
            'vllm:nixl_bytes_transferred_count{engine="0"} 9999',
        ]
        counted = await product.metric("kvatlas_worker_metrics_malformed_total", worker="d")

        async def so(counted: float = counted) -> bool:
            name = "kvatlas_worker_metrics_malformed_total"
            return await product.metric(name, worker="d") > counted

        await product.until(so)
    after = await stand.pair()
    assert (after["told_bytes"], after["split_bytes"]) == (before["told_bytes"], 0)
    assert (await product.workers())["d"]["up"]
    stand.d.count(0, 0.0)
    counted = stand.d.bytes

    async def so_again() -> bool:
        await stand.ask()
        return bool((await stand.pair())["told_bytes"] > counted)

    await product.until(so_again)


async def test_without_ports_it_is_unknown_and_not_guessed(stand: Stand, tmp_path: Path) -> None:
    (tmp_path / "infiniband/mlx5_0/ports/1/counters/port_rcv_data").unlink()
    stand.d.ports = stand.e.ports = Ports(tmp_path / "elsewhere")
    page = "/kvatlas/transports"

    async def so() -> bool:
        await stand.ask()
        return "No such file" in (await stand.product.get(page)).json()["rdma_ports"]["two"]

    await stand.product.until(so)
    for _ in range(5):
        await stand.ask()
    rows = (await stand.product.get(page)).json()["pairs"]
    assert {row["seen"] for row in rows} == {""}
    assert {row["state"] for row in rows} == {"unknown"}
    assert not any(f.startswith("transport_degraded") for f in await stand.product.flags())


async def test_an_agent_tells_what_its_ports_moved(stand: Stand, tmp_path: Path) -> None:
    stand.d.ports.add(4_000_000)
    url = stand.product.config.agent[1].url

    async def metrics() -> dict[str, float]:
        got = await stand.product.client.request("GET", f"{url}/metrics", timeout_s=10)
        rows = re.findall(r"(?m)^kvatlas_agent_rdma_(\w+)\S* (\S+)$", got.body.decode())
        return {name: max(float(v) for n, v in rows if n == name) for name, _ in rows}

    count = float((1 << 42) + 4_000_000)
    assert await metrics() == {"bytes_total": count, "unreadable": 0.0}
    (tmp_path / "infiniband/mlx5_0/ports/1/counters/port_rcv_data").write_text("4294967295\n")
    assert await metrics() == {"unreadable": 1.0}
