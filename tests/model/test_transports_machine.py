"""What is said of a transport is true, whatever moves when, and whoever is asked when.

A world that knows: transfers over RDMA or not, ports that count while bytes arrive, engines that
count when a transfer has ended, and polls of both whose answers are older than they look.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvatlas.core.records import Publisher
from kvatlas.core.transports import Moved, Transports

PREFILLS = [Publisher("p"), Publisher("q")]
DECODES = [Publisher("d"), Publisher("e")]
MARGIN_S = 2.0

pairs = st.tuples(st.sampled_from(PREFILLS), st.sampled_from(DECODES))
spans = st.floats(0.0, 3.0)
latencies = st.floats(0.0, 1.0)
sizes = st.integers(300_000, 50_000_000)  # each alone shows in the ports
Pair = tuple[Publisher, Publisher]


class Transfer(msgspec.Struct):
    pair: Pair
    size_bytes: int
    began: float
    ends: float
    port_at: float  # when the ports have all of it


class World(RuleBasedStateMachine):
    """Of one truth per pair: ``rdma`` says which of them use it."""

    def __init__(self) -> None:
        super().__init__()
        self.transports = Transports(MARGIN_S)
        self.now = 100.0
        self.received = 0.0
        self.counts = {d: Moved() for d in DECODES}
        self.running: list[Transfer] = []
        self.rdma: set[Pair] = set()
        self.moved: dict[Publisher, int] = dict.fromkeys(DECODES, 0)

    @initialize(rdma=st.sets(pairs, max_size=4))
    def begin(self, rdma: set[Pair]) -> None:
        self.rdma = rdma
        for publisher in PREFILLS:
            self.transports.expect(publisher, "rdma", "one")
        for publisher in DECODES:
            self.transports.expect(publisher, "rdma", "two")
            self.transports.told(publisher, Moved(), self.now, self.now)

    @rule(seconds=st.floats(0.0, 10.0))
    def passes(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due = min((min(t.ends, t.port_at) for t in self.running), default=math.inf)
            if due > end:
                break
            self.now = max(self.now, due)
            for transfer in list(self.running):
                self._advance(transfer)
        self.now = end

    def _advance(self, transfer: Transfer) -> None:
        if transfer.port_at <= self.now:
            if transfer.pair in self.rdma:
                self.received += transfer.size_bytes
            transfer.port_at = math.inf
        if transfer.ends <= self.now:
            self.running.remove(transfer)
            decode = transfer.pair[1]
            was = self.counts[decode]
            self.counts[decode] = Moved(
                was.size_bytes + transfer.size_bytes,
                was.seconds + transfer.ends - transfer.began,
                was.transfers + 1,
            )
            self.moved[decode] += transfer.size_bytes
            seconds = self.now - transfer.began
            self.transports.arrived(*transfer.pair, transfer.size_bytes, seconds, self.now)

    @rule(pair=pairs, size=sizes, seconds=st.floats(0.001, MARGIN_S), share=st.floats(0.0, 1.0))
    def hand_over(self, pair: Pair, size: int, seconds: float, share: float) -> None:
        self.transports.sent(*pair, size, self.now)
        ends = self.now + seconds
        self.running.append(Transfer(pair, size, self.now, ends, self.now + share * seconds))

    @rule(pair=pairs, size=sizes)
    def fail(self, pair: Pair, size: int) -> None:
        self.transports.sent(*pair, size, self.now)
        self.transports.lost(*pair, self.now)

    @rule(decode=st.sampled_from(DECODES), before=latencies, after=latencies)
    def ask_engine(self, decode: Publisher, before: float, after: float) -> None:
        asked = self.now
        self.passes(before)
        counts = self.counts[decode]
        self.passes(after)
        self.transports.told(decode, counts, asked, self.now)

    @rule(before=latencies, after=latencies)
    def ask_ports(self, before: float, after: float) -> None:
        asked = self.now
        self.passes(before)
        received = self.received
        self.passes(after)
        self.transports.ports("two", received, asked, self.now)

    def _quiet(self, times: int) -> None:
        """Until nothing is left to be judged, and for some while after it."""
        for decode in DECODES:
            self.passes(3.0)
            self.ask_engine(decode, 0.1, 0.1)
        for _ in range(2):
            for _ in range(times):
                self.passes(1.0)
                self.ask_ports(0.1, 0.1)
            for decode in DECODES:
                self.ask_engine(decode, 0.1, 0.1)
            self.ask_ports(0.0, 0.0)

    @rule(times=st.integers(4, 12), pair=pairs)
    def quiet_then_one(self, times: int, pair: Pair) -> None:
        """Here it must be told."""
        self._quiet(times)
        self.hand_over(pair, 10_000_000, 0.1, 0.5)
        self.passes(0.2)
        self.ask_engine(pair[1], 0.1, 0.1)
        self.ask_ports(0.1, 0.1)
        found = {(s.prefill, s.decode): s.seen for s in self.transports.statuses()}
        expected = "rdma" if pair in self.rdma else "not rdma"
        assert found[str(pair[0]), str(pair[1])] == expected

    @rule(times=st.integers(4, 12), one=pairs, two=pairs, share=st.floats(0.0, 1.0))
    def quiet_then_two(self, times: int, one: Pair, two: Pair, share: float) -> None:
        """Much by one and little by another."""
        self._quiet(times)
        self.hand_over(one, 50_000_000, MARGIN_S, share)
        self.hand_over(two, 1_000_000, MARGIN_S, share)
        self.passes(MARGIN_S / 2)
        self.ask_engine(one[1], 0.0, 0.0)
        self.ask_engine(two[1], 0.0, 0.0)
        self.ask_ports(0.0, 0.0)
        self.passes(MARGIN_S)
        self.ask_engine(one[1], 0.1, 0.1)
        self.ask_engine(two[1], 0.1, 0.1)
        self.ask_ports(0.1, 0.1)

    @invariant()
    def nobody_is_accused_wrongly(self) -> None:
        for status in self.transports.statuses():
            pair = Publisher(status.prefill), Publisher(status.decode)
            if status.seen == "not rdma":
                assert pair not in self.rdma
            if status.seen == "rdma" and not self.rdma:
                raise AssertionError(f"{pair}: nothing goes over RDMA here")

    @invariant()
    def bytes_are_counted_once(self) -> None:
        told = dict.fromkeys(DECODES, 0.0)
        for status in self.transports.statuses():
            told[Publisher(status.decode)] += status.told_bytes + status.split_bytes
            for value in (status.bytes_per_s, status.hand_off_error_s, status.slower_times):
                assert math.isfinite(value)
                assert value >= 0
        for decode, size in told.items():
            assert size <= self.moved[decode] * (1 + 1e-9)

    @invariant()
    def prices_are_times(self) -> None:
        for p in PREFILLS:
            for d in DECODES:
                seconds = self.transports.seconds(p, d, 1_000_000, self.now)
                assert 0 <= seconds < math.inf


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class Hasty(Transports):
    """Planted: what an engine counted is taken to have arrived in that very moment."""

    def ports(self, node: str, received_bytes: float, asked: float, now: float) -> None:
        if arrivals := self._arrivals.get(node):
            arrivals.since = arrivals.until + self.margin_s
        super().ports(node, received_bytes, asked, now)


class Whole(Transports):
    """Planted: all pairs of a node are judged by its sum."""

    def ports(self, node: str, received_bytes: float, asked: float, now: float) -> None:
        if arrivals := self._arrivals.get(node):
            for arrived in arrivals.pairs.values():
                arrived.alone = arrivals.size_bytes
        super().ports(node, received_bytes, asked, now)


@pytest.mark.parametrize("kind", [Whole, Hasty])
def test_planted_faults_are_found(kind: type[Transports]) -> None:
    class Planted(World):
        def __init__(self) -> None:
            super().__init__()
            self.transports: Any = kind(MARGIN_S)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Planted,
            settings=settings(
                max_examples=500, database=None, derandomize=True, phases=[Phase.generate]
            ),
        )
