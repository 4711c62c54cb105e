"""An agent's figures for Prometheus, read from its status when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvatlas.service.rdma_ports import RdmaPorts

_UNUSED = "_unused"  # after a tier's name: made ready, and not taken


class AgentMetrics(Collector):
    """``status``: as `service.agent.NodeAgent.status`; ``ports``: as now."""

    def __init__(
        self, status: Callable[[], dict[str, object]], ports: Callable[[], RdmaPorts]
    ) -> None:
        self._status = status
        self._ports = ports

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each scrape."""
        status: dict[str, Any] = self._status()
        tiers = dict(status["tiers"])
        yield from _peers(tiers.pop("peer", {}))
        yield from _tiers(tiers)
        yield from _work(status)
        yield from _rdma(self._ports())

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked when it is registered."""
        return ()


def _tiers(tiers: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    for field, text in (
        ("capacity_bytes", "what it may hold"),
        ("held_bytes", "what it holds"),
        ("in_use_bytes", "of that, what is pinned or leased"),
        ("quarantined_bytes", "places that are not used again in this life"),
    ):
        found = {name: tier[field] for name, tier in tiers.items() if field in tier}
        yield _gauge(f"tier_{field}", text, ("tier",), (((n,), v) for n, v in found.items()))
    units = {(n,): tier["units"] for n, tier in tiers.items() if "units" in tier}
    yield _gauge("tier_units", "bodies and points that it holds", ("tier",), units.items())
    yield _gauge(
        "tier_transport_info",
        "1: its bytes move this way now",
        ("tier", "transport"),
        (((name, str(tier["transport"])), 1) for name, tier in tiers.items()),
    )
    counts = {
        (name, event): count
        for name, tier in tiers.items()
        for event, count in tier.get("counts", {}).items()
    }
    yield _counter("store_events", "what its store did and met", ("tier", "event"), counts.items())


def _peers(peers: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """By what each peer is read, and why not by the best."""
    yield _gauge(
        "peer_transport_info",
        "1: it was read this way last",
        ("peer", "transport"),
        (((name, str(peer["transport"])), 1) for name, peer in peers.items()),
    )
    for field, kind, text in (
        ("pieces", "moved_values", "values read from it, and right"),
        ("size_bytes", "moved_bytes", "their bytes"),
        ("seconds", "read_seconds", "that reads from it took, all of them together"),
        ("failures", "read_failures", "reads from it that did not come to their end"),
    ):
        rows = {
            (name, transport): way[field]
            for name, peer in peers.items()
            for transport, way in peer["moved"].items()
        }
        yield _counter(f"peer_{kind}", text, ("peer", "transport"), rows.items())
    why = {
        (name, reason): count
        for name, peer in peers.items()
        for reason, count in peer["instead"].items()
    }
    text = "reads that went over TCP, and why not by NIXL"
    yield _counter("peer_instead", text, ("peer", "reason"), why.items())
    events = {
        (name, event): count
        for name, peer in peers.items()
        for event, count in peer["counts"].items()
    }
    yield _counter("peer_events", "what was met there", ("peer", "event"), events.items())


def _work(status: Mapping[str, Any]) -> Iterator[Metric]:
    loaded: dict[str, int] = status["loaded_tokens"]
    used = {(t,): n for t, n in loaded.items() if not t.endswith(_UNUSED)}
    left = {(t.removesuffix(_UNUSED),): n for t, n in loaded.items() if t.endswith(_UNUSED)}
    yield _counter(
        "loaded_tokens", "tokens that engines resumed from a tier", ("tier",), used.items()
    )
    yield _counter("unused_tokens", "made ready for them and not taken", ("tier",), left.items())
    moved = {tuple(name.split(" ", 1)): size for name, size in status["moved_bytes"].items()}
    yield _counter(
        "moved_bytes", "that arrived, by what was done", ("operation", "tier"), moved.items()
    )
    events = {(event,): count for event, count in status["counts"].items()}
    yield _counter("events", "what was dropped, refused, late or wrong", ("event",), events.items())
    for field, text in (
        ("busy", "operations under way or waiting"),
        ("staged", "requests for which something is held ready"),
        ("draining", "1: it saves nothing more and empties its memory downwards"),
    ):
        yield _gauge(field, text, (), [((), float(status[field]))])
    for field, text in (
        ("engines", "engines that are attached"),
        ("errands", "prefixes that it was asked to move or to keep"),
    ):
        yield _gauge(field, text, (), [((), len(status[field]))])


def _rdma(found: RdmaPorts) -> Iterator[Metric]:
    moved = {
        (port.device, port.port, direction): size
        for port in found.ports
        for direction, size in (("received", port.received_bytes), ("sent", port.sent_bytes))
    }
    text = "that the RDMA ports of this node moved, whoever did it"
    yield _counter("rdma_bytes", text, ("device", "port", "direction"), moved.items())
    text = "1: not all of its RDMA ports could be read"
    yield _gauge("rdma_unreadable", text, (), [((), float(bool(found.error)))])


def _gauge(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    family = GaugeMetricFamily(f"kvatlas_agent_{name}", text, labels=labels)
    for key, value in rows:
        family.add_metric(key, value)
    return family


def _counter(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    family = CounterMetricFamily(f"kvatlas_agent_{name}", text, labels=labels)
    for key, value in rows:
        family.add_metric(key, value)
    return family
