"""How far an engine's time is from its spec's: machines of one kind differ, and change. Pure."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.workload.device import Device
from kvatlas.workload.spec import EngineSpec

SPREAD_MAX = 100.0
Factor = Annotated[float, msgspec.Meta(ge=1 / SPREAD_MAX, le=SPREAD_MAX)]


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the parts of a step take, times what the spec says: 2 is half as fast.

    ``compute``: arithmetic with weights. ``attention``: arithmetic of attention; where weights are
    computed in bf16 too it is as ``compute``. ``memory``: reading weights and state. ``step``: the
    fixed costs. With measured figures prefill follows ``compute``, decode ``memory``.
    """

    compute: Factor = 1.0
    attention: Factor = 1.0
    memory: Factor = 1.0
    step: Factor = 1.0


def drawn(seed: int, name: str, spread: float) -> Pace:
    """An engine's pace by seed and name: each part between 1/``spread`` and ``spread``, as often
    faster as slower. Raises ConfigError for a spread that cannot be."""
    if not 1 <= spread <= SPREAD_MAX:
        raise ConfigError(f"a spread of {spread:g}: from 1 (all equal) to {SPREAD_MAX:g}")
    noise = hashlib.sha256(f"kvatlas.pace.1\0{seed}\0{name}".encode()).digest()
    parts = [int.from_bytes(noise[i : i + 8], "big") / 2**64 for i in range(0, 32, 8)]
    return Pace(*[spread ** (2 * part - 1) for part in parts])


def paced(spec: EngineSpec, pace: Pace) -> EngineSpec:
    """The spec of an engine whose steps take this much longer."""
    rate, decode_s, step_s = spec.prefill_tokens_per_s, spec.decode_step_s, spec.step_overhead_s
    return msgspec.structs.replace(
        spec,
        device=None if spec.device is None else _device(spec.device, spec.precision, pace),
        prefill_tokens_per_s=None if rate is None else rate / pace.compute,
        decode_step_s=None if decode_s is None else decode_s * pace.memory,
        step_overhead_s=None if step_s is None else step_s * pace.step,
    )


def _device(device: Device, precision: str, pace: Pace) -> Device:
    """A step's weights are computed in ``precision``, its attention in bf16 (`StepTime`)."""
    slower = dict.fromkeys(device.flops, pace.attention) | {precision: pace.compute}
    return msgspec.structs.replace(
        device,
        flops={kind: rate / slower[kind] for kind, rate in device.flops.items()},
        memory_bytes_per_s=device.memory_bytes_per_s / pace.memory,
        step_s=device.step_s * pace.step,
        layer_s=device.layer_s * pace.step,
        request_s=device.request_s * pace.step,
        link_latency_s=device.link_latency_s * pace.step,
    )
