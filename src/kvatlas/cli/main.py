"""The ``kvatlas`` command: one sub-command per module of this package."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvatlas import __version__
from kvatlas.errors import KvatlasError

# What ``kvatlas --help`` lists. Each command's module (``-`` is ``_`` in its name) has
# `add_parser(subparsers)`, which sets ``run`` on its parser, and `run(args) -> int`, the exit
# status.
COMMANDS = {
    "serve": "the gateway: one URL, every request to the engine that can resume most of it",
    "agent": "owns a node's memory and disk for KV state, and serves its engines",
    "explain": "every candidate of one routed request with its price, and why it lost",
    "stub-engine": "engines without a model: OpenAI's interface, KV events, a real cache's "
    "behaviour",
    "load": "replay a trace against a URL: TTFT, TPOT, ITL, E2E, goodput, hit tokens",
    "bench": "live load on several configurations in turn: intervals, differences, the knee",
    "trace": "request traces: figures, generators, conversion, anonymising",
    "sim": "play a trace on a simulated cluster: latencies, hits, loads, before it is bought",
    "matrix": "is a shared cache worth it: arrangements of the same devices under many workloads",
    "plan": "what tokens cost, what a hit saves, which tier pays for itself, from where on",
    "observe": "in front of or beside another router: what kvatlas would have gained there",
    "layout": "what a model's KV state consists of, and what it weighs",
    "devices": "accelerators and links that the time model knows",
    "directory": "what is cached where, asked from a running gateway",
    "keys": "the keys that tenants' state is sealed with at rest: make, list, rotate, drop",
    "transports": "what pairs hand over, how fast, and over what, asked from a running gateway",
    "tenant": "who the tenants are, by which keys, and what they may hold",
    "doctor": "canaries through a running cluster: what is wrong in it, and what to change",
    "certs": "certificates by which the parts of a cluster know each other",
    "demo": "real engines on this CPU: round robin against kvatlas, side by side",
    "validate": "compare what kvatlas says of a real engine with what that engine does",
    "study": "measure on a trained model what a policy assumes of its KV",
}

EXIT_FAULT = 2
EXIT_INTERRUPTED = 130

_EPILOG = """\
try first:
  kvatlas stub-engine --count 8 --port 9100 --layout deepseek-v4-flash
  kvatlas load --trace trace.jsonl --target http://127.0.0.1:9100
  kvatlas COMMAND --help     options of one command, with examples

exit status: 0 done, 1 done but with failures, 2 the input is at fault, 130 interrupted
"""


class _Parser(argparse.ArgumentParser):
    """One line for a wrong word, as for any other fault; the pages of options are in --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_FAULT, f"{self.prog}: {message} ({self.prog} --help)\n")


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]
    """Imports a command's module when that command is asked for: all of them take half a second."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name: str = values[0]
        del self.choices[name]  # what was only listed gives way to the parser with its options
        importlib.import_module(f"kvatlas.cli.{name.replace('-', '_')}").add_parser(self)
        super().__call__(parser, namespace, values, option_string)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each gets its options when it is chosen."""
    parser = _Parser(
        prog="kvatlas",
        description="Scheduling and lifecycle for the KV cache of LLM serving clusters: every "
        "request goes where its KV can really be resumed at the lowest price in seconds.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvatlas {__version__}")
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, action=_Commands
    )
    for name, line in COMMANDS.items():
        subparsers.add_parser(name, help=line)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    try:
        args = build_parser().parse_args(argv)  # imports the command's module
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except KvatlasError as error:
        print(f"kvatlas: {error}", file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # Rich ends with status 1 instead, which says something else of what was found.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        sys.stderr.close()  # whoever read our output has left: nothing more to say
        return EXIT_FAULT
    except OSError as error:  # of what is our own, a full disk under stdout; files name themselves
        print(f"kvatlas: {error}", file=sys.stderr)
        sys.stdout = None  # what is left in it cannot be written at the end either
        return EXIT_FAULT


if __name__ == "__main__":
    sys.exit(main())
