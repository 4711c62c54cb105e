"""One side of a P/D pair, run by vLLM's Python: ``handover_child.py JOB SRC``.

Starts the engine of `kvatlas.connectors.vllm_greedy`, whose runs come as JSON lines on stdin, and
whose answers leave on stdout, all else on stderr. ``{"blank": record}`` asks how many blocks of
a record that the probe wrote are all zeros.
"""

import json
import os
import sys
from pathlib import Path

TICKS_MAX = 50


def blank(path):
    """How many [layer, block] of a record are all zeros, and how many there are."""
    import torch

    filled = [bool(data.any()) for data in torch.load(path)["bytes"].values()]
    return [filled.count(False), len(filled)]


def forget(llm, vllm_greedy, job):
    """Drops the prefix cache. What was handed over is free one step after it was fetched."""
    for attempt in range(TICKS_MAX):
        if llm.reset_prefix_cache():
            return
        tick = {"id": f"tick-{attempt}", "prompt": [5], "params": {}, "tokens": 1}
        vllm_greedy.answer(llm, tick, job, None)
    raise RuntimeError("the engine would not drop its prefix cache")


def main(job_path, source):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, source)
    import vllm_greedy

    os.environ.update(vllm_greedy.ENVIRONMENT)
    job = json.loads(Path(job_path).read_text("utf-8"))
    llm = vllm_greedy.start(job)
    print(json.dumps(vllm_greedy.about()), file=answers, flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        if "blank" in run:
            answer = blank(Path(job["store"]) / run["blank"])
        else:
            if run["forget"]:
                forget(llm, vllm_greedy, job)
            answer = vllm_greedy.answer(llm, run, job, None)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
