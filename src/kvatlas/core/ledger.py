"""The books of one tier: who holds which bytes, who needs them, and who has to go.

An entry's life: ``reserve`` takes room before a byte is written, ``commit`` makes it an entry
that can be found, ``abort`` gives the room back. While somebody reads it, it is pinned (counted)
or leased (a right until a deadline, which outlives a reader that died). It leaves by eviction, at
the end of its life, or when it is deleted; never while it is pinned or leased.

Every byte is in one of four sums: reserved, committed, and of those committed what is leaving and
what is doomed. ``reserve`` never promises more than the capacity, and the sum over tenants is the
sum over all. Evicting takes two steps where bytes must be copied down first: `begin_eviction`
names the victims, whose bytes stay readable and counted, `end_eviction` lets each go.

Pure: ``now`` is any steady clock in seconds; one that goes back is held at its highest value and
counted. The ledger owns no bytes: whoever does acts on what these calls return.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import msgspec

from kvatlas.core.books import Books
from kvatlas.core.deadlines import Deadlines
from kvatlas.core.forgetting import payer_of
from kvatlas.core.ledger_values import (
    Entry,
    Gone,
    Lease,
    Limits,
    Refusal,
    Reservation,
    Snapshot,
    Usage,
    Why,
)
from kvatlas.core.policy.base import Facts, Key, Policy
from kvatlas.core.retention import Terms, turns
from kvatlas.errors import LedgerError


class Ledger:
    """One tier's books. Not for threads: one caller, who performs what it returns."""

    def __init__(self, limits: Limits, policy: Policy) -> None:
        """``policy`` is empty, and nobody else's."""
        self.limits = limits
        self.refused: Counter[Why] = Counter()
        self.evicted_bytes = 0
        self.clock_steps = 0  # times that ``now`` went back
        self._policy = policy
        self._books = Books()
        self._reservations: dict[int, Reservation] = {}
        self._writing: dict[Key, int] = {}  # key -> reservation
        self._leases: dict[int, Lease] = {}
        self._pins: dict[str, dict[Key, int]] = {}  # owner -> key -> count
        self._rooms: Deadlines[int] = Deadlines(lambda _, number: number in self._reservations)
        self._rights: Deadlines[int] = Deadlines(lambda _, number: number in self._leases)
        self._lives: Deadlines[Key] = Deadlines(self._life_due)
        self._number = 0
        self._now = -math.inf

    # -- questions ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._books.entries)

    def __contains__(self, key: Key) -> bool:
        return self.peek(key) is not None

    def peek(self, key: Key) -> Entry | None:
        """What is held under a key and may be read; changes nothing. Do not change the entry."""
        entry = self._books.entries.get(key)
        return None if entry is None or entry.doomed else entry

    def entries(self) -> Iterator[Entry]:
        """All entries that may be read, in no order that means anything."""
        return (e for e in self._books.entries.values() if not e.doomed)

    def writing(self, key: Key) -> bool:
        """Whether somebody has room for this key and has not committed it yet."""
        return key in self._writing

    def usage(self) -> Usage:
        """Where every byte is."""
        return Usage(
            capacity_bytes=self.limits.capacity_bytes,
            reserved_bytes=self._books.reserved,
            committed_bytes=self._books.committed,
            leaving_bytes=self._books.leaving,
            doomed_bytes=self._books.doomed,
            in_use_bytes=self._books.in_use,
            entries=len(self._books.entries),
            reservations=len(self._reservations),
            leases=len(self._leases),
            pins=sum(sum(keys.values()) for keys in self._pins.values()),
        )

    def tenants(self) -> dict[str, int]:
        """Bytes by tenant, reserved and committed; none that has none."""
        return dict(self._books.tenants)

    @property
    def free_bytes(self) -> int:
        """Room for reservations; negative after a `resize` that what is held exceeds."""
        return self.limits.capacity_bytes - self._books.reserved - self._books.committed

    def over_bytes(self) -> int:
        """What has to leave so that the tier is at its low watermark again; 0 below the high one.

        What is leaving already counts as gone.
        """
        used = (
            self._books.reserved + self._books.committed - self._books.leaving - self._books.doomed
        )
        return used - self.limits.low_bytes if used > self.limits.high_bytes else 0

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None: nothing is due ever."""
        due = (self._rooms.next(), self._rights.next(), self._lives.next())
        return min((at for at in due if at is not None), default=None)

    # -- writing --------------------------------------------------------------------------------

    def reserve(
        self,
        key: Key,
        facts: Facts,
        now: float,
        *,
        tenant: str = "",
        owner: str = "",
        until: float = math.inf,
    ) -> Reservation | Refusal:
        """Room for one block, or why there is none now.

        ``until``: when a writer that was not heard of again loses the room.
        ``facts.size_bytes`` is what it takes. Raises LedgerError where that is no whole number
        above zero, or a time is no number.
        """
        size_bytes = facts.size_bytes
        if not isinstance(size_bytes, int) or size_bytes <= 0:
            raise LedgerError(f"reserve {key!r}: size_bytes is {size_bytes!r}: 1 is the least")
        if math.isnan(until):
            raise LedgerError(f"reserve {key!r}: until {until} must be a time")
        self._at(now)
        refusal = self._refuse(key, size_bytes, tenant)
        if refusal is not None:
            self.refused[refusal.why] += 1
            return refusal
        number = self._next()
        made = Reservation(number, key, facts, tenant, owner, float(until))
        self._reservations[number] = made
        self._writing[key] = number
        self._books.reserve(tenant, size_bytes)
        self._rooms.set(until, number)
        return made

    def commit(self, number: int, now: float, *, since: float = math.inf) -> Entry:
        """The bytes of a reservation are written: from now on it is an entry. ``since``: when it
        was saved, where this is a copy.

        Raises LedgerError when there is no such reservation (any more): committed already,
        aborted, or taken back by `tick`. The bytes must then not be used.
        """
        now = self._at(now)
        made = self._end_reservation(number, "commit")
        since = min(since, now)
        expires_at = self.limits.expires_at(made.tenant, since)
        entry = Entry(made.key, made.facts, made.tenant, since, now, expires_at, self._next())
        self._books.put(entry)
        self._policy.added(made.key, made.facts, now)
        self._lives.set(expires_at, made.key)
        return entry

    def abort(self, number: int) -> Reservation:
        """Give the room of a reservation back. Raises LedgerError as `commit` does."""
        return self._end_reservation(number, "abort")

    # -- reading --------------------------------------------------------------------------------

    def touch(self, key: Key, now: float) -> bool:
        """A hit. False: it is not here (any more)."""
        now = self._at(now)
        entry = self.peek(key)
        if entry is None:
            return False
        entry.used_at, entry.order = now, self._next()
        entry.uses += 1
        if not entry.leaving:
            self._policy.touched(key, now)
        return True

    def pin(self, key: Key, owner: str) -> bool:
        """Keep an entry until as many `unpin`; False: it is not here. Pins are counted by owner,
        so that all of a process that died can be given back (`forget`)."""
        entry = self.peek(key)
        if entry is None:
            return False
        self._books.change(entry, pins=1)
        pins = self._pins.setdefault(owner, {})
        pins[key] = pins.get(key, 0) + 1
        return True

    def unpin(self, key: Key, owner: str) -> Entry | None:
        """Take one pin back; returns the entry where this was all that kept it.

        Raises LedgerError when this owner has no pin on it: nothing changes then.
        """
        pins = self._pins.get(owner, {})
        if not pins.get(key):
            raise LedgerError(f"unpin {key!r}: {owner!r} has no pin on it")
        pins[key] -= 1
        if not pins[key]:
            del pins[key]
        if not pins:
            del self._pins[owner]
        return self._books.change(self._books.entries[key], pins=-1)

    def lease(self, key: Key, until: float, now: float, *, owner: str = "") -> Lease | None:
        """A right to find an entry until a deadline; None: it is not here, or there are too many
        leases (counted as refused). Raises LedgerError when the deadline is no number."""
        if not math.isfinite(until):
            raise LedgerError(f"lease {key!r}: until is {until}: a lease must end")
        self._at(now)
        entry = self.peek(key)
        if entry is None:
            return None
        if len(self._leases) >= self.limits.leases_max:
            self.refused[Why.LIMIT] += 1
            return None
        self._books.change(entry, leases=1)
        made = Lease(self._next(), key, owner, float(until))
        self._leases[made.number] = made
        self._rights.set(until, made.number)
        return made

    def end_lease(self, number: int) -> Entry | None:
        """Give a lease back; returns the entry where this was all that kept it. One that ended
        before, by its deadline, is no error."""
        made = self._leases.pop(number, None)
        return (
            None if made is None else self._books.change(self._books.entries[made.key], leases=-1)
        )

    # -- leaving --------------------------------------------------------------------------------

    def begin_eviction(
        self, now: float, need_bytes: int = 0, *, tenant: str | None = None
    ) -> list[Entry]:
        """The entries that should go, so that ``need_bytes`` fit and the tier is not above its
        high watermark (then down to the low one), in the order of tenants' `Retention`. With
        ``tenant``: so that they fit that tenant's quota, out of its own entries.

        Each stays readable and counted until `end_eviction` or `keep`. What is pinned, leased
        or leaving is passed over; where that is not enough the list is shorter.
        """
        if not isinstance(need_bytes, int) or need_bytes < 0:
            raise LedgerError(f"need_bytes is {need_bytes!r}: a whole number, not negative")
        now = self._at(now)
        books = self._books
        if tenant is None:
            coming = books.leaving + books.doomed
            short = max(need_bytes - self.free_bytes - coming, self.over_bytes())
            in_turn = turns(self.limits.terms, books.tenants, self.limits.capacity_bytes)
        else:
            tenant = payer_of(tenant)
            quota = self.limits.quota_bytes(tenant)
            mine = books.tenants.get(tenant, 0) - books.coming.get(tenant, 0)
            short = 0 if quota is None else mine + need_bytes - quota
            in_turn = [{tenant}]
        found: list[Entry] = []
        for whose in in_turn:
            if short <= 0:
                break
            victims = self._policy.evict(short, now, books.may_go(whose))
            for entry in (books.entries[key] for key in victims):
                books.change(entry, leaving=True)
                short -= entry.facts.size_bytes
                found.append(entry)
        return found

    def end_eviction(self, key: Key, now: float) -> bool:
        """A victim's bytes are no longer needed: it goes. False: somebody has pinned or leased it
        since, so it stays, as `keep` does it. Raises LedgerError when it is not leaving."""
        entry = self._leaving_entry(key, "end_eviction")
        if entry.pins or entry.leases:
            self.keep(key, now)
            return False
        self.evicted_bytes += entry.facts.size_bytes
        self._books.remove(entry)
        return True

    def keep(self, key: Key, now: float) -> Entry | None:
        """A victim stays after all: its copy failed, or it was asked for meanwhile. Returns it
        where it was deleted meanwhile, and so is gone. Raises LedgerError when it is not leaving.
        """
        entry = self._leaving_entry(key, "keep")
        gone = self._books.change(entry, leaving=False)
        if not entry.doomed:
            self._policy.added(key, entry.facts, self._at(now))
        return gone

    def evict(self, now: float, need_bytes: int = 0, *, tenant: str | None = None) -> list[Entry]:
        """Both steps at once, where nothing has to be copied: the entries that are gone."""
        victims = self.begin_eviction(now, need_bytes, tenant=tenant)
        for entry in victims:
            self.end_eviction(entry.key, now)
        return victims

    def drop(self, key: Key) -> Entry | None:
        """Delete an entry, whatever it is worth: damaged, or its owner's wish.

        Returns it when it is gone. None: it is not here, or somebody still uses it; then nobody
        finds it from now on, and the call that ends its last use returns it.
        """
        entry = self.peek(key)
        return None if entry is None else self._doom(entry)

    def forget(self, owner: str) -> Gone:
        """A process is gone: its pins, leases and reservations are given back."""
        freed: list[Entry | None] = []
        for key, count in list(self._pins.get(owner, {}).items()):
            freed += [self.unpin(key, owner) for _ in range(count)]
        leases = [lease.number for lease in self._leases.values() if lease.owner == owner]
        freed += [self.end_lease(number) for number in leases]
        ended = [r.number for r in self._reservations.values() if r.owner == owner]
        entries = tuple(e for e in freed if e is not None)
        return Gone(entries, tuple(self.abort(number) for number in ended), len(leases))

    def revoke(self, keys: Collection[Key]) -> list[Entry]:
        """End the leases on these that somebody has by name; those of operations end with them.
        Returns entries of which that was all that kept them."""
        numbers = [x.number for x in self._leases.values() if x.owner and x.key in keys]
        return [e for e in map(self.end_lease, numbers) if e is not None]

    def tick(self, now: float) -> Gone:
        """Take back what is past its deadline: rooms of writers, leases, entries."""
        now = self._at(now)
        freed: list[Entry | None] = []
        ended: list[Reservation] = []
        leases = 0
        while (number := self._rooms.pop(now)) is not None:
            ended.append(self.abort(number))
        while (number := self._rights.pop(now)) is not None:
            leases += 1
            freed.append(self.end_lease(number))
        freed += self.expire(now)[1]
        return Gone(tuple(e for e in freed if e is not None), tuple(ended), leases)

    def expire(self, now: float) -> tuple[list[Entry], list[Entry]]:
        """Entries whose life is over, so that nobody finds them; and those of them that are gone,
        since nobody uses them."""
        now = self._at(now)
        ended, gone = [], []
        while (key := self._lives.pop(now)) is not None:
            ended.append(entry := self._books.entries[key])
            if self._doom(entry) is not None:
                gone.append(entry)
        return ended, gone

    def retain(self, terms: Mapping[str, Terms]) -> None:
        """Other terms of all tenants. Lives that began before are longer or shorter by them."""
        self.limits = msgspec.structs.replace(self.limits, terms=dict(terms))
        for entry in self._books.entries.values():
            at = self.limits.expires_at(entry.tenant, entry.since)
            if at != entry.expires_at:
                entry.expires_at = at
                self._lives.set(at, entry.key)

    def resize(self, capacity_bytes: int) -> None:
        """A new capacity. Where more is held, nothing new fits until `evict` has made room."""
        self.limits = msgspec.structs.replace(self.limits, capacity_bytes=capacity_bytes)

    # -- the whole ------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """All of the books, for `restore`. The policy's own memory is not in it."""
        entries = sorted(self._books.entries.values(), key=lambda e: e.order)
        return msgspec.msgpack.encode(
            Snapshot(
                limits=self.limits,
                entries=tuple(entries),
                reservations=tuple(self._reservations.values()),
                leases=tuple(self._leases.values()),
                pins=tuple((o, k, n) for o, keys in self._pins.items() for k, n in keys.items()),
                refused=dict(self.refused),
                evicted_bytes=self.evicted_bytes,
                clock_steps=self.clock_steps,
                number=self._number,
                now=self._now,
            )
        )

    @classmethod
    def restore(cls, data: bytes, policy: Policy) -> Ledger:
        """The ledger that `snapshot` was taken of, over an empty policy.

        Entries come in as they were last used, so that LRU goes on as if nothing had happened;
        what other policies counted begins anew. Raises LedgerError when the data is no snapshot.
        """
        try:
            shot = msgspec.msgpack.decode(data, type=Snapshot)
        except msgspec.MsgspecError as error:
            raise LedgerError(f"not a snapshot of a ledger: {error}") from error
        made = cls(shot.limits, policy)
        made.refused.update(shot.refused)
        made.evicted_bytes, made.clock_steps = shot.evicted_bytes, shot.clock_steps
        made._number, made._now = shot.number, shot.now
        made._leases = {lease.number: lease for lease in shot.leases}
        for owner, key, count in shot.pins:
            made._pins.setdefault(owner, {})[key] = count
        for entry in shot.entries:
            made._books.put(entry)
            made._lives.set(entry.expires_at, entry.key)
            if not entry.leaving and not entry.doomed:
                policy.added(entry.key, entry.facts, entry.used_at)
        for r in shot.reservations:
            made._reservations[r.number] = r
            made._writing[r.key] = r.number
            made._books.reserve(r.tenant, r.facts.size_bytes)
            made._rooms.set(r.until, r.number)
        for lease in shot.leases:
            made._rights.set(lease.until, lease.number)
        return made

    def digest(self) -> str:
        """Hex digest of all that `snapshot` holds: equal where the books are equal."""
        return hashlib.sha256(b"kvatlas.ledger.1\0" + self.snapshot()).hexdigest()[:16]

    # -- inside ---------------------------------------------------------------------------------

    def _at(self, now: float) -> float:
        if not math.isfinite(now):
            raise LedgerError(f"now is {now}: time must be a finite number of seconds")
        if now < self._now:
            self.clock_steps += 1
            return self._now
        self._now = float(now)
        return self._now

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _refuse(self, key: Key, size_bytes: int, tenant: str) -> Refusal | None:
        limits = self.limits
        entry = self._books.entries.get(key)
        if entry is not None:
            return Refusal(Why.LEAVING if entry.doomed or entry.leaving else Why.HELD)
        if key in self._writing:
            return Refusal(Why.WRITING)
        if size_bytes > limits.capacity_bytes:
            return Refusal(Why.TOO_LARGE)
        if len(self._reservations) >= limits.reservations_max:
            return Refusal(Why.LIMIT)
        if len(self._books.entries) + len(self._reservations) >= limits.entries_max:
            return Refusal(Why.LIMIT)
        tenant = payer_of(tenant)
        quota = limits.quota_bytes(tenant)
        if (
            quota is not None
            and (over := self._books.tenants.get(tenant, 0) + size_bytes - quota) > 0
        ):
            return Refusal(Why.TOO_LARGE if size_bytes > quota else Why.QUOTA, over)
        short = size_bytes - self.free_bytes
        if short <= 0:
            return None
        # What is in use, being written or on its way out cannot be made room of.
        return Refusal(Why.FULL if short <= self._books.movable() else Why.BUSY, short)

    def _life_due(self, at: float, key: Key) -> bool:
        entry = self._books.entries.get(key)
        return entry is not None and entry.expires_at == at and not entry.doomed

    def _end_reservation(self, number: int, what: str) -> Reservation:
        made = self._reservations.pop(number, None)
        if made is None:
            raise LedgerError(
                f"{what} {number}: no such reservation (any more): committed, aborted or expired"
            )
        del self._writing[made.key]
        self._books.reserve(made.tenant, -made.facts.size_bytes)
        return made

    def _leaving_entry(self, key: Key, what: str) -> Entry:
        entry = self._books.entries.get(key)
        if entry is None or not entry.leaving:
            raise LedgerError(f"{what} {key!r}: it was not chosen for eviction, or is gone")
        return entry

    def _doom(self, entry: Entry) -> Entry | None:
        """Nobody finds it from now on; returned when nobody uses it either."""
        if not entry.leaving:
            self._policy.removed(entry.key)
        return self._books.change(entry, doomed=True)
