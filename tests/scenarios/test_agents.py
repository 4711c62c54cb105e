"""A gateway before engines whose nodes have agents: prompts go where what agents hold is near."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, hello, model_config
from harness import FakeWorker, Held, Product, shared_secret

from kvatlas.cli.main import main
from kvatlas.config import AgentConfig, KeysConfig, RouterConfig, WorkerConfig
from kvatlas.connectors.child import free_ports
from kvatlas.service import agent_wire as wire
from kvatlas.validate.exactness_tiers import AgentProcess
from kvatlas.validate.replay import replay

GRID = 16
BLOCKS = 40
PREFIX = [7 + i for i in range(BLOCKS * GRID)]
END = BLOCKS * GRID
SECRET = b"a secret that gateway and agents share"


class Node:
    """An agent, started as an operator would, and its engines W1 and W2; W3 is elsewhere."""

    def __init__(self, folder: Path) -> None:
        config, self.keys = shared_secret(folder, SECRET)
        port, self.events = free_ports(1)[0], _two_ports()
        self.url = f"http://127.0.0.1:{port}"
        options = [f"--listen={port}", f"--events-port={self.events}", f"--config={config}"]
        self.agent = AgentProcess(folder, options)

    def save(self, model: str = "m", **told: Any) -> None:
        """An engine of the node computes the prefix, and its agent saves it."""
        with FakeEngine(self.agent.socket, _engine(model, **told)) as engine:
            assert engine.save("r", _packed(PREFIX)) == BLOCKS
            self.agent.wait(lambda status: not status["busy"])


def _two_ports() -> int:
    """One that is free, and so is the next."""
    while True:
        (port,) = free_ports(1)
        with socket.socket() as after:
            try:
                after.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        return port


def _engine(model: str = "m", **told: Any) -> Any:
    return hello(block_tokens=GRID, model=model, **told)


def _packed(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def _worker(fake: FakeWorker) -> WorkerConfig:
    fake.cache_config = f'block_size="{GRID}",cache_dtype="auto"'
    return fake.config(layout=str(model_config()))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path)
    await asyncio.to_thread(made.agent.start)
    yield made
    await asyncio.to_thread(made.agent.end)


@pytest.fixture
async def product(node: Node) -> AsyncIterator[Product]:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeWorker(f"W{i}")) for i in (1, 2, 3)]
        agents = [AgentConfig(name="node", url=node.url, workers=("W1", "W2"))]
        workers = [_worker(fake) for fake in fakes]
        made = await stack.enter_async_context(Product(workers, keys=node.keys, agents=agents))
        await made.settled()
        yield made


def held(**tiers: int) -> dict[str, Held]:
    return {name: Held(sum(tiers.values()), tiers) for name in ("W1", "W2")} if tiers else {}


async def expect(product: Product, expected: dict[str, Held]) -> None:
    await product.until_equal(lambda: product.ask(PREFIX), expected)


async def test_a_prompt_goes_where_its_agent_holds_it_priced_with_the_load(
    node: Node, product: Product
) -> None:
    await expect(product, {})
    await asyncio.to_thread(node.save)
    await expect(product, held(dram=END))
    for _ in range(3):
        assert await product.chosen(PREFIX) in ("W1", "W2")
    answer = await product.complete([*PREFIX, 1])
    assert answer.worker in ("W1", "W2")
    assert answer.expected == END
    text = (await product.get("/kvatlas/explain/last")).body.decode()
    assert f"resumes at {END} ({END} from dram)" in text
    (chosen,) = [line for line in text.splitlines() if line.startswith("→")]
    assert float(chosen.partition("load ")[2].split(" ")[0]) > 0
    # This engine loaded nothing: the plan was left for computing all of it.
    labels = {"rung": "remote", "reason": "not_loaded", "to": "recompute", "worker": answer.worker}
    assert await product.metric("kvatlas_fallbacks_total", **labels) == 1
    assert f"fell back from loading from a lower tier on {answer.worker} after " in text


async def test_what_the_node_keeps_of_an_engine_that_drains_is_there_for_others(
    node: Node, product: Product
) -> None:
    await asyncio.to_thread(node.save)
    await expect(product, held(dram=END))
    workers = tuple(
        msgspec.structs.replace(worker, draining=worker.name == "W1")
        for worker in product.config.worker
    )
    await product.assembly.reload(msgspec.structs.replace(product.config, worker=workers))
    assert await product.ask(PREFIX) == {"W2": Held(END, {"dram": END})}
    answer = await product.complete([*PREFIX, 1])
    assert (answer.worker, answer.expected) == ("W2", END)


async def test_what_is_on_disk_is_foreseen_after_a_restart_of_either(
    node: Node, product: Product
) -> None:
    await asyncio.to_thread(node.save)
    await expect(product, held(dram=END))
    await asyncio.to_thread(node.agent.end, signal.SIGKILL)
    await expect(product, {})
    assert "agent_down:node" in await product.flags()
    assert await product.metric("kvatlas_agent_up", agent="node") == 0
    await asyncio.to_thread(node.agent.start)
    await expect(product, held(disk=END))
    await product.restart()
    await expect(product, held(disk=END))
    rows = (await product.get("/kvatlas/agents")).json()
    assert rows["node"]["up"]
    assert rows["node"]["held"] == {"disk": {"bodies": BLOCKS, "points": 0}}
    assert await product.metric("kvatlas_agent_announced_units", tier="disk") == BLOCKS


async def test_a_restart_that_no_poll_sees_is_seen_in_its_events(
    node: Node, product: Product
) -> None:
    """The disk goes with the agent: what the new life says is all that counts."""
    await asyncio.to_thread(node.save)
    await expect(product, held(dram=END))

    def renewed() -> None:
        node.agent.end(signal.SIGKILL)
        for file in node.agent.disk.iterdir():
            file.unlink()
        node.agent.start()

    await asyncio.to_thread(renewed)
    await expect(product, {})


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"model": "another"}, "no engine of these names is attached"),
        ({"version": 1, "kind": "swa"}, "layout: "),
    ],
)
async def test_engines_whose_agent_makes_other_keys_are_named(
    node: Node, product: Product, told: dict[str, Any], why: str
) -> None:
    """Nothing is foreseen for them, and an operator finds the reason."""

    async def apart() -> str:
        details = (await product.get("/health")).json()["details"]
        return str(details.get("agent_apart", {}).get("W1", ""))

    with await asyncio.to_thread(FakeEngine, node.agent.socket, _engine(**told)) as engine:
        await asyncio.to_thread(engine.save, "r", _packed(PREFIX))
        await product.until(lambda: _holds(apart(), why))
    assert await product.ask(PREFIX) == {}
    with await asyncio.to_thread(FakeEngine, node.agent.socket, _engine()):
        await product.until(lambda: _holds(apart(), ""))


async def _holds(text: Any, part: str) -> bool:
    found = await text
    return part in found if part else not found


async def test_another_secret_is_told(node: Node, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"another secret, long enough")
    async with FakeWorker("W1") as fake:
        agents = [AgentConfig(name="node", url=node.url, workers=("W1",))]
        keys = KeysConfig(secret_file=str(tmp_path / "other"))
        async with Product([_worker(fake)], keys=keys, agents=agents) as product:
            with await asyncio.to_thread(FakeEngine, node.agent.socket, _engine()):

                async def told() -> bool:
                    text = (await product.get("/health")).body.decode()
                    return "it has another secret" in text

                await product.until(told)


async def test_engines_that_name_their_pages_themselves_are_no_fault(
    node: Node, product: Product
) -> None:
    """No prompt can be looked up by their keys: nothing is foreseen, and people can see why."""
    pools = (wire.PoolInfo("kv", "", 1024, False),)
    told = msgspec.structs.replace(_engine(), engine="sglang", pools=pools)
    with await asyncio.to_thread(FakeEngine, node.agent.socket, told):

        async def attached() -> bool:
            row = (await product.get("/kvatlas/agents")).json()["node"]
            return any("keys of its own" in why for why in row["engines"].values())

        await product.until(attached)
        assert "agent_apart" not in (await product.get("/health")).json()["details"]


async def test_what_agents_said_is_in_a_recording(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "gateway.kvr"
    async with FakeWorker("W1") as fake:
        agents = [AgentConfig(name="node", url=node.url, workers=("W1",))]
        router = RouterConfig(recording=str(path))
        workers = [_worker(fake)]
        async with Product(workers, keys=node.keys, agents=agents, router=router) as product:
            await product.settled()
            await asyncio.to_thread(node.save)
            await product.until_equal(lambda: product.ask(PREFIX), {"W1": Held(END, {"dram": END})})
    result = replay(path)
    assert result.different == 0
    assert result.inputs["Settle"] == 1
    assert result.decisions > 0


async def test_another_file_brings_and_takes_agents(node: Node, product: Product) -> None:
    await asyncio.to_thread(node.save)
    await expect(product, held(dram=END))
    config = product.config
    await product.assembly.reload(msgspec.structs.replace(config, agent=()))
    await expect(product, {})
    assert (await product.get("/kvatlas/agents")).json() == {}
    (one,) = config.agent
    only = msgspec.structs.replace(one, workers=("W3",))
    await product.assembly.reload(msgspec.structs.replace(config, agent=(only,)))
    await expect(product, {"W3": Held(END, {"dram": END})})


async def test_prompts_are_moved_by_keys_that_the_gateway_makes(
    node: Node, product: Product, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator has a text or a request; only the gateway makes token ids and keys of it."""
    await asyncio.to_thread(node.save)
    await expect(product, held(dram=END))
    ids, keys, body = (tmp_path / name for name in ("ids.txt", "keys.txt", "body.json"))
    ids.write_text(str([*PREFIX, 1]))
    body.write_text(json.dumps({"model": "m", "prompt": [*PREFIX, 1]}))

    async def run(*words: str) -> str:
        assert await asyncio.to_thread(main, list(words)) == 0
        return capsys.readouterr().out

    told = await run("directory", "inspect", "--keys", "--tokens", str(ids), "--url", product.url)
    assert len(told.split()) == BLOCKS
    keys.write_text(told)
    socket = ("--socket", str(node.agent.socket))
    with await asyncio.to_thread(FakeEngine, node.agent.socket, _engine()):
        found = json.loads(await run("agent", "where", "--keys", str(keys), *socket))
        assert found["by_tier"] == {"dram": END, "disk": END}
        asked = ("agent", "pin", "--body", str(body), "--url", product.url, "--worker", "W2")
        pinned = json.loads(await run(*asked, "--for", "5", *socket))
        assert (pinned["blocks"], pinned["resume_tokens"]) == (BLOCKS, END)
