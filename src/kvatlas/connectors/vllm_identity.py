"""What a vLLM engine says of its model to the agent: the weights, and whatever makes other bytes of
the same weights; and which engines cannot be served. Run by vLLM's own Python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvatlas.errors import EngineError


def name_of(model: Any) -> str:
    """Of the weights: where they come from, and which revision."""
    return " ".join(filter(None, (str(model.model), model.revision)))


def names_served(model: Any) -> tuple[str, ...]:
    """Under which clients ask for it."""
    served = model.served_model_name
    return tuple(served) if isinstance(served, list | tuple) else (served or model.model,)


def config_of(model: Any) -> bytes:
    """config.json as it lies beside the weights, where that is what the engine goes by."""
    file = Path(model.model) / "config.json"
    if file.is_file() and not model.hf_overrides:
        return file.read_bytes()
    return json.dumps(model.hf_config.to_dict(), default=str).encode()


def variant_of(model: Any) -> str:
    """What the engine was told otherwise than config.json says; "": nothing."""
    config = json.loads(config_of(model))
    told: dict[str, Any] = {}
    if model.hf_overrides:
        told["overrides"] = model.hf_overrides
    if model.quantization and "quantization_config" not in config:
        told["quantization"] = model.quantization
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype != config.get("dtype", config.get("torch_dtype")):
        told["dtype"] = dtype
    return json.dumps(told, sort_keys=True, default=str) if told else ""


def check(vllm_config: Any) -> None:
    """Raises EngineError for what no connector of ours supports (yet)."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        raise EngineError(
            "kvatlas: all ranks must be on one node, with the agent that shares their memory"
        )
    if vllm_config.speculative_config is not None:
        raise EngineError("kvatlas: engines with a draft model are not supported yet")
    if not cache.enable_prefix_caching:
        raise EngineError("kvatlas: prefix caching is off, and with it every use of saved state")
