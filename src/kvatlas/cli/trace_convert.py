"""``kvatlas trace convert`` and ``anonymise``: the same requests in another file."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from kvatlas.cli.trace_input import add_trace_options, first_of, opened, read_secret
from kvatlas.workload.anonymise import anonymised, new_secret
from kvatlas.workload.trace import Trace, TraceRequest
from kvatlas.workload.trace_write import write

_CONVERT = """\
OUT is JSON lines in Mooncake's form, compressed where its name ends in .xz or .gz. An existing
file is not overwritten.

examples:
  kvatlas trace convert claude_code_sessions_compact.jsonl.xz sessions.jsonl.xz --session-gap-s 30
  kvatlas trace convert requests.jsonl blocks.jsonl --tokenizer models/my-model --key-file key
"""

_ANONYMISE = """\
Block ids, sessions and scopes are hashed with a key, times start at 0 and are moved to whole
seconds or what --time-step-s says. What remains: lengths, order, and which prompts share how much,
so every cache has the same hits. Without --key-file the key is drawn and forgotten: no way back.
An existing file is not overwritten.

examples:
  kvatlas trace anonymise trace.jsonl.xz shareable.jsonl.xz
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = subparsers.add_parser(
        "convert",
        help="write a trace in the common form",
        description="Reads a trace of any format and writes it as Mooncake's JSON lines.",
        epilog=_CONVERT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_options(convert)
    convert.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    convert.add_argument("--requests", type=int, metavar="N", help="only the first N requests")
    convert.set_defaults(run=run)
    anonymise = subparsers.add_parser(
        "anonymise",
        help="write a trace that can be shown to others",
        description="Writes a trace without ids, names and times that others could trace back.",
        epilog=_ANONYMISE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_options(anonymise)
    anonymise.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    anonymise.add_argument(
        "--time-step-s", type=float, default=1.0, metavar="S", help="round times down to this (1)"
    )
    anonymise.set_defaults(run=run_anonymise)


def run(args: argparse.Namespace) -> int:
    trace = opened(args)
    return save(trace, first_of(trace, args), args.out)


def run_anonymise(args: argparse.Namespace) -> int:
    """``kvatlas trace anonymise``."""
    secret = read_secret(args.key_file) if args.key_file else new_secret()
    trace = opened(args)
    return save(trace, anonymised(trace, secret, args.time_step_s), args.out)


def save(trace: Trace, requests: Iterable[TraceRequest], out: Path) -> int:
    """Write ``requests`` of ``trace`` to a new file and say so. Returns the exit status."""
    count = write(out, requests)
    print(f"{count:,} requests, blocks of {trace.block_tokens} tokens → {out}")
    return 0
