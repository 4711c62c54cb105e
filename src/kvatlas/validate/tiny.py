"""Tiny models with random weights, each in a vLLM engine so small that it must evict.

Which blocks are cached, hit and evicted depends on windows and block sizes, which are those of
real models, and not on the weights.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError
from kvatlas.validate.sequences import Shape
from kvatlas.workload.models import load_layout

ENGINE_SEED = 0
CONTEXT_TOKENS = 2048


class Tiny(msgspec.Struct, frozen=True):
    """``blocks``: the engine's pool. ``retentions``: vLLM's ``prefix_cache_retention_interval``,
    for one sequence after the other. ``sequence_requests``: predicted requests of a sequence."""

    name: str
    block_tokens: int | None
    blocks: int
    step_tokens: int
    retentions: tuple[int | None, ...]
    sequence_requests: int
    shape: Shape

    def config(self) -> bytes:
        """Its config.json."""
        return (
            resources.files("kvatlas.validate").joinpath(f"configs/{self.name}.json").read_bytes()
        )

    def layout(self, folder: Path) -> Layout:
        """As kvatlas reads it from the config in ``folder``."""
        return load_layout(str(folder), engine="vllm", block_tokens=self.block_tokens)

    def settings(self, number: int, folder: Path) -> dict[str, Any]:
        """Arguments of `vllm.LLM` for sequence ``number``; ``folder`` holds the config."""
        settings: dict[str, Any] = {
            "model": str(folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 256 << 20,
            "seed": ENGINE_SEED,
            "num_gpu_blocks_override": self.blocks + 1,  # and the null block
            "max_num_batched_tokens": self.step_tokens,
            "max_num_seqs": 8,
            "max_model_len": CONTEXT_TOKENS,
            "prefix_cache_retention_interval": self.retentions[number % len(self.retentions)],
        }
        if self.block_tokens:
            settings["block_size"] = self.block_tokens
        return settings


TINY = (
    Tiny(
        name="gqa",
        block_tokens=32,
        blocks=64,
        step_tokens=512,
        retentions=(0,),
        sequence_requests=50,
        shape=Shape(32, (40, 500), 700, (1, 2, 4, 8, 40), (64,)),
    ),
    Tiny(
        name="swa",
        block_tokens=32,
        blocks=120,
        step_tokens=512,
        retentions=(0, 0, None, 64, 0),
        sequence_requests=50,
        shape=Shape(32, (40, 500), 700, (1, 2, 4, 8, 40), (100, 64)),
    ),
    Tiny(
        name="v4",
        block_tokens=None,
        blocks=330,
        step_tokens=512,
        retentions=(0, 0, None, 256, 0),
        sequence_requests=20,
        shape=Shape(256, (270, 900), 1100, (1, 1, 2, 3, 8), (128, 64, 4)),
    ),
)


def tiny(name: str) -> Tiny:
    """The model of that name. Raises ConfigError."""
    for model in TINY:
        if model.name == name:
            return model
    raise ConfigError(f"no tiny model {name!r}: there are {', '.join(m.name for m in TINY)}")
