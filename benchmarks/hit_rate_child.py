"""The peers' side of the hit rates, in a process of its own under ``.venv-peers``.

``python -m benchmarks.hit_rate_child kvcache TRACE CAPACITY…`` prints what `kvcache-simulator`
gets, hit tokens by policy and capacity in blocks; ``… dynamo TRACE`` what Dynamo's replay reuses.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
WORKERS, WORKER_BLOCKS = 8, 5859


def kvcache(trace: Path, capacities: list[int]) -> dict[str, Any]:
    """Hit tokens in the second half of the trace, as its own sweep counts them."""
    from kvcache_sim.plan import build_execution_plan  # noqa: PLC0415
    from kvcache_sim.policies import simulate_policy  # noqa: PLC0415
    from kvcache_sim.trace import parse_trace_lines  # noqa: PLC0415

    with lzma.open(trace, "rt") as file:
        plan = build_execution_plan(parse_trace_lines(file, block_size=BLOCK_TOKENS))
    rows = {}
    for policy in ("fifo", "lru", "optimal"):
        began = time.perf_counter()
        for capacity in capacities:
            result = simulate_policy(plan, policy, capacity)
            rows[f"{policy}/{capacity}"] = [result.hitTokens, result.totalTokens]
        rows[f"{policy}/seconds"] = (time.perf_counter() - began) / len(capacities)
    return rows


def dynamo(trace: Path) -> dict[str, Any]:
    """Round robin over eight workers with one tier each."""
    from dynamo._core import run_mocker_trace_replay  # noqa: PLC0415

    with (
        lzma.open(trace, "rt") as packed,
        tempfile.NamedTemporaryFile("w", suffix=".jsonl") as plain,
    ):
        shutil.copyfileobj(packed, plain)
        plain.flush()
        began = time.perf_counter()
        result = run_mocker_trace_replay(
            [plain.name],
            extra_engine_args={
                "engine": {"num_gpu_blocks": WORKER_BLOCKS, "block_size": BLOCK_TOKENS}
            },
            num_workers=WORKERS,
            router_mode="round_robin",
            trace_block_size=BLOCK_TOKENS,
        )
    reused = result.summary["prefix_cache_reused_ratio"]
    return {"reused": reused, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    what, path, *numbers = sys.argv[1:]
    told = (
        dynamo(Path(path)) if what == "dynamo" else kvcache(Path(path), [int(n) for n in numbers])
    )
    print(json.dumps(told))
