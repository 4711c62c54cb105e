"""What a bench may say: differences that are called rightly, and the knee."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.report.latency import Slo, Timing, report, summarise
from kvatlas.report.statistics import interval
from kvatlas.service.load import Hits, LoadPlan, LoadResult, Record
from kvatlas.validate.bench import words
from kvatlas.validate.bench.knee import RATE_MAX, Search
from kvatlas.validate.bench.values import Arm, BenchPlan, Clean, EngineHits, Outcome, Round, Row
from kvatlas.validate.bench.verdicts import METRICS, Difference, Findings, findings

# -- the knee -------------------------------------------------------------------------------------


def searched(first: float, limit: float, *, tolerance: float = 0.1, steps_max: int = 40) -> Search:
    """A search where everything up to ``limit`` holds."""
    search = Search(first, tolerance=tolerance, steps_max=steps_max)
    while (rate := search.next_rate()) is not None:
        search.told(rate, rate <= limit)
    return search


@given(st.floats(0.1, 1000), st.floats(0.1, 1000), st.floats(0.01, 0.5))
def test_the_knee_is_found_to_its_tolerance(first: float, limit: float, tolerance: float) -> None:
    search = searched(first, limit, tolerance=tolerance)
    assert search.ending == "found"
    assert search.holds is not None
    assert search.misses is not None
    assert search.holds <= limit < search.misses <= search.holds * (1 + tolerance)


def test_how_else_a_search_ends() -> None:
    everywhere = searched(10, 1e9)
    assert (everywhere.ending, everywhere.misses) == ("holds everywhere", None)
    assert everywhere.holds is not None
    assert everywhere.holds <= RATE_MAX < everywhere.holds * 2
    nowhere = searched(10, 0)
    assert (nowhere.ending, nowhere.holds) == ("holds nowhere", None)
    assert searched(10, 1e9, steps_max=3).ending == "holds everywhere"
    assert searched(10, 0, steps_max=3).ending == "holds nowhere"
    short = searched(10, 33, steps_max=3)
    assert (short.ending, short.holds, short.misses) == ("out of steps", 20, 40)
    short.stop()
    assert (short.ending, short.next_rate()) == ("stopped", None)


# -- figures and differences ----------------------------------------------------------------------

SLO = Slo(ttft_s=0.5)


def played(
    arm: str,
    number: int,
    ttft_s: list[float | None],
    *,
    hits: EngineHits | None = None,
    slo: Slo = SLO,
) -> tuple[Round, list[Row]]:
    """One play whose requests had these TTFTs; None: it failed."""
    timings = [None if t is None else Timing(t, t + 0.1, 3) for t in ttft_s]
    records = [
        Record(i, "", 0.1 * i, 0.0, timing, 100, 40, error="" if timing else "timeout")
        for i, timing in enumerate(timings)
    ]
    good = [timing for timing in timings if timing is not None]
    failed = len(timings) - len(good)
    load = LoadResult(
        LoadPlan("http://x", slo=slo),
        report(good, failed=failed, duration_s=10.0, slo=slo),
        summarise([0.0]),
        Hits(0, 0, 0, 0, 0),
        {"timeout": failed} if failed else {},
        {"timeout": "request 0: no answer"} if failed else {},
        {},
    )
    counted = hits or EngineHits(1000, 400, 0, 400)
    clean = Clean("reset", "verified")
    round = Round(arm, number, 0, number, 0.0, clean, load, counted)
    return round, [Row(arm, f"round {number + 1}", record) for record in records]


def outcome(rounds: list[Round], names: tuple[str, ...] = ("a", "b")) -> Outcome:
    arms = tuple(Arm(name, f"http://{name}") for name in names)
    plan = BenchPlan(LoadPlan("", slo=SLO))
    return Outcome("w", plan, arms, {}, tuple(rounds), (), {}, (), False, "0", 0.0)


def found(
    make: Callable[[str, int], tuple[Round, list[Row]]], rounds: int = 5
) -> tuple[Outcome, Findings]:
    plays = [make(arm, number) for number in range(rounds) for arm in ("a", "b")]
    told = outcome([round for round, _ in plays])
    return told, findings(told, [row for _, rows in plays for row in rows])


def difference(found: Findings, metric: str) -> Difference:
    return next(d for d in found.differences if d.metric == metric)


def noisy(base_s: float, number: int, count: int = 30) -> list[float | None]:
    rng = random.Random(number)
    return [base_s * rng.uniform(0.8, 1.2) + number * 0.1 for _ in range(count)]


def test_what_differs_is_called_and_what_does_not_is_not() -> None:
    """Rounds differ by more than the arms do; pair by pair that is no matter."""
    told, there = found(lambda arm, n: played(arm, n, noisy(0.2 if arm == "a" else 0.16, n)))
    mean = there.estimate("a", "TTFT p50").interval
    assert mean is not None
    assert mean.low is not None
    assert 0 <= mean.low < mean.mean
    slower = difference(there, "TTFT p50")
    assert slower.verdict == "better"
    assert slower.relative == pytest.approx(-0.1, abs=0.02)  # 0.04 of 0.4: the rounds' mean
    assert difference(there, "hit tokens").verdict == "no difference shown"
    assert difference(there, "TPOT p50").verdict == "no difference shown"
    assert there.estimate("a", "hit tokens").values == (0.4,) * 5
    said = " ".join(words.compared(told, there))
    assert "b is better than a: TTFT p50 -" in said
    assert "no difference shown in" in said


def test_lower_is_better_for_times_and_higher_for_rates() -> None:
    _, there = found(lambda arm, n: played(arm, n, noisy(0.2 if arm == "a" else 2.0, n)))
    assert difference(there, "TTFT p95").verdict == "worse"
    assert difference(there, "goodput").verdict == "worse"
    assert {m.name: m.better for m in METRICS}["output tokens"] == "higher"


def test_a_failed_request_is_endlessly_late() -> None:
    def dropping(arm: str, number: int) -> tuple[Round, list[Row]]:
        times = noisy(0.2, number, 40)
        return played(arm, number, times if arm == "a" else [*times[:36], None, None, None, None])

    told, there = found(dropping)
    late = there.estimate("b", "TTFT p95")
    assert late.interval is None
    assert late.reason == "4 of 40 requests of a round failed: p95 is among them"
    assert there.estimate("b", "TTFT p50").interval is not None
    assert difference(there, "TTFT p95").verdict == "not shown"
    assert difference(there, "TTFT p95").reason == f"b: {late.reason}"
    assert words.endings(told) == ["b: 20 × timeout, the first in round 1, request 0: no answer"]
    assert not told.sound


def test_what_cannot_be_told_says_why() -> None:
    gone = EngineHits(reason="http://b/metrics: status 404")

    def poor(arm: str, number: int) -> tuple[Round, list[Row]]:
        return played(arm, number, noisy(0.2, number, 12), hits=gone, slo=Slo())

    told, there = found(poor, rounds=3)
    reasons = {e.metric: e.reason for e in there.estimates if e.arm == "b"}
    assert reasons["TTFT p95"] == "12 values in a round: p95 needs 20"
    assert reasons["TTFT p50"] == "no interval: 3 rounds, 5 are needed"
    assert reasons["goodput"] == "no SLO is stated"
    assert reasons["hit tokens"] == gone.reason
    assert {d.verdict for d in there.differences} == {"not shown"}
    assert words.estimate_text(there.estimate("b", "TTFT p95")) == "not shown"
    said = " ".join(words.compared(told, there))
    assert "3 rounds of both, 5 are needed" in said


def test_one_round_without_a_figure_takes_the_mean_with_it() -> None:
    def once(arm: str, number: int) -> tuple[Round, list[Row]]:
        lost = EngineHits(reason="restarted") if number == 2 else None
        return played(arm, number, noisy(0.2, number), hits=lost)

    _, there = found(once, rounds=6)
    hits = there.estimate("a", "hit tokens")
    assert (hits.interval, hits.reason) == (None, "restarted (in 1 of 6 rounds)")
    assert len(hits.values) == 5


def test_only_rounds_of_both_arms_are_compared_and_only_whole_ones_count() -> None:
    plays = [played(arm, n, noisy(0.2, n)) for n in range(7) for arm in ("a", "b")]
    rounds = [r for r, _ in plays if (r.arm, r.number) != ("b", 6)]
    rounds = [msgspec.structs.replace(r, whole=r.number != 5) for r in rounds]
    there = findings(outcome(rounds), [row for _, rows in plays for row in rows])
    assert len(there.estimate("a", "TTFT p50").values) == 6
    assert len(there.estimate("b", "TTFT p50").values) == 5
    assert difference(there, "TTFT p50").interval is not None
    none = findings(outcome([]), [])
    assert none.estimate("a", "TTFT p50").reason == "no whole round"
    assert difference(none, "TTFT p50").reason == "a: no whole round"


def test_differences_are_read_with_their_units() -> None:
    def text(metric: str, values: list[float], relative: float | None) -> str:
        return words.difference_text(
            Difference("a", "b", metric, interval(values), relative, "better")
        )

    assert text("TTFT p50", [-0.1] * 5, -0.25) == "-25.0% (-25.0% to -25.0%)"
    assert text("hit tokens", [0.12] * 5, 0.3) == "+12.0 points (+12.0 to +12.0)"
    assert text("TTFT p50", [-0.1] * 3, -0.25) == "-25.0%"
    assert text("requests", [0.0] * 5, None) == "0/s (0/s to 0/s)"
    assert words.value_text("E2E p50", -0.25) == "-250.0 ms"
