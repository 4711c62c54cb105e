"""Engines whose speed the gateway is not told: first tokens come when it says, and the real
gateway, over real sockets, says what the simulator does.

Time is virtual on both sides (`validate.parity_loop`): what is compared are the engines' own
seconds, whatever this machine does meanwhile.
"""

from __future__ import annotations

import msgspec
import pytest

from kvatlas.sim.cluster import ClusterFile, EngineTable
from kvatlas.sim.hidden import RATES, WARM_UP, Foretold, Told, changed, foretold, hidden
from kvatlas.sim.world import PLAY
from kvatlas.validate.parity_served import served
from kvatlas.validate.parity_simulated import simulated
from kvatlas.validate.parity_values import Change, Scenario, Side, scenario
from kvatlas.workload.families import generate
from kvatlas.workload.presets import FAMILIES

ENGINES = 2
SEED = 1
SPREAD = 2.0


def made(family: str, requests: int) -> Scenario:
    """Engines of two speeds, which change in the middle."""
    tables = tuple(
        EngineTable(name=f"e{n}", devices=2, expert_precision="fp4") for n in range(ENGINES)
    )
    rate_per_s = RATES[family] * ENGINES / 8
    shape = msgspec.structs.replace(
        FAMILIES[family], requests=requests, duration_s=requests / rate_per_s
    )
    play = msgspec.structs.replace(PLAY, max_output_tokens=8)
    plain = scenario(ClusterFile(engine=tables), generate(shape, SEED, family), play)
    cluster = hidden(plain.cluster, SEED, SPREAD)
    middle = plain.requests[requests // 2]
    return msgspec.structs.replace(
        plain,
        cluster=cluster,
        changes=tuple(
            Change(middle.arrival_s, member.name, changed(SEED, member.name, SPREAD))
            for member in cluster.members
        ),
    )


def told(side: Side) -> list[Told]:
    """What the gateway said of each request, and what came of it."""
    found = []
    for request in side.requests.values():
        assert len(request.tried) == 1
        plan = request.decision.plans[0]
        assert plan.publisher.worker == request.tried[0]
        at, engine = request.decision.at, request.tried[0]
        found.append(Told(at, engine, plan.price.ttft_s, request.ttft_s))
    return found


def errors(play: Scenario, side: Side) -> Foretold:
    return foretold(play.name, [(told(side), play.changes[0].at_s)])


@pytest.mark.parametrize("family", RATES)
def test_first_tokens_come_when_they_are_foretold(family: str) -> None:
    """Median within 10 % after warm-up, per family; and again after a change."""
    play = made(family, 120)
    there = served(play)
    result = errors(play, there)
    assert result.predictions >= 120 / 2 - ENGINES * WARM_UP
    assert result.error_p50 < 0.10
    assert told(there) == told(simulated(play))


def test_who_does_not_learn_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail."""
    monkeypatch.setattr("kvatlas.core.cost.EngineCost._compare", lambda *_: None)
    play = made("random", 160)
    result = errors(play, simulated(play))
    assert result.recovered_after == -1
    assert result.after[-1] > 0.2


def test_a_change_is_seen() -> None:
    """It is a change: first the predictions are wrong, after a few requests they are not."""
    play = made("multi-turn", 240)
    result = errors(play, simulated(play))
    assert result.after[0] > 1.5 * result.error_p50
    assert 0 < result.recovered_after <= 25
