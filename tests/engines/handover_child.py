"""One side of a P/D pair, run by vLLM's Python: ``handover_child.py JOB SRC``.

See `steered_child`. A question is a run of `vllm_greedy`; ``{"blank": record}`` asks how many
blocks of a record that the probe wrote are all zeros, and how many there are.
"""

import sys
from pathlib import Path

from steered_child import serve

TICKS_MAX = 50


def blank(path):
    """How many [layer, block] of a record are all zeros, and how many there are."""
    import torch

    filled = [bool(data.any()) for data in torch.load(path)["bytes"].values()]
    return {"blank": filled.count(False), "all": len(filled)}


def forget(llm, vllm_greedy, job):
    """Drops the prefix cache. What was handed over is free one step after it was fetched."""
    for attempt in range(TICKS_MAX):
        if llm.reset_prefix_cache():
            return
        tick = {"id": f"tick-{attempt}", "prompt": [5], "params": {}, "tokens": 1}
        vllm_greedy.answer(llm, tick, job, None)
    raise RuntimeError("the engine would not drop its prefix cache")


def answer(llm, job, run):
    from kvatlas.connectors import vllm_greedy

    if "blank" in run:
        return blank(Path(job["store"]) / run["blank"])
    if run["forget"]:
        forget(llm, vllm_greedy, job)
    return vllm_greedy.answer(llm, run, job, None)


if __name__ == "__main__":
    serve(*sys.argv[1:], answer)
