"""Runs inside vLLM's environment: its own cache manager with DeepSeek V4's groups."""

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)


def _window(block, window):
    return SlidingWindowMLASpec(
        block_size=block,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.float32,
        sliding_window=window,
    )


def manager(blocks, chunk, retention, draft=False):
    """``blocks`` with vLLM's null block; ``draft``: a window group is that of an EAGLE head."""
    chain = MLAAttentionSpec(block_size=256, num_kv_heads=1, head_size=64, dtype=torch.float32)
    groups = [
        KVCacheGroupSpec(["swa0"], _window(64, 128)),
        KVCacheGroupSpec(["swa1"], _window(64, 128), is_eagle_group=draft),
        KVCacheGroupSpec(["chain"], chain),
        KVCacheGroupSpec(["c4"], _window(4, 8)),
        KVCacheGroupSpec(["c128"], _window(8, 128)),
    ]
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=retention,
    )
    return KVCacheManager(
        config,
        max_model_len=16384,
        scheduler_block_size=256,
        hash_block_size=4,
        max_in_flight_tokens=chunk,
        use_eagle=draft,
        enable_kv_cache_events=True,
    )
