"""``kvatlas trace``: look at request traces, make them, hide what they tell, convert them."""

from __future__ import annotations

import argparse
import importlib

# Each module has `add_parser(subparsers)` and `run(args) -> int`, as in cli/main.py.
COMMANDS = ("trace_stats", "trace_hit_rate", "trace_compare", "trace_generate", "trace_convert")

_EPILOG = """\
examples:
  kvatlas trace stats mooncake_conversation.jsonl.xz
  kvatlas trace COMMAND --help     options of one command, with examples

formats, told apart by their first line: see the page "Traces" of the documentation
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "trace",
        description="Request traces: what they are like, new ones by seed, other forms of them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"kvatlas.cli.{name}").add_parser(commands)
