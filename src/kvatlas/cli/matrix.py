"""``kvatlas matrix``: is a shared cache worth it? Arrangements of the same devices × workloads."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kvatlas import __version__
from kvatlas.cli.output import (
    Assumption,
    check_outputs,
    csv_bytes,
    json_bytes,
    progress,
    table_console,
    write_files,
)
from kvatlas.cli.prices import add_price_options, device_prices, room_prices
from kvatlas.cli.trace_input import add_trace_options, opened
from kvatlas.config import size_bytes
from kvatlas.errors import ConfigError
from kvatlas.report.latency import Slo
from kvatlas.report.money import STORAGE, dollars_text
from kvatlas.report.statistics import Interval
from kvatlas.report.table import seconds
from kvatlas.sim.arrangements import ARRANGEMENTS, DEFAULT, Name, arranged, unpaired
from kvatlas.sim.cluster import Cluster, default_cluster, load_cluster, with_tiers
from kvatlas.sim.hit_curve import HitCurve, hit_curve
from kvatlas.sim.matrix import (
    SEEDS_MAX,
    Cell,
    Setup,
    Workload,
    cells,
    family,
    offered,
)
from kvatlas.sim.matrix import (
    run as run_matrix,
)
from kvatlas.sim.matrix_money import Prices
from kvatlas.sim.matrix_page import page
from kvatlas.sim.matrix_table import Advice, Row, advise, rows
from kvatlas.sim.tier_spec import TierSpec
from kvatlas.workload.presets import FAMILIES
from kvatlas.workload.trace import Trace

REQUESTS_MAX = 1_000_000
#: Options, what of the cluster's tiers they are, and what stands where nobody gives it.
_TIERS = (("dram", "dram_bytes", "1TB"), ("disk", "disk_bytes", ""),
          ("store", "object_bytes", "100TB"))  # fmt: skip
_FAMILIES = ("random", "shared-prompt", "multi-turn", "agent")

_EPILOG = """\
Every arrangement gets the same requests at the same times on the same devices; where engines are
split into prefill and decode, how many prefill is tried out first. Generated workloads are played
once per seed; a trace of yours is played once, as it is. Objectives that you do not give are
assumptions, and the result says so.

examples:
  kvatlas matrix                                    the four families on 8 × 2 H200
  kvatlas matrix --trace mooncake_conversation.jsonl.xz --families none
  kvatlas matrix --cluster cluster.toml --families agent --html matrix.html --json matrix.json

