"""The agent of one node, among tiers that do as they are told."""

from __future__ import annotations

from agent_kit import GRID, Driver, keys_of, window_layout

from kvatlas.core.agent_values import Drop, Load, Save
from kvatlas.core.records import Tier


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
