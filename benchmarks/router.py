"""Policies × families in the simulator: ours beside what other routers do, on the same arrivals.

Eight default engines. The real traces are looked for beside the repository, in
``../shared/traces``; one that is not there is left out, with the reason. Each seed is another part
of a real trace with its arrivals shaken, or another workload of a generated family. Rivals with
knobs are tuned first, on a seed of their own, for the lowest product of TTFT p50 and p95.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.peers import ROOT
from kvatlas.core.rivals import Knobs
from kvatlas.core.router import Policy
from kvatlas.sim.cluster import default_cluster
from kvatlas.sim.world import simulate
from kvatlas.workload.families import generate
from kvatlas.workload.presets import FAMILIES
from kvatlas.workload.trace import Trace, TraceRequest, open_trace

TRACES = ROOT.parent / "shared" / "traces"
ENGINES = 8
PROCESSES = 2
REQUESTS = 300
SEEDS = tuple(range(10))
TUNING_SEED = 10
JITTER_S = 3.0  # the conversation trace's own clock ticks every three seconds

#: Real traces: the file, and what their times are multiplied by.
REAL = {
    "conversation": ("mooncake_conversation.jsonl.xz", 0.5),
    "claude-code": ("claude_code_sessions_compact.jsonl.xz", 0.25),
}
#: Generated families: requests a second at which sessions start to keep the engines busy.
RATES = {"random": 67, "shared-prompt": 83, "multi-turn": 33, "agent": 33}

#: Rivals, and the settings of their published knobs among which each may choose.
GRID: dict[Policy, tuple[Knobs, ...]] = {
    "round_robin": (Knobs(),),
    "least_load": (Knobs(),),
    "longest_prefix": tuple(
        Knobs(cache_threshold=share, balance_abs=requests)
        for share, requests in ((0.3, 64), (0.3, 8), (0.0, 64), (0.0, 8))
    ),
    "power_of_two": (Knobs(), Knobs(cache_threshold=0.05), Knobs(cache_threshold=0.6)),
    "block_cost": tuple(Knobs(overlap_weight=weight) for weight in (0.5, 1, 2, 4, 16)),
}


class Run(msgspec.Struct, frozen=True):
    """One policy with one setting over one trace."""

    policy: Policy
    knobs: Knobs
    ttft_p50_s: float
    ttft_p95_s: float
    hit_tokens: int
    prompt_tokens: int


def missing(family: str) -> str:
    """Why a family cannot be played here, "" where it can."""
    if family in RATES or (TRACES / REAL[family][0]).is_file():
        return ""
    return f"{REAL[family][0]} is not in ../shared/traces"


def workload(family: str, seed: int, requests: int) -> Trace:
    """The arrivals of a seed: the same for all policies."""
    if family in RATES:
        shape = msgspec.structs.replace(
            FAMILIES[family], requests=requests, duration_s=requests / RATES[family]
        )
        return generate(shape, seed, family)
    name, scale = REAL[family]
    trace = open_trace(TRACES / name)
    part = list(itertools.islice(trace, seed * requests, (seed + 1) * requests))
    return Trace(family, "part", trace.block_tokens, lambda: _shaken(part, seed, scale))


def _shaken(part: list[TraceRequest], seed: int, scale: float) -> Iterator[TraceRequest]:
    rng = random.Random(seed)
    begun = part[0].arrival_s
    times = [(r.arrival_s - begun + rng.uniform(0, JITTER_S)) * scale for r in part]
    for index, at in enumerate(sorted(range(len(part)), key=times.__getitem__)):
        yield msgspec.structs.replace(part[at], index=index, arrival_s=times[at], think_s=None)


def play(trace: Trace, policy: Policy, knobs: Knobs) -> Run:
    """One run."""
    cluster = default_cluster(engines=ENGINES, policy=policy)
    router = msgspec.structs.replace(cluster.router, knobs=knobs)
    report = simulate(msgspec.structs.replace(cluster, router=router), trace)
    ttft = report.latency.ttft_s
    if ttft.p50 is None or ttft.p95 is None:
        raise RuntimeError(f"{trace.name}, {policy}: no request was answered")
    hits = sum(report.tokens.hits.values())
    return Run(policy, knobs, ttft.p50, ttft.p95, hits, report.tokens.prompt)


def _plays(job: tuple[str, int, int, tuple[tuple[Policy, Knobs], ...]]) -> tuple[str, list[Run]]:
    family, seed, requests, settings = job
    trace = workload(family, seed, requests)
    return family, [play(trace, policy, knobs) for policy, knobs in settings]


def measure(
    families: tuple[str, ...] = (*REAL, *RATES),
    seeds: tuple[int, ...] = SEEDS,
    requests: int = REQUESTS,
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All policies over all families: ``rows``, and why others were ``left_out``."""
    left_out = {family: reason for family in families if (reason := missing(family))}
    here = [family for family in families if family not in left_out]
    every = tuple((policy, knobs) for policy, grid in GRID.items() for knobs in grid)
    runs: dict[str, list[Run]] = {family: [] for family in here}
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        tuned = {}
        for family, tries in pool.map(_plays, [(f, TUNING_SEED, requests, every) for f in here]):
            tuned[family] = {policy: _best(tries, policy) for policy in GRID}
            progress(f"{family}: rivals are tuned")
        jobs = [
            (family, seed, requests, (("price", Knobs()), *tuned[family].items()))
            for family in here
            for seed in seeds
        ]
        for family, done in pool.map(_plays, jobs):
            runs[family].extend(done)
            if len(runs[family]) == len(seeds) * len(done):
                progress(f"{family}: done")
    rows = [
        _row(family, policy, [run for run in runs[family] if run.policy == policy])
        for family in here
        for policy in ("price", *GRID)
    ]
    return {"engines": ENGINES, "requests": requests, "rows": rows, "left_out": left_out}


