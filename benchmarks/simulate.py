"""The simulator beside NVIDIA Dynamo's offline replay: the same trace, workers and pools.

Eight workers with 5,859 blocks of 512 tokens each, nothing else known of the model, one tier, no
prefill and decode apart: that is what the replay has. Processor seconds are compared, in
alternating rounds: on a busy machine they say more than the wall clock. Beside it, for scale, our
own default cluster (DeepSeek V4 Flash with all of its KV groups), which the replay cannot do.

The conversation trace is looked for beside the repository, in ``../shared/traces``.
"""

from __future__ import annotations

import gc
import itertools
import json
import lzma
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.peers import ROOT, peer_python
from benchmarks.simulate_child import BLOCK_TOKENS, WORKER_BLOCKS, WORKERS
from kvatlas.sim.cluster import (
    Cluster,
    ClusterFile,
    EngineTable,
    Policy,
    RouterTable,
    build,
    default_cluster,
)
from kvatlas.sim.report import SimReport
from kvatlas.sim.world import simulate
from kvatlas.workload.trace import open_trace

TRACE = ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl.xz"
PIN = "ai-dynamo-runtime==1.6.1"
ROUNDS = 3
GENERATED = 3_000
MODES: tuple[tuple[Policy, str], ...] = (("round_robin", "round_robin"), ("price", "kv_router"))


def cluster(policy: Policy) -> Cluster:
    """The replay's workers. Rates near its own defaults; routing by rotation knows no time."""
    table = EngineTable(
        name="worker",
        count=WORKERS,
        model=str(BLOCK_TOKENS),
        blocks=WORKER_BLOCKS,
        prefill_tokens_per_s=40_000.0,
        decode_step_s=0.006,
    )
    file = ClusterFile(engine=(table,), router=RouterTable(policy=policy))
    return build(file, lambda place: place)


def generated(path: Path) -> None:
    """Chats that share a few system prompts: 3,000 requests in Mooncake's form."""
    draw = random.Random(11)
    fresh = itertools.count()
    systems = [[next(fresh) for _ in range(draw.randrange(1, 6))] for _ in range(8)]
    chats: list[list[int]] = []

    def lines() -> Iterator[dict[str, Any]]:
        at_ms = 0.0
        for _ in range(GENERATED):
            if not chats or draw.random() < 0.2:
                chats.append(list(draw.choice(systems)))
            ids = chats[-1 - min(int(draw.expovariate(0.05)), len(chats) - 1)]
            ids += [next(fresh) for _ in range(draw.randrange(1, 8))]
            tokens = (len(ids) - 1) * BLOCK_TOKENS + draw.randrange(1, BLOCK_TOKENS + 1)
            yield {
                "timestamp": round(at_ms),
                "input_length": tokens,
                "output_length": draw.randrange(1, 500),
                "hash_ids": ids,
            }
            at_ms += draw.expovariate(1 / 250)

    with path.open("wb") as file:
        for line in lines():
            file.write(msgspec.json.encode(line) + b"\n")


def peer(trace: Path, mode: str) -> dict[str, float]:
    """One replay in its own process."""
    done = subprocess.run(
        [str(peer_python(PIN)), "-m", "benchmarks.simulate_child", str(trace), mode],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        env=os.environ | {"DYN_LOG": "error"},
    )
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def timed(call: Callable[[], SimReport]) -> tuple[SimReport, float]:
    """A run as `kvatlas sim` makes it, without the collector, and its processor seconds."""
    gc.disable()
    began = time.process_time()
    report = call()
    spent = time.process_time() - began
    gc.enable()
    return report, spent


def ours(trace: Path, which: Cluster) -> dict[str, float]:
    """One run of ours."""
    report, cpu_s = timed(lambda: simulate(which, open_trace(trace)))
    return {
        "reused": report.tokens.hit_share,
        "ttft_mean_s": report.latency.ttft_s.mean or 0.0,
        "ttft_p99_s": report.latency.ttft_s.p99 or 0.0,
        "cpu_s": cpu_s,
    }


def compare(name: str, trace: Path, console: Console) -> dict[str, Any]:
    """Alternating rounds of both, under both kinds of routing."""
    figures: dict[str, Any] = {}
    table = Table(title=f"{name}: kvatlas / Dynamo replay")
    for title in ("routing", "reused", "TTFT mean, ms", "TTFT p99, ms", "CPU s, median", "ratio"):
        table.add_column(title, justify="left" if title == "routing" else "right")
    for policy, mode in MODES:
        mine, theirs = [], []
        for _ in range(ROUNDS):
            mine.append(ours(trace, cluster(policy)))
            theirs.append(peer(trace, mode))
        cpu = [statistics.median(row["cpu_s"] for row in rows) for rows in (mine, theirs)]
        a, b = mine[-1], theirs[-1]
        figures[policy] = {"kvatlas": a | {"cpu_s": cpu[0]}, "dynamo": b | {"cpu_s": cpu[1]}}
        table.add_row(
            f"{policy} / {mode}",
            f"{a['reused']:.4f} / {b['reused']:.4f}",
            f"{1e3 * a['ttft_mean_s']:.0f} / {1e3 * b['ttft_mean_s']:.0f}",
            f"{1e3 * a['ttft_p99_s']:.0f} / {1e3 * b['ttft_p99_s']:.0f}",
            f"{cpu[0]:.1f} / {cpu[1]:.1f}",
            f"{cpu[0] / cpu[1]:.1f}",
        )
    console.print(table)
    return figures


def run() -> dict[str, Any]:
    """Print the tables, and return their figures."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        conversation, chats = Path(folder) / "conversation.jsonl", Path(folder) / "chats.jsonl"
        with lzma.open(TRACE) as packed, conversation.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
        generated(chats)
        figures = {
            "generated": compare(f"{GENERATED:,} generated requests", chats, console),
            "conversation": compare("conversation trace", conversation, console),
        }
        whole = ours(conversation, default_cluster())
    figures["default_cluster"] = whole
    console.print(
        f"conversation trace on eight engines of DeepSeek V4 Flash: {whole['cpu_s']:.1f} s, "
        f"reused {whole['reused']:.4f}"
    )
    return figures
