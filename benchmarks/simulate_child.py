"""Dynamo's offline replay, in a process of its own under ``.venv-peers``.

``python -m benchmarks.simulate_child TRACE MODE``: a trace in Mooncake's form, round_robin or
kv_router. Prints one line of JSON: what it reused, its latencies, its processor seconds.
"""

from __future__ import annotations

import json
import sys
import time

BLOCK_TOKENS = 512
WORKERS, WORKER_BLOCKS = 8, 5859


def replay(trace: str, mode: str) -> dict[str, float]:
    """One replay over eight workers with one tier each."""
    from dynamo._core import run_mocker_trace_replay  # noqa: PLC0415

    began = time.process_time()
    result = run_mocker_trace_replay(
        [trace],
        extra_engine_args={
            "engine": {"num_gpu_blocks": WORKER_BLOCKS, "block_size": BLOCK_TOKENS},
            "num_gpu_blocks_is_explicit": True,
        },
        num_workers=WORKERS,
        router_mode=mode,
        trace_block_size=BLOCK_TOKENS,
        capture_planner_details=False,
    )
    spent = time.process_time() - began
    summary = result.summary
    return {
        "reused": summary["prefix_cache_reused_ratio"],
        "ttft_mean_s": summary["mean_ttft_ms"] / 1000,
        "ttft_p99_s": summary["p99_ttft_ms"] / 1000,
        "cpu_s": spent,
    }


if __name__ == "__main__":
    print(json.dumps(replay(sys.argv[1], sys.argv[2])))
