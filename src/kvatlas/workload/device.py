"""Accelerators as the time model sees them: dense peak rates and what is reached of them.

Peak figures are the vendors' dense numbers; the efficiencies are the typical ones that published
cost models and MLPerf-like runs arrive at, and are assumptions until calibrated.
"""

from __future__ import annotations

import msgspec

from kvatlas.errors import ConfigError

PREFILL_EFFICIENCY = 0.45  # share of peak FLOPs that a prefill reaches (assumption)
MEMORY_EFFICIENCY = 0.8  # share of peak memory bandwidth that a decode reaches (assumption)
#: Bytes per weight. int4 and fp4 carry scales too: 16 bits per 32 (fp4: MX, 8) are 1/16 (1/32).
PRECISIONS = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5 + 1 / 32, "int4": 0.5 + 1 / 16}
STEP_S = 0.001  # fixed cost of a step (assumption)
LINK_LATENCY_S = 5e-6  # of one small exchange between accelerators of one machine (assumption)


class Device(msgspec.Struct, frozen=True):
    """One accelerator, and how much of it an engine reaches.

    ``flops`` maps a precision (of `PRECISIONS`) to dense peak FLOP/s. The efficiencies are shares
    of the peak: of FLOP/s, of memory bandwidth when weights are read, and when KV state is
    (``attention_efficiency``; None: the same). ``unhidden`` is the share of the shorter of
    arithmetic and memory that is not hidden behind the longer. ``step_s``, ``layer_s``,
    ``request_s`` are fixed costs per step, per layer of the model and step, and per request and
    step. The link is the one between the accelerators that share a model: reached bytes/s one
    way, and seconds per exchange.
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
    unhidden: float = 0.0
    step_s: float = STEP_S
    layer_s: float = 0.0
    request_s: float = 0.0
    link_bytes_per_s: float = 450e9
    link_latency_s: float = LINK_LATENCY_S
    usd_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if not self.flops:
            raise ConfigError(f"device {self.name!r}: flops needs at least one precision")
        if unknown := self.flops.keys() - PRECISIONS.keys():
            raise ConfigError(
                f"device {self.name!r}: flops of {', '.join(sorted(unknown))}: the known precisions"
                f" are {', '.join(PRECISIONS)}"
            )
        above = {f"flops.{k}": v for k, v in self.flops.items()}
        for field in ("memory_bytes", "memory_bytes_per_s", "link_bytes_per_s"):
            above[field] = getattr(self, field)
        for field in ("compute_efficiency", "memory_efficiency", "attention_efficiency"):
            share = getattr(self, field)
            if share is not None and not 0 < share <= 1:
                raise ConfigError(f"device {self.name!r}: {field} is {share}: above 0, at most 1")
        if not 0 <= self.unhidden <= 1:
            raise ConfigError(f"device {self.name!r}: unhidden is {self.unhidden}: from 0 to 1")
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


_GIB, _T = 1 << 30, 1e12
_PCIE4, _PCIE5, _NVLINK4, _NVLINK5 = 25e9, 50e9, 450e9, 900e9  # bytes/s one way, see links.py


def _device(
    name: str,
    memory_gib: int,
    memory_tb_per_s: float,
    link: float,
    usd: float = 0.0,
    **tflops: float,
) -> Device:
    return Device(
        name,
        {precision: value * _T for precision, value in tflops.items()},
        memory_gib * _GIB,
        memory_tb_per_s * _T,
        link_bytes_per_s=link,
        usd_per_hour=usd,
    )


# Data sheets: dense TFLOPS (a sheet's "with sparsity" halved), memory, TB/s, scale-up one way. The
# sheets' GB of memory are binary (an H100 "80 GB" has 81,559 MiB, a B200 "180 GB" 183,359). Prices
# are public list prices per hour, from 2026: the median where several were found.
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        # NVIDIA H20 data sheet. Price: no list price; derived 0.7 to 1.3, an assumption.
        _device("H20", 96, 4.0, _NVLINK4, 0.85, bf16=148, fp8=296),
        # NVIDIA H100 SXM data sheet: 989/1,978 dense. Price 1.99 to 5.00, median.
        _device("H100", 80, 3.35, _NVLINK4, 2.95, bf16=989, fp8=1978),
        # NVIDIA H200 SXM data sheet: the same compute. Price 2.50 to 7.00: the middle.
        _device("H200", 141, 4.8, _NVLINK4, 4.75, bf16=989, fp8=1978),
        # NVIDIA B200 SXM: 7.7 TB/s in HGX (8.0 is also quoted).
        _device("B200", 180, 7.7, _NVLINK5, 6.03, bf16=2250, fp8=4500, fp4=9000),
        # NVIDIA GB200 NVL72, per GPU. Price 9.08 per two GPUs.
        _device("GB200", 199, 8.0, _NVLINK5, 4.54, bf16=2500, fp8=5000, fp4=10000),
        # NVIDIA HGX B300: fp4 dense 13 to 14 PFLOPS as quoted, the rest as B200; 288 GB.
        _device("B300", 288, 8.0, _NVLINK5, bf16=2250, fp8=4500, fp4=13500),
        # NVIDIA GB300 NVL72, per GPU: 1.1 EFLOPS fp4 and 360 PFLOPS fp8 over 72; 288 GB.
        _device("GB300", 288, 8.0, _NVLINK5, bf16=2500, fp8=5000, fp4=15000),
        # Huawei Ascend 950PR as announced (September 2025): 128 GB at 1.6 TB/s, 2 TB/s scale-up.
        _device("950PR", 128, 1.6, 1000e9, fp8=1000, fp4=2000),
        # The shipped Atlas 350 card. Only fp4 is quoted; fp8 at half of it, an assumption.
        _device("Atlas-350", 112, 1.4, _PCIE5, fp8=780, fp4=1560),
        # NVIDIA A100 SXM data sheet: 312 dense, 80 GB at 2,039 GB/s, NVLink 3.
        _device("A100", 80, 2.039, 300e9, bf16=312),
        # NVIDIA L40S data sheet: 362/733 dense, 48 GB at 864 GB/s, PCIe 4.
        _device("L40S", 48, 0.864, _PCIE4, bf16=362, fp8=733),
        # NVIDIA Ada GPU architecture paper: RTX 4090, fp32 accumulation, 24 GB at 1,008 GB/s.
        _device("RTX-4090", 24, 1.008, _PCIE4, bf16=165.2, fp8=330.3),
        # NVIDIA RTX PRO 6000 Blackwell Server Edition: fp4 4 PFLOPS sparse, so 2 dense, fp8 and
        # bf16 by halves; 96 GB at 1,597 GB/s.
        _device("RTX-PRO-6000", 96, 1.597, _PCIE5, bf16=500, fp8=1000, fp4=2000),
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
