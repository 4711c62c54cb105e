"""The agent of one node, among tiers that do as they are told."""

from __future__ import annotations

import math
import random
from collections import OrderedDict

import pytest
from agent_kit import FP, GRID, Driver, chain_layout, content, keys_of, ledger, window_layout

from kvatlas.core.agent import Agent
from kvatlas.core.agent_values import (
    Announce,
    Attach,
    Cancel,
    Config,
    Damaged,
    Detach,
    Done,
    Drop,
    Fetch,
    Filled,
    Forget,
    Found,
    Keep,
    Kind,
    Lend,
    Load,
    Lose,
    Pull,
    Push,
    Quota,
    Release,
    Resize,
    Save,
    Stop,
    Told,
)
from kvatlas.core.events import UnitsGone
from kvatlas.core.layout import plain
from kvatlas.core.policy.checkpoints import ENDS_AND_JUNCTIONS, PROMPT_END
from kvatlas.core.policy.lru import Lru
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit, name_of
from kvatlas.errors import ConfigError, LayoutError, LedgerError

THROUGH = Config(hit_share=1.0, write_through=(Tier.DISK,))


def test_what_was_saved_is_loaded_again() -> None:
    node = Driver()
    node.attach("a")
    keys = keys_of(1, 4)
    node.fill(keys)
    assert len(node.tiers[Tier.DRAM]) == 4
    node.attach("b")
    assert node.load(keys, worker="b") == 4 * GRID
    assert node.engines["b"] == node.tiers[Tier.DRAM]
    assert not node.agent.busy


def test_a_prompt_with_windows_is_offered_at_its_points_alone() -> None:
    node = Driver(layout=window_layout())
    node.attach("a")
    keys = keys_of(1, 6)
    node.fill(keys, 3, 5)
    assert node.offer(keys).tokens == 5 * GRID
    assert node.offer(keys[:4]).tokens == 3 * GRID
    assert node.offer(keys[:2]).tokens == 0
    saves = [effect for effect in node.effects if isinstance(effect, Save)]
    # Nothing is saved beyond the last point: no prompt could be resumed from it.
    assert sorted(unit.index for unit in saves[0].units if not unit.part) == [0, 1, 2, 3, 4]


def test_bodies_before_the_local_hit_are_not_loaded_but_the_point_is() -> None:
    node = Driver(layout=window_layout())
    node.attach("a")
    keys = keys_of(1, 6)
    node.fill(keys, 6)
    assert node.load(keys, 4 * GRID) == 6 * GRID
    load = next(effect for effect in node.effects if isinstance(effect, Load))
    units = [unit for source in load.sources for unit in source.units]
    assert [(unit.part, unit.index) for unit in units] == [(0, 4), (0, 5), (1, 5)]
    assert not any(isinstance(effect, Drop) for effect in node.effects)


def test_nothing_is_offered_while_it_is_being_saved() -> None:
    node = Driver(hold=True)
    node.attach()
    keys = keys_of(1, 4)
    node.fill(keys)
    assert node.offer(keys).tokens == 0
    (op,) = node.open
    node.end(op)
    assert node.offer(keys).tokens == 4 * GRID


def test_a_save_that_lost_a_body_keeps_no_point() -> None:
    node = Driver(layout=window_layout())
    node.attach()
    keys = keys_of(1, 4)
    node.fail = lambda effect, unit: "failed" if not unit.part and unit.index == 2 else ""
    node.fill(keys, 2, 4)
    assert node.offer(keys).tokens == 2 * GRID
    assert node.agent.counts["save_not_whole"] == 1
    assert node.agent.ledger(Tier.DRAM).usage().reserved_bytes == 0


def test_a_load_that_fails_in_part_is_void_and_not_offered_again() -> None:
    for verdict in ("failed", "damaged"):
        node = Driver(layout=window_layout())
        node.attach()
        keys = keys_of(1, 6)
        node.fill(keys, 3, 6)
        node.fail = lambda effect, unit, v=verdict: v if unit.index == 4 else ""
        assert node.load(keys) == 0
        node.fail = None
        assert node.offer(keys).tokens == 3 * GRID
        assert node.agent.counts["damaged" if verdict == "damaged" else "not_read"] == 1
        assert node.load(keys) == 3 * GRID


