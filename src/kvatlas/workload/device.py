"""Accelerators as the time model sees them: dense peak rates and what is reached of them.

Peak figures are the vendors' dense numbers; the efficiencies are the typical ones that published
cost models and MLPerf-like runs arrive at, and are assumptions until calibrated.
"""

from __future__ import annotations

import msgspec

from kvatlas.errors import ConfigError

PREFILL_EFFICIENCY = 0.45  # share of peak FLOPs that a prefill reaches (assumption)
MEMORY_EFFICIENCY = 0.8  # share of peak memory bandwidth that a decode reaches (assumption)
STEP_S = 0.001  # fixed cost of a step (assumption)
LINK_LATENCY_S = 5e-6  # of one small exchange between accelerators of one machine (assumption)


class Device(msgspec.Struct, frozen=True):
    """One accelerator, and how much of it an engine reaches.

    ``flops`` maps a precision (bf16, fp8, fp4) to dense peak FLOP/s. The efficiencies are shares
    of the peak: of FLOP/s, of memory bandwidth when weights are read, and when KV state is
    (``attention_efficiency``; None: the same). ``step_s``, ``layer_s``, ``request_s`` are fixed
    costs per step, per layer of the model and step, and per request and step. The link is the one
    between the accelerators that share a model: reached bytes/s one way, and seconds per exchange.
    ``usd_per_hour`` is one device's price, 0 where no source names one. Raises ConfigError where a
    figure cannot be.
    """

    name: str
    flops: dict[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    compute_efficiency: float = PREFILL_EFFICIENCY
    memory_efficiency: float = MEMORY_EFFICIENCY
    attention_efficiency: float | None = None
    step_s: float = STEP_S
    layer_s: float = 0.0
    request_s: float = 0.0
    link_bytes_per_s: float = 450e9
    link_latency_s: float = LINK_LATENCY_S
    usd_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if not self.flops:
            raise ConfigError(f"device {self.name!r}: flops needs at least one precision")
        above = {f"flops.{k}": v for k, v in self.flops.items()}
        for field in ("memory_bytes", "memory_bytes_per_s", "link_bytes_per_s"):
            above[field] = getattr(self, field)
        for field in ("compute_efficiency", "memory_efficiency", "attention_efficiency"):
            share = getattr(self, field)
            if share is not None and not 0 < share <= 1:
                raise ConfigError(f"device {self.name!r}: {field} is {share}: above 0, at most 1")
        for field, value in above.items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"device {self.name!r}: {field} is {value}: above 0 is needed")
        for field in ("step_s", "layer_s", "request_s", "link_latency_s", "usd_per_hour"):
            value = getattr(self, field)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"device {self.name!r}: {field} is {value}: 0 or more is needed")

    def compute_rate(self, precision: str) -> float:
        """FLOP/s that a prefill reaches. Raises ConfigError for a precision it has no figure of."""
        if precision not in self.flops:
            raise ConfigError(
                f"device {self.name!r} has no figure for {precision!r}: use "
                f"{' or '.join(sorted(self.flops))}"
            )
        return self.flops[precision] * self.compute_efficiency

    def attention_rate(self) -> float:
        """FLOP/s of attention, which engines compute in bf16 whatever the weights are in."""
        slowest = min(self.flops.values())
        return self.flops.get("bf16", slowest) * self.compute_efficiency

    def memory_rate(self) -> float:
        """Bytes/s that reading weights reaches."""
        return self.memory_bytes_per_s * self.memory_efficiency

    def state_rate(self) -> float:
        """Bytes/s that reading KV state reaches."""
        share = self.attention_efficiency
        return self.memory_bytes_per_s * (self.memory_efficiency if share is None else share)


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
