"""The ledger: what it refuses, and faults from the field that it must not repeat."""

from __future__ import annotations

import math

import pytest

from kvatlas.core.deadlines import Deadlines
from kvatlas.core.ledger import Ledger
from kvatlas.core.ledger_values import Gone, Lease, Limits, Refusal, Reservation, Why
from kvatlas.core.policy.base import Facts, Key
from kvatlas.core.policy.lru import Lru
from kvatlas.core.retention import Terms
from kvatlas.errors import LedgerError


def ledger_of(capacity: int = 100, **limits: object) -> Ledger:
    return Ledger(Limits(capacity, **limits), Lru())  # type: ignore[arg-type]


def put(ledger: Ledger, key: Key, size: int = 1, now: float = 0.0, tenant: str = "") -> None:
    made = ledger.reserve(key, Facts(size), now, tenant=tenant)
    assert isinstance(made, Reservation), made
    ledger.commit(made.number, now)


def why(answer: Reservation | Refusal) -> Why | None:
    return answer.why if isinstance(answer, Refusal) else None


def test_lookups_that_are_never_fetched_leave_nothing_pinned() -> None:
    """LMCache#1034: pins of requests that ended without fetching piled up until nothing could be
    stored. Here a lookup takes leases, which end by themselves, and a dead asker is forgotten."""
    ledger = ledger_of(100)
    for key in range(100):
        put(ledger, key)
    for turn in range(1000):
        now = float(turn)
        keys = [(turn * 7 + n) % 100 for n in range(10)]
        leases = [ledger.lease(key, now + 30, now, owner="asker") for key in keys]
        end = turn % 4
        if end == 0:  # finished or cancelled: given back
            for lease in leases:
                assert isinstance(lease, Lease)
                ledger.end_lease(lease.number)
        elif end == 1:  # the asker crashed
            assert ledger.forget("asker").leases == 10
        elif end == 2:  # nobody said anything: the deadline says it
            assert ledger.tick(now + 30).leases == 10
        else:
            for key in keys:
                ledger.pin(key, "asker")
            assert ledger.forget("asker").leases == 10
        assert ledger.usage().in_use_bytes == 0
        assert ledger.usage().pins == ledger.usage().leases == 0
    for key in range(100, 200):
        if why(ledger.reserve(key, Facts(1), 2000.0)) is Why.FULL:
            assert len(ledger.evict(2000.0, 1)) >= 1
            put(ledger, key, now=2000.0)


def test_what_a_reader_has_is_not_evicted_by_two_hundred_stores() -> None:
    ledger = ledger_of(100)
    for key in range(100):
        put(ledger, key)
    assert ledger.pin(5, "reader")
    for key in range(100, 300):
        ledger.evict(1.0, 1)
        put(ledger, key, now=1.0)
    assert 5 in ledger
    assert ledger.unpin(5, "reader") is None
    with pytest.raises(LedgerError, match="no pin"):
        ledger.unpin(5, "reader")
    ledger.evict(2.0, 100)
    assert len(ledger) == 0
    assert ledger.free_bytes == 100


@pytest.mark.parametrize("how", ["pin", "lease"])
def test_an_entry_is_given_up_in_two_steps_and_rescued_by_a_reader_between_them(how: str) -> None:
    ledger = ledger_of(10)
    for key in range(10):
        put(ledger, key, now=float(key))
    first, second = ledger.begin_eviction(20.0, 2)
    assert (first.key, second.key) == (0, 1)
    assert 0 in ledger, "it is readable until its bytes are copied down"
    assert ledger.free_bytes == 0
    assert ledger.pin(0, "reader") if how == "pin" else ledger.lease(0, 99.0, 20.5, owner="reader")
    assert not ledger.end_eviction(0, 21.0)
    assert ledger.end_eviction(1, 21.0)
    assert 1 not in ledger
    assert (ledger.free_bytes, ledger.evicted_bytes) == (1, 1)
    ledger.forget("reader")
    assert [e.key for e in ledger.evict(22.0, 9)] == [2, 3, 4, 5, 6, 7, 8, 9]
    for wrong in (0, 1, 99):
        with pytest.raises(LedgerError, match="not chosen"):
            ledger.end_eviction(wrong, 23.0)
        with pytest.raises(LedgerError, match="not chosen"):
            ledger.keep(wrong, 23.0)


def test_deleted_while_it_is_copied_down_it_goes_when_the_copy_is_done() -> None:
    ledger = ledger_of(10)
    put(ledger, 1, 5)
    put(ledger, 2, 5)
    (victim,) = ledger.begin_eviction(1.0, 3)
    assert ledger.drop(victim.key) is None
    assert victim.key not in ledger
    assert (ledger.usage().doomed_bytes, ledger.usage().leaving_bytes) == (5, 0)
    assert why(ledger.reserve(victim.key, Facts(5), 1.0)) is Why.LEAVING
    assert ledger.end_eviction(victim.key, 2.0)
    assert ledger.usage().committed_bytes == 5
    (victim,) = ledger.begin_eviction(3.0, 6)
    ledger.drop(victim.key)
    assert ledger.keep(victim.key, 3.0) is victim
    assert ledger.usage().committed_bytes == 0
    put(ledger, 3, 5, now=4.0)
    assert [e.key for e in ledger.evict(5.0, 10)] == [3], "the policy has forgotten it too"


