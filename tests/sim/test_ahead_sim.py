"""Copies ahead of need in virtual time: what they bring, and that they cost nothing where not."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
from sim_kit import BLOCK, chats, cluster_of, random_prompts, trace_of

from kvatlas.core.ahead_copies import Params, Why
from kvatlas.errors import ConfigError
from kvatlas.sim.cluster import Cluster, ClusterFile, EngineTable, TiersTable, build
from kvatlas.sim.report import SimReport
from kvatlas.sim.tier_spec import TierSpec
from kvatlas.sim.world import World, simulate
from kvatlas.workload.trace import Trace, TraceRequest

REPLICATE = Params(replicate=True)


def cluster(ahead: Params) -> Cluster:
    """Four engines, each on a node of its own, whose agents read from each other."""
    tiers = TierSpec(dram_bytes=10**12, peers=True)
    return msgspec.structs.replace(cluster_of(), tiers=tiers, ahead=ahead)


def hot_prefix(count: int = 150, *, rate_per_s: float = 10.0, seed: int = 1) -> Trace:
    """Four of five requests begin with the same 40 blocks."""
    draw = random.Random(seed)

    def requests() -> Iterator[TraceRequest]:
        fresh = iter(range(1_000_000, 10_000_000))
        at = 0.0
        for index in range(count):
            group = draw.choices(range(3), (0.8, 0.1, 0.1))[0]
            ids = (*(group * 1000 + i for i in range(40)), next(fresh))
            tokens = 40 * BLOCK + draw.randrange(1, BLOCK + 1)
            yield TraceRequest(index, at, tokens, draw.randrange(1, 30), ids)
            at += draw.expovariate(rate_per_s)

    return trace_of(requests())


def without(report: SimReport) -> SimReport:
    return msgspec.structs.replace(report, ahead={})


def test_a_hot_prefix_is_copied_before_its_queue_grows() -> None:
    trace = hot_prefix()
    off, on = simulate(cluster(Params()), trace), simulate(cluster(REPLICATE), trace)
    assert not off.ahead
    tally = on.ahead[Why.REPLICATE]
    assert tally.ended["arrived"] == tally.ordered > 0
    assert tally.used == tally.ordered
    assert tally.moved_bytes > 0
    assert tally.measured_s > 0
    assert on.latency.ttft_s.mean < off.latency.ttft_s.mean  # type: ignore[operator]
    assert on.tokens.recomputed <= off.tokens.recomputed


def test_the_same_run_twice_is_the_same_run() -> None:
    trace = hot_prefix(60)
    assert simulate(cluster(REPLICATE), trace) == simulate(cluster(REPLICATE), trace)


def test_where_nothing_is_shared_nothing_changes() -> None:
    trace = random_prompts(60)
    on = simulate(cluster(REPLICATE), trace)
    assert not on.ahead[Why.REPLICATE].ordered
    assert without(on) == simulate(cluster(Params()), trace)


def test_agents_that_die_in_the_middle_of_a_copy_leave_nothing_open() -> None:
    world = World(cluster(REPLICATE))
    assert world.ahead is not None
    assert world.tiers is not None
    core, nodes = world.ahead.core, world.tiers.nodes.values()

    def watch(looks: int) -> None:
        if core.under_way:
            for node in nodes:
                node.stop()
        elif looks:
            world.timeline.after(0.001, watch, looks - 1)

    watch(100_000)
    world.play(hot_prefix())
    assert not any(node.up for node in nodes)
    tally = core.tallies[Why.REPLICATE]
    assert tally.ordered == tally.ended["late"] > 0
    assert not core.under_way + core.watched


def test_every_copy_ends_and_is_used_or_not() -> None:
    for tally in simulate(cluster(Params(replicate=True, push=True)), chats(80)).ahead.values():
        assert tally.ended.total() == tally.ordered
        assert tally.used + tally.unused == tally.ended["arrived"]


@pytest.mark.parametrize(
    "tiers", [None, TiersTable(dram="1TB"), TiersTable(disk="1TB", peers=True)]
)
def test_without_peers_that_have_memory_there_is_nothing_to_copy(tiers: TiersTable | None) -> None:
    table = msgspec.convert({"devices": 2, "expert_precision": "fp4"}, EngineTable)
    file = ClusterFile(engine=(table,), tiers=tiers, ahead=REPLICATE)
    with pytest.raises(ConfigError, match=r"ahead: .* peers = true"):
        build(file, lambda place: place)
