"""Exact sizes of known models. Each figure can be checked by hand from the model's config.

Flash, per token: 21 layers × (584 + 132) / 4 + 20 × 584 / 128 = 3,850.25. Its pages in vLLM:
(21 × 37,440 + 21 × 8,640 + 20 × 1,728) / 256 = 3,915. Its resume point in vLLM: window
2 × 37,440 × 43, ratio-4 state 2 × (32,832 + 8,640) × 21, ratio-128 state 16 × 32,832 × 20.
"""

from __future__ import annotations

import pytest

from kvatlas.core.families import layout_from_config
from kvatlas.core.layout import Layout, Rule
from kvatlas.workload.models import known_models, load_config, load_layout

FLASH, FLASH_0731, PRO = "deepseek-v4-flash", "deepseek-v4-flash-0731", "deepseek-v4-pro"

# model, engine, KV dtype, indexer dtype: bytes per token, as pages, per resume point, grid
SIZES = [
    (FLASH, "vllm", "fp8", "fp8", 3850.25, 3915.0, 15_467_904, 256),
    (FLASH, "vllm", "fp8", "fp4", 3514.25, 3584.25, 15_467_904, 256),
    (FLASH, "vllm", "bf16", "fp8", 6229.0, 6250.0, 17_842_176, 256),
    (FLASH, "vllm", "fp8_plain", "fp8", 3461.0, 3482.0, 15_024_128, 256),
    (FLASH, "sglang", "fp8", "fp8", 3850.25, 3899.25, 8_160_000, 256),
    (FLASH, "sglang", "fp8", "fp4", 3514.25, 3563.25, 8_160_000, 256),
    (FLASH_0731, "vllm", "fp8", "fp8", 3850.25, 3915.0, 15_467_904, 256),
    (PRO, "vllm", "fp8", "fp8", 5511.4375, 5609.25, 23_340_672, 256),
    (PRO, "vllm", "fp8", "fp4", 5031.4375, 5136.75, 23_340_672, 256),
    (PRO, "sglang", "fp8", "fp8", 5511.4375, 5586.75, 11_592_960, 256),
    (PRO, "sglang", "fp8", "fp4", 5031.4375, 5106.75, 11_592_960, 256),
    ("deepseek-v3.2", "vllm", "fp8", "fp8", 48_068.0, 48_068.0, 0, 64),
    ("deepseek-v3.2", "vllm", "bf16", "fp8", 78_324.0, 78_324.0, 0, 64),
    ("deepseek-v3", "vllm", "bf16", "fp8", 70_272.0, 70_272.0, 0, 64),
    ("deepseek-v3", "vllm", "fp8", "fp8", 35_136.0, 35_136.0, 0, 64),
    ("deepseek-v3", "vllm", "fp8_ds_mla", "fp8", 40_016.0, 40_016.0, 0, 64),
    ("deepseek-v3", "sglang", "auto", "fp8", 70_272.0, 70_272.0, 0, 1),
]


@pytest.mark.parametrize("row", SIZES, ids=lambda row: "-".join(row[:4]))
def test_sizes(row: tuple[str, str, str, str, float, float, int, int]) -> None:
    model, engine, kv, index, token, page, point, grid = row
    layout = load_layout(model, engine=engine, kv_dtype=kv, indexer_dtype=index)
    assert layout.bytes_per_token() == token
    assert layout.page_bytes_per_token() == page
    assert layout.resume_point_bytes() == point
    assert layout.grid_tokens == grid


def test_gqa_with_80_layers_of_8_heads_of_128() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    }
    layout = layout_from_config(config, engine="vllm", kv_dtype="bf16")
    assert layout.bytes_per_token() == layout.page_bytes_per_token() == 327_680
    assert layout.resume_point_bytes() == 0
    assert layout.compute is not None
    assert layout.compute.linear == pytest.approx(2 * 70e9, rel=0.05)


@pytest.mark.parametrize(
    ("engine", "tokens", "size"),
    [
        ("vllm", 4096, 31_503_744),
        ("vllm", 131_072, 528_614_784),
        ("sglang", 4096, 24_131_328),
        ("sglang", 131_072, 519_242_496),
    ],
)
def test_flash_bytes_to_resume(engine: str, tokens: int, size: int) -> None:
    assert load_layout(FLASH, engine=engine, kv_dtype="fp8").resume_bytes(tokens) == size


@pytest.mark.parametrize(
    ("model", "active"),
    [(FLASH, 13e9), (FLASH_0731, 13e9), (PRO, 49e9), ("deepseek-v3", 37e9)],
)
def test_prefill_of_a_short_prompt_costs_two_operations_per_active_parameter(
    model: str, active: float
) -> None:
    layout = load_layout(model, engine="vllm", kv_dtype="fp8")
    assert layout.compute is not None
    assert layout.compute.prefill_flops(0, 512) / 512 == pytest.approx(2 * active, rel=0.1)


def test_flash_attention_is_capped_by_top_k_and_scoring_is_not() -> None:
    compute = load_layout(FLASH, engine="vllm", kv_dtype="fp8").compute
    assert compute is not None
    assert compute.attended_max == 2048  # 512 entries of 4 tokens
    assert compute.attention == 21 * 4 * 64 * 512 / 4
    assert compute.scoring == 21 * 2 * 64 * 128 / 4 + 20 * 4 * 64 * 512 / 128

    def last_token(n: int) -> float:
        return compute.prefill_flops(n - 1, n)

    assert last_token(200_000) - last_token(100_000) == pytest.approx(100_000 * compute.scoring)


