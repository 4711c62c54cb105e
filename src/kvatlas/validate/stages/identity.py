"""What an engine tells of what it computes with: the settings that stages freeze and compare.

vLLM tells its whole configuration at ``/server_info`` only with ``VLLM_SERVER_DEV_MODE=1``; SGLang
tells it always. What cannot be read is left out, never guessed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.config import WorkerConfig
from kvatlas.errors import ConfigError, EngineError, LayoutError
from kvatlas.service.http_client import HttpClient
from kvatlas.service.identity import told_layout
from kvatlas.service.probe import Description, describe
from kvatlas.validate.stages.facts import EngineSeen
from kvatlas.validate.stages.stagefile import Engine

_DEADLINE_S = 20.0
#: vLLM lists the packages of its machine the first time that it is asked, by a dozen commands.
_INFO_DEADLINE_S = 120.0
_TEXT = "Ein Atlas, 一张地图, un atlas — and 42 {braces}.\n\n\tEnd."
_WHY = {
    "vllm": "it does not tell its configuration: start vLLM with VLLM_SERVER_DEV_MODE=1",
    "sglang": "it does not tell at /server_info",
    "stub": "the stub engine does not tell",
}
#: Connectors that keep nothing where other engines find it; the agent's own tiers are asked there.
_LOCAL_CONNECTORS = (
    "NixlConnector",
    "MooncakeConnector",
    "P2pNcclConnector",
    "OffloadingConnector",
    "KvatlasConnector",
    "KvatlasTieringConnector",
)
_CACHE_FACTS = ("block_size", "cache_dtype", "sliding_window", "prefix_caching_hash_algo")
_HASHED_MAX = 2 << 20  # of a file of weights: its beginning, its end and its size


async def look_at(client: HttpClient, engine: Engine) -> EngineSeen:
    """Raises EngineError where it does not answer at all."""
    worker = WorkerConfig(name=engine.name, url=engine.url, engine=engine.engine)
    told = await describe(client, worker, _DEADLINE_S)
    seen, why = _common(told, worker), _WHY[engine.engine]
    try:
        info = await _info(client, engine)
    except EngineError as error:  # 404 as well
        info, why = {}, f"{why} ({error})"
    more = _sglang(info) if engine.engine == "sglang" else _vllm(info)
    seen |= {name: value for name, value in more.items() if value}
    if engine.engine == "vllm" and told.facts:  # a metrics page was read: it would show there
        seen.setdefault("speculation", "on" if told.draft else "off")
    if found := await _tokenizer(client, engine, told):
        seen["tokenizer"] = found
    return EngineSeen(engine.name, engine.role, {k: v for k, v in seen.items() if v}, why)


def _common(told: Description, worker: WorkerConfig) -> dict[str, str]:
    facts = dict(told.facts)
    blocks = facts.get("num_gpu_blocks", "")
    pool = int(blocks) * told.block_tokens if blocks.isdecimal() else 0
    found = {
        # Of a directory its name alone: machines differ, and the digest is that of its files.
        "model": _named(told.model_path) or ",".join(told.models),
        "model_digest": files_digest(Path(told.model_path)) if told.model_path else "",
        "runtime": f"{told.engine} {told.version}" if told.version else "",
        "tensor_parallel": str(told.tensor_parallel or ""),
        "context_tokens": str(told.context_tokens or ""),
        "kv_dtype": "" if told.kv_dtype == "auto" else told.kv_dtype,
        "block_tokens": str(told.block_tokens or ""),
        "pool_tokens": str(pool or ""),
    }
    try:
        found["layout"] = told_layout(worker, told, told.draft).digest()
    except (LayoutError, ConfigError, OSError):  # its config is not here: what its cache tells
        found["layout"] = ", ".join(f"{n} {facts[n]}" for n in _CACHE_FACTS if facts.get(n))
    return found


def _named(model: str) -> str:
    return Path(model).name if model.startswith("/") else model


def files_digest(directory: Path) -> str:
    """Of a model's files, where they lie on this machine; of a large one its size, its first and
    last bytes. "" where there are none."""
    if not directory.is_dir():
        return ""
    digest = hashlib.sha256()
    names = ("*.json", "*.safetensors", "*.bin", "*.gguf", "*.jinja", "*.model")
    files = sorted({path for name in names for path in directory.glob(name)})
    try:
        for path in files:
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(_HASHED_MAX // 2))
                if size > _HASHED_MAX:
                    file.seek(-_HASHED_MAX // 2, 2)
                digest.update(file.read(_HASHED_MAX))
    except OSError:
        return ""
    return f"sha256:{digest.hexdigest()}" if files else ""


async def _info(client: HttpClient, engine: Engine) -> dict[str, Any]:
    query = "?config_format=json" if engine.engine != "sglang" else ""
    url = f"{engine.url.rstrip('/')}/server_info{query}"
    found = await client.get_json(url, timeout_s=_INFO_DEADLINE_S)
    return found if isinstance(found, dict) else {}


def _vllm(info: Mapping[str, Any]) -> dict[str, str]:
    config = info.get("vllm_config")
    if not isinstance(config, dict) or not config:
        return {}
    model, cache = _table(config, "model_config"), _table(config, "cache_config")
    transfer = _table(config, "kv_transfer_config")
    hisparse = _table(config, "attention_config").get("hisparse_config")
    names = _connectors(transfer)
    speculation = _table(config, "speculative_config")
    graphs = _text(_table(config, "compilation_config").get("cudagraph_mode"))
    weights = _text(model.get("dtype")).removeprefix("torch.")
    kv_dtype = _text(cache.get("cache_dtype"))
    return {
        "weights_dtype": weights,
        # vLLM: as the weights have it.
        "kv_dtype": weights if kv_dtype == "auto" else kv_dtype,
        "tensor_parallel": _text(_table(config, "parallel_config").get("tensor_parallel_size")),
        "context_tokens": _text(model.get("max_model_len")),
        "graphs": "off" if model.get("enforce_eager") is True else graphs,
        "speculation": _text(speculation.get("method")) or "on" if speculation else "off",
        "hisparse": "on" if hisparse or "HiSparseConnector" in names else "off",
        "connector": "+".join(names) or "none",
        "shared_store": "+".join(n for n in names if n not in _LOCAL_CONNECTORS) or "none",
    }


def _connectors(transfer: Mapping[str, Any]) -> list[str]:
    """All that are configured, those inside a MultiConnector too."""
    name = _text(transfer.get("kv_connector"))
    inner = _table(transfer, "kv_connector_extra_config").get("connectors")
    found = [] if not name or name == "MultiConnector" else [name]
    for one in inner if isinstance(inner, list) else []:
        found += _connectors(one) if isinstance(one, dict) else []
    tiers = _table(transfer, "kv_connector_extra_config").get("secondary_tiers")
    if tiers and name == "OffloadingConnector":
        found.append("secondary_tiers")
    return found


def _sglang(info: Mapping[str, Any]) -> dict[str, str]:
    if "tp_size" not in info:
        return {}
    storage = _text(info.get("hicache_storage_backend"))
    mode = _text(info.get("disaggregation_mode"))
    split = mode not in ("", "null", "none")
    backend = _text(info.get("disaggregation_transfer_backend")) if split else ""
    weights = _text(info.get("dtype")).removeprefix("torch.")
    weights = "the model's own" if weights == "auto" else weights
    kv_dtype = _text(info.get("kv_cache_dtype"))
    found = {
        "weights_dtype": weights,
        "kv_dtype": weights if kv_dtype == "auto" else kv_dtype,
        "tensor_parallel": _text(info.get("tp_size")),
        "context_tokens": _text(info.get("context_length")),
        "speculation": _text(info.get("speculative_algorithm")) or "off",
        "connector": backend or ("hicache" if info.get("enable_hierarchical_cache") else "none"),
        "shared_store": storage or "none",
    }
    if isinstance(graphs := info.get("disable_cuda_graph"), bool):
        found["graphs"] = "off" if graphs else "on"
    if isinstance(hisparse := info.get("enable_hisparse"), bool):
        found["hisparse"] = "on" if hisparse else "off"
    return found


async def _tokenizer(client: HttpClient, engine: Engine, told: Description) -> str:
    """By the ids that it makes of one text."""
    body = {"model": told.models[0] if told.models else "", "prompt": _TEXT}
    try:
        answer = await client.post_json(
            f"{engine.url.rstrip('/')}/tokenize", body, timeout_s=_DEADLINE_S
        )
    except EngineError:
        return ""
    ids = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(ids, list) or not ids:
        return ""
    return "ids " + hashlib.sha256(msgspec.json.encode(ids)).hexdigest()[:16]


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _text(value: object) -> str:
    """A setting as told; "" for none."""
    return "" if value is None else str(value)
