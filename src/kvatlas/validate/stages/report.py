"""A stage's result for people: text, Markdown and HTML that a team can sign."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvatlas.report import html
from kvatlas.report.text import harmless, one_line
from kvatlas.validate.stages.result import Result
from kvatlas.validate.stages.values import TITLES, Status, Verdict

_TONES: dict[Status, html.Tone] = {
    "pass": "good",
    "fail": "bad",
    "not shown": "warn",
    "not applicable": "plain",
}
_STYLES = {"pass": "green", "fail": "red", "not shown": "yellow", "not applicable": "dim"}
_SIGNED = ("operates the cluster", "checked the evidence", "accepts the next stage")
_DIGITS = 5


def title(result: Result) -> str:
    """Of its report."""
    change = f" ({result.change})" if result.change else ""
    return f"Stage {result.stage.upper()}, {TITLES[result.stage]}{change}: {result.cluster}"


def conclusion(result: Result) -> str:
    """In one sentence."""
    counts = ", ".join(f"{n} {name}" for name, n in result.counts().items() if n)
    if result.passed:
        return f"Passed: {counts}. The next stage may begin."
    return f"Not passed: {counts}. The next stage stops here."


def show(result: Result, console: Console) -> None:
    """For a terminal: a line per point, reasons below those that did not pass."""
    console.print(Text(one_line(title(result))))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for verdict in result.verdicts:
        status = Text(verdict.status, style=_STYLES[verdict.status])
        table.add_row(
            Text(verdict.point), status, Text(harmless(verdict.reason or _short(verdict.evidence)))
        )
    console.print(table)
    console.print(Text(f"{conclusion(result)} Evidence: sha256 {result.digest}"))


def markdown(result: Result) -> str:
    """The report to be signed."""
    lines = [
        f"# {one_line(title(result))}",
        "",
        f"**{conclusion(result)}**",
        "",
        *_facts(result),
        "",
    ]
    lines += ["| point | seed 000 | asked | verdict | reason |", "|---|---|---|---|---|"]
    for v in result.verdicts:
        cells = (f"`{v.point}`", v.seed, v.asks, f"**{v.status}**", v.reason)
        lines.append("| " + " | ".join(_cell(c) for c in cells) + " |")
    lines += ["", "## Evidence", ""]
    for v in result.verdicts:
        lines += [f"- `{v.point}`, {v.status}. Shown by: {v.shown}."]
        lines += [f"    - {name}: {_cell(_value(value))}" for name, value in v.evidence.items()]
    lines += ["", "## Signed", "", "| who | name | date |", "|---|---|---|"]
    lines += [f"| {role} | | |" for role in _SIGNED]
    lines += ["", f"Evidence: `sha256 {result.digest}` ({_file(result)})", ""]
    return _inert("\n".join(lines))


def page(result: Result) -> str:
    """The same as one HTML file."""
    counts = [
        html.Figure(name, str(count), tone=_TONES[name] if count else "plain")  # type: ignore[index]
        for name, count in result.counts().items()
    ]
    rows: list[list[html.Part]] = [
        [v.point, v.seed, v.asks, html.badge(v.status, _TONES[v.status]), v.reason]
        for v in result.verdicts
    ]
    evidence = [_evidence(v) for v in result.verdicts]
    signed: list[list[html.Part]] = [[role, "", ""] for role in _SIGNED]
    sections = [
        html.section("Verdict", conclusion(result), html.figures(counts)),
        html.section("Run", html.bullets(_facts(result, bullet=""))),
        html.section(
            "Points",
            html.table(["point", "seed 000", "asked", "verdict", "reason"], rows),
        ),
        html.section("Evidence", *evidence),
        html.section(
            "Signed",
            html.table(["who", "name", "date"], signed),
            f"Evidence: sha256 {result.digest} ({_file(result)})",
        ),
    ]
    return html.page(title(result), sections, subtitle=f"{result.began}, kvatlas {result.kvatlas}")


def _evidence(verdict: Verdict) -> html.Markup:
    text = "\n".join(f"{name}: {_value(v)}" for name, v in verdict.evidence.items())
    return html.details(
        f"{verdict.point}: {verdict.status}",
        f"Shown by: {verdict.shown}.",
        html.code(text or verdict.reason or "none"),
    )


def _facts(result: Result, bullet: str = "- ") -> list[str]:
    lines = [f"begun {result.began}, took {result.took_s:g} s, kvatlas {result.kvatlas}"]
    if result.previous:
        lines.append(
            f"builds on stage {result.previous.stage.upper()}, sha256 {result.previous.digest}"
        )
    for name, value in result.declared.items():
        lines.append(f"declared by the operator, not checked: {name} = {value}")
    lines += [
        f"not applicable: {v.point}: {v.reason}"
        for v in result.verdicts
        if v.status == "not applicable"
    ]
    load = result.figures.load
    if load is not None:
        ttft, tpot = load.ttft_s.p50, load.tpot_s.p50
        lines.append(
            f"load of {load.requests} prompts that nobody had: TTFT p50 {_value(ttft)} s, TPOT p50"
            f" {_value(tpot)} s, {_value(load.output_tokens_per_s)} output tokens/s"
        )
    if result.figures.hit_share is not None:
        lines.append(f"prompt tokens found when prompts came again: {result.figures.hit_share:.1%}")
    return [bullet + one_line(line) for line in lines]


def _file(result: Result) -> str:
    return f"stage-{result.stage}{f'-{result.change}' if result.change else ''}.json"


def _short(evidence: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(v)}" for name, v in list(evidence.items())[:4])


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    if isinstance(value, str | int) or value is None:
        return str(value)
    return msgspec.json.encode(value).decode()


def _cell(text: str) -> str:
    return one_line(text).replace("|", "\\|")


def _inert(text: str) -> str:
    """Markdown with what others wrote in it: no tag, link or image of theirs."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("](", "]\\(")
