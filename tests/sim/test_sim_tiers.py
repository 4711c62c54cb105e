"""Tiers in virtual time: what leaves hbm comes back from where it is due, and never wrong."""

from __future__ import annotations

import msgspec
import pytest
from sim_kit import chats, cluster_of
from tiers_kit import (
    BODY,
    LLAMA,
    MODELS,
    POINT,
    SHARED,
    TURN,
    Stage,
    fields_of,
    prompt,
    right,
    tiered,
)

from kvatlas.config import size_bytes
from kvatlas.core.agent_values import Config, Effect, Kind, Load
from kvatlas.core.keys import salt_scope
from kvatlas.core.records import Tier
from kvatlas.core.units import Unit
from kvatlas.errors import ConfigError
from kvatlas.sim.cluster import load_cluster
from kvatlas.sim.links import LinkSpec
from kvatlas.sim.tier_spec import DISK_READ, DISK_WRITE, TierSpec, parse_tiers
from kvatlas.sim.tier_units import Kept
from kvatlas.sim.world import simulate


@pytest.mark.parametrize("model", MODELS)
def test_another_engine_of_the_node_resumes_what_left_hbm(model: str) -> None:
    fields = fields_of(model)
    stage = Stage(TierSpec(dram_bytes=10**12), **fields)
    stage.ask("one", prompt(2))
    first = stage.outcome("one").tried[0]
    other = next(name for name in stage.world.engines if name != first)
    stage.only(other)
    stage.ask("two", prompt(3))
    two = stage.outcome("two")
    assert two.tried == (other,)
    # The first prompt's end is the last position that was kept: one token had to be computed.
    assert two.cached_tokens == two.expected_tokens
    assert two.cached_tokens >= 2 * TURN - 256
    assert stage.answers["two"] == right(prompt(3), **fields)
    stage.at_rest()


@pytest.mark.parametrize("model", MODELS)
def test_wrong_bytes_would_show(model: str) -> None:
    """The check above can fail: each byte that is loaded counts."""
    fields = fields_of(model)
    for part in (0, 1) if model.startswith("deepseek") else (0,):
        stage = Stage(TierSpec(dram_bytes=10**12), **fields)
        stage.ask("one", prompt(2))
        held = stage.nodes[0].held(Tier.DRAM)
        name = next(name for name in held if name[-1] == part)
        bad = tuple(bytes(b ^ 1 for b in data) for data in held[name].data)
        held[name] = Kept.of(held[name].unit, bad, held[name].tenant)
        stage.only("e-1")
        stage.ask("two", prompt(3))
        assert stage.outcome("two").cached_tokens
        assert stage.answers["two"] != right(prompt(3), **fields)


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.OBJECT])
def test_a_bit_that_turned_over_is_found_and_thrown_out(tier: Tier) -> None:
    spec = TierSpec(
        dram_bytes=10**12, object_bytes=10**13, agent=Config(write_through=(Tier.OBJECT,))
    )
    stage = Stage(spec, count=1)
    stage.ask("one", prompt(2))
    node = stage.nodes[0]
    if tier is Tier.OBJECT:
        node.lose(Tier.DRAM)
    held = node.held(tier)
    name = next(iter(held))
    data = bytes([held[name].data[0][0] ^ 1]) + held[name].data[0][1:]
    broken = msgspec.structs.replace(held[name], data=(data, *held[name].data[1:]))
    held[name] = broken
    assert not broken.whole
    stage.only("e-0")
    stage.ask("two", prompt(2))
    assert stage.outcome("two").cached_tokens == 0
    assert stage.answers["two"] == right(prompt(2))
    assert node.agent.counts["damaged"] == 1
    assert held.get(name) is not broken
    stage.only("e-0")
    stage.ask("three", prompt(2))
    assert stage.outcome("three").cached_tokens == 2 * TURN - 256
    stage.at_rest()


def test_what_a_full_store_pushed_out_is_promised_no_more() -> None:
    through = Config(write_through=(Tier.OBJECT,))
    spec = TierSpec(dram_bytes=10**12, object_bytes=3 * (POINT + 8 * BODY), agent=through)
    stage = Stage(spec, per_node=1)
    for seed in range(1, 5):
        stage.ask(str(seed), prompt(1, seed=seed))
    store = stage.world.tiers and stage.world.tiers.store
    assert store
    assert store.used_bytes == sum(kept.unit.size_bytes for kept in store.held.values())
    believed = stage.world.dispatcher.directory.shelves.names(stage.nodes[0].publisher)
    assert believed[Tier.OBJECT] == set(store.held)
    stage.at_rest()


