"""How long one step of the engine model takes, from what it computes and reads. Pure."""

from __future__ import annotations

from kvatlas.core.layout import Layout
from kvatlas.workload.spec import EngineSpec

_WEIGHT_WIDTH = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}  # bytes per weight


class StepTime:
    """Seconds that one step takes, from its work. Pure arithmetic on an `EngineSpec`."""

    def __init__(self, spec: EngineSpec, layout: Layout) -> None:
        spec.check(layout)
        self._layout = layout
        self._scale = spec.time_scale
        self._overhead = spec.step_overhead_s
        self._prefill_rate = spec.prefill_tokens_per_s
        self._decode_step_s = spec.decode_step_s or 0.0
        if self._prefill_rate is None:
            assert spec.device is not None
            assert layout.compute is not None
            self._compute = layout.compute
            self._flops = spec.device.compute_rate(spec.precision) * spec.devices
            self._bytes_per_s = spec.device.memory_rate() * spec.devices
            # Two operations per weight and token: half the linear FLOPs are the active weights.
            active = layout.compute.linear / 2 * _WEIGHT_WIDTH[spec.precision]
            self._weight_bytes = max(active, spec.weight_bytes)
            self._idle_share = 1 - active / self._weight_bytes
            pair = layout.compute.attention + layout.compute.scoring
            self._scored_share = layout.compute.scoring / pair if pair else 0.0
            self._bytes_per_token = layout.page_bytes_per_token()
            self._fixed_bytes = layout.resume_point_bytes()

    def seconds(self, work: list[tuple[int, int]]) -> float:
        """Duration of a step that computes tokens start…end-1 for each (start, end).

        The larger of compute and memory time, plus the overhead. Memory: the weights that the
        step's tokens touch, each token picking its experts independently, and each request's
        state before ``start``; beyond ``attended_max`` tokens a sparse attention reads only the
        share of it that scoring costs of a full pair.
        """
        if self._prefill_rate is not None:
            prefill = sum(end - start for start, end in work if end - start > 1)
            decode = any(end - start == 1 for start, end in work)
            seconds = prefill / self._prefill_rate + (self._decode_step_s if decode else 0.0)
            return (seconds + self._overhead) * self._scale
        compute = self._compute
        flops = 0.0
        tokens = sum(end - start for start, end in work)
        read = self._weight_bytes * (1 - self._idle_share**tokens)
        cap = compute.attended_max
        for start, end in work:
            flops += compute.prefill_flops(start, end)
            seen: float = start
            if cap is not None and start > cap:
                seen = cap + (start - cap) * self._scored_share
            read += seen * self._bytes_per_token + self._fixed_bytes
        seconds = max(flops / self._flops, read / self._bytes_per_s)
        return (seconds + self._overhead) * self._scale
