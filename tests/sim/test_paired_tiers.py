"""Tiers below halves of pairs, and loads over both of their cards."""

from __future__ import annotations

import msgspec
import pytest
from sim_kit import chats, pairs_of
from tiers_kit import (
    BODY,
    LLAMA,
    POINT,
    SHARED,
    TURN,
    Stage,
    prompt,
    right,
)

from kvatlas.core.agent_values import Config, Kind
from kvatlas.core.records import Tier
from kvatlas.sim.cluster import TiersTable
from kvatlas.sim.links import LinkSpec
from kvatlas.sim.tier_spec import TierSpec
from kvatlas.sim.world import simulate
from kvatlas.workload.engine import output_ids
from kvatlas.workload.models import load_layout


def test_the_prefill_half_of_a_pair_resumes_from_its_nodes_tiers() -> None:
    stage = Stage(TierSpec(dram_bytes=10**12), paired=True)
    stage.ask("one", prompt(2))
    stage.restart("prefill-0")
    stage.ask("two", prompt(3))
    two = stage.outcome("two")
    assert (two.prefilled_by, two.fallback) == ("prefill-0", "")
    assert two.expected_tokens == 2 * TURN - 256
    assert stage.answers["two"] == right(prompt(3))
    prefill, decode = stage.nodes
    assert prefill.agent.moved[Kind.LOAD, Tier.DRAM] == POINT + 15 * BODY
    assert not decode.agent.moved  # who computed the prompt saved it
    assert stage.world.pairs.counts.transfers == 2
    stage.at_rest()


def test_the_decode_half_that_does_it_all_resumes_from_tiers_too() -> None:
    through = Config(write_through=(Tier.OBJECT,))
    stage = Stage(TierSpec(dram_bytes=10**12, object_bytes=10**13, agent=through), paired=True)
    stage.ask("one", prompt(2))
    stage.world.engines["prefill-0"].stop()
    stage.restart("decode-0")
    stage.ask("two", prompt(2))
    two = stage.outcome("two")
    assert two.tried[-1] == "decode-0"
    assert two.fallback
    assert two.cached_tokens == 2 * TURN - 256
    assert stage.nodes[1].agent.moved[Kind.LOAD, Tier.OBJECT]
    stage.at_rest()


def test_of_a_pair_each_half_saves_what_it_computed() -> None:
    stage = Stage(SHARED, paired=True, computing=False, **LLAMA)
    stage.ask("one", prompt(1), output=400)
    body = load_layout("llama-3.1-70b", engine="vllm").resume_bytes(16)
    saved = [node.agent.moved[Kind.SAVE, Tier.DRAM] for node in stage.nodes]
    assert saved == [TURN // 16 * body, 384 // 16 * body]
    stage.restart("prefill-0")
    stage.ask("two", prompt(1) + output_ids("one", 0, 400) + prompt(1, seed=2))
    assert stage.outcome("two").expected_tokens == TURN + 384
    assert stage.nodes[0].agent.moved[Kind.LOAD, Tier.OBJECT] == 384 // 16 * body
    stage.at_rest()


READS = ("prefill-node0 storage in", "decode-node0 storage in", "decode-node0 out")


def dual() -> Stage:
    """One prompt in the store alone, which both nodes of a pair can read at the same speed."""
    spec = TierSpec(
        dram_bytes=10**12,
        object_bytes=10**13,
        storage_link=LinkSpec(1e9),
        load_path="dual",
        agent=Config(write_through=(Tier.OBJECT,), hit_share=1.0, promote_after=0),
    )
    stage = Stage(spec, paired=True)
    stage.ask("one", prompt(8))
    stage.nodes[0].lose(Tier.DRAM)
    stage.restart("prefill-0")
    assert not stage.moved(*READS)
    return stage


def test_a_load_over_both_paths_is_whole_and_half_of_it_comes_over_each() -> None:
    stage = dual()
    stage.ask("two", prompt(8))
    size_bytes = POINT + 63 * BODY
    own, relayed, passed_on = (stage.moved(name) for name in READS)
    assert own + relayed == pytest.approx(size_bytes)
    assert relayed == passed_on
    assert abs(own - relayed) <= 2 * (BODY + 5e6)  # units are whole, and a relay costs 5 ms more
    assert stage.answers["two"] == right(prompt(8))
    assert stage.nodes[0].agent.moved[Kind.LOAD, Tier.OBJECT] == size_bytes
    assert sum(r.values() if (r := stage.nodes[0].agent._node.paths.reading) else ()) == 0
    stage.at_rest()


def test_a_relay_that_is_down_is_no_path_and_one_that_dies_costs_a_recompute() -> None:
    stage = dual()
    stage.nodes[1].stop()
    stage.ask("two", prompt(8))
    own, relayed, _ = (stage.moved(name) for name in READS)
    assert (own, relayed) == (pytest.approx(POINT + 63 * BODY), 0)
    assert stage.answers["two"] == right(prompt(8))

    stage = dual()
    stage.ask("two", prompt(8), finish=False)
    stage.until(lambda: stage.world.fabric.links[READS[1]].flows > 0)
    stage.nodes[1].stop()
    stage.until(lambda: not stage.world.gateway.in_flight)
    assert stage.nodes[0].agent.counts["load_failed"] == 1
    assert stage.answers["two"] == right(prompt(8))
    stage.nodes[1].start()
    stage.at_rest()


def test_pairs_with_tiers_count_every_token_once() -> None:
    tiers = TiersTable(dram="300MB", disk="1GB", object="100GB", storage_link="storage-NIC")
    fields = {"blocks": 600, "step_tokens": 512, "per_node": 2}
    trace = chats(100, sessions=20)
    bare = simulate(pairs_of(2, 2, **fields), trace).tokens.hit_share
    for path in ("own", "dual"):
        below = msgspec.structs.replace(tiers, load_path=path)
        cluster = pairs_of(2, 2, tiers=below, **fields)
        report = simulate(cluster, trace)
        tokens = report.tokens
        assert not report.latency.failed
        assert tokens.prompt == sum(request.input_tokens for request in trace)
        assert sum(tokens.hits.values()) + tokens.recomputed == tokens.prompt
        assert min(tokens.hits[tier] for tier in ("hbm", "dram", "object")) > 0
        assert tokens.hit_share > bare + 0.1
    assert msgspec.json.encode(simulate(cluster, trace)) == msgspec.json.encode(report)
