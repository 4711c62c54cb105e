"""Admission: who is refused, when, and what is left of the engines' time at overload.

The engines are queues in virtual time whose rates the dispatcher is not told.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core.admission import Rules, admitted
from kvatlas.core.cost import Price
from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Dispatcher, Finished, FirstToken, Input, Join, Question, Sent
from kvatlas.core.events import BlockStored
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import plain
from kvatlas.core.promises import PredictionError
from kvatlas.core.records import Publisher, Refusal
from kvatlas.core.router import Decision, Params, Plan, Router

BLOCK = 16
FP = b"\1" * 32
RATE = 1000.0  # tokens/s, what the router believes at first


def price(wait_s: float, recompute_s: float) -> Price:
    return Price(wait_s=wait_s, load_s=0.0, recompute_s=recompute_s, crowd_s=0.0, charge_s=0.0)


def plan(name: str, wait_s: float, recompute_s: float) -> Plan:
    return Plan(Publisher(name), 0, 0, 0, (), 0, False, price(wait_s, recompute_s))


def decision(*plans: Plan, unkeyed: str = "", policy: str = "price") -> Decision:
    soonest = "c"  # an id that is told the earliest time at which coming back may help
    return Decision(soonest, 0.0, 1000, policy, unkeyed, plans, len(plans))


def judged(made: Decision, slo_s: float, lateness: float | None = 1.0, **rules: bool) -> Decision:
    return admitted(made, slo_s, 0, Rules(**rules), lambda _: lateness)


class Cluster:
    """Engines that take one request after another. ``ask`` and ``until`` move virtual time."""

    def __init__(
        self, *rates: float, rules: Rules | None = None, policy: str = "price", noise: float = 0.0
    ) -> None:
        ring = Keyring(b"a secret for the tests")
        self.record: list[tuple[float, Input]] = []
        self.answers: list[Decision] = []
        self.dispatcher = Dispatcher(
            Directory(ring),
            Router(Params(policy=policy, prefill_tokens_per_s=RATE)),
            ring,
            rules=rules,
            tap=self._tap,
        )
        self.rates: dict[Publisher, float] = {}
        self.free_at: dict[Publisher, float] = {}
        self.now = 0.0
        self.answer_s = 0.5
        self.ttft_s: dict[str, float] = {}
        self._random = random.Random(7)
        self._noise = noise
        self._steps: list[tuple[float, int, Input]] = []
        self._asked = 0
        for rate in rates:
            self.join(rate)

    def _tap(self, now: float, event: Input, answer: Decision | None) -> None:
        self.record.append((now, event))
        if answer is not None:
            self.answers.append(answer)

    def join(self, rate: float) -> Publisher:
        engine = Publisher(f"w{len(self.rates)}")
        self.rates[engine], self.free_at[engine] = rate, 0.0
        self.dispatcher.handle(Join(engine, plain(BLOCK), FP), self.now)
        return engine

    def until(self, now: float) -> None:
        while self._steps and self._steps[0][0] <= now:
            self.now, _, event = heapq.heappop(self._steps)
            self.dispatcher.handle(event, self.now)
        self.now = now

    def ask(self, tokens: int, slo_s: float = math.inf) -> Decision:
        """A prompt like no other, sent where the decision says."""
        self._asked += 1
        ids = array("I", [self._asked]).tobytes() * tokens
        among = tuple((engine, "") for engine in self.rates)
        question = Question(f"r{self._asked}", among, ids, ttft_slo_s=slo_s)
        made = self.dispatcher.handle(question, self.now)
        assert made is not None
        if made.refusal is None:
            self._send(made, tokens)
        return made

    def _send(self, made: Decision, tokens: int) -> None:
        engine, id = made.plans[0].publisher, made.id
        self.dispatcher.handle(Sent(id, engine), self.now)
        service_s = tokens / self.rates[engine] * self._random.lognormvariate(0, self._noise)
        first_at = self.free_at[engine] = max(self.free_at[engine], self.now) + service_s
        self.ttft_s[id] = first_at - self.now
        end = Finished(id, engine, True, 0, self.ttft_s[id])
        first = FirstToken(id, self.ttft_s[id])
        for at, event in ((first_at, first), (first_at + self.answer_s, end)):
            heapq.heappush(self._steps, (at, len(self.record), event))

    def warm(self, count: int = 40) -> None:
        """So many requests, one at a time, and then nothing."""
        for _ in range(count * len(self.rates)):
            self.ask(100)
            self.until(self.now + 1.0)
        self.until(self.now + 60.0)


# -- the rule ----------------------------------------------------------------------------------


def test_among_plans_that_make_it_the_cheapest_is_still_first() -> None:
    plans = plan("a", 3.0, 0.1), plan("b", 0.0, 1.5), plan("c", 0.2, 0.1)
    assert [p.publisher.worker for p in judged(decision(*plans), 2.0).plans] == ["b", "c", "a"]
    assert judged(decision(*plans), 4.0).plans == plans
    assert judged(decision(*plans), math.inf) == decision(*plans)


def test_only_the_priced_order_is_touched() -> None:
    late, soon = plan("a", 3.0, 0.1), plan("b", 0.0, 0.1)
    for made in (decision(late, soon, policy="round_robin"), decision(late, soon, unkeyed="no")):
        assert judged(made, 1.0).plans == (late, soon)


def test_the_later_engines_are_the_longer_is_what_they_are_predicted() -> None:
    made = decision(plan("a", 0.4, 0.5), plan("b", 0.5, 0.5))
    slow = Publisher("a")
    ordered = admitted(made, 1.0, 0, Rules(), lambda p: 2.0 if p == slow else 1.0)
    assert [p.publisher.worker for p in ordered.plans] == ["b", "a"]
    assert judged(made, 1.0, 2.0).refusal == Refusal("slo_unreachable", 1.0, slow, 1.8)


def test_what_is_late_without_any_queue_is_not_refused() -> None:
    """Coming back later would not help; a queue is what later helps against."""
    assert judged(decision(plan("a", 0.0, 30.0)), 2.0).refusal is None
    late = Refusal("slo_unreachable", 4.0, Publisher("a"), 34.0)
    assert judged(decision(plan("a", 4.0, 30.0)), 2.0).refusal == late
    one_is_free = decision(plan("a", 4.0, 30.0), plan("b", 0.0, 30.0))
    assert judged(one_is_free, 2.0).refusal is None


def test_of_a_prompt_that_was_not_looked_up_only_the_wait_counts() -> None:
    queue = plan("a", 1.5, 10.0)
    assert judged(decision(queue, unkeyed="no_tokenizer"), 2.0).refusal is None
    assert judged(decision(queue, unkeyed="no_tokenizer"), 1.0).refusal is not None
    assert judged(decision(queue), 2.0).refusal is not None


def test_it_can_be_switched_off_and_needs_plans() -> None:
    late = decision(plan("a", 30.0, 1.0))
    assert judged(late, 2.0, by_slo=False).refusal is None
    assert judged(late, 2.0, by_slo=False).ttft_slo_s == 2.0
    assert judged(late, 2.0, lateness=None).refusal is None
    assert judged(decision(), 2.0).refusal is None


times = st.floats(0, 100, allow_nan=False)


@given(
    plans=st.lists(st.tuples(times, times), min_size=1, max_size=6),
    slo_s=st.floats(0.001, 200),
    lateness=st.floats(0.1, 5),
)
def test_refused_is_only_who_must_wait_and_is_late_everywhere(
    plans: list[tuple[float, float]], slo_s: float, lateness: float
) -> None:
    made = decision(*(plan(f"w{i}", *each) for i, each in enumerate(plans)))
    found = judged(made, slo_s, lateness)
    assert sorted(found.plans, key=lambda p: p.publisher) == list(made.plans)
    ends = [lateness * (wait + service) for wait, service in plans]
    if found.refusal is not None:
        assert found.refusal.reason == "slo_unreachable"
        assert min(ends) > slo_s
        assert min(wait for wait, _ in plans) > 0
        assert found.refusal.retry_after_s >= 1.0
        # Once so much of the waits is over it is taken.
        left = [max(0.0, w - found.refusal.retry_after_s / lateness - 1e-6) for w, _ in plans]
        later = decision(
            *(plan(f"w{i}", w, s) for i, (w, (_, s)) in enumerate(zip(left, plans, strict=True)))
        )
        assert judged(later, slo_s, lateness).refusal is None
    elif min(ends) <= slo_s:
        assert lateness * found.plans[0].price.ttft_s <= slo_s


# -- what predictions are worth ------------------------------------------------------------------


def test_a_predicted_second_is_what_seconds_became() -> None:
    record = PredictionError()
    for _ in range(19):
        record.observe(1.0, 2.0, ())
    assert record.lateness() is None
    for _ in range(100):
        record.observe(1.0, 2.0, ())
    assert record.lateness() == pytest.approx(2.0, rel=0.01)
    for number in range(400):
        record.observe(1.0, 1.5 if number % 2 else 0.5, ())
    assert record.lateness() == pytest.approx(2.0, rel=0.05)  # as usual, or twice 0.5 later
    quick = PredictionError()
    for _ in range(50):
        quick.observe(0.0, 0.0, ())
    assert quick.lateness() is None


def test_before_enough_was_answered_nobody_is_refused() -> None:
    cluster = Cluster(RATE, RATE)
    assert all(cluster.ask(1000, 1.0).refusal is None for _ in range(50))
    cluster.until(22.0)
    assert len(cluster.ttft_s) == 50
    assert cluster.ask(1000, 1.0).refusal is not None


@pytest.mark.parametrize("answer_s", [0.1, 1000.0])
def test_first_tokens_are_enough_to_know_however_long_answers_take(answer_s: float) -> None:
    cluster = Cluster(RATE)
    cluster.answer_s = answer_s
    for _ in range(20):
        cluster.ask(100)
    cluster.until(1.95)
    assert cluster.dispatcher.errors[Publisher("w0")].requests == 19
    cluster.ask(1000)
    cluster.ask(1000)
    assert cluster.ask(100, 1.0).refusal is None
    cluster.until(2.05)
    assert cluster.dispatcher.errors[Publisher("w0")].requests == 20
    assert cluster.ask(100, 1.0).refusal is not None
    cluster.until(4000.0)
    assert cluster.dispatcher.errors[Publisher("w0")].requests == 23  # each of them once


def test_a_new_engine_is_judged_as_all_are() -> None:
    cluster = Cluster(RATE)
    cluster.warm()
    new = cluster.join(RATE)
    taken = [d for d in (cluster.ask(500, 2.0) for _ in range(20)) if d.refusal is None]
    assert {d.plans[0].publisher for d in taken} == set(cluster.rates)
    assert sum(d.plans[0].publisher == new for d in taken) <= 4


# -- the cluster ---------------------------------------------------------------------------------


def test_short_requests_pass_where_long_ones_do_not() -> None:
    cluster = Cluster(RATE)
    cluster.warm()
    while cluster.ask(200, 2.0).refusal is None:
        cluster.until(cluster.now + 0.001)
    assert cluster.ask(200, 2.0).refusal is not None
    assert cluster.ask(20, 2.0).refusal is None
    assert cluster.ask(200).refusal is None  # who states no objective waits


def test_who_comes_back_when_told_is_taken() -> None:
    cluster = Cluster(RATE, RATE)
    cluster.warm()
    for _ in range(40):
        cluster.ask(400, 4.0)
    refused = cluster.ask(1000, 4.0)
    assert refused.refusal is not None
    assert 1.0 <= refused.refusal.retry_after_s <= 8.0, "4 s of waiting, and as long again"
    cluster.until(cluster.now + refused.refusal.retry_after_s)
    assert cluster.ask(1000, 4.0).refusal is None


def test_those_who_are_refused_together_do_not_come_back_together() -> None:
    made = decision(plan("w0", 5.2, 0.1))
    names = [f"r{number}" for number in range(700)]

    def told(id: str, in_flight: int) -> float:
        asked = msgspec.structs.replace(made, id=id)
        refusal = admitted(asked, 2.0, in_flight, Rules(in_flight_max=9), lambda _: 1.0).refusal
        assert refusal is not None
        return refusal.retry_after_s

    # 3.3 s too late: after 4 s it would be in time.
    counts = Counter(told(name, 0) for name in names)
    assert sorted(counts) == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert min(counts.values()) > 100, "evenly"
    assert set(Counter(told(name, 9) for name in names)) == {1.0, 2.0}
    assert [told(name, 0) for name in names] == [told(name, 0) for name in names]


def test_the_engine_that_makes_it_is_taken_before_the_one_that_holds_more() -> None:
    cluster = Cluster(RATE, RATE)
    cluster.warm()
    holder = min(cluster.rates)
    ids = array("I", [9]).tobytes() * 900
    stored = BlockStored(tuple(range(56)), None, ids[: 56 * BLOCK * 4], BLOCK)
    cluster.dispatcher.apply(holder, [stored])
    for number in range(4):  # a queue of 1.25 s there
        id, other = f"q{number}", array("I", [100 + number]).tobytes() * 310
        cluster.dispatcher.handle(Question(id, ((holder, ""),), other), cluster.now)
        cluster.dispatcher.handle(Sent(id, holder), cluster.now)
    among = tuple((engine, "") for engine in cluster.rates)
    chosen = []
    for slo_s in (math.inf, 1.1):
        made = cluster.dispatcher.handle(
            Question(f"slo {slo_s}", among, ids, ttft_slo_s=slo_s), cluster.now
        )
        assert made is not None
        chosen.append(made.plans[0].publisher)
    assert chosen[0] == holder
    assert chosen[1] != holder


def arrivals(load: float, rates: tuple[float, ...], end_s: float) -> Iterator[tuple[float, int]]:
    """Poisson; prompts of 100 tokens and more, some of them ten times as long as most."""
    draw, at, mean = random.Random(3), 0.0, 500
    while at < end_s:
        at += draw.expovariate(load * sum(rates) / mean)
        yield at, 100 + int(draw.lognormvariate(0, 1) * (mean - 100) / math.exp(0.5))


def crowd(
    load: float, slo_s: float, *, by_slo: bool = True
) -> tuple[list[tuple[float, float]], float]:
    """When each request in time came and how many tokens it had, as a share of what four unequal
    engines can compute; and the share of the taken that were in time. After 40 s."""
    rates = (2000.0, 1000.0, 1000.0, 500.0)
    cluster = Cluster(*rates, rules=Rules(by_slo=by_slo), noise=0.2)
    asked: list[tuple[float, int, str]] = []
    for at, tokens in arrivals(load, rates, 120.0):
        cluster.until(at)
        made = cluster.ask(tokens, slo_s)
        if made.refusal is None and at > 40.0:
            asked.append((at, tokens, made.id))
    good = [
        (at, tokens / (80.0 * sum(rates)))
        for at, tokens, id in asked
        if cluster.ttft_s[id] <= slo_s
    ]
    return good, len(good) / len(asked)


@pytest.mark.parametrize("load", [1.5, 3.0])
def test_at_overload_what_is_taken_is_in_time_and_engines_have_no_gaps(load: float) -> None:
    good, kept = crowd(load, 3.0)
    assert kept > 0.9
    assert sum(share for _, share in good) > 0.8
    # It does not swing: each ten seconds do their part.
    for begin in range(40, 120, 10):
        part = sum(share for at, share in good if begin <= at < begin + 10)
        assert part > 0.5 * 10 / 80
    lost, _ = crowd(load, 3.0, by_slo=False)
    assert sum(share for _, share in lost) < 0.2


def test_below_overload_hardly_anybody_is_refused() -> None:
    good, kept = crowd(0.5, 3.0)
    others, _ = crowd(0.5, 3.0, by_slo=False)
    assert kept > 0.97
    assert len(good) > 0.99 * len(others)


@pytest.mark.parametrize("slo_s", [0.001, 2.0, math.inf])
def test_who_looks_at_no_prompt_predicts_nothing(slo_s: float) -> None:
    cluster = Cluster(RATE, policy="least_load")
    among = ((Publisher("w0"), ""),)
    for number in range(200):
        id = f"u{number}"
        question = Question(id, among, unkeyed="least_load", ttft_slo_s=slo_s)
        made = cluster.dispatcher.handle(question, 0.0)
        assert made is not None
        assert made.refusal is None
        cluster.dispatcher.handle(Sent(id, Publisher("w0")), 0.0)


def test_refusals_come_out_again_in_a_replay() -> None:
    cluster = Cluster(RATE, 500.0, rules=Rules(in_flight_max=30), noise=0.3)
    for at, tokens in arrivals(2.0, (RATE, 500.0), 80.0):
        cluster.until(at)
        cluster.ask(tokens, math.inf if tokens % 3 else 2.0)
    reasons = {d.refusal.reason for d in cluster.answers if d.refusal is not None}
    assert reasons == {"slo_unreachable", "in_flight_max"}
    ring = Keyring(b"another secret of the tests")
    again = Dispatcher(
        Directory(ring),
        Router(Params(prefill_tokens_per_s=RATE)),
        ring,
        rules=Rules(in_flight_max=30),
    )
    kept = msgspec.msgpack.decode(
        msgspec.msgpack.encode(cluster.record), type=list[tuple[float, Input]]
    )
    answers = [again.handle(event, now) for now, event in kept]
    assert [a for a in answers if a is not None] == cluster.answers


# -- the limit -----------------------------------------------------------------------------------


def test_no_more_are_taken_than_may_be_in_flight() -> None:
    cluster = Cluster(RATE, RATE, rules=Rules(in_flight_max=3))
    taken = [cluster.ask(100) for _ in range(5)]
    assert [d.refusal.reason if d.refusal else "" for d in taken] == [
        *("", "", ""),
        *("in_flight_max", "in_flight_max"),
    ]
    assert sum(cluster.dispatcher.router.in_flight().values()) == 3
    assert cluster.dispatcher.plan(taken[3].id, Publisher("w0")) is None
    among = ((Publisher("w0"), ""),)
    part = Question("part", among, unkeyed="half of a pair", admitted=True)
    made = cluster.dispatcher.handle(part, cluster.now)
    assert made is not None
    assert made.refusal is None  # of a request that was let in
    cluster.dispatcher.handle(Finished("part", Publisher("w0"), False), cluster.now)
    cluster.until(1.0)
    assert cluster.ask(100).refusal is None
