"""Two real vLLM servers as a NIXL pair behind the gateway: the same tokens as from one engine,
out of state that was handed over; and one engine where the other half dies in mid-prefill."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scenarios"))
from harness import COMPLETION, Answer, Product
from real_engines import MODEL, complete, post, require, running, tiny_model

from kvatlas.config import TokenizerConfig, WorkerConfig
from kvatlas.connectors.child import free_ports
from kvatlas.connectors.vllm_cpu import VllmEngine
from kvatlas.service.engines import Timing

pytestmark = pytest.mark.engine

PROMPT = [11 + i % 97 for i in range(40 * 32 + 7)]
TOKENS = 24
ROLES = {"p": "kv_producer", "d": "kv_consumer"}


def half(folder: Path, name: str) -> VllmEngine:
    """One half of the pair, not started yet."""
    port, side = free_ports(2)
    nixl = {"kv_connector": "NixlConnector", "kv_role": ROLES[name], "kv_buffer_device": "cpu"}
    return VllmEngine(
        require("nixl"),
        tiny_model(),
        name=name,
        port=port,
        log=folder / f"{name}.log",
        model_name=MODEL,
        kv_cache_bytes=64 << 20,
        args=("--kv-transfer-config", json.dumps(nixl)),
        env={
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
        },
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmEngine]]:
    folder = tmp_path_factory.mktemp("pair")
    found = {name: half(folder, name) for name in ROLES}
    with running(found):
        yield found


@pytest.fixture
async def product(pair: dict[str, VllmEngine]) -> AsyncIterator[Product]:
    product = Product(
        [
            WorkerConfig(name="p", url=pair["p"].url, role="prefill"),
            WorkerConfig(name="d", url=pair["d"].url, role="decode"),
        ],
        tokenizer=TokenizerConfig(path=str(tiny_model()), engine_timeout_s=20.0),
        timing=Timing(poll_s=0.3, timeout_s=10.0, retry_max_s=0.5),
    )
    async with product:
        await product.settled()
        yield product


async def ask(product: Product, prompt: list[int], **more: Any) -> Answer:
    """A greedy completion that tells its token ids."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}
    return await product.post(COMPLETION, body | {"return_token_ids": True} | more)


def ids_of(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def streamed_ids(got: Answer) -> list[int]:
    events = [json.loads(e[6:]) for e in got.body.decode().split("\n\n") if e.startswith("data: {")]
    return [i for e in events if e["choices"] for i in e["choices"][0].get("token_ids") or ()]


def alone(engine: VllmEngine, prompt: list[int]) -> list[int]:
    """What one engine makes of it, without the gateway, with nothing cached before or after."""
    post(engine.url, "/reset_prefix_cache", {})
    answer = complete(engine.url, prompt, tokens=TOKENS)
    assert not answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    post(engine.url, "/reset_prefix_cache", {})
    return ids_of(answer)


def from_outside(engine: VllmEngine) -> float:
    """Prompt tokens that an engine itself counts as neither computed nor from its own cache."""
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=30)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    pattern = r"(?m)^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$"
    return sum(float(count) for count in re.findall(pattern, text))


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
    # To the client and in our metrics that is no hit: the first half had nothing cached.
    assert got.cached == 0
    assert await product.metric("kvatlas_cached_tokens_total") == 0
    assert await product.metric("kvatlas_pairs_total", prefill="p", decode="d") == 1

    streamed = await ask(product, [7, *PROMPT[1:]], stream=True, logprobs=1)
    assert b"[DONE]" in streamed.body
    assert await product.metric("kvatlas_pairs_total") == 2
    assert await product.metric("kvatlas_fallbacks_total") == 0
    assert not any(flag.startswith("pair_refused") for flag in await product.flags())


