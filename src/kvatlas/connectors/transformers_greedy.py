"""Runs in an environment with transformers: greedy answers from restored state, on one thread.

``transformers_greedy.py JOB RESULTS``, with the same lines as `vllm_greedy`. transformers has its
own DeepSeek V4 and MLA, and its cache can be cut at any token, so that it shows what an engine with
a grid cannot: rows that are pending between the entries. The job holds ``model`` ("v4" or "mla"),
``tokens``, ``logprobs`` and ``runs``: ``id``, ``position`` (computed first, saved, and restored
into a new cache), ``prompt``, ``other`` (the prompt whose state a swap takes), ``restore`` (false:
go on with the cache that computed it) and ``fault``, [part, how] or null. Models are made here,
with seeded weights, in fp32.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

FLIPPED_BIT = 0x08  # in each byte of the newest row of one layer

V4 = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 64,
    "partial_rotary_factor": 0.25,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "layer_types": ["sliding_attention"] * 2
    + ["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4,
    "sliding_window": 128,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 16,  # with few heads many scores are exactly 0, and ties decide
    "index_head_dim": 32,
    "index_topk": 16,  # so that lost keys show soon
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
MLA = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
_TENSORS = ("buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate")

State = dict[str, Any]
Tensors = dict[tuple[int, str, str], Any]  # by layer, attribute and entry


def build(name: str) -> Any:
    """A model with seeded weights that no initialiser leaves at zero."""
    import torch  # noqa: PLC0415  (only the engines' environment has these)
    from transformers import (  # noqa: PLC0415
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        DeepseekV4Config,
        DeepseekV4ForCausalLM,
    )

    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1)
    if name == "mla":
        config = DeepseekV3Config(**MLA, attn_implementation="eager")
        return DeepseekV3ForCausalLM(config).float().eval()
    config = DeepseekV4Config(**V4, attn_implementation="eager")
    model = DeepseekV4ForCausalLM(config).float().eval()
    for key, buffer in model.named_buffers():
        if key.endswith("tid2eid"):
            order = torch.rand(len(buffer), V4["n_routed_experts"], generator=source)
            buffer.copy_(order.argsort(-1)[:, : buffer.shape[1]])
    for key, parameter in model.named_parameters():
        if key.endswith(("position_bias", "sinks")):
            parameter.data.normal_(0, 0.5, generator=source)
    return model


def parts(cache: Any) -> dict[str, Tensors]:
    """The tensors of a cache by component. Components are named as in the layout of V4
    (`kvatlas.core.families.deepseek_v4`).
    """
    found: dict[str, Tensors] = {}
    for number, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        window = "Sliding" in kind or "V4" in kind
        found.setdefault("swa" if window else "mla_kv", {})[number, "keys", ""] = layer.keys
        if not window:
            found["mla_kv"][number, "values", ""] = layer.values
        for entry in getattr(layer, "compressed_kv", {}):
            ratio = "c4" if hasattr(layer, "overlap_kv") else "c128"
            chain = f"{ratio}_index" if entry == "indexer" else f"{ratio}_kv"
            state = f"{ratio}_index_state" if entry == "indexer" else f"{ratio}_state"
            tensors = [("compressed_kv", chain), *((t, state) for t in _TENSORS)]
            for attribute, part in tensors:
                tensor = getattr(layer, attribute, {}).get(entry)
                if tensor is not None and tensor.numel():
                    found.setdefault(part, {})[number, attribute, entry] = tensor
    return found


def snapshot(cache: Any) -> State:
    """Copies of all tensors, and the counters that go with them."""
    return {
        "parts": {p: {k: t.clone() for k, t in held.items()} for p, held in parts(cache).items()},
        "counters": [
            (getattr(x, "cumulative_length", None), dict(getattr(x, "entry_count", {})))
            for x in cache.layers
        ],
    }


def damaged(state: State, other: State, fault: list[str] | None) -> Tensors:
    """The state's tensors with one part changed. Raises ValueError where it has no such part."""
    import torch  # noqa: PLC0415

    whole: Tensors = {k: t for held in state["parts"].values() for k, t in held.items()}
    if fault is None:
        return whole
    part, how = fault
    held = state["parts"].get(part)
    if not held:
        raise ValueError(f"there is no {part} at this position")
    if how == "zero":
        return whole | {k: torch.zeros_like(t) for k, t in held.items()}
    if how == "swap":
        taken: Tensors = other["parts"][part]
        return whole | taken
    key, tensor = next(iter(held.items()))
    changed = tensor.clone()
    newest = changed[..., -1:, :].contiguous()
    changed[..., -1:, :] = (newest.view(torch.uint8) ^ FLIPPED_BIT).view(newest.dtype)
    return whole | {key: changed}


def restored(model: Any, tensors: Tensors, counters: list[Any]) -> Any:
    """A new cache that holds exactly these tensors."""
    from transformers import DynamicCache  # noqa: PLC0415

    cache = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        keys = tensors[number, "keys", ""].clone()
        values = tensors.get((number, "values", ""), keys)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values if values is keys else values.clone()
        cumulative, entries = counters[number]
        if cumulative is not None:
            layer.cumulative_length = cumulative
        if entries:
            layer.entry_count = dict(entries)
    for (number, attribute, entry), tensor in tensors.items():
        if entry:
            getattr(cache.layers[number], attribute)[entry] = tensor.clone()
    return cache


def answer(model: Any, run: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """The run's tokens and logprobs: its prompt up to the position, the rest, and what follows."""
    import torch  # noqa: PLC0415
    from transformers import DynamicCache  # noqa: PLC0415

    began = time.perf_counter()
    position = run["position"]

    def computed(prompt: list[int]) -> Any:
        cache = DynamicCache(config=model.config)
        model(torch.tensor([prompt[:position]]), past_key_values=cache, use_cache=True)
        return cache

    with torch.no_grad():
        cache = computed(run["prompt"])
        if run["restore"]:
            state = snapshot(cache)
            other = snapshot(computed(run["other"])) if run["fault"] else state
            cache = restored(model, damaged(state, other, run["fault"]), state["counters"])
        result: dict[str, Any] = {
            "id": run["id"],
            "tokens": [],
            "logprobs": [],
            "cached_tokens": position if run["restore"] else 0,
        }
        ahead = run["prompt"][position:]
        while len(result["tokens"]) < job["tokens"]:
            told = model(torch.tensor([ahead]), past_key_values=cache, use_cache=True)
            logprobs = told.logits[0, -1].log_softmax(-1)
            best = sorted(logprobs.topk(job["logprobs"]).indices.tolist())
            result["logprobs"].append([[token, float(logprobs[token])] for token in best])
            ahead = [int(logprobs.argmax())]
            result["tokens"] += ahead
    result["seconds"] = round(time.perf_counter() - began, 3)
    return result


def main(job_path: str, results_path: str) -> None:
    """All runs of a job, in their order."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    job = json.loads(Path(job_path).read_text("utf-8"))
    model = build(job["model"])
    import torch  # noqa: PLC0415

    about = {
        "version": version("transformers"),
        "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "torch": version("torch"),
    }
    with Path(results_path).open("a", encoding="utf-8") as results:
        results.write(json.dumps(about) + "\n")
        for run in job["runs"]:
            results.write(json.dumps(answer(model, run, job)) + "\n")
            results.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