def test_an_engine_restarts_and_dram_is_still_there() -> None:
    stage = Stage(TierSpec(dram_bytes=10**12), count=1)
    stage.ask("one", prompt(2))
    stage.only("e-0")
    stage.ask("two", prompt(2))
    assert stage.outcome("two").cached_tokens == 2 * TURN - 256
    stage.at_rest()


@pytest.mark.parametrize("through", [True, False])
def test_a_node_restarts_and_only_the_disk_is_there(through: bool) -> None:
    agent = Config(write_through=(Tier.DISK,) if through else ())
    stage = Stage(TierSpec(dram_bytes=10**12, disk_bytes=10**12, agent=agent), count=1)
    stage.ask("one", prompt(2))
    stage.nodes[0].stop()
    stage.nodes[0].start()
    stage.only("e-0")
    assert not stage.nodes[0].held(Tier.DRAM)
    stage.ask("two", prompt(2))
    two = stage.outcome("two")
    assert two.cached_tokens == two.expected_tokens == (2 * TURN - 256 if through else 0)
    assert stage.answers["two"] == right(prompt(2))
    stage.at_rest()


def test_damage_on_the_way_is_a_recompute() -> None:
    stage = Stage(TierSpec(dram_bytes=10**12), count=1)
    stage.ask("one", prompt(2))

    def verdict(node: str, effect: Effect, unit: Unit) -> str:
        return "damaged" if isinstance(effect, Load) and unit.index == 3 else ""

    assert stage.world.tiers is not None
    stage.world.tiers.verdict = verdict
    stage.only("e-0")
    stage.ask("two", prompt(2))
    assert stage.outcome("two").cached_tokens == 0
    assert stage.answers["two"] == right(prompt(2))
    assert stage.nodes[0].agent.counts["damaged"] == 1
    # It was computed anew, and saved again: whole once more.
    stage.world.tiers.verdict = None
    stage.only("e-0")
    stage.ask("three", prompt(2))
    assert stage.outcome("three").cached_tokens == 2 * TURN - 256
    stage.at_rest()


HOST = "e-node0 host"


def test_the_agent_dies_in_mid_load() -> None:
    stage = Stage(TierSpec(dram_bytes=10**12), count=1)
    stage.ask("one", prompt(4))
    stage.only("e-0")
    stage.world.fabric.set_speed(HOST, 0.001)
    stage.ask("two", prompt(4), finish=False)
    stage.until(lambda: stage.world.fabric.links[HOST].flows > 0)
    stage.nodes[0].stop()
    stage.until(lambda: not stage.world.gateway.in_flight)
    assert stage.outcome("two").cached_tokens == 0
    assert stage.answers["two"] == right(prompt(4))
    stage.nodes[0].start()
    stage.wait(5.0)
    stage.ask("three", prompt(5))
    assert stage.answers["three"] == right(prompt(5))
    stage.at_rest()


def test_an_engine_dies_in_mid_save_and_in_mid_load() -> None:
    stage = Stage(TierSpec(dram_bytes=10**12), count=1)
    link = stage.world.fabric.links[HOST]
    stage.world.fabric.set_speed(HOST, 0.001)
    stage.ask("one", prompt(2), finish=False)
    stage.until(lambda: link.flows > 0)
    stage.only("e-0")
    assert not stage.nodes[0].held(Tier.DRAM)
    stage.ask("two", prompt(2))
    stage.wait(30.0)
    stage.only("e-0")
    assert stage.nodes[0].held(Tier.DRAM)
    stage.ask("three", prompt(2), finish=False)
    stage.until(lambda: link.flows > 0)
    stage.only("e-0")
    stage.ask("four", prompt(2))
    assert stage.answers["four"] == right(prompt(2))
    stage.at_rest()


@pytest.mark.parametrize(("load_s", "given_s"), [(0.5, 0.5), (10.0, 1.0)])
def test_a_load_that_takes_too_long_is_given_up(load_s: float, given_s: float) -> None:
    """By the limit for all loads, or once it has taken as long as computing its tokens would."""
    agent = Config(load_s=load_s, hit_share=1.0)
    stage = Stage(TierSpec(dram_bytes=10**12, agent=agent), count=1)
    stage.ask("one", prompt(4))
    stage.only("e-0")
    stage.world.fabric.set_speed(HOST, 0.0)
    stage.ask("two", prompt(4), finish=False)
    stage.until(lambda: not stage.world.gateway.in_flight)
    two = stage.outcome("two")
    assert two.cached_tokens == 0
    assert given_s < two.ttft_s < given_s + 0.5
    assert stage.nodes[0].agent.counts["load_late"] == 1
    assert stage.answers["two"] == right(prompt(4))
    stage.world.fabric.set_speed(HOST, 1.0)
    stage.at_rest()


