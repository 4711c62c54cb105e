"""The register: what has to outlive every process of a cluster, in one place, changed in one step.

Who is a member, who holds which lease, what must not be used any more, who the tenants are, and
which positions are whole in a store that nodes share. All else is soft, and is made anew from what
engines and agents say.

This is the register as a value: what Valkey does by functions of its own (`service.register`),
without Valkey. The simulator runs it, and a test holds both against each other, question by
question. It keeps nothing that it is not asked to keep, and each of its maps has a limit.

A register that was lost comes back empty, under another ``created``. Nothing may be less safe for
that: whoever knows floors raises them again, it grants no lease until those of before are over,
tokens and revisions rise over it since they are times, and of a store nothing is whole until
somebody says so anew.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvatlas.core import register_values as words
from kvatlas.core.forgetting import FLOORS_MAX, Floors, payer_of
from kvatlas.core.register_limits import fault_of
from kvatlas.core.register_values import (
    COMMITS_MAX,
    Answer,
    Member,
    No,
    OfStore,
    Question,
    Refused,
)


class _Life(msgspec.Struct):
    member: Member
    until_ms: int
    replaced: str = ""  # the life of that name before it


class _Lease(msgspec.Struct):
    token: int = 0
    name: str = ""
    life: str = ""
    until_ms: int = 0


class _Kept(msgspec.Struct):
    record: words.Record
    until_ms: int  # 0: without end


class _Store(msgspec.Struct):
    generation: int  # at first a time: it rises over an empty register
    records: dict[bytes, _Kept] = {}
    used_bytes: dict[str, int] = {}


class Register:
    """One register. ``created`` names this life of it; two never have the same."""

    def __init__(self, created: str) -> None:
        self.created = created
        self._born_ms = 0
        self._identity = ""
        self._format = 0
        self._members: dict[str, _Life] = {}
        self._leases: dict[str, _Lease] = {}
        self._floors = Floors()
        self._tenants = ""
        self._revs = {"members": 0, "floors": 0, "tenants": 0}  # times of the last change, or more
        self._stores: dict[str, _Store] = {}

    def ask(self, question: Question, now_ms: int) -> Answer:
        """One step, whole or not at all."""
        if fault := fault_of(question):
            return Refused(No.FULL, fault)
        match question:
            case words.Join():
                return self._join(question, now_ms)
            case words.Leave():
                return self._leave(question, now_ms)
            case words.Acquire():
                return self._acquire(question, now_ms)
            case words.Release():
                return self._release(question)
            case words.Raise():
                return self._raise(question, now_ms)
            case words.AskFloors():
                return self._floors_told(question)
            case words.PutTenants():
                return self._put_tenants(question, now_ms)
            case words.AskTenants():
                return self._tenants_told(question)
            case _:
                return self._ask_store(question, now_ms)

    def _bury(self, now_ms: int) -> None:
        """Members whose time is over are none."""
        over = [name for name, life in self._members.items() if life.until_ms <= now_ms]
        for name in over:
            del self._members[name]
        if over:
            self._turn("members", now_ms)

    def _turn(self, what: str, now_ms: int) -> int:
        """Its next revision."""
        self._revs[what] = max(self._revs[what] + 1, now_ms)
        return self._revs[what]

    # -- members --------------------------------------------------------------------------------

    def _join(self, asked: words.Join, now_ms: int) -> Answer:
        self._bury(now_ms)
        member = asked.member
        if (fault := self._stranger(asked, now_ms)) is not None:
            return fault
        known = self._members.get(member.name)
        if known is None and len(self._members) >= words.MEMBERS_MAX:
            return Refused(No.FULL, f"{words.MEMBERS_MAX} members")
        self._born_ms = self._born_ms or now_ms
        self._identity, self._format = asked.identity, asked.format
        if known is None or known.member != member:
            self._turn("members", now_ms)
        replaced = known.replaced if known is not None else ""
        if known is not None and known.member.life != member.life:
            replaced = known.member.life
        self._members[member.name] = _Life(member, now_ms + asked.ttl_ms, replaced)
        revision = self._revs["members"]
        members = None
        if asked.known != revision:
            living = sorted(self._members.values(), key=lambda life: life.member.name)
            members = tuple(life.member for life in living)
        return words.Joined(
            now_ms,
            self.created,
            revision,
            self._revs["floors"],
            self._revs["tenants"],
            members,
        )

    def _stranger(self, asked: words.Join, now_ms: int) -> Refused | None:
        if self._identity and asked.identity != self._identity:
            return Refused(No.CLUSTER)
        if self._format and asked.format != self._format:
            return Refused(No.FORMAT, str(self._format))
        apart_ms = asked.clock_ms - now_ms
        if abs(apart_ms) > words.CLOCK_APART_MS:
            return Refused(No.CLOCK, str(apart_ms))
        known = self._members.get(asked.member.name)
        if known is None or known.member.life == asked.member.life:
            return None
        # Who listens at the same place has followed it, unless two believe so in turn.
        if known.member.url == asked.member.url and known.replaced != asked.member.life:
            return None
        return Refused(No.NAME, known.member.url)

    def _leave(self, asked: words.Leave, now_ms: int) -> Answer:
        self._bury(now_ms)
        known = self._members.get(asked.name)
        if known is None or known.member.life != asked.life:
            return Refused(No.STRANGER)
        del self._members[asked.name]
        for lease in self._leases.values():
            if (lease.name, lease.life) == (asked.name, asked.life):
                lease.until_ms = 0
        return words.Done(self._turn("members", now_ms))

    # -- leases ---------------------------------------------------------------------------------

    def _acquire(self, asked: words.Acquire, now_ms: int) -> Answer:
        self._bury(now_ms)
        known = self._members.get(asked.name)
        if known is None or known.member.life != asked.life:
            return Refused(No.STRANGER)
        if now_ms < self._born_ms + asked.ttl_ms:
            return Refused(No.HELD)  # by somebody of before, as far as is known
        lease = self._leases.get(asked.what)
        if lease is None:
            if len(self._leases) >= words.LEASES_MAX:
                return Refused(No.FULL, f"{words.LEASES_MAX} leases")
            lease = self._leases[asked.what] = _Lease()
        same = (lease.name, lease.life) == (asked.name, asked.life)
        if lease.until_ms > now_ms and not same:
            return Refused(No.HELD, lease.name)
        if lease.until_ms <= now_ms or asked.above > lease.token:
            lease.token = max(lease.token + 1, asked.above + 1, now_ms)
        lease.name, lease.life = asked.name, asked.life
        lease.until_ms = now_ms + asked.ttl_ms
        return words.Held(asked.what, lease.token)

    def _release(self, asked: words.Release) -> Answer:
        lease = self._leases.get(asked.what)
        if lease is None or (lease.name, lease.life) != (asked.name, asked.life):
            return Refused(No.STRANGER)
        lease.until_ms = 0
        return words.Done()

    # -- what was forgotten, and tenants --------------------------------------------------------

    def _raise(self, asked: words.Raise, now_ms: int) -> Answer:
        new = [floor for floor in asked.floors if not self._floors.has(floor)]
        if len(self._floors) + len(new) > FLOORS_MAX:
            return Refused(No.FULL, f"{FLOORS_MAX} floors")
        for floor in new:
            self._floors.put(floor)
        return words.Done(self._turn("floors", now_ms) if new else self._revs["floors"])

    def _floors_told(self, asked: words.AskFloors) -> Answer:
        revision = self._revs["floors"]
        new = asked.known != revision
        floors = sorted(self._floors.all(), key=lambda floor: (floor.tenant, floor.session))
        return words.ToldFloors(revision, tuple(floors) if new else None)

    def _put_tenants(self, asked: words.PutTenants, now_ms: int) -> Answer:
        revision = self._revs["tenants"]
        if asked.offered > revision:
            self._revs["tenants"] = asked.offered
        elif asked.expected == revision:
            self._turn("tenants", now_ms)
        else:
            return Refused(No.STALE, str(revision))
        self._tenants = asked.text
        return words.Done(self._revs["tenants"])

    def _tenants_told(self, asked: words.AskTenants) -> Answer:
        revision = self._revs["tenants"]
        return words.ToldTenants(revision, self._tenants if asked.known != revision else None)

    # -- resume records of shared stores --------------------------------------------------------

    def _ask_store(self, question: OfStore, now_ms: int) -> Answer:
        store = self._store(question.store, now_ms)
        if store is None:
            return Refused(No.FULL, f"{words.STORES_MAX} stores")
        match question:
            case words.Commit():
                return self._commit(store, question, now_ms)
            case words.AskRecords():
                return self._records_told(store, question, now_ms)
            case words.Withdraw():
                self._drop(store, question.keys)
                return words.Done(store.generation)
            case words.Expire():
                return self._expire(store, question)
            case words.ForgetOwner():
                return self._forget(store, question)
            case words.AskUsage():
                used = dict(sorted(store.used_bytes.items()))
                return words.ToldUsage(store.generation, len(store.records), used)

    def _commit(self, store: _Store, asked: words.Commit, now_ms: int) -> Answer:
        until_ms = now_ms + asked.ttl_ms if asked.ttl_ms else 0
        refused: list[No | None] = []
        for record in asked.records:
            why = self._refusal(store, asked, record)
            refused.append(why)
            if why is not None:
                continue
            had = store.records.get(record.key)
            if had is None:
                self._charge(store, record.owner, record.size_bytes)
                store.records[record.key] = _Kept(record, until_ms)
            else:  # it is whole already; who said so first pays
                had.until_ms = max(had.until_ms, until_ms) if had.until_ms and until_ms else 0
        return words.Committed(store.generation, tuple(refused))

    def _refusal(self, store: _Store, asked: words.Commit, record: words.Record) -> No | None:
        if asked.generation != store.generation:
            return No.STALE
        if self._floors.forgotten(record.owner):
            return No.FORGOTTEN
        if record.key in store.records:
            return None
        if len(store.records) >= words.RECORDS_MAX or len(record.data) > words.RECORD_BYTES_MAX:
            return No.FULL
        payer = payer_of(record.owner)
        quota = asked.quota_bytes.get(payer, -1)
        used = store.used_bytes.get(payer, 0) + record.size_bytes
        return No.QUOTA if 0 <= quota < used else None

    def _records_told(self, store: _Store, asked: words.AskRecords, now_ms: int) -> Answer:
        found = [store.records.get(key) for key in asked.keys]
        data = tuple(
            kept.record.data if kept is not None and self._counts(kept, now_ms) else None
            for kept in found
        )
        return words.ToldRecords(store.generation, data)

    def _counts(self, kept: _Kept, now_ms: int) -> bool:
        over = bool(kept.until_ms) and kept.until_ms <= now_ms
        return not over and not self._floors.forgotten(kept.record.owner)

    def _expire(self, store: _Store, asked: words.Expire) -> Answer:
        if asked.generation == store.generation:
            self._stores[asked.store] = _Store(store.generation + 1)
        elif asked.generation > store.generation:  # of a register that has lost all since
            self._stores[asked.store] = _Store(asked.generation + 1)
        return words.Done(self._stores[asked.store].generation)

    def _forget(self, store: _Store, asked: words.ForgetOwner) -> Answer:
        covers = Floors((asked.floor,)).forgotten
        owners = [(kept.record.owner, key) for key, kept in store.records.items()]
        meant = [key for owner, key in sorted(owners) if covers(owner)]
        gone = meant[:COMMITS_MAX]
        self._drop(store, gone)
        return words.Left(len(gone), len(meant) - len(gone))

    def _store(self, name: str, now_ms: int) -> _Store | None:
        """With some of what is over taken out, the oldest first; None: there are too many."""
        if name not in self._stores and len(self._stores) >= words.STORES_MAX:
            return None
        store = self._stores.setdefault(name, _Store(max(1, now_ms)))
        over = [
            (kept.until_ms, key)
            for key, kept in store.records.items()
            if kept.until_ms and kept.until_ms <= now_ms
        ]
        self._drop(store, (key for _, key in sorted(over)[:COMMITS_MAX]))
        return store

    def _drop(self, store: _Store, keys: Iterable[bytes]) -> None:
        for key in keys:
            kept = store.records.pop(key, None)
            if kept is not None:
                self._charge(store, kept.record.owner, -kept.record.size_bytes)

    def _charge(self, store: _Store, owner: str, size_bytes: int) -> None:
        payer = payer_of(owner)
        used = store.used_bytes.pop(payer, 0) + size_bytes
        if used:
            store.used_bytes[payer] = used
