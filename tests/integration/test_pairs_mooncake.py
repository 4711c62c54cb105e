"""Two real vLLM servers as a Mooncake pair behind the gateway, over TCP: both halves are asked at
once, and the tokens are those of one engine, out of state that was handed over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from real_engines import HERE, MODEL, require, running, tiny_model
from test_pairs_vllm import PROMPT, ROLES, alone, ask, from_outside, ids_of

# (after that module, which puts the scenarios' directory on the path)
from harness import Product  # isort: skip

from kvatlas.config import TokenizerConfig, WorkerConfig
from kvatlas.connectors.child import free_ports
from kvatlas.connectors.vllm_cpu import VllmEngine
from kvatlas.service.engines import Timing

pytestmark = [pytest.mark.engine, pytest.mark.long]


def half(folder: Path, name: str, bootstrap: int) -> VllmEngine:
    """One half of the pair, not started yet; ``bootstrap``: where they meet."""
    mooncake = {
        "kv_connector": "MooncakeConnector",
        "kv_role": ROLES[name],
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    return VllmEngine(
        require("mooncake"),
        tiny_model(),
        name=name,
        port=free_ports(1)[0],
        log=folder / f"{name}.log",
        model_name=MODEL,
        kv_cache_bytes=64 << 20,
        args=("--kv-transfer-config", json.dumps(mooncake)),
        env={
            "PYTHONPATH": str(HERE / "vllm_mooncake_shim"),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap),
        },
    )


@pytest.fixture(scope="module")
def bootstrap() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, bootstrap: int
) -> Iterator[dict[str, VllmEngine]]:
    folder = tmp_path_factory.mktemp("pair")
    found = {name: half(folder, name, bootstrap) for name in ROLES}
    with running(found):
        yield found


@pytest.fixture
async def product(pair: dict[str, VllmEngine], bootstrap: int) -> AsyncIterator[Product]:
    meets = f"http://127.0.0.1:{bootstrap}"
    product = Product(
        [
            WorkerConfig(
                name="p", url=pair["p"].url, role="prefill", pairing="mooncake", bootstrap=meets
            ),
            WorkerConfig(name="d", url=pair["d"].url, role="decode", pairing="mooncake"),
        ],
        tokenizer=TokenizerConfig(path=str(tiny_model()), engine_timeout_s=20.0),
        timing=Timing(poll_s=0.3, timeout_s=10.0, retry_max_s=0.5),
    )
    async with product:
        await product.settled()
        yield product


async def test_a_pair_answers_as_one_engine_does(
    product: Product, pair: dict[str, VllmEngine]
) -> None:
    expected = await asyncio.to_thread(alone, pair["p"], PROMPT)
    before = await asyncio.to_thread(from_outside, pair["d"])
    got = await ask(product, PROMPT)
    assert got.status == 200, got.body
    assert (got.worker, got.headers["x-kvatlas-prefilled-by"]) == ("d", "p")
    assert ids_of(got.json()) == expected
    # The engine's own counter: all but what an engine always computes came from the other half.
    external = await asyncio.to_thread(from_outside, pair["d"]) - before
    assert external >= len(PROMPT) - 32, external
    # In our metrics that is no hit: the first half had nothing cached.
    assert await product.metric("kvatlas_cached_tokens_total") == 0
    assert await product.metric("kvatlas_pairs_total", prefill="p", decode="d") == 1

    streamed = await ask(product, [7, *PROMPT[1:]], stream=True, logprobs=1)
    assert b"[DONE]" in streamed.body
    assert await product.metric("kvatlas_pairs_total") == 2
    assert await product.metric("kvatlas_fallbacks_total") == 0
    assert not any(flag.startswith("pair_refused") for flag in await product.flags())


async def test_many_at_once_do_not_mix(product: Product, pair: dict[str, VllmEngine]) -> None:
    """Each pair of halves meets under a number of its own, whatever id the clients gave."""
    prompts = [[100 + n, *PROMPT[: 150 + n]] for n in range(6)]
    expected = [await asyncio.to_thread(alone, pair["p"], prompt) for prompt in prompts]
    got = await asyncio.gather(*(ask(product, prompt) for prompt in prompts))
    assert {a.headers.get("x-kvatlas-prefilled-by") for a in got} == {"p"}, got
    assert [ids_of(a.json()) for a in got] == expected


async def test_a_client_that_leaves_leaves_nothing(
    product: Product, pair: dict[str, VllmEngine]
) -> None:
    asked = asyncio.create_task(ask(product, [4, *PROMPT[1:]], max_tokens=2000))
    await product.until(lambda: _sent_to(product, "d"))
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await product.until_equal(product.in_flight, {})
    prompt = [6, *PROMPT[1:]]
    expected = await asyncio.to_thread(alone, pair["p"], prompt)
    got = await ask(product, prompt)
    assert (got.status, got.headers.get("x-kvatlas-prefilled-by")) == (200, "p"), got.body
    assert ids_of(got.json()) == expected


async def test_a_first_half_that_dies_is_left_for_one_engine(
    product: Product, pair: dict[str, VllmEngine]
) -> None:
    """Last: the pair is none after it. It stands still first: so it surely did not answer, nor
    did its bootstrap server."""
    prompt = [9, *PROMPT[:700]]
    expected = await asyncio.to_thread(alone, pair["d"], prompt)
    os.killpg(pair["p"].pid, signal.SIGSTOP)
    asked = asyncio.create_task(ask(product, prompt))
    await product.until(lambda: _sent_to(product, "p"))
    os.killpg(pair["p"].pid, signal.SIGKILL)
    got = await asked
    assert (got.status, got.worker) == (200, "d"), got.body
    assert got.fallback == "prefill: bootstrap"
    assert ids_of(got.json()) == expected
    assert (await ask(product, prompt)).status == 200  # by what is left of it


async def _sent_to(product: Product, worker: str) -> bool:
    return (await product.in_flight()).get(worker, 0) > 0
