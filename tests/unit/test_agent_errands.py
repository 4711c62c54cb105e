"""What somebody asks of a node ahead of time: moved, kept, called off; and a node that drains."""

from __future__ import annotations

import pytest
from agent_kit import GRID, Driver, keys_of, window_layout

from kvatlas.core.agent import Agent
from kvatlas.core.agent_values import (
    Config,
    Copy,
    Drain,
    Effect,
    Keep,
    Lose,
    Pull,
    Push,
    Release,
    Resize,
)
from kvatlas.core.policy.lru import Lru
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit, name_of

KEYS = keys_of(1, 8)
NO_PROMOTION = Config(hit_share=1.0, promote_after=0, write_through=(Tier.DISK,))


def on_disk_alone() -> Driver:
    """A node that has a prompt on its disk and nowhere else."""
    node = Driver(dram=10_000, disk=100_000, config=NO_PROMOTION)
    node.attach()
    node.fill(KEYS)
    node.do(Lose(Tier.DRAM))
    assert set(node.tiers[Tier.DISK]) == {name_of(k, Part.BODY) for k in KEYS}
    assert node.agent.depths("a", KEYS) == (8 * GRID, {Tier.DISK: 8 * GRID})
    return node


def test_what_is_pulled_lies_in_dram() -> None:
    node = on_disk_alone()
    node.do(Pull("a", KEYS, owner="o"))
    assert node.agent.under_way("o") == 0
    assert node.agent.depths("a", KEYS)[1] == {Tier.DRAM: 8 * GRID, Tier.DISK: 8 * GRID}
    assert node.agent.held_bytes(KEYS) == {Tier.DRAM: 800, Tier.DISK: 800}


@pytest.mark.parametrize("arrives", [True, False])
def test_a_pull_that_is_called_off_in_mid_way_leaves_nothing(arrives: bool) -> None:
    """Whatever the store still does: nothing of it is kept, and its room is free again."""
    node = on_disk_alone()
    node.hold = True
    node.do(Pull("a", KEYS, owner="o"))
    node.do(Pull("a", KEYS, owner="another"))  # the same one is under way
    assert node.agent.under_way("o") == 1
    assert node.agent.under_way("another") == 0
    (op,) = node.open
    node.do(Release("nobody"))
    assert node.agent.under_way("o") == 1
    node.do(Release("o"))
    node.end(op, "" if arrives else "stopped")
    assert node.agent.under_way("o") == 0
    assert not node.tiers[Tier.DRAM]
    usage = node.agent.ledger(Tier.DRAM).usage()
    assert (usage.reserved_bytes, usage.committed_bytes, usage.leases) == (0, 0, 0)
    assert node.agent.ledger(Tier.DISK).usage().leases == 0
    node.hold = False
    node.do(Pull("a", KEYS, owner="o"))
    assert node.agent.depths("a", KEYS)[1][Tier.DRAM] == 8 * GRID


def test_a_pull_that_waits_for_room_is_called_off_too() -> None:
    node = Driver(dram=800, disk=100_000, config=Config(hit_share=1.0, promote_after=0))
    node.attach()
    node.fill(KEYS)
    other = keys_of(2, 8)
    node.fill(other)  # the first go down
    node.hold = True
    node.fill(keys_of(3, 8))  # and now these, slowly
    assert node.agent.depths("a", KEYS)[1] == {Tier.DISK: 8 * GRID}
    node.do(Pull("a", KEYS, owner="o"))
    assert node.agent.under_way("o") == 1
    node.do(Release("o"))
    assert node.agent.under_way("o") == 0
    node.hold = False
    while node.open:
        node.end(next(iter(node.open)))
    assert node.agent.depths("a", KEYS)[1] == {Tier.DISK: 8 * GRID}


def test_what_is_pushed_lies_in_the_tier_named() -> None:
    node = Driver(dram=10_000, disk=100_000, config=Config(hit_share=1.0))
    node.attach()
    node.fill(KEYS)
    node.do(Push("a", KEYS, Tier.DISK, owner="o"))
    assert node.agent.depths("a", KEYS)[1][Tier.DISK] == 8 * GRID
    node.do(Push("a", KEYS, Tier.OBJECT, owner="o"))
    assert set(node.tiers[Tier.OBJECT]) == {name_of(k, Part.BODY) for k in KEYS}


def test_a_push_that_is_called_off_is_known_nowhere() -> None:
    node = Driver(dram=10_000, disk=100_000, config=Config(hit_share=1.0))
    node.attach()
    node.fill(KEYS)
    node.hold = True
    node.do(Push("a", KEYS, Tier.OBJECT, owner="o"))
    (op,) = node.open
    node.do(Release("o"))
    node.end(op)
    assert node.agent.depths("a", KEYS)[1] == {Tier.DRAM: 8 * GRID}


