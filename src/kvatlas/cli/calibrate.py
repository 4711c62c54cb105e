"""``kvatlas validate calibrate``: fit the time model to measurements, judge it on others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvatlas.cli.output import check_output, print_json, table_console, write_file
from kvatlas.errors import ConfigError
from kvatlas.validate.calibrate import (
    UNHIDDEN,
    Error,
    RunReport,
    TableErrors,
    TableReport,
    calibrate_runs,
    calibrate_tables,
    device_figures,
)
from kvatlas.validate.calibrate_runs import read_run
from kvatlas.validate.calibrate_tables import Row, read_table
from kvatlas.workload.profiles import profile_text

_EPILOG = """\
DATA is either
  folders   each a run of one engine: requests.jsonl (queued_ts, first_token_ts, last_token_ts,
            ...) and meta.json. The first is fitted on its first requests; its rest and the other
            folders are judged
  tables    .csv or .csv.xz of TTFT and TPOT by model, GPU and concurrency. The first is split;
            the others are only judged

examples:
  kvatlas validate calibrate runs/RTX-4090 runs/RTX-PRO-6000 --prompts sharegpt.jsonl.xz
  kvatlas validate calibrate silicon.csv.xz cookbook.csv --seed 2 --out profile.toml
  kvatlas stub-engine --device-file profile.toml --device RTX-4090-fitted
