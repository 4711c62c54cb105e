"""A bench's report as a page. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.report.axes import Axis, number
from kvatlas.report.html import Figure, Markup, Tone, badge, bullets, figures, page, section, table
from kvatlas.report.plots import Bars, Line, Mark, bar_plot, distribution_plot, line_plot
from kvatlas.report.table import seconds
from kvatlas.service.load import Record
from kvatlas.validate.bench import words
from kvatlas.validate.bench.knee import Knee
from kvatlas.validate.bench.values import Outcome, Row
from kvatlas.validate.bench.verdicts import METRICS, Difference, Findings, Verdict

_TONES: dict[Verdict, Tone] = {
    "better": "good",
    "worse": "bad",
    "no difference shown": "plain",
    "not shown": "warn",
}
_INTERVALS = (
    "In brackets: what holds the true mean over rounds with 95 % (bootstrap over rounds, at "
    "least as wide as Student's). Requests that failed count as endlessly late."
)


def html(outcome: Outcome, found: Findings, rows: Sequence[Row]) -> str:
    """The whole file."""
    names = " against ".join(arm.name for arm in outcome.arms)
    sections = [_result(outcome, found), _estimates(outcome, found)]
    if len(outcome.arms) > 1:
        sections.append(_differences(outcome, found))
    sections.append(_distributions(outcome, rows))
    if outcome.knees:
        sections.append(_knees(outcome))
    sections += [_plays(outcome), _method(outcome)]
    subtitle = dict(words.facts(outcome))["began"]
    return page(f"Bench of {outcome.workload}: {names}", sections, subtitle=subtitle)


def _result(outcome: Outcome, found: Findings) -> Markup:
    whole = [r.load.latency for r in outcome.rounds if r.load is not None]
    asked, failed = sum(r.requests for r in whole), sum(r.failed for r in whole)
    tiles = [
        Figure(
            "requests answered",
            f"{asked - failed:,}",
            f"of {asked:,}, in {len(whole)} plays",
            "bad" if failed else "plain",
        )
    ]
    for arm in outcome.arms:
        estimate = found.estimate(arm.name, "TTFT p50")
        told = words.estimate_text(estimate)
        value, _, ends = told.partition(" (")
        tiles.append(Figure(f"TTFT p50, {arm.name}", value, ends.rstrip(")") or estimate.reason))
    state = badge("complete", "good") if outcome.sound else badge("not complete", "bad")
    return section(
        "Result",
        state,
        figures(tiles),
        bullets([*words.compared(outcome, found), *words.endings(outcome)]),
    )


def _estimates(outcome: Outcome, found: Findings) -> Markup:
    names = [arm.name for arm in outcome.arms]
    cells = []
    reasons: dict[str, None] = {}
    for metric in METRICS:
        row = [metric.name]
        for name in names:
            estimate = found.estimate(name, metric.name)
            row.append(words.estimate_text(estimate))
            if estimate.reason:
                reasons[f"{name}, {metric.name}: {estimate.reason}."] = None
        cells.append(row)
    parts: list[Markup] = [table(["mean over rounds", *names], cells, caption=_INTERVALS)]
    parts += [_bars(found, names, kind) for kind in ("TTFT", "TPOT", "E2E")]
    return section("Figures", *parts, bullets(list(reasons)))


def _bars(found: Findings, names: Sequence[str], kind: str) -> Markup:
    groups = [m.name for m in METRICS if m.name.startswith(kind)]
    told = {name: [found.estimate(name, g).interval for g in groups] for name in names}
    most_s = max([i.mean for each in told.values() for i in each if i], default=0.0)
    unit, per_s = ("s", 1.0) if most_s >= 1 else ("ms", 1e3)
    bars = []
    for name, each in told.items():
        spans = [
            (i.low * per_s, i.high * per_s)
            if i and i.low is not None and i.high is not None
            else None
            for i in each
        ]
        bars.append(Bars(name, [i.mean * per_s if i else None for i in each], spans))
    return bar_plot(kind, groups, bars, Axis(kind, unit))


def _differences(outcome: Outcome, found: Findings) -> Markup:
    rows = [
        [
            difference.metric,
            f"{difference.other} against {difference.base}",
            badge(difference.verdict, _TONES[difference.verdict]),
            words.difference_text(difference) or "–",
            difference.reason,
        ]
        for difference in found.differences
    ]
    chance = _by_chance(found.differences)
    return section(
        "Differences",
        table(["metric", "arms", "verdict", "difference", "why not"], rows, caption=chance),
    )


def _by_chance(differences: Sequence[Difference]) -> str:
    looked = sum(d.verdict != "not shown" for d in differences)
    return (
        "Rounds are compared pair by pair: same number, same requests. A difference is called "
        f"where its 95 % interval excludes zero; of {looked} such intervals, about "
        f"{number(looked / 20)} would do so by chance alone."
    )


def _distributions(outcome: Outcome, rows: Sequence[Row]) -> Markup:
    whole = {(r.arm, f"round {r.number + 1}") for r in outcome.rounds if r.whole}
    by_arm: dict[str, list[Record]] = {arm.name: [] for arm in outcome.arms}
    for row in rows:
        if (row.arm, row.play) in whole and row.record.timing is not None:
            by_arm[row.arm].append(row.record)
    note = "Answered requests of all whole rounds."
    plots = []
    for kind in ("TTFT", "E2E"):
        samples = []
        for name, records in by_arm.items():
            timings = [r.timing for r in records if r.timing is not None]
            values = [t.ttft_s if kind == "TTFT" else t.e2e_s for t in timings]
            samples.append((name, [v for v in values if v is not None]))
        plots.append(distribution_plot(kind, samples, Axis(kind, "s", log=True), note=note))
    return section("Distributions", *plots)


def _knees(outcome: Outcome) -> Markup:
    plan = outcome.plan.knee
    assert plan is not None
    lines = []
    for knee in outcome.knees:
        steps = sorted(knee.steps, key=lambda step: step.rate)
        lines.append(
            Line(
                knee.arm,
                [(s.rate, s.attained * 100) for s in steps],
                [(s.rate, s.low * 100) for s in steps],
                [(s.rate, s.high * 100) for s in steps],
                dots=True,
            )
        )
    marks = [Mark(f"wanted: {plan.share:.0%}", plan.share * 100, "y")]
    marks += [
        Mark(f"knee of {k.arm}" if k.ending == "found" else f"{k.arm} held", k.holds, "x")
        for k in outcome.knees
        if k.holds
    ]
    plot = line_plot(
        "Requests within the SLO",
        lines,
        Axis("rate of arrivals", "requests/s", log=True),
        Axis("within the SLO", "%", low=0, high=100),
        marks=marks,
        note="Bands: 95 % by Wilson's score, were requests independent. One play per rate.",
    )
    said = bullets([words.knee_text(outcome, knee) for knee in outcome.knees])
    heads = ["arm", "rate", "within SLO", "held", "goodput", "TTFT p95", "failed", "requests"]
    return section("Knee", said, plot, table(heads, _steps(outcome.knees), numbers_from=4))


def _steps(knees: Sequence[Knee]) -> list[list[str | Markup]]:
    return [
        [
            knee.arm,
            f"{number(s.rate)}/s",
            f"{s.attained:.1%} ({s.low:.1%} to {s.high:.1%})",
            badge("yes", "good") if s.held else badge("no", "bad"),
            f"{number(s.goodput_per_s)}/s",
            seconds(s.ttft_p95_s),
            str(s.failed),
            str(s.requests),
        ]
        for knee in knees
        for s in knee.steps
    ]


def _plays(outcome: Outcome) -> Markup:
    heads = ["round", "turn", "arm", "answered", "failed", "hit tokens", "empty caches"]
    return section("Plays", table(heads, [list(row) for row in words.rounds(outcome)]))


def _method(outcome: Outcome) -> Markup:
    rows = [list(fact) for fact in words.facts(outcome)]
    return section("How it was measured", table(["what", "how"], rows), bullets(outcome.notes))
