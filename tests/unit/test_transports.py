"""What moves between pairs, and over what: engines' counts, RDMA ports, and what follows for the
price. In virtual time."""

from __future__ import annotations

import math

import pytest

from kvatlas.core.records import Publisher
from kvatlas.core.transports import TCP_BYTES_PER_S, TIMED_S, Moved, Status, Transport, Transports
from kvatlas.core.ways import TRIAL_S

P, Q, D, E = (Publisher(name) for name in "pqde")
SIZE = 50_000_000
FAST, SLOW = 25e9, 5e8


class Bench:
    """Two prefill halves on node one, two decode halves on node two. A step is a second."""

    def __init__(self, transport: Transport = "rdma") -> None:
        self.transports = Transports()
        for publisher, node in ((P, "one"), (Q, "one"), (D, "two"), (E, "two")):
            self.transports.expect(publisher, transport, node)
        self.now = 0.0
        self.received = 1e12  # since the node was started
        self.counts: dict[Publisher, Moved] = {}
        for _ in range(8):
            self.step()

    def step(
        self,
        *pairs: tuple[Publisher, Publisher],
        rdma: bool = True,
        queue_s: float = 0.0,
        told: bool = True,
    ) -> None:
        """These hand over, then everybody is asked."""
        self.now += 1.0
        rate = FAST if rdma else SLOW
        for p, d in pairs:
            self.transports.sent(p, d, SIZE, self.now)
            seconds = SIZE / rate
            self.transports.arrived(p, d, SIZE, 0.02 + seconds + queue_s, self.now)
            self.received += SIZE if rdma else 0
            was = self.counts.get(d, Moved())
            self.counts[d] = Moved(was.size_bytes + SIZE, was.seconds + seconds, was.transfers + 1)
        for d in (D, E):
            if told:
                self.told(d)
        self.transports.ports("two", self.received, self.now + 0.2, self.now + 0.2)

    def told(self, engine: Publisher) -> None:
        at = self.now + 0.1
        self.transports.told(engine, self.counts.get(engine, Moved()), at, at)

    def status(self, p: Publisher = P, d: Publisher = D) -> Status:
        (found,) = (
            s for s in self.transports.statuses() if (s.prefill, s.decode) == (str(p), str(d))
        )
        return found

    def price_s(self, p: Publisher = P, d: Publisher = D) -> float:
        return self.transports.seconds(p, d, SIZE, self.now)


def test_a_pair_whose_bytes_the_ports_received() -> None:
    bench = Bench()
    assert list(bench.transports.statuses()) == []
    for _ in range(30):
        bench.step((P, D))
    found = bench.status()
    assert (found.state, found.expected, found.seen) == ("ok", "rdma", "rdma")
    assert found.why.startswith("inferred: ")
    assert (found.told_bytes, found.split_bytes) == (30 * SIZE, 0.0)
    assert (found.rate_from, found.hand_offs) == ("engine", 30)
    assert math.isclose(found.bytes_per_s, FAST)
    assert math.isclose(bench.price_s(), 0.02 + SIZE / FAST, rel_tol=0.05)
    assert bench.transports.degraded() == {}


def test_a_pair_that_falls_back_is_degraded_and_dear_at_once_and_comes_back() -> None:
    bench = Bench()
    for _ in range(30):
        bench.step((P, D))
        bench.step((P, E))
    before_s, other_s = bench.price_s(), bench.price_s(P, E)
    for _ in range(10):  # what else passed the ports
        bench.step()
    bench.step((P, D), rdma=False)  # one hand-off, and the ports received nothing of it
    assert set(bench.transports.degraded()) == {"p>d"}
    why = bench.transports.degraded()["p>d"]
    assert why.startswith("expected rdma, seen not rdma: 50.0 MB arrived while")
    assert bench.price_s() > 2 * before_s / 1.5
    assert math.isclose(bench.price_s(), before_s + SIZE / SLOW - SIZE / FAST, rel_tol=0.05)
    assert bench.price_s(P, E) == other_s, "another pair is another path"
    bench.now += TRIAL_S + 0.2
    assert math.isclose(bench.price_s(), before_s, rel_tol=0.05), "once, to see"
    for _ in range(10):
        bench.step()
    bench.step((P, D))
    assert bench.transports.degraded() == {}
    assert math.isclose(bench.price_s(), before_s, rel_tol=0.05)
    assert bench.status().falls == 1


