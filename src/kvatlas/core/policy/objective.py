"""What a policy is judged by: four goals as one number, in the order of seed 003, chapter 4.

Since V4's state is small, the seed puts what a hit saves first, then the time that moving state
takes, then decode, and the room in `hbm` last. Each goal is a share, so that the weights have no
unit: of the prefill time without a cache, of that again, of the decode time alone, of the tier.
"""

from __future__ import annotations

import math

import msgspec

from kvatlas.errors import ConfigError


class Objective(msgspec.Struct, frozen=True):
    """Weights, the most important goal first. The defaults halve from goal to goal.

    Raises ConfigError where a weight is negative or no number, or where the order of the weights
    is not that of the goals.
    """

    prefix_hit: float = 8.0
    transfer: float = 4.0
    decode: float = 2.0
    hbm: float = 1.0

    def __post_init__(self) -> None:
        """The checks."""
        weights = (self.prefix_hit, self.transfer, self.decode, self.hbm)
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise ConfigError(f"objective weights {weights}: finite numbers of at least 0, please")
        if sorted(weights, reverse=True) != list(weights):
            raise ConfigError(
                f"objective weights {weights}: none may exceed the one before it (prefix hit, "
                "transfer, decode, hbm)"
            )

    def value(
        self, *, saved: float, moving: float, decode_slower: float = 0.0, hbm_used: float = 0.0
    ) -> float:
        """Higher is better. ``saved`` and ``moving`` are shares of the prefill time without any
        cache, ``decode_slower`` of the decode time, ``hbm_used`` of the tier's room."""
        costs = self.transfer * moving + self.decode * decode_slower + self.hbm * hbm_used
        return self.prefix_hit * saved - costs
