"""Multi-head latent attention: DeepSeek V2, V3 and R1, and V3.2 with its indexer.

Each layer keeps one latent vector and one rope key per token, shared by all heads, so every
tensor-parallel rank holds all of it. V3.2 adds an indexer key per token and layer. All of it is
one chain; there is no window and nothing is fixed per resume point.
"""

from __future__ import annotations

import msgspec

from kvatlas.core.families.fields import Fields, Wanted, index_key_bytes
from kvatlas.core.layout import Component, Compute, Group, Layout, Rule
from kvatlas.errors import LayoutError

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32")

# Default blocks. vLLM: what its MLA kernels ask for; SGLang: --page-size, 64 with an indexer.
_VLLM_BLOCK, _SGLANG_PAGE, _SGLANG_SPARSE_PAGE = 64, 1, 64
_SGLANG_POOLS = {"mla_kv": "kv", "index": "indexer"}  # 0.5.23 `PoolName`


class Indexer(msgspec.Struct, frozen=True):
    """V3.2's indexer: it scores every earlier token and lets ``top_k`` of them through."""

    heads: int
    dim: int
    top_k: int


def layout(fields: Fields, wanted: Wanted) -> Layout:
    """One group, named as vLLM names it; SGLang names none."""
    wanted.no_draft()
    layers = fields.layers()
    indexer = _indexer(fields)
    row = _row_bytes(fields, wanted, sparse=indexer is not None)
    if wanted.engine == "vllm":
        block, kind = wanted.block_tokens or _VLLM_BLOCK, "mla_attention"
    else:
        default = _SGLANG_SPARSE_PAGE if indexer else _SGLANG_PAGE
        block, kind = wanted.block_tokens or default, "*"
    rows = [("mla_kv", row)]
    dtype = _kv_name(wanted, sparse=indexer is not None)
    if indexer is not None:
        rows.append(("index", index_key_bytes(indexer.dim, wanted.indexer_dtype)))
        dtype += f"+index_{wanted.indexer_dtype}"
    return Layout(
        model=wanted.model,
        engine=wanted.engine,
        kv_dtype=dtype,
        grid_tokens=block,
        components=tuple(
            Component(
                name=name,
                rule=Rule.CHAIN,
                layers=layers,
                block_tokens=block,
                stored_block_bytes=layers * block * size,
                exact_bytes_per_token=float(layers * size),
                group="kv",
                pool=_SGLANG_POOLS[name] if wanted.engine == "sglang" else "",
            )
            for name, size in rows
        ),
        groups=(Group("kv", kind, block),),
        compute=_compute(fields, layers, indexer),
        tensor_parallel="replicated",
    )


def _indexer(fields: Fields) -> Indexer | None:
    if fields.model_type != "deepseek_v32":
        if fields.has("index_topk"):
            raise LayoutError(
                f"index_topk contradicts model_type {fields.model_type!r}: only deepseek_v32 has"
                " an indexer"
            )
        return None
    return Indexer(
        heads=fields.count("index_n_heads", high=4096),
        dim=fields.count("index_head_dim", high=4096),
        top_k=fields.count("index_topk", high=1 << 20),
    )


def _kv_name(wanted: Wanted, *, sparse: bool) -> str:
    if wanted.kv_dtype == "auto":
        if sparse:
            raise LayoutError(
                "kv_dtype 'auto' depends on the engine's device for this model: say bf16 or fp8"
            )
        return "bf16"
    return "fp8_ds_mla" if sparse and wanted.kv_dtype == "fp8" else wanted.kv_dtype


def _row_bytes(fields: Fields, wanted: Wanted, *, sparse: bool) -> int:
    """Bytes of one token in one layer."""
    rank = fields.count("kv_lora_rank")
    rope = fields.count("qk_rope_head_dim", high=4096)
    name = _kv_name(wanted, sparse=sparse)
    sizes = {"bf16": 2, "fp16": 2, "fp8": 1}
    if name in sizes:
        return (rank + rope) * sizes[name]
    if name != "fp8_ds_mla":
        raise LayoutError(
            f"kv_dtype {wanted.kv_dtype!r} is not one of auto, bf16, fp16, fp8, fp8_ds_mla"
        )
    if (rank, rope) != (512, 64):
        raise LayoutError(
            "kv_lora_rank and qk_rope_head_dim must be 512 and 64 for packed fp8 rows, got"
            f" {rank} and {rope}"
        )
    return 512 + 4 * 4 + 64 * 2  # fp8 latent, a fp32 scale per 128 of it, bf16 rope key


def _compute(fields: Fields, layers: int, indexer: Indexer | None) -> Compute:
    """Prefill operations, two per parameter used and per multiply-add of attention.

    Per layer, with h hidden, q and r the query and KV ranks, H heads of n + e (without and with
    position) and v (value): queries h·q + q·H(n + e), latents h(r + e), keys and values r·H(n + v),
    output H·v·h; then 3·h·width for a dense layer, 3·h·m·(routed used + shared) + h·routed for
    experts. Per attended token 2·H(n + e + v); with an indexer attention runs on the latents
    themselves, 2·H(2r + e) up to top-k tokens, and scoring costs 2·heads·dim without limit. V3
    comes to 2 × 35.7 billion per token; the published 37 counts embedding and head too.
    """
    h = fields.count("hidden_size")
    heads = fields.count("num_attention_heads", high=4096)
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim", high=4096)
    nope = fields.count("qk_nope_head_dim", high=4096)
    value = fields.count("v_head_dim", high=4096)
    queries = heads * (nope + rope)
    q_rank = fields.count("q_lora_rank") if fields.has("q_lora_rank") else 0
    every = h * q_rank + q_rank * queries if q_rank else h * queries
    every += h * (rank + rope) + rank * heads * (nope + value) + heads * value * h
    if indexer is not None:
        every += (q_rank or h) * indexer.heads * indexer.dim + h * (indexer.dim + indexer.heads)
    parameters = layers * every + _feed_forward(fields, layers)
    if indexer is None:
        return Compute(linear=2 * parameters, attention=layers * 2 * heads * (nope + rope + value))
    return Compute(
        linear=2 * parameters,
        attention=layers * 2 * heads * (2 * rank + rope),
        attended_max=indexer.top_k,
        scoring=layers * 2 * indexer.heads * indexer.dim,
    )


def _feed_forward(fields: Fields, layers: int) -> int:
    """Parameters that one token uses in all feed-forward layers, dense first, experts after."""
    h = fields.count("hidden_size")
    dense = min(fields.count("first_k_dense_replace", low=0, high=layers, default=0), layers)
    every = fields.count("moe_layer_freq", high=layers, default=1)
    sparse = sum(1 for i in range(dense, layers) if i % every == 0)
    used = 3 * h * fields.count("intermediate_size") * (layers - sparse)
    if sparse:
        routed = fields.count("n_routed_experts", high=1 << 16)
        per_token = fields.count("num_experts_per_tok", high=routed)
        per_token += fields.count("n_shared_experts", low=0, high=64, default=0)
        width = fields.count("moe_intermediate_size")
        used += sparse * (3 * h * width * per_token + h * routed)
    return used
