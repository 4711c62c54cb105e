"""Copies ahead of need in the simulator: what each switch brings, on the same arrivals.

Four engines of Qwen3 32B on one H200 each, on nodes whose agents read from each other's memory.
Beside the four families two more, made for it: prompts of which seven in ten begin with one long
system prompt, and chats that come back while long single prompts keep their engines busy.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvatlas.core.ahead_copies import Params
from kvatlas.sim.cluster import Cluster, ClusterFile, EngineTable, TiersTable, build
from kvatlas.sim.links import PROFILES
from kvatlas.sim.report import SimReport
from kvatlas.sim.world import simulate
from kvatlas.workload.families import Family, generate, spread
from kvatlas.workload.presets import FAMILIES
from kvatlas.workload.trace import Trace, TraceRequest

PROCESSES = 2
SEEDS = (0, 1, 2)
CARD = PROFILES["RDMA-400G"].bytes_per_s  # between the nodes
SWITCHES = {
    "off": Params(),
    "replicate": Params(replicate=True, bytes_per_s=CARD),
    "push": Params(push=True, bytes_per_s=CARD),
}
#: Families, requests, and requests per second at which engines are busy.
FAMILY_RATES = {"random": (250, 10), "shared-prompt": (250, 16), "multi-turn": (250, 6.7),
                "agent": (250, 5), "hot-prefix": (200, 5)}  # fmt: skip
HOT = Family(
    requests=200,
    duration_s=40,
    block_tokens=16,
    first_tokens=spread(1000, 6000, 100),
    output_tokens=spread(60, 300, 1),
    groups=6,
    group_weights=(0.7, 0.1, 0.05, 0.05, 0.05, 0.05),
    system_tokens=spread(20_000, 30_000, 12_000),
)
BUSY_CHATS = "busy-chats"
FAMILY_NAMES = (*FAMILY_RATES, BUSY_CHATS)
_BLOCK = 512


def cluster(ahead: Params) -> Cluster:
    """Four nodes with 1 TB of memory each."""
    table = EngineTable(name="engine", count=4, model="qwen3-32b")
    tiers = TiersTable(dram="1TB", peers=True)
    return build(ClusterFile(engine=(table,), tiers=tiers, ahead=ahead), lambda place: place)


def workload(family: str, seed: int) -> Trace:
    """The arrivals of a seed: the same for all switches."""
    if family == BUSY_CHATS:
        requests = tuple(_busy_chats(seed))
        return Trace(family, "made", _BLOCK, lambda: iter(requests))
    count, rate = FAMILY_RATES[family]
    shape = HOT if family == "hot-prefix" else FAMILIES[family]
    shape = msgspec.structs.replace(shape, requests=count, duration_s=count / rate)
    return generate(shape, seed, family)


def _busy_chats(seed: int) -> Iterator[TraceRequest]:
    """16 chats of 20,000 tokens, seven turns each 4 to 12 s apart, and every three seconds or so a
    prompt of 30,000 tokens that nothing else shares."""
    draw = random.Random(seed)
    fresh = iter(range(1_000_000, 100_000_000))
    asked: list[tuple[float, tuple[int, ...]]] = []
    for chat in range(16):
        ids = tuple(next(fresh) for _ in range(40))
        at = draw.uniform(0, 8) + chat / 2
        for _ in range(7):
            ids = (*ids, *(next(fresh) for _ in range(draw.randrange(1, 4))))
            asked.append((at, ids))
            at += draw.uniform(4, 12)
    end, at = max(at for at, _ in asked), draw.expovariate(0.3)
    while at < end:
        asked.append((at, tuple(next(fresh) for _ in range(60))))
        at += draw.expovariate(0.3)
    for index, (at, ids) in enumerate(sorted(asked)):
        yield TraceRequest(index, at, (len(ids) - 1) * _BLOCK + 100, draw.randrange(1, 40), ids)


def _play(job: tuple[str, int, str]) -> tuple[str, str, SimReport]:
    family, seed, switch = job
    report = simulate(cluster(SWITCHES[switch]), workload(family, seed), seed=seed)
    return family, switch, report


def measure(families: tuple[str, ...] = FAMILY_NAMES, seeds: tuple[int, ...] = SEEDS) -> Any:
    """``rows``: one per family and switch, means and sums over the seeds."""
    jobs = [(f, seed, switch) for f in families for seed in seeds for switch in SWITCHES]
    reports: dict[tuple[str, str], list[SimReport]] = {}
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        for family, switch, report in pool.map(_play, jobs):
            reports.setdefault((family, switch), []).append(report)
    return {"rows": [_row(*which, found) for which, found in reports.items()]}


def _row(family: str, switch: str, reports: list[SimReport]) -> dict[str, Any]:
    tallies = [tally for report in reports for tally in report.ahead.values()]
    count = len(reports)
    return {
        "family": family,
        "switch": switch,
        "ttft_mean_s": round(sum(r.latency.ttft_s.mean or 0.0 for r in reports) / count, 5),
        "ttft_p95_s": round(sum(r.latency.ttft_s.p95 or 0.0 for r in reports) / count, 5),
        "ordered": sum(tally.ordered for tally in tallies),
        "arrived": sum(tally.ended["arrived"] for tally in tallies),
        "unused": sum(tally.unused for tally in tallies),
        "moved_bytes": sum(tally.moved_bytes for tally in tallies),
        "served": sum(tally.served for tally in tallies),
        "predicted_s": round(sum(tally.predicted_s for tally in tallies), 3),
        "measured_s": round(sum(tally.measured_s for tally in tallies), 3),
        "seeds": count,
    }


def run() -> dict[str, Any]:
    """Measure, print the table."""
    figures: dict[str, Any] = measure()
    table = Table(title="TTFT: means over the seeds; copies: sums", title_justify="left")
    names = ("family", "switch", "mean, s", "p95, s", "copies", "unused", "GB", "served",
             "saved, s", "predicted, s")  # fmt: skip
    for column in names:
        table.add_column(column, justify="left" if column in ("family", "switch") else "right")
    for row in figures["rows"]:
        table.add_row(
            row["family"] if row["switch"] == "off" else "",
            row["switch"],
            f"{row['ttft_mean_s']:.4f}",
            f"{row['ttft_p95_s']:.4f}",
            f"{row['ordered']}",
            f"{row['unused']}",
            f"{row['moved_bytes'] / 1e9:.1f}",
            f"{row['served']}",
            f"{row['measured_s']:.2f}",
            f"{row['predicted_s']:.2f}",
        )
    Console(width=125).print(table)
    return figures
