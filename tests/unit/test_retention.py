"""How long what a tenant has saved is kept, and who goes first where a tier is full."""

from __future__ import annotations

import pytest
from agent_kit import GRID, Driver, keys_of

from kvatlas.config_tenants import Quotas, Tenant, TenantsFile
from kvatlas.core.agent_values import Config, Drop, Fetch, Load, Pull, Quota, Resize, Retain
from kvatlas.core.events import UnitsGone
from kvatlas.core.keys import Keyring
from kvatlas.core.ledger import Ledger
from kvatlas.core.ledger_values import Limits, Reservation
from kvatlas.core.policy.base import Facts
from kvatlas.core.policy.lru import Lru
from kvatlas.core.records import Tier
from kvatlas.core.retention import Retention, Terms, turns
from kvatlas.core.tenancy import tag_of
from kvatlas.service.tenant_limits import limits_of

TAG = "a" * 24
OWNER = f"{TAG}.3.{'c' * 24}"
KEYS = keys_of(1, 3)
TEN = Retain({TAG: Terms(ttl_s=10.0)})
FIRST, KEEP = Terms(retention=Retention.DROP_FIRST), Terms(retention=Retention.KEEP)


def drops(node: Driver) -> list[Drop]:
    return [effect for effect in node.effects if isinstance(effect, Drop)]


def test_what_is_over_is_a_miss_and_its_room_is_given_back() -> None:
    node = Driver()
    node.attach()
    node.do(TEN)
    node.fill(KEYS, tenant=OWNER)
    node.fill(keys_of(2, 2), tenant="another")
    node.at(5.0)
    assert node.load(KEYS) == 3 * GRID  # used, and not kept longer for it
    node.at(10.0)
    assert node.offer(KEYS).tokens == 0
    assert node.agent.counts["expired"] == 3
    assert node.agent.ledger(Tier.DRAM).tenants() == {"another": 200}
    assert len(node.tiers[Tier.DRAM]) == 2
    assert UnitsGone(Tier.DRAM, KEYS, ()) in node.said
    assert node.agent.next_deadline() is None
    node.fill(KEYS, tenant=OWNER)  # saved anew: a new life
    node.at(19.0)
    assert node.offer(KEYS).tokens == 3 * GRID


def test_what_is_over_is_not_loaded_though_no_clock_has_ticked() -> None:
    node = Driver()
    node.attach()
    node.do(TEN)
    node.fill(KEYS, tenant=OWNER)
    ask = node.ask(KEYS)
    node.now = 10.0
    node.do(Fetch(ask, 3 * GRID))
    assert node.ready == {"q": 0}
    assert not [effect for effect in node.effects if isinstance(effect, Load)]


def test_what_is_over_while_it_is_read_is_found_by_nobody_and_stays_for_its_reader() -> None:
    node = Driver(hold=True)
    node.attach()
    node.do(TEN)
    node.fill(KEYS, tenant=OWNER)
    (save,) = node.open
    node.end(save)
    node.at(9.0)
    node.do(Fetch(node.ask(KEYS), 3 * GRID))
    (load,) = node.open
    node.at(11.0)
    assert node.offer(KEYS).tokens == 0
    assert UnitsGone(Tier.DRAM, KEYS, ()) in node.said
    assert drops(node) == []
    node.end(load)
    assert node.ready == {"q": 3 * GRID}
    assert node.tiers[Tier.DRAM] == {}
    assert node.agent.ledger(Tier.DRAM).usage().committed_bytes == 0
    assert node.agent.counts["expired"] == 3


def test_a_copy_is_as_old_as_what_it_was_copied_from() -> None:
    node = Driver(dram=300, disk=10_000)
    node.attach()
    node.do(TEN)
    node.fill(KEYS, tenant=OWNER)
    node.at(8.0)
    node.fill(keys_of(2, 3))  # which sends the first ones down
    assert len(node.tiers[Tier.DISK]) == 3
    assert node.offer(KEYS).tokens == 3 * GRID
    node.at(10.0)
    assert node.offer(KEYS).tokens == 0
    assert node.tiers[Tier.DISK] == {}


def test_a_copy_for_another_tenant_has_a_life_of_its_own() -> None:
    node = Driver(dram=300, disk=10_000)
    node.attach()
    node.do(TEN)
    node.fill(KEYS, tenant="another")  # without end; of what is public
    node.at(20.0)
    node.fill(keys_of(2, 3), tenant="another")
    node.do(Resize(Tier.DRAM, 600))
    node.do(Pull("a", KEYS, OWNER))
    assert len(node.tiers[Tier.DRAM]) == 6
    node.at(29.0)
    assert len(node.tiers[Tier.DRAM]) == 6
    node.at(30.0)
    assert len(node.tiers[Tier.DRAM]) == 3
    assert node.offer(KEYS).tokens == 3 * GRID  # from disk


