"""Stub engines as halves of pairs: state by the byte, so a wrong hand-over is a wrong answer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scenarios"))
from harness import Product, fresh_tokens, stub_workers

from kvatlas.config import WorkerConfig
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.workload.models import load_layout
from kvatlas.workload.spec import EngineSpec

SPEC = EngineSpec(blocks=4000, prefill_tokens_per_s=1e6, decode_step_s=1e-4)
LAYOUTS = pytest.mark.parametrize("name", ["32", "deepseek-v4-flash"])


def cluster_of(name: str, count: int) -> StubCluster:
    layout = load_layout(name, engine="vllm")
    return StubCluster(StubOptions(layout, SPEC, model_name="m", count=count))


def halves(cluster: StubCluster, name: str, roles: str) -> list[WorkerConfig]:
    """One worker per letter: p, d or c."""
    full: dict[str, Any] = {"p": "prefill", "d": "decode", "c": "combined"}
    found = stub_workers(cluster, name)
    return [
        WorkerConfig(name=w.name, url=w.url, engine="stub", layout=name, role=full[role])
        for w, role in zip(found, roles, strict=True)
    ]


@LAYOUTS
async def test_a_pair_of_stubs_answers_as_one(name: str) -> None:
    async with (
        cluster_of(name, 3) as cluster,
        Product(halves(cluster, name, "pdd")) as pairs,
        Product(stub_workers(cluster, name)[2:]) as alone,
    ):
        await pairs.settled()
        await alone.settled()
        for n, length in enumerate((20, 300, 1024, 1100)):
            prompt = fresh_tokens(length, n)
            got, again = [await pairs.complete(prompt, max_tokens=8) for _ in range(2)]
            assert got.headers["x-kvatlas-prefilled-by"] == "stub-0"
            expected = await alone.complete(prompt, max_tokens=8)
            assert got.text == again.text == expected.text
            assert got.cached == 0
        grid = load_layout(name, engine="vllm").grid_tokens
        took = sum(cluster.engine(i).numbers().handed_over_tokens for i in (1, 2))
        assert took >= 1023 // grid * grid + 1100 // grid * grid
        moved = sum(cluster.engine(i).pairs.moved.size_bytes for i in (1, 2))
        assert moved > 0
        told = "kvatlas_transport_bytes_total"
        await pairs.until_equal(lambda: pairs.metric(told, prefill="stub-0"), moved)
        first = cluster.engine(0)
        await pairs.until_equal(lambda: _kept(first), 0)  # all was taken, nothing is held
        assert first.numbers().running == 0


async def _kept(engine: Any) -> int:
    return int(engine.pairs.kept)


@LAYOUTS
async def test_damaged_state_would_be_seen(name: str) -> None:
    """The control: these answers depend on what was handed over."""
    async with (
        cluster_of(name, 2) as cluster,
        Product(halves(cluster, name, "pd")) as product,
    ):
        await product.settled()
        prompt = fresh_tokens(1100)
        right = await product.complete(prompt, max_tokens=8)
        for number in range(2):
            assert cluster.engine(number).reset_cache()
        side = cluster.engine(0).pairs
        keep = side.keep

        def damaged(*args: Any) -> dict[str, object]:
            params = keep(*args)
            for kept in side._kept.values():
                kept.blocks = {k: bytes(b ^ 1 for b in v) for k, v in kept.blocks.items()}
            return params

        side.keep = damaged  # type: ignore[method-assign]
        wrong = await product.complete(prompt, max_tokens=8)
        assert wrong.status == 200
        assert wrong.text != right.text


async def test_a_first_half_that_restarts_costs_a_fallback_and_nothing_else() -> None:
    async with (
        cluster_of("32", 3) as cluster,
        Product(halves(cluster, "32", "pdd")) as product,
    ):
        await product.settled()
        texts = {}
        for n in range(30):
            if n == 10:
                await cluster.stop(0)
            if n == 20:
                await cluster.start(0)
                await product.settled()
            got = await product.complete(fresh_tokens(200, n % 10), max_tokens=8)
            assert got.status == 200
            assert got.text == texts.setdefault(n % 10, got.text)
        assert await product.metric("kvatlas_fallbacks_total", rung="prefill") == 10
        assert await product.metric("kvatlas_pairs_total") == 20
        assert await product.in_flight() == {}


async def test_many_clients_at_once() -> None:
    async with (
        cluster_of("32", 4) as cluster,
        Product(halves(cluster, "32", "ppdd")) as product,
        Product(stub_workers(cluster, "32")[3:]) as alone,
    ):
        await product.settled()
        await alone.settled()
        prompts = [fresh_tokens(200 + n, n) for n in range(40)]
        got = await asyncio.gather(*(product.complete(p, max_tokens=8) for p in prompts))
        assert {a.headers["x-kvatlas-prefilled-by"] for a in got} == {"stub-0", "stub-1"}
        assert {a.worker for a in got} == {"stub-2", "stub-3"}
        for prompt, answer in zip(prompts, got, strict=True):
            assert (await alone.complete(prompt, max_tokens=8)).text == answer.text