def _best(tries: list[Run], policy: Policy) -> Knobs:
    own = [run for run in tries if run.policy == policy]
    return min(own, key=lambda run: run.ttft_p50_s * run.ttft_p95_s).knobs


def _row(family: str, policy: str, runs: list[Run]) -> dict[str, Any]:
    """Means over the seeds; of the knobs those that were turned."""
    turned = {
        name: value
        for name, value in msgspec.structs.asdict(runs[0].knobs).items()
        if value != getattr(Knobs(), name)
    }
    return {
        "family": family,
        "policy": policy,
        "ttft_p50_s": round(sum(run.ttft_p50_s for run in runs) / len(runs), 5),
        "ttft_p95_s": round(sum(run.ttft_p95_s for run in runs) / len(runs), 5),
        "hit_tokens": round(sum(run.hit_tokens for run in runs) / len(runs)),
        "prompt_tokens": round(sum(run.prompt_tokens for run in runs) / len(runs)),
        "knobs": turned,
        "seeds": len(runs),
    }


def run() -> dict[str, Any]:
    """Measure, print the table."""
    figures = measure()
    table = Table(title="TTFT and hits: means over the seeds", title_justify="left")
    for column in ("family", "policy", "p50, s", "p95, s", "hit tokens", "of prompts", "knobs"):
        table.add_column(column, justify="left" if column in ("family", "policy") else "right")
    shown = ""
    for row in figures["rows"]:
        knobs = ", ".join(f"{name} {value:g}" for name, value in row["knobs"].items())
        table.add_row(
            "" if row["family"] == shown else row["family"],
            row["policy"],
            f"{row['ttft_p50_s']:.4f}",
            f"{row['ttft_p95_s']:.4f}",
            f"{row['hit_tokens']:,}",
            f"{row['hit_tokens'] / row['prompt_tokens']:.4f}",
            knobs,
        )
        shown = row["family"]
    console = Console(width=125)
    console.print(table)
    for family, reason in figures["left_out"].items():
        console.print(f"{family}: left out: {reason}")
    return figures
