"""Our groups are those of vLLM's own grouping code, run on the same layers.

What a group is called, which window and block it has, in which order they come and what they
weigh: the directory tells groups apart by exactly that.
"""

from __future__ import annotations

import itertools

import pytest
from vllm_kit import told_by_vllm

from kvatlas.core.families import layout_from_config
from kvatlas.core.layout import Layout
from kvatlas.workload.models import load_config

pytestmark = pytest.mark.engine

_FLASH = load_config("deepseek-v4-flash")
_V4 = {
    "flash": [0, 0, 4] + [128, 4] * 20,
    "pro": [128] + [128, 4] * 30,
    "tiny": [0, 4, 128, 4],
    "no ratio 128": [0] * 10 + [4] * 4,  # its chain is made of equal repeats: that counts too
    "as many of both": [0, 0, 128, 4, 128, 4, 128, 4],
    "more of 128": [4, 128, 0, 4, 128, 128, 128, 4],
    "mostly windows": [0] * 9 + [4, 128, 4],
}
_HEADS = {
    "gemma 3": ([(i + 1) % 6 != 0 for i in range(26)], 1024),
    "gpt-oss": ([i % 2 == 0 for i in range(36)], 128),
    "nearly as many": ([i % 2 == 0 for i in range(25)], 4096),
    "windows only": ([True] * 8, 4096),
    "no windows": ([False] * 8, 0),
    "full first": ([False] + [True] * 7, 512),
}


def _v4(ratios: list[int], index: str) -> Layout:
    config = {**_FLASH, "num_hidden_layers": len(ratios), "compress_ratios": ratios}
    return layout_from_config(config, engine="vllm", kv_dtype="fp8", indexer_dtype=index)


def _heads(windowed: list[bool], window: int) -> Layout:
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": len(windowed),
        "num_attention_heads": 8,
        "head_dim": 64,
        "intermediate_size": 1024,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in windowed],
        "sliding_window": window or None,
    }
    return layout_from_config(config, engine="vllm", kv_dtype="bf16")


def _cases() -> tuple[dict[str, object], dict[str, Layout]]:
    asked: dict[str, object] = {}
    ours: dict[str, Layout] = {}
    for (name, ratios), (index, size) in itertools.product(
        _V4.items(), [("fp8", 132), ("fp4", 68)]
    ):
        asked[f"{name} {index}"] = {"ratios": ratios, "index_bytes": size}
        ours[f"{name} {index}"] = _v4(ratios, index)
    for name, (windowed, window) in _HEADS.items():
        asked[name] = {"windowed": windowed, "window": window}
        ours[name] = _heads(windowed, window)
    return asked, ours


def test_groups_are_vllms() -> None:
    asked, ours = _cases()
    (theirs,) = told_by_vllm("vllm_groups_child.py", asked, 1)
    assert theirs.keys() == ours.keys()
    for name, layout in ours.items():
        identities = [
            [g.kind, g.window_tokens, g.block_tokens]
            for g in layout.groups
            for _ in range(g.copies)
        ]
        assert [row[:3] for row in theirs[name]] == identities, name
        for group in layout.groups:
            identity = [group.kind, group.window_tokens, group.block_tokens]
            stored = sum(c.stored_block_bytes for c in layout.components if c.group == group.name)
            assert stored == sum(row[3] for row in theirs[name] if row[:3] == identity), name