def test_watermarks() -> None:
    ledger = ledger_of(100, high=0.9, low=0.5)
    for key in range(9):
        put(ledger, key, 10, now=float(key))
    assert ledger.over_bytes() == 0
    assert ledger.evict(10.0) == []
    put(ledger, 9, 1, now=10.0)
    assert ledger.over_bytes() == 41
    assert [e.key for e in ledger.evict(11.0)] == [0, 1, 2, 3, 4]
    assert ledger.over_bytes() == 0


def test_a_quota_is_made_room_in_from_the_tenants_own_entries() -> None:
    ledger = ledger_of(100, quotas={"a": 30}, quota_default_bytes=50)
    put(ledger, b"x", 20, tenant="b")
    for key in range(3):
        put(ledger, bytes([key]), 10, now=1.0, tenant="a")
    refusal = ledger.reserve(b"new", Facts(15), 2.0, tenant="a")
    assert refusal == Refusal(Why.QUOTA, 15)
    gone = ledger.evict(2.0, 15, tenant="a")
    assert [e.key for e in gone] == [b"\0", b"\1"]
    assert why(ledger.reserve(b"new", Facts(15), 2.0, tenant="a")) is None
    assert why(ledger.reserve(b"big", Facts(51), 2.0, tenant="c")) is Why.TOO_LARGE
    assert ledger.tenants() == {"a": 25, "b": 20}
    assert ledger.evict(3.0, 10, tenant="nobody") == []


def test_what_is_leaving_already_is_not_asked_for_again() -> None:
    ledger = ledger_of(100, quotas={"a": 30}, high=1.0)
    for key in range(3):
        put(ledger, key, 10, tenant="a")
    assert len(ledger.begin_eviction(1.0, 10, tenant="a")) == 1
    assert ledger.begin_eviction(1.0, 10, tenant="a") == []
    assert len(ledger.begin_eviction(1.0, 15, tenant="a")) == 1
    put(ledger, 9, 10)
    assert len(ledger.begin_eviction(1.0, 90)) == 1, "60 are free, 20 are coming"
    assert len(ledger.begin_eviction(1.0, 100)) == 1
    assert ledger.begin_eviction(1.0, 100) == []


def test_a_lease_holds_until_its_deadline() -> None:
    ledger = ledger_of()
    put(ledger, 1)
    assert ledger.lease(1, 20.0, 0.0) is not None
    assert ledger.next_deadline() == 20.0
    assert ledger.tick(19.0).leases == 0
    assert ledger.evict(19.0, 100) == []
    assert ledger.tick(20.0).leases == 1
    with pytest.raises(LedgerError, match="must end"):
        ledger.lease(1, math.inf, 20.0)


def test_back_pressure_says_what_would_help() -> None:
    ledger = ledger_of(10, reservations_max=2, entries_max=5, leases_max=1)
    put(ledger, 1, 6)
    assert ledger.reserve(2, Facts(6), 0.0) == Refusal(Why.FULL, 2)
    ledger.pin(1, "r")
    assert ledger.reserve(2, Facts(6), 0.0) == Refusal(Why.BUSY, 2)
    assert why(ledger.reserve(1, Facts(1), 0.0)) is Why.HELD
    assert why(ledger.reserve(3, Facts(11), 0.0)) is Why.TOO_LARGE
    ledger.reserve(4, Facts(1), 0.0)
    assert why(ledger.reserve(4, Facts(1), 0.0)) is Why.WRITING
    ledger.reserve(5, Facts(1), 0.0)
    assert why(ledger.reserve(6, Facts(1), 0.0)) is Why.LIMIT
    assert ledger.lease(1, 5.0, 0.0) is not None
    assert ledger.lease(1, 5.0, 0.0) is None
    assert ledger.refused == {
        Why.FULL: 1,
        Why.BUSY: 1,
        Why.HELD: 1,
        Why.TOO_LARGE: 1,
        Why.WRITING: 1,
        Why.LIMIT: 2,
    }


def test_entries_have_a_limit() -> None:
    ledger = ledger_of(100, entries_max=3)
    for key in range(3):
        put(ledger, key)
    assert why(ledger.reserve(3, Facts(1), 0.0)) is Why.LIMIT


def test_a_writer_that_died_loses_its_room_and_must_not_commit() -> None:
    ledger = ledger_of()
    made = ledger.reserve(1, Facts(10), 0.0, until=5.0)
    assert isinstance(made, Reservation)
    assert ledger.next_deadline() == 5.0
    assert ledger.tick(4.9) == Gone()
    assert ledger.tick(5.0).reservations == (made,)
    assert ledger.free_bytes == 100
    with pytest.raises(LedgerError, match="no such reservation"):
        ledger.commit(made.number, 6.0)
    assert ledger.next_deadline() is None


