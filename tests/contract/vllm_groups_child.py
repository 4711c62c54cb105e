"""Runs inside vLLM's environment: prints how vLLM itself groups the layers of some models.

Reads a JSON object on stdin, name -> {"ratios": [...], "index_bytes": n} for DeepSeek V4, or
{"windowed": [...], "window": n} for plain heads; writes name -> [[kind, window, block, bytes]].
The specs are those that vLLM's model code builds (``models/deepseek_v4``, ``attention.py``).
"""

import json
import sys
from types import SimpleNamespace

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

_PACKED = {
    "num_kv_heads": 1,
    "max_tp_shards": 1,
    "head_size": 512,
    "dtype": torch.uint8,
    "cache_dtype_str": "fp8_ds_mla",
    "state_content_bytes": 584,
    "alignment": 576,
    "model_version": "deepseek_v4",
}


def _v4(ratios, index_bytes):
    specs = {}

    def state(name, size, block, window):
        specs[name] = SlidingWindowMLASpec(
            block_size=block,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=size,
            dtype=torch.float32,
            sliding_window=window,
            alignment=576,
        )

    for i, ratio in enumerate(ratios):
        specs[f"{i}.swa"] = SlidingWindowMLASpec(block_size=64, sliding_window=128, **_PACKED)
        if ratio == 4:
            specs[f"{i}.index"] = MLAAttentionSpec(
                block_size=256,
                num_kv_heads=1,
                max_tp_shards=1,
                head_size=index_bytes,
                dtype=torch.uint8,
                tokens_per_state=4,
                alignment=576,
            )
            state(f"{i}.index_state", 512, 4, 8)
        if ratio:
            specs[f"{i}.kv"] = MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **_PACKED)
            state(f"{i}.state", *((2048, 4, 8) if ratio == 4 else (1024, 8, 128)))
    return specs


def _heads(windowed, window):
    common = {"block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16}
    return {
        str(i): SlidingWindowSpec(sliding_window=window, **common)
        if slides
        else FullAttentionSpec(**common)
        for i, slides in enumerate(windowed)
    }


def _groups(case):
    specs = (
        _v4(case["ratios"], case["index_bytes"])
        if "ratios" in case
        else _heads(case["windowed"], case["window"])
    )
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=True)
    )
    config = SimpleNamespace(
        cache_config=cache,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
        model_config=None,
    )
    return [
        [
            get_kv_cache_spec_kind(g.kv_cache_spec).value,
            get_kv_cache_spec_sliding_window(g.kv_cache_spec),
            g.kv_cache_spec.block_size,
            # V4: one spec per layer, summed; plain heads: one spec for all layers of the group
            g.kv_cache_spec.page_size_bytes * (1 if "ratios" in case else len(g.layer_names)),
        ]
        for g in kv_cache_utils.get_kv_cache_groups(config, specs)
    ]


kv_cache_utils.get_hisparse_kv_cache_groups = lambda *_: None  # needs a whole VllmConfig
answer = {name: _groups(case) for name, case in json.load(sys.stdin).items()}
print(json.dumps(answer))
