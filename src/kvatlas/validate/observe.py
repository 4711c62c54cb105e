"""What kvatlas would have gained on observed traffic, as far as that can be shown.

Four things stand beside each other: what was measured; the model of what was real, with its error
against that; the model of kvatlas; and the difference of the two models, with its spread. A gain
is shown only where the model of reality is near enough to the measured, and the gain is larger than
its error. Everything else is "not shown", with the reason.

The first half of a recording fits the engines' pace (its first tenth only fills the caches), the
second half is judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean, median

import msgspec

from kvatlas.core.router import Policy
from kvatlas.errors import ConfigError
from kvatlas.report.latency import percentile
from kvatlas.report.money import Price
from kvatlas.service.observe_record import About, Recorded, Row
from kvatlas.sim.cluster import Cluster
from kvatlas.sim.flights import Outcome
from kvatlas.validate.calibrate import RESAMPLES, Error
from kvatlas.validate.observe_model import (
    FIT_MAX,
    at_pace,
    calibrated,
    measured,
    placed,
    play,
    trace_of,
)
from kvatlas.workload.step_time import StepTime

_WARM_UP = 0.1  # of the recording: caches fill
_FITTED = 0.5
_BLOCKS = 50  # runs of requests that are resampled as wholes: neighbours wait for each other


class Bounds(msgspec.Struct, frozen=True):
    """When nothing is shown. ``error_max``: of the model against the measured, as a share.
    ``requests_min``: measured requests in the judged half. ``lost_max``: share of requests that
    are not in the recording. ``placed_min``: share of requests of which it is known who served
    them. ``live_min``: decisions on the real state."""

    error_max: float = 0.2
    requests_min: int = 100
    lost_max: float = 0.02
    placed_min: float = 0.95
    live_min: int = 30


class Line(msgspec.Struct, frozen=True):
    """One figure. ``measured`` stands also where nothing is modelled. ``error``: the model of
    reality over the measured, less 1. ``gain``: 1 less kvatlas over reality, both modelled;
    ``saved``: the same difference in ``unit``. All with their spread from 5 to 95 %. ``reason``:
    why it is not shown."""

    name: str
    unit: str
    measured: float | None = None
    modelled: float | None = None
    kvatlas: float | None = None
    error: Error | None = None
    gain: Error | None = None
    saved: Error | None = None
    shown: bool = False
    reason: str = ""


class LiveView(msgspec.Struct, frozen=True):
    """What the production core said of the state that the engines really had: no model in it.

    All of requests of which it is known who served them. ``missed_tokens``: prompt tokens that
    another engine could have resumed and that were computed;
    ``error_p50``: of predicted times to first token on the engine that did serve the request.
    """

    decisions: int
    told: int
    same_engine: int
    prompt_tokens: int
    cached_tokens: int
    missed_tokens: int
    error_p50: float | None
    shown: bool
    reason: str = ""


class ObserveReport(msgspec.Struct, frozen=True):
    """Everything. ``pace``: what was fitted; ``routing``: what the model of reality goes by, ""
    where it has nothing to go by."""

    recording: str
    about: About
    requests: int
    lost: dict[str, int]
    unkeyed: dict[str, int]
    fitted: int
    judged: int
    judged_s: float
    devices: int
    routing: str
    pace: dict[str, float]
    bounds: Bounds
    price: Price
    lines: tuple[Line, ...]
    live: LiveView

    @property
    def shown(self) -> bool:
        """Whether any gain is shown."""
        return any(line.shown for line in self.lines)


class _Judged(msgspec.Struct, frozen=True):
    """One request of the judged half. Times in s; GPU-seconds of its prefill; -1: not known."""

    ttft_s: float
    real_s: float
    ours_s: float
    gpu_s: float
    real_gpu_s: float
    ours_gpu_s: float


class _Runs(msgspec.Struct, frozen=True):
    """Both models, request by request, and what both lack."""

    real: dict[int, Outcome]
    ours: dict[int, Outcome]
    outside_s: float


def judge(
    name: str,
    recorded: Recorded,
    cluster: Cluster,
    price: Price,
    *,
    rule: Policy | None = None,
    bounds: Bounds = Bounds(),  # noqa: B008 - frozen
    seed: int = 0,
    status: Callable[[str], None] = lambda text: None,
) -> ObserveReport:
    """The report on a recording. ``cluster``: the engines behind the router; ``rule``: how that
    router chooses, where the recording does not tell who served what; ``status`` hears what is
    going on. Raises ConfigError for a cluster that does not fit or cannot be judged."""
    if any(member.role != "combined" for member in cluster.members):
        raise ConfigError("the cluster splits requests over pairs: that is not judged here")
    rows = recorded.rows
    engines, share = placed(rows, cluster)
    by_rule = share < bounds.placed_min
    policy: Policy = (rule if by_rule else None) or "least_load"
    why = _unfit(recorded, bounds, share, rule)
    start = int(len(rows) * _FITTED)
    fitted = min(start, FIT_MAX)
    pace: dict[str, float] = {}
    judged: list[_Judged] = []
    if not why:
        trace = trace_of(name, rows, recorded.about.block_tokens)

        def real(cluster: Cluster, limit: int | None) -> dict[int, Outcome]:
            where = None if by_rule else engines
            return play(cluster, trace, policy=policy, engines=where, limit=limit, seed=seed)

        status("the engines' pace is being fitted")
        pace = calibrated(cluster, trace, rows[:fitted], int(len(rows) * _WARM_UP), real)
        modelled = at_pace(cluster, pace)
        status("what was real is being modelled")
        as_was = real(modelled, None)
        status("kvatlas is being modelled")
        ours = play(modelled, trace, policy="price", seed=seed)
        runs = _Runs(as_was, ours, pace["outside_s"])
        judged = _judged(rows, start, modelled, runs)
        why = _failed(rows, start, runs)
    return ObserveReport(
        recording=name,
        about=recorded.about,
        requests=len(rows),
        lost=recorded.lost,
        unkeyed=_unkeyed(rows),
        fitted=fitted,
        judged=len(rows) - start,
        judged_s=(rows[-1].timestamp - rows[start].timestamp) / 1000,
        devices=cluster.devices(),
        routing=_routing(rule) if by_rule else "who served what",
        pace=pace,
        bounds=bounds,
        price=price,
        lines=_lines(judged, _times_s(rows[start:]), price, _Terms(bounds, why, seed)),
        live=_live(rows, bounds),
    )


# Whether anything can be shown -------------------------------------------------------------------


def _unfit(recorded: Recorded, bounds: Bounds, share: float, rule: Policy | None) -> str:
    """Why the recording shows nothing, whatever the model says."""
    rows = recorded.rows
    seen = [row for row in rows[int(len(rows) * _FITTED) :] if measured(row)]
    if not any(measured(row) for row in rows):
        return "no time to first token was measured: mirrors and most logs do not tell it"
    if len(seen) < bounds.requests_min:
        return f"{len(seen)} measured requests to judge by, at least {bounds.requests_min}"
    lost = sum(n for reason, n in recorded.lost.items() if reason in _LOAD or _LINE in reason)
    if lost > bounds.lost_max * (lost + len(rows)):
        return (
            f"{lost} requests of {lost + len(rows)} could not be recorded, so the load is not known"
        )
    if share < bounds.placed_min and rule is None:
        return (
            f"which engine served it is known of {share:.0%} of the requests: record with "
            "--served-by or the engines' events, or name the router's rule (--rule)"
        )
    return ""


_LINE = "line: "  # of a log that could not be read

#: Requests that took engines' time and are in no line. Pieces are more than their requests.
_LOAD = frozenset(
    {
        "copy dropped",
        "pieces not copied",
        "too many at once",
        "not HTTP",
        "upgraded",
        "body too large",
        "answer too large",
        "a fault of ours",
        "empty prompt",
        "no_tokenizer",
        "no_template",
    }
)


def _failed(rows: Sequence[Row], start: int, runs: _Runs) -> str:
    for which, found in (("reality", runs.real), ("kvatlas", runs.ours)):
        faults = [o.fault for i in range(start, len(rows)) if (o := found[i]).fault]
        if len(faults) * 100 > len(rows) - start:
            return f"in the model of {which} {len(faults)} requests fail: {faults[0]}"
    return ""


def _routing(rule: Policy | None) -> str:
    return f"the rule {rule}, as the operator says" if rule is not None else ""


def _unkeyed(rows: Sequence[Row]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        if row.observed.unkeyed:
            found[row.observed.unkeyed] = found.get(row.observed.unkeyed, 0) + 1
    return found


# The figures -------------------------------------------------------------------------------------


def _judged(
    rows: Sequence[Row],
    start: int,
    cluster: Cluster,
    runs: _Runs,
) -> list[_Judged]:
    outside_s = runs.outside_s
    members = {m.name: (StepTime(m.spec, m.layout), m.spec.devices) for m in cluster.members}
    any_ = next(iter(members.values()))

    def spent(engine: str, cached: int, prompt: int) -> float:
        time, devices = members.get(engine, any_)
        return time.seconds([(min(cached, prompt - 1), prompt)]) * devices

    found = []
    for index in range(start, len(rows)):
        row, one, other = rows[index], runs.real[index], runs.ours[index]
        if one.fault or other.fault:
            continue
        prompt, cached = row.input_length, row.observed.cached_tokens
        found.append(
            _Judged(
                ttft_s=row.observed.ttft_s if measured(row) else -1.0,
                real_s=one.ttft_s + outside_s,
                ours_s=other.ttft_s + outside_s,
                gpu_s=spent(one.tried[-1], cached, prompt) if cached >= 0 else -1.0,
                real_gpu_s=spent(one.tried[-1], one.cached_tokens, prompt),
                ours_gpu_s=spent(other.tried[-1], other.cached_tokens, prompt),
            )
        )
    return found


def _times_s(rows: Sequence[Row]) -> list[float]:
    return [row.observed.ttft_s for row in rows if measured(row)]


_Triple = tuple[float, float, float]  # measured, modelled reality, modelled kvatlas
Statistic = Callable[[Sequence[float]], float]


class _Terms(msgspec.Struct, frozen=True):
    """``why``: nothing is shown, whatever the figures are."""

    bounds: Bounds
    why: str
    seed: int


def _p95(values: Sequence[float]) -> float:
    return percentile(sorted(values), 95)


def _lines(
    judged: Sequence[_Judged], times_s: Sequence[float], price: Price, terms: _Terms
) -> tuple[Line, ...]:
    """``times_s``: all that were measured, modelled or not."""
    bounds, why = terms.bounds, terms.why
    timed = [(j.ttft_s, j.real_s, j.ours_s) for j in judged if j.ttft_s > 0]
    found = [
        _line(f"TTFT, {name}", "s", timed, statistic, terms, alone=times_s)
        for name, statistic in (("mean", fmean), ("median", median), ("p95", _p95))
    ]
    told = [(j.gpu_s, j.real_gpu_s, j.ours_gpu_s) for j in judged if j.gpu_s >= 0]
    if not why and len(told) < max(bounds.requests_min, len(judged) // 2):
        why = (
            "too few answers tell how many tokens were cached (usage.prompt_tokens_details), so "
            "what was computed is not known"
        )
    found = _together(found, bounds)
    terms = msgspec.structs.replace(terms, why=why)
    spent = _line("prefill, GPU-seconds", "GPU-s", told, math.fsum, terms)
    return (*found, spent, _dollars(spent, price))


def _together(lines: Sequence[Line], bounds: Bounds) -> list[Line]:
    """Of times to first token: where the model misses their mean or median, it may meet another
    figure by chance, and none is shown."""
    for line in lines[:2]:
        if line.error is not None and abs(line.error.value) > bounds.error_max:
            why = f"the model of reality misses the {line.name.partition(', ')[2]} by "
            why += f"{line.error.value:+.0%}, more than {bounds.error_max:.0%}"
            return [
                msgspec.structs.replace(each, shown=False, reason=each.reason or why)
                for each in lines
            ]
    return list(lines)


def _line(
    name: str,
    unit: str,
    triples: Sequence[_Triple],
    statistic: Statistic,
    terms: _Terms,
    *,
    alone: Sequence[float] = (),
) -> Line:
    """``triples`` are in order of arrival; ``alone``: what was measured, for where they do not
    count."""
    if terms.why or not triples:
        seen = statistic(alone) if alone else None
        return Line(name, unit, seen, reason=terms.why or "nothing to judge by")

    def at(sample: Sequence[_Triple]) -> _Triple:
        one, other, third = (statistic(values) for values in zip(*sample, strict=True))
        return one, other, third

    def figures(sample: Sequence[_Triple]) -> _Triple:
        told, real, ours = at(sample)
        return real / told - 1, 1 - ours / real, real - ours

    told, real, ours = at(triples)
    if min(told, real) <= 0:
        return Line(name, unit, told, real, ours, reason="nothing was spent on it")
    error, gain, saved = (
        _spread(value, [drawn[which] for drawn in _resampled(triples, figures, terms.seed)])
        for which, value in enumerate(figures(triples))
    )
    reason = _verdict(error, gain, terms.bounds)
    return Line(name, unit, told, real, ours, error, gain, saved, not reason, reason)


def _verdict(error: Error, gain: Error, bounds: Bounds) -> str:
    """Why the gain is not shown; "" where it is, be it a loss."""
    if max(abs(error.low), abs(error.high)) > bounds.error_max:
        return (
            f"the model of reality may miss the measured by {error.low:+.0%} to {error.high:+.0%}, "
            f"more than {bounds.error_max:.0%}"
        )
    if gain.low <= 0 <= gain.high:
        return f"from {gain.low:+.0%} to {gain.high:+.0%}: may as well be nothing"
    if min(abs(gain.low), abs(gain.high)) <= abs(error.value):
        return f"the gain is not larger than the model's error of {error.value:+.0%}"
    return ""


def _resampled(
    triples: Sequence[_Triple],
    figures: Callable[[Sequence[_Triple]], _Triple],
    seed: int,
) -> list[_Triple]:
    size = -(-len(triples) // _BLOCKS)
    blocks = [triples[i : i + size] for i in range(0, len(triples), size)]
    random = Random(seed)
    return [
        figures([triple for block in random.choices(blocks, k=len(blocks)) for triple in block])
        for _ in range(RESAMPLES)
    ]


def _spread(value: float, seen: Sequence[float]) -> Error:
    ordered = sorted(seen)
    return Error(value, ordered[len(ordered) // 20], ordered[len(ordered) - 1 - len(ordered) // 20])


def _dollars(spent: Line, price: Price) -> Line:
    """The GPU-seconds as money; shown where they are."""

    def paid(value: float | None) -> float | None:
        return None if value is None else price.dollars(value)

    saved = spent.saved
    return msgspec.structs.replace(
        spent,
        name="prefill, dollars",
        unit="$",
        measured=paid(spent.measured),
        modelled=paid(spent.modelled),
        kvatlas=paid(spent.kvatlas),
        saved=None
        if saved is None
        else Error(price.dollars(saved.value), price.dollars(saved.low), price.dollars(saved.high)),
    )


def _live(rows: Sequence[Row], bounds: Bounds) -> LiveView:
    decided = [row for row in rows if row.observed.decided is not None]
    told = same = prompt = cached = missed = 0
    errors: list[float] = []
    for row in decided:
        seen, what = row.observed, row.observed.decided
        assert what is not None
        if not seen.engine:
            continue
        told += 1
        same += seen.engine == what.engine
        if seen.cached_tokens >= 0:
            prompt += row.input_length
            cached += seen.cached_tokens
            missed += max(0, what.elsewhere_tokens - seen.cached_tokens)
        if what.there_ttft_s >= 0 and measured(row):
            errors.append(abs(what.there_ttft_s - seen.ttft_s) / seen.ttft_s)
    reason = ""
    if not decided:
        reason = "no engine was listened to (--config), or none announced anything"
    elif len(decided) < bounds.live_min:
        reason = f"{len(decided)} decisions, at least {bounds.live_min} are needed"
    elif told < bounds.live_min:
        reason = f"it is known of {told} of {len(decided)} decided requests who served them"
    elif not prompt:
        reason = "no answer tells how many tokens were cached"
    return LiveView(
        decisions=len(decided),
        told=told,
        same_engine=same,
        prompt_tokens=prompt,
        cached_tokens=cached,
        missed_tokens=missed,
        error_p50=median(errors) if len(errors) >= bounds.live_min else None,
        shown=not reason,
        reason=reason,
    )
