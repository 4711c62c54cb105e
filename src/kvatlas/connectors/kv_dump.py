"""Runs in an environment with transformers: writes down the KV of real texts, on one thread.

``kv_dump.py JOB RESULTS``, with the same lines as `vllm_greedy`: what computes here, then one line
per file of KV (`kvatlas.validate.delta_study.Dumped`). The job holds ``model`` (its directory),
``layers`` (so many, evenly spread), ``seed``, ``context_tokens_max``, ``contexts`` (``id`` and
``messages``), ``v4_tokens`` and ``out``, the directory of the files.

A file is rows of floats, one per token, layer after layer: as bf16 (computed in fp32), and as fp8
(e4m3) with one scale per layer and component, as engines keep it. Of the trained model there are
the keys before and after rotary embedding, and the values. Of DeepSeek V4, tiny, with random
weights and random tokens, there are the compressed components, whose rows are entries.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

FP8_MAX = 448.0  # the largest e4m3
CHUNK_TOKENS = 256
V4_PARTS = ("c4_kv", "c4_index", "c128_kv")


def written(job: dict[str, Any], told: dict[str, Any], layers: list[Any]) -> Iterator[Any]:
    """The same rows in both forms, and what the files hold."""
    import torch  # noqa: PLC0415  (only the engines' environment has these)

    scaled = [layer * (FP8_MAX / layer.abs().max().clamp(min=1e-12)) for layer in layers]
    for form, dtype, rows in (
        ("bf16", torch.bfloat16, layers),
        ("fp8", torch.float8_e4m3fn, scaled),
    ):
        file = Path(job["out"]) / f"{told['model']}-{told['text']}-{told['component']}-{form}"
        made = torch.stack(rows).to(dtype).contiguous()
        file.write_bytes(made.view(torch.uint8).numpy().tobytes())
        yield {
            **told,
            "form": form,
            "file": file.name,
            "layers": len(rows),
            "rows": made.shape[1],
            "row_bytes": made.shape[2] * made.element_size(),
        }


def trained(job: dict[str, Any]) -> Iterator[Any]:
    """Keys and values of every text."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    every = model.config.num_hidden_layers
    count = min(job["layers"], every)
    chosen = [(2 * i + 1) * every // (2 * count) for i in range(count)]
    before: dict[int, list[Any]] = {}
    for number in chosen:
        projection = model.model.layers[number].self_attn.k_proj
        projection.register_forward_hook(
            lambda _, __, keys, number=number: before[number].append(keys[0])
        )
    for text, context in enumerate(job["contexts"]):
        said = tokenizer.apply_chat_template(context["messages"], tokenize=False)
        ids = tokenizer(said, add_special_tokens=False)["input_ids"][: job["context_tokens_max"]]
        before.update({number: [] for number in chosen})
        cache = DynamicCache(config=model.config)
        for at in range(0, len(ids), CHUNK_TOKENS):
            part = torch.tensor([ids[at : at + CHUNK_TOKENS]])
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)

        def held(number: int, name: str, cache: Any = cache) -> Any:
            """Heads × tokens × floats as an engine keeps them: all heads of a token together."""
            return getattr(cache.layers[number], name)[0].transpose(0, 1).flatten(1)

        for component, layers in (
            ("K before RoPE", [torch.cat(before[number]) for number in chosen]),
            ("K", [held(number, "keys") for number in chosen]),
            ("V", [held(number, "values") for number in chosen]),
        ):
            about = {"model": "trained", "text": text, "component": component}
            yield from written(job, about, layers)


def tiny_v4(job: dict[str, Any]) -> Iterator[Any]:
    """The compressed components of random tokens in a random model."""
    import torch  # noqa: PLC0415
    from transformers import DynamicCache  # noqa: PLC0415

    from kvatlas.connectors.transformers_greedy import build, parts  # noqa: PLC0415

    model = build("v4")
    source = torch.Generator().manual_seed(job["seed"])
    ids = torch.randint(0, model.config.vocab_size, (1, job["v4_tokens"]), generator=source)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    found = parts(cache)
    for component in V4_PARTS:
        layers = [tensor.reshape(-1, tensor.shape[-1]) for tensor in found[component].values()]
        yield from written(job, {"model": "v4", "text": 0, "component": component}, layers)


def main(job_path: str, results_path: str) -> None:
    """All texts of a job, in their order, and then V4."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    job = json.loads(Path(job_path).read_text("utf-8"))
    here = {
        "version": version("transformers"),
        "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "torch": version("torch"),
    }
    with Path(results_path).open("a", encoding="utf-8") as results, torch.no_grad():
        results.write(json.dumps(here) + "\n")
        for make in (trained, tiny_v4):
            for told in make(job):
                results.write(json.dumps(told) + "\n")
                results.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
