"""``kvatlas trace hit-rate``: what a cache of a given size and policy would hold of a trace."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from kvatlas.cli.output import print_json, read_file, status, table_console
from kvatlas.cli.trace_input import add_trace_options, first_of, opened
from kvatlas.core.layout import Layout
from kvatlas.core.policy.attention import AttentionScores
from kvatlas.core.policy.registry import POLICIES, make_policy
from kvatlas.core.records import Tier
from kvatlas.errors import ConfigError
from kvatlas.sim.cache import Cache, Counts, Level, Work, prefill_seconds, prepare
from kvatlas.sim.cache import run as replay
from kvatlas.sim.oracles import endless, optimal
from kvatlas.workload.attention_scores import measured_scores
from kvatlas.workload.device import DEVICES, device
from kvatlas.workload.models import load_layout

ORACLES = ("optimal", "endless")
TIERS = (Tier.HBM, Tier.DRAM, Tier.DISK, Tier.OBJECT)  # from the engine down
RUNS_MAX = 1000
_WIDTH = 100  # of a table that goes to a file

_EPILOG = f"""\
policies: {", ".join(POLICIES)},
and what none can beat: optimal (Belady: the whole trace is known), endless (everything fits)

capacity: a number of blocks or tokens (--unit), or a share of the distinct blocks with %. With
--unit tokens a block weighs its tokens, and 100% is all distinct blocks as if they were full.
Several with commas; tiers from the engine down with +, as 1%+4%+20%: no block is in two of them.
A hit counts only as long as the chain from the start of the prompt is unbroken.

examples:
  kvatlas trace hit-rate mooncake_conversation.jsonl.xz --policy lru --capacity 5% --json
  kvatlas trace hit-rate mooncake_conversation.jsonl.xz --policy all --capacity 1%,5%,10%,25%
  kvatlas trace hit-rate mooncake_conversation.jsonl.xz --policy lru,optimal --capacity 1%+9%
