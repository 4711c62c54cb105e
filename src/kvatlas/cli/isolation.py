"""``kvatlas validate isolation``: many tenants on the production core, and planted leaks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvatlas.cli.output import check_output, json_bytes, print_json, progress, write_files
from kvatlas.errors import ConfigError
from kvatlas.validate.isolation.marks import CLASSES, RELATIONS
from kvatlas.validate.isolation.planted import BY_NAME
from kvatlas.validate.isolation.run import OPERATIONS, Caught, Played, Report, catch, report, run

OPERATIONS_MAX = 100_000_000
JOBS_MAX = 256
_EPILOG = """\
Tenants with names that are tricks, sessions, public documents, adapters and forged salts ask for
the same prompts; epochs end, tenants are purged, processes die. Every block that is used or
promised is attributed to whoever had it computed. Equal seeds give equal runs.

examples:
  kvatlas validate isolation --operations 1000000 --json isolation.json
  kvatlas validate isolation --leak all               # each planted leak, until it is seen

exit status: 0 no violation (with a leak: each was seen), 1 otherwise, 2 the input is at fault
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``kvatlas validate isolation`` and its options."""
    parser = commands.add_parser(
        "isolation",
        help="no tenant is ever served what is another's: many operations by seed, planted leaks",
        description="Many tenants on the production core and through every tier, by seed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--operations", type=int, default=20_000, metavar="N", help="how many (20000)")
    add(
        "--first-seed", type=int, default=0, metavar="K", help=f"of worlds of {OPERATIONS} each (0)"
    )
    add("--leak", metavar="NAME", help="plant a leak that must be seen, or all of them in turn")
    add("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    add("--json", type=Path, metavar="FILE", help="write the result as JSON; - for stdout")
    add("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run_command)


def run_command(args: argparse.Namespace) -> int:
    """Exit status 0 where nothing was violated, or each planted leak was seen."""
    if not 1 <= args.operations <= OPERATIONS_MAX:
        raise ConfigError(f"--operations {args.operations}: 1 to {OPERATIONS_MAX:,} are possible")
    if not 1 <= args.jobs <= JOBS_MAX or args.first_seed < 0:
        raise ConfigError(f"--jobs: 1 to {JOBS_MAX} are possible; --first-seed: from 0 up")
    path = args.json if args.json != Path("-") else None
    check_output("--json", path)
    if args.leak is not None:
        return _leaks(args, path)
    worlds = -(-args.operations // OPERATIONS)
    played = run(args.operations, first_seed=args.first_seed, jobs=args.jobs)
    result = report(_counted(played, worlds, args.quiet))
    write_files(("--json", path, lambda: json_bytes(result)))
    if args.json and path is None:
        print_json(result)
    else:
        show(result, Console())
    return 0 if result.clean else 1


def _leaks(args: argparse.Namespace, path: Path | None) -> int:
    names = list(BY_NAME) if args.leak == "all" else [args.leak]
    if unknown := set(names) - set(BY_NAME):
        raise ConfigError(f"--leak {', '.join(unknown)}: there is: all, {', '.join(BY_NAME)}")
    seeds = range(args.first_seed, args.first_seed + max(1, args.operations // OPERATIONS))
    with progress("leaks", len(names), quiet=args.quiet) as on_done:
        found: list[Caught] = []
        for name in names:
            found.append(catch(name, seeds))
            on_done()
    write_files(("--json", path, lambda: json_bytes(found)))
    if args.json and path is None:
        print_json(found)
    else:
        table = Table("leak", "what is wrong", "where", "operations", "seen as")
        for each in found:
            seen = f"{each.operations:,}" if each.operations else "not seen"
            table.add_row(each.name, each.what, each.symbol, seen, each.by)
        Console().print(table)
    return 0 if all(each.operations for each in found) else 1


def _counted(played: Iterable[Played], total: int, quiet: bool) -> Iterator[Played]:
    with progress("worlds", total, quiet=quiet) as on_done:
        for each in played:
            on_done()
            yield each


def show(result: Report, console: Console) -> None:
    """The result for people."""
    console.print(f"{result.operations:,} operations in {result.worlds} worlds")
    kinds = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in result.kinds.items())
    console.print(f"of them: {kinds}; {result.inputs:,} inputs of the core", soft_wrap=True)
    table = Table("blocks from", *RELATIONS)
    for place in dict.fromkeys(key.rpartition(" ")[0] for key in result.hits):
        counts = (result.hits.get(f"{place} {relation}", 0) for relation in RELATIONS)
        table.add_row(place, *(f"{count:,}" for count in counts))
    console.print(table)
    console.print(f"promised too late, of what a store had let go: {result.late:,}")
    found = {kind: count for kind, count in result.violations.items() if count}
    console.print(f"violations: {sum(found.values())}")
    for kind, count in found.items():
        console.print(f"  {count:,} {kind}: {CLASSES[kind]}")
    for first in result.first:
        console.print(f"  step {first.at}, {first.kind}: {first.what}", markup=False)
