"""Two real vLLM servers and their node's agent behind the gateway: what it foresees is what comes,
also while the agent's store stands still or is gone.

Each engine's own cache is emptied, so that what it resumes from then can only be the agent's.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scenarios"))
from harness import Held, Product
from real_engines import MODEL, complete, post, running, tiny_model, vllm_engine
from stores_kit import start_valkey

import kvatlas
from kvatlas.config import AgentConfig, KeysConfig, RouterConfig, TokenizerConfig, WorkerConfig
from kvatlas.connectors.child import free_ports
from kvatlas.connectors.vllm_cpu import VllmEngine
from kvatlas.service.engines import Timing
from kvatlas.validate.exactness_tiers import AgentProcess

pytestmark = pytest.mark.engine

BLOCK = 32
BLOCKS = 40
PROMPT = [11 + i % 97 for i in range(BLOCKS * BLOCK + 7)]
END = BLOCKS * BLOCK
UNWRITTEN = ("write_rests", "write_failed")  # what became of a save's copy for the store
_TOLD: dict[str, int] = {}


class Node(AgentProcess):
    """An agent that the gateway hears, with a store."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "secret"
        self.secret.write_bytes(b"one secret for gateway and agents")
        config = folder / "kvatlas.toml"
        worker = '[[worker]]\nname = "w"\nurl = "http://127.0.0.1:1"\n'
        config.write_text(f'[keys]\nsecret_file = "{self.secret}"\n{worker}')
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.store = start_valkey(folder)
        store = f"--object=valkey://127.0.0.1:{self.store.port}?deadline_s=0.5"
        super().__init__(folder, (f"--listen={port}", f"--config={config}", store))

    def told(self, *reasons: str) -> int:
        """How often the agent has counted any of these."""
        counts = self.wait(lambda status: True)["counts"]
        return sum(counts.get(reason, 0) for reason in reasons)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("node"))
    try:
        made.start()
        yield made
    finally:
        made.end()
        made.store.kill()


@pytest.fixture(scope="module")
def engines(
    node: Node, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, VllmEngine]]:
    connector = {
        "kv_connector": "KvatlasConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvatlas.connectors.vllm_offload",
        "kv_connector_extra_config": {"socket": str(node.socket), "answer_s": 30.0},
    }
    folder = tmp_path_factory.mktemp("engines")
    args = ("--kv-transfer-config", json.dumps(connector))
    found = {name: vllm_engine(folder, name=name, args=args) for name in ("a", "b")}
    for engine in found.values():
        engine.env["PYTHONPATH"] = str(Path(kvatlas.__file__).parents[1])
    with running(found):
        yield found


@pytest.fixture
async def product(node: Node, engines: dict[str, VllmEngine]) -> AsyncIterator[Product]:
    product = Product(
        [WorkerConfig(name=name, url=engine.url) for name, engine in engines.items()],
        tokenizer=TokenizerConfig(path=str(tiny_model()), engine_timeout_s=20.0),
        router=RouterConfig(prefill_tokens_per_s=500.0),
        keys=KeysConfig(secret_file=str(node.secret)),
        agents=[AgentConfig(name="node", url=node.url, workers=("a", "b"))],
        timing=Timing(poll_s=0.3, timeout_s=10.0, retry_max_s=0.5),
    )
    async with product:
        await product.settled()
        yield product


async def test_a_prompt_that_no_engine_has_is_resumed_where_the_gateway_foresaw_it(
    product: Product, node: Node, engines: dict[str, VllmEngine]
) -> None:
    health = (await product.get("/health")).json()
    assert "agent_apart" not in health["details"], health["details"]
    first = await product.complete(PROMPT, MODEL, temperature=0.0)
    assert first.status == 200, first.body
    assert (first.expected, first.cached) == (0, 0)
    await asyncio.to_thread(node.wait, lambda status: not status["busy"])
    for engine in engines.values():
        await asyncio.to_thread(_emptied, engine)
    expected = {name: Held(END, {"dram": END}) for name in engines}
    await product.until_equal(lambda: product.ask(PROMPT[:END], MODEL), expected)

    for _ in range(2):
        again = await product.complete(PROMPT, MODEL, temperature=0.0)
        assert again.expected == again.cached == END
        assert again.text == first.text
        engine = engines[again.worker]
        assert await asyncio.to_thread(_external_hit, engine) == END
        await asyncio.to_thread(_emptied, engine)
        await product.until_equal(lambda: product.ask(PROMPT[:END], MODEL), expected)
    assert not any(gap.flag for gap in product.assembly.dispatcher.gaps.values())


async def test_a_store_that_stops_or_dies_costs_no_request(
    product: Product, node: Node, engines: dict[str, VllmEngine]
) -> None:
    """It is asked by every prompt that is new, and written to by every save."""

    async def served(first: int) -> None:
        """Saved by one engine, and resumed from the agent's memory."""
        prompt = [first, *PROMPT[: 8 * BLOCK]]
        once = await product.complete(prompt, MODEL, temperature=0.0)
        assert (once.status, once.cached) == (200, 0), once.body
        await asyncio.to_thread(node.wait, lambda status: not status["busy"])
        for engine in engines.values():
            await asyncio.to_thread(_emptied, engine)
        again = await product.complete(prompt, MODEL, temperature=0.0)
        assert (again.status, again.cached, again.text) == (200, 8 * BLOCK, once.text)

    async def told(*reasons: str) -> int:
        return await asyncio.to_thread(node.told, *reasons)

    async def rises(before: int, *reasons: str) -> None:
        async def so() -> bool:
            return await told(*reasons) > before

        await product.until(so)

    await served(1)
    silent, unwritten = await told("object_silent"), await told(*UNWRITTEN)
    node.store.process.send_signal(signal.SIGSTOP)
    await served(2)
    await rises(silent, "object_silent")
    await rises(unwritten, *UNWRITTEN)

    silent, unwritten = await told("object_silent"), await told(*UNWRITTEN)
    node.store.kill()
    await served(3)
    await rises(silent, "object_silent")
    await rises(unwritten, *UNWRITTEN)

    node.store = start_valkey(node.socket.parent, port=node.store.port)
    status = await asyncio.to_thread(
        node.wait, lambda status: not status["tiers"]["object"]["rests"]
    )
    written = status["moved_bytes"].get("write object", 0)
    await served(4)
    await asyncio.to_thread(
        node.wait, lambda status: status["moved_bytes"].get("write object", 0) > written
    )


def _emptied(engine: VllmEngine) -> None:
    """An engine tells that its cache is empty with its next step, so it gets one."""
    post(engine.url, "/reset_prefix_cache", {})
    complete(engine.url, [5] * 3, tokens=1)


def _external_hit(engine: VllmEngine) -> int:
    """Prompt tokens of which the engine itself says that they came from the agent's dram, since
    this was last asked."""
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=30)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    found = re.findall(r'(?m)^vllm:prompt_tokens_cached_by_source_total\{.*"host".*\} (\S+)$', text)
    total = int(sum(map(float, found)))
    before, _TOLD[engine.name] = _TOLD.get(engine.name, 0), total
    return total - before
