"""An objective in a cluster file: at overload what is refused makes the rest come in time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from sim_kit import random_prompts

from kvatlas.errors import ConfigError
from kvatlas.report.latency import Slo
from kvatlas.sim.cluster import ClusterFile, EngineTable, GatewayTable, build, load_cluster
from kvatlas.sim.gateway import Outcome
from kvatlas.sim.report import Report
from kvatlas.sim.world import simulate

SLO_S = 2.0


def play(rate_per_s: float, ttft_slo_s: float) -> tuple[Report, list[Outcome]]:
    """Two engines that compute some two prompts a second each."""
    values = {"name": "e", "count": 2, "model": "16", "blocks": 100_000}
    values |= {"prefill_tokens_per_s": 8000.0, "decode_step_s": 0.01}
    engines = (msgspec.convert(values, EngineTable),)
    file = ClusterFile(engine=engines, gateway=GatewayTable(ttft_slo_s=ttft_slo_s))
    outcomes: list[Outcome] = []
    trace = random_prompts(300, rate_per_s=rate_per_s)
    report = simulate(
        build(file, lambda place: place), trace, slo=Slo(SLO_S), export=outcomes.append
    )
    return report, outcomes


def in_time(outcomes: list[Outcome]) -> int:
    return sum(0 <= outcome.ttft_s <= SLO_S for outcome in outcomes if not outcome.fault)


def test_at_overload_more_are_in_time_because_others_are_refused() -> None:
    _, all_sent = play(8.0, 0.0)
    report, outcomes = play(8.0, SLO_S)
    assert not any(outcome.fault for outcome in all_sent)
    refused = [outcome for outcome in outcomes if outcome.fault]
    assert {outcome.fault for outcome in refused} == {"slo_unreachable"}
    assert not any(outcome.tried for outcome in refused)
    assert report.latency.failed == len(refused)
    assert len(outcomes) == 300
    assert in_time(outcomes) > 2 * in_time(all_sent)
    # The first seconds' requests came before anything was known, and queue for as long again.
    settled = [outcome for outcome in outcomes if outcome.arrived_at > 10.0 and not outcome.fault]
    assert in_time(settled) > 0.85 * len(settled)


def test_with_engines_idle_nobody_is_refused() -> None:
    _, outcomes = play(1.0, SLO_S)
    assert not any(outcome.fault for outcome in outcomes)


def test_an_objective_that_is_none_is_told(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[gateway]\nttft_slo_s = -1\n[[engine]]\nname = "e"\n')
    with pytest.raises(ConfigError, match=r"cluster\.toml:2: gateway\.ttft_slo_s: .*>= 0"):
        load_cluster(file)
