"""A tier's books against a dumb twin that keeps one list of what it was told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvatlas.core.ledger import Ledger
from kvatlas.core.ledger_values import Entry, Gone, Limits, Refusal, Reservation, Why
from kvatlas.core.policy.base import Facts, Key
from kvatlas.core.policy.lru import Lru
from kvatlas.core.policy.registry import POLICIES, make_policy
from kvatlas.core.retention import Retention, Terms
from kvatlas.errors import LedgerError

CAPACITY = 100
QUOTA = 40
TENANTS = ("", "a", "b")
OWNERS = ("e1", "e2")
KEYS = tuple(range(6))
ENTRIES_MAX, ROOMS_MAX, LEASES_MAX = 5, 2, 2
LIMITS = Limits(
    CAPACITY,
    high=0.9,
    low=0.6,
    quotas={"a": QUOTA},
    entries_max=ENTRIES_MAX,
    reservations_max=ROOMS_MAX,
    leases_max=LEASES_MAX,
)


@dataclass
class Block:
    """All that the twin knows of one block."""

    size: int
    tenant: str
    since: float
    pins: dict[str, int] = field(default_factory=dict)
    leases: dict[int, tuple[float, str]] = field(default_factory=dict)
    leaving: bool = False
    doomed: bool = False

    def used(self) -> bool:
        return bool(self.pins or self.leases)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.blocks: dict[Key, Block] = {}
        self.rooms: dict[int, Reservation] = {}
        self.terms: dict[str, Terms] = {}
        self.used_at: list[Key] = []  # evictable under LRU, oldest first

    @initialize(policy=st.sampled_from([n for n in POLICIES if n != "attention"]))
    def start(self, policy: str) -> None:
        self.policy = policy
        self.ledger = Ledger(LIMITS, make_policy(policy))

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        tenant=st.sampled_from(TENANTS),
    )
    def fill(self, keys: list[Key], tenant: str) -> None:
        """Several blocks at once, so that there is something to work on."""
        for key in keys:
            self.reserve(key=key, size=20, tenant=tenant, owner="e1", wait=5.0, at_once=True)

    # -- what the twin thinks ---------------------------------------------------------------------

    def _total(self) -> int:
        return sum(b.size for b in self.blocks.values()) + sum(
            r.facts.size_bytes for r in self.rooms.values()
        )

    def _of(self, tenant: str) -> int:
        return sum(b.size for b in self.blocks.values() if b.tenant == tenant) + sum(
            r.facts.size_bytes for r in self.rooms.values() if r.tenant == tenant
        )

    def _expected(self, key: Key, size: int, tenant: str) -> Why | None:
        block = self.blocks.get(key)
        if block is not None:
            return Why.LEAVING if block.leaving or block.doomed else Why.HELD
        if any(r.key == key for r in self.rooms.values()):
            return Why.WRITING
        if size > CAPACITY:
            return Why.TOO_LARGE
        if len(self.rooms) >= ROOMS_MAX or len(self.rooms) + len(self.blocks) >= ENTRIES_MAX:
            return Why.LIMIT
        if tenant == "a" and self._of("a") + size > QUOTA:
            return Why.TOO_LARGE if size > QUOTA else Why.QUOTA
        short = self._total() + size - CAPACITY
        if short <= 0:
            return None
        idle = sum(
            b.size for b in self.blocks.values() if not b.used() and not b.leaving and not b.doomed
        )
        return Why.FULL if short <= idle else Why.BUSY

    def _gone(self, key: Key) -> None:
        """A doomed block that nobody needs is gone."""
        block = self.blocks[key]
        if block.doomed and not block.used() and not block.leaving:
            del self.blocks[key]

    def _check_gone(self, before: set[Key], told: list[Entry]) -> None:
        assert {e.key for e in told} == before - self.blocks.keys()

    # -- writing ----------------------------------------------------------------------------------

    @rule(
        key=st.sampled_from(KEYS),
        size=st.sampled_from((10, 20, 30, 45, 101)),
        tenant=st.sampled_from(TENANTS),
        owner=st.sampled_from(OWNERS),
        wait=st.sampled_from((5.0, 50.0, math.inf)),
        at_once=st.sampled_from((True, True, False)),
    )
    def reserve(
        self,
        *,
        key: Key,
        size: int,
        tenant: str,
        owner: str,
        wait: float,
        at_once: bool,
    ) -> None:
        expected = self._expected(key, size, tenant)
        count = self.ledger.refused.total()
        made = self.ledger.reserve(
            key,
            Facts(size, None if key == 0 else int(key) - 1, int(key)),
            self.now,
            tenant=tenant,
            owner=owner,
            until=self.now + wait,
        )
        if isinstance(made, Refusal):
            assert made.why is expected
            assert self.ledger.refused.total() == count + 1
        else:
            assert expected is None
            self.rooms[made.number] = made
            if at_once:
                self._commit(made.number, 0.0)

    @precondition(lambda self: self.rooms)
    @rule(
        data=st.data(),
        how=st.sampled_from(["commit", "commit", "commit", "abort"]),
        ago=st.sampled_from((0.0, 8.0, 200.0)),
    )
    def finish(self, data: st.DataObject, how: str, ago: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.rooms)))
        if how == "commit":
            self._commit(number, ago)
        else:
            assert self.ledger.abort(number) == self.rooms.pop(number)
        before = self.ledger.digest()
        for again in (
            lambda: self.ledger.commit(number, self.now),
            lambda: self.ledger.abort(number),
        ):
            with pytest.raises(LedgerError, match="no such reservation"):
                again()
        assert self.ledger.digest() == before

    def _commit(self, number: int, ago: float) -> None:
        room = self.rooms.pop(number)
        entry = self.ledger.commit(number, self.now, since=self.now - ago)
        block = Block(room.facts.size_bytes, room.tenant, self.now - ago)
        assert entry.expires_at == self._expires(block)
        self.blocks[room.key] = block

    def _expires(self, block: Block) -> float:
        ttl_s = self.terms[block.tenant].ttl_s if block.tenant in self.terms else 0.0
        return block.since + ttl_s if ttl_s else math.inf

    @rule(
        terms=st.dictionaries(
            st.sampled_from(TENANTS),
            st.builds(Terms, st.sampled_from((0.0, 10.0, 100.0)), st.sampled_from(Retention)),
        )
    )
    def retain(self, terms: dict[str, Terms]) -> None:
        self.terms = terms
        self.ledger.retain(terms)

    # -- reading ----------------------------------------------------------------------------------

    @precondition(lambda self: self.blocks)
    @rule(key=st.sampled_from(KEYS))
    def touch(self, key: Key) -> None:
        block = self.blocks.get(key)
        assert self.ledger.touch(key, self.now) == (block is not None and not block.doomed)

    @precondition(lambda self: self.blocks)
    @rule(key=st.sampled_from(KEYS), owner=st.sampled_from(OWNERS))
    def pin(self, key: Key, owner: str) -> None:
        block = self.blocks.get(key)
        found = block is not None and not block.doomed
        assert self.ledger.pin(key, owner) == found
        if found:
            assert block is not None
            block.pins[owner] = block.pins.get(owner, 0) + 1

    @rule(key=st.sampled_from(KEYS), owner=st.sampled_from(OWNERS))
    def unpin(self, key: Key, owner: str) -> None:
        block = self.blocks.get(key)
        if block is None or owner not in block.pins:
            before = self.ledger.digest()
            with pytest.raises(LedgerError, match="no pin"):
                self.ledger.unpin(key, owner)
            assert self.ledger.digest() == before
            return
        keys = set(self.blocks)
        told = self.ledger.unpin(key, owner)
        block.pins[owner] -= 1
        if not block.pins[owner]:
            del block.pins[owner]
        self._gone(key)
        self._check_gone(keys, [] if told is None else [told])

    @precondition(lambda self: self.blocks)
    @rule(
        key=st.sampled_from(KEYS), owner=st.sampled_from(OWNERS), wait=st.sampled_from((5.0, 60.0))
    )
    def lease(self, key: Key, owner: str, wait: float) -> None:
        block = self.blocks.get(key)
        lease = self.ledger.lease(key, self.now + wait, self.now, owner=owner)
        full = sum(len(b.leases) for b in self.blocks.values()) >= LEASES_MAX
        if block is None or block.doomed or full:
            assert lease is None
        else:
            assert lease is not None
            block.leases[lease.number] = (self.now + wait, owner)

    @precondition(lambda self: any(b.leases for b in self.blocks.values()))
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        held = sorted((n, k) for k, b in self.blocks.items() for n in b.leases)
        number, key = data.draw(st.sampled_from(held))
        block = self.blocks[key]
        keys = set(self.blocks)
        told = self.ledger.end_lease(number)
        del block.leases[number]
        self._gone(key)
        self._check_gone(keys, [] if told is None else [told])
        assert self.ledger.end_lease(number) is None

    # -- leaving ----------------------------------------------------------------------------------

    @rule(need=st.sampled_from((0, 20, 60, 100)), tenant=st.sampled_from((None, "a", "b")))
    def begin_eviction(self, need: int, tenant: str | None) -> None:
        coming = {k: b.size for k, b in self.blocks.items() if b.leaving or b.doomed}
        if tenant is None:
            used = self._total() - sum(coming.values())
            over = used - 60 if used > 90 else 0
            short = max(need - (CAPACITY - used), over)
        else:
            mine = self._of(tenant) - sum(
                size for k, size in coming.items() if self.blocks[k].tenant == tenant
            )
            short = mine + need - QUOTA if tenant == "a" else 0
        may = {
            k: b.size
            for k, b in self.blocks.items()
            if not b.used() and k not in coming and (tenant is None or b.tenant == tenant)
        }
        found = self.ledger.begin_eviction(self.now, need, tenant=tenant)
        assert {e.key for e in found} <= may.keys()
        freed = sum(e.facts.size_bytes for e in found)
        if short <= 0:
            assert not found
        elif self.policy not in ("lru_sink", "leaf_lru", "gdsf", "prefix_tree"):
            assert freed >= min(short, sum(may.values()))
        if tenant is None:
            self._check_classes(found, may)
        for entry in found:
            self.blocks[entry.key].leaving = True

    def _class_of(self, tenant: str) -> int:
        """0 goes first. To be asked while nothing of an eviction has left."""
        kind = self.terms.get(tenant, Terms()).retention
        share = CAPACITY / len([t for t in TENANTS if self._of(t)])
        if kind is Retention.KEEP and self._of(tenant) > share:
            return 1
        return list(Retention).index(kind)

    def _check_classes(self, found: list[Entry], may: dict[Key, int]) -> None:
        """Where one of a class goes, nothing stays that should have gone before it."""
        if not found or self.policy in ("lru_sink", "leaf_lru", "gdsf", "prefix_tree"):
            return  # these keep a block for the sake of others
        stays = may.keys() - {e.key for e in found}
        last = max(self._class_of(e.tenant) for e in found)
        assert all(self._class_of(self.blocks[key].tenant) >= last for key in stays)

    @precondition(lambda self: any(b.leaving for b in self.blocks.values()))
    @rule(data=st.data(), how=st.sampled_from(["end", "end", "keep"]))
    def finish_eviction(self, data: st.DataObject, how: str) -> None:
        leaving = sorted(k for k, b in self.blocks.items() if b.leaving)
        key = data.draw(st.sampled_from(leaving))
        block = self.blocks[key]
        if how == "end":
            went = self.ledger.end_eviction(key, self.now)
            assert went == (not block.used())
            if went:
                del self.blocks[key]
            else:
                block.leaving = False
        else:
            told = self.ledger.keep(key, self.now)
            block.leaving = False
            keys = set(self.blocks)
            self._gone(key)
            self._check_gone(keys, [] if told is None else [told])
        with pytest.raises(LedgerError, match="not chosen"):
            self.ledger.end_eviction(key, self.now)

    @rule(key=st.sampled_from(KEYS), dice=st.integers(0, 2))
    def drop(self, key: Key, dice: int) -> None:
        if dice:
            return
        keys = set(self.blocks)
        told = self.ledger.drop(key)
        if key in self.blocks:
            self.blocks[key].doomed = True
            self._gone(key)
        self._check_gone(keys, [] if told is None else [told])

    @rule(owner=st.sampled_from(OWNERS), dice=st.integers(0, 2))
    def forget(self, owner: str, dice: int) -> None:
        if dice:
            return
        keys = set(self.blocks)
        gone = self.ledger.forget(owner)
        for key in keys:
            block = self.blocks[key]
            block.pins.pop(owner, None)
            block.leases = {n: v for n, v in block.leases.items() if v[1] != owner}
            self._gone(key)
        self._end_rooms(gone, [r for r in self.rooms.values() if r.owner == owner])
        self._check_gone(keys, list(gone.entries))

    def _end_rooms(self, gone: Gone, expected: list[Reservation]) -> None:
        assert sorted(r.number for r in gone.reservations) == sorted(r.number for r in expected)
        for room in expected:
            del self.rooms[room.number]

    @rule(passed=st.sampled_from((0.0, 1.0, 1.0, 2.0, 3.0, 7.0, 70.0, -5.0)))
    def tick(self, passed: float) -> None:
        steps = self.ledger.clock_steps
        at = self.ledger.next_deadline()
        gone = self.ledger.tick(self.now + passed)
        assert self.ledger.clock_steps >= steps
        self.now = max(self.now, self.now + passed)
        keys = set(self.blocks)
        ended = 0
        for key in keys:
            block = self.blocks[key]
            ended += sum(1 for until, _ in block.leases.values() if until <= self.now)
            block.leases = {n: v for n, v in block.leases.items() if v[0] > self.now}
            block.doomed |= self._expires(block) <= self.now
            self._gone(key)
        assert gone.leases == ended
        self._end_rooms(gone, [r for r in self.rooms.values() if r.until <= self.now])
        self._check_gone(keys, list(gone.entries))
        if at is None or at > self.now:
            assert gone == Gone()
        after = self.ledger.next_deadline()
        assert after is None or after > self.now

    @rule(dice=st.integers(0, 4))
    def restart(self, dice: int) -> None:
        if dice:
            return
        shot = self.ledger.snapshot()
        again = Ledger.restore(shot, make_policy(self.policy))
        assert again.digest() == self.ledger.digest()
        assert again.next_deadline() == self.ledger.next_deadline()
        self.ledger = again

    # -- always -----------------------------------------------------------------------------------

    @invariant()
    def every_byte_is_in_its_place(self) -> None:
        if not hasattr(self, "ledger"):
            return
        usage = self.ledger.usage()
        blocks = self.blocks.values()
        assert usage.reserved_bytes == sum(r.facts.size_bytes for r in self.rooms.values())
        assert usage.committed_bytes == sum(b.size for b in blocks)
        assert usage.reserved_bytes + usage.committed_bytes <= CAPACITY
        assert usage.doomed_bytes == sum(b.size for b in blocks if b.doomed)
        assert usage.leaving_bytes == sum(b.size for b in blocks if b.leaving and not b.doomed)
        assert usage.in_use_bytes == sum(
            b.size for b in blocks if b.used() and not b.leaving and not b.doomed
        )
        assert usage.entries == len(self.blocks)
        assert usage.pins == sum(sum(b.pins.values()) for b in blocks)
        assert usage.leases == sum(len(b.leases) for b in blocks)
        assert self.ledger.free_bytes == CAPACITY - self._total()

    @invariant()
    def tenants_add_up(self) -> None:
        if not hasattr(self, "ledger"):
            return
        expected = {tenant: size for tenant in TENANTS if (size := self._of(tenant))}
        assert self.ledger.tenants() == expected
        assert self._of("a") <= QUOTA

    @invariant()
    def what_can_be_found_is_right(self) -> None:
        if not hasattr(self, "ledger"):
            return
        before = self.ledger.digest()
        for key in KEYS:
            block = self.blocks.get(key)
            assert (key in self.ledger) == (block is not None and not block.doomed)
            assert self.ledger.writing(key) == any(r.key == key for r in self.rooms.values())
        assert self.ledger.digest() == before
        listed = {e.key for e in self.ledger.entries()}
        assert listed == {k for k, b in self.blocks.items() if not b.doomed}


LedgerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
TestLedger = LedgerMachine.TestCase


def test_a_restart_under_lru_goes_on_as_if_nothing_had_happened() -> None:
    """The order of eviction comes back too, since entries are kept as they were last used."""
    ledger = Ledger(Limits(10), Lru())
    for key in range(10):
        made = ledger.reserve(key, Facts(1), float(key))
        assert isinstance(made, Reservation)
        ledger.commit(made.number, float(key))
    for key in (0, 3, 1):
        ledger.touch(key, 20.0)
    again = Ledger.restore(ledger.snapshot(), Lru())
    first = [e.key for e in ledger.evict(30.0, 5)]
    assert first == [e.key for e in again.evict(30.0, 5)] == [2, 4, 5, 6, 7]
