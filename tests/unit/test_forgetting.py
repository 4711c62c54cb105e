"""A node forgets a tenant, a session or some blocks: at once, for good, whatever is under way."""

from __future__ import annotations

from collections import Counter

import pytest
from agent_kit import GRID, Driver, keys_of, window_layout

from kvatlas.core.agent import Agent
from kvatlas.core.agent_values import (
    Config,
    Copy,
    Fetch,
    Forget,
    Found,
    Keep,
    Lend,
    Load,
    Lose,
    Pull,
    Push,
    Quota,
    Seal,
    Told,
)
from kvatlas.core.events import UnitsGone
from kvatlas.core.forgetting import FLOORS_MAX, Floor, Floors, payer_of
from kvatlas.core.inventory import Inventory
from kvatlas.core.policy.lru import Lru
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit, name_of

TAG, OTHER = "a" * 24, "b" * 24
OLD, NEW = f"{TAG}.1", f"{TAG}.2"
SESSION = f"{TAG}.1.{'c' * 24}"
TENANT = Forget(floors=(Floor(TAG, 2),))
STORE = Config(hit_share=1.0, write_through=(Tier.OBJECT,))


def test_a_floor_means_what_is_below_it_and_a_session_at_any_epoch() -> None:
    floors = Floors()
    assert floors.put(Floor(TAG, 2))
    assert floors.put(Floor(OTHER, session="c" * 24))
    assert not floors.put(Floor(TAG, 1))  # a replayed order takes nothing back
    assert floors.forgotten(OLD)
    assert floors.forgotten(SESSION)
    assert not floors.forgotten(NEW)
    assert floors.forgotten(f"{OTHER}.99.{'c' * 24}")
    for owner in ("", OTHER, f"{OTHER}.0", f"{OTHER}.1.{'d' * 24}", f"{TAG}.x", TAG, f"{TAG}."):
        assert not floors.forgotten(owner), owner
    assert not floors.forgotten(f"{TAG}.\N{SUPERSCRIPT TWO}")  # a digit, and no number


def test_floors_have_a_limit() -> None:
    floors = Floors()
    for n in range(FLOORS_MAX + 3):
        floors.put(Floor(f"{n:024x}", 1))
    assert len(floors) == FLOORS_MAX
    assert not floors.forgotten(f"{2:024x}.0")
    assert floors.forgotten(f"{FLOORS_MAX:024x}.0")


def test_what_peers_tell_does_not_push_out_whose_it_is_in_the_store() -> None:
    inventory = Inventory({}, 2, Counter())
    mine = name_of(b"k" * 16, Part.BODY)
    inventory.know(Tier.OBJECT, mine, "", ours=True, owner=OLD)
    for name in (mine, b"1", b"2"):
        inventory.know(Tier.PEER, name, "n2", ours=False)
    assert mine not in inventory.known[Tier.PEER]
    assert inventory.owners == {mine: OLD}
    for name in (b"1", b"2"):
        inventory.know(Tier.OBJECT, name, "", ours=False)
    assert inventory.owners == {}


@pytest.mark.parametrize("owner", ["red", "a.b", "x.1", "", f"{TAG}"])
def test_what_is_no_owner_pays_for_itself(owner: str) -> None:
    assert payer_of(owner) == owner


def test_a_quota_is_one_over_epochs_and_sessions() -> None:
    node = Driver(dram=1000)
    node.attach()
    node.do(Quota(TAG, 300))
    node.fill(keys_of(1, 2), tenant=OLD)
    node.fill(keys_of(2, 2), tenant=SESSION)
    assert node.agent.ledger(Tier.DRAM).tenants() == {TAG: 300}  # the first made room
    node.fill(keys_of(3, 2), tenant=f"{OTHER}.1")
    assert node.agent.ledger(Tier.DRAM).tenants() == {TAG: 300, OTHER: 200}


def test_nothing_of_it_is_saved_loaded_or_copied_any_more() -> None:
    node = Driver(disk=10_000)
    node.attach()
    keys = keys_of(1, 3)
    node.fill(keys, tenant=OLD)
    node.do(Push("a", keys, Tier.DISK, OLD))
    node.fill(keys_of(2, 3), tenant=NEW)
    node.do(TENANT)
    assert len(node.tiers[Tier.DRAM]) == 3
    assert not node.tiers[Tier.DISK]
    before = len(node.effects)
    node.fill(keys, tenant=OLD)
    node.do(Pull("a", keys_of(2, 3), OLD))
    node.do(Push("a", keys_of(2, 3), Tier.DISK, OLD))
    assert node.effects[before:] == []
    ask = node.ask(keys_of(2, 3), tenant=OLD)  # whatever it asks for
    node.do(Fetch(ask, 3 * GRID))
    assert node.ready.pop("q") == 0
    assert node.load(keys_of(2, 3)) == 3 * GRID
    assert node.agent.counts["forgotten"] == 3


def test_a_load_under_way_ends_as_a_miss_and_its_bytes_go_then() -> None:
    node = Driver()
    node.attach()
    keys = keys_of(1, 3)
    node.fill(keys, tenant=OLD)
    node.hold = True
    node.do(Fetch(node.ask(keys, tenant=OLD), 3 * GRID))
    (op,) = node.open
    assert isinstance(node.open[op], Load)
    node.do(TENANT)
    assert node.agent.forgetting(TENANT) == 1
    assert node.offer(keys).tokens == 0
    node.end(op)
    assert node.ready.pop("q") == 0
    assert not node.tiers[Tier.DRAM]
    assert node.agent.forgetting(TENANT) == 0