def test_a_load_that_costs_more_than_computing_is_not_begun() -> None:
    spec = TierSpec(dram_bytes=10**12, host_link=LinkSpec(300e6), agent=Config(hit_share=1.0))
    stage = Stage(spec, count=1)
    stage.ask("one", prompt(2))
    stage.only("e-0")
    stage.ask("two", prompt(2))
    assert stage.outcome("two").cached_tokens == 0
    assert not stage.nodes[0].agent.moved[Kind.LOAD, Tier.DRAM]
    # A long prompt is worth the same load: its attention grows, its resume point does not.
    stage.ask("long", prompt(40))
    stage.wait(10.0)
    stage.only("e-0")
    stage.ask("again", prompt(40))
    assert stage.outcome("again").cached_tokens == 40 * TURN - 256
    stage.at_rest()


def test_a_store_carries_state_from_node_to_node_until_it_is_lost() -> None:
    spec = TierSpec(
        dram_bytes=10**12, object_bytes=10**13, agent=Config(write_through=(Tier.OBJECT,))
    )
    stage = Stage(spec, per_node=1)
    stage.ask("one", prompt(2))
    first = stage.outcome("one").tried[0]
    other = next(name for name in stage.world.engines if name != first)
    stage.only(other)
    stage.ask("two", prompt(3))
    two = stage.outcome("two")
    assert (two.tried, two.cached_tokens) == ((other,), 2 * TURN - 256)
    assert stage.answers["two"] == right(prompt(3))
    assert stage.world.tiers is not None
    stage.world.tiers.lose_store()
    stage.wait(1.0)
    for node in stage.nodes:
        node.lose(Tier.DRAM)
    stage.only(first)
    stage.ask("three", prompt(3))
    three = stage.outcome("three")
    assert three.cached_tokens == three.expected_tokens == 0
    stage.at_rest()


def test_peers_read_each_others_dram() -> None:
    stage = Stage(TierSpec(dram_bytes=10**12, peers=True), per_node=1)
    stage.ask("one", prompt(2))
    first = stage.outcome("one").tried[0]
    other = next(name for name in stage.world.engines if name != first)
    stage.only(other)
    stage.ask("two", prompt(3))
    assert stage.outcome("two").cached_tokens == 2 * TURN - 256
    assert stage.answers["two"] == right(prompt(3))
    stage.at_rest()


def test_the_next_turn_resumes_what_was_answered_too() -> None:
    """But for the last token, which nobody computed, and what does not fill a block."""
    stage = Stage(SHARED, **{**LLAMA, "count": 1})
    stage.ask("one", prompt(1), output=100)
    said = b"".join(token.to_bytes(4, "little") for token in stage.texts["one"])
    assert len(said) == 400
    again = prompt(1) + said + prompt(1, seed=2)
    stage.only("e-0")
    stage.ask("two", again)
    two = stage.outcome("two")
    assert two.cached_tokens == two.expected_tokens == TURN + 96
    assert stage.answers["two"] == right(again, **LLAMA)
    stage.at_rest()


def test_tenants_do_not_share_and_pay_for_themselves() -> None:
    point = POINT + 15 * BODY
    stage = Stage(TierSpec(dram_bytes=10**12, quotas={"greedy": point}), count=1)
    stage.ask("one", prompt(2), scope="greedy")
    stage.ask("two", prompt(2, seed=2), scope="greedy")
    stage.ask("three", prompt(2), scope="modest")
    books = stage.nodes[0].agent.ledger(Tier.DRAM).tenants()
    assert 0 < books[salt_scope("greedy").owner] <= point
    stage.only("e-0")
    stage.ask("four", prompt(2), scope="other")
    assert stage.outcome("four").cached_tokens == 0
    stage.ask("five", prompt(2), scope="modest")
    assert stage.outcome("five").cached_tokens == 2 * TURN - 256
    stage.at_rest()


SMALL = {"count": 2, "per_node": 2, "blocks": 600, "step_tokens": 512}


