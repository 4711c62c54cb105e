"""Copies ahead of need between two real agents: what many wait for is brought to the idle node."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, hello, model_config
from harness import FakeWorker, Held, Product, shared_secret

from kvatlas.cli.agent_errands import answer_of
from kvatlas.config import AgentConfig, RouterConfig
from kvatlas.connectors.child import free_ports
from kvatlas.core.ahead_copies import Params
from kvatlas.errors import EngineError
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent_orders import PROOF, signed
from kvatlas.service.agent_pulls import PULL, Wanted
from kvatlas.validate.exactness_tiers import AgentProcess

GRID = 16
BLOCKS = 40
END = BLOCKS * GRID
PREFIX = [7 + i for i in range(END)]
SECRET = b"a secret that gateway and agents share"


def engine() -> Any:
    return hello(block_tokens=GRID, model="m")


def packed(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


class Nodes:
    """Two nodes, each with an agent; the second reads from the first."""

    def __init__(self, folder: Path) -> None:
        config, self.keys = shared_secret(folder, SECRET)
        serve, *ports = free_ports(3)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        peers = (f"--serve-peers=127.0.0.1:{serve}", f"--peer=127.0.0.1:{serve}")
        self.agents = [
            AgentProcess(folder / name, [f"--listen={port}", f"--config={config}", peer])
            for name, port, peer in zip(("one", "two"), ports, peers, strict=True)
        ]

    def configs(self) -> list[AgentConfig]:
        return [
            AgentConfig(name=f"node-{i}", url=url, workers=(f"W{i}",))
            for i, url in enumerate(self.urls, start=1)
        ]


class Stage:
    def __init__(self, nodes: Nodes, product: Product, fakes: list[FakeWorker]) -> None:
        self.nodes, self.product, self.fakes = nodes, product, fakes
        self._asked: list[asyncio.Task[Any]] = []

    def crowd(self, count: int) -> None:
        """Requests that begin with the prefix, at an engine that does not answer yet."""
        gate = self.fakes[0].gate = asyncio.Event()
        assert not gate.is_set()
        for i in range(count):
            tail = [50_000 + 100 * i + k for k in range(40)]
            ask = self.product.complete([*PREFIX, *tail])
            self._asked.append(asyncio.create_task(ask))

    async def leave(self) -> None:
        gate = self.fakes[0].gate
        if gate is not None:
            gate.set()
        await asyncio.gather(*self._asked)

    async def page(self) -> Any:
        return (await self.product.get("/kvatlas/ahead")).json()

    async def ended(self) -> Any:
        """The tally of replication, once a copy is over."""

        async def over() -> bool:
            return bool((await self.page())["copies"]["replicate"]["ended"])

        await self.product.until(over)
        return (await self.page())["copies"]["replicate"]

    async def attached(self) -> None:
        """The gateway has heard of an engine at each node."""

        async def told() -> bool:
            nodes = self.product.assembly.agents.nodes.values()
            return all(node.told is not None and node.told.engines for node in nodes)

        await self.product.until(told)

    async def served(self) -> int:
        return int((await self.page())["copies"]["replicate"]["served"])

    async def held(self, worker: str) -> Held | None:
        return (await self.product.ask(PREFIX)).get(worker)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    nodes = Nodes(tmp_path)
    async with AsyncExitStack() as stack:
        for agent in nodes.agents:
            await asyncio.to_thread(agent.start)
            stack.push_async_callback(asyncio.to_thread, agent.end)
        fakes = [await stack.enter_async_context(FakeWorker(f"W{i}")) for i in (1, 2)]
        for fake in fakes:
            fake.cache_config = f'block_size="{GRID}",cache_dtype="auto"'
        product = Product(
            [fake.config(layout=str(model_config())) for fake in fakes],
            keys=nodes.keys,
            agents=nodes.configs(),
            router=RouterConfig(prefill_tokens_per_s=500.0),
            ahead=Params(replicate=True, move=True),
        )
        await stack.enter_async_context(product)
        await product.settled()
        made = Stage(nodes, product, fakes)
        yield made
        await made.leave()


async def test_what_many_wait_for_is_brought_to_the_idle_node(stage: Stage) -> None:
    product, (one, two) = stage.product, stage.nodes.agents
    with FakeEngine(one.socket, engine()) as first, FakeEngine(two.socket, engine()):
        await stage.attached()
        assert await asyncio.to_thread(first.save, "r", packed(PREFIX)) == BLOCKS
        await product.until_equal(lambda: stage.held("W1"), Held(END, {"dram": END}))
        assert await stage.held("W2") is None
        stage.crowd(6)
        tally = await stage.ended()
        assert tally["ended"] == {"arrived": 1}, await stage.page()
        assert tally["moved_bytes"] > 0
        await product.until_equal(lambda: stage.held("W2"), Held(END, {"dram": END}))
        answer = await product.complete([*PREFIX, 1], stream=True)
        assert (answer.worker, answer.expected) == ("W2", END)
        await product.until_equal(stage.served, 1)
        assert (await stage.page())["copies"]["replicate"]["measured_s"] > 0
        metric = product.metric
        assert await metric("kvatlas_ahead_copies_total", copy="replicate", outcome="arrived") == 1
        assert await metric("kvatlas_ahead_moved_bytes_total") == tally["moved_bytes"]


async def test_what_a_node_that_drains_has_is_handed_on(stage: Stage) -> None:
    product, (one, two) = stage.product, stage.nodes.agents
    with FakeEngine(one.socket, engine()) as first, FakeEngine(two.socket, engine()):
        await stage.attached()
        assert await asyncio.to_thread(first.save, "r", packed(PREFIX)) == BLOCKS
        await product.until_equal(lambda: stage.held("W1"), Held(END, {"dram": END}))
        assert (await product.complete([*PREFIX, 1])).worker == "W1"
        await asyncio.to_thread(answer_of, one.socket, wire.Drain(linger_s=600.0))
        await product.until_equal(lambda: stage.held("W2"), Held(END, {"dram": END}))

        async def moved() -> bool:
            tally = (await stage.page())["copies"]["move"]
            return bool(tally["ended"] == {"arrived": 1} and tally["moved_bytes"])

        await product.until(moved)
        agents = (await product.get("/kvatlas/agents")).json()
        assert {n: a["draining"] for n, a in agents.items()} == {"node-1": True, "node-2": False}


async def test_an_agent_without_an_engine_refuses_and_nobody_notices(stage: Stage) -> None:
    product, (one, _) = stage.product, stage.nodes.agents
    with FakeEngine(one.socket, engine()) as first:
        assert await asyncio.to_thread(first.save, "r", packed(PREFIX)) == BLOCKS
        await product.until_equal(lambda: stage.held("W1"), Held(END, {"dram": END}))
        stage.crowd(6)
        tally = await stage.ended()
        assert tally["ended"]["failed"] >= 1
        assert "no engine of these keys is attached" in (await stage.page())["last_error"]
        await stage.leave()
        assert (await product.complete([*PREFIX, 1])).status == 200


async def test_nobody_without_the_secret_moves_bytes(stage: Stage) -> None:
    url = stage.nodes.urls[1] + PULL
    wanted = Wanted("a life", "m", (b"k" * 16,))
    ring = stage.product.assembly._keyring
    body, proof = signed(ring, PULL, wanted)
    for headers, status in (
        ([], 403),
        ([(PROOF.encode(), b"00" * 32)], 403),
        ([(PROOF.encode(), proof.encode())], 409),
    ):
        answer = await stage.product.client.request("POST", url, headers=headers, body=body)
        assert answer.status == status
    with pytest.raises(EngineError):
        stage.product.assembly.agents.serving(
            stage.product.assembly.agents.nodes["node-1"].publisher, ""
        )
