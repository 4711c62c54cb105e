"""Bursts on one new prefix, in virtual time: the figures of issue 6, whatever the engines' pace.

The same bursts through the gateway: tests/scenarios/test_report_routing.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest

from kvatlas.sim.cluster import Cluster, ClusterFile, EngineTable, build
from kvatlas.sim.report import Report
from kvatlas.sim.world import simulate
from kvatlas.workload.trace import Trace, TraceRequest

PREFIX, TAIL, BLOCK = 4000, 50, 50
V4 = "deepseek-v4-flash"


def burst(count: int, within_s: float, *, tails: bool, seed: int = 0) -> Trace:
    """``count`` prompts of one prefix; with tails, each of its own."""
    draw = random.Random(seed)
    shared = tuple(range(PREFIX // BLOCK))

    def requests() -> Iterator[TraceRequest]:
        at = 1.0
        for index in range(count):
            own = (1_000_000 + index,) if tails else ()
            yield TraceRequest(index, at, PREFIX + TAIL * len(own), 64, shared + own)
            at += draw.expovariate(count / within_s) if within_s else 0.0

    return Trace("burst", "made", BLOCK, requests)


def cluster(rates: list[float], model: str) -> Cluster:
    """Engines of their own pace, which the router has to find out."""
    tables = []
    for index, rate in enumerate(rates):
        values: dict[str, object] = {"name": f"e{index}", "model": model}
        values |= {"prefill_tokens_per_s": rate, "decode_step_s": 0.01}
        values |= {"devices": 2, "expert_precision": "fp4"} if model == V4 else {"blocks": 40_000}
        tables.append(msgspec.convert(values, EngineTable))
    return build(ClusterFile(engine=tuple(tables)), lambda place: place)


def computing(report: Report) -> int:
    """Engines that computed the prefix."""
    return sum(e.prompt_tokens - e.hit_tokens > 0.9 * PREFIX for e in report.engines)


@pytest.mark.parametrize("within_s", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("rates", [[8000.0] * 4, [2000.0, 8000.0, 8000.0, 30_000.0]], ids=str)
@pytest.mark.parametrize(
    ("model", "tails", "tokens_max"), [("16", True, 9_600), (V4, False, 12_800)]
)
def test_a_burst_of_32_computes_its_prefix_on_two_engines_at_most(
    model: str, tails: bool, tokens_max: int, rates: list[float], within_s: float
) -> None:
    for seed in range(3):
        report = simulate(cluster(rates, model), burst(32, within_s, tails=tails, seed=seed))
        assert report.latency.requests == 32
        assert not report.latency.failed
        assert report.tokens.recomputed <= tokens_max
        assert 1 <= computing(report) <= 2


@pytest.mark.parametrize("engines", [4, 8, 16])
def test_a_larger_burst_takes_one_more_engine_for_every_16(engines: int) -> None:
    for count in (64, 128, 256):
        report = simulate(cluster([8000.0] * engines, "16"), burst(count, 0.1, tails=True))
        assert computing(report) <= min(engines, count // 16)
        assert report.tokens.recomputed <= computing(report) * PREFIX + count * TAIL
