"""Units loaded each for itself, by engines that look after their own prefixes."""

from __future__ import annotations

from agent_kit import Driver, content, keys_of, window_layout

from kvatlas.core.agent import Agent
from kvatlas.core.agent_values import Config, Done, Filled, Load, Save, Take
from kvatlas.core.policy.lru import Lru
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, name_of

ALL = Config(hit_share=1.0)


def take(
    node: Driver, keys: tuple[bytes, ...], first: int, part: Part, deadline_s: float = 9.0
) -> int:
    """Ask; what `Ready` said."""
    node.do(Take("a", "t", keys, first, part, deadline_s))
    return node.ready.pop("t", -1)


def loads(node: Driver) -> list[list[bytes]]:
    """Names of the units of every load so far."""
    found = [e for e in node.effects if isinstance(e, Load)]
    return [[unit.name for source in load.sources for unit in source.units] for load in found]


def test_bodies_and_points_are_taken_apart_and_not_in_a_row() -> None:
    node = Driver(config=ALL, layout=window_layout())
    node.attach()
    keys = keys_of(1, 5)
    node.fill(keys, 2, 4)
    assert node.agent.present("a", keys, 0) == (4, (2, 4))
    assert node.agent.present("a", keys, 3) == (1, (4,))
    assert node.agent.present("nobody", keys, 0) == (0, ())
    assert take(node, keys, 1, Part.BODY) == 0
    assert take(node, keys, 0, Part.POINT) == 0
    assert loads(node) == [
        [name_of(key, Part.BODY) for key in keys[1:4]],
        [name_of(keys[i], Part.POINT) for i in (1, 3)],
    ]
    assert not node.agent.busy


def test_what_is_nowhere_is_answered_at_once_and_counted() -> None:
    node = Driver(config=ALL)
    node.attach()
    assert take(node, keys_of(1, 3), 0, Part.BODY) == 0
    assert take(node, (), 0, Part.BODY) == 0
    node.fill(keys_of(2, 2))
    assert take(node, keys_of(2, 2), 0, Part.POINT) == 0, "this layout has none"
    assert loads(node) == []
    assert node.agent.counts["load_gone"] == 3


def test_a_damaged_unit_is_dropped_and_the_others_still_come() -> None:
    node = Driver(config=ALL, hold=True)
    node.attach()
    keys = keys_of(1, 3)
    node.do(Filled("a", "r", keys))
    for op in [e.op for e in node.effects if isinstance(e, Save)]:
        node.do(Done(op))
    node.do(Take("a", "t", keys, 0, Part.BODY, 9.0))
    (load,) = (e for e in node.effects if isinstance(e, Load))
    assert (load.start, load.end) == (0, 0)
    node.do(Take("a", "t", keys, 0, Part.BODY, 9.0))
    assert node.agent.counts["load_twice"] == 1
    restored = Agent.restore(node.agent.snapshot(), {Tier.DRAM: Lru()}, ALL)
    assert restored.digest() == node.agent.digest()
    node.do(Done(load.op, damaged=(name_of(keys[1], Part.BODY),)))
    assert node.ready == {"t": 0}
    assert node.agent.counts["damaged"] == 1
    assert node.agent.present("a", keys, 0)[0] == 1


def test_a_take_that_is_late_is_given_up_like_any_load() -> None:
    node = Driver(config=ALL, hold=True)
    node.attach()
    keys = keys_of(1, 2)
    node.do(Filled("a", "r", keys))
    for op in [e.op for e in node.effects if isinstance(e, Save)]:
        node.do(Done(op))
    node.do(Take("a", "t", keys, 0, Part.BODY, 1.0))
    node.at(2.0)
    node.at(2.0 + ALL.grace_s)
    assert node.ready == {"t": 0}
    assert node.agent.counts["load_given_up"] == 1
    assert not node.agent.busy


def test_a_long_prompt_may_come_part_by_part() -> None:
    node = Driver(config=Config(hit_share=1.0, units_max=4))
    node.attach()
    keys = keys_of(1, 9)
    node.engines["a"].update({name_of(k, Part.BODY): content(name_of(k, Part.BODY)) for k in keys})
    node.do(Filled("a", "r", keys[:5]))
    assert node.agent.counts["save_too_long"] == 1
    for first in (0, 4, 8):
        node.do(Filled("a", "r", keys[: first + 4], first=first))
    assert node.agent.present("a", keys, 0)[0] == 9


def test_bodies_may_be_saved_ahead_of_their_point() -> None:
    node = Driver(config=ALL, layout=window_layout())
    node.attach()
    keys = keys_of(1, 3)
    names = [name_of(key, Part.BODY) for key in keys] + [name_of(keys[2], Part.POINT)]
    node.engines["a"].update({name: content(name) for name in names})
    node.do(Filled("a", "r", keys[:2]))
    assert node.agent.present("a", keys, 0) == (0, ())
    node.do(Filled("a", "r", keys[:2], ahead=True))
    assert node.agent.present("a", keys, 0) == (2, ())
    node.do(Filled("a", "r", keys, (3,), first=2, ahead=True))
    assert node.agent.present("a", keys, 0) == (3, (3,))


def test_blocks_that_cannot_be_copied_any_more_are_not_asked_for() -> None:
    node = Driver(config=ALL, layout=window_layout())
    node.attach()
    keys = keys_of(1, 4)
    names = [name_of(key, Part.BODY) for key in keys] + [name_of(keys[3], Part.POINT)]
    node.engines["a"].update({name: content(name) for name in names})
    node.do(Filled("a", "r", keys, (4,), first=2))
    saves = [e for e in node.effects if isinstance(e, Save)]
    assert [u.index for save in saves for u in save.units if u.part is Part.BODY] == [2, 3]
    # Without the blocks before it the point is of no use.
    assert node.agent.counts["save_not_whole"] == 1
    assert node.agent.present("a", keys, 0) == (0, ())