def test_a_silent_fall_is_seen_in_the_times_alone() -> None:
    """No ports, no counts of the engine."""
    bench = Bench("any")
    for _ in range(30):
        bench.step((P, D), told=False)
    before_s = bench.price_s()
    assert (bench.status().state, bench.status().rate_from) == ("ok", "hand-offs")
    for n in range(3):
        assert bench.transports.degraded() == {}, n
        assert bench.price_s() == before_s
        bench.step((P, D), rdma=False, told=False)
    assert "over a transport that nobody tells" in bench.transports.degraded()["p>d"]
    assert math.isclose(bench.price_s(), 0.02 + SIZE / SLOW, rel_tol=0.05)
    assert math.isclose(bench.status().bytes_per_s, SIZE / (0.02 + SIZE / SLOW), rel_tol=0.01)


def test_a_fall_that_the_engine_counts() -> None:
    """No ports, and too little beside a queue to be seen in the hand-offs."""
    bench = Bench("any")
    for _ in range(30):
        bench.step((P, D), queue_s=0.5)
    before_s = bench.price_s()
    for _ in range(3):
        assert bench.transports.degraded() == {}
        bench.step((P, D), rdma=False, queue_s=0.5)
    assert "as the engine counts" in bench.transports.degraded()["p>d"]
    assert math.isclose(bench.price_s(), before_s + SIZE / SLOW, rel_tol=0.1)


def test_a_busy_engine_is_dear_but_its_transport_is_not_to_blame() -> None:
    bench = Bench("any")
    for _ in range(30):
        bench.step((P, D))
    for _ in range(5):
        bench.step((P, D), queue_s=1.0)
    assert bench.price_s() > 0.9
    assert bench.transports.degraded() == {}
    assert bench.status().why.endswith("its transfers do not: the engine is busy")


def test_an_engine_that_counts_no_more_leaves_it_to_the_hand_offs() -> None:
    bench = Bench("any")
    for _ in range(30):
        bench.step((P, D))
    for _ in range(3):
        bench.step((P, D), rdma=False)
    assert "as the engine counts" in bench.transports.degraded()["p>d"]
    for _ in range(3):
        bench.step((P, D), told=False)
        assert set(bench.transports.degraded()) == {"p>d"}, "its last word"
    bench.now += TIMED_S
    for _ in range(3):
        bench.step((P, D), told=False)
    assert bench.transports.degraded() == {}
    for _ in range(3):
        bench.step((P, D), rdma=False, told=False)
    assert bench.transports.degraded()["p>d"].startswith("hand-offs take")


def test_several_at_once_are_split_and_called_so() -> None:
    bench = Bench()
    for _ in range(30):
        bench.step((P, D), (Q, D))
    for p in (P, Q):
        found = bench.status(p)
        assert (found.told_bytes, found.split_bytes, found.transfers) == (0.0, 30 * SIZE, 0)
        assert (found.seen, found.rate_from) == ("rdma", "hand-offs")


def test_a_transfer_that_is_still_under_way_counts_as_one_of_its_window() -> None:
    bench = Bench()
    bench.transports.sent(P, D, SIZE, bench.now)
    bench.step()
    bench.step((Q, D))
    assert (bench.status(Q).told_bytes, bench.status(Q).split_bytes) == (0, SIZE), "perhaps of P"
    bench.transports.lost(P, D, bench.now)
    bench.step()  # the one in which it ended
    bench.step((Q, D))
    assert bench.status(Q).told_bytes == SIZE


def test_a_count_that_was_read_before_it_ended_leaves_it_to_the_next() -> None:
    bench = Bench()
    bench.transports.sent(P, D, SIZE, bench.now + 0.05)
    asked = bench.now + 0.1
    bench.transports.arrived(P, D, SIZE, 0.1, asked + 0.05)
    bench.transports.told(D, Moved(), asked, asked + 0.1)
    bench.counts[D] = Moved(SIZE, 0.05, 1)
    bench.step()
    assert bench.status().told_bytes == SIZE
    bench.step((Q, D))
    assert bench.status(Q).told_bytes == SIZE


def test_what_cannot_be_told_is_not_guessed() -> None:
    bench = Bench()
    for _ in range(3):
        bench.step((P, D))
        bench.received += 0.5 * SIZE  # half of it: who?
    transports = Transports()
    for publisher in (P, D):
        transports.expect(publisher, "rdma")  # on which nodes is not known
    transports.sent(P, D, SIZE, 0.0)
    transports.arrived(P, D, SIZE, 0.05, 0.0)
    (found,) = transports.statuses()
    assert (found.state, found.seen) == ("unknown", "")
    assert found.why == "expected rdma; nothing tells yet what it is"
    transports.expect(P, "any")
    (found,) = transports.statuses()
    assert (found.state, found.expected) == ("ok", "any")


def test_others_on_the_same_ports_hide_what_a_pair_does() -> None:
    bench = Bench()
    for _ in range(10):
        bench.step((P, D), (P, E))
    for _ in range(10):
        bench.step()
    bench.received += SIZE  # something else
    bench.step((P, D), (P, E), rdma=False)
    assert bench.status().seen == "rdma", "as it was"
    assert bench.transports.degraded() == {}


