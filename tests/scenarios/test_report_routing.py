"""Field reports of class D, routing and load, on the assembled product."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from harness import (
    CHAT,
    COMPLETION,
    EMBEDDINGS,
    QUICK,
    WAIT_S,
    Answer,
    FakeWorker,
    Product,
    announce,
    crowd,
    fresh_tokens,
    shares,
    stub_workers,
)

from kvatlas.config import RouterConfig, TokenizerConfig
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.connectors.stub_text import FileTokenizer
from kvatlas.demo.vocabulary import write_tokenizer
from kvatlas.service.engines import Timing
from kvatlas.workload.models import load_layout
from kvatlas.workload.spec import EngineSpec

WORKERS = 8
CROWD = 480
PREFIX = " ".join(f"word{i % 50}" for i in range(200))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, [PREFIX])
    return directory


@contextlib.asynccontextmanager
async def eight(
    tokenizer: Path, timing: Timing, busy_with: int = 0
) -> AsyncIterator[tuple[Product, list[FakeWorker]]]:
    """``busy_with``: requests that the first worker has by other ways than through us."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(f"w{i}")) for i in range(WORKERS)]
        workers[0].running = busy_with
        product = Product(
            [w.config() for w in workers],
            tokenizer=TokenizerConfig(path=str(tokenizer), verify_every=0),
            router=RouterConfig(prefill_tokens_per_s=2000.0),
            timing=timing,
        )
        await stack.enter_async_context(product)
        await product.settled()
        yield product, workers


USER = {"role": "user", "content": PREFIX}
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "chat": (CHAT, {"messages": [USER]}),
    "chat, streaming": (CHAT, {"messages": [USER], "stream": True}),
    "completion": (COMPLETION, {"prompt": PREFIX}),
    "completion, streaming": (COMPLETION, {"prompt": PREFIX, "stream": True}),
    "token ids": (COMPLETION, {"prompt": [7] * 400}),
    "embeddings": (EMBEDDINGS, {"input": PREFIX}),
    "responses": ("/v1/responses", {"input": PREFIX}),
    "pass-through": ("/v1/rerank", {"query": PREFIX, "documents": ["a"]}),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_vllm_router_179_no_worker_idle_on_any_endpoint(tokenizer: Path, kind: str) -> None:
    path, fields = KINDS[kind]
    # Load reports come once in a minute: what spreads a burst is the router's own count.
    slow = msgspec.structs.replace(QUICK, poll_s=60.0)
    async with eight(tokenizer, slow) as (product, workers):
        words = FileTokenizer(tokenizer)
        for ids in (words.encode(PREFIX, special=True), words.encode_chat({"messages": [USER]})):
            announce(workers[0].events, ids, f"{len(ids)}")
        announce(workers[0].events, b"\x07\x00\x00\x00" * 400, "sevens")
        keyed = path in (CHAT, COMPLETION)
        first = await product.post(path, {"model": "m", **fields})

        async def holder() -> bool:
            answer = await product.post(path, {"model": "m", **fields})
            return answer.worker == "w0" and answer.expected > 100

        if keyed:
            await product.until(holder)  # affinity alone would send them all to w0
        body = json.dumps({"model": "m", **fields}).encode()
        answers = await crowd(workers, [product.post(path, body) for _ in range(CROWD)])
        assert first.status == 200
        assert {a.status for a in answers} == {200}
        counts = [worker.most for worker in workers]
        assert sum(counts) == CROWD
        assert min(counts) > 0
        assert max(counts) <= 2 * CROWD / WORKERS
        assert await product.in_flight() == {}
        assert await product.metric("kvatlas_requests_in_flight") == 0


async def test_vllm_router_179_misses_shun_an_overloaded_worker(tokenizer: Path) -> None:
    async with eight(tokenizer, QUICK, busy_with=300) as (product, workers):
        prompts = [fresh_tokens(400, seed) for seed in range(100, 164)]
        found = shares(await crowd(workers, [product.complete(prompt) for prompt in prompts]))
        assert found["w0"] == 0
        assert min(found[w.name] for w in workers[1:]) > 0
        assert max(found.values()) <= 2 * 64 / 7


# -- llm-d-router#1726 ----------------------------------------------------------------------------

