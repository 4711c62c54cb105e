"""Who is tried next, and for how long: `core.ladder`, and the ladder of one request."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core.ladder import SHARE, first_in_time, loaded, patience_s
from kvatlas.service.ladder import Ended, Ladder
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.steer import Half, Route, Target

SECONDS = st.floats(0, 1000)


@given(left=SECONDS, own=SECONDS, below=st.lists(SECONDS, max_size=3))
def test_patience(left: float, own: float, below: list[float]) -> None:
    got = patience_s(left, own, below)
    assert got <= left
    cheapest = min(below, default=math.inf)
    if own + cheapest > left:  # the two cannot both be done
        assert got == left
    else:
        assert got + cheapest <= left + 1e-6
        assert got >= own - 1e-6
        assert got == pytest.approx(max(own, min(left - cheapest, SHARE * left)))


def test_patience_without_a_deadline() -> None:
    assert patience_s(math.inf, 1.0, [0.5]) == math.inf
    assert patience_s(math.inf, 1.0, []) == math.inf


def test_the_first_that_can_be_done_in_time() -> None:
    assert first_in_time([5.0, 2.0, 1.0], 2.0) == 1
    assert first_in_time([5.0, 2.0], 1.0) == 0  # none can: a price is no certainty
    assert first_in_time([5.0, 2.0], math.inf) == 0
    assert first_in_time([], 1.0) == 0


@pytest.mark.parametrize(
    ("expected", "remote", "cached", "became"),
    [
        (512, 256, 512, None),
        (512, 256, 600, None),
        (512, 256, -1, None),  # not reported
        (512, 0, 0, None),  # nothing was to be loaded: the hit gap's matter
        (512, 256, 256, "local"),
        (512, 256, 0, "recompute"),
    ],
)
def test_what_became_of_a_load(expected: int, remote: int, cached: int, became: str | None) -> None:
    assert loaded(expected, remote, cached) == became


class Scripted:
    """As much of `Steer` as a ladder asks. Counts what it was asked."""

    def __init__(self, **answers: tuple[Target, ...]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def left(self, route: Route) -> bool:
        return bool(self.answers.get("more"))

    def more(self, route: Route) -> tuple[Target, ...]:
        return self.answers.pop("more", ())

    def decoders(self, route: Route, prefill: Target) -> tuple[Target, ...]:
        self.asked.append(f"decoders of {prefill.worker}")
        return self.answers.get("decoders", ())

    def alone(self, route: Route, failed: Half) -> tuple[Target, ...]:
        self.asked.append("alone")
        return self.answers.get("alone", ())


def target(worker: str, half: Half = "", ttft_s: float = 0.0, wait_s: float = 0.0) -> Target:
    return Target(worker, "http://x", half=half, ttft_s=ttft_s, wait_s=wait_s)


def ladder_of(
    *targets: Target, left_s: float = math.inf, alone_s: float = math.inf, **answers: Any
) -> tuple[Ladder, Route, Scripted]:
    route = Route("id", targets, alone_s=alone_s, deadline_s=left_s)
    steer = Scripted(**answers)
    ends_at_s = time.perf_counter() + left_s
    return Ladder(route, steer, GatewayMetrics(), ends_at_s), route, steer  # type: ignore[arg-type]


def steps(route: Route) -> list[tuple[str, str, str, str]]:
    return [(f.rung, f.reason, f.to, f.worker) for f in route.fallbacks]


def worker_of(target: Target | None) -> str:
    return target.worker if target is not None else ""


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one number is the time."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_down_to_nobody(stopped_clock: list[float]) -> None:
    a, b, c = target("a"), target("b"), target("c")
    ladder, route, _ = ladder_of(a, b, more=(c,))
    assert ladder.first() is a
    assert ladder.goes_on()
    stopped_clock[0] += 1.5
    assert ladder.next(a, Ended("connect", 502)) is b
    assert ladder.next(b, Ended("refused", 503)) is c
    assert not ladder.goes_on()
    assert ladder.next(c, Ended("refused", 503)) is None
    assert steps(route) == [
        ("engine", "connect", "engine", "a"),
        ("engine", "refused", "engine", "b"),
        ("engine", "refused", "error", "c"),
    ]
    assert [f.cost_s for f in route.fallbacks] == [1.5, 0.0, 0.0]
    assert ladder.tried == ["a", "b", "c"]


def test_what_a_pair_that_is_given_up_has_cost(stopped_clock: list[float]) -> None:
    """Another second half keeps what the first did; one engine does not."""
    p, d1, d2, c = (
        target("p", "prefill"),
        target("d1", "decode"),
        target("d2", "decode"),
        target("c"),
    )
    ladder, route, steer = ladder_of(p, decoders=(d1, d2), alone=(c,))
    assert ladder.first() is p
    stopped_clock[0] += 2.0
    assert ladder.next(p, Ended("", 200, half="prefill")) is d1
    assert not route.fallbacks
    stopped_clock[0] += 0.5
    assert ladder.next(d1, Ended("refused", 503, half="decode")) is d2
    stopped_clock[0] += 0.25
    assert ladder.next(d2, Ended("failed", 502, half="decode")) is c
    assert steps(route) == [
        ("decode", "refused", "pair", "d1"),
        ("decode", "failed", "engine", "d2"),
    ]
    assert [f.cost_s for f in route.fallbacks] == [0.5, 2.25]
    assert steer.asked == ["decoders of p", "alone"]
    assert ladder.next(c, Ended("refused", 503)) is None
    assert steer.asked.count("alone") == 1  # each is asked once more at most


def test_no_second_half_is_up() -> None:
    p, c = target("p", "prefill"), target("c")
    ladder, route, _ = ladder_of(p, alone=(c,))
    ladder.first()
    assert ladder.next(p, Ended("", 200, half="prefill")) is c
    assert steps(route) == [("decode", "down", "engine", "")]


def test_what_cannot_be_in_time_is_passed_over() -> None:
    slow, fast = target("slow", ttft_s=3.0), target("fast", ttft_s=1.0)
    ladder, route, _ = ladder_of(slow, fast, left_s=2.0)
    assert ladder.first() is fast
    assert steps(route) == [("engine", "late", "engine", "slow")]
    assert not ladder.goes_on()


def test_a_pair_that_cannot_be_in_time_is_one_engine() -> None:
    p, c = target("p", "prefill", ttft_s=3.0), target("c", ttft_s=1.0)
    ladder, route, _ = ladder_of(p, left_s=2.0, alone_s=1.0, alone=(c,))
    assert ladder.first() is c
    assert steps(route) == [("pair", "late", "engine", "p")]
    # Where one engine could not do it either, the better plan is tried.
    ladder, route, steer = ladder_of(p, left_s=2.0, alone_s=2.5, alone=(c,))
    assert ladder.first() is p
    assert not steps(route)
    assert not steer.asked


def test_patience_goes_by_what_stands_below(stopped_clock: list[float]) -> None:
    p, c = target("p", "prefill", ttft_s=1.0), target("c", ttft_s=3.0)
    ladder, _, _ = ladder_of(p, c, left_s=10.0, alone_s=8.0)
    ladder.first()
    assert ladder.patience_s(p) == 2.0  # a half that fails is followed by one engine
    ladder, _, _ = ladder_of(target("a"), c, left_s=10.0)
    assert (first := ladder.first()) is not None
    assert ladder.patience_s(first) == 5.0
    stopped_clock[0] += 4.0
    assert ladder.next(first, Ended("timeout", 504)) is c
    assert ladder.patience_s(c) == 6.0  # nobody is below it
    ladder, _, _ = ladder_of(target("a"), c)
    assert (first := ladder.first()) is not None
    assert ladder.patience_s(first) == math.inf


@pytest.mark.parametrize(
    ("ttft_s", "wait_s", "after"),
    [
        (0.5, 0.0, b"1"),  # it should have been in time
        (6.5, 6.0, b"5"),  # it would be, once the queue is shorter
        (6.5, 1.0, None),  # the work itself does not fit
    ],
)
def test_when_to_come_again(ttft_s: float, wait_s: float, after: bytes | None) -> None:
    only = target("a", ttft_s=ttft_s, wait_s=wait_s)
    ladder, route, _ = ladder_of(only, left_s=2.0)
    ladder.first()
    text, headers = ladder.late(only)
    assert "2 s ended at engine a" in text
    assert headers == ([(b"retry-after", after)] if after else [])
    assert steps(route) == [("engine", "deadline", "error", "a")]


def test_state_that_was_not_loaded() -> None:
    lower = Target("a", "http://x", expected_hit_tokens=512, tier_tokens=(256, 256), ttft_s=1.0)
    ladder, route, _ = ladder_of(lower)
    ladder.resumed(lower, 512, 3.0)
    assert not route.fallbacks
    ladder.resumed(lower, 256, 3.0)
    ladder.resumed(lower, 0, 0.5)
    assert steps(route) == [
        ("remote", "not_loaded", "local", "a"),
        ("remote", "not_loaded", "recompute", "a"),
    ]
    guessed = msgspec.structs.replace(lower, ttft_s=0.0)
    ladder.resumed(guessed, 0, 3.0)
    assert [f.cost_s for f in route.fallbacks] == [2.0, 0.0, 0.0]


HALVES = st.sampled_from(["", "prefill"])
REASONS = st.sampled_from(["", "connect", "refused", "failed", "timeout"])


@given(
    halves=st.lists(HALVES, min_size=1, max_size=4),
    behind=st.tuples(*[st.integers(0, 3)] * 3),
    reasons=st.lists(st.tuples(REASONS, SECONDS), min_size=30, max_size=30),
    left_s=st.one_of(st.just(math.inf), SECONDS),
)
def test_every_way_down_ends(
    halves: list[Half],
    behind: tuple[int, int, int],
    reasons: list[tuple[str, float]],
    left_s: float,
) -> None:
    """Nobody is asked for ever, each step says what came next, and no second is lost twice."""
    now = [100.0]
    more, decoders, alone = behind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now[0])
        ladder, route, steer = ladder_of(
            *(target(f"t{n}", half, ttft_s=n) for n, half in enumerate(halves)),
            left_s=left_s,
            alone_s=1.0,
            more=tuple(target(f"m{n}") for n in range(more)),
            decoders=tuple(target(f"d{n}", "decode") for n in range(decoders)),
            alone=tuple(target(f"a{n}") for n in range(alone)),
        )
        current, tries = ladder.first(), 0
        while current is not None:
            reason, took_s = reasons[tries]
            tries += 1
            now[0] += took_s
            if not reason and current.half != "prefill":
                break  # the client has its answer
            before, status = len(route.fallbacks), 200 if not reason else 502
            following = ladder.next(current, Ended(reason, status, half=current.half))
            fell = route.fallbacks[before:]
            if reason or following is None or not following.half:
                to = "error" if following is None else "pair" if following.half else "engine"
                assert fell
                assert {f.to for f in fell} == {to}
            current = following
    assert steer.asked.count("alone") <= 1
    assert ladder.tried == list(dict.fromkeys(ladder.tried)) or decoders
    lost_s = sum(f.cost_s for f in route.fallbacks)
    assert all(f.cost_s >= 0 for f in route.fallbacks)
    assert lost_s <= now[0] - 100.0 + 1e-6


def test_all_is_counted_once() -> None:
    metrics = GatewayMetrics()
    route = Route("id", (target("a"),))
    steer: Any = Scripted()
    ladder = Ladder(route, steer, metrics, math.inf)
    first = ladder.first()
    assert worker_of(first) == "a"
    ladder.next(target("a"), Ended("connect", 502))
    text = metrics.text().decode()
    labels = 'reason="connect",rung="engine",to="error",worker="a"'
    assert f"kvatlas_fallbacks_total{{{labels}}} 1.0" in text
    assert f"kvatlas_fallback_seconds_total{{{labels}}} 0.0" in text