def test_what_is_kept_stays_until_then_or_until_released() -> None:
    node = Driver(dram=1_600, disk=None, config=Config(hit_share=1.0))
    node.attach()
    node.fill(KEYS)
    node.do(Keep("pin", KEYS, 100.0))
    for prompt in range(2, 9):
        node.fill(keys_of(prompt, 8), request=f"r{prompt}")
    assert node.agent.depths("a", KEYS)[0] == 8 * GRID
    node.do(Release("pin"))
    for prompt in range(9, 12):
        node.fill(keys_of(prompt, 8), request=f"r{prompt}")
    assert node.agent.depths("a", KEYS)[0] == 0


def test_unknown_prompts_and_engines_are_held_nowhere() -> None:
    node = on_disk_alone()
    digest = node.agent.digest()
    assert node.agent.depths("a", keys_of(9, 3)) == (0, {})
    assert node.agent.depths("nobody", KEYS) == (0, {})
    assert node.agent.held_bytes(keys_of(9, 3)) == {Tier.DRAM: 0, Tier.DISK: 0}
    assert node.agent.digest() == digest


# -- drain ----------------------------------------------------------------------------------------


def test_what_only_dram_has_goes_to_disk_before_the_end() -> None:
    """Cheap or not: the node ends, and with it its memory."""
    node = Driver(dram=100_000, disk=100_000)
    node.attach()
    for prompt in range(1, 30):
        node.fill(keys_of(prompt, 6), request=f"r{prompt}")
    assert not node.tiers[Tier.DISK]
    node.do(Drain())
    assert node.agent.drained
    assert set(node.tiers[Tier.DISK]) == set(node.tiers[Tier.DRAM])
    assert node.agent.counts["drain_lost"] == 0
    node.fill(keys_of(99, 6))
    assert node.agent.counts["save_draining"] == 1
    assert name_of(keys_of(99, 6)[0], Part.BODY) not in node.tiers[Tier.DRAM]


def test_points_go_after_their_bodies_and_with_records() -> None:
    node = Driver(dram=100_000, disk=100_000, layout=window_layout())
    node.attach()
    node.fill(KEYS, 4, 8)
    node.do(Drain())
    assert node.agent.drained
    assert node.records[Tier.DISK] == {KEYS[3], KEYS[7]}
    copies = [e for e in node.effects if isinstance(e, Copy)]
    parts = [unit.part for copy in copies for unit in copy.source.units]
    assert parts == sorted(parts)


def test_a_drain_waits_for_what_is_under_way() -> None:
    node = Driver(dram=100_000, disk=100_000)
    node.attach()
    node.hold = True
    node.fill(KEYS)
    node.do(Drain())
    assert node.agent.draining
    assert not node.agent.drained
    while node.open:
        assert not node.agent.drained
        node.end(next(iter(node.open)))
    assert node.agent.drained
    assert set(node.tiers[Tier.DISK]) == {name_of(k, Part.BODY) for k in KEYS}


def test_what_finds_no_room_is_counted_and_holds_nothing_up() -> None:
    node = Driver(dram=100_000, disk=350)
    node.attach()
    node.fill(KEYS)
    node.do(Drain())
    assert node.agent.drained
    assert node.agent.counts["drain_lost"] == len(node.tiers[Tier.DRAM]) - len(
        node.tiers[Tier.DISK]
    )
    assert node.agent.counts["drain_lost"] > 0


def test_a_copy_that_fails_is_not_tried_for_ever() -> None:
    def broken(effect: Effect, unit: Unit) -> str:
        return "failed" if isinstance(effect, Copy) and unit.index == 3 else ""

    node = Driver(dram=100_000, disk=100_000)
    node.attach()
    node.fill(KEYS)
    node.fail = broken
    node.do(Drain())
    assert node.agent.drained


def test_a_node_without_a_disk_drains_at_once() -> None:
    node = Driver(dram=100_000, disk=None)
    node.attach()
    node.fill(KEYS)
    node.do(Drain())
    assert node.agent.drained
    assert node.agent.counts["drain_lost"] == 8


def test_a_drain_outlives_a_restore() -> None:
    node = Driver(dram=100_000, disk=100_000)
    node.attach()
    node.hold = True
    node.fill(KEYS)
    node.do(Drain())
    policies = {tier: Lru() for tier in (Tier.DRAM, Tier.DISK)}
    again = Agent.restore(node.agent.snapshot(), policies, node.config)
    assert again.draining
    assert again.digest() == node.agent.digest()


def test_a_tier_that_shrinks_keeps_what_is_kept_until_it_is_released() -> None:
    node = Driver(dram=10_000, disk=100_000)
    node.attach()
    node.fill(KEYS)
    node.do(Keep("pin", KEYS[:2], 100.0))
    node.do(Resize(Tier.DRAM, 0))
    kept = {name_of(k, Part.BODY) for k in KEYS[:2]}
    assert set(node.tiers[Tier.DRAM]) == kept
    assert len(node.tiers[Tier.DISK]) >= 6
    node.do(Release("pin"))
    assert not node.tiers[Tier.DRAM]
