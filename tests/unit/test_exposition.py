"""The text form of figures: as prometheus_client writes it, and in slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvatlas.service.exposition import SLICE_S, Page
from kvatlas.service.metrics import GatewayMetrics

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


class Told(Collector):
    """Whatever a test says."""

    def __init__(self, rows: Iterable[tuple[str, float]], text: str = "") -> None:
        self.rows, self.text = list(rows), text

    def collect(self) -> Iterable[Metric]:
        counter = CounterMetricFamily("a", self.text, labels=("odd", "b"))
        gauge = GaugeMetricFamily("c_seconds", self.text)
        for label, value in self.rows:
            counter.add_metric((label, "x"), value)
            gauge.add_metric((), value)
        yield from (counter, gauge)


def registry_of(told: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(told)
    return registry


def read(page: bytes) -> list[object]:
    """All that Prometheus reads there; numbers as text, for not all equal themselves."""
    return [
        (f.name, f.type, f.documentation, [(s.name, s.labels, repr(s.value)) for s in f.samples])
        for f in text_string_to_metric_families(page.decode())
    ]


@given(st.lists(st.tuples(TEXT, st.floats())), TEXT)
def test_the_same_as_the_library_writes(rows: list[tuple[str, float]], text: str) -> None:
    registry = registry_of(Told(rows, text))
    assert read(Page(registry).now()) == read(generate_latest(registry))


async def test_a_scrape_lets_others_go_first() -> None:
    """With 20,000 series, somebody who wants to run at every turn of the loop does so."""
    metrics = GatewayMetrics(registry_of(Told((f"worker-{n}", n) for n in range(10_000))))
    longest_s, done = 0.0, asyncio.Event()

    async def beat() -> None:
        nonlocal longest_s
        while not done.is_set():
            began_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - began_s)

    beating = asyncio.create_task(beat())
    began_s = time.thread_time()
    text = await metrics.page.text()
    took_s = time.thread_time() - began_s
    done.set()
    await beating
    assert text.count(b"\nc_seconds ") == text.count(b"\na_total{") == 10_000
    assert took_s > 10 * SLICE_S
    assert longest_s < took_s / 2  # the family is collected in one go, its text is not made so


async def test_who_asks_meanwhile_gets_the_same_page() -> None:
    metrics = GatewayMetrics()
    one, other = await asyncio.gather(metrics.page.text(), metrics.page.text())
    assert one is other
    assert await metrics.page.text() is not one


async def test_a_scraper_that_leaves_takes_the_page_from_nobody() -> None:
    metrics = GatewayMetrics()
    leaves = asyncio.create_task(metrics.page.text())
    stays = asyncio.create_task(metrics.page.text())
    await asyncio.sleep(0)
    leaves.cancel()
    assert (await stays).startswith(b"# HELP kvatlas_requests_total")
