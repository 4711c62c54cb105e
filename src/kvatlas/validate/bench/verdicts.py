"""What rounds amount to: one figure per arm and metric with its interval, and what differs. Pure.

Of latencies, a request that failed never ended: it counts as endlessly late. So an arm that drops
its slowest requests does not look fast; where the failures reach a percentile there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from kvatlas.report.latency import Timing, percentile
from kvatlas.report.statistics import ROUNDS_MIN, Interval, interval
from kvatlas.service.load import Record
from kvatlas.validate.bench.values import Outcome, Round, Row

REQUESTS_MIN = {50: 5, 95: 20}  # fewer in a round do not have such a percentile

Better = Literal["lower", "higher"]
Verdict = Literal["better", "worse", "no difference shown", "not shown"]
Figure = float | str  # a value, or why there is none


class Metric(msgspec.Struct, frozen=True):
    """``unit``: "s", "/s" (per second) or "share"."""

    name: str
    unit: Literal["s", "/s", "share"]
    better: Better
    of: Callable[[Round, Sequence[Record]], Figure]


class Estimate(msgspec.Struct, frozen=True):
    """One metric of one arm. ``values``: by round. ``interval`` is None where nothing is shown,
    and has no ends where only the mean can be; ``reason`` says why."""

    arm: str
    metric: str
    values: tuple[float, ...]
    interval: Interval | None
    reason: str = ""


class Difference(msgspec.Struct, frozen=True):
    """``other`` minus ``base``, round by round. ``relative``: the mean as a part of the base's."""

    base: str
    other: str
    metric: str
    interval: Interval | None
    relative: float | None
    verdict: Verdict
    reason: str = ""


def _late(percent: int, value: Callable[[Timing], float | None]) -> Callable[..., Figure]:
    """A percentile over all requests of a round, those that failed endlessly late."""

    def figure(round: Round, records: Sequence[Record]) -> Figure:
        values = []
        for record in records:
            if record.timing is None:
                values.append(math.inf)
            elif (known := value(record.timing)) is not None:
                values.append(known)
        if len(values) < REQUESTS_MIN[percent]:
            return f"{len(values)} values in a round: p{percent} needs {REQUESTS_MIN[percent]}"
        found = percentile(sorted(values), percent)
        if math.isfinite(found):
            return found
        failed = sum(record.timing is None for record in records)
        return f"{failed} of {len(records)} requests of a round failed: p{percent} is among them"

    return figure


def _rate(value: Callable[[Round], float]) -> Callable[..., Figure]:
    return lambda round, records: value(round)


def _goodput(round: Round, records: Sequence[Record]) -> Figure:
    assert round.load is not None
    slo = round.load.plan.slo
    if slo.ttft_s is None and slo.tpot_s is None:
        return "no SLO is stated"
    return round.load.latency.goodput_per_s


def _hits(round: Round, records: Sequence[Record]) -> Figure:
    hits = round.hits
    found = hits.hit_tokens if hits.hit_tokens is not None else hits.local_tokens
    if hits.reason or found is None or not hits.prompt_tokens:
        return hits.reason or "the engines do not count them"
    return found / hits.prompt_tokens


def _load(round: Round, name: str) -> float:
    assert round.load is not None
    return float(getattr(round.load.latency, name))


METRICS = (
    Metric("TTFT p50", "s", "lower", _late(50, lambda t: t.ttft_s)),
    Metric("TTFT p95", "s", "lower", _late(95, lambda t: t.ttft_s)),
    Metric("TPOT p50", "s", "lower", _late(50, lambda t: t.tpot_s)),
    Metric("TPOT p95", "s", "lower", _late(95, lambda t: t.tpot_s)),
    Metric("E2E p50", "s", "lower", _late(50, lambda t: t.e2e_s)),
    Metric("E2E p95", "s", "lower", _late(95, lambda t: t.e2e_s)),
    Metric("goodput", "/s", "higher", _goodput),
    Metric("requests", "/s", "higher", _rate(lambda r: _load(r, "requests_per_s"))),
    Metric("output tokens", "/s", "higher", _rate(lambda r: _load(r, "output_tokens_per_s"))),
    Metric("hit tokens", "share", "higher", _hits),
)