"""


_WIDTH = 132  # of a table that goes to a file


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``kvatlas validate calibrate`` and its options."""
    parser = commands.add_parser(
        "calibrate",
        help="fit the time model to measurements; its error on others that were not fitted",
        description="Fits what an engine reaches of a device (a handful of figures) and prints the "
        "error on measurements that were not fitted, with its spread.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("data", nargs="+", type=Path, metavar="DATA", help="folders of runs, or tables")
    add("--prompts", type=Path, metavar="FILE", help="token ids of a run's prompts, one a line")
    add("--device", default="", help="of the runs (default: found in the folders' paths)")
    add(
        "--fit-requests",
        type=int,
        default=100,
        metavar="N",
        help="requests of the first run that are fitted (100)",
    )
    add(
        "--fit-share",
        type=float,
        default=0.5,
        metavar="X",
        help="share of a table's settings that is fitted (0.5)",
    )
    add("--hold-out", action="store_true", help="tables: also judge models and GPUs never fitted")
    add("--seed", type=int, default=1, help="of the split and of the spread (1)")
    add("--out", type=Path, metavar="FILE", help="write the fitted profiles as TOML")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0; the errors are the result, not a verdict."""
    check_output("--out", args.out, *args.data, args.prompts)
    folders = [path for path in args.data if path.is_dir()]
    if folders and len(folders) < len(args.data):
        raise ConfigError("DATA: give folders of runs or tables, not both at once")
    if not 0 < args.fit_share < 1:
        raise ConfigError(f"--fit-share {args.fit_share:g}: above 0 and below 1 is needed")
    report: RunReport | TableReport = _runs(args) if folders else _tables(args)
    if args.json:
        print_json(report)
    elif isinstance(report, RunReport):
        show_runs(report, table_console(_WIDTH))
    else:
        show_tables(report, table_console(_WIDTH))
    if args.out:
        write_file("--out", args.out, profiles(report).encode())
    return 0


def _runs(args: argparse.Namespace) -> RunReport:
    runs = [read_run(path, args.prompts, device=args.device) for path in args.data]
    if len({r.device for r in runs}) < len(runs):
        raise ConfigError("DATA: two runs are of one device: give each device once")
    shortest = min(len(r.requests) for r in runs)
    if not 2 <= args.fit_requests < shortest:
        raise ConfigError(f"--fit-requests {args.fit_requests}: 2 to {shortest - 1} are possible")
    print(f"fitting {len(runs)} runs, some 45 times the engine model each", file=sys.stderr)
    return calibrate_runs(runs, fit_requests=args.fit_requests, seed=args.seed)


def _tables(args: argparse.Namespace) -> TableReport:
    first, *others = [read_table(path) for path in args.data]
    if len({row.setting() for row in first.rows}) < 4:
        raise ConfigError(f"{args.data[0]}: too few settings to fit some and judge others")
    extra: list[Row] = [row for table in others for row in table.rows]
    left_out = dict(first.left_out)
    for table in others:
        for reason, count in table.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + count
    return calibrate_tables(
        first.rows,
        extra,
        seed=args.seed,
        share=args.fit_share,
        hold_out=args.hold_out,
        left_out=left_out,
    )


def profiles(report: RunReport | TableReport) -> str:
    """The fitted figures as ``[[device]]`` tables."""
    parts = []
    if isinstance(report, RunReport):
        for name, figures in report.parameters.items():
            fitted = {**device_figures(figures), "unhidden": UNHIDDEN}
            comment = f"Fitted on the first {report.fitted_requests} requests of a run on {name}."
            parts.append(profile_text(f"{name}-fitted", name, fitted, comment=comment))
        return "\n".join(parts)
    for family, figures in report.parameters.items():
        if len(words := family.split()) == 4:  # model, device, engine, precision
            like = words[1]
            comment = (
                f"Fitted on a part of a table, seed {report.seed}. Beside it: "
                f"{figures['first_token_s'] * 1e3:.0f} ms to the engine and back."
            )
            name = family.replace(" ", "-")
            parts.append(profile_text(name, like, device_figures(figures), comment=comment))
    return "\n".join(parts)


# For a reader ----------------------------------------------------------------------------------


def _signed(error: Error) -> str:
    return f"{100 * error.value:+.1f} ({100 * error.low:+.1f} {100 * error.high:+.1f})"


def _absolute(error: Error) -> str:
    return f"{100 * error.value:.1f} ({100 * error.low:.1f} {100 * error.high:.1f})"


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def show_runs(report: RunReport, console: Console) -> None:
    """Parameters, and errors by device, part and where the parameters come from."""
    for device, figures in report.parameters.items():
        told = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
        console.print(f"{device}, first {report.fitted_requests} requests: {told}")
    left = ("device", "part", "parameters of")
    table = _table(
        "error of the model in % of the measured (5 to 95 % of resamples)",
        left,
        ("measured", "mean", "median", "p90"),
    )
    for name, unit in (("TTFT", 1.0), ("TPOT", 1e3)):
        for e in report.judged:
            ttft = name == "TTFT"
            mean = (e.ttft_mean_s if ttft else e.tpot_mean_s) * unit
            errors = (
                (e.ttft_mean, e.ttft_median, e.ttft_p90)
                if ttft
                else (e.tpot_mean, e.tpot_median, e.tpot_p90)
            )
            table.add_row(
                e.device,
                f"{e.part} {e.requests}",
                e.how,
                f"{name} {mean:.3g} {'s' if ttft else 'ms'}",
                *(_signed(error) for error in errors),
            )
    console.print(table)


def show_tables(report: TableReport, console: Console) -> None:
    """Median errors in all and by family, and what is left out."""
    table = _table(
        f"median absolute error in %, seed {report.seed}, {report.fitted_rows} rows fitted"
        " (5 to 95 % of resamples)",
        ("rows",),
        ("n", "settings", "TTFT", "TPOT"),
    )
    whole: list[TableErrors] = [report.judged]
    whole += [report.unseen] if report.unseen else []
    for errors in (*whole, *report.families, *report.extra):
        table.add_row(
            errors.name,
            str(errors.rows),
            str(errors.settings),
            _absolute(errors.ttft),
            _absolute(errors.tpot),
        )
    table.add_row("aiconfigurator 0.12, its own rows", "", "", "45", "13")
    console.print(table)
    for reason, count in report.left_out.items():
        console.print(f"not judged: {count} rows: {reason}")
