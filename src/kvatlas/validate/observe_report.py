"""The report of `kvatlas observe` for people: rows for a terminal, one page of HTML."""

from __future__ import annotations

from kvatlas.report import html
from kvatlas.report.axes import Axis
from kvatlas.report.money import dollars_text
from kvatlas.report.plots import Bars, bar_plot
from kvatlas.report.table import seconds
from kvatlas.validate.calibrate import Error
from kvatlas.validate.observe import Line, LiveView, ObserveReport

COLUMNS = ("", "measured", "model of it", "its error", "kvatlas, modelled", "saved", "verdict")


def value_text(line: Line, value: float | None) -> str:
    """One value in the line's unit; a dash where there is none."""
    if value is None:
        return "–"
    if line.unit == "$":
        return dollars_text(value)
    if line.unit == "s":
        return seconds(value)
    return f"{value:,.1f} {line.unit}"


def saved_text(line: Line) -> str:
    """The difference of the two models with its spread; empty where it is not shown."""
    if not line.shown or line.saved is None or line.gain is None:
        return ""
    saved, gain = line.saved, line.gain
    sign = "-" if saved.value < 0 else ""
    amount = value_text(line, abs(saved.value))
    return f"{sign}{amount} ({share_text(gain)})"


def share_text(error: Error | None) -> str:
    """A share with its spread."""
    if error is None:
        return "–"
    return f"{error.value:+.1%}, {error.low:+.1%} … {error.high:+.1%}"


def verdict_text(line: Line) -> str:
    """In words, with the reason where nothing is shown."""
    if not line.shown:
        return f"not shown: {line.reason}"
    return "gain" if line.gain is not None and line.gain.value > 0 else "LOSS"


def cells(line: Line) -> tuple[str, ...]:
    """A row under `COLUMNS`."""
    return (
        line.name,
        value_text(line, line.measured),
        value_text(line, line.modelled),
        share_text(line.error),
        value_text(line, line.kvatlas),
        saved_text(line),
        verdict_text(line),
    )


def facts(report: ObserveReport) -> list[tuple[str, str]]:
    """What the figures rest on."""
    about, bounds = report.about, report.bounds
    rows = [
        ("recording", f"{report.recording}, {about.mode}, begun {about.started}"),
        ("requests", f"{report.requests:,} recorded, {_counts(report.lost) or 'none'} lost"),
        (
            "judged",
            f"{report.judged:,} requests in {report.judged_s:,.0f} s, behind {report.fitted:,} that"
            " the engines' pace was fitted to",
        ),
        (
            "routing",
            f"the model of reality goes by {report.routing}"
            if report.routing
            else "it is not known who served what, and no rule is named: reality is not modelled",
        ),
        (
            "shown if",
            f"the model misses the measured by at most {bounds.error_max:.0%}, and the gain is "
            "larger than that error",
        ),
        ("price", f"${report.price.dollars_per_gpu_hour:g} per GPU hour ({report.price.source})"),
    ]
    if about.ttft:
        rows.append(("TTFT", about.ttft))
    if report.unkeyed:
        rows.append(("not keyed", f"{_counts(report.unkeyed)}: counted as sharing nothing"))
    if report.pace:
        factors = {k: v for k, v in report.pace.items() if k != "outside_s"}
        text = ", ".join(f"{name} × {factor:.2f}" for name, factor in factors.items())
        rows.append(("fitted", f"{text}, {seconds(report.pace['outside_s'])} outside the engines"))
    rows += _rates(report)
    return rows


def live_rows(live: LiveView) -> list[tuple[str, str]]:
    """What was seen of the engines' real state; no model in it."""
    if not live.shown:
        return [("real state", f"not shown: {live.reason}")]
    rows = [
        ("decisions", f"{live.decisions:,} in the state that the engines really had"),
        (
            "missed hits",
            f"{live.missed_tokens:,} of {live.prompt_tokens:,} prompt tokens "
            f"({live.missed_tokens / live.prompt_tokens:.1%}) were computed though another engine "
            f"could have resumed them; {live.cached_tokens / live.prompt_tokens:.1%} were cached",
        ),
    ]
    same = live.same_engine / live.told
    rows.append(("same engine", f"{same:.0%} of {live.told:,} whose engine is known"))
    if live.error_p50 is not None:
        rows.append(("prediction", f"first tokens foretold within {live.error_p50:.0%} (median)"))
    return rows


def page(report: ObserveReport) -> str:
    """One HTML file."""
    table = html.table(COLUMNS, [cells(line) for line in report.lines], numbers_from=1)
    parts: list[html.Part] = [table]
    shown = [line for line in report.lines if line.shown and line.gain is not None]
    if shown:
        spans = [(line.gain.low * 100, line.gain.high * 100) for line in shown if line.gain]
        bars = Bars("saved", [line.gain.value * 100 for line in shown if line.gain], spans)
        parts.append(
            bar_plot(
                "What kvatlas would have saved",
                [line.name for line in shown],
                [bars],
                Axis("saved", "%"),
                note="Of the modelled reality; whiskers from 5 to 95 % of resampled requests.",
            )
        )
    return html.page(
        "What kvatlas would have gained",
        [
            html.section("Verdict", *parts),
            html.section(
                "On the engines' real state", html.table(("", ""), live_rows(report.live))
            ),
            html.section("What it rests on", html.table(("", ""), facts(report))),
        ],
        subtitle=f"{report.recording}, kvatlas {report.about.version}",
    )


def _rates(report: ObserveReport) -> list[tuple[str, str]]:
    """What is shown to be saved, by the hour of such traffic."""
    if report.judged_s <= 0:
        return []
    found = []
    for line in report.lines:
        if line.shown and line.saved is not None and line.unit != "s":
            hourly = line.saved.value * 3600 / report.judged_s
            text = f"{'-' if hourly < 0 else ''}{value_text(line, abs(hourly))}"
            found.append((f"{line.name}, an hour", f"{text} of {report.devices} GPUs' time"))
    return found


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} × {reason}" for reason, count in sorted(counts.items()))
