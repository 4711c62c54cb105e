"""The gateway's figures: what they add up to, and their form for Prometheus."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.core.ladder import Fallback
from kvatlas.service.body import Usage
from kvatlas.service.metrics import SOURCES, GatewayMetrics, by_source

TOKENS = st.integers(0, 1 << 20)


@given(TOKENS, st.integers(-1, 1 << 20), st.lists(TOKENS, max_size=5))
def test_the_sources_of_a_prompt_sum_to_it(prompt: int, cached: int, tiers: list[int]) -> None:
    cached = min(cached, prompt)
    parts = by_source(prompt, cached, tiers)
    names = [name for name, _ in parts]
    assert sum(tokens for _, tokens in parts) == prompt
    assert all(tokens > 0 for _, tokens in parts)
    assert len(names) == len(set(names))
    assert set(names) <= set(SOURCES)
    if cached >= 0:
        assert sum(tokens for name, tokens in parts if name != "computed") == cached


@pytest.mark.parametrize(
    ("cached", "tiers", "parts"),
    [
        (600, (100, 200, 300), {"hbm": 100, "dram": 200, "disk": 300, "computed": 400}),
        (250, (100, 200, 300), {"hbm": 100, "dram": 150, "computed": 750}),  # not all was loaded
        (700, (0, 200, 0, 300), {"hbm": 200, "dram": 200, "object": 300, "computed": 300}),
        (1000, (), {"hbm": 1000}),
        (0, (100,), {"computed": 1000}),
        (-1, (100,), {"unreported": 1000}),
    ],
)
def test_where_a_hit_came_from(cached: int, tiers: tuple[int, ...], parts: dict[str, int]) -> None:
    assert dict(by_source(1000, cached, tiers)) == parts


def test_hit_tokens_by_tier_sum_to_prompt_tokens_on_the_page() -> None:
    metrics = GatewayMetrics()
    metrics.used("a", Usage(1000, 10, 600), (100, 200, 300), "paying")
    metrics.used("a", Usage(500, 10, 0))
    metrics.used("b", Usage(300, 10, -1), (), "paying")
    metrics.used("b", Usage(10, 1, 20, "impossible"), (10,), "paying")
    metrics.used("b", None)
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            if sample.name.endswith("prompt_tokens_total"):
                sums[sample.name] = sums.get(sample.name, 0) + sample.value
    assert sums == {
        "kvatlas_prompt_tokens_total": 1800,
        "kvatlas_tenant_prompt_tokens_total": 1300,
    }


def test_histograms_are_cumulative_and_hold_every_observation() -> None:
    metrics = GatewayMetrics()
    for seconds in (0.0, 0.005, 0.3, 1e9):
        metrics.first_byte(seconds)
    found = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }
    name = "kvatlas_ttft_seconds"
    assert found[f"{name}_bucket", "0.005"] == 2
    assert found[f"{name}_bucket", "0.25"] == 2
    assert found[f"{name}_bucket", "0.5"] == 3
    assert found[f"{name}_bucket", "+Inf"] == found[f"{name}_count", None] == 4
    assert found[f"{name}_sum", None] == pytest.approx(1e9 + 0.305)


def test_who_is_of_no_class_is_counted_in_none() -> None:
    metrics = GatewayMetrics()
    metrics.of_tenant("", "routed")
    metrics.of_tenant("paying", "slo_unreachable")
    metrics.fell(Fallback("engine", "timeout", "error", 'a"\n\\', 0.5))
    text = metrics.text().decode()
    assert text.count("kvatlas_tenant_requests_total{") == 1
    assert 'result="slo_unreachable",tenant_class="paying"} 1.0' in text
    assert r'worker="a\"\n\\"' in text
