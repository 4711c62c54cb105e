"""Plain key and value heads: multi-head and grouped-query attention, with or without windows.

Layers with full attention form the chain. Layers with a sliding window (Gemma, gpt-oss, Mistral)
need only the last tokens; vLLM keeps and announces them as groups of their own, SGLang does so
for gpt-oss alone, and otherwise keeps them like the rest.
"""

from __future__ import annotations

import msgspec

from kvatlas.core.families.fields import Fields, Wanted
from kvatlas.core.layout import Component, Compute, Group, Layout, Rule
from kvatlas.errors import LayoutError

_DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text")
_EXPERTS = ("mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe")
MODEL_TYPES = _DENSE + _EXPERTS

_WINDOWED_IN_SGLANG = ("gpt_oss",)
_SGLANG_POOLS = {Rule.CHAIN: "kv", Rule.WINDOW: "swa"}  # 0.5.23 `PoolName`
_VLLM_BLOCK, _SGLANG_PAGE = 16, 1  # the engines' own defaults
# Where a config has no layer_types: every n-th layer has full attention.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}
_VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
_OWN_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Heads(msgspec.Struct, frozen=True):
    """The attention of one layer, in elements, and which layers have a window."""

    hidden: int
    queries: int
    kv: int
    dim: int
    windowed: tuple[bool, ...]
    window: int

    def sliding_layers(self) -> int:
        return sum(self.windowed)

    def full_layers(self) -> int:
        return len(self.windowed) - self.sliding_layers()


def layout(fields: Fields, wanted: Wanted) -> Layout:
    """Components and groups as the engine keeps and announces them."""
    wanted.no_draft()
    heads = _heads(fields)
    dtype = _kv_name(fields, wanted)
    token_bytes = 2 * heads.kv * heads.dim * _VALUE_BYTES[dtype]
    if wanted.engine == "vllm":
        block = wanted.block_tokens or _VLLM_BLOCK
        groups = _vllm_groups(heads, block)
        kept_windows, announced = True, True
    else:
        block = wanted.block_tokens or _SGLANG_PAGE
        groups = (Group("full", "*", block),)
        kept_windows, announced = fields.model_type in _WINDOWED_IN_SGLANG, False
    sliding = heads.sliding_layers() if kept_windows else 0
    parts = (
        ("full", Rule.CHAIN, len(heads.windowed) - sliding, 0, "full"),
        ("sliding", Rule.WINDOW, sliding, heads.window, "sliding" if announced else ""),
    )
    return Layout(
        model=wanted.model,
        engine=wanted.engine,
        kv_dtype=dtype,
        grid_tokens=block,
        components=tuple(
            Component(
                name=f"{name}_kv",
                rule=rule,
                layers=layers,
                block_tokens=block,
                stored_block_bytes=layers * block * token_bytes,
                exact_bytes_per_token=float(layers * token_bytes),
                window_tokens=window,
                group=group,
                pool=_SGLANG_POOLS[rule] if wanted.engine == "sglang" else "",
            )
            for name, rule, layers, window, group in parts
            if layers
        ),
        groups=groups,
        compute=_compute(fields, heads),
        tensor_parallel="by_head",
    )