exit status: 0 every request was answered, 1 some were not, 2 the input is at fault
"""


class Result(msgspec.Struct, frozen=True):
    """The whole result, as JSON too."""

    version: str
    devices: int
    slo: Slo
    assumed: list[Assumption]
    loads: dict[str, float | None]
    advice: list[Advice]
    rows: list[Row]
    curves: dict[str, HitCurve]
    cells: list[Cell]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "matrix",
        description="Simulate arrangements of the same devices under the same workloads.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_trace_options(parser, name="--trace", seeds="claude-code: of the starts of sessions")
    add("--families", default=",".join(_FAMILIES), metavar="LIST", help="%(default)s; or none")
    add("--requests", type=int, metavar="N", help="of each workload (2,000; a trace: all)")
    add("--seeds", type=int, default=5, metavar="N", help="of each family (%(default)s)")
    add("--load", type=float, default=0.8, metavar="X", help="of families: engine seconds asked "
        "per second and engine, were nothing cached (%(default)s)")  # fmt: skip
    add("--time-scale", type=float, default=1.0, metavar="X", help="multiply the trace's times (1)")
    add("--cluster", type=Path, metavar="FILE", help="cluster.toml, as for kvatlas sim and plan")
    add("--engines", type=int, metavar="N", help="engines of the default cluster (8)")
    add("--arrangements", default=",".join(DEFAULT), metavar="LIST",
        help=f"of {', '.join(ARRANGEMENTS)} (%(default)s)")  # fmt: skip
    add("--prefill", type=int, default=0, metavar="N", help="prefill engines of P/D (the "
        "file's roles, or tried out)")  # fmt: skip
    add("--dram", metavar="SIZE", help="host memory for KV, per node (the file's [tiers], or 1TB)")
    add("--disk", metavar="SIZE", help="disks below it, per node (the file's, or none)")
    add("--store", metavar="SIZE", help="of the distributed store (the file's, or 100TB)")
    add("--slo-ttft-s", type=float, metavar="S", help="objective: time to first token (2)")
    add("--slo-tpot-s", type=float, metavar="S", help="objective: time per output token (0.05)")
    add_price_options(parser, tuple(STORAGE))
    add("--processes", type=int, default=min(8, os.cpu_count() or 1), metavar="N",
        help="runs at a time (%(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write rows and cells as JSON")
    add("--csv", type=Path, metavar="FILE", help="write a line per cell")
    add("--html", type=Path, metavar="FILE", help="write the report as one page")
    add("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_outputs(args, ("json", "csv", "html"), args.trace, args.cluster)
    names = _arrangements(args.arrangements)
    setup, assumed = _setup(args)
    workloads = _workloads(args, setup)
    with progress("runs", cells(setup, workloads, names), quiet=args.quiet) as on_cell:
        found = run_matrix(setup, workloads, names, processes=args.processes, on_cell=on_cell)
    result = Result(
        version=__version__,
        devices=setup.cluster.devices(),
        slo=setup.slo,
        assumed=assumed,
        loads={workload.name: workload.load for workload in workloads},
        advice=[advise(found, workload.name, names) for workload in workloads],
        rows=rows(found),
        curves={workload.name: _curve(setup, workload) for workload in workloads},
        cells=found,
    )
    try:
        write_files(
            ("--json", args.json, lambda: json_bytes(result)),
            ("--csv", args.csv, lambda: csv_bytes(table(found))),
            ("--html", args.html, lambda: _page(result, setup.cluster).encode()),
        )
    finally:
        show(result, table_console(150))
    return 1 if any(cell.figures["failed"] for cell in found) else 0


def _arrangements(text: str) -> list[Name]:
    names = [name.strip() for name in text.split(",")]
    chosen = [name for name in ARRANGEMENTS if name in names]
    unknown = set(names) - set(ARRANGEMENTS)
    if unknown or not chosen:
        raise ConfigError(
            f"--arrangements {text!r}: unknown: {', '.join(sorted(unknown)) or 'none named'}: use "
            f"{', '.join(ARRANGEMENTS)}"
        )
    return chosen


def _setup(args: argparse.Namespace) -> tuple[Setup, list[Assumption]]:
    """What all cells share, and what of it nobody gave."""
    assumed = []
    slo = {}
    for name, otherwise in (("slo_ttft_s", 2.0), ("slo_tpot_s", 0.05)):
        value = getattr(args, name)
        if value is None:
            assumed.append(Assumption(f"--{name.replace('_', '-')}", f"{otherwise:g} s", "default"))
        elif not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: seconds above 0 are needed")
        slo[name] = otherwise if value is None else value
    cluster, prefill, said = _cluster(args)
    assumed += said
    prices, said = _prices(args, cluster)
    objectives = Slo(slo["slo_ttft_s"], slo["slo_tpot_s"])
    return Setup(cluster, objectives, prices, prefill), [*assumed, *said]


def _cluster(args: argparse.Namespace) -> tuple[Cluster, int, list[Assumption]]:
    """Engines, with all tiers below them; how many of the first prefill where that is given."""
    assumed = []
    if args.cluster is None:
        cluster = default_cluster(engines=8 if args.engines is None else args.engines)
        assumed.append(Assumption("--cluster", f"{len(cluster.members)} engines of two H200 each, "
                                  "DeepSeek V4 Flash", "default"))  # fmt: skip
    elif args.engines is not None:
        raise ConfigError(
            "--engines: the number of engines is in the cluster's file: leave one out"
        )
    else:
        cluster = load_cluster(args.cluster)
    tiers, said = _tiers(args, cluster)
    where = "the default cluster" if args.cluster is None else str(args.cluster)
    cluster, prefill = unpaired(with_tiers(cluster, tiers, lambda _: where))
    if prefill and args.prefill:
        raise ConfigError(
            f"--prefill: which engines prefill is in {args.cluster}: leave one of the two out"
        )
    return cluster, prefill or args.prefill, [*assumed, *said]


def _tiers(args: argparse.Namespace, cluster: Cluster) -> tuple[TierSpec, list[Assumption]]:
    """As the options say, else the cluster's file."""
    given, assumed = cluster.tiers, []
    sizes: dict[str, int] = {}
    for name, field, otherwise in _TIERS:
        text = getattr(args, name)
        size = 0 if given is None else getattr(given, field)
        if text is None and not size and otherwise:
            text = otherwise
            assumed.append(Assumption(f"--{name}", otherwise, "default"))
        try:
            sizes[field] = size if text is None else size_bytes(text)
        except ConfigError as error:
            raise ConfigError(f"--{name}: {error}") from error
    if given is None:
        return TierSpec(sizes["dram_bytes"], sizes["disk_bytes"], sizes["object_bytes"]), assumed
    return msgspec.structs.replace(given, **sizes), assumed


