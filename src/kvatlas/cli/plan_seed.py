"""``kvatlas plan --seed-case``: chapter 8 of seed document 003, and what of it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kvatlas import __version__
from kvatlas.cli.output import csv_bytes, json_bytes, table_console, write_files
from kvatlas.report.html import Part, Tone, badge, section
from kvatlas.report.html import page as html_page
from kvatlas.report.html import table as html_table
from kvatlas.report.money import STORAGE
from kvatlas.validate.seed_case import REACHED, V4_SLOWER, Line, lines
from kvatlas.validate.seed_verdicts import (
    Conclusion,
    Decision,
    Delta,
    Verdict,
    by_verdict,
    conclusions,
    decisions,
    delta,
)
from kvatlas.workload.seed_003 import shown

_TONES: dict[Verdict, Tone] = {"stands": "good", "only if": "warn", "does not stand": "bad"}
_ABOUT = "Seed document 003, chapter 8: 8 × H100 run DeepSeek V4 Flash for 100 requests."
_HEADS = {
    "lines": ["where", "figure", "document", "by its own inputs", "computed", "from", "to"],
    "conclusions": ["where", "conclusion", "verdict", "document", "computed", "if, or why"],
    "decisions": ["decision", "document", "by the numbers", "because"],
    "delta": ["delta coding", "document", "ours", ""],
}


class SeedCase(msgspec.Struct, frozen=True):
    """The whole result, as JSON too."""

    version: str
    about: str
    assumed: list[str]
    verdicts: dict[Verdict, int]
    lines: list[Line]
    conclusions: list[Conclusion]
    decisions: list[Decision]
    delta: list[Delta]


def run_seed_case(json: Path | None, csv_file: Path | None, html: Path | None) -> int:
    """Shows it, and writes the files that are wanted."""
    result = seed_case()
    try:
        write_files(
            ("--json", json, lambda: json_bytes(result)),
            ("--csv", csv_file, lambda: csv_bytes(figures(result))),
            ("--html", html, lambda: page(result).encode()),
        )
    finally:
        show(result, table_console(150))
    return 0


def seed_case() -> SeedCase:
    """All of it."""
    found = conclusions()
    return SeedCase(
        __version__,
        _ABOUT,
        _assumed(),
        by_verdict(found),
        list(lines()),
        found,
        decisions(),
        delta(),
    )


def _assumed() -> list[str]:
    typical, low, high = REACHED["typical"], REACHED["low"], REACHED["high"]
    return [
        f"computed at {typical[0]:.0%} of FLOP/s and {typical[1]:.0%} of bandwidth; from and to: "
        f"at {low[0]:.0%} and {low[1]:.0%}, {high[0]:.0%} and {high[1]:.0%}, the ends of what "
        "calibration fitted (docs/calibration.md)",
        "the time model is not calibrated for V4: published runs took "
        f"{V4_SLOWER[0]:.1f} to {V4_SLOWER[1]:.1f} times as long per token",
        "$12 per GPU and hour: the document's own",
        *(f"{name}: ${STORAGE[name].dollars_per_gb_month:g} per GB and month "
          f"({STORAGE[name].source})" for name in ("dram", "disk")),
        "* its table is lost in the text: rebuilt from what stands around it",
    ]  # fmt: skip


def show(result: SeedCase, console: Console) -> None:
    """For people: the verdicts first."""
    console.print(result.about, markup=False)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in result.verdicts.items())
    console.print(f"Conclusions: {counts}.", markup=False)
    for name in ("conclusions", "lines", "decisions", "delta"):
        made = Table(title_justify="left")
        right = _right(name)
        for index, head in enumerate(_HEADS[name]):
            made.add_column(head, justify="right" if index in right else "left")
        for row in _rows(result)[name]:
            made.add_row(*row)
        console.print(made)
    for note in _notes(result.lines):
        console.print(note, markup=False)
    for line in result.assumed:
        console.print(f"assumed: {line}" if not line.startswith("*") else line, markup=False)


def _right(name: str) -> Sequence[int]:
    return {"lines": range(2, 7), "conclusions": (3, 4), "delta": (1, 2)}.get(name, ())


def _rows(result: SeedCase) -> dict[str, list[list[str]]]:
    """Every table as text."""
    return {
        "lines": [_line(line) for line in result.lines],
        "conclusions": [
            [each.where, each.claim, each.verdict, shown(each.seed, each.unit), _range(each),
             each.condition]
            for each in result.conclusions
        ],
        "decisions": [[d.question, d.seed, d.ours, d.rests_on] for d in result.decisions],
        "delta": [
            [d.what, shown(d.seed, d.unit), shown(d.ours, d.unit), d.note] for d in result.delta
        ],
    }  # fmt: skip


def _line(line: Line) -> list[str]:
    ends = (line.low, line.high)
    values = (line.seed, line.own, line.computed, *ends)
    said = ["–" if value is None else shown(value, line.unit).strip() for value in values]
    if line.low is None:
        said[3:] = ["", ""]
    return [f"{line.where} *" if line.rebuilt else line.where, line.what, *said]


def _range(each: Conclusion) -> str:
    middle = shown(each.computed, each.unit).strip()
    if each.low == each.high:
        return middle
    low, high = shown(each.low, each.unit).strip(), shown(each.high, each.unit).strip()
    return f"{middle} ({low} to {high})"


def _notes(found: Sequence[Line]) -> list[str]:
    return [f"{line.where} {line.what}: {line.note}" for line in found if line.note]


def figures(result: SeedCase) -> Iterator[list[object]]:
    """A line per figure and conclusion."""
    yield ["kind", "where", "what", "unit", "document", "own", "computed", "low", "high", "verdict"]
    for line in result.lines:
        values = [line.seed, line.own, line.computed, line.low, line.high]
        yield ["line", line.where, line.what, line.unit, *values, None]
    for each in result.conclusions:
        values = [each.seed, None, each.computed, each.low, each.high]
        yield ["conclusion", each.where, each.claim, each.unit, *values, each.verdict]


def page(result: SeedCase) -> str:
    """One page: the verdicts first."""
    rows = _rows(result)
    judged: list[list[Part]] = [
        [*row[:2], badge(each.verdict, _TONES[each.verdict]), *row[3:]]
        for row, each in zip(rows["conclusions"], result.conclusions, strict=True)
    ]
    return html_page(
        "Seed 003, chapter 8: what of it stands",
        [
            section("Conclusions", html_table(_HEADS["conclusions"], judged, numbers_from=None)),
            section("Line by line", html_table(_HEADS["lines"], rows["lines"], numbers_from=2),
                    *_notes(result.lines)),
            section("Decisions, by the numbers", html_table(_HEADS["decisions"], rows["decisions"]),
                    "Its own matrix (chapter 9) is lost: questions and answers are rebuilt."),
            section("Delta coding", html_table(_HEADS["delta"], rows["delta"])),
            section("Assumed", *result.assumed),
        ],
        subtitle=f"kvatlas {result.version}. {result.about}",
    )  # fmt: skip