def _vllm_groups(heads: Heads, block: int) -> tuple[Group, ...]:
    """vLLM 0.32 `_get_kv_cache_groups_uniform_page_size`, in the order of its group indices.

    All groups have equally many layers: as many as the rarer kind has, or as the commoner kind
    where that has fewer than half as many again.
    """
    sliding, full = heads.sliding_layers(), heads.full_layers()
    counts = [n for n in (sliding, full) if n]
    size = min(counts)
    if max(counts) < 1.5 * size:
        size = max(counts)
    groups = []
    if full:
        groups.append(Group("full", "full_attention", block, copies=-(-full // size)))
    if sliding:
        window = Group("sliding", "sliding_window", block, heads.window, copies=-(-sliding // size))
        groups.insert(0 if heads.windowed[0] else 1, window)
    return tuple(groups)


def _kv_name(fields: Fields, wanted: Wanted) -> str:
    name = wanted.kv_dtype
    if name == "auto":
        own = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
        name = _OWN_DTYPES.get(str(own), str(own))
    if name not in _VALUE_BYTES:
        raise LayoutError(f"kv_dtype {name!r} is not one of auto, {', '.join(_VALUE_BYTES)}")
    return name


def _heads(fields: Fields) -> Heads:
    hidden = fields.count("hidden_size")
    queries = fields.count("num_attention_heads", high=4096)
    kv = fields.count("num_key_value_heads", high=queries, default=queries)
    if queries % kv:
        raise LayoutError(f"num_key_value_heads {kv} does not divide num_attention_heads {queries}")
    if not fields.has("head_dim") and hidden % queries:
        raise LayoutError(
            f"head_dim is missing, and num_attention_heads {queries} does not divide"
            f" hidden_size {hidden}"
        )
    if fields.get("use_bidirectional_attention"):
        raise LayoutError("use_bidirectional_attention: such a model keeps no reusable prefix")
    windowed = _windowed(fields, fields.layers())
    return Heads(
        hidden=hidden,
        queries=queries,
        kv=kv,
        dim=fields.count("head_dim", high=4096, default=hidden // queries),
        windowed=windowed,
        window=fields.count("sliding_window", low=2, high=1 << 24) if any(windowed) else 0,
    )


def _windowed(fields: Fields, layers: int) -> tuple[bool, ...]:
    """For each layer, whether it sees a sliding window only."""
    types = fields.items("layer_types")
    if types is not None:
        if len(types) != layers:
            raise LayoutError(f"layer_types has {len(types)} items for num_hidden_layers {layers}")
        unknown = [t for t in types if t not in ("full_attention", "sliding_attention")]
        if unknown:
            raise LayoutError(f"layer_types has {unknown[0]!r}, whose state is not described yet")
        return tuple(t == "sliding_attention" for t in types)
    every = _FULL_EVERY.get(fields.model_type)
    if every is not None:
        every = fields.count("sliding_window_pattern", high=layers + 1, default=every)
        return tuple((i + 1) % every != 0 for i in range(layers))
    if fields.model_type.startswith("qwen"):
        if fields.get("use_sliding_window"):
            raise LayoutError("use_sliding_window: say by layer_types which layers have a window")
        return (False,) * layers
    return (fields.has("sliding_window"),) * layers


def _compute(fields: Fields, heads: Heads) -> Compute:
    """Prefill operations, two per parameter used and per multiply-add of attention.

    Per layer, with h hidden, H query and K key heads of D: projections h·D(2H + 2K), and
    3·h·width for the feed-forward (experts: 3·h·width per expert used, h per router output).
    Attention costs 4·H·D per attended token; in a windowed layer that is a constant, 4·H·D·window
    per token. Embedding and output head are left out: prefill needs the head for one token only.
    """
    layers, attention = len(heads.windowed), 4 * heads.queries * heads.dim
    projections = heads.hidden * heads.dim * (2 * heads.queries + 2 * heads.kv)
    parameters = layers * projections + _feed_forward(fields, layers, heads.hidden)
    return Compute(
        linear=2 * parameters + heads.sliding_layers() * attention * heads.window,
        attention=heads.full_layers() * attention,
    )


def _feed_forward(fields: Fields, layers: int, hidden: int) -> int:
    """Parameters that one token uses in all feed-forward layers."""
    kind = fields.model_type
    if kind in _DENSE:
        return layers * 3 * hidden * fields.count("intermediate_size")
    if kind in ("mixtral", "gpt_oss"):
        experts = fields.count("num_local_experts", high=1 << 16)
        used = fields.count("num_experts_per_tok", high=experts)
        width = fields.count("intermediate_size")
        return layers * hidden * (3 * width * used + experts)
    name = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    experts = fields.count(name, high=1 << 16)
    used = fields.count("num_experts_per_tok", high=experts)
    step = fields.count("decoder_sparse_step", high=layers, default=1)
    dense_only = fields.items("mlp_only_layers") or []
    sparse = sum(1 for i in range(layers) if (i + 1) % step == 0 and i not in dense_only)
    width = fields.count("moe_intermediate_size")
    shared = fields.count("shared_expert_intermediate_size", low=0, default=0)
    total = sparse * hidden * (3 * (width * used + shared) + experts)
    if sparse < layers:
        total += (layers - sparse) * 3 * hidden * fields.count("intermediate_size")
    return total
