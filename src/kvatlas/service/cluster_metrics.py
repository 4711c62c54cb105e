"""The cluster's figures for /metrics, read when they are asked for and never on the hot path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kvatlas.service.assembly import Assembly


class ClusterMetrics(Collector):
    """Directory, feed, engines, tokenizer and the truth of predictions, by worker."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each scrape."""
        yield from self._directory()
        yield from self._feed()
        yield from self._engines()
        yield from self._tokenizer()

    def _directory(self) -> Iterator[Metric]:
        directory, steering = self._assembly.directory, self._assembly.steering
        yield _gauge(
            "directory_holders",
            "block-holders: one publisher, group, tier and block",
            {str(p): directory.holders_of(p) for p in directory.publishers()},
        )
        muted = directory.muted()
        yield _gauge(
            "directory_muted",
            "1: it announces state that its layout does not have, so nothing of it is believed",
            {str(p): int(p in muted) for p in directory.publishers()},
        )
        decisions = CounterMetricFamily("kvatlas_decisions", "requests routed")
        decisions.add_metric([], steering.decisions)
        yield decisions
        yield _gauge(
            "hit_gap",
            "1: the engine reuses far less than its events promise",
            {str(p): int(bool(gap.flag)) for p, gap in steering.gaps.items()},
        )
        yield _gauge(
            "ttft_error_seconds",
            "predicted against measured time to first token, running mean of the absolute error",
            {str(p): error.error_s for p, error in steering.errors.items()},
        )

    def _feed(self) -> Iterator[Metric]:
        statuses = self._assembly.feed.status()
        rows = {str(s.publisher): s for s in statuses}
        yield _gauge(
            "feed_connected", "1: events arrive", {n: s.connected for n, s in rows.items()}
        )
        for name, text, values in (
            ("events", "KV events applied", {n: s.events for n, s in rows.items()}),
            ("malformed", "events left out", {n: s.malformed for n, s in rows.items()}),
            ("unknown", "of a type we do not know", {n: s.unknown for n, s in rows.items()}),
            ("orphans", "of an unknown parent", {n: s.applied.orphans for n, s in rows.items()}),
            ("refused", "claims over a limit", {n: s.applied.refused for n, s in rows.items()}),
            ("gaps", "holes in the stream", {n: s.stream.gaps for n, s in rows.items()}),
            ("replays", "histories asked again", {n: s.stream.replays for n, s in rows.items()}),
            ("resets", "claims given up", {n: s.stream.resets for n, s in rows.items()}),
        ):
            yield _counter(f"feed_{name}", text, values)

    def _engines(self) -> Iterator[Metric]:
        workers = self._assembly.engines.workers.values()
        yield _gauge("worker_up", "1: may get requests", {w.name: w.up for w in workers})
        yield _counter("worker_restarts", "seen", {w.name: w.restarts for w in workers})
        running = GaugeMetricFamily(
            "kvatlas_worker_reported_requests", "as the engine says", labels=["worker", "state"]
        )
        for worker in workers:
            for load in worker.loads.values():
                running.add_metric([worker.name, "running"], max(0, load.running))
                running.add_metric([worker.name, "waiting"], max(0, load.waiting))
        yield running

    def _tokenizer(self) -> Iterator[Metric]:
        tokenizer = self._assembly.tokenizer
        if tokenizer is None:
            return
        state = tokenizer.state()
        for name, text, value in (
            ("compared", "answers of an engine set beside ours", state.compared),
            ("mismatches", "that differed", state.mismatches),
            ("endpoint_calls", "token ids asked from an engine", state.endpoint_calls),
            ("endpoint_failures", "of these", state.endpoint_failures),
        ):
            family = CounterMetricFamily(f"kvatlas_tokenizer_{name}", text)
            family.add_metric([], value)
            yield family


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"kvatlas_{name}", text, labels=["worker"])
    for worker, value in values.items():
        family.add_metric([worker], value)
    return family


def _counter(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"kvatlas_{name}", text, labels=["worker"])
    for worker, value in values.items():
        family.add_metric([worker], value)
    return family
