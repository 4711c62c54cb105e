"""Traces of what `kvatlas serve` runs: both halves of a pair, and what was looked up."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from gateway_kit import eventually
from harness import COMPLETION, FakeWorker, Product, fresh_tokens
from otlp_kit import Collector, Seen, collecting, exporting
from pairs_kit import decode, fails, nixl_prefill, prefill
from test_pairs_concurrent import BOTH, Rooms, WithBootstrap

from kvatlas.config import PairingProtocol
from kvatlas.config_tracing import TracingConfig
from kvatlas.service.tracing import Traced

PROMPT = fresh_tokens(100)
ALL = TracingConfig(sample_ratio=1.0)


@contextlib.asynccontextmanager
async def traced(product: Product) -> AsyncIterator[Collector]:
    """Its requests go to this collector from now on."""
    async with collecting() as collector, exporting(collector.url) as exporter:
        product.gateway._steer = Traced(product.assembly.steering, exporter, ALL)
        yield collector


async def asked(product: Product, collector: Collector) -> tuple[Seen, list[Seen]]:
    """A streamed request: its span, and those under it."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 7, "stream": True}
    assert (await product.post(COMPLETION, body)).status == 200
    await eventually(lambda: any(span.kind == 2 for span in collector.spans))
    root = collector.named("text_completion m")
    return root, collector.children(root)


async def test_both_halves_of_a_pair_are_spans_with_their_engines() -> None:
    async with FakeWorker("p", nixl_prefill) as p, FakeWorker("d") as d:
        p.cached_tokens = 32
        async with Product([prefill(p), decode(d)]) as product, traced(product) as collector:
            root, spans = await asked(product, collector)
            assert [span.name for span in spans] == ["route", "prefill", "transfer", "decode"]
            _, first, between, second = spans
            assert first.attributes == {
                "kvatlas.engine": "p",
                "gen_ai.usage.cache_read.input_tokens": 32,
            }
            pair = {"kvatlas.prefill_engine": "p", "kvatlas.decode_engine": "d"}
            assert between.attributes == pair
            assert second.attributes["kvatlas.engine"] == "d"
            assert root.attributes["kvatlas.prefilled_by"] == "p"
            heard = [worker.got[0].header("traceparent") for worker in (p, d)]
            assert heard == [f"00-{root.trace}-{root.id}-01"] * 2
            (lookup,) = collector.children(spans[0])
            assert lookup.attributes["kvatlas.prompt_tokens"] == 100
            assert "kvatlas.unkeyed" not in lookup.attributes
            assert lookup.seconds <= spans[0].seconds


@BOTH
async def test_halves_that_are_asked_at_once(protocol: PairingProtocol) -> None:
    rooms = Rooms()
    async with (
        WithBootstrap("p", rooms.first) as p,
        FakeWorker("d", rooms.second) as d,
        Product([p.half(protocol), decode(d, pairing=protocol)]) as product,
        traced(product) as collector,
    ):
        _, spans = await asked(product, collector)
        legs = [(s.name, s.attributes.get("kvatlas.engine")) for s in spans if s.name != "transfer"]
        assert legs == [("route", "p"), ("prefill", "p"), ("decode", "d")]


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_half_that_fails_is_an_error_and_who_stands_in_is_seen(half: str) -> None:
    behave = {"prefill": (fails(500, 1), None), "decode": (nixl_prefill, fails(503, 1))}[half]
    async with (
        FakeWorker("p", behave[0]) as p,
        FakeWorker("d", behave[1]) as d,
        Product([prefill(p), decode(d)]) as product,
        traced(product) as collector,
    ):
        root, spans = await asked(product, collector)
        assert root.error == ""
        lost = [span.name for span in spans if span.error]
        assert lost == ["prefill" if half == "prefill" else "transfer"]
        assert [span.name for span in spans][-2:] == ["prefill", "decode"]
        assert root.attributes["kvatlas.fallbacks"]
