"""Whatever breaks, requests are served; what is degraded is flagged and counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from harness import (
    COMPLETION,
    FakeWorker,
    Product,
    fresh_tokens,
    shares,
    stub_workers,
)
from stub_publisher import BLOCK, block_tokens, stored

from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.core.layout import plain
from kvatlas.workload.spec import EngineSpec

GRID = 16
SPEC = EngineSpec(blocks=2000, prefill_tokens_per_s=1e5, decode_step_s=0.001)


@contextlib.asynccontextmanager
async def stubs(count: int, **options: Any) -> AsyncIterator[tuple[Product, StubCluster]]:
    stub = StubOptions(plain(GRID), SPEC, model_name="m", count=count, **options)
    async with (
        StubCluster(stub) as cluster,
        Product(stub_workers(cluster, str(GRID))) as product,
    ):
        await product.settled()
        yield product, cluster


async def fill(product: Product) -> dict[str, list[list[int]]]:
    """Each prompt on one engine, in turn and past the gateway; by the worker that holds it."""
    urls = {name: row["url"] for name, row in (await product.workers()).items()}
    held: dict[str, list[list[int]]] = {name: [] for name in urls}
    for index, prompt in enumerate(PROMPTS):
        name = list(urls)[index % len(urls)]
        await product.client.post_json(
            urls[name] + COMPLETION, {"model": "m", "prompt": prompt, "max_tokens": 1}
        )
        held[name].append(prompt)

        async def known(prompt: list[int] = prompt, name: str = name) -> bool:
            return name in await product.ask(prompt[:-1])

        await product.until(known)
    return held


PROMPTS = [fresh_tokens(8 * GRID + 1, seed) for seed in range(8)]


def planted(*_: object) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize("part", ["tokenizer", "directory"])
async def test_a_broken_part_means_routing_by_load(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    async with stubs(2) as (product, _):
        await fill(product)
        with monkeypatch.context() as patch:
            method = {"tokenizer": "prompt", "directory": "peek"}[part]
            patch.setattr(getattr(product.assembly, part), method, planted)
            answers = [await product.complete(PROMPTS[0]) for _ in range(4)]
            reason = f"{part}_failed"
            assert {(a.status, a.fallback, a.expected) for a in answers} == {
                (200, f"lookup: {reason}", 0)
            }
            assert len(shares(answers)) == 2
            assert await product.metric("kvatlas_fallbacks_total", reason=reason) == 4
            assert (await product.directory())["fallbacks"][reason] == 4
            assert f"internal:{part}" in await product.flags()
        assert (await product.complete(PROMPTS[0])).fallback == ""
        assert f"internal:{part}" not in await product.flags()


async def test_no_tokenizer_at_all_is_flagged() -> None:
    async with FakeWorker("w1") as w1, Product([w1.config()]) as product:
        await product.settled()
        answer = await product.chat([{"role": "user", "content": "hello"}])
        assert (answer.status, answer.fallback) == (200, "lookup: endpoint_failed")
        assert "tokenizer:endpoint" in await product.flags()


async def test_engines_without_events_are_served_and_flagged() -> None:
    async with stubs(2, events=False) as (product, _):
        answers = [await product.complete(PROMPTS[0]) for _ in range(4)]
        assert {(a.status, a.expected) for a in answers} == {(200, 0)}
        assert {"feed:stub-0", "feed:stub-1"} <= await product.flags()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_dies_in_the_middle(stream: bool) -> None:
    async with stubs(2) as (product, cluster):
        held = await fill(product)
        victim, prompts = next(iter(held.items()))
        other = next(name for name in ("stub-0", "stub-1") if name != victim)
        long = {"max_tokens": 500, "stream": stream}
        running = asyncio.create_task(product.complete(prompts[0], **long))

        async def busy() -> bool:
            return await product.in_flight() == {victim: 1}

        await product.until(busy)
        await cluster.stop(int(victim[-1]))
        broken = await running
        if broken.status == 200:  # nothing was seen of it yet: the other engine began anew
            assert (broken.worker, broken.usage["completion_tokens"]) == (other, 500)
        else:  # never a silent end
            assert broken.broken or broken.json()["error"]["code"] == "engine_failed"
        again = [await product.complete(prompt) for prompt in PROMPTS]
        assert {(a.status, a.worker) for a in again} == {(200, other)}
        assert await product.in_flight() == {}


async def test_an_engine_that_restarts_in_place_is_believed_nothing() -> None:
    async with stubs(2) as (product, cluster):
        held = await fill(product)
        before = [await product.ask(prompt) for prompt in PROMPTS]
        await cluster.stop(0)
        await cluster.start(0)

        async def forgotten() -> bool:
            return not any(["stub-0" in await product.ask(p) for p in held["stub-0"]])

        await product.until(forgotten)
        for prompt, had in zip(PROMPTS, before, strict=True):
            kept = {worker: found for worker, found in had.items() if worker == "stub-1"}
            assert await product.ask(prompt) == kept
        await product.settled()
        for prompt in PROMPTS:
            answer = await product.complete(prompt)
            assert answer.status == 200
            assert answer.expected == answer.cached


@contextlib.asynccontextmanager
async def fakes(*names: str) -> AsyncIterator[tuple[Product, list[FakeWorker]]]:
    """The product in front of the first two of these workers."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(name)) for name in names]
        product = await stack.enter_async_context(Product([w.config() for w in workers[:2]]))
        await product.settled()
        yield product, workers


async def test_health_that_is_late_everywhere_is_no_outage() -> None:
    async with fakes("w1", "w2") as (product, (w1, w2)):
        w1.events.publish(stored("AB", 2))
        await product.answers("AB", {"w1": 2})
        w1.healthy = w2.healthy = False

        async def ready() -> int:
            return (await product.get("/ready")).status

        await product.until_equal(ready, 503)
        assert {"engine_down:w1", "engine_down:w2"} <= await product.flags()
        answer = await product.complete([*block_tokens("AB"), 1])
        assert (answer.status, answer.worker, answer.expected) == (200, "w1", 2 * BLOCK)
        w2.healthy = True

        await product.until_equal(ready, 200)
        assert (await product.complete([*block_tokens("AB"), 1])).worker == "w2"


async def test_an_engine_that_was_never_there() -> None:
    async with FakeWorker("w1") as w1:
        config = w1.config()
        await w1.close()
        async with Product([config]) as product:
            assert "engine_down:w1" in await product.flags()
            answer = await product.complete([1, 2, 3])
            assert answer.status == 503
            assert answer.json()["error"]["code"] == "no_engine"
            assert answer.headers["retry-after"]
            await w1.listen()
            await product.settled()
            assert (await product.complete([1, 2, 3])).status == 200


async def test_reload_takes_up_and_forgets_workers() -> None:
    async with fakes("w1", "w2", "w3") as (product, workers):
        _, w2, w3 = workers
        for worker in workers:
            worker.events.publish(stored("AB", 2))
        await product.answers("AB", {"w1": 2, "w2": 2})
        other = msgspec.structs.replace(product.config, worker=(w2.config(), w3.config()))
        await product.assembly.reload(other)
        await product.answers("AB", {"w2": 2, "w3": 2})
        assert set(await product.workers()) == {"w2", "w3"}
        answers = await asyncio.gather(
            *(product.post(COMPLETION, {"model": "m", "prompt": [i]}) for i in range(8))
        )
        assert set(shares(answers)) == {"w2", "w3"}
