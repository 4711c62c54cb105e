"""``kvatlas trace compare``: the four strategies of seed document 003 in numbers, on one trace."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import msgspec
from rich.table import Table

from kvatlas.cli.output import print_json, status, table_console
from kvatlas.cli.trace_hit_rate import (
    TIERS,
    add_cache_options,
    cache_of,
    loaded,
    priced,
    scores_for,
    sizes,
)
from kvatlas.cli.trace_input import add_trace_options
from kvatlas.core.layout import Layout
from kvatlas.core.policy.attention import NOT_KNOWN, AttentionScores
from kvatlas.core.policy.objective import Objective
from kvatlas.core.policy.speculative import Speculative
from kvatlas.core.records import Tier
from kvatlas.errors import ConfigError
from kvatlas.sim.cache import Counts, Work
from kvatlas.sim.cache import run as replay
from kvatlas.sim.oracles import endless, optimal
from kvatlas.workload.models import load_layout

_WIDTH = 100  # of a table that goes to a file
_EPILOG = """\
Strategies: 1 lru_sink, 2 attention, 3 prefix_tree, 4 speculative (which evicts nothing: it runs
over strategy 3, as the seed advises, and over LRU). Tiers are hbm + dram + disk, exclusive.

worth: the objective, with decode left out, which a cache without time does not see.
µs/use: processor time of the whole pass per block use, on this machine; compare rows of one run.
Strategy 2 needs scores of the model that is priced: --scores, or those that ship with kvatlas
(smollm2-135m-instruct). For DeepSeek V4 these are statistics of its indexer's selections, which no
engine reports: without them its row says "not known".

examples:
  kvatlas trace compare mooncake_conversation.jsonl.xz
  kvatlas trace compare multi-turn.jsonl --model smollm2-135m-instruct
  kvatlas trace compare sessions.jsonl.xz --merge 8 --capacity 0.5%+2%+10% --json
