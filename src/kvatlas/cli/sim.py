"""``kvatlas sim``: play a trace on a simulated cluster and print what users would have felt."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.console import Console
from rich.table import Table

from kvatlas import __version__
from kvatlas.cli import sim_faults, sim_prices
from kvatlas.cli.output import (
    check_outputs,
    csv_bytes,
    json_bytes,
    print_json,
    progress,
    write_files,
)
from kvatlas.cli.trace_input import add_trace_options, opened
from kvatlas.core.router import Policy
from kvatlas.errors import ConfigError
from kvatlas.report.latency import Slo
from kvatlas.report.table import goodput_text, latency_table, seconds
from kvatlas.sim.cluster import Cluster, default_cluster, load_cluster, with_tiers
from kvatlas.sim.gateway import Outcome
from kvatlas.sim.hit_curve import hit_curve
from kvatlas.sim.page import page
from kvatlas.sim.report import SimReport
from kvatlas.sim.tier_spec import parse_tiers
from kvatlas.sim.world import Play, no_collector, simulate
from kvatlas.workload.trace import Trace

SPAN_MAX_S = 10_000_000  # of virtual time: four months
_LINKS_SHOWN = 8  # those that carried most

_EPILOG = """\
The production core (directory, router, promises) runs under virtual time among modelled engines:
equal input gives an equal result, byte by byte. Without --cluster: engines of two H200 each with
DeepSeek V4 Flash.

examples:
  kvatlas sim --trace mooncake_conversation.jsonl.xz
  kvatlas sim --trace trace.jsonl --engines 4 --policy round_robin --limit 2000
  kvatlas sim --trace trace.jsonl --cluster cluster.toml --slo-ttft-s 4 --json result.json
  kvatlas sim --trace trace.jsonl --tiers dram=1TB,disk=8TB --html sim.html --csv sim.csv
  kvatlas sim faults --seeds 200
  kvatlas sim prices

exit status: 0 every request was answered, 1 some were not, 2 the input is at fault
"""


class _Instead(argparse._SubParsersAction):  # type: ignore[type-arg]
    """A command that stands where the options of ``kvatlas sim`` would: none of them is its own."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        for name, value in vars(namespace).items():
            if value != parser.get_default(name):
                option = f"--{name.replace('_', '-')}"
                parser.error(f"{option} is no option of {values[0]}, whose own stand behind it")
        super().__call__(parser, namespace, values, option_string)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sim",
        description="Play a request trace on a simulated cluster, in virtual time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_trace_options(parser, name="--trace", seeds="of everything drawn by chance")
    add("--cluster", type=Path, metavar="FILE", help="cluster.toml (default: see below)")
    add("--engines", type=int, metavar="N", help="engines of the default cluster (8)")
    add("--tiers", metavar="SIZES", help="per node: dram=1TB,disk=8TB; for all: object=100TB")
    add("--policy", choices=get_args(Policy), help="router's policy (the cluster's, or price)")
    add("--limit", type=int, metavar="N", help="only the first N requests")
    add("--closed-loop", action="store_true", help="turns wait for the answer before them")
    add("--time-scale", type=float, default=1.0, metavar="X", help="multiply the trace's times (1)")
    add("--max-output", type=int, metavar="N", help="cap on output tokens")
    add("--slo-ttft-s", type=float, metavar="S", help="objective: time to first token")
    add("--slo-tpot-s", type=float, metavar="S", help="objective: time per output token")
    add("--json", type=Path, metavar="FILE", help="also write the result as JSON (- for stdout)")
    add("--csv", type=Path, metavar="FILE", help="write a line per figure")
    add("--export", type=Path, metavar="FILE", help="write one JSON line per request")
    add("--html", type=Path, metavar="FILE", help="write the report as one page")
    add("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", action=_Instead)
    sim_faults.add_parser(commands)
    sim_prices.add_parser(commands)


