"""``kvatlas validate parity``: one scenario in the simulator and on stub engines, compared."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console
from rich.table import Table

from kvatlas.cli.output import print_json
from kvatlas.cli.trace_input import add_trace_options, opened
from kvatlas.core.router import Policy
from kvatlas.errors import ConfigError
from kvatlas.sim.cluster import ClusterFile, EngineTable
from kvatlas.sim.world import Play
from kvatlas.validate.parity import Difference, Parity, parity
from kvatlas.validate.parity_recorded import Recorded, check, load
from kvatlas.validate.parity_recorded import files as recordings
from kvatlas.validate.parity_values import Scenario, load_file, scenario
from kvatlas.workload.families import generate
from kvatlas.workload.presets import FAMILIES
from kvatlas.workload.trace import Trace

_EPILOG = """\
Both worlds run in virtual time and must be equal to the last digit: decisions with every price,
hits, KV events, evictions, times, answers, and what directory and engines hold in the end.
Without --cluster: two engines of DeepSeek V4 Flash on two H200 each.

examples:
  kvatlas validate parity --family multi-turn --requests 60 --seed 3
  kvatlas validate parity --family agent --model gemma-3-12b --blocks 4000
  kvatlas validate parity --trace trace.jsonl --cluster cluster.toml --limit 200 --json
  kvatlas validate parity --recorded tests/fixtures/recorded