"""

#: Bytes per second that a load from a tier reaches: PCIe 5 x16 50 to 55 of its nominal 64 GB/s;
#: NVMe Gen5 x4 about 14 GB/s.
LOAD_BYTES_PER_S = {Tier.DRAM: 50e9, Tier.DISK: 14e9}
_ROWS = (
    ("lru", "baseline", False),
    ("lru_sink", "1", False),
    ("attention", "2", False),
    ("prefix_tree", "3", False),
    ("prefix_tree", "3 + 4", True),
    ("lru", "baseline + 4", True),
    ("leaf_lru", "", False),
    ("gdsf", "", False),
    ("s3fifo", "", False),
)


class Row(msgspec.Struct, frozen=True):
    """One strategy; figures are None where nothing is known.

    ``saved_s`` is prefill time saved, ``load_s`` what loading the hits from below hbm took of it,
    had nothing been brought up ahead and nothing been overlapped. ``moved_bytes`` went up or down
    between tiers, ``ahead_used`` is the share of what was brought up ahead that was then used.
    ``objective`` weighs what was saved against loading and the room taken in hbm.
    """

    policy: str
    strategy: str
    token_hit_rate: float | None = None
    hbm_hit_rate: float | None = None
    saved_s: float | None = None
    load_s: float | None = None
    moved_bytes: float | None = None
    ahead_used: float | None = None
    objective: float | None = None
    per_use_s: float | None = None
    note: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="the four strategies of seed document 003 in numbers",
        description="Hit rate, seconds saved, bytes moved and overhead of each strategy.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_options(parser)
    parser.add_argument(
        "--capacity",
        default="1%+4%+20%",
        metavar="N|P%[+…]",
        help="blocks, or shares of the distinct ones, of up to three tiers (1%%+4%%+20%%)",
    )
    parser.add_argument(
        "--weights",
        default="8,4,2,1",
        metavar="W,W,W,W",
        help="of the objective: prefix hit, transfer, decode, hbm; never rising (8,4,2,1)",
    )
    add_cache_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    work = loaded(args)
    caps = sizes(args.capacity, work, "blocks")
    if len(caps) > 3:
        raise ConfigError(f"--capacity {args.capacity}: hbm, dram and disk are three tiers at most")
    layout = load_layout(args.model, engine=args.engine)
    price = priced(layout, args)
    scores, objective = scores_for(args, work), _objective(args.weights)
    rows = []
    for policy, strategy, ahead in _ROWS:
        note = _unknown(args.model, scores) if policy == "attention" else ""
        if note:
            rows.append(Row(policy, strategy, note=note))
            continue
        status(f"{policy} {strategy} …")
        rows.append(_row(work, caps, layout, (policy, strategy, ahead), objective, scores, price))
    rows += _oracles(work, sum(caps), price)
    status()
    if args.json:
        told = {"trace": str(args.trace), "model": args.model, "tiers": caps, "rows": rows}
        print_json(told)
    else:
        _show(args, work, caps, rows)
    return 0


def _objective(text: str) -> Objective:
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 4:
        raise ConfigError(f"--weights {text!r}: four numbers with commas between them")
    return Objective(*weights)


def _unknown(model: str, scores: AttentionScores | None) -> str:
    if scores is None:
        return f"{NOT_KNOWN}: no statistics of {model}"
    return scores.speaks_for(model)


def _row(  # noqa: PLR0917
    work: Work,
    caps: tuple[int, ...],
    layout: Layout,
    what: tuple[str, str, bool],
    objective: Objective,
    scores: AttentionScores | None,
    price: Callable[[int], float],
) -> Row:
    policy, strategy, ahead = what
    cache = cache_of(work, policy, caps, "blocks", scores=scores, price=price)
    top = cache.levels[0]
    began = time.process_time()
    counts = replay(cache, work, ahead=Speculative() if ahead else None)
    spent_s = time.process_time() - began
    block_bytes = layout.page_bytes_per_token() * work.block_tokens
    load_s = sum(
        blocks * block_bytes / LOAD_BYTES_PER_S[tier]
        for tier, blocks in zip(TIERS, counts.tier_blocks, strict=False)
        if tier in LOAD_BYTES_PER_S
    )
    return Row(
        policy=policy,
        strategy=strategy,
        token_hit_rate=counts.token_hit_rate,
        hbm_hit_rate=counts.tier_blocks[0] / counts.blocks,
        saved_s=counts.saved_s,
        load_s=load_s,
        moved_bytes=(counts.promoted + counts.demoted) * block_bytes,
        ahead_used=counts.prefetched_used / counts.prefetched if counts.prefetched else None,
        objective=objective.value(
            saved=counts.saved_s / counts.whole_s,
            moving=load_s / counts.whole_s,
            hbm_used=top.used / top.capacity,
        ),
        per_use_s=spent_s / counts.blocks,
    )


def _oracles(work: Work, capacity: int, price: Callable[[int], float]) -> list[Row]:
    found: list[tuple[str, Counts]] = [
        ("optimal", optimal(work, capacity, seconds=price)),
        ("endless", endless(work, seconds=price)),
    ]
    return [
        Row(name, "oracle", token_hit_rate=c.token_hit_rate, saved_s=c.saved_s) for name, c in found
    ]


def _show(args: argparse.Namespace, work: Work, caps: tuple[int, ...], rows: list[Row]) -> None:
    console = table_console(_WIDTH)
    names = " + ".join(
        f"{tier} {cap:,}" for tier, cap in zip(("hbm", "dram", "disk"), caps, strict=False)
    )
    console.print(
        f"{args.trace}: {len(work.prompts):,} requests, {work.unique_blocks:,} distinct blocks of "
        f"{work.block_tokens} tokens; {names}; {args.model} on {args.devices} {args.device}"
    )
    table = Table(padding=(0, 0, 0, 1), box=None, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    for name in ("hits", "in hbm", "saved s", "load s", "moved GB", "ahead", "worth", "µs/use"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.note:
            table.add_row(row.policy, row.strategy, NOT_KNOWN)
            continue
        table.add_row(
            row.policy,
            row.strategy,
            f"{row.token_hit_rate:.4f}",
            "" if row.hbm_hit_rate is None else f"{row.hbm_hit_rate:.4f}",
            f"{row.saved_s:,.1f}",
            "" if row.load_s is None else f"{row.load_s:,.1f}",
            "" if row.moved_bytes is None else f"{row.moved_bytes / 1e9:,.0f}",
            "" if row.ahead_used is None else f"{row.ahead_used:.0%}",
            "" if row.objective is None else f"{row.objective:.2f}",
            "" if row.per_use_s is None else f"{1e6 * row.per_use_s:.1f}",
        )
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.policy}: {row.note}")
