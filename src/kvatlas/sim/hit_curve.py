"""What a cache could hit of a workload at all, by its size, and how much engines and tiers hold.

Without time: plain LRU over the trace's blocks, exact, in one pass (`workload.trace_stats`). A run
hits less where its caches are several, and more where they keep what comes back.
"""

from __future__ import annotations

import itertools

import msgspec

from kvatlas.errors import TraceError
from kvatlas.sim.cluster import Cluster
from kvatlas.sim.plan_engines import resident_blocks
from kvatlas.workload.trace import Trace
from kvatlas.workload.trace_stats import Counting

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)  # of all distinct blocks


class HitCurve(msgspec.Struct, frozen=True):
    """``points``: tokens that a cache holds, and the share of prompt blocks that it then hits.
    ``holds``: about how many tokens of such prompts fit, by place."""

    block_tokens: int
    points: tuple[tuple[int, float], ...]
    holds: dict[str, float]


def hit_curve(trace: Trace, cluster: Cluster, limit: int | None = None) -> HitCurve:
    """Of the first ``limit`` requests, on the cluster's engines and tiers. Raises TraceError, also
    where there are no requests."""
    counting = Counting(trace.block_tokens)
    for request in itertools.islice(trace, limit):
        counting.add(request)
    found = counting.result()
    if found is None:
        raise TraceError(f"{trace.name}: no requests in it")
    sizes = sorted({max(1, round(found.unique_blocks * share)) for share in SHARES})
    return HitCurve(
        trace.block_tokens,
        tuple((blocks * trace.block_tokens, counting.lru_hit_rate(blocks)) for blocks in sizes),
        holds(cluster, found.prompt_tokens.mean),
    )


def holds(cluster: Cluster, prompt_tokens: float) -> dict[str, float]:
    """Tokens of prompts of that length, each with a resume point at its end. Of engines in halves
    those that prefill count."""
    engines = [member for member in cluster.members if member.role != "decode"]
    tokens = max(1, round(prompt_tokens))
    each = [e.spec.blocks / resident_blocks(e.layout, tokens) * tokens for e in engines]
    found = {"HBM of one engine": each[0], "HBM of all": sum(each)}
    if cluster.tiers is None or not engines[0].layout.components:
        return found
    nodes = len({member.node for member in cluster.members})
    per_byte = tokens / engines[0].layout.load_bytes(tokens)
    sizes = {
        "host memory": cluster.tiers.dram_bytes * nodes,
        "disks": cluster.tiers.disk_bytes * nodes,
        "the store": cluster.tiers.object_bytes,
    }
    return found | {name: size * per_byte for name, size in sizes.items() if size}
