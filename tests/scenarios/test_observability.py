"""What a cluster shows while it works: a page that Prometheus takes, whose parts add up, and that
holds no request up."""

from __future__ import annotations

import asyncio
import subprocess
import time

import install
import pytest
from harness import FakeWorker, Product, fresh_tokens
from pairs_kit import decode, nixl_prefill, prefill
from prometheus_client.parser import text_string_to_metric_families

PROMPT = fresh_tokens(100)


async def page_of(product: Product) -> str:
    return (await product.get("/metrics")).body.decode()


def sums(text: str) -> dict[str, float]:
    """Samples of one name together."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


async def test_what_a_cluster_of_pairs_shows_adds_up_and_prometheus_takes_it() -> None:
    async with FakeWorker("p", nixl_prefill) as p, FakeWorker("d") as d:
        p.cached_tokens = 32
        async with Product([prefill(p), decode(d)]) as product:
            for _ in range(3):
                await product.complete(PROMPT)
            text = await page_of(product)
    found = sums(text)
    assert found["kvatlas_prompt_tokens_total"] == 300
    assert found["kvatlas_cached_tokens_total"] == 96
    assert 'kvatlas_prompt_tokens_total{source="computed",worker="d"} 204.0' in text
    assert 'kvatlas_prompt_tokens_total{source="hbm",worker="d"} 96.0' in text
    assert found["kvatlas_requests_total"] == found["kvatlas_request_seconds_count"] == 3
    promtool = install.promtool()
    if promtool is None:
        pytest.skip(install.missing("promtool"))
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


async def test_scrapes_during_overload_hold_no_request_up() -> None:
    """Hundreds of requests under way and a scrape always running: all are answered, and the
    slowest of them took no longer than without scrapes, but for what the machine does."""
    async with FakeWorker("a") as a, Product([a.config()]) as product:

        async def storm() -> float:
            began_s = time.perf_counter()
            answers = await asyncio.gather(*(product.complete("x" * 50) for _ in range(200)))
            assert [answer.status for answer in answers] == [200] * 200
            return time.perf_counter() - began_s

        await storm()  # connections are made
        alone_s = await storm()
        scraped, over = 0, asyncio.Event()

        async def scrape() -> None:
            nonlocal scraped
            while not over.is_set():
                assert b"kvatlas_requests_total" in (await product.get("/metrics")).body
                scraped += 1

        scraping = [asyncio.create_task(scrape()) for _ in range(4)]
        together_s = await storm()
        over.set()
        await asyncio.gather(*scraping)
        assert scraped >= 4
        assert together_s < 10 * alone_s + 5.0
        assert await product.in_flight() == {}