def _draft(layout: Layout) -> tuple[int, float, int]:
    (part,) = [c for c in layout.components if c.rule is Rule.OPTIONAL]
    return part.layers, part.exact_bytes_per_token, part.stored_block_bytes


def test_the_draft_is_optional_state_beside_the_sums() -> None:
    mtp = load_layout(FLASH, engine="sglang", kv_dtype="fp8", draft=True)
    assert _draft(mtp) == (1, 584, 149_760)
    # SGLang doubles the rings of compressor rows when it speculates
    assert mtp.resume_point_bytes() == 6_439_680 + 2 * (8_160_000 - 6_439_680)
    dspark = load_layout(FLASH_0731, engine="vllm", kv_dtype="fp8", draft=True)
    assert _draft(dspark) == (3, 3 * 584, 3 * 37_440)
    assert dspark.resume_point_bytes() == 15_467_904
    assert dspark.groups[0].name == "swa"
    assert dspark.groups[0].copies == 2


HYBRIDS = [  # model, engine, block: bytes per token, per resume point, tensor-parallel rule
    # 8 of 48 layers see everything: 8 × 2 × 8 × 256 × 2; windows 64 × 16 tokens × 40 layers
    ("gemma-3-12b", "vllm", 16, 65_536.0, 64 * 16 * 40 * 8192, "by_head"),
    ("gemma-3-12b", "sglang", 64, 6 * 65_536.0, 0, "by_head"),  # one pool, all of it kept
    # 18 of 36: 18 × 2 × 8 × 64 × 2; windows 8 × 16 tokens × 18 layers
    ("gpt-oss-120b", "vllm", 16, 36_864.0, 8 * 16 * 36_864, "by_head"),
    ("gpt-oss-120b", "sglang", 64, 36_864.0, 2 * 64 * 36_864, "by_head"),
    ("llama-3.1-70b", "vllm", 16, 327_680.0, 0, "by_head"),
    ("deepseek-r1", "vllm", 64, 70_272.0, 0, "replicated"),
]


@pytest.mark.parametrize("row", HYBRIDS, ids=lambda row: "-".join(row[:2]))
def test_models_with_heads_of_their_own(row: tuple[str, str, int, float, int, str]) -> None:
    model, engine, block, token, point, rule = row
    layout = load_layout(model, engine=engine, kv_dtype="bf16", block_tokens=block)
    assert layout.bytes_per_token() == token
    assert layout.resume_point_bytes() == point
    assert layout.grid_tokens == block
    assert layout.tensor_parallel == rule


def test_blocks_as_stored_and_as_computed() -> None:
    flash = load_layout(FLASH, engine="vllm", kv_dtype="fp8")
    blocks = {c.name: (c.stored_block_bytes, c.exact_block_bytes()) for c in flash.components}
    assert blocks["c4_kv"] == (21 * 37_440, 21 * 37_376)
    assert blocks["c4_index"] == (21 * 8_640, 21 * 8_448)
    assert blocks["c128_kv"] == (20 * 1_728, 20 * 1_168)
    assert blocks["c4_state"] == (21 * 32_832, 21 * 32_768)
    sglang = load_layout(FLASH, engine="sglang", kv_dtype="fp8")
    rings = {c.name: c for c in sglang.components}
    assert rings["c4_state"].exact_block_bytes() == 8 * 8192 * 21  # a ring of eight rows
    assert {c.name: c.pool for c in sglang.components} == {
        "c4_kv": "deepseek_v4_c4",
        "c4_index": "deepseek_v4_c4_indexer",
        "c128_kv": "deepseek_v4_c128",
        "swa": "swa",
        "c4_state": "deepseek_v4_c4_state",
        "c4_index_state": "deepseek_v4_c4_indexer_state",
    }
    assert flash.announced()
    assert not sglang.announced()


def test_prefill_from_the_middle_splits_into_fixed_cost_and_attention() -> None:
    flash = load_layout(FLASH, engine="vllm", kv_dtype="fp8")
    assert flash.compute is not None
    fixed, attention = flash.prefill_split(8192, 9000)
    assert fixed == 808 * flash.compute.linear
    pairs = (9000**2 - 8192**2) / 2
    expected = 808 * 2048 * flash.compute.attention + pairs * flash.compute.scoring
    assert attention == pytest.approx(expected)
    assert flash.prefill_split(9000, 9000) == (0.0, 0.0)


def test_every_shipped_config_has_a_layout_in_both_engines() -> None:
    assert len(known_models()) >= 13
    same: dict[str, set[str]] = {}
    for model in known_models():
        for engine in ("vllm", "sglang"):
            layout = layout_from_config(
                load_config(model), engine=engine, kv_dtype="fp8", model=model
            )
            same.setdefault(layout.digest(), set()).add(model)
            latent = model.startswith(("deepseek", "kimi-k2"))
            own = "replicated" if latent else "by_head"
            assert layout.tensor_parallel == own
    # V3, R1 and Kimi, and both Flashes without a draft, keep the same state of other weights: what
    # tells them apart is the model in the fingerprint.
    shared = [names for names in same.values() if len(names) > 1]
    v3, flash = (
        {"deepseek-v3", "deepseek-r1", "kimi-k2"},
        {f"deepseek-v4-flash{x}" for x in ("", "-0731")},
    )
    assert sorted(shared, key=sorted) == [v3, v3, flash, flash]