def _prices(args: argparse.Namespace, cluster: Cluster) -> tuple[Prices, list[Assumption]]:
    devices = [(m.spec.device, m.spec.devices) for m in cluster.members]
    by_name, assumed = device_prices([d for d, _ in devices if d is not None], args.gpu_hour)
    disks = cluster.tiers is not None and cluster.tiers.disk_bytes
    tiers = [tier for tier in STORAGE if tier != "disk" or disks]
    room, said = room_prices(args, tiers)
    hours = tuple(
        by_name[device.name].dollars_per_gpu_hour * count
        for device, count in devices
        if device is not None
    )
    return Prices(hours, room), [*assumed, *said]


def _curve(setup: Setup, workload: Workload) -> HitCurve:
    """Of its first seed, on the engines with everything below them."""
    below = arranged(setup.cluster, "combined-store", 0)
    return hit_curve(workload.make(0), below, workload.requests)


def _workloads(args: argparse.Namespace, setup: Setup) -> list[Workload]:
    if args.requests is not None and not 1 <= args.requests <= REQUESTS_MAX:
        raise ConfigError(f"--requests {args.requests}: 1 to {REQUESTS_MAX:,} are possible")
    if not 1 <= args.seeds <= SEEDS_MAX:
        raise ConfigError(f"--seeds {args.seeds}: 1 to {SEEDS_MAX} are possible")
    if not (math.isfinite(args.load) and 0 < args.load <= 100):
        raise ConfigError(f"--load {args.load:g}: a number above 0, up to 100, is needed")
    if not (math.isfinite(args.time_scale) and args.time_scale > 0):
        raise ConfigError(f"--time-scale {args.time_scale:g}: a number above 0 is needed")
    workloads = []
    for name in [] if args.families == "none" else args.families.split(","):
        shape = FAMILIES.get(name.strip())
        if shape is None or name.strip() not in _FAMILIES:
            raise ConfigError(f"--families {name!r}: use {', '.join(_FAMILIES)}, or none")
        shape = msgspec.structs.replace(shape, requests=args.requests or 2000)
        workloads.append(family(name.strip(), shape, setup, args.load, args.seeds))
    if args.trace is not None:
        workloads.append(_traced(args, setup))
    if not workloads:
        raise ConfigError("nothing to play: name a family, or give --trace FILE")
    return workloads


def _traced(args: argparse.Namespace, setup: Setup) -> Workload:
    trace = opened(args)
    # Counting also finds faults of the file before anything is simulated.
    limit = sum(1 for _ in itertools.islice(trace, args.requests))
    if not limit:
        raise ConfigError(f"{args.trace}: no requests in it")
    load = offered(setup, trace, limit, args.time_scale)
    make = functools.partial(_opened, args)
    return Workload(args.trace.name, make, limit, 0, load, args.time_scale)


def _opened(args: argparse.Namespace, _seed: int) -> Trace:
    return opened(args)


# -- what is shown ------------------------------------------------------------------------------


