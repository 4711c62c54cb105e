"""Accelerators as the time model sees them: dense peak rates and what is reached of them.

Peak figures are the vendors' dense numbers; the efficiencies are the typical ones that published
cost models and MLPerf-like runs arrive at, and are assumptions until calibrated.
"""

from __future__ import annotations

import msgspec

from kvatlas.errors import ConfigError

PREFILL_EFFICIENCY = 0.45  # share of peak FLOPs that a prefill reaches (assumption)
MEMORY_EFFICIENCY = 0.8  # share of peak memory bandwidth that a decode reaches (assumption)


class Device(msgspec.Struct, frozen=True):
    """One accelerator. ``flops`` maps a precision (bf16, fp8, fp4) to dense peak FLOP/s."""

    name: str
    flops: dict[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    compute_efficiency: float = PREFILL_EFFICIENCY
    memory_efficiency: float = MEMORY_EFFICIENCY

    def compute_rate(self, precision: str) -> float:
        """FLOP/s that a prefill reaches. Raises ConfigError for a precision it has no figure of."""
        if precision not in self.flops:
            raise ConfigError(
                f"device {self.name!r} has no figure for {precision!r}: use "
                f"{' or '.join(sorted(self.flops))}"
            )
        return self.flops[precision] * self.compute_efficiency

    def memory_rate(self) -> float:
        """Bytes/s that a decode reaches."""
        return self.memory_bytes_per_s * self.memory_efficiency


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        # NVIDIA H20 data sheet: 148/296 TFLOPS dense, 96 GB at 4.0 TB/s.
        Device("H20", {"bf16": 148e12, "fp8": 296e12}, 96 * 10**9, 4.0e12),
        # NVIDIA H100 SXM data sheet: 989/1,978 TFLOPS dense, 80 GB at 3.35 TB/s.
        Device("H100", {"bf16": 989e12, "fp8": 1978e12}, 80 * 10**9, 3.35e12),
        # NVIDIA H200 SXM data sheet: the same compute, 141 GB at 4.8 TB/s.
        Device("H200", {"bf16": 989e12, "fp8": 1978e12}, 141 * 10**9, 4.8e12),
        # NVIDIA B200 SXM: 2,250/4,500/9,000 TFLOPS dense, 180 GB at 7.7 TB/s (8.0 is also quoted).
        Device("B200", {"bf16": 2250e12, "fp8": 4500e12, "fp4": 9000e12}, 180 * 10**9, 7.7e12),
        # NVIDIA GB200, per GPU: 2,500/5,000/10,000 TFLOPS dense, 199 GB at 8.0 TB/s.
        Device("GB200", {"bf16": 2500e12, "fp8": 5000e12, "fp4": 10000e12}, 199 * 10**9, 8.0e12),
        # Huawei Ascend 950PR as announced (fp8 1,000, fp4 2,000 TFLOPS, 128 GB at 1.6 TB/s); the
        # shipped Atlas 350 card reaches fp4 1,560 and 112 GB at 1.4 TB/s.
        Device("950PR", {"fp8": 1000e12, "fp4": 2000e12}, 128 * 10**9, 1.6e12),
        # Measured with vLLM 0.32 on CPU, one thread, SmolLM2-135M in bf16 (269 MB of weights):
        # 2,048 tokens prefill in 2.35 s (2 x 135e6 x 2,048 FLOPs), 53 tokens/s decode. These are
        # reached rates, hence efficiency 1.
        Device("cpu-2core", {"bf16": 2.35e11}, 24 * 10**9, 1.43e10, 1.0, 1.0),
    )
}


def device(name: str) -> Device:
    """A profile by name. Raises ConfigError that lists the known names."""
    found = DEVICES.get(name)
    if found is None:
        raise ConfigError(f"unknown device {name!r}: use one of {', '.join(DEVICES)}")
    return found
