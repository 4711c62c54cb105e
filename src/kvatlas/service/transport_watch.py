"""Carries what engines and agents count of transfers to `core.transports`; says what follows."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from kvatlas.core.records import Publisher
from kvatlas.core.transports import Moved, Status, Transports
from kvatlas.service.agents import Node
from kvatlas.service.engines import Timing, Worker

_POLLS = 5  # a transfer that took longer than so many looks at an engine is judged with others

log = logging.getLogger(__name__)


class TransportWatch:
    """``transports`` is the book by which pairs are priced."""

    def __init__(self, transports: Transports, timing: Timing) -> None:
        """``timing``: how often engines and agents are asked."""
        self._transports = transports
        transports.margin_s = _POLLS * timing.poll_s
        self._looked: dict[Publisher, float] = {}  # what was carried over, and when it was read
        self._asked: dict[str, float] = {}
        self._degraded: dict[str, str] = {}
        self._ports: dict[str, str] = {}  # node → why its ports tell nothing, "" where they do

    def copy(self, workers: Iterable[Worker], nodes: Iterable[Node]) -> None:
        """What was polled since the last time. Ports after engines: what these counted must have
        arrived by then."""
        nodes = list(nodes)
        node_of = {worker: node.config.name for node in nodes for worker in node.config.workers}
        halves = [worker for worker in workers if worker.config.role != "combined"]
        self._looked = {p: at for w in halves for p in w.publishers() if (at := self._told(p, w))}
        for worker in halves:
            for publisher in worker.publishers():
                node = node_of.get(worker.name, "")
                self._transports.expect(publisher, worker.config.transport, node)
        used = {node_of[worker.name] for worker in halves if worker.name in node_of}
        self._count_ports([node for node in nodes if node.config.name in used])
        self._alarm()

    def problems(self) -> dict[str, str]:
        """Pairs that are degraded, with what was expected and what is seen."""
        return self._transports.degraded()

    def statuses(self) -> list[Status]:
        """Of all pairs."""
        return list(self._transports.statuses())

    def engines(self) -> dict[str, Moved]:
        """What halves count themselves, since each was started."""
        return {str(publisher): moved for publisher, moved in self._transports.engines.items()}

    async def page(self, _: str) -> object:
        """GET /kvatlas/transports: what moved between pairs, and over what."""
        return {
            "pairs": [msgspec.to_builtins(status) for status in self.statuses()],
            "engines": msgspec.to_builtins(self.engines()),
            "rdma_ports": self._ports,
        }

    def _told(self, publisher: Publisher, worker: Worker) -> float:
        moved = worker.moved.get(publisher.dp_rank)
        if len(worker.publishers()) == 1 and len(worker.moved) > 1:  # it has no events by rank
            moved = _sum(worker.moved.values())
        if moved is not None and worker.polled_s > self._looked.get(publisher, -1.0):
            self._transports.told(publisher, moved, worker.asked_s, worker.polled_s)
            return worker.polled_s
        return self._looked.get(publisher, 0.0)

    def _count_ports(self, nodes: list[Node]) -> None:
        ports, asked = {}, {}
        for node in nodes:
            name, told = node.config.name, node.told
            if told is None:
                ports[name] = "its agent does not answer"
                continue
            received = told.rdma.received_bytes
            ports[name] = told.rdma.error or ("" if told.rdma.ports else "its agent sees none")
            asked[name] = node.asked_s
            if received is not None and node.asked_s > self._asked.get(name, -1.0):
                self._transports.ports(name, received, node.asked_s, node.told_s)
        self._ports, self._asked = ports, asked

    def _alarm(self) -> None:
        degraded = self.problems()
        for pair in degraded.keys() - self._degraded.keys():
            log.warning("%s: %s", pair, degraded[pair])
        for pair in self._degraded.keys() - degraded.keys():
            log.info("%s: its transport is well again", pair)
        self._degraded = degraded


def _sum(counts: Iterable[Moved]) -> Moved:
    rows = [msgspec.structs.astuple(count) for count in counts]
    return Moved(*(sum(column) for column in zip(*rows, strict=True)))
