"""A thousand engines: the production core routes among them, and a decision stays small."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_kit import chats

from kvatlas.core.keys import Keyring
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher, Resume
from kvatlas.core.router import FEW, Ask, Policy, Router
from kvatlas.sim.cluster import (
    Cluster,
    ClusterFile,
    DirectoryTable,
    EngineTable,
    RouterTable,
    build,
    load_cluster,
)
from kvatlas.sim.report import SimReport
from kvatlas.sim.world import simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "thousand.toml"
ENGINES = 1000


def cluster(policy: Policy, engines: int) -> Cluster:
    """Engines of which nothing is known but how fast they are, with small pools."""
    table = EngineTable(
        name="engine",
        count=engines,
        model="512",
        blocks=600,
        prefill_tokens_per_s=20_000.0,
        decode_step_s=0.02,
    )
    directory = DirectoryTable(blocks_max=engines * 600)
    return build(
        ClusterFile(engine=(table,), router=RouterTable(policy=policy), directory=directory), str
    )


def test_hundreds_of_engines_are_routed_among() -> None:
    """A thousand, and more of the trace, is `test_the_example_plays`."""
    played: dict[str, SimReport] = {}
    for policy in ("price", "round_robin"):
        trace = chats(200, sessions=50, rate_per_s=100.0, output=4)
        played[policy] = simulate(cluster(policy, 250), trace)  # type: ignore[arg-type]
    ours, turns = played["price"], played["round_robin"]
    assert (ours.latency.requests, ours.latency.failed) == (200, 0)
    assert turns.tokens.hit_share == 0.0  # nobody is asked twice
    assert ours.tokens.hit_share > 0.4
    assert ours.latency.ttft_s.mean < 0.8 * turns.latency.ttft_s.mean


def test_among_a_thousand_a_dozen_get_a_plan() -> None:
    """The holders of the most, and the idlest: never a plan for each."""
    fingerprint, router = b"\1" * 32, Router()
    engines = [Publisher(f"engine-{i:03}") for i in range(ENGINES)]
    for engine in engines:
        router.add(engine, plain(256), fingerprint)
    keys = Keyring(b"a secret for the test").chain(bytes(16), bytes(4 * 256 * 40), 256)
    held = [Resume(e, 256 * (40 - i // 25), 256 * 40) for i, e in enumerate(engines)]
    ask = Ask("ask", 256 * 40 + 1, {fingerprint: keys}, held)
    decision = router.peek(ask, 1.0)
    assert len(decision.plans) <= FEW
    assert decision.plans[0].publisher in engines[:25]
    assert decision.considered == ENGINES


def test_the_idlest_are_the_same_whether_or_not_enough_are_idle() -> None:
    """Two ways to find them, one answer: rank by rank, the queue first."""
    router, fingerprint = Router(), b"\1" * 32
    engines = [Publisher(f"engine-{i:02}") for i in range(20)]
    for engine in engines:
        router.add(engine, plain(256), fingerprint)
    asked = 0

    def busy(count: int) -> None:
        nonlocal asked
        for engine in engines[:count]:
            ask = Ask(str(asked), 10_000, {}, (), "no tokens")
            plan = router.peek(ask, 0.0, [engine]).plans[0]
            router.begin(ask, plan, 0.0)
            asked += 1

    def idlest() -> list[Publisher]:
        ask = Ask("ask", 10_000, {}, (), "no tokens")
        return [plan.publisher for plan in router.peek(ask, 0.0).plans]

    assert idlest() == engines[:4]
    busy(15)
    assert idlest() == engines[15:19]
    busy(18)  # two are left: then who is free first, and was chosen the longest ago
    assert idlest() == [*engines[18:], *engines[15:17]]


def test_the_example_has_a_thousand_engines() -> None:
    found = load_cluster(EXAMPLE)
    assert len(found.members) == ENGINES
    assert found.directory.blocks_max >= 100_000_000


@pytest.mark.long
def test_the_example_plays() -> None:
    trace = chats(4_000, sessions=800, rate_per_s=200.0)
    report = simulate(load_cluster(EXAMPLE), trace)
    assert (report.latency.requests, report.latency.failed) == (4_000, 0)
    assert report.tokens.hit_share > 0.3
