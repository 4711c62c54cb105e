"""The dashboards, by Grafana's own Foundation SDK.

``python deploy/grafana/dashboards.py`` writes the JSON files beside it, which Grafana imports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
)

HERE = Path(__file__).parent
WIDTH, HEIGHT, NARROW = 12, 8, 6  # of a panel, in Grafana's grid of 24; of one number
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

# Of all gateways that are looked at.
HERE_ONLY = 'job=~"$job"'
RATE = "$__rate_interval"


def _rate(metric: str, by: str = "", where: str = "") -> str:
    """Per second, summed over gateways."""
    within = f"{{{HERE_ONLY}{', ' + where if where else ''}}}"
    total = f"rate({metric}{within}[{RATE}])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def _now(metric: str, by: str = "", how: str = "sum", where: str = "") -> str:
    within = f"{{{HERE_ONLY}{', ' + where if where else ''}}}"
    return f"{how} by ({by}) ({metric}{within})" if by else f"{how}({metric}{within})"


def _quantile(metric: str, share: float) -> str:
    return f"histogram_quantile({share:g}, {_rate(f'{metric}_bucket', 'le')})"


Series = tuple[str, str]  # expression, legend


def _query(at: int, series: Series) -> prometheus.Dataquery:
    expression, legend = series
    query = prometheus.Dataquery().ref_id(chr(ord("A") + at)).expr(expression)
    return query.legend_format(legend).datasource(SOURCE)


def lines(
    title: str, unit: str, *series: Series, stacked: bool = False, most: float | None = None
) -> timeseries.Panel:
    """Curves over time; ``stacked``: what adds up to a whole."""
    panel = (
        timeseries.Panel().title(title).unit(unit).datasource(SOURCE).min(0)
        .span(WIDTH).height(HEIGHT).line_width(1.5).fill_opacity(60 if stacked else 8)
        .legend(
            VizLegendOptions().display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM).show_legend(True)
        )
    )  # fmt: skip
    if stacked:
        panel = panel.stacking(StackingConfig().mode(StackingMode.NORMAL))
    if most is not None:
        panel = panel.max(most)
    for at, one in enumerate(series):
        panel = panel.with_target(_query(at, one))
    return panel


def number(title: str, unit: str, expression: str) -> stat.Panel:
    """The newest value alone."""
    panel = stat.Panel().title(title).unit(unit).datasource(SOURCE).span(NARROW).height(4)
    return panel.with_target(_query(0, (expression, "")))


Panel = timeseries.Panel | stat.Panel


def page(name: str, title: str, text: str, rows: dict[str, list[Panel]], job: str) -> str:
    """One dashboard as JSON. ``job``: a metric by which its jobs are found."""
    made = (
        dashboard.Dashboard(title).uid(f"kvatlas-{name}").description(text).tags(["kvatlas"])
        .refresh("30s").time("now-1h", "now").timezone("browser").readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .with_variable(
            dashboard.QueryVariable("job").label("job").datasource(SOURCE)
            .query(f"label_values({job}, job)").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True).include_all(True).all_value(".+")
        )
    )  # fmt: skip
    for row, panels in rows.items():
        made = made.with_row(dashboard.Row(row))
        for panel in panels:
            made = made.with_panel(panel)
    whole = json.loads(JSONEncoder().encode(made.build()))
    for number, panel in enumerate(whole["panels"], 1):
        panel["id"] = number
    return json.dumps(_said(whole), sort_keys=True, indent=1) + "\n"


def _said(value: Any) -> Any:
    """Without members that say nothing: Grafana takes a null for a value."""
    if isinstance(value, dict):
        return {name: _said(member) for name, member in value.items() if member is not None}
    return [_said(member) for member in value] if isinstance(value, list) else value


_TOKENS = "kvatlas_prompt_tokens_total"
_REUSED = 'source!~"computed|unreported"'
_HIT = f"{_rate(_TOKENS, where=_REUSED)} / {_rate(_TOKENS)}"
_SOURCES = (_rate(_TOKENS, "source"), "{{source}}")


def overview() -> str:
    failed = _rate("kvatlas_requests_total", where='status=~"5.."')
    return page(
        "overview",
        "kvatlas: overview",
        "Requests, first tokens, hits, engines: whether all is well, and where to look if not.",
        {
            "Now": [
                number("requests per second", "reqps", _rate("kvatlas_requests_total")),
                number("share of them that failed", "percentunit",
                       f"{failed} / {_rate('kvatlas_requests_total')}"),
                number("first token, p95", "s", _quantile("kvatlas_ttft_seconds", 0.95)),
                number("prompt tokens that were reused", "percentunit", _HIT),
            ],
            "Requests": [
                lines("requests by status", "reqps",
                      (_rate("kvatlas_requests_total", "status"), "{{status}}"), stacked=True),
                lines("refused, by reason", "reqps",
                      (_rate("kvatlas_requests_refused_total", "reason"), "{{reason}}")),
                lines("time to the first byte", "s",
                      *((_quantile("kvatlas_ttft_seconds", q), f"p{q * 100:g}")
                        for q in (0.5, 0.95, 0.99))),
                lines("request to last byte", "s",
                      *((_quantile("kvatlas_request_seconds", q), f"p{q * 100:g}")
                        for q in (0.5, 0.95, 0.99))),
            ],
            "Engines": [
                lines("requests in flight", "short",
                      (_now("kvatlas_requests_in_flight", "worker"), "{{worker}}")),
                lines("up, and may get requests", "short",
                      (_now("kvatlas_worker_up", "worker", "min"), "{{worker}}"), most=1),
                lines("waiting, as the engine says", "short",
                      (_now("kvatlas_worker_reported_requests", "worker",
                            where='state="waiting"'), "{{worker}}")),
                lines("steps down the ladder", "short",
                      (_rate("kvatlas_fallbacks_total", "rung, reason"), "{{rung}}: {{reason}}")),
            ],
            "Tokens": [
                lines("prompt tokens by where they came from", "short", _SOURCES, stacked=True),
                lines("tokens of answers", "short",
                      (_rate("kvatlas_completion_tokens_total", "worker"), "{{worker}}"),
                      stacked=True),
            ],
            "Traces": [
                lines("requests by what became of their spans", "reqps",
                      (_rate("kvatlas_traces_total", "outcome"), "{{outcome}}"), stacked=True),
            ],
        },
        "kvatlas_requests_total",
    )  # fmt: skip


def tiers() -> str:
    pair = "{{prefill}} → {{decode}}"
    return page(
        "tiers",
        "kvatlas: tiers and transports",
        "Where hits come from, what nodes hold, what is moved over which way, how full it is.",
        {
            "Hits": [
                lines("prompt tokens by where they came from", "short", _SOURCES, stacked=True),
                lines("tokens that engines resumed from a tier of agents", "short",
                      (_rate("kvatlas_agent_loaded_tokens_total", "tier"), "{{tier}}")),
                lines("made ready and not taken", "short",
                      (_rate("kvatlas_agent_unused_tokens_total", "tier"), "{{tier}}")),
                lines("hits that were foreseen, and that came", "short",
                      (_rate("kvatlas_expected_hit_tokens_total"), "foreseen"),
                      (_rate("kvatlas_cached_tokens_total"), "came")),
            ],
            "Room": [
                lines("how full a tier is", "percentunit",
                      (f"{_now('kvatlas_agent_tier_held_bytes', 'instance, tier')}"
                       f" / {_now('kvatlas_agent_tier_capacity_bytes', 'instance, tier')}",
                       "{{instance}} {{tier}}"), most=1),
                lines("held", "bytes",
                      (_now("kvatlas_agent_tier_held_bytes", "tier"), "{{tier}}"), stacked=True),
                lines("what was dropped, refused, late or wrong", "short",
                      (_rate("kvatlas_agent_events_total", "event"), "{{event}}")),
                lines("quarantined", "bytes",
                      (_now("kvatlas_agent_tier_quarantined_bytes", "instance, tier"),
                       "{{instance}} {{tier}}")),
            ],
            "Ways": [
                lines("moved by agents", "Bps",
                      (_rate("kvatlas_agent_moved_bytes_total", "operation, tier"),
                       "{{operation}} {{tier}}")),
                lines("read from peers, by transport", "Bps",
                      (_rate("kvatlas_agent_peer_moved_bytes_total", "transport"),
                       "{{transport}}")),
                lines("handed over between the halves of pairs", "Bps",
                      (_rate("kvatlas_transport_bytes_total", "prefill, decode"), pair)),
                lines("rate of the last hand-overs", "Bps",
                      (_now("kvatlas_transport_bytes_per_second", "prefill, decode", "max"),
                       pair)),
                lines("degraded pairs", "short",
                      (_now("kvatlas_transport_degraded", "prefill, decode", "max"), pair),
                      most=1),
                lines("reads that did not come to their end", "short",
                      (_rate("kvatlas_agent_peer_read_failures_total", "peer, transport"),
                       "{{peer}} {{transport}}")),
            ],
            "Ahead of need": [
                lines("copies", "short",
                      (_rate("kvatlas_ahead_copies_total", "copy, outcome"),
                       "{{copy}} {{outcome}}")),
                lines("bytes that they brought", "Bps",
                      (_rate("kvatlas_ahead_moved_bytes_total", "copy"), "{{copy}}")),
            ],
        },
        '{__name__=~"kvatlas_agent_busy|kvatlas_requests_total"}',
    )  # fmt: skip


def router() -> str:
    return page(
        "router",
        "kvatlas: prices and regret",
        "How far predictions are off, and what the choices that rest on them cost.",
        {
            "Prices": [
                lines("first token: predicted against measured, mean error", "s",
                      (_now("kvatlas_ttft_error_seconds", "worker", "max"), "{{worker}}")),
                lines("regret: how much sooner the best other plan would have been", "s",
                      (_now("kvatlas_ttft_regret_seconds", "worker", "max"), "{{worker}}")),
                lines("hand-overs: priced against measured, mean error", "s",
                      (_now("kvatlas_hand_off_error_seconds", "prefill, decode", "max"),
                       "{{prefill}} → {{decode}}")),
                lines("answers by whether they met their objective", "reqps",
                      (_rate("kvatlas_ttft_objectives_total", "result"), "{{result}}"),
                      stacked=True),
            ],
            "Decisions": [
                lines("requests routed", "reqps", (_rate("kvatlas_decisions_total"), "")),
                lines("body read to engine chosen", "s",
                      *((_quantile("kvatlas_route_seconds", q), f"p{q * 100:g}")
                        for q in (0.5, 0.99))),
                lines("what the ladder cost, per second", "s",
                      (_rate("kvatlas_fallback_seconds_total", "rung, reason"),
                       "{{rung}}: {{reason}}")),
                lines("engines that reuse far less than their events promise", "short",
                      (_now("kvatlas_hit_gap", "worker", "max"), "{{worker}}"), most=1),
            ],
            "Directory and feed": [
                lines("block-holders", "short",
                      (_now("kvatlas_directory_holders", "worker"), "{{worker}}")),
                lines("KV events", "short",
                      (_rate("kvatlas_feed_events_total", "worker"), "{{worker}}")),
                lines("holes in streams, and claims given up", "short",
                      (_rate("kvatlas_feed_gaps_total", "worker"), "gaps {{worker}}"),
                      (_rate("kvatlas_feed_resets_total", "worker"), "resets {{worker}}")),
                lines("events arrive", "short",
                      (_now("kvatlas_feed_connected", "worker", "min"), "{{worker}}"), most=1),
                lines("token ids: ours against the engines'", "short",
                      (_rate("kvatlas_tokenizer_compared_total"), "compared"),
                      (_rate("kvatlas_tokenizer_mismatches_total"), "different")),
            ],
        },
        "kvatlas_decisions_total",
    )  # fmt: skip


def tenants() -> str:
    of = "tenant_class"
    hit = _rate("kvatlas_tenant_prompt_tokens_total", of, _REUSED)
    return page(
        "tenants",
        "kvatlas: tenants",
        "Use by class of tenant (tenant_class in the file of tenants). Names are never in metrics.",
        {
            "Use": [
                lines("requests routed", "reqps",
                      (_rate("kvatlas_tenant_requests_total", of, 'result="routed"'),
                       "{{tenant_class}}"), stacked=True),
                lines("refused, by reason", "reqps",
                      (_rate("kvatlas_tenant_requests_total", f"{of}, result",
                             'result!="routed"'), "{{tenant_class}} {{result}}")),
                lines("prompt tokens", "short",
                      (_rate("kvatlas_tenant_prompt_tokens_total", of), "{{tenant_class}}"),
                      stacked=True),
                lines("tokens of answers", "short",
                      (_rate("kvatlas_tenant_completion_tokens_total", of), "{{tenant_class}}"),
                      stacked=True),
            ],
            "Reuse": [
                lines("share of prompt tokens that were reused", "percentunit",
                      (f"{hit} / {_rate('kvatlas_tenant_prompt_tokens_total', of)}",
                       "{{tenant_class}}"), most=1),
                lines("prompt tokens by where they came from", "short",
                      (_rate("kvatlas_tenant_prompt_tokens_total", f"{of}, source"),
                       "{{tenant_class}} {{source}}"), stacked=True),
            ],
            "Who was not let in": [
                lines("API", "reqps",
                      (_rate("kvatlas_requests_refused_total", "reason",
                             'reason=~"invalid_api_key|unknown_tenant|session_needed|not_known"'),
                       "{{reason}}")),
                lines("pages", "reqps", (_rate("kvatlas_admin_total", "outcome"), "{{outcome}}")),
            ],
        },
        "kvatlas_requests_total",
    )  # fmt: skip


PAGES = {"overview": overview, "tiers": tiers, "router": router, "tenants": tenants}


def main() -> int:
    for name, made in PAGES.items():
        (HERE / f"{name}.json").write_text(made(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
