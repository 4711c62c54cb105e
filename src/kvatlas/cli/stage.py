"""``kvatlas validate stage a|b|c|d|e``: the staged proof of a cluster."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from rich.console import Console

from kvatlas.cli.ending import run_until_ended
from kvatlas.cli.output import check_output, print_json, write_files
from kvatlas.cli.output import status as progress
from kvatlas.errors import ConfigError
from kvatlas.validate.stages import report
from kvatlas.validate.stages.cluster import run_cluster
from kvatlas.validate.stages.judge_e import CHANGES
from kvatlas.validate.stages.result import Result, Unwritten, path_of
from kvatlas.validate.stages.run import Order, run_stage
from kvatlas.validate.stages.stagefile import load_stage_file
from kvatlas.validate.stages.values import STAGES, TITLES, Stage

_FOLDER = Path("stages")

_EPILOG = (
    """\
stages, each of which needs that the one before it passed:
"""
    + "".join(f"  {stage}  {TITLES[stage]}\n" for stage in STAGES)
    + """\

examples:
  kvatlas validate stage a --file combined.toml --out proof
  kvatlas validate stage b --file pair.toml --out proof
  kvatlas validate stage e --file fp8.toml --out proof --change fp8-kv
  kvatlas validate stage d --cpu-cluster --out proof     A to D on engines of its own, on this CPU

It writes stage-X.json, .md and .html into the folder. Exit status: 0 passed, 1 not passed, 2 the
stage could not begin or its result could not be written, 130 interrupted: hooks that undo were run.
"""
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``kvatlas validate stage`` and its options."""
    parser = commands.add_parser(
        "stage",
        help="the staged proof of a cluster: Combined, P/D, host memory, store, optimisations",
        description="Shows, point by point and with its evidence, that a running cluster does what"
        " is asked of it at this stage. Each point ends as pass, fail, not shown, or not applicable"
        " where its operator declared that.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("stage", choices=STAGES, help="which")
    add("--file", type=Path, metavar="FILE", help="stage file: the parts of the cluster")
    add("--out", type=Path, default=_FOLDER, metavar="DIR", help=f"results ({_FOLDER})")
    add("--change", choices=tuple(CHANGES), default="", help="of stage e: what was switched on")
    add(
        "--against",
        type=Path,
        metavar="FILE",
        help="of stage e: the result beside which it is measured (stage d's)",
    )
    add("--json", action="store_true", help="print JSON, one result after another")
    add(
        "--cpu-cluster",
        action="store_true",
        help="all stages up to this one, d at most, on engines that are started for it: vLLM on"
        " this machine's CPU with a tiny model, agents, Valkey",
    )
    add(
        "--venv",
        type=Path,
        default=Path(".venv-vllm"),
        help="of --cpu-cluster: virtual environment with vLLM and NIXL (.venv-vllm)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 where the stage passed, 1 where it did not."""
    if bool(args.change) != (args.stage == "e"):
        raise ConfigError("--change goes with stage e, and stage e with --change")
    if args.against and args.stage != "e":
        raise ConfigError("--against goes with stage e")
    if args.cpu_cluster:
        return _on_cpu(args)
    if args.file is None:
        raise ConfigError("--file is needed: where the parts of the cluster are")
    file = load_stage_file(args.file)
    _check_folder(args, args.stage)
    order = Order(args.stage, args.out, args.change, args.against)
    try:
        result = run_until_ended(run_stage(order, file, say=_say))
    except Unwritten as error:
        raise _still_told(error, args) from None
    return told(result, args.out, as_json=args.json)


def _on_cpu(args: argparse.Namespace) -> int:
    if args.file is not None or args.stage == "e":
        raise ConfigError("--cpu-cluster starts a cluster for stages a to d: no --file, no stage e")
    _check_folder(args, *STAGES[: STAGES.index(args.stage) + 1])
    status = 0
    try:
        for result in run_cluster(args.stage, args.out, venv=args.venv, tell=progress, say=_say):
            progress()
            status = told(result, args.out, as_json=args.json)
    except Unwritten as error:
        raise _still_told(error, args) from None
    return status


def _check_folder(args: argparse.Namespace, *stages: Stage) -> None:
    """Before a run of minutes: that its results have a place. Raises ConfigError."""
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {args.out}: no folder: {error.strerror or error}") from error
    for stage in stages:
        for kind in (".json", ".md", ".html"):
            path = path_of(args.out, stage, args.change).with_suffix(kind)
            check_output("--out", path, args.file, args.against)


def _still_told(error: Unwritten, args: argparse.Namespace) -> Unwritten:
    """What could not be kept is shown all the same."""
    with contextlib.suppress(ConfigError):
        told(error.result, args.out, as_json=args.json)
    return error


def _say(text: str) -> None:
    print(f"kvatlas: {text}", file=sys.stderr, flush=True)


def told(result: Result, folder: Path, *, as_json: bool) -> int:
    """Write the reports of a result and print it, which it is in any case; the exit status."""
    path = path_of(folder, result.stage, result.change)
    try:  # files first: whoever reads the lines may be gone
        write_files(
            ("--out", path.with_suffix(".md"), lambda: report.markdown(result).encode()),
            ("--out", path.with_suffix(".html"), lambda: report.page(result).encode()),
        )
    finally:
        if as_json:
            print_json(result)
        else:
            report.show(result, Console(highlight=False))
    return 0 if result.passed else 1
