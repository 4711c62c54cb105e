"""The matrix as one page: the advice first, then each workload. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from kvatlas.report.axes import Axis, number
from kvatlas.report.html import Markup, assumed, bullets, details, section, table
from kvatlas.report.html import page as html_page
from kvatlas.report.plots import Bars, Line, Mark, bar_plot, distribution_plot, line_plot
from kvatlas.report.statistics import Interval
from kvatlas.sim.arrangements import ARRANGEMENTS, Name, arranged
from kvatlas.sim.cluster import Cluster
from kvatlas.sim.hit_curve import HitCurve
from kvatlas.sim.matrix import Cell
from kvatlas.sim.matrix_table import FIGURES, Advice, Row
from kvatlas.sim.picture import picture
from kvatlas.sim.tier_plots import flow_plot, hit_plot

_PATHS = {
    "host": "between engines and host memory",
    "disk read": "from disks",
    "disk write": "to disks",
    "in": "network cards, in",
    "out": "network cards, out",
    "inside": "between devices of one node",
    "store": "the store",
}


def page(
    about: str,
    guessed: Sequence[str],
    advice: Sequence[Advice],
    rows: Sequence[Row],
    cells: Sequence[Cell],
    *,
    cluster: Cluster,
    curves: Mapping[str, HitCurve],
) -> str:
    """The whole file. ``about``: what was simulated; ``guessed``: what nobody gave; ``cluster``:
    what was arranged; ``curves``: hits by capacity, by workload."""
    said = bullets([each.sentence for each in advice])
    sections = [section("What to take", said, _reuse(rows, curves), assumed(guessed))]
    for each in advice:
        of = [row for row in rows if row.workload == each.workload]
        played = [cell for cell in cells if cell.workload == each.workload]
        drawn = _pictures(cluster, played, each.take)
        sections.append(_workload(of, played, drawn, curves[each.workload]))
    return html_page("Is a shared cache worth it?", sections, subtitle=about)


def _workload(
    rows: Sequence[Row], cells: Sequence[Cell], pictures: Markup, curve: HitCurve
) -> Markup:
    return section(
        rows[0].workload,
        _runs(rows[0]),
        _met(rows),
        _distributions(cells),
        _figures(rows),
        _cost(rows),
        pictures,
        hit_plot(curve),
        _tokens(rows),
        flow_plot([(row.title, row.moved_bytes) for row in rows]),
        _moved(rows),
        _paths(rows),
        _counts(rows),
    )


def _runs(row: Row) -> str:
    """What stands behind the figures."""
    if row.runs == 1:
        return "One run of each: no interval."
    met = row.figures["attained"]
    told = met is not None and met.low is not None
    bounds = "Whiskers and ± hold the true mean with 95 %." if told else "Too few for intervals."
    return (
        f"Means over {row.runs} seeds: a percentile is the mean of what it is in each run, while "
        "the distribution of times has the requests of all runs together, and so other "
        f"percentiles. {bounds}"
    )


def _pictures(cluster: Cluster, cells: Sequence[Cell], take: Name) -> Markup:
    """What is taken, and folded away all others; of each the first run."""
    several = len({cell.seed for cell in cells}) > 1
    drawn: dict[Name, Markup] = {}
    for cell in cells:
        if cell.arrangement not in drawn:
            made = arranged(cluster, cell.arrangement, cell.prefill_engines)
            title = ARRANGEMENTS[cell.arrangement].title + f", seed {cell.seed}" * several
            drawn[cell.arrangement] = picture(made, cell.engines, cell.node_bytes, title=title)
    taken = drawn.pop(take)
    others = details("The other arrangements, drawn", *drawn.values()) if drawn else ""
    return Markup(taken + others)


def _reuse(rows: Sequence[Row], curves: Mapping[str, HitCurve]) -> Markup:
    """What each arrangement costs beside the first, against how much of a workload comes back; of
    one workload there is no such plot."""
    costs: dict[str, dict[str, float]] = {row.title: {} for row in rows}
    for row in rows:
        if (cost := row.figures["good_dollars_per_million"]) is not None:
            costs[row.title][row.workload] = cost.mean
    base = rows[0].title
    shares = {name: curve.points[-1][1] * 100 for name, curve in curves.items()}
    shares = {name: share for name, share in shares.items() if name in costs[base]}
    if len(shares) < 2:
        return Markup("")
    lines = []
    for title, of in costs.items():
        points = [
            (share, of[name] / costs[base][name] * 100)
            for name, share in shares.items()
            if name in of
        ]
        lines.append(Line(title, sorted(points), joined=False))
    note = (
        f"Dollars per token that met the objectives; {base}: 100 %. Across: the prompt blocks "
        "that came before at all, as one endless cache would find them. Workloads "
        "differ in more than that."
    )
    return line_plot(
        "Cost by reuse",
        lines,
        Axis("prompt blocks that came before", "%", low=0, high=100),
        Axis("cost", "%", low=0),
        marks=[Mark(name, share, "x") for name, share in shares.items()],
        note=note,
    )


def _met(rows: Sequence[Row]) -> Markup:
    along = Axis("requests that met the objectives", "%", low=0, high=100)
    bars = [_bars("met", rows, "attained", 100, most=100.0)]
    return bar_plot("Objectives met", [row.title for row in rows], bars, along)


def _cost(rows: Sequence[Row]) -> Markup:
    names = {
        "good_dollars_per_million": "whole cluster, tokens that met the objectives",
        "busy_dollars_per_million": "busy engines, all tokens",
    }
    bars = [_bars(said, rows, name, 1) for name, said in names.items()]
    note = "Devices while the trace lasts, and the room filled below them."
    titles = [row.title for row in rows]
    return bar_plot("Cost", titles, bars, Axis("per million tokens", "$", low=0), note=note)


def _bars(
    said: str, rows: Sequence[Row], name: str, factor: float, *, most: float = math.inf
) -> Bars:
    """One figure of each row, with its interval where there is one."""
    figures = [row.figures[name] for row in rows]
    spans = [
        None
        if of is None or of.low is None or of.high is None
        else (of.low * factor, min(most, of.high * factor))
        for of in figures
    ]
    return Bars(said, [None if of is None else of.mean * factor for of in figures], spans)


def _distributions(cells: Sequence[Cell]) -> Markup:
    """Of all seeds together; each run gives as many points."""
    samples: dict[str, list[float]] = {}
    for cell in cells:
        samples.setdefault(ARRANGEMENTS[cell.arrangement].title, []).extend(cell.ttft_s)
    axis = Axis("time to first token", "s", log=True)
    return distribution_plot("Time to first token", list(samples.items()), axis)


def _figures(rows: Sequence[Row]) -> Markup:
    def cell(row: Row, name: str) -> str:
        return _said(name, row.figures[name])

    lines = _lines(rows, FIGURES, cell)
    split = ["engines that prefill", *(str(row.prefill_engines or "-") for row in rows)]
    return _across(rows, [*lines, split])


def _across(rows: Sequence[Row], lines: Sequence[Sequence[str]], caption: str = "") -> Markup:
    """A column per arrangement."""
    heads = ["", *(row.title for row in rows)]
    return table(heads, lines, numbers_from=1, caption=caption) if lines else Markup("")


def _lines(
    rows: Sequence[Row], names: Mapping[str, str], cell: Callable[[Row, str], str]
) -> list[list[str]]:
    return [[said, *(cell(row, name) for row in rows)] for name, said in names.items()]


def _said(name: str, value: Interval | None) -> str:
    if value is None:
        return "not shown"
    if name in ("attained", "hit_share"):
        return _around(value, 100, "%")
    if name == "goodput_per_s":
        return _around(value, 1, "/s")
    if name.endswith("dollars_per_million") or name == "gpu_s_saved_per_hit":
        return _around(value, 1, "")
    return _around(value, 1000, "ms")


def _around(value: Interval, factor: float, unit: str) -> str:
    """The mean, and how far the interval goes on the side where it goes farther."""
    said = f"{number(value.mean * factor)} {unit}".rstrip()
    if value.low is None or value.high is None or not value.mean:
        return said
    off = max(value.mean - value.low, value.high - value.mean) / abs(value.mean)
    return f"{said} ±{off:.1%}"


def _tokens(rows: Sequence[Row]) -> Markup:
    """Where each prompt token came from: the shares add up to all of them."""
    names = [name for name in rows[0].token_share if any(row.token_share[name] for row in rows)]
    lines = _lines(rows, _same(names), lambda row, name: f"{row.token_share[name]:.2%}")
    caption = "Prompt tokens by where their state came from: a column is all tokens."
    return _across(rows, lines, caption)


def _moved(rows: Sequence[Row]) -> Markup:
    names = sorted({name for row in rows for name in row.moved_bytes})
    lines = _lines(rows, _same(names), lambda row, n: f"{row.moved_bytes.get(n, 0) / 1e9:,.1f}")
    return _across(rows, lines, "GB moved per run, by what was done and the tier.")


def _same(names: Sequence[str]) -> dict[str, str]:
    return {name: name for name in names}


def _paths(rows: Sequence[Row]) -> Markup:
    lines = []
    for row in rows:
        duration = row.figures["duration_s"]
        for name, use in row.paths.items():
            if not use.moved_bytes or duration is None or not duration.mean:
                continue
            could = use.bytes_per_s * duration.mean
            while_busy = use.moved_bytes / use.busy_s if use.busy_s else 0.0
            lines.append(
                [
                    row.title,
                    _PATHS.get(name, name),
                    str(use.links),
                    f"{use.moved_bytes / 1e9:,.1f}",
                    f"{use.bytes_per_s / 1e9:,.0f}",
                    f"{use.moved_bytes / could:.2%}",
                    f"{while_busy / 1e9:,.1f}",
                ]
            )
    heads = ["arrangement", "way", "ways", "GB", "GB/s of all", "used", "GB/s while busy, each"]
    return table(heads, lines, numbers_from=2) if lines else Markup("")


def _counts(rows: Sequence[Row]) -> Markup:
    names = sorted({name for row in rows for name in row.counts})
    lines = _lines(rows, _same(names), lambda row, name: f"{row.counts.get(name, 0):,.0f}")
    return _across(rows, lines, "Counts per run.")