"""


class Result(msgspec.Struct, frozen=True):
    """One policy at one capacity, as it is printed.

    ``evictions`` left the cache, in blocks; ``held_block_rate`` also counts blocks that were there
    but behind a missing one. ``tier_hit_rates`` split ``block_hit_rate`` by tier, nearest first.
    """

    policy: str
    capacity: int | None
    tiers: list[int]
    unit: str
    requests: int
    blocks: int
    unique_blocks: int
    tokens: int
    block_hit_rate: float
    token_hit_rate: float
    held_block_rate: float
    full_prefix_hits: int
    full_prefix_hit_rate: float
    evictions: int
    refused_blocks: int
    promoted: int
    demoted: int
    tier_hit_rates: list[float]
    saved_s: float


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "hit-rate",
        help="hit rates of a trace by policy and capacity, without any timing",
        description="Replays a trace through a cache without time: exact hit rates of any policy.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_options(parser)
    add = parser.add_argument
    add("--policy", default="lru", metavar="P", help="one or several with commas, or all (lru)")
    add("--capacity", default="10%", metavar="N|P%", help="one or several with commas (10%%)")
    add("--unit", choices=("blocks", "tokens"), default="blocks", help="of capacity (blocks)")
    add_cache_options(parser)
    parser.set_defaults(run=run)


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """What `hit-rate` and `compare` have in common."""
    add = parser.add_argument
    add("--merge", type=int, default=1, metavar="N", help="make one block of N of the trace's (1)")
    add("--requests", type=int, metavar="N", help="only the first N requests")
    add("--scores", type=Path, metavar="FILE", help="attention scores (those we ship of it)")
    add("--model", default="deepseek-v4-flash", help="whose prefill is priced (deepseek-v4-flash)")
    add("--engine", choices=("vllm", "sglang"), default="vllm", help="whose layout (vllm)")
    add("--device", choices=tuple(DEVICES), default="H100", help="that it is priced on (H100)")
    add("--devices", type=int, default=8, metavar="N", help="of them together (8)")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    names = policy_names(args.policy)
    work = loaded(args)
    capacities = [sizes(text, work, args.unit) for text in _parts(args.capacity, "--capacity")]
    if len(names) * len(capacities) > RUNS_MAX:
        raise ConfigError(f"more than {RUNS_MAX} combinations of policy and capacity")
    scores = scores_for(args, work)
    price = priced(load_layout(args.model, engine=args.engine), args)
    results = []
    for caps, name in itertools.product(capacities, names):
        status(f"{name} at {caps} …")
        counts = measure(work, name, caps, args.unit, scores=scores, price=price)
        results.append(_result(work, name, caps, args.unit, counts))
    status()
    if args.json:
        told: Any = results[0] if len(results) == 1 else {"trace": str(args.trace), "rows": results}
        print_json(told)
    else:
        _show(args, work, results)
    return 0


def loaded(args: argparse.Namespace) -> Work:
    """The trace of the command line, in memory. Raises ConfigError and TraceError."""
    if not 1 <= args.merge <= 4096:
        raise ConfigError(f"--merge {args.merge}: 1 to 4096 blocks can be made one")
    if not 1 <= args.devices <= 100_000:
        raise ConfigError(f"--devices {args.devices}: at least 1 is needed")
    trace = opened(args)
    return prepare(first_of(trace, args), trace.block_tokens, merge=args.merge)


def priced(layout: Layout, args: argparse.Namespace) -> Callable[[int], float]:
    """Seconds of prefill on the devices that the options say. Raises ConfigError."""
    return prefill_seconds(layout, device(args.device), args.devices)


def scores_for(args: argparse.Namespace, work: Work) -> AttentionScores | None:
    """Of ``--scores``, else those that we ship of the model; for blocks of the trace's size.

    Raises ConfigError.
    """
    if args.scores is None:
        scores = measured_scores(args.model)
    else:
        scores = AttentionScores.decode(read_file(args.scores), str(args.scores))
    return scores.for_blocks(work.block_tokens) if scores else None


def policy_names(text: str) -> list[str]:
    """The policies of ``--policy``, each once. Raises ConfigError where one is none."""
    if text == "all":
        return [*(name for name in POLICIES if name != "attention"), *ORACLES]
    names = list(dict.fromkeys(_parts(text, "--policy")))
    for name in names:
        if name not in POLICIES and name not in ORACLES:
            known = ", ".join([*POLICIES, *ORACLES, "all"])
            raise ConfigError(f"--policy {name}: there is none of that name: use {known}")
    return names


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{option} {text!r}: something is missing between the commas")
    return parts


def sizes(text: str, work: Work, unit: str) -> tuple[int, ...]:
    """ "5%", "10000" or "1%+4%" as capacities of tiers. Raises ConfigError."""
    tiers = text.split("+")
    if len(tiers) > len(TIERS):
        raise ConfigError(f"--capacity {text}: more than {len(TIERS)} tiers")
    return tuple(_capacity(tier.strip(), work, unit) for tier in tiers)


def _capacity(text: str, work: Work, unit: str) -> int:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 < value < 1e15:
        raise ConfigError(f"--capacity {text!r}: give a number above 0 and below 1e15, or as 5%")
    if text.endswith("%"):
        every = work.unique_blocks * (work.block_tokens if unit == "tokens" else 1)
        return max(1, math.floor(every * value / 100 + 0.5))
    if value != math.floor(value):
        raise ConfigError(f"--capacity {text!r}: {unit} are whole, or give a share as 5%")
    return int(value)


def measure(
    work: Work,
    name: str,
    caps: tuple[int, ...],
    unit: str,
    *,
    scores: AttentionScores | None,
    price: Callable[[int], float],
) -> Counts:
    """One run. An oracle takes several tiers as one."""
    if name == "endless":
        return endless(work, seconds=price)
    if name == "optimal":
        return optimal(work, sum(caps), unit_tokens=unit == "tokens", seconds=price)
    return replay(cache_of(work, name, caps, unit, scores=scores, price=price), work)


def cache_of(
    work: Work,
    name: str,
    caps: tuple[int, ...],
    unit: str,
    *,
    scores: AttentionScores | None,
    price: Callable[[int], float],
) -> Cache:
    """An empty cache with a tier of each capacity, under the policy ``name``."""
    levels = [
        Level(make_policy(name, tier, scores=scores), cap)
        for tier, cap in zip(TIERS, caps, strict=False)
    ]
    return Cache(
        levels, block_tokens=work.block_tokens, unit_tokens=unit == "tokens", seconds=price
    )


def _result(work: Work, name: str, caps: tuple[int, ...], unit: str, counts: Counts) -> Result:
    whole = max(counts.blocks, 1)
    return Result(
        policy=name,
        capacity=None if name == "endless" else sum(caps),
        tiers=list(caps),
        unit=unit,
        requests=counts.requests,
        blocks=counts.blocks,
        unique_blocks=work.unique_blocks,
        tokens=counts.tokens,
        block_hit_rate=counts.block_hit_rate,
        token_hit_rate=counts.token_hit_rate,
        held_block_rate=counts.held_blocks / whole,
        full_prefix_hits=counts.full_hits,
        full_prefix_hit_rate=counts.full_hits / max(counts.requests, 1),
        evictions=counts.dropped_blocks,
        refused_blocks=counts.refused_blocks,
        promoted=counts.promoted,
        demoted=counts.demoted,
        tier_hit_rates=[blocks / whole for blocks in counts.tier_blocks],
        saved_s=counts.saved_s,
    )


def _show(args: argparse.Namespace, work: Work, results: list[Result]) -> None:
    console = table_console(_WIDTH)
    console.print(
        f"{args.trace}: {len(work.prompts):,} requests, {work.blocks:,} blocks of "
        f"{work.block_tokens} tokens, {work.unique_blocks:,} distinct"
    )
    table = Table()
    table.add_column("policy", no_wrap=True)
    for name in ("capacity", "block hits", "token hits", "full prefixes", "evictions", "saved"):
        table.add_column(name, justify="right")
    for r in results:
        caps = "no end" if r.policy == "endless" else " + ".join(f"{cap:,}" for cap in r.tiers)
        table.add_row(
            r.policy,
            caps,
            f"{r.block_hit_rate:.4f}",
            f"{r.token_hit_rate:.4f}",
            f"{r.full_prefix_hit_rate:.4f}",
            f"{r.evictions:,}",
            f"{r.saved_s:,.0f} s",
        )
    console.print(table)
    console.print(
        f"saved: prefill time of {args.model} on {args.devices} {args.device}; "
        f"capacity in {args.unit}"
    )
