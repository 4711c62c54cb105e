"""Hit rates of the conversation trace beside `kvcache-simulator` and Dynamo's replay, and how long
one pass takes per policy.

The trace is looked for beside the repository, in ``../shared/traces``. Timings alternate between
the policies, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.hit_rate_child import BLOCK_TOKENS, WORKER_BLOCKS, WORKERS
from benchmarks.peers import ROOT, peer_python
from kvatlas.core.policy.registry import POLICIES, make_policy
from kvatlas.sim.cache import Cache, Level, Work, prepare
from kvatlas.sim.cache import run as replay
from kvatlas.sim.oracles import optimal
from kvatlas.workload.trace import open_trace

TRACE = ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl.xz"
#: 8 to 128 GiB at that simulator's 1,708,739 bytes per block of 512 tokens (V4 Flash, fp8 + fp4).
CAPACITIES = (5027, 10054, 20108, 40216, 80432)
SPEED_BLOCKS = 18_279
ROUNDS = 3
_PINS = {"kvcache": "kvcache-simulator==0.1.3", "dynamo": "ai-dynamo-runtime==1.6.1"}
#: Its LRU lets leaves go only, as our `leaf_lru` does.
OURS = {"fifo": "fifo", "lru": "leaf_lru", "optimal": "optimal"}


def peer(what: str, trace: Path, *capacities: int) -> dict[str, Any]:
    """What a peer answers; it is installed on first use."""
    command = [peer_python(_PINS[what]), "-m", "benchmarks.hit_rate_child", what, trace]
    done = subprocess.run(
        [str(part) for part in (*command, *capacities)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def ours(work: Work, policy: str, capacity: int) -> list[int]:
    """Hit tokens and all tokens in the second half of a trace."""
    half = len(work.prompts) // 2
    if policy == "optimal":
        counts = optimal(work, capacity, measure_from=half)
    else:
        cache = Cache([Level(make_policy(policy), capacity)], block_tokens=work.block_tokens)
        counts = replay(cache, work, measure_from=half)
    return [counts.hit_tokens, counts.tokens]


def round_robin(work: Work) -> float:
    """Token hit rate of strict round robin over workers with an LRU each, without any timing."""
    workers = [
        Cache([Level(make_policy("lru"), WORKER_BLOCKS)], block_tokens=BLOCK_TOKENS)
        for _ in range(WORKERS)
    ]
    for number, prompt in enumerate(work.prompts):
        workers[number % WORKERS].serve(prompt)
    return sum(w.counts.hit_tokens for w in workers) / sum(w.counts.tokens for w in workers)


def speed(work: Work) -> dict[str, float]:
    """Median seconds of one pass over the trace, by policy."""
    names = [name for name in POLICIES if name != "attention"]
    samples: dict[str, list[float]] = {name: [] for name in (*names, "optimal")}
    for _ in range(ROUNDS):
        for name, taken in samples.items():
            began = time.perf_counter()
            ours(work, name, SPEED_BLOCKS)
            taken.append(time.perf_counter() - began)
    return {name: statistics.median(taken) for name, taken in samples.items()}


def run() -> dict[str, Any]:
    """Print the tables, and return their figures."""
    trace = open_trace(TRACE)
    work = prepare(trace, trace.block_tokens)
    console = Console()
    theirs = peer("kvcache", TRACE, *CAPACITIES)
    table = Table(
        title="hit tokens, second half of the trace, %; = as kvcache-simulator, to the token"
    )
    table.add_column("policy")
    for capacity in CAPACITIES:
        table.add_column(f"{capacity:,} blocks", justify="right")
    figures: dict[str, Any] = {"equal": True}
    for name, policy in OURS.items():
        mine = {capacity: ours(work, policy, capacity) for capacity in CAPACITIES}
        cells = []
        for capacity, (hit, tokens) in mine.items():
            equal = [hit, tokens] == theirs[f"{name}/{capacity}"]
            figures["equal"] &= equal
            figures[f"{name}/{capacity}"] = hit / tokens
            cells.append(f"{100 * hit / tokens:.1f} {'=' if equal else '!='}")
        table.add_row(policy, *cells)
    console.print(table)
    replayed, timeless = peer("dynamo", TRACE), round_robin(work)
    console.print(
        f"round robin over {WORKERS} workers: {timeless:.4f}, "
        f"Dynamo replay {replayed['reused']:.4f}"
    )
    times = speed(work)
    table = Table(title=f"one pass, {work.blocks:,} block uses, {SPEED_BLOCKS:,} blocks")
    table.add_column("policy")
    table.add_column("seconds", justify="right")
    table.add_column("µs per use", justify="right")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds:.2f}", f"{1e6 * seconds / work.blocks:.1f}")
    table.add_row("kvcache-simulator lru (Python)", f"{theirs['lru/seconds']:.2f}", "")
    console.print(table)
    return figures | {"round_robin": timeless, "dynamo": replayed, "pass_s": times}
