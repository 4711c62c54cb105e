"""The weights of a model as the time of a step sees them: which are read always, which by choice.

A layout says what a token costs to compute; this says what a step reads and exchanges. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvatlas.core.families.fields import Fields
from kvatlas.core.layout import Compute
from kvatlas.errors import ConfigError
from kvatlas.workload.device import PRECISIONS


class Shape(msgspec.Struct, frozen=True):
    """``layers`` of width ``hidden``, and parameters by when they are read.

    ``head``: the output head, read in every step and computed once per token that comes out.
    ``routed``: all parameters of experts that are chosen per token, of which one token uses
    ``routed_share`` (experts per token over experts). The rest follows from the layout's compute
    figures (`dense`).
    """

    layers: int
    hidden: int
    head: int = 0
    routed: int = 0
    routed_share: float = 1.0

    def dense(self, compute: Compute) -> float:
        """Parameters that every token uses, in all layers; the head is not among them.

        Two operations per parameter and token; the constant cost of windowed attention, some
        3 % where there is any, is counted with them.
        """
        return max(compute.linear / 2 - self.routed * self.routed_share, 0.0)

    def weight_bytes(self, compute: Compute, precision: str, expert_precision: str = "") -> float:
        """Bytes of all weights that a step may read; the embedding is looked up, not read."""
        return (self.dense(compute) + self.head) * width_bytes(precision) + self.routed * (
            width_bytes(expert_precision or precision)
        )


def width_bytes(precision: str) -> float:
    """Bytes per weight. Raises ConfigError for an unknown precision."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision {precision!r} is unknown: use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def shape_of(config: Mapping[str, object]) -> Shape:
    """The shape of the model that a Hugging Face config describes.

    Field names: the families of `kvatlas.core.families`. Raises `LayoutError` on a config whose
    fields are missing, contradictory or absurd.
    """
    fields = Fields(config)
    layers, hidden = fields.layers(), fields.count("hidden_size")
    head = hidden * fields.count("vocab_size", high=1 << 24)
    name = next((n for n in _EXPERTS if fields.has(n)), None)
    if name is None:
        return Shape(layers, hidden, head)
    experts = fields.count(name, high=1 << 16)
    used = fields.count("num_experts_per_tok", high=experts)
    wide = "moe_intermediate_size" if fields.has("moe_intermediate_size") else "intermediate_size"
    routed = _sparse_layers(fields, layers) * experts * 3 * hidden * fields.count(wide)
    return Shape(layers, hidden, head, routed, used / experts)


_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def _sparse_layers(fields: Fields, layers: int) -> int:
    """Layers whose feed-forward part consists of experts."""
    dense = fields.count("first_k_dense_replace", low=0, high=layers, default=0)
    step = fields.count("decoder_sparse_step", high=layers, default=1)
    only = fields.items("mlp_only_layers") or []
    return sum(1 for i in range(dense, layers) if (i + 1) % step == 0 and i not in only)
