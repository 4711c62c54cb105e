"""Tables for people: latency and goodput as `rich` renders them."""

from __future__ import annotations

from rich.table import Table

from kvatlas.report.latency import Report, Slo, Summary


def latency_table(report: Report, *, title: str = "") -> Table:
    """TTFT, TPOT, ITL and E2E with p50, p95, p99 and the worst."""
    table = Table(title=title or None, title_justify="left")
    table.add_column("latency")
    for name in ("p50", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    rows = (("TTFT", report.ttft_s), ("TPOT", report.tpot_s), ("ITL", report.itl_s))
    for name, summary in (*rows, ("E2E", report.e2e_s)):
        table.add_row(name, *_cells(summary))
    return table


def _cells(summary: Summary) -> list[str]:
    return [seconds(v) for v in (summary.p50, summary.p95, summary.p99, summary.max)]


def seconds(value: float | None) -> str:
    """A duration in the unit that reads best; a dash where there is none."""
    if value is None:
        return "–"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def goodput_text(report: Report) -> str:
    """The rate at which requests met their objectives, their share, and which those are."""
    return (
        f"{report.goodput_per_s:.2f} requests/s ({report.attained:.1%}) "
        f"within SLO: {slo_text(report.slo)}"
    )


def slo_text(slo: Slo) -> str:
    """The objectives in words."""
    limits = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
    stated = [f"{name} ≤ {seconds(limit)}" for name, limit in limits if limit is not None]
    return " and ".join(stated) or "none stated"
