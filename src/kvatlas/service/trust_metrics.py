"""Certificates, refusals and the audit log, as figures for Prometheus and flags of /health."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvatlas.dataplane.tls import EXPIRES_SHARE, Trust
from kvatlas.service.admin import Guard

if TYPE_CHECKING:
    from kvatlas.service.steering import Problems


class TrustMetrics(Collector):
    """Of one part; ``door``: what its `Door` counted. ``prefix``: of its metrics' names."""

    def __init__(
        self,
        guard: Guard,
        trust: Trust | None = None,
        door: Callable[[], Counter[str]] = Counter,
        prefix: str = "kvatlas",
    ) -> None:
        self._guard = guard
        self._trust = trust
        self._door = door
        self._prefix = prefix

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each scrape."""
        ends = GaugeMetricFamily(
            f"{self._prefix}_tls_ends_seconds", "when its certificate ends, in Unix time"
        )
        if self._trust is not None:
            ends.add_metric((), self._trust.life.ends_s)
        yield ends
        reloads = self._trust.counts if self._trust is not None else Counter[str]()
        audit = self._guard.audit
        lines = audit.counts if audit is not None else Counter[str]()
        yield self._counter("tls_connections", "that came in, by what became of them", self._door())
        yield self._counter("tls_reloads", "of certificates that changed", reloads)
        yield self._counter("admin", "who was not let in, files not taken up", self._guard.counts)
        yield self._counter("audit", "lines of the audit log, and those it lacks", lines)

    def describe(self) -> Iterable[Metric]:
        """Nothing is read when it is registered."""
        return ()

    def _counter(self, name: str, text: str, counts: Counter[str]) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}_{name}", text, labels=("outcome",))
        for outcome, count in sorted(counts.items()):
            family.add_metric((outcome,), count)
        return family


def trust_problems(
    guard: Guard, trust: Trust | None, wall: Callable[[], float] = time.time
) -> Problems:
    """What is wrong with certificates, tokens and the audit log, for people."""
    certificate: dict[str, str] = {}
    if trust is not None:
        if trust.life.share_left(wall()) < EXPIRES_SHARE:
            hours = (trust.life.ends_s - wall()) / 3600
            certificate["expires"] = f"{trust.config.cert} ends in {hours:.1f} h"
        if trust.error:
            certificate["reload"] = trust.error
    audit = guard.audit
    failed = {"file": audit.error} if audit is not None and audit.error else {}
    told = guard.problem()
    tokens = {"file": told} if told else {}
    problems: Problems = {"certificate": certificate, "admin_tokens": tokens, "audit_log": failed}
    return problems
