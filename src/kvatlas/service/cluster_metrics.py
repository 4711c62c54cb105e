"""The cluster's figures for /metrics, read when they are asked for and never on the hot path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        yield from self._agents()
        yield from self._transports()
        yield from self._tokenizer()
        yield from self._assembly.ahead.metrics()
        yield from self._assembly.warm.metrics()
        yield from self._assembly.snapshots.metrics()

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
        objectives = CounterMetricFamily(
            "kvatlas_ttft_objectives", "answers by whether they met theirs", labels=["result"]
        )
        for result, count in steering.objectives.items():
            objectives.add_metric([result], count)
        yield objectives
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
        yield _gauge(
            "ttft_regret_seconds",
            "how much sooner the best other plan would have been, by its price: running mean",
            {str(p): error.regret_s for p, error in steering.errors.items()},
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
        draining = self._assembly.steering.draining
        text = "1: gets no new requests"
        yield _gauge("worker_draining", text, {w.name: w.name in draining for w in workers})
        yield _counter("worker_restarts", "seen", {w.name: w.restarts for w in workers})
        text = "figures of its own metrics page that are none"
        yield _counter("worker_metrics_malformed", text, {w.name: w.malformed for w in workers})
        running = GaugeMetricFamily(
            "kvatlas_worker_reported_requests", "as the engine says", labels=["worker", "state"]
        )
        for worker in workers:
            for load in worker.loads.values():
                running.add_metric([worker.name, "running"], max(0, load.running))
                running.add_metric([worker.name, "waiting"], max(0, load.waiting))
        yield running

    def _agents(self) -> Iterator[Metric]:
        nodes = self._assembly.agents.nodes.values()
        shelves = self._assembly.directory.shelves
        up = GaugeMetricFamily("kvatlas_agent_up", "1: it answers", labels=["agent"])
        held = GaugeMetricFamily(
            "kvatlas_agent_announced_units",
            "what an agent says it holds; with its store, what all who use it say",
            labels=["agent", "tier", "part"],
        )
        restarts = CounterMetricFamily("kvatlas_agent_restarts", "seen", labels=["agent"])
        for node in nodes:
            name = node.config.name
            up.add_metric([name], node.up)
            restarts.add_metric([name], node.restarts)
            for tier, counts in shelves.held(node.publisher).items():
                for part, count in zip(("body", "point"), counts, strict=True):
                    held.add_metric([name, tier.name.lower(), part], count)
        yield from (up, restarts, held)

    def _transports(self) -> Iterator[Metric]:
        watch = self._assembly.transports
        rows = {(s.prefill, s.decode): s for s in watch.statuses()}
        yield _family(
            GaugeMetricFamily,
            "transport_info",
            "1: what a pair should move its state over, and what it was seen to",
            (*_PAIR, "expected", "seen"),
            (((*pair, s.expected, s.seen or "unknown"), 1.0) for pair, s in rows.items()),
        )
        alone = {(*pair, "alone"): s.told_bytes for pair, s in rows.items()}
        split = {(*pair, "split"): s.split_bytes for pair, s in rows.items()}
        yield _family(
            CounterMetricFamily,
            "transport_bytes",
            "that a pair moved, as the engine counts; split: while others did at the same time",
            (*_PAIR, "counted"),
            (alone | split).items(),
        )
        yield _family(
            GaugeMetricFamily,
            "transport_bytes_per_second",
            "of its last transfers",
            (*_PAIR, "measured"),
            (((*p, s.rate_from), s.bytes_per_s) for p, s in rows.items() if s.rate_from),
        )
        yield _family(
            GaugeMetricFamily,
            "transport_degraded",
            "1: not over what it should be, or far slower than it was",
            _PAIR,
            ((pair, float(s.state == "degraded")) for pair, s in rows.items()),
        )
        yield _family(
            CounterMetricFamily,
            "transport_falls",
            "times that it became far slower",
            _PAIR,
            ((pair, float(s.falls)) for pair, s in rows.items()),
        )
        yield _family(
            GaugeMetricFamily,
            "hand_off_error_seconds",
            "as priced against as measured: running mean of the absolute error",
            _PAIR,
            ((pair, s.hand_off_error_s) for pair, s in rows.items()),
        )
        failures = {worker: moved.failures for worker, moved in watch.engines().items()}
        yield _counter("transport_failures", "of hand-offs, as the engine counts", failures)

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


_PAIR = ("prefill", "decode")


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Metric:
    rows = (((worker,), value) for worker, value in values.items())
    return _family(GaugeMetricFamily, name, text, ("worker",), rows)


def _counter(name: str, text: str, values: Mapping[str, float]) -> Metric:
    rows = (((worker,), value) for worker, value in values.items())
    return _family(CounterMetricFamily, name, text, ("worker",), rows)


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    family = kind(f"kvatlas_{name}", text, labels=labels)
    for key, value in rows:
        family.add_metric(key, value)
    return family
