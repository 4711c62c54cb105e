"""A node forgets, and shows that it has: what was held is counted, dropped, and looked for again.

One POST is one order (`service.agent_orders`). It is carried out in the machine first, so that
nothing comes back; then the bytes go; then every medium is looked through for what is left. Ordered
again it does no harm.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core.agent import Agent
from kvatlas.core.agent_forget import meant_by
from kvatlas.core.events import Event, UnitsGone
from kvatlas.core.forgetting import FLOORS_MAX, Floor
from kvatlas.core.keys import KEY_BYTES, Keyring
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, name_of
from kvatlas.dataplane import records
from kvatlas.dataplane.keystore import FileKeys
from kvatlas.dataplane.tiers.base import Entry, Report, Shared, Store
from kvatlas.errors import RegisterError, StoreError
from kvatlas.service.agent_driver import Driver
from kvatlas.service.agent_orders import ordered
from kvatlas.service.agent_records import Records
from kvatlas.service.http import Request, envelope
from kvatlas.service.http_reply import JSON, Reply

PURGE = "/kvatlas/purge"
KEYS = "keys"  # of sealed values, as a part of an answer
KEYS_MAX = 65_536
WAIT_S = 20.0  # for what is under way; what has not ended by then is told in the answer
WAITING_MAX = 16
_LOOK_S = 0.02


class Order(msgspec.Struct, frozen=True):
    """What has to go: all that ``floors`` mean, and the blocks with these ``keys``. ``store``: from
    the store that the node shares with others, too. ``erase``: tags of tenants whose keys are
    dropped: what media keep of them in places that nobody can write to is then unreadable."""

    life: str
    floors: tuple[Floor, ...] = ()
    keys: tuple[bytes, ...] = ()
    store: bool = False
    erase: tuple[str, ...] = ()


class Gone(msgspec.Struct, frozen=True):
    """What became of it in one part: how many units and bytes were there, and how many are left.

    ``how``: deleted, rewritten, removed, reset (for every tenant), unreachable (by the epoch, until
    it is evicted), untouched, or failed. ``note`` says what else has to be known.
    """

    part: str
    how: str
    units: int = 0
    size_bytes: int = 0
    left: int = 0
    left_bytes: int = 0
    note: str = ""

    @property
    def done(self) -> bool:
        """Nothing is left that should not be."""
        return not self.left and self.how != "failed"


class Purged(msgspec.Struct, frozen=True):
    """The answer, part by part."""

    gone: tuple[Gone, ...]


class Teller(Protocol):
    """Who tells the directory what is held."""

    def announce(self, events: Sequence[Event]) -> None:
        """What changed."""

    def rewrite(self) -> int:
        """What is held no more can be asked for again no more; of how many histories that is."""


class Purges:
    """Of one node, one after the other. On the event loop."""

    def __init__(
        self, ring: Keyring, core: Agent, driver: Driver, teller: Teller, keys: FileKeys | None
    ) -> None:
        """``keys``: by which values at rest are sealed, if they are."""
        self.counts: Counter[str] = Counter()
        self._ring = ring
        self._core = core
        self._driver = driver
        self._teller = teller
        self._keys = keys
        self._life = driver.arena.path.name if driver.arena.path is not None else ""
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def answer(self, request: Request, reply: Reply) -> None:
        """One request to `PURGE`."""
        order = self._order(request)
        if isinstance(order, tuple):
            status, why = order
            reply.send(status, [JSON], envelope(why, status=status))
            return
        self._waiting += 1
        try:
            async with self._turn:
                purged = await self.purge(order)
        finally:
            self._waiting -= 1
        reply.send(200, [JSON], msgspec.json.encode(purged))

    def _order(self, request: Request) -> Order | tuple[int, str]:
        """What is ordered, or why it is not done."""
        order = ordered(self._ring, request, Order, self._life)
        if isinstance(order, tuple):
            if order[0] == 403:
                self.counts["purges_refused"] += 1
            return order
        if len(order.floors) > FLOORS_MAX or len(order.keys) > KEYS_MAX:
            return 400, f"at most {FLOORS_MAX} floors and {KEYS_MAX} keys in one order"
        if any(len(key) != KEY_BYTES for key in order.keys):
            return 400, f"keys have {KEY_BYTES} bytes"
        if self._waiting >= WAITING_MAX:
            return 503, f"{WAITING_MAX} purges wait here"
        return order

    # -- the order --------------------------------------------------------------------------------

    async def purge(self, order: Order) -> Purged:
        """Carry it out."""
        self.counts["purges"] += 1
        core, driver = self._core, self._driver
        names = frozenset(name_of(key, part) for key in order.keys for part in Part)
        event = words.Forget(floors=order.floors, names=names)
        meant = _Meant(event, order.keys)
        own: list[tuple[str, Store]] = [("dram", driver.dram)]
        own += [("disk", driver.disk)] if driver.disk is not None else []
        before = {part: await asyncio.to_thread(meant.sums, store) for part, store in own}
        stored = core.stored(event)
        driver.tell(event)
        under_way = await self._quiet(event)
        gone = []
        for part, store in own:
            await asyncio.wrap_future(driver.copies.in_order(partial(_sweep, meant, store)))
            left = await asyncio.to_thread(meant.sums, store)
            gone.append(Gone(part, "deleted", *before[part], *left))
        gone.append(
            Gone("under way", "deleted", left=under_way, note="reads, copies and writes; 0: ended")
        )
        if order.store and (shared := driver.ways.store(Tier.OBJECT)) is not None:
            gone.append(await self._from_store(shared, meant, stored))
            if driver.ways.records is not None:
                gone.append(await self._from_register(driver.ways.records, order))
        gone += [await asyncio.to_thread(self._erase, tag) for tag in order.erase]
        told = self._teller.rewrite()
        gone.append(Gone("announced", "rewritten", told, note="keys; asked for again no more"))
        return Purged(tuple(gone))

    def _erase(self, tag: str) -> Gone:
        if self._keys is None:
            return Gone(KEYS, "untouched", note="nothing is sealed here: there is no key to drop")
        try:
            return Gone(KEYS, "deleted", self._keys.drop(tag))
        except StoreError as error:
            return Gone(KEYS, "failed", note=str(error))

    async def _quiet(self, event: words.Forget) -> int:
        """Wait until nothing that was under way touches it; how much still does."""
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        while True:
            count = self._under_way(event)
            if not count or loop.time() >= until:
                return count
            await asyncio.sleep(_LOOK_S)  # the machine tells nobody

    def _under_way(self, event: words.Forget) -> int:
        driver, meant = self._driver, meant_by(event)
        writes = sum(count for owner, count in driver.copies.writing.items() if meant(owner))
        return (
            self._core.forgetting(event) + writes + driver.dram.wiping + driver.loads.held_of(meant)
        )

    # -- a store that others use too --------------------------------------------------------------

    async def _from_store(self, store: Shared, meant: _Meant, known: Iterable[bytes]) -> Gone:
        names = sorted(known)
        names += [records.record_name(n[:-1]) for n in names if n[-1] == Part.POINT]
        try:
            listed = await asyncio.to_thread(meant.listed, store)
            if listed is None:
                return await self._by_name(store, sorted({*names, *meant.names}))
            await asyncio.to_thread(store.delete, [entry.name for entry in listed])
            left = await asyncio.to_thread(meant.listed, store) or []
        except Exception as error:  # each store has its own
            return Gone("object", "failed", note=f"{type(error).__name__}: {error}")
        self._lost(entry.name for entry in listed)
        return Gone("object", "deleted", *_sums(listed), *_sums(left))

    async def _from_register(self, register: Records, order: Order) -> Gone:
        """What says that positions of it are whole."""
        try:
            left = await register.forget(order.floors, order.keys)
        except RegisterError as error:
            return Gone("register", "failed", note=str(error))
        return Gone("register", "deleted", left=left, note="resume records of the store")

    async def _by_name(self, store: Shared, names: Sequence[bytes]) -> Gone:
        """Where labels cannot be listed: what this node knows to have put there."""
        there = await self._there(store, names)
        await asyncio.to_thread(store.delete, names)
        left = await self._there(store, names)
        self._lost(names)
        note = (
            "its values are not listed by owner: what this agent put there since it began is "
            "deleted; older values are unreachable, and go when the store evicts them"
        )
        return Gone("object", "deleted", len(there), left=len(left), note=note)

    async def _there(self, store: Shared, names: Sequence[bytes]) -> list[bytes]:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Report] = loop.create_future()

        def found(report: Report) -> None:
            loop.call_soon_threadsafe(told.set_result, report)

        store.find(names, found)
        report = await told
        if report.silent:
            raise OSError(report.error or "it does not answer")
        return [name for name in names if name not in report.failed]

    def _lost(self, names: Iterable[bytes]) -> None:
        """The directory hears of it, whoever had told it that they are there."""
        units = [name for name in names if name[-1] in tuple(Part)]
        keys = [tuple(n[:-1] for n in units if n[-1] == part) for part in Part]
        self._driver.tell(words.Told(Tier.OBJECT, gone=tuple(units)))
        if units:
            self._teller.announce((UnitsGone(Tier.OBJECT, *keys),))


class _Meant:
    """Which of a store's values are meant: by their labels, and by their names."""

    def __init__(self, event: words.Forget, keys: Iterable[bytes]) -> None:
        self.names = {*event.names, *map(records.record_name, keys)}
        self._owner: Callable[[str], bool] = meant_by(event)

    def of(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those of them."""
        return [e for e in entries if self._owner(e.tenant) or e.name in self.names]

    def sums(self, store: Store) -> tuple[int, int]:
        """How many of them a store has, and their bytes."""
        return _sums(self.of(store.scan()))

    def listed(self, store: Shared) -> list[Entry] | None:
        """Them; None where the store does not say what its values are."""
        labels = store.labels()
        return None if labels is None else self.of(labels)


def _sums(entries: Sequence[Entry]) -> tuple[int, int]:
    return len(entries), sum(entry.size_bytes for entry in entries)


def _sweep(meant: _Meant, store: Store) -> None:
    """What no book knew of goes too."""
    store.delete([entry.name for entry in meant.of(store.scan())])
