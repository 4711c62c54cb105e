"""Tiers in virtual time: what leaves hbm comes back from where it is due, and never wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from sim_kit import Log, chats, cluster_of

from kvatlas.core.agent_values import Config, Effect, Kind, Load
from kvatlas.core.layout import Layout
from kvatlas.core.records import Tier
from kvatlas.core.units import Unit
from kvatlas.errors import ConfigError
from kvatlas.sim.cluster import Cluster, load_cluster
from kvatlas.sim.gateway import Inquiry, Outcome
from kvatlas.sim.links import LinkSpec
from kvatlas.sim.tier_node import SimNode
from kvatlas.sim.tier_spec import TierSpec, parse_tiers, size_bytes
from kvatlas.sim.tier_units import Kept
from kvatlas.sim.world import World, simulate
from kvatlas.workload.state import Memory

TURN = 256 * 8  # tokens


def prompt(turns: int, seed: int = 1) -> bytes:
    """Token ids of a session after so many turns."""
    return b"".join((seed * 100_000 + i).to_bytes(4, "little") for i in range(TURN * turns))


class Answering(Memory):
    """Remembers the first token of each answer: it depends on all state before it."""

    first: dict[str, int]

    def token(self, id: str, index: int) -> int:
        made = super().token(id, index)
        if not index:
            self.first[id] = made
        return made


def tiered(spec: TierSpec, **fields: object) -> Cluster:
    return msgspec.structs.replace(cluster_of(**fields), tiers=spec)


class Stage:
    """A cluster whose engines really compute, one request at a time."""

    def __init__(self, spec: TierSpec | None, **fields: object) -> None:
        self.log = Log()
        self.answers: dict[str, int] = {}
        cluster = cluster_of(**{"count": 2, "per_node": 2, **fields})
        self.world = World(
            msgspec.structs.replace(cluster, tiers=spec),
            engine_watchers=[self.log],
            gateway_watchers=[self.log],
            make_model=self._model,
        )
        for engine in self.world.engines.values():
            engine.start()
        self.world.gateway.start()

    def _model(self, layout: Layout) -> Memory:
        made = Answering(layout)
        made.first = self.answers
        return made

    @property
    def nodes(self) -> Sequence[SimNode]:
        assert self.world.tiers is not None
        return list(self.world.tiers.nodes.values())

    def ask(self, id: str, tokens: bytes, *, scope: str = "", finish: bool = True) -> None:
        self.world.gateway.ask(Inquiry(id, tokens, 4, scope), lambda outcome: None)
        if finish:
            self.until(lambda: not self.world.gateway.in_flight)
            self.wait(5.0)

    def until(self, condition: Callable[[], bool]) -> None:
        end = self.world.timeline.now + 600.0
        while not condition():
            assert self.world.timeline.step(), "it never came to that"
            assert self.world.timeline.now < end, "it takes too long"

    def wait(self, seconds: float) -> None:
        self.world.timeline.after(seconds, lambda: None)
        end = self.world.timeline.now + seconds
        self.until(lambda: self.world.timeline.now >= end)

    def outcome(self, id: str) -> Outcome:
        (found,) = [outcome for outcome in self.log.outcomes if outcome.id == id]
        assert not found.fault
        return found

    def only(self, engine: str) -> None:
        """Leave one engine, with an empty cache."""
        for name, each in self.world.engines.items():
            each.stop()
            if name == engine:
                each.start()
        self.wait(10.0)

    def at_rest(self) -> None:
        """Nothing is under way, nothing held that should not be; the directory says the same."""
        self.world.gateway.stop()
        while self.world.timeline.step():
            pass
        shelves = self.world.dispatcher.directory.shelves
        for node in self.nodes:
            assert not node.agent.busy
            for tier in (Tier.DRAM, Tier.DISK):
                if not node.held(tier):
                    continue
                books = node.agent.ledger(tier)
                assert set(node.held(tier)) == {entry.key for entry in books.entries()}
                usage = books.usage()
                assert not usage.reserved_bytes + usage.leases + usage.leaving_bytes
                bodies = sum(not name[-1] for name in node.held(tier))
                points = len(node.held(tier)) - bodies
                assert shelves.held(node.publisher)[tier] == (bodies, points)
        for engine in self.world.engines.values():
            assert engine.model.free_share == 1.0
            assert not engine.model.held


def right(tokens: bytes, **fields: object) -> int:
    """What an engine answers that computed everything."""
    stage = Stage(None, **fields)
    stage.ask("cold", tokens)
    return stage.answers["cold"]


POINT, BODY = 15_467_904, 1_002_240  # bytes of DeepSeek V4 Flash in vLLM, per 256 tokens
MODELS = ["deepseek-v4-flash", "llama-3.1-70b"]


def fields_of(model: str) -> dict[str, object]:
    return {"model": model, "devices": 4 if model.startswith("llama") else 2}


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


def test_a_load_that_takes_too_long_is_given_up() -> None:
    agent = Config(load_s=2.0, hit_share=1.0)
    stage = Stage(TierSpec(dram_bytes=10**12, agent=agent), count=1)
    stage.ask("one", prompt(4))
    stage.only("e-0")
    stage.world.fabric.set_speed(HOST, 0.0)
    stage.ask("two", prompt(4), finish=False)
    stage.until(lambda: not stage.world.gateway.in_flight)
    two = stage.outcome("two")
    assert two.cached_tokens == 0
    assert 2.0 < two.ttft_s < 4.0
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


def test_tenants_do_not_share_and_pay_for_themselves() -> None:
    point = POINT + 15 * BODY
    stage = Stage(TierSpec(dram_bytes=10**12, quotas={"greedy": point}), count=1)
    stage.ask("one", prompt(2), scope="greedy")
    stage.ask("two", prompt(2, seed=2), scope="greedy")
    stage.ask("three", prompt(2), scope="modest")
    books = stage.nodes[0].agent.ledger(Tier.DRAM).tenants()
    assert books["greedy"] <= point
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
    for wrong in ('dram = "much"', 'dram = ""', 'dram = "1TB"\nhost_link = "rope"', "dram = 5"):
        path.write_text(f"{head}[tiers]\n{wrong}\n")
        with pytest.raises(ConfigError, match=r"cluster\.toml"):
            load_cluster(path)
