"""What stores beyond the node have in common: runs over connections, all closed at the end."""

from __future__ import annotations

import threading

from kvatlas.dataplane.tiers.base import Piece, Report
from kvatlas.dataplane.tiers.runs import Outcome, Runs

WAIT_S = 20.0


class Link:
    until = 0.0

    def __init__(self) -> None:
        self.closed = False

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_a_store_that_is_closed_with_runs_waiting_closes_its_connections() -> None:
    links: list[Link] = []
    working, go_on = threading.Event(), threading.Event()

    def connect(_: float) -> Link:
        links.append(Link())
        return links[-1]

    def work(_: Link, outcome: Outcome) -> None:
        working.set()
        assert go_on.wait(WAIT_S)
        outcome.arrive()

    runs = Runs[Link]("test", connect, lambda _: None, streams=1)
    reports: list[Report] = []
    for name in (b"first", b"waits"):
        runs.submit([Piece(name, memoryview(bytearray(8)))], work, reports.append, into=True)
    assert working.wait(WAIT_S)
    closing = threading.Thread(target=runs.close)
    closing.start()
    while not runs._closed:
        pass
    go_on.set()
    closing.join(WAIT_S)
    assert [report.failed for report in reports] == [(), (b"waits",)]
    assert [link.closed for link in links] == [True]