def show(result: Result, console: Console) -> None:
    """The matrix for people: the advice first."""
    for advice in result.advice:
        console.print(advice.sentence, markup=False)
    for workload, load in result.loads.items():
        console.print(_times(result, workload, load))
        console.print(_costs(result, workload))
    for assumed in result.assumed:
        console.print(f"assumed: {assumed.text()}", markup=False)


_TIMES = ("ttft_p50", "ttft_p95", "ttft_p99", "tpot_p50", "tpot_p95", "e2e_p95")


def _times(result: Result, workload: str, load: float | None) -> Table:
    """What users feel."""
    asked = "" if load is None else f", load {load:.2f}"
    made = Table(title=f"{workload}{asked}", title_justify="left")
    made.add_column("arrangement")
    for name in ("TTFT p50", "p95", "p99", "TPOT p50", "p95", "E2E p95", "goodput/s", "met"):
        made.add_column(name, justify="right")
    for row in result.rows:
        if row.workload == workload:
            made.add_row(
                row.title,
                *(_time(row.figures[f"{name}_s"]) for name in _TIMES),
                _mean(row.figures["goodput_per_s"], "{:.2f}".format),
                _mean(row.figures["attained"], "{:.1%}".format),
            )
    return made


_COSTS: dict[str, Callable[[float], str]] = {
    "gpu_s_saved_per_hit": "{:.3g} s".format,
    "dollars_per_million": dollars_text,
    "busy_dollars_per_million": dollars_text,
    "good_dollars_per_million": dollars_text,
}


def _costs(result: Result, workload: str) -> Table:
    """Where the prompt's tokens came from, and what all of them cost."""
    made = Table(caption="GPU: seconds saved per hit. $/M: per million tokens; of busy engines "
                 "alone; of tokens that met the objectives.", caption_justify="left")  # fmt: skip
    made.add_column("arrangement")
    for name in ("hbm", "lower tiers", "computed", "GPU/hit", "$/M", "busy", "met", "prefill"):
        made.add_column(name, justify="right")
    for row in result.rows:
        if row.workload == workload:
            share = row.token_share
            below = sum(share.get(tier, 0.0) for tier in ("dram", "disk", "object", "peer"))
            made.add_row(
                row.title,
                f"{share.get('hbm', 0.0):.1%}",
                f"{below:.1%}",
                f"{share.get('recomputed', 0.0):.1%}",
                *(_mean(row.figures[name], shown) for name, shown in _COSTS.items()),
                str(row.prefill_engines or ""),
            )
    return made


def _mean(value: Interval | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value.mean)


def _time(value: Interval | None) -> str:
    """A mean, and how far the interval goes to the side that is farther."""
    if value is None:
        return "-"
    if value.low is None or value.high is None:
        return seconds(value.mean)
    off = max(value.mean - value.low, value.high - value.mean) / value.mean
    return f"{seconds(value.mean)} ±{off:.0%}"


def table(found: Sequence[Cell]) -> Iterator[list[object]]:
    """A line per cell: figures, hit tokens by tier, bytes moved."""
    tiers = sorted({tier for cell in found for tier in cell.hit_tokens})
    moves = sorted({move for cell in found for move in cell.moved_bytes})
    names = list(found[0].figures)
    yield [
        *("workload", "arrangement", "seed", "prefill_engines", *names, "prompt_tokens"),
        *(f"hit_tokens_{tier}" for tier in tiers),
        *("recomputed_tokens", "unserved_tokens", "output_tokens"),
        *(f"bytes_{move.replace(' ', '_')}" for move in moves),
    ]
    for cell in found:
        yield [
            *(cell.workload, cell.arrangement, cell.seed, cell.prefill_engines),
            *(cell.figures[name] for name in names),
            cell.prompt_tokens,
            *(cell.hit_tokens.get(tier, 0) for tier in tiers),
            *(cell.recomputed, cell.unserved, cell.output_tokens),
            *(cell.moved_bytes.get(move, 0) for move in moves),
        ]


def _page(result: Result, cluster: Cluster) -> str:
    about = f"kvatlas {result.version}, simulated: {result.devices} devices in all."
    guessed = [each.text() for each in result.assumed]
    found = result.advice, result.rows, result.cells
    return page(about, guessed, *found, cluster=cluster, curves=result.curves)