def test_tiers_too_small_for_all_hand_down_and_every_token_counts_once() -> None:
    spec = TierSpec(dram_bytes=10 * (POINT + 10 * BODY), disk_bytes=100 * (POINT + 10 * BODY))
    trace = chats(120, sessions=20)
    bare = simulate(cluster_of(**SMALL), trace)
    report = simulate(tiered(spec, **SMALL), trace)
    tokens = report.tokens
    assert not report.latency.failed
    assert sum(tokens.hits.values()) + tokens.recomputed + tokens.unserved == tokens.prompt
    assert min(tokens.hits[tier] for tier in ("hbm", "dram", "disk")) > 0
    assert tokens.hit_share > bare.tokens.hit_share + 0.1
    (use,) = report.agents.values()
    assert use.moved_bytes["demote disk"] > 0
    assert use.counts["evicted"] > 0
    assert use.held_bytes["dram"] <= spec.dram_bytes
    again = simulate(tiered(spec, **SMALL), trace)
    assert msgspec.json.encode(again) == msgspec.json.encode(report)


def test_more_room_below_is_more_hits() -> None:
    trace = chats(120, sessions=20)
    shares = [
        simulate(tiered(TierSpec(dram_bytes=n * POINT), **SMALL), trace).tokens.hit_share
        for n in (10, 200)
    ]
    assert shares[1] > shares[0] + 0.1


def test_sizes_and_what_is_no_size() -> None:
    spec = parse_tiers("dram=1TB, disk=8TB,object=1.5PB,policy=gdsf")
    assert (spec.dram_bytes, spec.disk_bytes, spec.policy) == (10**12, 8 * 10**12, "gdsf")
    assert spec.object_bytes == 15 * 10**14
    assert spec.agent.write_through == (Tier.OBJECT,)  # else nobody would ever write there
    assert size_bytes("64g") == size_bytes("64 GB") == 64 * 10**9
    assert size_bytes("123") == 123
    for text in ("", "dram", "dram=", "dram=0", "dram=-1", "dram=nan", "dram=1B", "dram=1XB"):
        with pytest.raises(ConfigError):
            parse_tiers(text)
    for text in (
        "dram=1GB,dram=2GB",
        "hbm=1GB",
        "object=1TB",
        "dram=1GB,policy=x",
        "dram=9999999PB",
        f"dram={'9' * 400}",
        "dram=1GB,policy=lru,policy=fifo",
    ):
        with pytest.raises(ConfigError):
            parse_tiers(text)


def test_the_file_says_what_is_below(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tiers") / "cluster.toml"
    head = '[[engine]]\ncount = 2\ndevices = 2\nexpert_precision = "fp4"\n'
    path.write_text(head + '[tiers]\ndram = "1TB"\ndisk = "8TB"\nobject = "10TB"\npeers = true\n')
    spec = load_cluster(path).tiers
    assert spec is not None
    assert (spec.dram_bytes, spec.peers) == (10**12, True)
    assert spec.agent.write_through == (Tier.OBJECT,)
    rates = f"{DISK_READ.bytes_per_s}\ndisk_write_bytes_per_s = {DISK_WRITE.bytes_per_s}"
    path.write_text(f'{head}[tiers]\ndram = "1TB"\ndisk_read_bytes_per_s = {rates}\n')
    assert load_cluster(path).tiers == TierSpec(dram_bytes=10**12)  # the defaults, written out
    nic = 'dram = "1TB"\nobject = "1PB"\nstorage_link = "storage-NIC"\n'
    for wrong, why in (
        ('dram = "1TB"\nstorage_link = "rope"', r":7: unknown link 'rope'"),
        ('dram = "1TB"\nstorage_link = "storage-NIC"', r":5: .*give object=SIZE"),
        ('dram = "1TB"\nobject = "1PB"\nload_path = "dual"', r":5: .*needs a storage_link"),
        (f'{nic}load_path = "dual"', r":9: .*there are none"),
        (f'{nic}load_path = "both"', r":9: "),
    ):
        path.write_text(f"{head}[tiers]\n{wrong}\n")
        with pytest.raises(ConfigError, match=rf"cluster\.toml{why}"):
            load_cluster(path)
    head = (
        '[[engine]]\nmodel = "512"\nblocks = 9\nprefill_tokens_per_s = 1.0\ndecode_step_s = 1.0\n'
    )
    path.write_text(f'{head}[tiers]\ndram = "1TB"\n')
    with pytest.raises(ConfigError, match=r"cluster\.toml:6: a plain block size"):
        load_cluster(path)
    for wrong in ('dram = "much"', 'dram = ""', 'dram = "1TB"\nhost_link = "rope"', "dram = 5"):
        path.write_text(f"{head}[tiers]\n{wrong}\n")
        with pytest.raises(ConfigError, match=r"cluster\.toml"):
            load_cluster(path)
