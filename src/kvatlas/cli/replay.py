"""``kvatlas validate replay``: a recorded gateway decides again, and must decide the same."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvatlas.cli.output import print_json
from kvatlas.core.router import Decision
from kvatlas.validate.replay import Replay, replay

_EPILOG = """\
to record, give the gateway a file (only its owner can read it: it holds token ids):
  [router]
  recording = "gateway.kvr"

examples:
  kvatlas validate replay gateway.kvr
  kvatlas validate replay gateway.kvr --json
"""
_SHOWN = 5


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``kvatlas validate replay`` and its options."""
    parser = commands.add_parser(
        "replay",
        help="a recorded gateway decides again: every price and every order must be the same",
        description="Gives the inputs of a recording to a fresh directory and router, and compares "
        "every decision with the recorded one, to the last digit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recording", type=Path, help="what router.recording wrote")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 where every decision came out again, 1 otherwise."""
    result = replay(args.recording)
    if args.json:
        print_json(result)
    else:
        print(report(result))
    return 1 if result.different else 0


def report(result: Replay) -> str:
    """The result as lines for a reader."""
    inputs = ", ".join(f"{count} {kind}" for kind, count in sorted(result.inputs.items()))
    lines = [
        f"recorded by kvatlas {result.version} over {result.duration_s:.1f} s: {inputs}",
        f"decisions {result.decisions}: the same {result.decisions - result.different},"
        f" different {result.different}",
    ]
    for difference in result.differences[:_SHOWN]:
        lines.append(f"  request {difference.recorded.id}")
        lines.append(f"    recorded {_plans(difference.recorded)}")
        lines.append(f"    now      {_plans(difference.replayed)}")
    return "\n".join(lines)


def _plans(decision: Decision) -> str:
    return ", ".join(
        f"{p.publisher} {p.price.total_s:.6f} s from {p.expected_tokens}" for p in decision.plans
    )