class Findings(msgspec.Struct, frozen=True):
    """All estimates and differences; the first arm is what the others are compared with."""

    estimates: tuple[Estimate, ...]
    differences: tuple[Difference, ...]

    def estimate(self, arm: str, metric: str) -> Estimate:
        """Raises StopIteration for one that there is not."""
        return next(e for e in self.estimates if (e.arm, e.metric) == (arm, metric))


def findings(outcome: Outcome, rows: Sequence[Row]) -> Findings:
    """From whole rounds alone."""
    records: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        records.setdefault((row.arm, row.play), []).append(row.record)
    figures: dict[tuple[str, str], dict[int, Figure]] = {}
    for round in outcome.rounds:
        if round.whole and round.load is not None:
            told = records.get((round.arm, f"round {round.number + 1}"), [])
            for metric in METRICS:
                by_round = figures.setdefault((round.arm, metric.name), {})
                by_round[round.number] = metric.of(round, told)
    names = [arm.name for arm in outcome.arms]
    estimates = [
        _estimate(name, metric.name, figures.get((name, metric.name), {}))
        for name in names
        for metric in METRICS
    ]
    differences = [
        _difference(names[0], name, metric, figures) for name in names[1:] for metric in METRICS
    ]
    return Findings(tuple(estimates), tuple(differences))


def _estimate(arm: str, metric: str, figures: dict[int, Figure]) -> Estimate:
    values, reason = _values(figures, sorted(figures))
    if reason:
        return Estimate(arm, metric, tuple(values), None, reason)
    found = interval(values)
    if found.low is not None:  # nothing that is measured here is negative
        found = msgspec.structs.replace(found, low=max(0.0, found.low))
    few = f"no interval: {len(values)} rounds, {ROUNDS_MIN} are needed"
    return Estimate(arm, metric, tuple(values), found, few if found.low is None else "")


def _difference(
    base: str, other: str, metric: Metric, figures: dict[tuple[str, str], dict[int, Figure]]
) -> Difference:
    ours, theirs = figures.get((base, metric.name), {}), figures.get((other, metric.name), {})
    both = sorted(ours.keys() & theirs.keys())
    for name, side in ((base, ours), (other, theirs)):
        reason = _values(side, both)[1]
        if reason:
            return _unknown(base, other, metric, f"{name}: {reason}")
    before, after = _values(ours, both)[0], _values(theirs, both)[0]
    found = interval([b - a for a, b in zip(before, after, strict=True)])
    mean = sum(before) / len(before)
    relative = found.mean / mean if mean else None
    if found.low is None:
        few = f"{len(both)} rounds of both, {ROUNDS_MIN} are needed"
        return Difference(base, other, metric.name, found, relative, "not shown", few)
    verdict: Verdict = "no difference shown"
    if found.excludes_zero:
        verdict = "better" if (found.mean > 0) == (metric.better == "higher") else "worse"
    return Difference(base, other, metric.name, found, relative, verdict)


def _unknown(base: str, other: str, metric: Metric, reason: str) -> Difference:
    return Difference(base, other, metric.name, None, None, "not shown", reason)


def _values(figures: dict[int, Figure], rounds: Sequence[int]) -> tuple[list[float], str]:
    """The values of these rounds, and why there is no mean of them ("" where there is). Leaving a
    round out because it has none would choose among them."""
    found = [figures[number] for number in rounds]
    values = [figure for figure in found if not isinstance(figure, str)]
    reasons = [figure for figure in found if isinstance(figure, str)]
    if not found:
        return [], "no whole round"
    if reasons:
        rest = f" (in {len(reasons)} of {len(found)} rounds)" if values else ""
        return values, reasons[0] + rest
    return values, ""
