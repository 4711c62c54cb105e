"""All parameters of one modelled engine: its pool, its limits, what its time follows from. Pure."""

from __future__ import annotations

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError
from kvatlas.workload.device import Device
from kvatlas.workload.shape import Shape, width_bytes

BLOCKS_MAX = 1 << 26  # of one pool; each takes memory here too


class EngineSpec(msgspec.Struct, frozen=True):
    """All parameters of one engine.

    ``blocks``: usable blocks of the pool. ``step_tokens``: tokens that one step may compute.
    ``context_tokens``: longest prompt plus output. ``retention_tokens``: see `Pool`. More than
    ``max_waiting`` waiting requests are refused. ``max_held`` bounds the blocks that are kept
    from eviction while they are copied away; None: a quarter of the pool. ``minimal_loads``: what
    comes from outside lacks the blocks that no resume reads (`Component.least_blocks`).
    ``async_scheduling``: as vLLM on GPUs, which schedules a step before the one before is over.
    Modelled is what that changes in windows: a block is given back one step after it left (vLLM
    0.32, `KVCacheManager.allocate_slots`: "on the processed-token basis"). Such an engine does
    not leap.

    Time: either ``device`` (``devices`` of them working together in ``precision``), or the two
    measured figures ``prefill_tokens_per_s`` and ``decode_step_s``, which win where both are
    given. What a step reads and exchanges follows from ``shape`` (its experts held in
    ``expert_precision``, "" the same, by ``expert_ranks`` engine ranks together: data-parallel
    attention); without it from ``weight_bytes``, inactive experts included, 0 meaning that every
    weight is active. ``step_overhead_s`` is the fixed cost of a step, None the device's own. All
    of it is multiplied by ``time_scale``; 0 makes every step instant.
    """

    blocks: int
    max_running: int = 256
    max_waiting: int = 10_000
    step_tokens: int = 8192
    context_tokens: int = 1 << 20
    retention_tokens: int | None = 0
    max_held: int | None = None
    minimal_loads: bool = False
    async_scheduling: bool = False
    device: Device | None = None
    devices: int = 1
    precision: str = "fp8"
    shape: Shape | None = None
    expert_precision: str = ""
    expert_ranks: int = 1
    weight_bytes: int = 0
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    step_overhead_s: float | None = None
    time_scale: float = 1.0

    def check(self, layout: Layout) -> None:
        """Raises ConfigError naming the first field that cannot work with this layout."""
        least = {"blocks": 1, "max_running": 1, "max_waiting": 1, "step_tokens": 1}
        least |= {"context_tokens": 2, "devices": 1, "expert_ranks": 1}
        for field, bound in least.items():
            if getattr(self, field) < bound:
                raise ConfigError(f"{field} is {getattr(self, field)}: give at least {bound}")
        if self.max_held is not None and self.max_held < 0:
            raise ConfigError(f"max_held is {self.max_held}: give a number from 0 up")
        if self.blocks > BLOCKS_MAX:
            raise ConfigError(f"blocks is {self.blocks}: give at most {BLOCKS_MAX}")
        for field in ("weight_bytes", "step_overhead_s", "time_scale"):
            value = getattr(self, field)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{field} is {value}: give a number from 0 up")
        rate, step_s = self.prefill_tokens_per_s, self.decode_step_s
        if rate is not None or step_s is not None:
            if rate is None or step_s is None:
                raise ConfigError("give prefill_tokens_per_s and decode_step_s together")
            if not 0 < rate < float("inf"):
                raise ConfigError(f"prefill_tokens_per_s is {rate}: give a number above 0")
            if not 0 <= step_s < float("inf"):
                raise ConfigError(f"decode_step_s is {step_s}: give a number from 0 up")
        elif layout.compute is None or layout.compute.linear <= 0:
            raise ConfigError(
                f"the layout of {layout.model!r} has no compute figures: give "
                "prefill_tokens_per_s and decode_step_s"
            )
        elif self.device is None:
            raise ConfigError("give a device, or prefill_tokens_per_s and decode_step_s")
        else:
            self.device.compute_rate(self.precision)
            width_bytes(self.expert_precision or self.precision)