def test_a_copy_of_what_ends_meanwhile_is_not_kept() -> None:
    node = Driver(dram=300, disk=10_000, hold=True)
    node.attach()
    node.do(TEN)
    node.fill(KEYS, tenant=OWNER)
    node.end(*node.open)
    node.at(8.0)
    node.fill(keys_of(2, 3))
    (copy,) = node.open
    node.at(11.0)
    node.end(copy)
    assert node.agent.ledger(Tier.DISK).usage().committed_bytes == 0
    assert node.tiers[Tier.DISK] == {}


def test_terms_count_for_what_was_there_before_them() -> None:
    node = Driver()
    node.attach()
    for prompt, owner in ((1, OWNER), (2, "b" * 24)):
        node.fill(keys_of(prompt, 3), tenant=owner)
    node.at(6.0)
    node.do(Retain({TAG: Terms(7.0), "b" * 24: Terms(5.0)}))
    assert node.offer(keys_of(2, 3)).tokens == 0  # over by them already
    node.do(TEN)
    node.at(8.0)
    assert node.offer(KEYS).tokens == 3 * GRID
    node.do(Retain({}))
    node.at(99.0)
    assert node.offer(KEYS).tokens == 3 * GRID


def test_a_quota_of_zero_saves_nothing_and_costs_nobody() -> None:
    node = Driver(dram=300)
    node.attach()
    node.fill(KEYS)
    node.do(Quota(TAG, 0))
    node.do(Retain({TAG: KEEP}))
    node.fill(keys_of(2, 3), tenant=OWNER)
    assert node.agent.ledger(Tier.DRAM).tenants() == {"": 300}
    assert node.offer(keys_of(2, 3)).tokens == 0
    assert drops(node) == []


def test_a_full_tier_lets_the_classes_go_in_their_order() -> None:
    node = Driver(dram=900, config=Config(hit_share=1.0))
    node.attach()
    node.do(Retain({"first": FIRST, "keep": KEEP}))
    for prompt, owner in ((1, "keep"), (2, "normal"), (3, "first")):
        node.fill(keys_of(prompt, 3), tenant=owner)
    node.fill(keys_of(4, 3), tenant="normal")
    assert node.agent.ledger(Tier.DRAM).tenants() == {"keep": 300, "normal": 600}
    node.fill(keys_of(5, 3), tenant="normal")  # the oldest is not the first to go
    assert node.offer(keys_of(1, 3)).tokens == 3 * GRID
    assert node.offer(keys_of(2, 3)).tokens == 0
    node.fill(keys_of(6, 9), tenant="normal")  # nothing else would make room
    assert node.agent.ledger(Tier.DRAM).tenants() == {"normal": 900}


def held(ledger: Ledger, tenant: str, start: int, count: int) -> None:
    for key in range(start, start + count):
        made = ledger.reserve(key, Facts(1), float(key), tenant=tenant)
        assert isinstance(made, Reservation)
        ledger.commit(made.number, float(key))


@pytest.mark.parametrize(("kept", "goes"), [(50, "other"), (60, "keep")])
def test_keep_holds_up_to_a_fair_share_and_beyond_it_is_as_all_others(kept: int, goes: str) -> None:
    ledger = Ledger(Limits(100, terms={"keep": KEEP}), Lru())
    held(ledger, "keep", 0, kept)  # used longest ago
    held(ledger, "other", kept, 100 - kept)
    assert {entry.tenant for entry in ledger.evict(200.0, 10)} == {goes}


def test_where_all_are_kept_who_holds_more_than_a_share_makes_room() -> None:
    ledger = Ledger(Limits(90, terms=dict.fromkeys("abc", KEEP)), Lru())
    held(ledger, "a", 0, 20)
    held(ledger, "b", 20, 20)
    held(ledger, "c", 40, 50)
    assert {entry.tenant for entry in ledger.evict(200.0, 20)} == {"c"}
    assert ledger.tenants() == {"a": 20, "b": 20, "c": 30}


def test_what_is_in_use_is_passed_over_in_every_class() -> None:
    ledger = Ledger(Limits(10, terms={"first": FIRST}), Lru())
    held(ledger, "first", 0, 5)
    held(ledger, "other", 5, 5)
    for key in range(4):
        assert ledger.pin(key, "reader")
    assert [entry.key for entry in ledger.evict(20.0, 3)] == [4, 5, 6]


def test_without_classes_the_policy_is_asked_once_for_all() -> None:
    terms = {"a": Terms(5.0), "gone": KEEP}
    assert turns(terms, {"a": 1, "b": 99}, 100) == [None]


def test_the_file_of_tenants_tells_terms_by_tag() -> None:
    ring = Keyring(b"the secret of this deployment")
    kept = Tenant("red", ttl_s=60.0, retention=Retention.KEEP, quota_bytes=Quotas(dram=7))
    told = limits_of(ring, TenantsFile((kept, Tenant("blue"), Tenant("green", ttl_s=5.0))))
    assert told.quota_bytes == {tag_of(ring, "red"): {"dram": 7}}
    assert told.terms == {
        tag_of(ring, "red"): Terms(60.0, Retention.KEEP),
        tag_of(ring, "green"): Terms(5.0),
    }
