"""``kvatlas sim prices``: predicted against measured first tokens, on engines of unknown speed."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from kvatlas.cli.output import print_json, progress
from kvatlas.errors import ConfigError
from kvatlas.sim.hidden import RATES, WARM_UP, WINDOWS, Foretold, foretold, run
from kvatlas.workload.pace import SPREAD_MAX

SEEDS_MAX = 10_000
REQUESTS_MAX = 1_000_000

_EPILOG = f"""\
Each part of an engine's step (weights, attention, memory, fixed costs) is drawn by seed up to
--spread times slower or faster, and drawn anew in the middle of the run. The router is told none
of it. Errors are shares of the measured time to the first token; the first {WARM_UP} requests of
each engine do not count. "again": requests after which the median of the next five is no more than
1.25 times what it was before the change.

examples:
  kvatlas sim prices
  kvatlas sim prices --family agent --seeds 3 --spread 4 --json

exit status: 0 measured, 2 the input is at fault
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "prices",
        help="predicted against measured first tokens, on engines of unknown speed",
        description="Play the generated families on engines whose speed the router is not told.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--family", choices=tuple(RATES), help="only this one")
    add("--seeds", type=int, default=10, metavar="N", help="runs of each family (10)")
    add("--engines", type=int, default=8, metavar="N", help="default engines (8)")
    add("--requests", type=int, default=1000, metavar="N", help="of each run (1000)")
    add("--spread", type=float, default=2.0, metavar="X", help="up to X times slower, faster (2)")
    add("--json", action="store_true", help="print the result as JSON")
    add("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run_prices)


def run_prices(args: argparse.Namespace) -> int:
    """Always 0: it measures, and judges nothing."""
    for name, most in (("seeds", SEEDS_MAX), ("requests", REQUESTS_MAX)):
        if not 1 <= getattr(args, name) <= most:
            raise ConfigError(f"--{name} {getattr(args, name)}: 1 to {most:,} are possible")
    if not 1 <= args.spread <= SPREAD_MAX:
        raise ConfigError(f"--spread {args.spread:g}: from 1 (all equal) to {SPREAD_MAX:g}")
    families = [args.family] if args.family else list(RATES)
    results = []
    with progress("runs", len(families) * args.seeds, quiet=args.quiet) as on_done:
        for family in families:
            runs = []
            for seed in range(args.seeds):
                more = {"engines": args.engines, "requests": args.requests}
                runs.append(run(family, seed, spread=args.spread, **more))
                on_done()
            results.append(foretold(family, runs))
    if args.json:
        print_json(results)
    else:
        show(results, Console())
    return 0


def show(results: list[Foretold], console: Console) -> None:
    """The result for people."""
    title = "error of predicted TTFT: median, p90; median of the requests since a change"
    table = Table(title=title, title_justify="left", pad_edge=False, padding=0)
    table.add_column("family", no_wrap=True)
    for name in ("n", "p50", "p90", *(f"{a}-{b}" for a, b in WINDOWS), "again"):
        table.add_column(name, justify="right")
    for each in results:
        table.add_row(
            each.family,
            f"{each.predictions:,}",
            f"{each.error_p50:.1%}",
            f"{each.error_p90:.0%}",
            *(f"{error:.0%}" for error in each.after),
            str(each.recovered_after) if each.recovered_after >= 0 else "–",
        )
    console.print(table)
