"""A bench's findings in words and rows, for terminal, CSV and page alike. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from kvatlas.report.axes import number
from kvatlas.report.table import seconds, slo_text
from kvatlas.validate.bench.knee import Knee
from kvatlas.validate.bench.values import Outcome, Row
from kvatlas.validate.bench.verdicts import METRICS, Difference, Estimate, Findings

CSV_COLUMNS = (
    *("arm", "play", "index", "session", "due_s", "lag_s", "ttft_s", "tpot_s", "e2e_s"),
    *("output_tokens", "prompt_tokens", "cached_tokens", "worker", "error"),
)
_UNITS = {metric.name: metric.unit for metric in METRICS}


def value_text(metric: str, value: float) -> str:
    """A value of a metric with its unit."""
    unit = _UNITS[metric]
    if unit == "s":
        return f"-{seconds(-value)}" if value < 0 else seconds(value)
    return f"{value:.1%}" if unit == "share" else f"{number(value)}/s"


def estimate_text(estimate: Estimate) -> str:
    """Mean and interval, or that it is not shown."""
    found = estimate.interval
    if found is None:
        return "not shown"
    mean = value_text(estimate.metric, found.mean)
    if found.low is None or found.high is None:
        return mean
    ends = [value_text(estimate.metric, end) for end in (found.low, found.high)]
    return f"{mean} ({' to '.join(ends)})"


def difference_text(difference: Difference) -> str:
    """What the other arm has more or less, with the interval; "" where nothing is known."""
    found = difference.interval
    if found is None:
        return ""
    name = difference.metric
    relative = difference.relative
    # Of shares the difference is in points of a hundred; of the rest, a part of the base's mean.
    if _UNITS[name] == "share":
        parts = [f"{v * 100:+.1f}" for v in (found.mean, found.low, found.high) if v is not None]
        unit = " points"
    elif relative is None or not found.mean:
        parts = [value_text(name, v) for v in (found.mean, found.low, found.high) if v is not None]
        unit = ""
    else:
        per = relative / found.mean
        ends = [v for v in (found.low, found.high) if v is not None]
        parts = [f"{v * per:+.1%}" for v in (found.mean, *ends)]
        unit = ""
    return parts[0] + unit + (f" ({parts[1]} to {parts[2]})" if len(parts) == 3 else "")


def compared(outcome: Outcome, found: Findings) -> list[str]:
    """What can be said of each arm against the first, one sentence each."""
    lines = []
    base = outcome.arms[0].name
    for arm in outcome.arms[1:]:
        told = [d for d in found.differences if d.other == arm.name]
        for verdict in ("better", "worse"):
            named = [f"{d.metric} {difference_text(d)}" for d in told if d.verdict == verdict]
            if named:
                lines.append(f"{arm.name} is {verdict} than {base}: {'; '.join(named)}.")
        same = [d.metric for d in told if d.verdict == "no difference shown"]
        if same:
            lines.append(f"{arm.name} and {base}: no difference shown in {', '.join(same)}.")
        reasons: dict[str, list[str]] = {}
        for d in told:
            if d.verdict == "not shown":
                reasons.setdefault(d.reason, []).append(d.metric)
        lines += [
            f"{arm.name} against {base}, not shown: {', '.join(names)}: {reason}."
            for reason, names in reasons.items()
        ]
    return lines


def endings(outcome: Outcome) -> list[str]:
    """How searches, requests, arms and the bench itself ended, one sentence each."""
    lines = [knee_text(outcome, knee) for knee in outcome.knees]
    lines += _failures(outcome)
    lines += [f"{name} left the bench {why}." for name, why in outcome.left.items()]
    if outcome.interrupted:
        lines.append("The bench was interrupted: these are the rounds that were whole by then.")
    return lines


def _failures(outcome: Outcome) -> list[str]:
    """Per arm and kind how many requests of the rounds failed, and what the first one said."""
    counts: dict[tuple[str, str], int] = {}
    examples: dict[tuple[str, str], str] = {}
    for round in outcome.rounds:
        for kind, count in (round.load.errors if round.load else {}).items():
            key = (round.arm, kind)
            counts[key] = counts.get(key, 0) + count
            if round.load is not None:
                said = f"round {round.number + 1}, {round.load.error_examples[kind]}"
                examples.setdefault(key, said)
    return [
        f"{arm}: {count} × {kind}, the first in {examples[arm, kind]}"
        for (arm, kind), count in counts.items()
    ]


def knee_text(outcome: Outcome, knee: Knee) -> str:
    """The end of one search, in a sentence."""
    plan = outcome.plan.knee
    share = f"{plan.share:.0%} of requests within {slo_text(outcome.plan.load.slo)}" if plan else ""
    ends = {
        "holds everywhere": "that is every rate that was tried, so the knee is above it",
        "holds nowhere": "the knee is below every rate that was tried",
        "out of steps": "then the steps ran out, so the knee is between these rates",
        "stopped": f"there the search stopped: {knee.reason}",
        "found": f"that is the knee, to {plan.tolerance:.0%}" if plan else "",
    }
    held = f"holds {share} up to {number(knee.holds)}/s" if knee.holds else f"did not hold {share}"
    missed = f", misses at {number(knee.misses)}/s" if knee.misses else ""
    return f"{knee.arm} {held}{missed}; {ends[knee.ending]}."


def facts(outcome: Outcome) -> list[tuple[str, str]]:
    """How it was measured."""
    plan = outcome.plan
    at = datetime.fromtimestamp(outcome.started_unix_s, UTC)
    rate = f"{plan.rate:g} requests/s" if plan.rate else "as the trace's own"
    if not plan.rate and plan.load.time_scale != 1:
        rate += f", times by {plan.load.time_scale:g}"
    rows = [
        ("workload", f"{outcome.workload}, as {plan.form}, seed {plan.seed}"),
        ("rounds", f"{plan.rounds} of {plan.requests} requests, {plan.warm_up} to warm up before"),
        ("arrivals", rate + (", turns wait for answers" if plan.load.closed_loop else "")),
        ("output", f"at most {plan.load.max_output_tokens} tokens"),
        ("SLO", slo_text(plan.load.slo)),
        ("began", f"{at:%Y-%m-%d %H:%M} UTC, kvatlas {outcome.kvatlas}"),
    ]
    for arm in outcome.arms:
        end = outcome.endpoints.get(arm.name)
        told = f"{arm.target}, model {end.model}" if end else arm.target
        if end:
            told += "".join(f"; {url}: {what}" for url, what in end.engines.items())
        if arm.before:
            told += f"; before each play: {arm.before}"
        rows.append((f"arm {arm.name}", told))
    return rows


def rounds(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """One row per play: round, turn, arm, answered, failed, hit tokens, how caches were empty."""
    for round in outcome.rounds:
        latency = round.load.latency if round.load else None
        answered = f"{latency.requests - latency.failed}" if latency else "interrupted"
        failed = f"{latency.failed}" if latency else ""
        hits = round.hits
        known = hits.hit_tokens if hits.hit_tokens is not None else hits.local_tokens
        counted = f"{known:,} of {hits.prompt_tokens or 0:,}" if known is not None else "not shown"
        yield (
            *(str(round.number + 1), str(round.position + 1), round.arm, answered, failed),
            f"{counted}: {hits.reason}" if hits.reason else counted,
            f"{round.clean.how}: {round.clean.detail}",
        )


def csv_text(rows: Sequence[Row]) -> str:
    """One line per request, whatever became of it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        one, timing = row.record, row.record.timing
        times = (timing.ttft_s, timing.tpot_s, timing.e2e_s) if timing else (None, None, None)
        told = [one.due_s, one.lag_s, *times]
        writer.writerow(
            [
                *(row.arm, row.play, one.index, one.session),
                *("" if value is None else f"{value:.6f}" for value in told),
                timing.output_tokens if timing else "",
                *("" if v is None else v for v in (one.prompt_tokens, one.cached_tokens)),
                one.worker or "",
                one.error,
            ]
        )
    return out.getvalue()
