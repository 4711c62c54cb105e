"""One simulated run as a page: what users felt, where tokens came from, the cluster. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from kvatlas.report.axes import Axis
from kvatlas.report.html import Figure, Markup, figures, section, table
from kvatlas.report.html import page as html_page
from kvatlas.report.latency import Summary
from kvatlas.report.plots import distribution_plot
from kvatlas.report.table import seconds
from kvatlas.sim.cluster import Cluster
from kvatlas.sim.hit_curve import HitCurve
from kvatlas.sim.picture import picture
from kvatlas.sim.report import SimReport
from kvatlas.sim.tier_plots import flow_plot, hit_plot, moved

LINKS_MAX = 100


def page(
    cluster: Cluster,
    report: SimReport,
    ttft_s: Sequence[float],
    version: str,
    curve: HitCurve | None = None,
) -> str:
    """The whole file. ``ttft_s``: of the answered requests; ``curve``: of the trace."""
    latency = report.latency
    head = (
        f"{latency.requests:,} requests in {latency.duration_s:,.0f} s of trace on "
        f"{report.devices} devices, policy {report.policy}, seed {report.seed}; kvatlas {version}"
    )
    held = {node: use.held_bytes for node, use in report.agents.items()}
    drawn = picture(cluster, report.engines, held)
    sections = [
        section("What users felt", _tiles(report), _latencies(report), _distribution(ttft_s)),
        section(
            "Where prompt tokens came from",
            _tokens(report),
            hit_plot(curve) if curve is not None else Markup(""),
            flow_plot([("moved", moved(report.agents.values(), report.pairs))]),
        ),
        section("The cluster", drawn, _engines(report), _links(report)),
        section("What went wrong", _faults(report)),
    ]
    return html_page(f"Simulated: {PurePath(report.trace).name}", sections, subtitle=head)


def _tiles(report: SimReport) -> Markup:
    latency, tokens = report.latency, report.tokens
    wrong = f"{latency.failed:,} failed" if latency.failed else "all answered"
    return figures(
        [
            Figure("TTFT p95", seconds(latency.ttft_s.p95)),
            Figure("objectives met", f"{latency.attained:.1%}", _objectives(report)),
            Figure("hit tokens", f"{tokens.hit_share:.1%}", f"of {tokens.prompt:,}"),
            Figure(
                "requests", f"{latency.requests:,}", wrong, "bad" if latency.failed else "plain"
            ),
        ]
    )


def _objectives(report: SimReport) -> str:
    slo = report.latency.slo
    told = [
        f"{name} {seconds(value)}"
        for name, value in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
        if value is not None
    ]
    return ", ".join(told) or "none given: answered is enough"


def _latencies(report: SimReport) -> Markup:
    latency = report.latency
    rows: dict[str, Summary] = {
        "TTFT": latency.ttft_s,
        "TPOT": latency.tpot_s,
        "ITL": latency.itl_s,
        "E2E": latency.e2e_s,
    }
    lines = [
        [name, *(seconds(value) for value in (of.mean, of.p50, of.p95, of.p99, of.max))]
        for name, of in rows.items()
    ]
    return table(["", "mean", "p50", "p95", "p99", "most"], lines, numbers_from=1)


def _distribution(ttft_s: Sequence[float]) -> Markup:
    axis = Axis("time to first token", "s", log=True)
    return distribution_plot("Time to first token", [("requests", ttft_s)], axis)


def _tokens(report: SimReport) -> Markup:
    tokens = report.tokens
    parts = {f"held in {tier}": count for tier, count in tokens.hits.items() if count}
    parts |= {"computed": tokens.recomputed, "unserved": tokens.unserved}
    lines = [
        [name, f"{count:,}", f"{count / tokens.prompt:.2%}" if tokens.prompt else "-"]
        for name, count in parts.items()
    ]
    lines.append(["all", f"{tokens.prompt:,}", "100.00%"])
    return table(["", "tokens", "share"], lines, numbers_from=1)


def _engines(report: SimReport) -> Markup:
    lines = [
        [
            load.name,
            load.role,
            f"{load.requests:,}",
            f"{load.prompt_tokens:,}",
            f"{load.hit_tokens / load.prompt_tokens:.1%}" if load.prompt_tokens else "-",
            f"{load.output_tokens:,}",
            f"{load.evicted_blocks:,}",
            f"{load.busy:.0%}",
        ]
        for load in report.engines
    ]
    heads = ["engine", "role", "requests", "prompt tokens", "hit", "tokens out", "evicted", "busy"]
    return table(heads, lines, numbers_from=2)


def _links(report: SimReport) -> Markup:
    used = sorted(
        ((use.moved_bytes, name) for name, use in report.links.items() if use.moved_bytes),
        reverse=True,
    )
    duration_s = report.latency.duration_s
    lines = []
    for size, name in used[:LINKS_MAX]:
        use = report.links[name]
        share = size / (use.bytes_per_s * duration_s) if duration_s else 0.0
        lines.append([name, f"{size / 1e9:,.1f}", f"{use.bytes_per_s / 1e9:,.1f}", f"{share:.2%}"])
    more = f"{len(used) - LINKS_MAX:,} links carried less." if len(used) > LINKS_MAX else ""
    heads = ["link", "GB", "GB/s", "used"]
    return table(heads, lines, numbers_from=1, caption=more) if lines else Markup("")


def _faults(report: SimReport) -> Markup:
    lines = [["failed", kind, f"{count:,}"] for kind, count in report.faults.items()]
    lines += [["fell back", reason, f"{count:,}"] for reason, count in report.fallbacks.items()]
    dropped: Counter[str] = Counter()
    for use in report.agents.values():
        dropped.update(use.counts)
    lines += [["agents", reason, f"{count:,}"] for reason, count in dropped.items() if count]
    return table(["", "", "times"], lines, numbers_from=2) if lines else Markup("<p>Nothing.</p>")
