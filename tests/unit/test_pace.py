"""Engines that are not as fast as their spec says, and change."""

from __future__ import annotations

import msgspec
import pytest
from test_engine_model import GQA, SPEC, drain, ids, times

from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.errors import ConfigError
from kvatlas.workload.device import device
from kvatlas.workload.engine import Engine
from kvatlas.workload.models import load_layout
from kvatlas.workload.pace import Pace, drawn, paced
from kvatlas.workload.protocol import Arrive, Retime
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.step_time import StepTime

V4 = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="auto")
V4_SPEC = EngineSpec(blocks=1000, device=device("H200"), devices=2)


def test_it_is_drawn_by_seed_and_name_within_its_spread() -> None:
    names = [f"engine-{i}" for i in range(200)]
    paces = [drawn(3, name, 2.0) for name in names]
    assert paces == [drawn(3, name, 2.0) for name in names]
    assert paces != [drawn(4, name, 2.0) for name in names]
    factors = [factor for pace in paces for factor in msgspec.structs.astuple(pace)]
    assert len(set(factors)) == len(factors)
    assert 0.5 <= min(factors) < 0.51
    assert 1.98 < max(factors) <= 2.0
    slower = sum(factor > 1 for factor in factors) / len(factors)
    assert slower == pytest.approx(0.5, abs=0.05)
    assert drawn(3, "x", 1.0) == Pace()


@pytest.mark.parametrize("spread", [0.0, 0.99, 101.0, float("nan"), float("inf")])
def test_a_spread_that_cannot_be_is_refused(spread: float) -> None:
    with pytest.raises(ConfigError, match="spread"):
        drawn(0, "x", spread)
    with pytest.raises(ConfigError, match="spread"):
        StubCluster(StubOptions(GQA, SPEC, spread=spread))


@pytest.mark.parametrize("part", ["compute", "attention", "memory", "step"])
def test_each_part_slows_the_steps_that_consist_of_it(part: str) -> None:
    mostly = {
        "compute": [(0, 4000)],
        "attention": [(900_000, 908_000)],
        "memory": [(100, 101)],
        "step": [(0, 1)],
    }[part]
    plain = msgspec.structs.replace(V4_SPEC, step_overhead_s=1.0) if part == "step" else V4_SPEC
    slow = paced(plain, msgspec.convert({part: 2.0}, Pace))
    times_as_long = StepTime(slow, V4).seconds(mostly) / StepTime(plain, V4).seconds(mostly)
    others = paced(plain, Pace(*[1.0 if p == part else 2.0 for p in Pace.__struct_fields__]))
    by_others = StepTime(others, V4).seconds(mostly) / StepTime(plain, V4).seconds(mostly)
    assert 1.0 < times_as_long <= 2.0
    assert times_as_long > by_others


def test_an_engine_is_retimed_from_its_next_step_on() -> None:
    engine = Engine(GQA, SPEC)
    engine.handle(Arrive("a", ids(256 * 3), 2), 0.0)
    engine.tick(0.0)  # a step of .256 s is in flight
    engine.handle(Retime(paced(SPEC, Pace(compute=2.0, memory=3.0))), 0.1)
    assert times(drain(engine), "a") == pytest.approx([0.256 * 5, 0.256 * 5 + 0.03])