exit status: 0 everything is equal, 1 something differs, 2 the input is at fault
"""
_SHOWN = 20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``kvatlas validate parity`` and its options."""
    parser = commands.add_parser(
        "parity",
        help="one scenario in the simulator and on stub engines behind the gateway: all equal",
        description="Plays one scenario in the simulator, and over real sockets on stub engines "
        "behind the real gateway, and names every difference.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--family", choices=tuple(FAMILIES), help="or one made by family and seed")
    what.add_argument(
        "--recorded",
        type=Path,
        metavar="PATH",
        help="instead: recorded runs of a real vLLM beside the engine model; a file or a directory",
    )
    seeds = "of the family; claude-code: of the starts of sessions"
    add_trace_options(parser, name="--trace", instead_of=what, seeds=seeds)
    add("--requests", type=int, default=60, metavar="N", help="of the family (60)")
    add("--limit", type=int, metavar="N", help="only the first N requests of the trace")
    add("--closed-loop", action="store_true", help="turns wait for the answer before them")
    add("--time-scale", type=float, default=1.0, metavar="X", help="multiply the trace's times (1)")
    add("--max-output", type=int, default=32, metavar="N", help="cap on output tokens (32)")
    add("--cluster", type=Path, metavar="FILE", help="cluster.toml, as for kvatlas sim")
    add("--engines", type=int, metavar="N", help="engines of the default cluster (2)")
    add("--model", metavar="NAME", help="their model: a known one, a config.json (V4 Flash)")
    add("--blocks", type=int, metavar="N", help="their pool (default: what the memory holds)")
    add("--policy", choices=get_args(Policy), help="router's policy (the cluster's, or price)")
    add("--json", action="store_true", help="the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 where both worlds are equal, 1 otherwise."""
    if args.recorded is not None:
        return run_recorded(args)
    result = parity(_scenario(args))
    if args.json:
        print_json(result)
    else:
        show(result, Console())
    return 1 if result.different else 0


def run_recorded(args: argparse.Namespace) -> int:
    """Exit status 0 where the engine model did all that vLLM did, 1 otherwise."""
    results, others = [], []
    for path in recordings(args.recorded):
        recording = load(path)
        if recording is None:
            others.append(path.name)
        else:
            results.append(check(path.name.partition(".")[0], recording))
    if not results:
        raise ConfigError(f"{args.recorded}: no recorded run in it")
    if args.json:
        print_json(results)
    else:
        show_recorded(results, others, Console())
    return 1 if any(result.different for result in results) else 0


def _scenario(args: argparse.Namespace) -> Scenario:
    for name in ("requests", "limit", "max_output", "engines", "blocks"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: at least 1 is needed")
    if not (math.isfinite(args.time_scale) and args.time_scale >= 0):
        raise ConfigError(f"--time-scale {args.time_scale:g}: a number from 0 up is needed")
    play = Play(
        limit=args.limit,
        closed_loop=args.closed_loop,
        time_scale=args.time_scale,
        max_output_tokens=args.max_output,
    )
    where = str(args.cluster) if args.cluster else "default cluster"
    return scenario(_file(args), _trace(args), play, where)


def _trace(args: argparse.Namespace) -> Trace:
    if args.trace is not None:
        return opened(args)
    if args.family is None:
        raise ConfigError("--trace FILE, --family NAME or --recorded PATH is needed")
    family = FAMILIES[args.family]
    duration_s = family.duration_s * args.requests / family.requests
    family = msgspec.structs.replace(family, requests=args.requests, duration_s=duration_s)
    return generate(family, args.seed, args.family)


def _file(args: argparse.Namespace) -> ClusterFile:
    own = [name for name in ("engines", "model", "blocks") if getattr(args, name) is not None]
    if args.cluster is not None:
        if own:
            raise ConfigError(f"--{own[0]}: that is in the cluster's file: leave one out")
        file = load_file(args.cluster)
    else:
        table = EngineTable(
            count=args.engines or 2,
            model=args.model or "deepseek-v4-flash",
            blocks=args.blocks or 0,
            devices=2,
            expert_precision="fp4",  # as V4's are published; others have no experts, or take it
        )
        file = ClusterFile(engine=(table,))
    if args.policy is None:
        return file
    router = msgspec.structs.replace(file.router, policy=args.policy)
    return msgspec.structs.replace(file, router=router)


def show(result: Parity, console: Console) -> None:
    """The result for people."""
    table = Table(box=None, padding=(0, 1))
    columns = ("engine", "requests", "prompt", "hit", "stored", "evicted", "preempted")
    for name in (*columns, "differ"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for name, engine in result.engines.items():
        numbers = (
            engine.requests,
            engine.prompt_tokens,
            engine.hit_tokens,
            engine.stored_blocks,
            engine.evicted_blocks,
            engine.preemptions,
            engine.different,
        )
        table.add_row(name, *(f"{number:,}" for number in numbers))
    console.print(table)
    for line in lines(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_recorded(results: list[Recorded], others: list[str], console: Console) -> None:
    """The recordings for people; ``others`` are files that were passed over."""
    table = Table(box=None, padding=(0, 1))
    columns = ("run", "asked", "hits", "cached", "stored", "removed")
    for name in (*columns, "compared", "differ"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for result in results:
        numbers = (
            result.requests,
            result.hits,
            result.cached_tokens,
            result.events.get("BlockStored", 0),
            result.events.get("BlockRemoved", 0),
            result.compared,
            result.different,
        )
        table.add_row(result.name, *(f"{number:,}" for number in numbers))
    console.print(table)
    for result in results:
        mode = ", async scheduling" if result.async_scheduling else ""
        prefix = f"{result.name} ({result.engine}{mode}), "
        for line in _told(result.differences, prefix, "modelled", "vLLM"):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if others:
        console.print(f"passed over, no requests in it: {', '.join(others)}", markup=False)


def _told(
    differences: Sequence[Difference],
    prefix: str = "",
    one: str = "simulated",
    other: str = "served",
) -> Iterator[str]:
    """The first of them; a cause that several have in common is said once."""
    shown = differences[:_SHOWN]
    for difference, following in zip_longest(shown, shown[1:]):
        yield f"  {prefix}{difference.where}: {difference.field}"
        yield f"    {one:9} {difference.simulated}"
        yield f"    {other:9} {difference.served}"
        if following is None or following.cause != difference.cause:
            yield f"    likely    {difference.cause}"


def lines(result: Parity) -> Iterator[str]:
    """What the table does not say."""
    failed = f", {result.failed:,} refused" if result.failed else ""
    yield (
        f"{result.scenario}, policy {result.policy}: {result.requests:,} requests{failed}, "
        f"{result.promised_tokens:,} tokens promised, {result.cached_tokens:,} cached, "
        f"{result.output_tokens:,} made, {result.events:,} KV events"
    )
    yield f"compared {result.compared:,}: different {result.different:,}"
    yield from _told(result.differences)
    if result.different > _SHOWN:
        yield f"  … and {result.different - _SHOWN:,} more; --json has {len(result.differences):,}"
