"""All parameters of one modelled engine: its pool, its limits, what its time follows from. Pure."""

from __future__ import annotations

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError
from kvatlas.workload.device import Device

BLOCKS_MAX = 1 << 26  # of one pool; each takes memory here too


class EngineSpec(msgspec.Struct, frozen=True):
    """All parameters of one engine.

    ``blocks``: usable blocks of the pool. ``step_tokens``: tokens that one step may compute.
    ``context_tokens``: longest prompt plus output. ``retention_tokens``: see `Pool`. More than
    ``max_waiting`` waiting requests are refused.

    Time: either ``device`` (``devices`` of them working together in ``precision``, on a model of
    ``weight_bytes`` in all, its inactive experts included; 0 means that every weight is active),
    or the two measured figures ``prefill_tokens_per_s`` and ``decode_step_s``, which win where
    both are given.
    ``step_overhead_s`` is the fixed cost of a step (an assumption until calibrated). All of it is
    multiplied by ``time_scale``; 0 makes every step instant.
    """

    blocks: int
    max_running: int = 256
    max_waiting: int = 10_000
    step_tokens: int = 8192
    context_tokens: int = 1 << 20
    retention_tokens: int | None = 0
    device: Device | None = None
    devices: int = 1
    precision: str = "fp8"
    weight_bytes: int = 0
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    step_overhead_s: float = 0.001
    time_scale: float = 1.0

    def check(self, layout: Layout) -> None:
        """Raises ConfigError naming the first field that cannot work with this layout."""
        least = {"blocks": 1, "max_running": 1, "max_waiting": 1, "step_tokens": 1}
        least |= {"context_tokens": 2, "devices": 1}
        for field, bound in least.items():
            if getattr(self, field) < bound:
                raise ConfigError(f"{field} is {getattr(self, field)}: give at least {bound}")
        if self.blocks > BLOCKS_MAX:
            raise ConfigError(f"blocks is {self.blocks}: give at most {BLOCKS_MAX}")
        for field in ("weight_bytes", "step_overhead_s", "time_scale"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ConfigError(f"{field} is {getattr(self, field)}: give a number from 0 up")
        measured = (self.prefill_tokens_per_s, self.decode_step_s)
        if measured != (None, None):
            if None in measured or self.prefill_tokens_per_s == 0:
                raise ConfigError("give prefill_tokens_per_s (above 0) and decode_step_s together")
            if any(v is not None and not 0 <= v < float("inf") for v in measured):
                raise ConfigError("prefill_tokens_per_s and decode_step_s must not be negative")
        elif layout.compute is None or layout.compute.linear <= 0:
            raise ConfigError(
                f"the layout of {layout.model!r} has no compute figures: give "
                "prefill_tokens_per_s and decode_step_s"
            )
        elif self.device is None:
            raise ConfigError("give a device, or prefill_tokens_per_s and decode_step_s")
        else:
            self.device.compute_rate(self.precision)
