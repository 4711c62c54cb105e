"""Runs inside vLLM's environment: greedy answers with their logprobs, one request at a time.

``vllm_greedy.py JOB RESULTS``: reads the JSON file JOB and appends JSON lines to RESULTS: what
computes here, then one line per finished run. The job holds ``model`` (a directory), ``settings``
(arguments of ``LLM``), ``store`` and ``parts`` (see `vllm_probe`), ``beside`` (settings of further
connectors, where there are any), ``connector`` (the `kv_transfer_config` instead of the probe's;
{} for none), ``seed_weights`` (make up weights), ``tokens`` to decode,
``logprobs`` per token, ``reference`` (lines of an earlier process, by id) and ``runs``: objects
with ``id``, ``prompt`` (a list of ids), ``params`` (the probe's wishes), ``forget`` (drop the
engine's own prefix cache first), ``like`` (the id of a run that this one is compared with; "" for
none) and maybe ``tokens`` of their own. A run ends at its first difference.

One process, one thread, no compilation: the same input gives the same bits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
PROBE = "kvatlas_vllm_probe"


def seed_weights() -> None:
    """Random weights that tell prompts apart; vLLM's own dummies are all but zero."""
    import torch  # noqa: PLC0415  (only the engine's environment has it)
    from vllm.model_executor.model_loader import dummy_loader  # noqa: PLC0415

    source = torch.Generator().manual_seed(0)

    def initialize(tensor: Any, *_: Any, **__: Any) -> None:
        noise = torch.randn(tensor.shape, generator=source)
        wide = tensor.dim() > 1
        tensor.data.copy_(noise * tensor.shape[-1] ** -0.5 if wide else 1 + noise / 10)

    dummy_loader.initialize_single_dummy_weight = initialize


def start(job: dict[str, Any]) -> Any:
    """The engine, in this process, with the probe as its connector."""
    from vllm import LLM  # noqa: PLC0415

    if job["seed_weights"]:
        seed_weights()
    spec = importlib.util.spec_from_file_location(PROBE, Path(__file__).with_name("vllm_probe.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PROBE] = module  # the engine imports it by this name
    spec.loader.exec_module(module)
    probe = {
        "kv_connector": "ProbeConnector",
        "kv_connector_module_path": PROBE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": job["store"], "parts": job["parts"]},
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [probe, *job.get("beside", ())]},
    }
    wanted = job.get("connector", several if job.get("beside") else probe)
    return LLM(
        job["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=not job.get("connector"),
        seed=0,
        kv_transfer_config=wanted or None,
        **job["settings"],
    )


def answer(
    llm: Any, run: dict[str, Any], job: dict[str, Any], like: dict[str, Any] | None
) -> dict[str, Any]:
    """One run's result; it is cut at the first token or logprob that differs from ``like``."""
    from vllm import SamplingParams  # noqa: PLC0415

    params = SamplingParams(
        temperature=0,
        max_tokens=run.get("tokens", job["tokens"]),
        ignore_eos=True,
        detokenize=False,
        logprobs=job["logprobs"],
        extra_args={"kv_transfer_params": run["params"]} if run["params"] else None,
    )
    engine = llm.llm_engine
    began = time.perf_counter()
    engine.add_request(run["id"], {"prompt_token_ids": run["prompt"]}, params)
    result: dict[str, Any] = {"id": run["id"], "tokens": [], "logprobs": [], "cached_tokens": 0}
    while engine.has_unfinished_requests():
        for output in engine.step():
            told = output.outputs[0]
            new = range(len(result["tokens"]), len(told.token_ids))
            result["cached_tokens"] = output.num_cached_tokens
            if output.kv_transfer_params:
                result["handed_over"] = output.kv_transfer_params
            result["tokens"] += [int(told.token_ids[i]) for i in new]
            result["logprobs"] += [
                [[token, entry.logprob] for token, entry in sorted(told.logprobs[i].items())]
                for i in new
            ]
            if like is not None and any(
                result[what] != like[what][: len(result["tokens"])]
                for what in ("tokens", "logprobs")
            ):
                engine.abort_request([output.request_id])
    result["seconds"] = round(time.perf_counter() - began, 3)
    return result


def cached_by_source(llm: Any) -> dict[str, int]:
    """The engine's own counters: prompt tokens that it did not compute, by where they came from."""
    return {
        metric.labels["source"]: int(metric.value)
        for metric in llm.get_metrics()
        if metric.name == "vllm:prompt_tokens_cached_by_source"
    }


def about() -> dict[str, str]:
    """What computes here: vLLM's version as it tells it over HTTP, and the device as its kernels
    are chosen."""
    import torch  # noqa: PLC0415
    from vllm import __version__  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    device = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    if current_platform.is_cuda():  # asked of the driver: nothing is taken of the device
        device = "cuda sm{}{}".format(*current_platform.get_device_capability())
    return {
        "version": __version__,
        "device": device,
        "torch": version("torch"),
    }


def main(job_path: str, results_path: str) -> None:
    """All runs of a job, in their order."""
    os.environ.update(ENVIRONMENT)
    job = json.loads(Path(job_path).read_text("utf-8"))
    llm = start(job)
    known: dict[str, dict[str, Any]] = dict(job["reference"])
    with Path(results_path).open("a", encoding="utf-8") as results:
        results.write(json.dumps(about()) + "\n")
        for run in job["runs"]:
            if run["forget"] and not llm.reset_prefix_cache():
                raise RuntimeError("the engine would not drop its prefix cache")
            before = cached_by_source(llm) if job.get("connector") else {}
            known[run["id"]] = answer(llm, run, job, known.get(run["like"]))
            if job.get("connector"):
                after = cached_by_source(llm)
                known[run["id"]]["sources"] = {
                    source: count - before.get(source, 0) for source, count in after.items()
                }
            results.write(json.dumps(known[run["id"]]) + "\n")
            results.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