def test_a_chain_that_fails_in_the_middle_counts_up_to_there() -> None:
    node = Driver()
    node.attach()
    keys = keys_of(1, 6)
    node.fill(keys)
    node.fail = lambda effect, unit: "damaged" if unit.index == 4 else ""
    assert node.load(keys, GRID) == 4 * GRID
    node.fail = None
    assert node.offer(keys).tokens == 4 * GRID


def test_a_load_is_refused_where_computing_is_cheaper() -> None:
    node = Driver()
    node.attach()
    node.do(Attach("fast", chain_layout(), b"\1" * 32, prefill_tokens_per_s=1e9))
    keys = keys_of(1, 4)
    node.fill(keys)
    offer = node.agent.offer(node.ask(keys, worker="fast"))
    assert (offer.tokens, offer.why) == (0, "computing it is cheaper")
    offer = node.agent.offer(node.ask(keys, deadline_s=1e-6))
    assert (offer.tokens, offer.why) == (0, "the load would take too long")
    assert node.agent.offer(node.ask(keys)).load_s < 0.1


def test_a_fetch_of_what_is_gone_is_answered_at_once() -> None:
    node = Driver()
    node.attach()
    keys = keys_of(1, 4)
    node.fill(keys)
    node.do(Lose(Tier.DRAM))
    node.do(Fetch(node.ask(keys), 4 * GRID))
    assert node.ready == {"q": 0}
    assert node.tiers[Tier.DRAM] == {}
    node.do(Fetch(node.ask(keys), 4 * GRID + 1))
    assert node.agent.counts["load_gone"] == 2


def test_an_operation_that_never_ends_gives_everything_back() -> None:
    node = Driver(hold=True)
    node.attach()
    keys = keys_of(1, 4)
    node.fill(keys)
    (save,) = node.open
    assert node.agent.ledger(Tier.DRAM).usage().reserved_bytes == 400
    node.at(node.config.save_s)
    assert Stop(save) in node.effects
    assert node.agent.ledger(Tier.DRAM).usage().reserved_bytes == 400  # it may still write
    node.at(node.config.save_s + node.config.grace_s)
    assert node.agent.ledger(Tier.DRAM).usage().reserved_bytes == 0
    node.end(save)
    assert node.agent.counts["late"] == 1
    assert node.offer(keys).tokens == 0


def test_a_load_that_never_ends_lets_the_engine_go_on_after_the_grace() -> None:
    node = Driver()
    node.attach()
    keys = keys_of(1, 4)
    node.fill(keys)
    node.hold = True
    assert node.load(keys) == -1
    usage = node.agent.ledger(Tier.DRAM).usage
    assert usage().leases == 4
    node.at(node.config.load_s)
    assert not node.ready
    node.at(node.config.load_s + node.config.grace_s)
    assert node.ready == {"q": 0}
    assert usage().leases == 0
    assert not node.agent.busy


def test_a_cancelled_load_frees_the_blocks_only_when_nothing_writes() -> None:
    node = Driver()
    node.attach()
    keys = keys_of(1, 4)
    node.fill(keys)
    node.hold = True
    node.load(keys)
    node.do(Cancel("a", "q"))
    node.do(Cancel("a", "q"))
    (load,) = node.open
    assert node.effects.count(Stop(load)) == 1
    assert not node.ready
    node.end(load, error="stopped")
    assert node.ready == {"q": 0}


def test_a_second_fetch_of_one_request_does_not_answer_for_the_first() -> None:
    node = Driver()
    node.attach()
    keys = keys_of(1, 4)
    node.fill(keys)
    node.hold = True
    node.load(keys)
    node.do(Fetch(node.ask(keys), 4 * GRID))
    assert not node.ready
    assert node.agent.counts["load_twice"] == 1
    node.end(*node.open)
    assert node.ready == {"q": 4 * GRID}


