"""``kvatlas validate``: is what kvatlas says of an engine what that engine then does?"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from kvatlas.cli import calibrate, exactness, isolation, parity, replay, stage
from kvatlas.connectors.vllm_direct import DirectVllm
from kvatlas.errors import ConfigError
from kvatlas.validate.predictions import Outcome
from kvatlas.validate.results import Summary, extend, summary
from kvatlas.validate.tiny import TINY, tiny

_EPILOG = """\
examples:
  kvatlas validate predictions --model gqa --requests 500 --out gqa.jsonl
  kvatlas validate predictions --model v4 --engine-path tests/engines/vllm_v4_shim \\
      --requests 500 --seed 3 --out v4.jsonl       run it again to go on after an interruption
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``kvatlas validate`` and its own sub-commands."""
    parser = subparsers.add_parser(
        "validate",
        description="Validation on real engines.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_predictions(commands)
    exactness.add_parser(commands)
    calibrate.add_parser(commands)
    replay.add_parser(commands)
    parity.add_parser(commands)
    isolation.add_parser(commands)
    stage.add_parser(commands)


def _add_predictions(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "predictions",
        help="predicted resume positions against the cached tokens that vLLM reports",
        description="Runs random request sequences (shared prefixes, junctions, next turns, "
        "evictions, resets, restarts) on a real vLLM with a tiny model. Before each request the "
        "directory predicts its resume position from the engine's events alone.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, choices=[m.name for m in TINY])
    parser.add_argument("--requests", type=int, default=500, help="default: 500")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--out", type=Path, required=True, help="results, one sequence a line")
    exactness.add_engine_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 where every prediction was exact, 1 otherwise."""
    if args.requests < 1:
        raise ConfigError("--requests must be at least 1")
    exactness.require_vllm(args.venv)
    path = exactness.engine_path(args, v4=args.model == "v4")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "vllm.log"
        with DirectVllm(args.venv, name="vllm", log=log, path=path) as engine:
            outcomes = extend(
                args.out,
                tiny(args.model),
                seed=args.seed,
                requests=args.requests,
                engine=engine,
                told=_tell,
            )
    total = summary(outcomes)
    print(report(total))
    return 0 if total.exact == total.requests else 1


def _tell(outcome: Outcome) -> None:
    print(
        f"sequence {outcome.sequence}: {outcome.exact()} of {len(outcome.predicted)} exact,"
        f" {outcome.false_hits()} false hits",
        file=sys.stderr,
        flush=True,
    )


def report(total: Summary) -> str:
    """The summary as lines for a reader."""
    steps = ", ".join(f"{count} {name}" for name, count in total.steps.items())
    events = ", ".join(f"{count} {name}" for name, count in total.applied.items())
    return (
        f"requests {total.requests}: exact {total.exact}, false hits {total.false_hits},"
        f" under-predicted {total.under}\n"
        f"hits {total.hits}, {total.reported_tokens} tokens cached\n"
        f"steps: {steps}\n"
        f"events: {events}"
    )
