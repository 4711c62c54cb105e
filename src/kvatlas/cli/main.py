"""The ``kvatlas`` command: one sub-command per module of this package."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from kvatlas import __version__
from kvatlas.errors import KvatlasError

# Each module has `add_parser(subparsers)`, which sets ``run`` on its parser, and
# `run(args) -> int`, the exit status. The order is that of ``kvatlas --help``.
COMMANDS = (
    "serve",
    "agent",
    "explain",
    "stub_engine",
    "load",
    "trace",
    "sim",
    "layout",
    "devices",
    "directory",
    "demo",
    "validate",
    "study",
)

EXIT_FAULT = 2
EXIT_INTERRUPTED = 130

_EPILOG = """\
try first:
  kvatlas stub-engine --count 8 --port 9100 --layout deepseek-v4-flash
  kvatlas load --trace trace.jsonl --target http://127.0.0.1:9100
  kvatlas COMMAND --help     options of one command, with examples

exit status: 0 done, 1 done but with failures, 2 the input is at fault, 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands, each with its own help."""
    parser = argparse.ArgumentParser(
        prog="kvatlas",
        description="Scheduling and lifecycle for the KV cache of LLM serving clusters: every "
        "request goes where its KV can really be resumed at the lowest price in seconds.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvatlas {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"kvatlas.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    try:
        args = build_parser().parse_args(argv)  # imports every command: the longest part of most
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except KvatlasError as error:
        print(f"kvatlas: {error}", file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has left: nothing more to say
        return EXIT_FAULT
    except OSError as error:  # of what is our own, a full disk under stdout; files name themselves
        print(f"kvatlas: {error}", file=sys.stderr)
        sys.stdout = None  # what is left in it cannot be written at the end either
        return EXIT_FAULT


if __name__ == "__main__":
    sys.exit(main())
