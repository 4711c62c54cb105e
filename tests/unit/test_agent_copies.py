"""Copies of an agent between tiers: what is lost below, not taken, or still read there."""

from __future__ import annotations

import pytest
from agent_kit import GRID, Driver, keys_of, window_layout

from kvatlas.core.agent import Agent
from kvatlas.core.agent_values import Config, Done, Fetch, Forget, Load, Lose, Push
from kvatlas.core.events import UnitsGone, UnitsHeld
from kvatlas.core.policy.lru import Lru
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, name_of

THROUGH = Config(hit_share=1.0, write_through=(Tier.DISK,))


@pytest.mark.parametrize("way", ["loaded", "filled", "restored"])
def test_what_a_store_lost_is_written_again_when_it_is_used(way: str) -> None:
    config = Config(hit_share=1.0, write_through=(Tier.OBJECT,))
    node = Driver(layout=window_layout(), config=config)
    node.attach()
    used, unused = keys_of(1, 3), keys_of(2, 3)
    node.fill(used, 3)
    node.fill(unused, 3)
    there = dict(node.tiers[Tier.OBJECT])
    assert len(there) == 8
    node.tiers[Tier.OBJECT].clear()
    node.do(Lose(Tier.OBJECT))
    gone = UnitsGone(Tier.OBJECT, (*used, *unused), (used[2], unused[2]))
    assert node.said[-1] == gone
    assert not node.tiers[Tier.OBJECT]  # nobody wants it now
    if way == "restored":
        policies = {Tier.DRAM: Lru()}
        node.agent = Agent.restore(node.agent.snapshot(), policies, config)
    node.hold = True
    for _ in range(2):  # once is enough, while it is being written
        node.fill(used, 3) if way == "filled" else node.load(used)
        for number, effect in list(node.open.items()):
            if isinstance(effect, Load):
                node.end(number)
    (number,) = node.open
    node.end(number)
    (sealing,) = node.open
    node.end(sealing)
    mine = {name for name in there if name[:-1] in used}
    assert node.tiers[Tier.OBJECT] == {name: there[name] for name in mine}
    assert node.said[-1] == UnitsHeld(Tier.OBJECT, (), (used[2],))
    node.load(used)
    assert all(isinstance(effect, Load) for effect in node.open.values())


@pytest.mark.parametrize("how", ["error", "refused"])
def test_what_is_not_taken_below_stays_where_it_is(how: str) -> None:
    """A full disk is no fault of what lies in memory."""
    node = Driver(disk=10_000, config=THROUGH)
    node.attach()
    node.hold = True
    keys = keys_of(1, 3)
    node.fill(keys)
    node.end(next(iter(node.open)))
    (number,) = node.open
    names = tuple(name_of(key, Part.BODY) for key in keys)
    node.open.clear()
    node.do(Done(number, error="full" if how == "error" else "", refused=names))
    assert node.agent.counts["not_taken"] == 3
    assert node.agent.ledger(Tier.DISK).usage().reserved_bytes == 0
    node.hold = False
    assert node.load(keys) == 3 * GRID


def test_a_load_that_finds_no_room_leaves_what_it_was_to_read() -> None:
    node = Driver(disk=10_000, config=THROUGH)
    node.attach()
    keys = keys_of(1, 3)
    node.fill(keys)
    node.do(Lose(Tier.DRAM))
    node.hold = True
    node.do(Fetch(node.ask(keys), 3 * GRID))
    ((number, load),) = node.open.items()
    node.open.clear()
    assert isinstance(load, Load)
    node.do(Done(number, refused=tuple(unit.name for s in load.sources for unit in s.units)))
    assert node.ready.pop("q") == 0
    assert node.offer(keys).tokens == 3 * GRID


def test_nothing_is_copied_to_where_the_old_one_is_deleted_and_still_read() -> None:
    """It would have no room there, and its bytes would be nobody's."""
    node = Driver(disk=10_000)
    node.attach()
    keys = keys_of(1, 3)
    node.fill(keys, tenant="t")
    node.do(Push("a", keys, Tier.DISK, "t"))
    node.do(Lose(Tier.DRAM))
    node.hold = True
    node.do(Fetch(node.ask(keys), 3 * GRID))  # from disk alone
    (reads,) = node.open
    node.do(Forget("t"))
    assert len(node.tiers[Tier.DISK]) == 3
    node.fill(keys, tenant="t")
    (saves,) = node.open.keys() - {reads}
    node.end(saves)
    node.do(Push("a", keys, Tier.DISK, "t"))
    assert node.open.keys() == {reads}
    node.end(reads)
    assert not node.tiers[Tier.DISK]
    assert node.ready.pop("q") == 0  # what was forgotten arrives nowhere
    node.do(Push("a", keys, Tier.DISK, "t"))
    assert len(node.open) == 1
