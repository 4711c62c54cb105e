"""What the scripts behind `steered` have in common, run by vLLM's Python: ``SCRIPT JOB SRC``.

Starts the engine of `kvatlas.connectors.vllm_greedy`, says what computes there, and answers JSON
lines on stdin with one each on stdout; all else goes to stderr.
"""

import json
import os
import sys
from pathlib import Path


def serve(job_path, source, answer):
    """``answer``: of the engine, its job and a question, what there is to say."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, source)
    from kvatlas.connectors import vllm_greedy

    os.environ.update(vllm_greedy.ENVIRONMENT)
    job = json.loads(Path(job_path).read_text("utf-8"))
    llm = vllm_greedy.start(job)
    print(json.dumps(vllm_greedy.about()), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(llm, job, json.loads(line))), file=answers, flush=True)
