"""``kvatlas trace stats``: what a trace is like, and what caches of any size would hold of it."""

from __future__ import annotations

import argparse

import msgspec
from rich.console import Console
from rich.table import Table

from kvatlas.cli.output import print_json
from kvatlas.cli.trace_input import add_trace_options, first_of, opened
from kvatlas.errors import TraceError
from kvatlas.workload.published import PUBLISHED, compared
from kvatlas.workload.trace import Trace
from kvatlas.workload.trace_stats import Spread, TraceStats, stats

_EPILOG = """\
Hit rates are those of an endless cache, and of plain LRU at shares of the distinct blocks. Memory
grows with distinct blocks, about 250 bytes each, not with the length of the trace.

examples:
  kvatlas trace stats mooncake_conversation.jsonl.xz
  kvatlas trace stats requests.jsonl --tokenizer models/my-model --json
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "stats",
        help="lengths, arrival, reuse, sharing and sessions of a trace",
        description="Lengths, arrival, reuse, sharing and sessions of a trace.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_options(parser)
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N requests")
    parser.add_argument(
        "--beside", choices=tuple(PUBLISHED), help="set the published figures of a trace beside it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    trace = opened(args)
    found = stats(trace, first_of(trace, args))
    if found is None:
        raise TraceError(f"{args.trace}: no requests in it")
    if args.json:
        told = {"trace": trace.name, "format": trace.format, **msgspec.to_builtins(found)}
        if args.beside:
            told["beside"] = msgspec.to_builtins(compared(found, args.beside))
        print_json(told)
    else:
        _show(trace, found)
        if args.beside:
            Console().print(_beside(found, args.beside))
    return 0


def _show(trace: Trace, found: TraceStats) -> None:
    console = Console()
    console.print(_facts(trace, found))
    table = Table()
    table.add_column("per request")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for name, spread in (
        ("prompt tokens", found.prompt_tokens),
        ("output tokens", found.output_tokens),
        ("reuse distance, blocks", found.reuse_distance_blocks),
        ("reuse gap, s", found.reuse_gap_s),
        ("turns per session", found.turns_per_session),
        ("gap between turns, s", found.turn_gap_s),
        ("think time, s", found.think_s),
    ):
        if spread is not None:
            table.add_row(name, *_cells(spread))
    console.print(table)


def _facts(trace: Trace, found: TraceStats) -> Table:
    facts = Table(show_header=False, box=None)
    rate = f", {found.requests_per_s:.3g} a second" if found.requests_per_s else ""
    facts.add_row("trace", f"{trace.name} ({trace.format}, blocks of {trace.block_tokens} tokens)")
    facts.add_row("requests", f"{found.requests:,} in {found.duration_s:,.0f} s{rate}")
    facts.add_row("prompt tokens", f"{found.prompt_tokens.total:,.0f}")
    facts.add_row("output tokens", f"{found.output_tokens.total:,.0f}")
    facts.add_row("blocks", f"{found.blocks:,}, distinct {found.unique_blocks:,}")
    facts.add_row(
        "endless cache",
        f"hit {found.block_hit_rate:.4f} of blocks, {found.token_hit_rate:.4f} of tokens",
    )
    facts.add_row(
        "LRU",
        ", ".join(f"{point.share_of_unique:.0%}: {point.block_hit_rate:.3f}" for point in found.lru)
        + " (capacity as a share of distinct blocks)",
    )
    facts.add_row("live at most", f"{found.peak_live_blocks:,} blocks that were used again later")
    if found.sessions is not None:
        facts.add_row("sessions", f"{found.sessions:,}")
    if found.hits_in_session is not None:
        facts.add_row("hits", f"{found.hits_in_session:.1%} made by the same session before")
    if found.scopes:
        facts.add_row("scopes", f"{found.scopes:,}: nothing is shared between them")
    return facts


def _cells(spread: Spread) -> list[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]


def _beside(found: TraceStats, name: str) -> Table:
    table = Table()
    table.add_column("figure")
    for column in (f"{name}, published", "here", "difference"):
        table.add_column(column, justify="right")
    for row in compared(found, name):
        if row.here is None:
            table.add_row(row.name, _figure(row.published), "–", "–")
            continue
        rate = row.published <= 1
        apart = row.here - row.published
        told = f"{apart:+.3f}" if rate else f"{apart / row.published:+.1%}"
        table.add_row(row.name, _figure(row.published), _figure(row.here), told)
    return table


def _figure(value: float) -> str:
    return f"{value:.3f}" if value <= 1 else f"{value:,.0f}"
