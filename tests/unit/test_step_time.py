"""The time of a run of decode steps: to the bit what its single steps take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core.layout import Compute, Layout
from kvatlas.workload.device import device
from kvatlas.workload.models import load_layout
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.step_time import StepTime

V4 = load_layout("deepseek-v4-flash", engine="vllm")
CHAIN = load_layout("llama-3.1-70b", engine="vllm")
MEASURED = EngineSpec(blocks=9, prefill_tokens_per_s=900.0, decode_step_s=0.013, time_scale=0.7)


def hardware(name: str, devices: int) -> EngineSpec:
    return EngineSpec(blocks=9, device=device(name), devices=devices, weight_bytes=10**11)


@pytest.mark.parametrize("layout", [V4, CHAIN], ids=["sparse", "dense"])
@given(
    spec=st.sampled_from([hardware("H20", 8), hardware("H200", 1), MEASURED]),
    starts=st.lists(st.integers(1, 3000) | st.integers(1, 1 << 20), min_size=1, max_size=6),
    steps=st.integers(1, 300),
)
def test_a_run_takes_what_its_steps_take(
    layout: Layout, spec: EngineSpec, starts: list[int], steps: int
) -> None:
    time = StepTime(spec, layout)
    singles = [time.seconds([(s + i, s + i + 1) for s in starts]) for i in range(steps)]
    assert time.run(starts, steps) == singles


@pytest.mark.parametrize("layout", [V4, CHAIN], ids=["sparse", "dense"])
@given(start=st.integers(0, 1 << 20), scale=st.floats(1e-3, 1e3))
def test_one_token_costs_what_the_whole_formula_says(
    layout: Layout, start: int, scale: float
) -> None:
    """Arithmetic or memory, at every context length and balance of the two."""
    time = StepTime(hardware("H200", 1), layout)
    time._attention_flops *= scale
    time._decode_lines()
    compute = layout.compute
    assert isinstance(compute, Compute)
    cap = compute.attended_max or (1 << 40)
    share = compute.scoring / (compute.attention + compute.scoring)
    flops = compute.prefill_flops(start, start + 1) - compute.linear
    seen = min(start, cap) + max(0, start - cap) * share
    read = seen * layout.page_bytes_per_token() + layout.resume_point_bytes()
    expected = max(flops / time._attention_flops, read / time._state_bytes_per_s)
    assert time._attention(start, start + 1) == pytest.approx(expected, rel=1e-9, abs=1e-12)