def run(args: argparse.Namespace) -> int:
    piped = str(args.json) == "-"
    files = ("csv", "export", "html") if piped else ("json", "csv", "export", "html")
    check_outputs(args, files, args.trace, args.cluster)
    cluster = _cluster(args)
    play = _play(args)
    trace = opened(args)
    if args.closed_loop:
        _check_turns(args, trace)
    slo = Slo(args.slo_ttft_s, args.slo_tpot_s)
    # Counting also finds faults of the file before anything is simulated.
    total = _counted(args, trace)
    bar = progress("requests", total, quiet=args.quiet)
    ttft_s = array("d")

    def ended(outcome: Outcome) -> None:
        if args.html is not None and not outcome.fault:
            ttft_s.append(outcome.ttft_s)
        if export is not None:
            export(outcome)

    with _export(args.export) as export, bar as on_end, no_collector():
        watch = ended if args.html is not None or export is not None else None
        report = simulate(
            cluster, trace, play, seed=args.seed, slo=slo, export=watch, on_end=on_end
        )
    if not report.latency.requests:
        raise ConfigError(f"{args.trace}: no requests in it")

    def html() -> bytes:
        curve = hit_curve(trace, cluster, args.limit)
        return page(cluster, report, ttft_s, __version__, curve).encode()

    try:
        write_files(
            ("--html", args.html, html),
            ("--json", None if piped else args.json, lambda: json_bytes(report)),
            ("--csv", args.csv, lambda: csv_bytes(figures(report))),
        )
    finally:
        if piped:
            print_json(report)
        else:
            show(report, Console())
    return 1 if report.latency.failed else 0


def _cluster(args: argparse.Namespace) -> Cluster:
    if args.cluster is None:
        engines = 8 if args.engines is None else args.engines
        default = default_cluster(engines=engines, policy=args.policy or "price")
        return _with_tiers(default, args.tiers)
    if args.engines is not None:
        raise ConfigError(
            "--engines: the number of engines is in the cluster's file: leave one out"
        )
    cluster = load_cluster(args.cluster)
    cluster = _with_tiers(cluster, args.tiers)
    if args.policy is None:
        return cluster
    router = msgspec.structs.replace(cluster.router, policy=args.policy)
    return msgspec.structs.replace(cluster, router=router)


def _with_tiers(cluster: Cluster, sizes: str | None) -> Cluster:
    if sizes is None:
        return cluster
    return with_tiers(cluster, parse_tiers(sizes), lambda place: "--tiers")


