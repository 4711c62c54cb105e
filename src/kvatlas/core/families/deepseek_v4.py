"""DeepSeek V4 (Flash, Pro): compressed sparse attention, its indexer, and a window in every layer.

Each layer keeps the raw KV of the last 128 tokens (SWA). Layers of ratio 4 (CSA) add one entry per
4 tokens, an indexer key per entry, and the rows from which the next entry will be computed; layers
of ratio 128 (HCA) one entry per 128 tokens and their rows. The KV has a single head, so every
tensor-parallel rank holds all of it. Sizes as in vLLM 0.32 and SGLang 0.5.23.
"""

from __future__ import annotations

import math

import msgspec

from kvatlas.core.families.fields import Fields, Wanted, index_key_bytes
from kvatlas.core.layout import Component, Compute, Group, Layout, Rule, round_up
from kvatlas.errors import LayoutError

MODEL_TYPES = ("deepseek_v4",)

CSA, HCA = 4, 128
_VLLM_SWA_BLOCK = 64
_VLLM_STATE_BLOCK = {CSA: 4, HCA: 8}
_SGLANG_RING_ROWS, _SGLANG_RING_ROWS_DRAFT = 8, 16
# SGLang 0.5.23 `PoolName`; the draft's window travels inside the pool of the others.
_SGLANG_POOLS = {
    "c4_kv": "deepseek_v4_c4",
    "c4_index": "deepseek_v4_c4_indexer",
    "c128_kv": "deepseek_v4_c128",
    "swa": "swa",
    "c4_state": "deepseek_v4_c4_state",
    "c4_index_state": "deepseek_v4_c4_indexer_state",
    "draft_swa": "swa",
}
_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA,
    "heavily_compressed_attention": HCA,
}


class Shape(msgspec.Struct, frozen=True):
    """What the config says, checked. Layers by kind, sizes in elements."""

    layers: int
    csa: int
    hca: int
    hca_before_csa: bool
    drafts: int
    head_dim: int
    window: int
    index_dim: int


class Rows(msgspec.Struct, frozen=True):
    """Bytes of one entry of each kind, and the multiple to which vLLM pads a page."""

    kv: int
    index: int
    vllm_align: int
    csa_state: int
    index_state: int
    hca_state: int


def layout(fields: Fields, wanted: Wanted) -> Layout:
    """Components and groups as the engine keeps and announces them."""
    shape = _shape(fields, draft=wanted.draft)
    rows = _rows(shape, fields, wanted)
    page = wanted.block_tokens or 256
    if page % HCA:
        raise LayoutError(
            f"block_tokens must be a multiple of {HCA} (one ratio-{HCA} entry), got {page}"
        )
    if wanted.engine == "vllm":
        components, groups = _vllm(shape, rows, page)
    else:
        components, groups = _sglang(shape, rows, page)
    return Layout(
        model=wanted.model,
        engine=wanted.engine,
        kv_dtype=f"{_kv_name(wanted)}+index_{wanted.indexer_dtype}",
        grid_tokens=math.lcm(*(g.block_tokens for g in groups)),
        components=components,
        groups=groups,
        compute=_compute(fields, shape),
        tensor_parallel="replicated",
    )


def _shape(fields: Fields, *, draft: bool) -> Shape:
    layers = fields.layers()
    ratios = _ratios(fields, layers)
    csa, hca = ratios.count(CSA), ratios.count(HCA)
    if not csa:
        raise LayoutError(
            f"compress_ratios has no layer of ratio {CSA}: no known V4 model is like that, and"
            " how an engine would group its state is not known"
        )
    return Shape(
        layers=layers,
        csa=csa,
        hca=hca,
        hca_before_csa=bool(hca) and ratios.index(HCA) < ratios.index(CSA),
        drafts=_drafts(fields, layers) if draft else 0,
        head_dim=fields.count("head_dim", high=4096),
        window=fields.count("sliding_window", low=2, high=1 << 16),
        index_dim=fields.count("index_head_dim", high=4096),
    )