def test_time_that_is_none_makes_nothing_due() -> None:
    node = Driver(hold=True)
    node.attach()
    node.fill(keys_of(1, 4))
    assert node.agent.tick(math.nan) == ()
    assert node.agent.tick(-1.0) == ()
    assert node.agent.counts["clock_steps"] == 2
    assert node.agent.busy == 1


def test_what_is_read_stays_while_it_is_evicted() -> None:
    node = Driver(dram=400)
    node.attach()
    first, second = keys_of(1, 4), keys_of(2, 4)
    node.fill(first)
    node.hold = True
    node.load(first)
    node.fill(second)
    assert set(node.tiers[Tier.DRAM]) == {name_of(key, Part.BODY) for key in first}
    (load,) = node.open  # the save has to wait
    node.hold = False
    node.end(load)
    assert set(node.tiers[Tier.DRAM]) == {name_of(key, Part.BODY) for key in second}


def test_what_has_to_leave_dram_goes_to_disk_and_comes_back() -> None:
    node = Driver(dram=300, disk=1000, layout=window_layout(40, 5))
    node.attach()
    one, two = keys_of(1, 6), keys_of(2, 6)
    node.fill(one, 6)
    node.fill(two, 6)
    offer = node.offer(one)
    assert offer.tokens == 6 * GRID
    assert {source.tier for source in offer.sources} == {Tier.DRAM, Tier.DISK}
    assert node.load(one) == 6 * GRID
    used = node.agent.ledger(Tier.DRAM).usage()
    assert used.committed_bytes <= 300
    # Used in disk once: copied up, and the other one had to go down for it.
    assert node.offer(two).tokens == 6 * GRID
    assert node.agent.moved[Kind.DEMOTE, Tier.DISK] > 0
    assert node.agent.moved[Kind.PROMOTE, Tier.DRAM] > 0


def test_a_point_on_disk_counts_once_its_record_is_written() -> None:
    node = Driver(dram=None, disk=1000, layout=window_layout(), hold=True)
    node.attach()
    keys = keys_of(1, 3)
    node.fill(keys, 3)
    (save,) = node.open
    node.end(save)
    assert node.offer(keys).tokens == 0
    (seal,) = node.open
    node.end(seal)
    assert node.offer(keys).tokens == 3 * GRID
    assert node.records[Tier.DISK] == {keys[2]}


def test_a_record_that_cannot_be_written_leaves_no_point() -> None:
    node = Driver(dram=None, disk=1000, layout=window_layout(), hold=True)
    node.attach()
    keys = keys_of(1, 3)
    node.fill(keys, 3)
    node.end(*node.open)
    node.end(*node.open, error="disk full")
    assert node.offer(keys).tokens == 0
    assert name_of(keys[2], Part.POINT) not in node.tiers[Tier.DISK]


def test_a_restart_knows_what_the_disk_says_and_no_more() -> None:
    old = Driver(dram=1000, disk=1000, layout=window_layout(), config=THROUGH)
    old.attach()
    keys, more = keys_of(1, 3), keys_of(2, 3)
    old.fill(keys, 3)
    assert old.offer(keys).tokens == 3 * GRID
    new = Driver(dram=1000, disk=1000, layout=window_layout(), config=THROUGH)
    new.tiers[Tier.DISK] = old.tiers[Tier.DISK]
    new.attach()
    assert new.offer(keys).tokens == 0
    units = [Unit(k, Part.BODY, i, 100) for i, k in enumerate(keys)]
    units += [Unit(keys[2], Part.POINT, 2, 100), Unit(more[0], Part.POINT, 0, 100)]
    new.do(Found(Tier.DISK, tuple(units), sealed=(keys[2],)))
    assert new.offer(keys).tokens == 3 * GRID
    assert new.agent.counts["found_unusable"] == 1
    new.do(Found(Tier.DISK, tuple(units[:3])))  # said twice: nothing is dropped for that
    assert new.load(keys) == 3 * GRID


