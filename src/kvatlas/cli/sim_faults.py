"""``kvatlas sim faults``: the production core in worlds where things go wrong, by seed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table

from kvatlas.cli.output import print_json, progress
from kvatlas.errors import ConfigError
from kvatlas.sim.canaries import REGISTRY
from kvatlas.sim.checkers import CLASSES
from kvatlas.sim.faults import KINDS
from kvatlas.sim.faults_cluster import scenario
from kvatlas.sim.faults_run import Report, SeedResult, run_seed, run_seeds
from kvatlas.sim.planted import BUGS
from kvatlas.sim.planted_score import row, scores

SEEDS_MAX = 1_000_000
JOBS_MAX = 256
_FAILING_SHOWN = 5

_EPILOG = """\
Each seed draws a small world (engines, models, requests, limits) and what goes wrong in it;
checkers outside the core judge every promise, every answer and what is left at the end. Equal seeds
give equal worlds.

examples:
  kvatlas sim faults --seeds 200
  kvatlas sim faults --seed 44 --verbose               # one seed again, with all that happens
  kvatlas sim faults --seeds 50 --canary resurrected   # a planted bug, which must be found
  kvatlas sim faults --seeds 200 --canary all          # each of many, until a seed finds it

exit status: 0 no violation, 1 violations were found (so too with a canary; with all: 0 each
was found, 1 one was not), 2 the input is at fault
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "faults",
        help="the production core where things go wrong: thousands of small worlds by seed",
        description="Play worlds with faults, one per seed, and check what must hold.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seeds", type=int, default=100, metavar="N", help="how many seeds (100)")
    add("--first-seed", type=int, default=0, metavar="K", help="the first of them (0)")
    add("--seed", type=int, metavar="K", help="only this one: --seeds 1 --first-seed K")
    add(
        "--canary",
        metavar="NAME",
        help="plant a bug that must be found: a class, one of the list,"
        " or all of the list, one after another",
    )
    add("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    add("--verbose", action="store_true", help="print all that happens (one seed only)")
    add("--json", action="store_true", help="print the result as JSON")
    add("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    first, count = _seeds(args)
    if args.canary == "all":
        return _all(range(first, first + count), args)
    if args.canary is not None and args.canary not in REGISTRY and args.canary not in BUGS:
        raise ConfigError(
            f"--canary {args.canary!r}: unknown; there is: {', '.join(sorted(REGISTRY))}, all,"
            " and each bug of the list that `all` prints"
        )
    canary = args.canary or ""
    if args.verbose:
        if count != 1:
            raise ConfigError("--verbose prints a whole run: give one seed (--seed K)")
        _plan(first)
        report = Report.of([run_seed(first, canary=canary, say=_say)], canary)
    else:
        results = run_seeds(range(first, first + count), canary, args.jobs)
        report = Report.of(_counted(results, count, args.quiet), canary)
    if args.json:
        print_json(report)
    else:
        show(report, Console())
    return 1 if report.violations else 0


def _seeds(args: argparse.Namespace) -> tuple[int, int]:
    first, count = (args.seed, 1) if args.seed is not None else (args.first_seed, args.seeds)
    if not 1 <= count <= SEEDS_MAX:
        raise ConfigError(f"--seeds {count}: 1 to {SEEDS_MAX:,} are possible")
    if not 0 <= first <= 1 << 62:
        raise ConfigError(f"the first seed is {first}: a number from 0 up is needed")
    if not 1 <= args.jobs <= JOBS_MAX:
        raise ConfigError(f"--jobs {args.jobs}: 1 to {JOBS_MAX} are possible")
    return first, count


def _all(seeds: range, args: argparse.Namespace) -> int:
    """Every planted bug and what finds it; 1 where one is missed."""
    table = Table("bug", "what is wrong", "where", "class", "seeds", "found by")
    found = []
    for each in scores(BUGS, seeds, args.jobs):
        found.append(each)
        table.add_row(*row(each))
        if not args.json:
            _say(f"{each.name}: {each.first or 'not found'}")
    if args.json:
        print_json(found)
    else:
        Console().print(table)
    return 0 if all(each.seeds for each in found) else 1


def _counted(results: Iterable[SeedResult], total: int, quiet: bool) -> Iterator[SeedResult]:
    """The same, with a bar on stderr."""
    with progress("seeds", total, quiet=quiet) as on_done:
        for result in results:
            on_done()
            yield result


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _plan(seed: int) -> None:
    """The world of one seed and what is going to happen to it."""
    plan = scenario(seed)
    for member in plan.members:
        spec = member.spec
        _say(f"{member.name}: {member.layout.model}, {spec.blocks} blocks")
    _say(f"{len(plan.asks)} requests, healed at {plan.heal_at:.0f} s, {plan.directory}")
    for fault in plan.faults:
        _say(fault.text())


def show(report: Report, console: Console) -> None:
    """The result for people."""
    facts = Table(show_header=False, box=None)
    facts.add_row("seeds", f"{report.seeds:,} from {report.first_seed}")
    if report.canary:
        facts.add_row("canary", f"{report.canary}, {'found' if report.violations else 'NOT found'}")
    facts.add_row("violations", f"{report.violations:,} in {report.failing_seeds} seeds")
    facts.add_row("requests", f"{report.requests:,}, {report.answered:,} answered")
    facts.add_row("compared", f"{report.promises:,} promises, {report.tokens:,} tokens of answers")
    facts.add_row("copies", f"{report.copies:,} ordered ahead of need")
    facts.add_row("virtual time", f"{report.virtual_s / 3600:.1f} hours")
    console.print(facts)
    _counts(console, "faults", report.faults, KINDS)
    found = {kind: count for kind, count in report.classes.items() if count}
    if found:
        _counts(console, "violations", found, CLASSES)
    for result in report.failing[:_FAILING_SHOWN]:
        _failing(console, result, report.canary)


def _counts(console: Console, title: str, counts: dict[str, int], meanings: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("kind")
    table.add_column("count", justify="right")
    table.add_column("what it is")
    for kind, count in counts.items():
        table.add_row(kind, f"{count:,}", meanings[kind])
    console.print(table)


def _failing(console: Console, result: SeedResult, canary: str) -> None:
    """One failing seed: how to see it again, what was planned, the first violation, the trace."""
    again = f" --canary {canary}" if canary else ""
    lines: Iterable[str] = (
        "",
        f"seed {result.seed}: kvatlas sim faults --seed {result.seed}{again} --verbose",
        *(f"  {fault.text()}" for fault in scenario(result.seed).faults),
        *(f"  first: {v.at:.3f} s, {v.kind}: {v.what}" for v in result.violations[:1]),
        *(f"  | {line}" for line in result.trace),
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
