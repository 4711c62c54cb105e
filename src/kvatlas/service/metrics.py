"""The gateway's own figures, as Prometheus metrics named ``kvatlas_*``.

The hot path adds to plain numbers, and what Prometheus reads is made of them when it asks. Label
values come from short fixed lists (endpoints, statuses) or from the configuration (workers,
classes of tenants).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvatlas.core.ladder import Fallback
from kvatlas.core.records import Tier
from kvatlas.service.body import Usage
from kvatlas.service.exposition import Page

#: Where the tokens of prompts came from: tiers, computed anew, or not told by the engine.
SOURCES = (*(tier.name.lower() for tier in Tier), "computed", "unreported")

_FALLBACK = ("rung", "reason", "to", "worker")
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("requests answered", ("endpoint", "status")),
    "requests_refused": ("no engine was chosen: why", ("reason",)),
    "worker_requests": ("requests sent to a worker", ("worker",)),
    "worker_outcomes": ("what became of them", ("worker", "status")),
    "fallbacks": ("steps down the ladder", _FALLBACK),
    "fallback_seconds": ("what they cost", _FALLBACK),
    "pairs": ("requests served by a pair", ("prefill", "decode")),
    "pairing_fields_dropped": ("set by clients, not passed on", ()),
    "prompt_tokens": ("by where they came from; all of them together", ("worker", "source")),
    "completion_tokens": ("as the engines reported", ("worker",)),
    "cached_tokens": ("prompt tokens that hit, as reported", ("worker",)),
    "expected_hit_tokens": ("as the route expected", ("worker",)),
    "usage_unreported": ("answers without usage", ("worker",)),
    "reports_dropped": ("wishes for a report of the hit, not passed on", ()),
    "usage_violations": ("impossible usage figures", ("worker",)),
    "tenant_requests": ("by class of tenant, and what came of them", ("tenant_class", "result")),
    "tenant_prompt_tokens": ("by class of tenant and source", ("tenant_class", "source")),
    "tenant_completion_tokens": ("by class of tenant", ("tenant_class",)),
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROUTE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2)


class _Histogram:
    """Seconds by bucket."""

    def __init__(self, name: str, text: str, bounds_s: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds_s = name, text, bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def family(self) -> Metric:
        buckets, upto = [], 0
        names = (*(str(float(bound_s)) for bound_s in self._bounds_s), "+Inf")
        for name, count in zip(names, self._counts, strict=True):
            upto += count
            buckets.append((name, float(upto)))
        family = HistogramMetricFamily(f"kvatlas_{self._name}", self._text)
        family.add_metric((), buckets, self._sum_s)
        return family


class GatewayMetrics(Collector):
    """Counts what the gateway does. ``registry`` may hold other parts' metrics too."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.violations = 0
        self.violation_last = ""
        self._counts: dict[str, defaultdict[tuple[str, ...], float]] = {
            name: defaultdict(float, {} if labels else {(): 0.0})
            for name, (_, labels) in _COUNTERS.items()
        }
        self._flight: dict[str, int] = {}
        self._route_s = _Histogram("route_seconds", "body to engine chosen", _ROUTE_SECONDS)
        self._ttft_s = _Histogram("ttft_seconds", "request to first body byte", _SECONDS)
        self._e2e_s = _Histogram("request_seconds", "request to last byte", _SECONDS)
        self.registry.register(self)
        self.page = Page(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each scrape."""
        for name, (text, labels) in _COUNTERS.items():
            family = CounterMetricFamily(f"kvatlas_{name}", text, labels=labels)
            for key, count in self._counts[name].items():
                family.add_metric(key, count)
            yield family
        flight = GaugeMetricFamily(
            "kvatlas_requests_in_flight", "at a worker now", labels=["worker"]
        )
        for worker, number in self._flight.items():
            flight.add_metric([worker], number)
        yield flight
        for histogram in (self._route_s, self._ttft_s, self._e2e_s):
            yield histogram.family()

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked when it is registered."""
        return ()

    def answered(self, endpoint: str, status: int, e2e_s: float) -> None:
        self._counts["requests"][endpoint, str(status)] += 1
        self._e2e_s.observe(e2e_s)

    def routed(self, route_s: float) -> None:
        self._route_s.observe(route_s)

    def fell(self, fallback: Fallback) -> None:
        labels = fallback.rung, fallback.reason, fallback.to, fallback.worker
        self._counts["fallbacks"][labels] += 1
        self._counts["fallback_seconds"][labels] += fallback.cost_s

    def refused(self, reason: str) -> None:
        self._counts["requests_refused"][reason,] += 1

    def of_tenant(self, tenant_class: str, result: str) -> None:
        """``result``: "routed", or why it was refused; "" is nobody's class."""
        if tenant_class:
            self._counts["tenant_requests"][tenant_class, result] += 1

    def sent(self, worker: str, expected_hit_tokens: int) -> None:
        self._counts["worker_requests"][worker,] += 1
        self._flight[worker] = self._flight.get(worker, 0) + 1
        if expected_hit_tokens > 0:
            self._counts["expected_hit_tokens"][worker,] += expected_hit_tokens

    def left(self, worker: str, status: int) -> None:
        self._flight[worker] -= 1
        self._counts["worker_outcomes"][worker, str(status)] += 1

    def unreportable(self) -> None:
        self._counts["reports_dropped"][()] += 1

    def paired(self, prefill: str, decode: str) -> None:
        self._counts["pairs"][prefill, decode] += 1

    def pairing_dropped(self) -> None:
        self._counts["pairing_fields_dropped"][()] += 1

    def first_byte(self, ttft_s: float) -> None:
        self._ttft_s.observe(ttft_s)

    def used(
        self,
        worker: str,
        usage: Usage | None,
        tier_tokens: Sequence[int] = (),
        tenant_class: str = "",
    ) -> None:
        """What a complete answer reported. ``tier_tokens``: from where its plan took the hit."""
        counts = self._counts
        if usage is None:
            counts["usage_unreported"][worker,] += 1
        elif usage.violation:
            self.violations += 1
            self.violation_last = f"{worker}: {usage.violation}"
            counts["usage_violations"][worker,] += 1
        else:
            completion_tokens = max(0, usage.completion_tokens)
            counts["completion_tokens"][worker,] += completion_tokens
            counts["cached_tokens"][worker,] += max(0, usage.cached_tokens)
            parts = by_source(usage.prompt_tokens, usage.cached_tokens, tier_tokens)
            for source, tokens in parts:
                counts["prompt_tokens"][worker, source] += tokens
            if tenant_class:
                counts["tenant_completion_tokens"][tenant_class,] += completion_tokens
                for source, tokens in parts:
                    counts["tenant_prompt_tokens"][tenant_class, source] += tokens

    def text(self) -> bytes:
        """The Prometheus text form of the whole registry, at once."""
        return self.page.now()


def by_source(
    prompt_tokens: int, cached_tokens: int, tier_tokens: Sequence[int]
) -> list[tuple[str, int]]:
    """A prompt's tokens by `SOURCES`, zeros left out; together they are the prompt.

    The engine tells how many it reused, the plan from where: the nearest tiers are counted first,
    and what the engine had beyond the plan was in its own memory.
    """
    if prompt_tokens <= 0:
        return []
    if cached_tokens < 0:
        return [("unreported", prompt_tokens)]
    parts, left = [], cached_tokens
    for tier, tokens in enumerate(tier_tokens):
        if tokens and left:
            parts.append((SOURCES[tier], min(tokens, left)))
            left -= min(tokens, left)
    if left:
        own = parts.pop(0)[1] if parts and parts[0][0] == "hbm" else 0
        parts.insert(0, ("hbm", own + left))
    if prompt_tokens > cached_tokens:
        parts.append(("computed", prompt_tokens - cached_tokens))
    return parts