@pytest.mark.parametrize("kind", ["save", "promote", "write", "seal"])
def test_what_is_copied_while_it_is_forgotten_is_kept_nowhere(kind: str) -> None:
    node = Driver(
        disk=10_000, layout=window_layout(), config=Config(hit_share=1.0, promote_after=0)
    )
    node.attach()
    keys = keys_of(1, 3)
    if kind != "save":
        node.fill(keys, 3, tenant=OLD)
    if kind == "promote":
        node.do(Push("a", keys, Tier.DISK, OLD))
        node.do(Lose(Tier.DRAM))
    node.hold = True
    match kind:
        case "save":
            node.fill(keys, 3, tenant=OLD)
        case "promote":
            node.do(Pull("a", keys, OLD))
        case _:
            node.do(Push("a", keys, Tier.DISK, OLD))
    if kind == "seal":
        node.end(next(op for op, effect in node.open.items() if isinstance(effect, Copy)))
        assert any(isinstance(effect, Seal) for effect in node.open.values())
    node.do(TENANT)
    for op in list(node.open):
        node.end(op)
    assert not node.open
    assert not node.tiers[Tier.DRAM]
    assert not node.tiers[Tier.DISK]
    assert not node.agent.busy


def test_a_promotion_that_waits_for_room_is_forgotten_too() -> None:
    """From the store it would come back, when there is room."""
    node = Driver(dram=300, disk=10_000)
    node.attach()
    keys = keys_of(1, 3)
    node.do(Told(Tier.OBJECT, tuple(Unit(k, Part.BODY, i, 100) for i, k in enumerate(keys))))
    for key in keys:
        node.tiers[Tier.OBJECT][name_of(key, Part.BODY)] = b"content of " + name_of(key, Part.BODY)
    node.fill(keys_of(2, 3), tenant=NEW)
    node.hold = True
    node.do(Pull("a", keys, OLD))  # what is there is copied down first
    assert len(node.agent._ends) == 1
    node.do(TENANT)
    for op in list(node.open):
        node.end(op)
    assert not node.open
    assert not set(node.tiers[Tier.DRAM]) & {name_of(key, Part.BODY) for key in keys}


def test_a_disk_that_was_away_brings_nothing_back() -> None:
    node = Driver(disk=10_000)
    node.do(TENANT)
    units = tuple(Unit(key, Part.BODY, i, 100) for i, key in enumerate(keys_of(1, 3)))
    node.do(Found(Tier.DISK, units, (), OLD))
    assert node.agent.ledger(Tier.DISK).usage().entries == 0
    assert node.agent.counts["found_unusable"] == 3  # and dropped
    node.do(Found(Tier.DISK, units, (), NEW))
    assert node.agent.ledger(Tier.DISK).usage().entries == 3


def test_neither_a_pin_nor_a_peer_keeps_it() -> None:
    node = Driver()
    node.attach()
    keys = keys_of(1, 3)
    node.fill(keys, tenant=SESSION)
    node.do(Keep("somebody", keys, 50.0))
    node.do(Lend("peer 1", tuple(name_of(key, Part.BODY) for key in keys), 50.0))
    node.do(Forget(floors=(Floor(TAG, session="c" * 24),)))
    assert not node.tiers[Tier.DRAM]
    assert node.agent.ledger(Tier.DRAM).usage().leases == 0


def test_what_was_put_into_the_store_is_known_by_name_and_said_to_be_gone() -> None:
    node = Driver(config=STORE, layout=window_layout())
    node.attach()
    keys = keys_of(1, 2)
    node.fill(keys, 2, tenant=OLD)
    node.fill(keys_of(2, 2), 2, tenant=NEW)
    names = {*(name_of(key, Part.BODY) for key in keys), name_of(keys[1], Part.POINT)}
    assert node.agent.stored(TENANT) == names
    node.said.clear()
    node.do(TENANT)
    assert node.agent.stored(TENANT) == frozenset()
    gone = [event for event in node.said if isinstance(event, UnitsGone)]
    assert {event.tier for event in gone} == {Tier.DRAM, Tier.OBJECT}
    assert all(set(event.bodies) == set(keys) for event in gone)


def test_blocks_are_forgotten_by_name() -> None:
    node = Driver()
    node.attach()
    keys = keys_of(1, 4)
    node.fill(keys, tenant=NEW)
    node.do(Forget(names=frozenset(name_of(key, part) for key in keys[2:] for part in Part)))
    assert node.load(keys) == 2 * GRID
    node.fill(keys, tenant=NEW)
    assert node.load(keys) == 4 * GRID  # it was no order for ever


def test_a_snapshot_has_the_floors() -> None:
    node = Driver(config=STORE)
    node.attach()
    node.fill(keys_of(1, 2), tenant=NEW)
    node.do(TENANT)
    again = Agent.restore(node.agent.snapshot(), {Tier.DRAM: Lru()}, STORE)
    assert again.digest() == node.agent.digest()
    assert again.forgotten(OLD)
    assert len(again.stored(Forget(floors=(Floor(TAG, 3),)))) == 2