def _play(args: argparse.Namespace) -> Play:
    for name in ("limit", "max_output"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: at least 1 is needed")
    if not (math.isfinite(args.time_scale) and args.time_scale >= 0):
        raise ConfigError(f"--time-scale {args.time_scale:g}: a number from 0 up is needed")
    for name in ("slo_ttft_s", "slo_tpot_s"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: seconds above 0 are needed")
    return Play(
        limit=args.limit,
        closed_loop=args.closed_loop,
        time_scale=args.time_scale,
        max_output_tokens=args.max_output,
    )


def _counted(args: argparse.Namespace, trace: Trace) -> int:
    """How many requests there are to play. Raises ConfigError where that would not end."""
    total, span_s = 0, 0.0
    for request in itertools.islice(trace, args.limit):
        total += 1
        span_s = max(span_s, request.arrival_s, request.think_s or 0.0)
    if span_s * args.time_scale > SPAN_MAX_S:
        raise ConfigError(
            f"{args.trace}: requests over more than {SPAN_MAX_S:,} s, and the gateway looks at its "
            "engines in every second of them: give --limit, or a --time-scale below "
            f"{SPAN_MAX_S / span_s:.3g}"
        )
    return total


def _check_turns(args: argparse.Namespace, trace: Trace) -> None:
    """Without turns that could wait the run would be an open loop under another name."""
    played = itertools.islice(trace, args.limit)
    if not any(request.session and request.think_s is not None for request in played):
        raise ConfigError(
            f"--closed-loop: {args.trace} names no session with a turn that could wait for the "
            "answer before it: leave the option out, or play a trace with sessions"
        )


@contextlib.contextmanager
def _export(path: Path | None) -> Iterator[Callable[[Outcome], None] | None]:
    if path is None:
        yield None
        return
    encode = msgspec.json.encode
    try:
        with path.open("wb") as file:
            yield lambda outcome: (file.write(encode(outcome) + b"\n"), None)[1]
    except OSError as error:
        raise ConfigError(
            f"--export {path}: cannot be written: {error.strerror or error}"
        ) from error


def show(report: SimReport, console: Console) -> None:
    """The report for people."""
    latency, tokens, spent = report.latency, report.tokens, report.seconds
    console.print(latency_table(latency))
    facts = Table(show_header=False, box=None)
    answered = latency.requests - latency.failed
    facts.add_row(
        "answered", f"{answered:,} of {latency.requests:,} in {latency.duration_s:,.0f} s of trace"
    )
    facts.add_row(
        "rate",
        f"{latency.requests_per_s:.2f} requests/s, {latency.output_tokens_per_s:,.0f} tokens/s out",
    )
    facts.add_row("goodput", goodput_text(latency))
    for tier, count in tokens.hits.items():
        if count:
            facts.add_row(f"hit tokens, {tier}", f"{count:,} ({count / tokens.prompt:.2%})")
    facts.add_row("recomputed tokens", f"{tokens.recomputed:,}")
    if tokens.unserved:
        facts.add_row("unserved tokens", f"{tokens.unserved:,}")
    facts.add_row("prompt tokens", f"{tokens.prompt:,}, {tokens.output:,} out")
    facts.add_row(
        "engine seconds",
        f"{spent.reused_s:,.0f} saved by hits, {spent.recomputed_s:,.0f} spent on prefill, "
        f"{spent.waited_s:,.0f} waited",
    )
    facts.add_row(
        "evicted blocks", f"{report.evicted_blocks:,}; {report.preemptions:,} preemptions"
    )
    if report.pairs.transfers or report.pairs.failed:
        pairs = report.pairs
        facts.add_row(
            "handed over",
            f"{pairs.transferred_bytes / 1e9:,.1f} GB in {pairs.transfers:,} reads of "
            f"{_mean(pairs.transfer_s, pairs.transfers)}; {pairs.failed:,} failed, "
            f"{pairs.expired:,} leases ran out",
        )
    _tier_rows(report, facts)
    for why, tally in report.ahead.items():
        facts.add_row(
            f"copies, {why}",
            f"{tally.ordered:,} ordered, {tally.ended['arrived']:,} arrived, {tally.unused:,} never"
            f" used, {tally.moved_bytes / 1e9:,.1f} GB; {tally.served:,} requests went by them and"
            f" saved {tally.measured_s:,.1f} s ({tally.predicted_s:,.1f} s predicted)",
        )
    moved = [(use.moved_bytes, name) for name, use in report.links.items() if use.moved_bytes]
    for size_bytes, name in sorted(moved, reverse=True)[:_LINKS_SHOWN]:
        facts.add_row(f"over {name}", f"{size_bytes / 1e9:,.1f} GB")
    if len(moved) > _LINKS_SHOWN:
        facts.add_row("further links", f"{len(moved) - _LINKS_SHOWN}, see --json")
    for reason, count in report.fallbacks.items():
        facts.add_row("fallback", f"{count:,} × {reason}")
    console.print(facts)
    console.print(_engine_table(report))
    for kind, count in report.faults.items():
        console.print(f"{count} × {kind}", markup=False)


def figures(report: SimReport) -> Iterator[tuple[str, str, str, object]]:
    """A line per figure of the report: its table, what it is of, its name, its value."""
    yield "table", "of", "figure", "value"
    for table, values in msgspec.to_builtins(report).items():
        if isinstance(values, tuple):  # engines, each with its name
            for row in values:
                yield from _figures(table, row.pop("name"), row)
        elif isinstance(values, dict):
            yield from _figures(table, "", values)
        else:
            yield "run", "", table, values


def _figures(table: str, of: str, values: dict[str, Any]) -> Iterator[tuple[str, str, str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _figures(table, f"{of} {name}".strip(), value)
        else:
            yield table, of, name, value


def _tier_rows(report: SimReport, facts: Table) -> None:
    """What the agents of all nodes moved, hold in the end, and dropped."""
    moved: Counter[str] = Counter()
    held: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for use in report.agents.values():
        moved.update(use.moved_bytes)
        held.update(use.held_bytes)
        dropped.update(use.counts)
    for path, size_bytes in sorted(moved.items()):
        facts.add_row(f"moved, {path}", f"{size_bytes / 1e9:,.1f} GB")
    for tier, size_bytes in sorted(held.items()):
        facts.add_row(f"held in the end, {tier}", f"{size_bytes / 1e9:,.1f} GB")
    for reason, count in dropped.most_common(8):
        facts.add_row("agents counted", f"{count:,} × {reason}")


def _mean(total_s: float, count: int) -> str:
    return seconds(total_s / count if count else None)


def _engine_table(report: SimReport) -> Table:
    table = Table()
    for name in ("engine", "requests", "prompt tokens", "hit", "tokens out", "evicted", "busy"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for load in report.engines:
        share = load.hit_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
        table.add_row(
            load.name if load.role == "combined" else f"{load.name} ({load.role})",
            f"{load.requests:,}",
            f"{load.prompt_tokens:,}",
            f"{share:.1%}",
            f"{load.output_tokens:,}",
            f"{load.evicted_blocks:,}",
            f"{load.busy:.0%}",
        )
    return table
