"""``kvatlas trace generate``: a workload by preset or family and seed, as a trace file."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from kvatlas.cli.trace_convert import save
from kvatlas.errors import ConfigError
from kvatlas.workload.families import Family, generate, resized
from kvatlas.workload.presets import FAMILIES, PRESETS

_EPILOG = """\
A preset follows the published statistics of a trace: what it aims at and what it reaches is in the
page "Traces" of the documentation. A family is a plain workload to vary. The same name, options and
seed give the same file everywhere. OUT is JSON lines in Mooncake's form, compressed where its name
ends in .xz or .gz; an existing file is not overwritten.

examples:
  kvatlas trace generate qwen-to-c qwen.jsonl.xz
  kvatlas trace generate agent agent.jsonl --requests 2000 --duration-s 600 --seed 7
  kvatlas trace generate --list
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="make a trace by preset or family, and seed",
        description="Makes a trace: one of the four request families, or a preset.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="a preset or a family: see --list")
    add("out", nargs="?", type=Path, metavar="OUT", help="the file to write")
    add("--list", action="store_true", help="name presets and families, and write nothing")
    add("--seed", type=int, default=0, metavar="N", help="the same seed, the same trace (0)")
    add("--requests", type=int, metavar="N", help="requests (default: as published)")
    add("--duration-s", type=float, metavar="S", help="time they take (default: in proportion)")
    add("--block-tokens", type=int, metavar="N", help="tokens per block (default: as published)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.list:
        for name, family in {**FAMILIES, **PRESETS}.items():
            kind = "preset" if name in PRESETS else "family"
            print(f"{kind}  {name:24}{family.requests:>9,} requests in {family.duration_s:,.0f} s")
        return 0
    if args.name is None or args.out is None:
        raise ConfigError("NAME and OUT are needed; --list tells the names")
    family = _changed(_named(args.name), args)
    trace = generate(family, args.seed, args.name)
    return save(trace, trace, args.out)


def _named(name: str) -> Family:
    known = {**FAMILIES, **PRESETS}
    if name not in known:
        raise ConfigError(f"{name!r} is no preset and no family: use one of {', '.join(known)}")
    return known[name]


def _changed(family: Family, args: argparse.Namespace) -> Family:
    made = family if args.requests is None else resized(family, args.requests)
    given = {name: getattr(args, name) for name in ("duration_s", "block_tokens")}
    return msgspec.structs.replace(made, **{n: v for n, v in given.items() if v is not None})