async def test_what_the_engine_counts_of_a_hand_off_is_the_pairs(product: Product) -> None:
    """Bytes and seconds by vLLM's own counters; over what they went it does not tell."""
    before = await _pair(product)
    assert (await ask(product, [3, *PROMPT[1:]])).worker == "d"

    async def counted() -> bool:
        return (await _pair(product)).get("told_bytes", 0.0) > before.get("told_bytes", 0.0)

    await product.until(counted)
    found = await _pair(product)
    assert (found["state"], found["seen"], found["rate_from"]) == ("ok", "", "engine")
    assert found["bytes_per_s"] > 0
    assert found["split_bytes"] == 0
    told = (await product.get("/kvatlas/explain/last")).body.decode()
    size = re.search(r"([\d.]+) MB handed over by p: first token", told)
    assert size is not None, told
    # What the layout foresees is what was moved; to the end of the last block, or not.
    moved = found["told_bytes"] - before.get("told_bytes", 0.0)
    assert 0.95 * moved <= float(size[1]) * 1e6 <= 1.05 * moved
    assert await product.metric("kvatlas_transport_bytes_total", prefill="p", decode="d") > 0
    assert await product.metric("kvatlas_worker_metrics_malformed_total") == 0


async def _pair(product: Product) -> dict[str, Any]:
    rows = (await product.get("/kvatlas/transports")).json()["pairs"]
    return dict(rows[0]) if rows else {}


async def test_many_at_once_do_not_mix(product: Product, pair: dict[str, VllmEngine]) -> None:
    prompts = [[100 + n, *PROMPT[: 150 + n]] for n in range(6)]
    expected = [await asyncio.to_thread(alone, pair["p"], prompt) for prompt in prompts]
    got = await asyncio.gather(*(ask(product, prompt) for prompt in prompts))
    assert "p" in {a.headers.get("x-kvatlas-prefilled-by") for a in got}, got
    assert [ids_of(a.json()) for a in got] == expected


@pytest.mark.long  # on real clocks; a machine that stands still itself for seconds spoils it
@pytest.mark.parametrize(("frozen", "stream"), [("p", True), ("d", True), ("d", False)])
async def test_a_half_that_freezes_is_left_within_the_deadline(
    product: Product, pair: dict[str, VllmEngine], frozen: str, stream: bool
) -> None:
    """It stands still with the request, and nothing of its connection tells. Later it goes on."""
    prompt = [200 + 2 * (frozen == "d") + stream, *PROMPT[: 300 + 100 * (frozen == "d")]]
    other = "d" if frozen == "p" else "p"
    expected = await asyncio.to_thread(alone, pair[other], prompt)
    group = os.getpgid(pair[frozen].pid)
    os.killpg(group, signal.SIGSTOP)
    try:
        headers = {"x-kvatlas-deadline-ms": "24000"}
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}
        body |= {"return_token_ids": True, "stream": stream}
        got = await product.post(COMPLETION, body, headers)
    finally:
        os.killpg(group, signal.SIGCONT)
    assert (got.status, got.worker) == (200, other), got.body
    half = "prefill" if frozen == "p" else "decode"
    assert got.fallback == f"{half}: timeout"
    assert (streamed_ids(got) if stream else ids_of(got.json())) == expected
    await product.settled()
    again = await ask(product, [5, *prompt])
    assert (again.status, again.headers.get("x-kvatlas-prefilled-by")) == (200, "p")


async def test_a_first_half_that_dies_in_mid_prefill(
    product: Product, pair: dict[str, VllmEngine]
) -> None:
    """Last: the pair is none after it. The half stands still: it surely has not answered."""
    prompt = [9, *PROMPT[:700]]
    expected = await asyncio.to_thread(alone, pair["d"], prompt)
    os.killpg(pair["p"].pid, signal.SIGSTOP)
    asked = asyncio.create_task(ask(product, prompt))
    await product.until(lambda: _sent_to(product, "p"))
    os.killpg(pair["p"].pid, signal.SIGKILL)
    got = await asked
    assert (got.status, got.worker) == (200, "d"), got.body
    assert got.headers["x-kvatlas-fallback"] == "prefill: failed"
    assert ids_of(got.json()) == expected
    assert (await ask(product, prompt)).status == 200  # by what is left of it


async def _sent_to(product: Product, worker: str) -> bool:
    return (await product.in_flight()).get(worker, 0) > 0