def test_a_pair_over_tcp_as_it_should_be_does_not_accuse_another_on_its_node() -> None:
    bench = Bench()
    bench.transports.expect(Q, "any", "one")
    for _ in range(10):
        bench.step((P, D))
    for _ in range(10):
        bench.step()
    bench.transports.sent(P, E, 2_000_000, bench.now)  # a little over RDMA beside much over TCP
    bench.transports.arrived(P, E, 2_000_000, 0.02, bench.now)
    bench.received += 2_000_000
    bench.counts[E] = Moved(2_000_000, 0.01, 1)
    bench.step((Q, D), rdma=False)
    seen = {(s.prefill, s.decode): s.seen for s in bench.transports.statuses()}
    assert seen == {("p", "d"): "rdma", ("p", "e"): "", ("q", "d"): "not rdma"}
    assert bench.transports.degraded() == {}


def test_pairs_that_share_an_engine_are_accused_together_only_by_ports_that_stood_still() -> None:
    bench = Bench()
    for _ in range(10):
        bench.step()
    bench.step((P, D), (Q, D), rdma=False)
    assert set(bench.transports.degraded()) == {"p>d", "q>d"}
    for _ in range(10):
        bench.step((P, D), (Q, D))
    for _ in range(10):
        bench.step()
    bench.received += SIZE // 20  # of one of them, perhaps
    bench.step((P, D), (Q, D), rdma=False)
    assert bench.transports.degraded() == {}


@pytest.mark.parametrize("same", ["one", ""])
def test_on_one_node_ports_say_nothing(same: str) -> None:
    bench = Bench()
    bench.transports.expect(P, "rdma", same)
    bench.transports.expect(D, "rdma", same)
    for _ in range(20):
        bench.step((P, D), rdma=False)
    assert (bench.status().seen, bench.status().state) == ("", "unknown")


def test_counts_that_go_back_begin_anew() -> None:
    bench = Bench()
    for _ in range(10):
        bench.step((P, D))
    bench.counts[D] = Moved()  # the engine was started anew
    bench.received = 0.0  # its node, too
    bench.step()
    for _ in range(10):
        bench.step()
    bench.step((P, D))
    assert (bench.status().told_bytes, bench.status().seen) == (11 * SIZE, "rdma")
    assert bench.transports.degraded() == {}


def test_rdma_that_was_never_there() -> None:
    """From the first hand-off on, and nothing else measures it: the price of TCP is assumed."""
    bench = Bench()
    assert bench.price_s() < 0.02
    bench.now += 1.0
    bench.transports.sent(P, D, SIZE, bench.now)
    bench.transports.arrived(P, D, SIZE, None, bench.now)  # halves that run at once
    moved = Moved(SIZE, 0.0, 1)
    bench.transports.told(D, moved, bench.now, bench.now)
    bench.transports.ports("two", bench.received, bench.now + 0.2, bench.now + 0.2)
    assert set(bench.transports.degraded()) == {"p>d"}
    assert bench.price_s() >= SIZE / TCP_BYTES_PER_S


def test_halves_that_run_at_once_are_timed_by_what_the_engine_counts() -> None:
    """The prefill half counts (SGLang), the other never does."""
    transports = Transports()
    transports.told(P, Moved(), 0.0, 0.0)
    for n in range(1, 20):
        transports.sent(P, D, SIZE, n)
        transports.arrived(P, D, SIZE, None, n)
        transports.told(D, Moved(), n, n)
        transports.told(P, Moved(n * SIZE, n * 0.5, n, 0), n, n)
    (found,) = transports.statuses()
    assert (found.told_bytes, found.rate_from) == (19 * SIZE, "engine")
    assert math.isclose(transports.seconds(P, D, SIZE, 20.0), 0.5, rel_tol=0.05)


def test_forgotten_engines_leave_nothing() -> None:
    bench = Bench()
    for _ in range(5):
        bench.step((P, D), (Q, D))
    bench.transports.sent(P, D, SIZE, bench.now)
    bench.transports.forget(D)
    bench.transports.arrived(P, D, SIZE, 1.0, bench.now)
    bench.transports.lost(Q, D, bench.now)
    assert list(bench.transports.statuses()) == []
    for publisher in (P, Q, E):
        bench.transports.forget(publisher)
    bench.transports.ports("two", bench.received, bench.now + 60, bench.now + 60)
    for name, value in vars(bench.transports).items():
        assert not value or name in ("_arrivals", "margin_s"), name


def test_asking_for_a_price_changes_nothing() -> None:
    transports = Transports()
    for n in range(100):
        transports.seconds(P, Publisher(f"d{n}"), SIZE, 0.0)
    assert list(transports.statuses()) == []