BURST = 32
SHARED = fresh_tokens(4000, 5)
TAILS = [fresh_tokens(50, 1000 + i) for i in range(BURST)]
TENTH_MS = 10_000.0  # tokens/s: a tenth of the report's millisecond per new token


@contextlib.asynccontextmanager
async def four(layout: str = "16") -> AsyncIterator[tuple[Product, StubCluster]]:
    spec = EngineSpec(
        blocks=4000,
        prefill_tokens_per_s=TENTH_MS,
        decode_step_s=0.001,
        context_tokens=8192,
    )
    state = load_layout(layout, engine="vllm")
    async with StubCluster(StubOptions(state, spec, model_name="m", count=4)) as cluster:
        router = RouterConfig(prefill_tokens_per_s=TENTH_MS)
        async with Product(stub_workers(cluster, layout), router=router) as product:
            await product.settled()
            yield product, cluster


async def burst(
    product: Product, tails: list[list[int]] = TAILS, *, within_s: float = 0.05
) -> list[asyncio.Task[Answer]]:
    tasks = []
    for tail in tails:
        prompt = [*SHARED, *tail]
        tasks.append(asyncio.create_task(product.complete(prompt, max_tokens=2, stream=True)))
        await asyncio.sleep(within_s / BURST)
    return tasks


async def test_llm_d_router_1726_a_burst_computes_its_prefix_once_or_twice() -> None:
    async with four() as (product, _):
        tasks = await burst(product)
        assert max((await product.in_flight()).values()) <= 2 * (BURST + 1) / 4 + 1
        answers = await asyncio.gather(*tasks)
        assert {a.status for a in answers} == {200}
        computed = await computed_tokens(product, await product.workers())
        assert sum(computed.values()) <= 9_600
        assert sum(tokens >= 4000 for tokens in computed.values()) <= 2
        assert await product.in_flight() == {}


async def test_a_burst_of_one_v4_prompt_is_computed_twice_and_its_end_by_each() -> None:
    """V4 resumes at few positions: behind the last one of a prompt everybody computes the rest."""
    async with four("deepseek-v4-flash") as (product, _):
        answers = await asyncio.gather(*await burst(product, [[]] * BURST))
        assert {a.status for a in answers} == {200}
        computed = await computed_tokens(product, await product.workers())
        assert sum(computed.values()) <= 12_800
        assert sum(tokens >= 3800 for tokens in computed.values()) <= 2


async def computed_tokens(product: Product, rows: dict[str, dict[str, object]]) -> Counter[str]:
    """Prompt tokens that each engine did not find in its cache, by its own metrics."""
    found: Counter[str] = Counter()
    for name, row in rows.items():
        page = await product.client.request("GET", f"{row['url']}/metrics")
        value = {}
        for line in page.body.decode().splitlines():
            head, _, number = line.rpartition(" ")
            value[head.partition("{")[0]] = number
        queried = float(value["vllm:prefix_cache_queries_total"])
        found[name] = int(queried - float(value["vllm:prefix_cache_hits_total"]))
    return found


async def test_llm_d_router_1726_the_first_request_leaves() -> None:
    async with four() as (product, _):
        prompt = [*SHARED, *fresh_tokens(50, 1)]
        first = asyncio.create_task(product.complete(prompt, max_tokens=2, stream=True))

        async def computing() -> bool:
            return bool(await product.in_flight())

        await product.until(computing)
        rest = await burst(product)
        first.cancel()
        began = time.monotonic()
        answers = await asyncio.gather(*rest)
        assert {a.status for a in answers} == {200}
        assert time.monotonic() - began < WAIT_S / 2
        assert sum((await computed_tokens(product, await product.workers())).values()) <= 14_000
        await product.until_equal(product.in_flight, {})


async def test_llm_d_router_1726_the_engine_of_the_first_request_dies() -> None:
    async with four() as (product, cluster):
        tasks = await burst(product)
        busy = await product.in_flight()
        victim = max(busy, key=lambda name: busy[name])
        await cluster.stop(int(victim.removeprefix("stub-")))
        answers = await asyncio.gather(*tasks)
        failed = [a for a in answers if a.status != 200]
        assert len(failed) <= busy[victim]
        assert all(a.status == 502 or a.broken for a in failed)
        again = await asyncio.gather(*(product.complete([*SHARED, i]) for i in range(8)))
        assert {a.status for a in again} == {200}
        assert victim not in shares(again)
        assert await product.in_flight() == {}
