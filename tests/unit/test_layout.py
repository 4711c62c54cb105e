"""Layouts: which blocks a resume position needs, and which configs are refused."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.cli import layout as command
from kvatlas.core.families import layout_from_config
from kvatlas.core.layout import Compute, Group, Layout, Rule, drafted, plain
from kvatlas.errors import LayoutError
from kvatlas.workload.models import known_models, load_config, load_layout

TINY_V4: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 128,
    "hc_mult": 4,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "num_nextn_predict_layers": 0,
    "compress_ratios": [0, 4, 128, 4, 0],
}
LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "torch_dtype": "bfloat16",
}
GEMMA3: dict[str, object] = {
    "model_type": "gemma3_text",
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "sliding_window": 1024,
}
GPT_OSS: dict[str, object] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
QWEN3_MOE: dict[str, object] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "use_sliding_window": False,
    "sliding_window": 4096,
}


def build(config: Mapping[str, object], **wish: Any) -> Layout:
    return layout_from_config(config, **{"engine": "vllm", **wish})


def groups(layout: Layout) -> list[tuple[str, str, int, int | None, int]]:
    return [(g.name, g.kind, g.block_tokens, g.window_tokens, g.copies) for g in layout.groups]


# Which blocks count


@pytest.mark.parametrize(
    ("block", "window", "grid", "units", "span"),
    [
        (64, 128, 256, 2, 1),  # V4 window
        (4, 8, 256, 2, 1),  # V4 ratio-4 state
        (8, 128, 256, 16, 1),  # V4 ratio-128 state
        (256, None, 256, 1, None),  # V4 chain
        (16, 1024, 16, 1, 64),  # Gemma 3
        (16, 128, 16, 1, 8),  # gpt-oss
        (16, None, 16, 1, None),
        (1, 128, 1, 1, 127),  # a page of one token: the token itself is not its own past
        (16, 2, 16, 1, 1),
        (16, 17, 16, 1, 1),
        (16, 18, 16, 1, 2),
    ],
)
def test_units_and_span(
    block: int, window: int | None, grid: int, units: int, span: int | None
) -> None:
    group = Group("g", "*", block, window)
    assert group.units(grid) == units
    assert group.span(grid) == span


@given(block=st.sampled_from([1, 4, 8, 16, 64]), window=st.integers(2, 5000))
def test_the_windows_blocks_cover_it_and_not_one_too_many(block: int, window: int) -> None:
    blocks = Group("g", "*", block, window).window_blocks()
    assert blocks is not None
    assert blocks * block >= window - 1
    assert (blocks - 1) * block < window - 1


# Groups as vLLM announces them


def test_flash_and_pro_swap_their_state_groups() -> None:
    flash = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8")
    pro = load_layout("deepseek-v4-pro", engine="vllm", kv_dtype="fp8")
    swa = ("swa", "sliding_window_mla", 64, 128, 2)
    chain = ("global", "mla_attention", 256, None, 1)
    csa = ("c4_state", "sliding_window_mla", 4, 8, 1)
    hca = ("c128_state", "sliding_window_mla", 8, 128, 1)
    assert groups(flash) == [swa, chain, csa, hca]
    assert groups(pro) == [swa, chain, hca, csa]


def test_tiny_v4_has_two_window_groups() -> None:
    layout = build(TINY_V4)
    assert layout.groups[0].copies == 2
    assert layout.grid_tokens == 256
    assert [c.layers for c in layout.components] == [2, 2, 1, 4, 2, 2, 1]


def test_v4_without_ratio_128_layers_has_no_such_parts() -> None:
    layout = build({**TINY_V4, "compress_ratios": [0, 4, 4, 4]})
    assert {c.name for c in layout.components} == {
        "c4_kv",
        "c4_index",
        "swa",
        "c4_state",
        "c4_index_state",
    }
    assert [g.copies for g in layout.groups] == [1, 1, 1]


def test_v4_by_layer_types_is_v4_by_ratios() -> None:
    names = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    given_types = {**TINY_V4, "layer_types": [names[r] for r in (0, 4, 128, 4)]}
    del given_types["compress_ratios"]
    assert build(given_types) == build(TINY_V4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, [("full", "full_attention", 16, None, 1)]),
        (
            GEMMA3,
            [
                ("sliding", "sliding_window", 16, 1024, 6),
                ("full", "full_attention", 16, None, 1),
            ],
        ),
        (
            GPT_OSS,
            [("sliding", "sliding_window", 16, 128, 1), ("full", "full_attention", 16, None, 1)],
        ),
        (QWEN3_MOE, [("full", "full_attention", 16, None, 1)]),
        (
            {**LLAMA, "model_type": "mistral", "architectures": None, "sliding_window": 4096},
            [("sliding", "sliding_window", 16, 4096, 1)],
        ),
        (
            {**GEMMA3, "layer_types": ["full_attention"] + ["sliding_attention"] * 25},
            [("full", "full_attention", 16, None, 1), ("sliding", "sliding_window", 16, 1024, 25)],
        ),
    ],
)
def test_groups_of_plain_heads(config: dict[str, object], expected: list[object]) -> None:
    assert groups(build(config)) == expected


def test_sglang_announces_the_chain_alone_and_keeps_windows_unannounced() -> None:
    flash = load_layout("deepseek-v4-flash", engine="sglang", kv_dtype="fp8")
    assert groups(flash) == [("full", "*", 256, None, 1)]
    unannounced = {c.name for c in flash.components if not c.group}
    assert unannounced == {"swa", "c4_state", "c4_index_state"}
    oss = build(GPT_OSS, engine="sglang", block_tokens=64)
    assert groups(oss) == [("full", "*", 64, None, 1)]
    assert [(c.rule, c.layers, c.group) for c in oss.components] == [
        (Rule.CHAIN, 18, "full"),
        (Rule.WINDOW, 18, ""),
    ]
    gemma = build(GEMMA3, engine="sglang", block_tokens=64)  # one pool for all its layers
    assert [(c.rule, c.layers) for c in gemma.components] == [(Rule.CHAIN, 26)]


def test_every_named_group_has_its_bytes() -> None:
    for model in known_models():
        for engine in ("vllm", "sglang"):
            layout = load_layout(model, engine=engine, kv_dtype="fp8")
            named = {c.group for c in layout.components if c.group}
            assert named == {g.name for g in layout.groups}
            assert layout.grid_tokens % max(g.block_tokens for g in layout.groups) == 0


def test_block_tokens_are_the_engines() -> None:
    assert build(LLAMA, block_tokens=128).grid_tokens == 128
    small = build(TINY_V4, block_tokens=128)
    assert small.grid_tokens == 128
    # one ratio-128 entry per page instead of two: more of it is padding
    assert small.page_bytes_per_token() > build(TINY_V4).page_bytes_per_token()
    assert small.bytes_per_token() == build(TINY_V4).bytes_per_token()


# dtypes, names, digests


def test_auto_dtype_is_the_models_own() -> None:
    assert build(LLAMA).bytes_per_token() == 30 * 2 * 3 * 64 * 2
    assert build({**LLAMA, "torch_dtype": "float32"}).kv_dtype == "fp32"
    assert build(LLAMA, kv_dtype="fp8").bytes_per_token() == 30 * 2 * 3 * 64


def test_the_language_part_of_a_multimodal_config_counts() -> None:
    nested = {"model_type": "gemma3", "vision_config": {"hidden_size": 1}, "text_config": GEMMA3}
    assert msgspec.structs.replace(build(nested), model="") == msgspec.structs.replace(
        build(GEMMA3), model=""
    )


def test_the_digest_is_of_the_state_and_not_of_its_cost() -> None:
    layout = build(LLAMA)
    cheaper = msgspec.structs.replace(layout, compute=Compute(linear=1.0, attention=1.0))
    assert cheaper.digest() == layout.digest()
    others = [
        build(LLAMA, block_tokens=32),
        build(LLAMA, kv_dtype="fp8"),
        build(LLAMA, engine="sglang", block_tokens=16),
        build({**LLAMA, "num_hidden_layers": 31}),
        drafted(layout),
    ]
    assert len({layout.digest(), *(o.digest() for o in others)}) == 6
    assert build(LLAMA, model="another").digest() == layout.digest()


def test_plain_layout_knows_no_bytes() -> None:
    layout = plain(32)
    assert layout.resume_bytes(3200) == 0
    assert groups(layout) == [("kv", "*", 32, None, 1)]


# Refusals


@pytest.mark.parametrize(
    "kind", ["deepseek_v41", "mamba", "jamba", "qwen3_next", "gemma3n", "never_heard_of"]
)
def test_unknown_architectures_are_refused_by_name(kind: str) -> None:
    with pytest.raises(LayoutError, match=f"model_type '{kind}' is not supported: .*load alone"):
        build({**LLAMA, "model_type": kind, "architectures": None})


def _without(config: dict[str, object], name: str) -> dict[str, object]:
    return {k: v for k, v in config.items() if k != name}


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in TINY_V4
        if n not in ("architectures", "num_nextn_predict_layers", "qk_rope_head_dim")
    ],
)
def test_a_missing_v4_field_is_named(name: str) -> None:
    with pytest.raises(LayoutError, match=f"{name} is missing"):
        build(_without(TINY_V4, name))


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "intermediate_size"])
def test_a_missing_llama_field_is_named(name: str) -> None:
    with pytest.raises(LayoutError, match=f"{name} is missing"):
        build(_without(LLAMA, name))


@pytest.mark.parametrize("value", [0, -1, 1 << 40, 3.5, "64", True, [64], {}])
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads"])
@pytest.mark.parametrize("config", [TINY_V4, LLAMA], ids=["v4", "llama"])
def test_absurd_values_are_named(config: dict[str, object], name: str, value: object) -> None:
    with pytest.raises(LayoutError, match=f"{name} must be"):
        build({**config, name: value})


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (TINY_V4, {"compress_ratios": [0, 4, 128]}, "compress_ratios .*3 items"),
        (TINY_V4, {"compress_ratios": [0, 4, 2, 4]}, "compress_ratios may hold"),
        (TINY_V4, {"compress_ratios": [False, 4, 128, 4]}, "compress_ratios may hold"),
        (TINY_V4, {"compress_ratios": [0, 4, 128, 4, 4]}, "compress_ratios of draft"),
        (TINY_V4, {"compress_ratios": [0, 128, 128, 0]}, "compress_ratios has no"),
        (TINY_V4, {"compress_ratios": "0,4"}, "compress_ratios must be a list"),
        (TINY_V4, {"head_dim": 256}, "head_dim"),
        (TINY_V4, {"qk_rope_head_dim": 128}, "qk_rope_head_dim"),
        (TINY_V4, {"index_head_dim": 100}, "index_head_dim"),
        (TINY_V4, {"o_groups": 3}, "o_groups 3"),
        (TINY_V4, {"num_experts_per_tok": 257}, "num_experts_per_tok"),
        (TINY_V4, {"architectures": ["DeepseekV41ForCausalLM"]}, "architectures"),
        (LLAMA, {"architectures": ["MambaForCausalLM"]}, "architectures"),
        (LLAMA, {"num_key_value_heads": 4}, "num_key_value_heads 4"),
        (LLAMA, {"num_key_value_heads": 18}, "num_key_value_heads must be"),
        (LLAMA, {"num_attention_heads": 7, "num_key_value_heads": 7}, "head_dim is missing"),
        (LLAMA, {"layer_types": ["full_attention"] * 29}, "layer_types has 29"),
        (LLAMA, {"layer_types": ["linear_attention"] * 30}, "layer_types has 'linear"),
        (LLAMA, {"text_config": []}, "text_config must"),
        (LLAMA, {"text_config": {**LLAMA, "hidden_size": 1152}}, "hidden_size contradicts"),
        (LLAMA, {"torch_dtype": "int3"}, "kv_dtype 'int3'"),
        (LLAMA, {"model_type": ""}, "model_type is missing"),
        (GEMMA3, {"sliding_window": None}, "sliding_window is missing"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional"),
        (QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
    ],
)
def test_contradictions_are_named(
    config: dict[str, object], changes: dict[str, object], named: str
) -> None:
    build(config)  # as it is, it is fine
    with pytest.raises(LayoutError, match=named):
        build({**config, **changes})


@pytest.mark.parametrize(
    ("model", "wish", "named"),
    [
        ("deepseek-v4-flash", {"engine": "tgi"}, "engine 'tgi'"),
        ("deepseek-v4-flash", {"kv_dtype": "int4"}, "kv_dtype 'int4'"),
        ("deepseek-v4-flash", {"engine": "sglang", "kv_dtype": "bf16"}, "kv_dtype 'bf16'"),
        ("deepseek-v4-flash", {"indexer_dtype": "bf16"}, "indexer_dtype 'bf16'"),
        ("deepseek-v4-flash", {"block_tokens": 64}, "block_tokens must be a multiple of 128"),
        ("deepseek-v4-flash", {"block_tokens": 0}, "block_tokens must be between"),
        ("deepseek-v3.2", {}, "kv_dtype 'auto'"),
        ("deepseek-v3", {"kv_dtype": "int4"}, "kv_dtype 'int4'"),
        ("deepseek-v3", {"draft": True}, "draft"),
    ],
)
def test_wishes_that_an_engine_cannot_meet_are_named(
    model: str, wish: dict[str, Any], named: str
) -> None:
    with pytest.raises(LayoutError, match=named):
        build(load_config(model), **wish)


def test_draft_fields_must_agree() -> None:
    with pytest.raises(LayoutError, match="has no draft"):
        build(TINY_V4, draft=True)
    with pytest.raises(LayoutError, match="lists 1 draft layers, the draft fields say 2"):
        build({**TINY_V4, "num_nextn_predict_layers": 2}, draft=True)
    assert build({**TINY_V4, "num_nextn_predict_layers": 1}, draft=True).components[-1].layers == 1


def test_mla_contradictions_are_named() -> None:
    v3 = load_config("deepseek-v3")
    with pytest.raises(LayoutError, match="index_topk contradicts"):
        build({**v3, "index_topk": 2048})
    with pytest.raises(LayoutError, match="kv_lora_rank"):
        build({**v3, "kv_lora_rank": 256}, kv_dtype="fp8_ds_mla")
    with pytest.raises(LayoutError, match="index_n_heads is missing"):
        build(_without(load_config("deepseek-v3.2"), "index_n_heads"), kv_dtype="fp8")


@given(
    name=st.sampled_from(sorted(TINY_V4)),
    value=st.one_of(
        st.none(),
        st.integers(-(1 << 70), 1 << 70),
        st.floats(),
        st.text(max_size=8),
        st.booleans(),
        st.lists(st.one_of(st.integers(-1, 130), st.none(), st.text(max_size=3)), max_size=8),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    ),
)
def test_whatever_stands_in_a_field_it_is_a_layout_or_a_layout_error(
    name: str, value: object
) -> None:
    try:
        layout = build({**TINY_V4, name: value})
    except LayoutError:
        return
    assert layout.bytes_per_token() > 0


# Costs

LAYOUTS = [
    build(TINY_V4),
    build(LLAMA),
    build(GEMMA3),
    load_layout("deepseek-v4-flash", engine="sglang", kv_dtype="fp8"),
    load_layout("deepseek-v3.2", engine="vllm", kv_dtype="fp8"),
]
positions = st.integers(0, 1 << 21)


@given(layout=st.sampled_from(LAYOUTS), cuts=st.lists(positions, min_size=2, max_size=6))
def test_prefill_cost_adds_up_over_splits(layout: Layout, cuts: list[int]) -> None:
    assert layout.compute is not None
    cuts.sort()
    flops = layout.compute.prefill_flops
    parts = sum(flops(a, b) for a, b in itertools.pairwise(cuts))
    assert parts == pytest.approx(flops(cuts[0], cuts[-1]), rel=1e-9)


@given(layout=st.sampled_from(LAYOUTS), start=positions, size=positions, more=st.integers(1, 9999))
def test_prefill_cost_grows_with_length_and_with_context(
    layout: Layout, start: int, size: int, more: int
) -> None:
    assert layout.compute is not None
    flops = layout.compute.prefill_flops
    assert flops(start, start) == flops(start + more, start) == 0
    assert flops(start, start + size + more) > flops(start, start + size)
    assert flops(start + more, start + more + size) >= flops(start, start + size)


@given(layout=st.sampled_from(LAYOUTS), tokens=positions, more=st.integers(1, 9999))
def test_resume_bytes_never_shrink(layout: Layout, tokens: int, more: int) -> None:
    less, all_of_it = layout.resume_bytes(tokens), layout.resume_bytes(tokens + more)
    assert less <= all_of_it
    assert layout.resume_bytes(0) == 0


def test_a_short_prefix_fills_only_a_part_of_a_long_window() -> None:
    layout = build(GEMMA3)
    window = next(c for c in layout.components if c.rule is Rule.WINDOW)
    chain = layout.page_bytes_per_token()
    assert layout.resume_point_bytes() == 64 * window.stored_block_bytes
    assert layout.resume_bytes(32) == 32 * chain + 2 * window.stored_block_bytes
    assert layout.resume_bytes(4096) == 4096 * chain + 64 * window.stored_block_bytes


def test_experts_count_only_where_they_are_used() -> None:
    moe = build(QWEN3_MOE).compute
    more = build({**QWEN3_MOE, "mlp_only_layers": [0], "intermediate_size": 6144}).compute
    assert moe is not None
    assert more is not None
    assert moe.linear == pytest.approx(2 * 3.0e9, rel=0.1)
    # layer 0: a dense 6,144 instead of eight experts of 768 and a router for 128
    assert moe.linear - more.linear == 2 * 2048 * 128


# Reading and printing


def _run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["layout", *argv])
    return int(args.run(args))


def test_json_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("deepseek-v4-flash", "--kv-dtype", "fp8", "--json", "--context", "4096") == 0
    out = json.loads(capsys.readouterr().out)
    assert out["bytes_per_token"] == 3850.25
    assert out["page_bytes_per_token"] == 3915.0
    assert out["resume_point_bytes"] == 15_467_904
    assert out["resume_grid_tokens"] == 256
    assert [c["name"] for c in out["components"]][:2] == ["c4_kv", "c4_index"]
    assert {c["name"]: c["blocks_per_resume_point"] for c in out["components"]}["c128_state"] == 16
    (at,) = out["contexts"]
    assert (at["resume_bytes"], at["chain_bytes"]) == (31_503_744, 4096 * 3850.25)
    assert [g["engine_indexes"] for g in out["groups"]] == [[0, 1], [2], [3], [4]]
    (span,) = out["prefill"]
    assert (span["from"], span["to"], span["flops"]) == (0, 4096, at["prefill_flops"])


def test_prefill_from_p_to_n(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("deepseek-v4-flash", "--prefill", "8192", "9000", "--prefill", "0", "9000") == 0
    out = capsys.readouterr().out
    assert "to compute 8,192 to 9,000" in out
    assert "to compute 0 to 9,000" in out
    with pytest.raises(LayoutError, match="P must be smaller than N"):
        _run("deepseek-v4-flash", "--prefill", "9000", "8192")


def test_sglang_names_its_pools_and_what_no_event_tells(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run("deepseek-v4-flash", "--engine", "sglang") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no event: swa, c4_state, c4_index_state" in out
    assert "deepseek_v4_c4_indexer_state" in out


def test_seed_figures_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--seed") == 0
    out = capsys.readouterr().out
    for text in ("6.3 B", "3.85 KB", "611.2", "2 MB", "1.23 GB", "table is lost"):
        assert text in out
    assert _run("--seed", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"where", "what", "unit", "seed", "computed", "ratio", "rebuilt"} == set(rows[0])


@pytest.mark.parametrize("argv", [(), ("deepseek-v4-flash", "--seed")])
def test_a_model_or_the_seed(argv: tuple[str, ...]) -> None:
    with pytest.raises(LayoutError, match="name a model, or give --seed alone"):
        _run(*argv)


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert _run("deepseek-v4-flash", "--kv-dtype", "fp8", "--draft") == 0
    out = capsys.readouterr().out
    assert "…" not in out
    for text in ("3,850.25", "3,915.00", "15,467,904", "10,506,240", "(last 2)", "one rank writes"):
        assert text in out


def test_configs_from_disk(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert load_layout(str(tmp_path), engine="vllm") == load_layout(str(file), engine="vllm")
    assert load_layout(str(file), engine="vllm") == build(LLAMA)
    assert load_layout("32", engine="vllm").grid_tokens == 32
    assert load_layout("DeepSeek-V4-Flash", engine="vllm").model == "deepseek-v4-flash"
    for text in ("[1]", "{", '{"a": 1', "\xff"):
        file.write_text(text, "latin-1")
        with pytest.raises(LayoutError, match=r"config\.json: not a JSON object"):
            load_config(str(file))
    file.write_bytes(b" " * ((4 << 20) + 1))
    with pytest.raises(LayoutError, match="larger than"):
        load_config(str(file))
    with pytest.raises(LayoutError, match=r"neither a known model .*deepseek-v4-flash"):
        load_config(str(tmp_path / "absent"))
    with pytest.raises(LayoutError, match="plain block size"):
        load_layout("0", engine="vllm")
