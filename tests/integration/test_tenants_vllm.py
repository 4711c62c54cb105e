"""Two tenants on one real vLLM with its node's agent: each finds its own state again, in the
engine's memory and below, and of the other's only what an operator has made public."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scenarios"))
from harness import COMPLETION, Answer, Product
from real_engines import MODEL, cached_tokens, complete, post, running, tiny_model, vllm_engine
from tenants_kit import KEYS, NAMES, SECRET, bearer, public_policy, tenants_file

import kvatlas
from kvatlas.config import AgentConfig, KeysConfig, RouterConfig, TokenizerConfig, WorkerConfig
from kvatlas.config_tenants import TenantsConfig
from kvatlas.connectors.child import free_ports
from kvatlas.connectors.vllm_cpu import VllmEngine
from kvatlas.service.engines import Timing
from kvatlas.validate.exactness_tiers import AgentProcess

pytestmark = pytest.mark.engine

BLOCK = 32
END = 24 * BLOCK
PUBLIC = 10 * BLOCK
OURS, THEIRS = NAMES


def prompt_of(first: int) -> list[int]:
    """One that begins as no other."""
    return [first] + [11 + i % 97 for i in range(END + 6)]


SHARED = prompt_of(3)[:PUBLIC]


class Node(AgentProcess):
    """An agent that takes salts of tenants alone."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "secret"
        self.secret.write_bytes(SECRET)
        config = folder / "kvatlas.toml"
        config.write_text(f'[keys]\nsecret_file = "{self.secret}"\n')
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(
            folder, (f"--listen={port}", f"--config={config}", "--tenants=required"), disk=False
        )

    def rest(self) -> dict[str, int]:
        """When it has nothing left to do: what it has counted."""
        counts: dict[str, int] = self.wait(lambda status: not status["busy"])["counts"]
        return counts


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("node"))
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def engine(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    connector = {
        "kv_connector": "KvatlasConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvatlas.connectors.vllm_offload",
        "kv_connector_extra_config": {"socket": str(node.socket), "answer_s": 30.0},
    }
    args = ("--kv-transfer-config", json.dumps(connector))
    made = vllm_engine(tmp_path_factory.mktemp("engine"), name="w", args=args)
    made.env["PYTHONPATH"] = str(Path(kvatlas.__file__).parents[1])
    with running({"w": made}):
        yield made


@pytest.fixture
async def product(node: Node, engine: VllmEngine, tmp_path: Path) -> AsyncIterator[Product]:
    product = Product(
        [WorkerConfig(name="w", url=engine.url)],
        tokenizer=TokenizerConfig(path=str(tiny_model()), engine_timeout_s=20.0),
        router=RouterConfig(prefill_tokens_per_s=500.0),
        keys=KeysConfig(secret_file=str(node.secret)),
        tenants=TenantsConfig(
            file=str(tenants_file(tmp_path)), public=public_policy(tmp_path, SHARED)
        ),
        agents=[AgentConfig(name="node", url=node.url, workers=("w",))],
        timing=Timing(poll_s=0.3, timeout_s=10.0, retry_max_s=0.5),
    )
    async with product:
        await product.settled()
        yield product


async def ask(product: Product, tenant: str, prompt: Sequence[int], **more: object) -> Answer:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0.0} | more
    found = await product.post(COMPLETION, body, bearer(KEYS[tenant]))
    assert found.status == 200, found.body
    return found


async def emptied(node: Node, engine: VllmEngine) -> None:
    """What is resumed after this can only be the agent's; an engine tells that its cache is empty
    with its next step, so it gets one."""
    await asyncio.to_thread(node.rest)
    await asyncio.to_thread(post, engine.url, "/reset_prefix_cache", {})
    await asyncio.to_thread(complete, engine.url, [5] * 3, tokens=1)


async def foreseen(product: Product, tenant: str, prompt: list[int], tokens: int) -> None:
    """Until the directory knows that so much of it can be resumed for this tenant."""

    async def known() -> int:
        held = await product.ask(prompt, MODEL, bearer(KEYS[tenant]))
        return held["w"].tokens if held else 0

    await product.until_equal(known, tokens)


async def test_each_finds_its_own_and_never_the_others(
    product: Product, node: Node, engine: VllmEngine
) -> None:
    prompt = prompt_of(1)
    first = await ask(product, OURS, prompt)
    assert (first.expected, first.cached) == (0, 0)
    await foreseen(product, OURS, prompt[:END], END)
    again = await ask(product, OURS, prompt)
    assert (again.expected, again.cached) == (END, END)

    # The engine's memory and the agent's hold all of it: for the other it is not there.
    other = await ask(product, THEIRS, prompt, cache_salt=OURS)
    assert (other.expected, other.cached, other.text) == (0, 0, first.text)

    await emptied(node, engine)
    for tenant in NAMES:  # each from what was saved under its own name
        await foreseen(product, tenant, prompt[:END], END)
        found = await ask(product, tenant, prompt)
        assert (found.expected, found.cached, found.text) == (END, END, first.text)


async def test_of_the_others_only_what_is_public(
    product: Product, node: Node, engine: VllmEngine
) -> None:
    prompt = [*SHARED, *prompt_of(2)[: END - PUBLIC + 7]]
    first = await ask(product, OURS, prompt)
    assert first.cached == 0
    await emptied(node, engine)
    await foreseen(product, OURS, prompt[:END], END)
    await foreseen(product, THEIRS, prompt[:END], PUBLIC)
    other = await ask(product, THEIRS, prompt)
    assert (other.expected, other.cached, other.text) == (PUBLIC, PUBLIC, first.text)


async def test_around_the_gateway_nothing_is_kept_or_found(
    product: Product, node: Node, engine: VllmEngine
) -> None:
    """Who reaches the engine itself has a salt that proves nothing, or none."""
    prompt = prompt_of(4)
    await ask(product, OURS, prompt)
    await emptied(node, engine)
    before = await asyncio.to_thread(node.rest)
    for salt in ({}, {"cache_salt": OURS}) * 2:
        answer = await asyncio.to_thread(_direct, engine, prompt, salt)
        assert cached_tokens(answer) == 0
        await emptied(node, engine)
    after = await asyncio.to_thread(node.rest)
    assert after["salts_refused"] >= before.get("salts_refused", 0) + 4
    found = await ask(product, OURS, prompt)
    assert found.cached == END


def _direct(engine: VllmEngine, prompt: list[int], salt: dict[str, str]) -> object:
    return complete(engine.url, prompt, tokens=4, **salt)
