"""The gateway's own figures, as Prometheus metrics named ``kvatlas_*``.

Children are looked up once per label set and kept: the hot path adds numbers. Label values come
from short fixed lists (endpoints, statuses) or from the configuration (workers).
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from kvatlas.core.ladder import Fallback
from kvatlas.service.body import Usage

_FALLBACK = ("rung", "reason", "to", "worker")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROUTE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2)

# Prometheus gets a second series beside every counter otherwise, which nobody asked for.
disable_created_metrics()  # type: ignore[no-untyped-call]


class GatewayMetrics:
    """Counts what the gateway does. ``registry`` may hold other parts' metrics too."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.violations = 0
        self.violation_last = ""
        counter = self._counter
        self._requests = counter("requests", "requests answered", "endpoint", "status")
        self._refused = counter("requests_refused", "no engine was chosen: why", "reason")
        self._forwarded = counter("worker_requests", "requests sent to a worker", "worker")
        self._outcomes = counter("worker_outcomes", "what became of them", "worker", "status")
        self._fallbacks = counter("fallbacks", "steps down the ladder", *_FALLBACK)
        self._fallback_s = counter("fallback_seconds", "what they cost", *_FALLBACK)
        self._pairs = counter("pairs", "requests served by a pair", "prefill", "decode")
        self._own_pairing = counter("pairing_fields_dropped", "set by clients, not passed on")
        self._prompt = counter("prompt_tokens", "as the engines reported", "worker")
        self._completion = counter("completion_tokens", "as the engines reported", "worker")
        self._cached = counter("cached_tokens", "prompt tokens that hit, as reported", "worker")
        self._expected = counter("expected_hit_tokens", "as the route expected", "worker")
        self._unreported = counter("usage_unreported", "answers without usage", "worker")
        self._reports = counter("reports_dropped", "wishes for a report of the hit, not passed on")
        self._violations = counter("usage_violations", "impossible usage figures", "worker")
        self._flight = Gauge(
            "kvatlas_requests_in_flight", "at a worker now", ("worker",), registry=self.registry
        )
        self._route_s = self._histogram("route_seconds", "body to engine chosen", _ROUTE_SECONDS)
        self._ttft_s = self._histogram("ttft_seconds", "request to first body byte", _SECONDS)
        self._e2e_s = self._histogram("request_seconds", "request to last byte", _SECONDS)
        self._children: dict[tuple[object, ...], Counter | Gauge] = {}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvatlas_{name}_total", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvatlas_{name}", text, buckets=buckets, registry=self.registry)

    def _add(self, metric: Counter | Gauge, *labels: str, by: float = 1) -> None:
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        child.inc(by)

    def answered(self, endpoint: str, status: int, e2e_s: float) -> None:
        self._add(self._requests, endpoint, str(status))
        self._e2e_s.observe(e2e_s)

    def routed(self, route_s: float) -> None:
        self._route_s.observe(route_s)

    def fell(self, fallback: Fallback) -> None:
        labels = fallback.rung, fallback.reason, fallback.to, fallback.worker
        self._add(self._fallbacks, *labels)
        self._add(self._fallback_s, *labels, by=fallback.cost_s)

    def refused(self, reason: str) -> None:
        self._add(self._refused, reason)

    def sent(self, worker: str, expected_hit_tokens: int) -> None:
        self._add(self._forwarded, worker)
        self._add(self._flight, worker)
        if expected_hit_tokens > 0:
            self._add(self._expected, worker, by=expected_hit_tokens)

    def left(self, worker: str, status: int) -> None:
        self._add(self._flight, worker, by=-1)
        self._add(self._outcomes, worker, str(status))

    def unreportable(self) -> None:
        self._reports.inc()

    def paired(self, prefill: str, decode: str) -> None:
        self._add(self._pairs, prefill, decode)

    def pairing_dropped(self) -> None:
        self._own_pairing.inc()

    def first_byte(self, ttft_s: float) -> None:
        self._ttft_s.observe(ttft_s)

    def used(self, worker: str, usage: Usage | None) -> None:
        """What a complete answer reported."""
        if usage is None:
            self._add(self._unreported, worker)
        elif usage.violation:
            self.violations += 1
            self.violation_last = f"{worker}: {usage.violation}"
            self._add(self._violations, worker)
        else:
            self._add(self._prompt, worker, by=max(0, usage.prompt_tokens))
            self._add(self._completion, worker, by=max(0, usage.completion_tokens))
            self._add(self._cached, worker, by=max(0, usage.cached_tokens))

    def text(self) -> bytes:
        """The Prometheus text form of the whole registry."""
        return generate_latest(self.registry)