def _ratios(fields: Fields, layers: int) -> list[int]:
    """The compression ratio of each of the model's own layers."""
    given = fields.items("compress_ratios")
    if given is None:
        types = fields.items("layer_types")
        if types is None:
            raise LayoutError("compress_ratios is missing: it says how each layer keeps its KV")
        rates = fields.get("compress_rates")
        known = {"compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA}
        if rates is not None and rates != known:
            raise LayoutError(f"compress_rates must be {known}, got {rates!r}")
        unknown = [t for t in types if t not in _LAYER_TYPES]
        if unknown:
            raise LayoutError(f"layer_types has {unknown[0]!r}, which no V4 layer is")
        given = [_LAYER_TYPES[str(t)] for t in types]
    if len(given) < layers:
        raise LayoutError(
            f"compress_ratios (or layer_types) has {len(given)} items for"
            f" num_hidden_layers {layers}"
        )
    ratios = [r for r in given if type(r) is int and r in (0, CSA, HCA)]
    if len(ratios) != len(given):
        raise LayoutError(f"compress_ratios may hold 0, {CSA} and {HCA} only, got {given!r}")
    if any(ratios[layers:]):
        raise LayoutError("compress_ratios of draft layers (past num_hidden_layers) must be 0")
    return ratios[:layers]


def _drafts(fields: Fields, layers: int) -> int:
    """Draft layers in the checkpoint: MTP, or DSpark (as vLLM counts them, 3 unless it says)."""
    if fields.has("dspark_target_layer_ids"):
        drafts = fields.count("n_mtp_layers", high=16, default=3)
    else:
        drafts = fields.count("num_nextn_predict_layers", low=0, high=16, default=0)
    if not drafts:
        raise LayoutError("draft: num_nextn_predict_layers says that the model has no draft")
    listed = len(fields.items("compress_ratios") or ()) - layers
    if listed > 0 and listed != drafts:
        raise LayoutError(
            f"compress_ratios lists {listed} draft layers, the draft fields say {drafts}"
        )
    return drafts


def _kv_name(wanted: Wanted) -> str:
    return "fp8_ds_mla" if wanted.kv_dtype in ("auto", "fp8") else wanted.kv_dtype


def _rows(shape: Shape, fields: Fields, wanted: Wanted) -> Rows:
    name = _kv_name(wanted)
    if wanted.engine == "sglang" and name != "fp8_ds_mla":
        raise LayoutError(f"kv_dtype {wanted.kv_dtype!r}: SGLang keeps V4's KV as fp8 only")
    rope = fields.count("qk_rope_head_dim", default=_rope_dim(fields, shape.head_dim))
    if name == "fp8_ds_mla":
        if (shape.head_dim, rope) != (512, 64):
            raise LayoutError(
                "head_dim and qk_rope_head_dim must be 512 and 64 for packed fp8 rows, got"
                f" {shape.head_dim} and {rope}"
            )
        # 448 fp8 values, 64 bf16 rope values, 7 scales and a byte of padding
        kv, align = 448 + 128 + 7 + 1, 576
    elif name in ("bf16", "fp8_plain"):
        kv, align = shape.head_dim * (2 if name == "bf16" else 1), 512
    else:
        raise LayoutError(
            f"kv_dtype {wanted.kv_dtype!r} is not one of auto, fp8, fp8_ds_mla, bf16, fp8_plain"
        )
    return Rows(
        kv=kv,
        index=index_key_bytes(shape.index_dim, wanted.indexer_dtype),
        vllm_align=align,
        csa_state=2 * 2 * shape.head_dim * 4,  # value and score, two halves, fp32
        index_state=2 * 2 * shape.index_dim * 4,
        hca_state=2 * shape.head_dim * 4,
    )


def _rope_dim(fields: Fields, head_dim: int) -> int:
    """What a config without qk_rope_head_dim says: a share of the head, 64 if not even that."""
    share = fields.get("partial_rotary_factor")
    return round(head_dim * share) if isinstance(share, float) and 0 < share <= 1 else 64


def _chain(
    shape: Shape, rows: Rows, page: int, align: tuple[int, int], group: str
) -> list[Component]:
    """The parts that grow with the context; ``align`` pads (KV pages, indexer pages)."""
    kv_align, index_align = align
    csa, hca = page // CSA, page // HCA

    def part(name: str, layers: int, entries: int, row: int, pad: int) -> Component:
        return Component(
            name=name,
            rule=Rule.CHAIN,
            layers=layers,
            block_tokens=page,
            stored_block_bytes=layers * round_up(entries * row, pad),
            exact_bytes_per_token=layers * entries * row / page,
            group=group,
        )

    return [
        part("c4_kv", shape.csa, csa, rows.kv, kv_align),
        part("c4_index", shape.csa, csa, rows.index, index_align),
        part("c128_kv", shape.hca, hca, rows.kv, kv_align),
    ]


def _window(
    name: str,
    layers: int,
    row: int,
    *,
    window: int,
    block: int,
    align: int,
    group: str = "",
    rows_kept: int | None = None,
    least: int | None = None,
    rule: Rule = Rule.WINDOW,
) -> Component:
    """A part of which only the last ``window`` tokens count; one row per token of a block.

    ``rows_kept`` is for a ring that keeps fewer rows than its block has tokens; ``least``: the
    blocks that a resume on the grid reads.
    """
    return Component(
        name=name,
        rule=rule,
        layers=layers,
        block_tokens=block,
        stored_block_bytes=layers * round_up((rows_kept or block) * row, align),
        exact_bytes_per_token=float(layers * row),
        window_tokens=window,
        group=group,
        least_blocks=least,
    )


def _vllm(shape: Shape, rows: Rows, page: int) -> tuple[tuple[Component, ...], tuple[Group, ...]]:
    """vLLM 0.32: `DeepseekV4Attention`, `CompressorStateCache`, `_get_packed_kv_cache_groups`."""
    align = rows.vllm_align
    swa, csa_block, hca_block = _VLLM_SWA_BLOCK, _VLLM_STATE_BLOCK[CSA], _VLLM_STATE_BLOCK[HCA]
    csa_window = 2 * CSA  # an entry also takes the other half of the four rows before its own
    # At a multiple of 128 no row is pending: of the four rows of the last entry one half is read,
    # of the ratio-128 rows nothing. A draft resumes between such multiples.
    csa_least, hca_least = (None, None) if shape.drafts else (1, 0)
    parts = [
        *_chain(shape, rows, page, (align, align), "global"),
        _window(
            "swa", shape.layers, rows.kv, window=shape.window, block=swa, align=align, group="swa"
        ),
    ]
    for name, row in (("c4_state", rows.csa_state), ("c4_index_state", rows.index_state)):
        parts.append(
            _window(
                name,
                shape.csa,
                row,
                window=csa_window,
                block=csa_block,
                align=align,
                group="c4_state",
                least=csa_least,
            )
        )
    parts.append(
        _window(
            "c128_state",
            shape.hca,
            rows.hca_state,
            window=HCA,
            block=hca_block,
            align=align,
            group="c128_state",
            least=hca_least,
        )
    )
    parts += _draft(shape, rows, block=swa, align=align, group="swa")
    sliding = "sliding_window_mla"
    states = [
        Group("c4_state", sliding, csa_block, csa_window),
        Group("c128_state", sliding, hca_block, HCA),
    ]
    if shape.hca_before_csa:
        states.reverse()
    # vLLM marks the group with the draft's layers, and all that share its spec with it.
    ahead = 1 if shape.drafts else 0
    groups = (
        Group("swa", sliding, swa, shape.window, copies=_swa_copies(shape), lookahead=ahead),
        Group("global", "mla_attention", page),
        *states,
    )
    kept = tuple(c for c in parts if c.layers)
    return kept, tuple(g for g in groups if any(c.group == g.name for c in kept))


def _swa_copies(shape: Shape) -> int:
    """Into how many groups vLLM splits the window layers.

    It packs all groups into blocks of one size, so it cuts the groups that consist of equal
    repeats (window layers, ratio-4 state, ratio-128 state) at the run of layers that wastes
    least padding, but never below the ratio-4 state, whose two page sizes must stay together.
    Of equally wasteful runs the longer wins (`_approximate_gcd`).
    """
    layers = shape.layers + shape.drafts
    repeats = [n for n in (layers, shape.csa, shape.hca) if n]
    if shape.hca in (0, shape.csa):
        repeats.append(shape.csa)  # then the chain consists of equal repeats too

    def waste(run: int) -> int:
        return sum(-n % run for n in repeats)

    run = min(range(shape.csa, max(repeats) + 1), key=lambda r: (waste(r), -r))
    return -(-layers // run)


def _sglang(shape: Shape, rows: Rows, page: int) -> tuple[tuple[Component, ...], tuple[Group, ...]]:
    """SGLang 0.5.23: one pool per part, cut at its page; it announces the full chain alone.

    ``group`` "" marks the parts whose presence no event tells. Its ratio-128 rows are not kept:
    nothing is pending at a page's end.
    """
    ring = _SGLANG_RING_ROWS_DRAFT if shape.drafts else _SGLANG_RING_ROWS
    parts = [
        *_chain(shape, rows, page, (576, 1), "full"),
        _window("swa", shape.layers, rows.kv, window=shape.window, block=page, align=576),
    ]
    for name, row in (("c4_state", rows.csa_state), ("c4_index_state", rows.index_state)):
        parts.append(
            _window(name, shape.csa, row, window=2 * CSA, block=page, align=1, rows_kept=ring)
        )
    parts += _draft(shape, rows, block=page, align=576, group="")
    kept = (msgspec.structs.replace(c, pool=_SGLANG_POOLS[c.name]) for c in parts if c.layers)
    return tuple(kept), (Group("full", "*", page),)


def _draft(shape: Shape, rows: Rows, *, block: int, align: int, group: str) -> list[Component]:
    """The draft's own window: without it answers stay right, fewer guesses are accepted."""
    if not shape.drafts:
        return []
    return [
        _window(
            "draft_swa",
            shape.drafts,
            rows.kv,
            window=shape.window,
            block=block,
            align=align,
            group=group,
            rule=Rule.OPTIONAL,
        )
    ]


def _compute(fields: Fields, shape: Shape) -> Compute:
    """Prefill operations, two per parameter used and per multiply-add of attention.

    Per layer, with h hidden, q and o the low ranks, H heads of D, g output groups, E = routed
    experts per token + shared ones of width m:

    - attention: h(q + D) in, q·H·D queries, H·D·o + g·o·h out;
    - experts: 3·h·m·E, and h·(all routed) for the router;
    - residual streams (mHC, n of them): 2·n·h·(n² + 2n);
    - CSA adds compressors 4·h·D and 4·h·I and indexer q·(heads·I) + h·heads; HCA 2·h·D;
    - the window costs 4·H·D·128 operations per token, whatever the context.

    Per attended token: CSA 4·H·D/4 up to 4·top-k tokens; its indexer (2·heads·I)/4 and HCA
    4·H·D/128 without limit. Embedding and output head are left out: prefill needs the head for
    one token only. Flash comes to 2 × 12.7 billion, Pro to 2 × 47.8 billion per token, the
    published 13 and 49 counting the head.
    """
    h, d, idx = fields.count("hidden_size"), shape.head_dim, shape.index_dim
    heads = fields.count("num_attention_heads", high=4096)
    q, o = fields.count("q_lora_rank"), fields.count("o_lora_rank")
    groups = fields.count("o_groups", high=4096)
    if heads % groups:
        raise LayoutError(f"o_groups {groups} does not divide num_attention_heads {heads}")
    index_heads = fields.count("index_n_heads", high=4096)
    top_k = fields.count("index_topk", high=1 << 20)
    width = fields.count("moe_intermediate_size")
    routed = fields.count("n_routed_experts", high=1 << 16)
    per_token = fields.count("num_experts_per_tok", high=routed)
    used = per_token + fields.count("n_shared_experts", low=0, high=64)
    streams = fields.count("hc_mult", high=64)
    every = (
        h * (q + d)
        + q * heads * d
        + heads * d * o
        + groups * o * h
        + 3 * h * width * used
        + h * routed
        + 2 * streams * h * (streams * streams + 2 * streams)
    )
    csa = 4 * h * d + 4 * h * idx + q * index_heads * idx + h * index_heads
    hca = 2 * h * d
    pair = 4 * heads * d
    parameters = shape.layers * every + shape.csa * csa + shape.hca * hca
    return Compute(
        linear=2 * parameters + shape.layers * pair * shape.window,
        attention=shape.csa * pair / CSA,
        attended_max=top_k * CSA,
        scoring=shape.csa * 2 * index_heads * idx / CSA + shape.hca * pair / HCA,
    )