def test_a_quota_costs_its_tenant_alone() -> None:
    node = Driver(dram=1000)
    node.attach()
    node.do(Quota("greedy", 300))
    node.fill(keys_of(1, 3), tenant="modest")
    for prompt in (2, 3, 4):
        node.fill(keys_of(prompt, 3), tenant="greedy")
    assert node.agent.ledger(Tier.DRAM).tenants() == {"greedy": 300, "modest": 300}
    assert node.offer(keys_of(1, 3)).tokens == 3 * GRID
    assert node.offer(keys_of(4, 3)).tokens == 3 * GRID
    node.do(Forget("greedy"))
    assert node.agent.ledger(Tier.DRAM).tenants() == {"modest": 300}
    assert len(node.tiers[Tier.DRAM]) == 3


def test_a_tenant_that_is_forgotten_in_mid_save_leaves_nothing() -> None:
    node = Driver(hold=True)
    node.attach()
    node.fill(keys_of(1, 3), tenant="t")
    (save,) = node.open
    node.do(Forget("t"))
    node.end(save)
    assert node.tiers[Tier.DRAM] == {}
    assert node.agent.ledger(Tier.DRAM).tenants() == {}


def test_more_than_the_queue_takes_loses_the_least_valuable() -> None:
    config = Config(hit_share=1.0, saves_max=1, queue_max=2)
    node = Driver(config=config, hold=True)
    node.attach()
    for prompt, count in ((1, 1), (2, 9), (3, 2), (4, 8)):
        node.fill(keys_of(prompt, count), request=str(prompt))
    assert node.agent.counts["save_dropped"] == 1
    while node.open:
        node.end(min(node.open))
    held = [node.offer(keys_of(prompt, 9)).tokens // GRID for prompt in (1, 2, 3, 4)]
    assert held == [1, 9, 0, 8]


def test_a_queue_that_does_not_move_is_given_up() -> None:
    node = Driver(config=Config(hit_share=1.0, saves_max=1, save_s=1000.0), hold=True)
    node.attach()
    node.fill(keys_of(1, 3))
    node.fill(keys_of(2, 3))
    node.at(node.config.queue_s)
    assert node.agent.counts["save_waited_too_long"] == 1


def test_an_engine_that_dies_takes_its_operations_with_it() -> None:
    node = Driver(hold=True)
    node.attach("a")
    node.attach("b")
    keys = keys_of(1, 3)
    node.fill(keys, worker="a")
    node.do(Detach("a"))
    assert not node.agent.busy
    assert node.agent.ledger(Tier.DRAM).usage().reserved_bytes == 0
    node.end(*node.open)
    assert node.offer(keys, worker="b").tokens == 0


def test_two_engines_that_fill_one_prefix_save_it_once() -> None:
    node = Driver(layout=window_layout(), hold=True)
    node.attach("a")
    node.attach("b")
    one, two = keys_of(1, 6, shared=4), keys_of(2, 6, shared=4)
    node.fill(one, 6, worker="a", request="1")
    node.fill(two, 6, worker="b", request="2")
    assert len(node.open) == 1  # the second waits for what both need
    node.end(*node.open)
    node.end(*node.open)
    assert node.offer(one).tokens == node.offer(two).tokens == 6 * GRID
    assert node.agent.ledger(Tier.DRAM).usage().committed_bytes == 8 * 100 + 2 * 100


def test_the_spacing_chooses_among_the_points() -> None:
    config = Config(hit_share=1.0, spacing=PROMPT_END)
    node = Driver(layout=window_layout(), config=config)
    node.attach()
    keys = keys_of(1, 8)
    for key in keys:
        node.engines["a"][name_of(key, Part.BODY)] = content(name_of(key, Part.BODY))
        node.engines["a"][name_of(key, Part.POINT)] = content(name_of(key, Part.POINT))
    every = tuple(range(1, 9))
    node.do(Filled("a", "r", keys, every, prompt_tokens=6 * GRID + 3, output_tokens=2 * GRID))
    assert sum(name[-1] for name in node.tiers[Tier.DRAM]) == 1
    assert node.offer(keys).tokens == 6 * GRID


def test_a_junction_is_where_a_request_leaves_what_others_left() -> None:
    config = Config(hit_share=1.0, spacing=ENDS_AND_JUNCTIONS)
    node = Driver(layout=window_layout(), config=config)
    node.attach()
    one, two = keys_of(1, 8, shared=4), keys_of(2, 8, shared=4)
    node.fill(one, 1, 2, 3, 4, 5, 6, 7, 8)  # no ends known: nothing is chosen
    assert not node.tiers[Tier.DRAM]
    for request, keys in (("1", one), ("2", two)):
        every = tuple(range(1, 9))
        for name in (name_of(key, part) for key in keys for part in Part):
            node.engines["a"][name] = content(name)
        node.do(Filled("a", f"new {request}", keys, every, prompt_tokens=8 * GRID + 1))
    assert node.offer(keys_of(3, 8, shared=4)).tokens == 4 * GRID


def test_pull_push_keep_and_lend() -> None:
    node = Driver(dram=300, disk=1000)
    node.attach()
    one = keys_of(1, 3)
    node.fill(one)
    node.fill(keys_of(2, 3))
    assert {s.tier for s in node.offer(one).sources} == {Tier.DISK}
    node.do(Pull("a", one))
    assert {s.tier for s in node.offer(one).sources} == {Tier.DRAM}
    node.do(Keep("turn", one, 50.0))
    node.fill(keys_of(3, 3))
    assert {s.tier for s in node.offer(one).sources} == {Tier.DRAM}
    node.do(Push("a", one))
    assert len(node.tiers[Tier.OBJECT]) == 3
    names = tuple(name_of(key, Part.BODY) for key in one)
    node.do(Lend("peer", (*names, b"else\0"), 60.0))
    assert node.lent == {"peer": names}
    node.do(Release("peer"))
    node.do(Release("turn"))
    assert node.agent.ledger(Tier.DRAM).usage().leases == 0
    node.do(Lend("peer", names, 50.0))
    node.at(100.0)
    assert node.agent.ledger(Tier.DRAM).usage().leases == 0


def test_what_others_hold_is_read_from_there_until_it_fails() -> None:
    node = Driver(layout=window_layout())
    node.attach()
    keys = keys_of(1, 3)
    units = [Unit(k, Part.BODY, i, 100) for i, k in enumerate(keys)]
    units.append(Unit(keys[2], Part.POINT, 2, 100))
    node.do(Told(Tier.OBJECT, tuple(units)))
    node.do(Told(Tier.PEER, tuple(units[:1]), node="other"))
    for unit in units:
        node.tiers[Tier.OBJECT][unit.name] = content(unit.name)
    sources = node.offer(keys).sources
    assert {(source.tier, source.node) for source in sources} == {
        (Tier.PEER, "other"),
        (Tier.OBJECT, ""),
    }
    assert node.load(keys) == 0  # the peer has it no more
    assert node.load(keys) == 3 * GRID
    # What was read from afar was copied to dram.
    assert {source.tier for source in node.offer(keys).sources} == {Tier.DRAM}
    node.do(Lose(Tier.OBJECT))
    assert node.offer(keys).tokens == 3 * GRID


def test_what_others_say_is_gone_from_a_store_is_passed_on_once() -> None:
    """Nobody would try to load it any more, and so find out, for the directory."""
    node = Driver(layout=window_layout())
    node.attach()
    keys = keys_of(1, 3)
    units = [Unit(k, Part.BODY, i, 100) for i, k in enumerate(keys)]
    node.do(Told(Tier.OBJECT, tuple(units)))
    gone = Told(Tier.OBJECT, gone=(units[1].name,))
    (said,) = [e for e in node.agent.handle(gone, node.now) if isinstance(e, Announce)]
    assert said.events == (UnitsGone(Tier.OBJECT, (keys[1],), ()),)
    assert not node.agent.handle(gone, node.now)


def test_what_is_known_of_others_has_a_limit() -> None:
    node = Driver(dram=400, config=Config(known_max=3))
    node.attach()
    keys = keys_of(1, 5)
    units = tuple(Unit(keys[i], Part.BODY, i, 100) for i in (2, 3, 4, 0, 1))
    node.do(Told(Tier.OBJECT, units))
    assert node.agent.counts["known_forgotten"] == 2
    (source,) = node.agent.sources(node.ask(keys), 2 * GRID)
    assert source.units == units[3:]
    assert not node.agent.sources(node.ask(keys), 3 * GRID)


def test_a_smaller_tier_empties_downwards() -> None:
    node = Driver(dram=400, disk=1000)
    node.attach()
    keys = keys_of(1, 4)
    node.fill(keys)
    node.do(Resize(Tier.DRAM, 0))
    assert not node.tiers[Tier.DRAM]
    assert node.offer(keys).tokens == 4 * GRID


def test_a_snapshot_goes_on_where_it_was_taken() -> None:
    node = Driver(dram=600, disk=1000, layout=window_layout(), hold=True)
    node.attach()
    keys = keys_of(1, 4)
    node.fill(keys, 2, 4)
    shot = node.agent.snapshot()
    policies = {Tier.DRAM: Lru(), Tier.DISK: Lru()}
    again = Agent.restore(shot, policies, node.config)
    assert again.digest() == node.agent.digest()
    node.agent = again
    node.end(*node.open)
    assert node.offer(keys).tokens == 4 * GRID
    with pytest.raises(LedgerError, match="not a snapshot"):
        Agent.restore(b"nonsense", policies)


def test_exclusive_tiers_hold_what_one_of_both_sizes_would() -> None:
    """Prompts of one block: LRU over the sum of both. While one goes up and another down, the
    place of the first is still taken: so at times one fewer is held, never another."""
    rng = random.Random(7)
    config = Config(hit_share=1.0, exclusive=True)
    node = Driver(dram=500, disk=700, config=config)
    node.attach()
    lru: OrderedDict[int, None] = OrderedDict()
    unsure = 0
    for _ in range(1000):
        prompt = min(int(rng.expovariate(0.12)), 39)
        node.now += 1.0
        recent = list(lru)[::-1]
        hit = node.load(keys_of(prompt, 1)) > 0
        if prompt in recent[:11]:
            assert hit
        elif prompt in recent:
            unsure += 1
        else:
            assert not hit
        if not hit:
            node.fill(keys_of(prompt, 1))
        lru[prompt] = None
        lru.move_to_end(prompt)
        if len(lru) > 12:
            lru.popitem(last=False)
    assert unsure < 100


def test_odd_words_change_nothing() -> None:
    node = Driver(dram=500)
    node.attach()
    node.do(Filled("nobody", "r", keys_of(1, 2)))
    node.do(Filled("a", "r", ()))
    node.do(Filled("a", "r", keys_of(1, 9000)))
    node.do(Fetch(node.ask(keys_of(1, 2), worker="nobody"), GRID))
    node.do(Detach("nobody"))
    node.do(Done(99))
    node.do(Cancel("a", "nobody"))
    node.do(Damaged(Tier.PEER, (b"x\0",)))
    node.do(Found(Tier.DISK, ()))
    node.do(Told(Tier.DRAM, ()))
    node.do(Lose(Tier.DISK))
    node.do(Keep("o", keys_of(1, 2), math.nan))
    node.do(Release("o"))
    node.agent.handle(Detach("nobody"), math.nan)
    node.agent.handle(Detach("nobody"), -5.0)
    assert node.offer(keys_of(1, 2), worker="nobody").why == "unknown engine"
    assert node.offer(keys_of(1, 2)).why == "not held"
    assert not node.agent.busy
    with pytest.raises(ConfigError):
        Agent({})
    with pytest.raises(ConfigError):
        Agent({Tier.HBM: ledger(5)})
    with pytest.raises(ConfigError):
        Config(save_s=math.nan)
    with pytest.raises(ConfigError):
        Config(queue_max=0)
    with pytest.raises(LayoutError):
        node.do(Attach("b", plain(16), FP))