def test_the_end_of_a_life_waits_for_readers() -> None:
    ledger = ledger_of(terms={"": Terms(ttl_s=10.0)})
    made = ledger.reserve(1, Facts(10), 0.0)
    assert isinstance(made, Reservation)
    entry = ledger.commit(made.number, 5.0)
    lease = ledger.lease(1, 30.0, 14.0)
    assert lease is not None
    assert ledger.tick(15.0) == Gone()
    assert 1 not in ledger
    assert not ledger.touch(1, 15.0)
    assert not ledger.pin(1, "new")
    assert ledger.lease(1, 99.0, 15.0) is None
    assert ledger.tick(30.0) == Gone((entry,), (), 1)
    assert ledger.free_bytes == 100


def test_a_clock_that_goes_back_is_counted_and_harms_nobody() -> None:
    ledger = ledger_of()
    put(ledger, 1, now=100.0)
    ledger.touch(1, 50.0)
    assert ledger.clock_steps == 1
    entry = ledger.peek(1)
    assert entry is not None
    assert entry.used_at == 100.0


@pytest.mark.parametrize("size", [0, -1, 1.5, math.nan, None])
def test_sizes_that_are_none(size: int) -> None:
    ledger = ledger_of()
    before = ledger.digest()
    with pytest.raises(LedgerError, match="size_bytes"):
        ledger.reserve(1, Facts(size), 0.0)
    assert ledger.digest() == before


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf])
def test_times_that_are_none(now: float) -> None:
    ledger = ledger_of()
    put(ledger, 1)
    made = ledger.reserve(2, Facts(1), 0.0)
    assert isinstance(made, Reservation)
    before = ledger.digest()
    for call in (
        lambda: ledger.reserve(3, Facts(1), now),
        lambda: ledger.commit(made.number, now),
        lambda: ledger.touch(1, now),
        lambda: ledger.tick(now),
        lambda: ledger.evict(now, 5),
        lambda: ledger.lease(1, 5.0, now),
        lambda: ledger.lease(1, now, 0.0),
    ):
        with pytest.raises(LedgerError):
            call()
    for need in (-1, math.nan, 1.5):
        with pytest.raises(LedgerError, match="not negative"):
            ledger.evict(0.0, need)  # type: ignore[arg-type]
    for capacity in (-1, math.nan, 1e30):
        with pytest.raises(LedgerError, match="not negative"):
            ledger.resize(capacity)  # type: ignore[arg-type]
    with pytest.raises(LedgerError, match="must be a time"):
        ledger.reserve(3, Facts(1), 0.0, until=math.nan)
    for ttl_s in (-1.0, math.nan, math.inf):
        with pytest.raises(LedgerError, match="ttl_s"):
            ledger.retain({"": Terms(ttl_s)})
    assert ledger.digest() == before


@pytest.mark.parametrize(
    "limits",
    [
        {"capacity_bytes": -1},
        {"capacity_bytes": 1, "low": 0.9, "high": 0.8},
        {"capacity_bytes": 1, "low": 0.0},
        {"capacity_bytes": 1, "high": 1.1},
        {"capacity_bytes": 1, "high": math.nan},
        {"capacity_bytes": 1, "entries_max": 0},
        {"capacity_bytes": 1, "quotas": {"a": -1}},
        {"capacity_bytes": 1, "quota_default_bytes": -1},
    ],
)
def test_limits_that_cannot_work(limits: dict[str, object]) -> None:
    with pytest.raises(LedgerError):
        Limits(**limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"", b"\x00", b"garbage" * 9, b"\x81\xa1a\x01"])
def test_a_snapshot_that_is_none(data: bytes) -> None:
    with pytest.raises(LedgerError, match="not a snapshot"):
        Ledger.restore(data, Lru())


def test_a_smaller_tier_and_a_drained_one() -> None:
    ledger = ledger_of(100)
    for key in range(10):
        put(ledger, key, 10)
    ledger.resize(50)
    assert ledger.free_bytes == -50
    assert why(ledger.reserve(99, Facts(1), 1.0)) is Why.FULL
    assert len(ledger.evict(1.0)) == 6, "down to the low watermark of the new capacity"
    ledger.resize(0)
    ledger.evict(2.0)
    assert len(ledger) == 0
    assert why(ledger.reserve(99, Facts(1), 1.0)) is Why.TOO_LARGE


def test_deadlines_hold_no_more_than_counts() -> None:
    live: dict[int, float] = {}
    deadlines: Deadlines[int] = Deadlines(lambda at, thing: live.get(thing) == at)
    for turn in range(50_000):
        live[turn % 10] = float(turn)
        deadlines.set(float(turn), turn % 10)
    assert len(deadlines) < 3_000
    assert deadlines.next() == 49_990.0
    assert deadlines.pop(49_000.0) is None
    assert deadlines.pop(49_990.0) == 0
