"""What a node's agent has to do with tiers that others use too: stores, and the dram of peers.

What lies there is looked for when a prompt is asked for, wave by wave from the first block that
nobody is known to have: no catalogue is read, so none can be out of date. Of a store only what its
resume records vouch for is told to the machine; a peer lends what may be read, for a while. What
does not answer in time is left alone for some seconds: it costs its hits, and no request waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit
from kvatlas.dataplane import records
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers import peer
from kvatlas.dataplane.tiers.base import Finish, Piece, Report, Shared
from kvatlas.dataplane.tiers.dram import DramStore
from kvatlas.dataplane.tiers.opening import DEADLINE_S, open_object
from kvatlas.dataplane.tiers.sockets import Address
from kvatlas.dataplane.tls import Trust
from kvatlas.errors import ConfigError, StoreError
from kvatlas.service import agent_peers
from kvatlas.service.agent_peers import Choice
from kvatlas.service.agent_records import Records

log = logging.getLogger(__name__)

SEEKS_MAX = 256
REST_S = 5.0
LEASE_S = 30.0  # a peer reads within this time of asking
LENDS_MAX = 64  # questions of peers that wait for their answer
LEND_S = 1.0
LOOK_S = 5.0  # so often a store is asked whether it is what it was
_WAVES = (8, 64, 512, 4096)  # blocks looked for at a time

_NOBODYS = b"\xff" * 17  # a name that no unit has

Place = tuple[Tier, str]
Block = tuple[Unit, ...]


class SharedSettings(msgspec.Struct, frozen=True):
    """What a node shares: the URL of a store, peers that it reads from, and where it lets peers
    read (None: nowhere), and over what; ``trust``: over TLS. All nodes must have the same secret.
    ``seek_s``: of one request's time that asking what others hold may take."""

    object_url: str = ""
    peers: tuple[Address, ...] = ()
    serve: Address | None = None
    seek_s: float = 0.5
    peer_transport: Choice = "auto"
    trust: Trust | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for no time."""
        if not 0 < self.seek_s < 3600:
            raise ConfigError(f"--seek-s {self.seek_s}: seconds, above 0 and below 3600")


def opened(
    settings: SharedSettings,
    secret: bytes,
    arena: Arena,
    lost: Callable[[Place], None],
    sealer: Sealer | None = None,
) -> dict[Place, Shared]:
    """The stores. ``lost`` is told, from any thread, of one that has lost all. With a ``sealer``
    what others keep is sealed; a peer's dram is not at rest. Raises ConfigError."""
    stores: dict[Place, Shared] = {}
    try:
        for address in settings.peers:
            place = Tier.PEER, str(address)
            one = peer.Settings(*address, token=_token(secret), deadline_s=DEADLINE_S)
            encrypted = settings.trust is not None
            by = agent_peers.reader(settings.peer_transport, arena, encrypted=encrypted)
            stores[place] = peer.PeerStore(one, _told(lost, place), by, settings.trust)
        if settings.object_url:
            place = Tier.OBJECT, ""
            stores[place] = open_object(settings.object_url, arena, _told(lost, place), sealer)
    except BaseException:
        for store in stores.values():
            store.close()
        raise
    return stores


class Way(msgspec.Struct, eq=False):
    """One shared store; ``node`` is that of a peer. ``rests``: nothing is asked of it now.
    ``silent``: what was asked last had no answer, and why."""

    tier: Tier
    node: str
    store: Shared
    rests: bool = False
    silent: str = ""
    slow_until: float = 0.0  # it is not asked what it has before then


def _called(way: Way) -> str:
    return f"{way.tier.name.lower()} {way.node}".rstrip()


class Ways:
    """All of one node. For the event loop's thread alone, but for `lend`."""

    def __init__(
        self,
        stores: Mapping[Place, Shared],
        *,
        tell: Callable[[words.Input], None],
        post: Callable[..., None],
    ) -> None:
        """``tell`` is told what the machine has to know; ``post`` calls in the loop's thread."""
        self.counts: Counter[str] = Counter()
        self.records: Records | None = None  # of the store, where they lie in a register
        self._served: peer.PeerServer | None = None
        self._ways = {place: Way(*place, store) for place, store in stores.items()}
        self._tell = tell
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._seeks: set[asyncio.Task[None]] = set()
        self._deletes = ThreadPoolExecutor(1, "agent-deletes")
        self._lends: dict[str, Future[Collection[bytes]]] = {}
        self._number = 0
        self._looking = self._loop.call_later(LOOK_S, self._look)

    # -- one store ------------------------------------------------------------------------------

    def read(self, tier: Tier, node: str, pieces: Sequence[Piece], done: Finish) -> bool:
        """As `Loads` wants it: False where there is no such store, or it rests."""
        way = self._way(tier, node)
        if way is not None:
            way.store.read(pieces, self._heard(way, done))
        return way is not None

    def write(self, tier: Tier, pieces: Sequence[Piece], done: Finish) -> bool:
        """The same for writes."""
        way = self._way(tier, "")
        if way is not None:
            way.store.write(pieces, self._heard(way, done))
        return way is not None

    def delete(self, tier: Tier, names: Sequence[bytes]) -> None:
        """Of a store, in a thread of its own; one that does not answer is counted."""
        way = self._ways.get((tier, ""))
        if way is not None:
            self._deletes.submit(self._delete, way, tuple(names))

    def _delete(self, way: Way, names: tuple[bytes, ...]) -> None:
        try:
            way.store.delete(names)
        except Exception as error:  # each store has its own
            log.warning("%s: %d values were not deleted: %s", _called(way), len(names), error)
            self._post(self._count, f"{way.tier.name.lower()}_not_deleted")

    def _count(self, reason: str) -> None:
        self.counts[reason] += 1

    def _way(self, tier: Tier, node: str) -> Way | None:
        way = self._ways.get((tier, node))
        if way is not None and way.rests:
            self.counts[f"{tier.name.lower()}_rests"] += 1
            return None
        return way

    def _heard(self, way: Way, done: Finish) -> Finish:
        def heard(report: Report) -> None:
            if report.silent:
                self._post(self._rest, way, report.error)
            elif way.silent and not report.error:
                self._post(self._answers, way)
            done(report)

        return heard

    def _answers(self, way: Way) -> None:
        if way.silent:
            way.silent = ""
            log.warning("%s: answers again", _called(way))

    def _rest(self, way: Way, error: str) -> None:
        """It does not answer: nothing is asked of it for a while."""
        if way.rests:
            return
        if not way.silent:
            log.warning("%s: does not answer: %s", _called(way), error or "late")
        way.rests = True
        way.silent = error or "late"
        self.counts[f"{way.tier.name.lower()}_silent"] += 1
        if way.tier is Tier.OBJECT:
            self._tell(words.Rest(way.tier, True))
        else:
            self._tell(words.Lose(way.tier, way.node))
        self._loop.call_later(REST_S, self._rested, way)

    def _rested(self, way: Way) -> None:
        way.rests = False
        if way.tier is Tier.OBJECT:
            self._tell(words.Rest(way.tier, False))

    def _look(self) -> None:
        """Who lost all, or ended, while nobody asked for anything, is found out all the same: the
        gateway counts on what we said of it."""
        for way in self._ways.values():
            if way.tier is Tier.OBJECT and not way.rests:
                way.store.find([_NOBODYS], self._heard(way, lambda _: None))
        self._looking = self._loop.call_later(LOOK_S, self._look)

    def lost(self, place: Place) -> None:
        """All that was in it is gone, it says (from any thread)."""
        self._post(self._lost, place)

    def _lost(self, place: Place) -> None:
        if self.records is not None and place[0] is Tier.OBJECT:
            self.records.expire()
        self.void(place)

    def void(self, place: Place) -> None:
        """Nothing that was said to be there counts any more."""
        self.counts[f"{place[0].name.lower()}_lost"] += 1
        self._tell(words.Lose(*place))

    # -- what others hold -----------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether there is a store to look in."""
        return bool(self._awake())

    def _awake(self) -> list[Way]:
        """Those that may be asked what they have."""
        now = self._loop.time()
        return [way for way in self._ways.values() if not way.rests and way.slow_until <= now]

    def seek(
        self, blocks: Sequence[Block], fingerprint: bytes, limit_s: float, then: Callable[[], None]
    ) -> bool:
        """Look for the units of a prompt, tell the machine what is there, and call ``then``, by
        ``limit_s`` or soon after. False: too much is looked for already."""
        if len(self._seeks) >= SEEKS_MAX:
            self.counts["seek_busy"] += 1
            return False
        until = self._loop.time() + limit_s

        async def run() -> None:
            try:
                await self._seek(blocks, fingerprint, until)
            finally:
                then()

        task = self._loop.create_task(run())
        self._seeks.add(task)
        task.add_done_callback(self._seeks.discard)
        return True

    async def _seek(self, blocks: Sequence[Block], fingerprint: bytes, until: float) -> None:
        at = 0
        for size in _WAVES:
            wave, ways = blocks[at : at + size], self._awake()
            if not wave or not ways:
                return
            asking = {
                self._loop.create_task(self._held(way, wave, fingerprint)): way for way in ways
            }
            try:
                _, late = await asyncio.wait(asking, timeout=max(0.0, until - self._loop.time()))
            finally:  # also where this search itself is called off
                for task in asking:
                    task.cancel()
            for task in late:
                self.counts[f"{asking[task].tier.name.lower()}_slow"] += 1
                asking[task].slow_until = self._loop.time() + REST_S
            found = {way: t.result() for t, way in asking.items() if t not in late}
            whole = self._told(wave, found)
            if late or whole < len(wave):
                return
            at += size

    def _told(self, wave: Sequence[Block], found: Mapping[Way, Collection[bytes]]) -> int:
        """Tell of what is there without a hole before it; how many blocks that is."""
        anywhere = {name for names in found.values() for name in names}
        whole = 0
        for block in wave:
            if any(u.part is Part.BODY and u.name not in anywhere for u in block):
                break
            whole += 1
        for way, names in found.items():
            units = tuple(u for block in wave[:whole] for u in block if u.name in names)
            if units:
                self._tell(words.Told(way.tier, units, node=way.node))
                self.counts[f"{way.tier.name.lower()}_found"] += len(units)
        return whole

    async def _held(self, way: Way, wave: Sequence[Block], fingerprint: bytes) -> Collection[bytes]:
        """Names of the units that a store has, points only with their records."""
        units = [unit for block in wave for unit in block]
        if not units:
            return ()
        points = [u for u in units if u.part is Part.POINT] if way.tier is Tier.OBJECT else []
        names = [unit.name for unit in units]
        found, sealed = await asyncio.gather(
            self._answer(lambda done: way.store.find(names, self._heard(way, done))),
            self._sealed(way, points, fingerprint),
        )
        if found.silent:
            return ()
        there = set(names).difference(found.failed, found.damaged)
        if self.records is not None:  # a store that is full lets go of what it likes
            self.records.withdraw([u.key for u in points if u.name in {*sealed} - there])
        return there.difference(unit.name for unit in points if unit.name not in sealed)

    async def _sealed(
        self, way: Way, points: Sequence[Unit], fingerprint: bytes
    ) -> Collection[bytes]:
        """Names of those that a resume record vouches for."""
        if not points:
            return ()
        if self.records is not None:
            told = await self.records.told([unit.key for unit in points])
            read = ((unit, told.get(unit.key, b"")) for unit in points)
            return [unit.name for unit, data in read if _vouches(data, unit, fingerprint)]
        pieces = [_record_piece(unit.key, fingerprint) for unit in points]
        report = await self._answer(lambda done: way.store.read(pieces, self._heard(way, done)))
        bad = {*report.failed, *report.damaged}
        return [
            unit.name
            for unit, piece in zip(points, pieces, strict=True)
            if piece.name not in bad and _vouches(piece.view, unit, fingerprint)
        ]

    async def _answer(self, start: Callable[[Finish], None]) -> Report:
        future: asyncio.Future[Report] = self._loop.create_future()

        def ended(report: Report) -> None:
            if not future.done():
                future.set_result(report)

        start(lambda report: self._post(ended, report))
        return await future

    # -- what others may read here --------------------------------------------------------------

    def serve(self, dram: DramStore, settings: SharedSettings, secret: bytes) -> None:
        """Let peers read from now on, where that is wanted. Raises ConfigError."""
        if (at := settings.serve) is not None:
            trust = settings.trust
            encrypted = trust is not None
            nixl = agent_peers.lender(settings.peer_transport, dram.arena, encrypted=encrypted)
            token = _token(secret)
            self._served = peer.PeerServer(
                dram, host=at[0], port=at[1], token=token, lend=self.lend, nixl=nixl, trust=trust
            )

    def lend(self, names: Sequence[bytes]) -> Collection[bytes]:
        """Which of these a peer may read now and for a while; from any thread but the loop's."""
        answer: Future[Collection[bytes]] = Future()
        self._post(self._lend, tuple(names), answer)
        try:
            return answer.result(LEND_S)
        except TimeoutError:
            return ()

    def _lend(self, names: tuple[bytes, ...], answer: Future[Collection[bytes]]) -> None:
        if len(self._lends) >= LENDS_MAX:
            self.counts["lend_busy"] += 1
            answer.set_result(())
            return
        self._number += 1
        owner = f"peer {self._number}"
        self._lends[owner] = answer
        self._tell(words.Lend(owner, names, self._loop.time() + LEASE_S))
        if self._lends.pop(owner, None) is not None:  # nothing was lent
            answer.set_result(())

    def lent(self, effect: words.Lent) -> None:
        """The machine's answer."""
        if (answer := self._lends.pop(effect.owner, None)) is not None:
            answer.set_result(frozenset(effect.names))

    # -- the whole ------------------------------------------------------------------------------

    def store(self, tier: Tier) -> Shared | None:
        """That of a tier which all nodes share."""
        way = self._ways.get((tier, ""))
        return None if way is None else way.store

    def problems(self) -> dict[str, str]:
        """For the health page."""
        found: dict[str, list[str]] = {}
        for way in self._ways.values():
            if way.silent:
                flag = f"{way.tier.name.lower()}_silent"
                found.setdefault(flag, []).append(f"{_called(way)}: {way.silent}")
            if isinstance(way.store, peer.PeerStore) and (fault := agent_peers.fault(way.store)):
                found.setdefault("peer_nixl", []).append(f"{_called(way)}: over TCP: {fault}")
        return {flag: "; ".join(whats) for flag, whats in found.items()}

    def status(self) -> dict[str, object]:
        """What carries the bytes, by tier."""
        shown: dict[str, object] = {}
        peers: dict[str, object] = {}
        for (tier, node), way in self._ways.items():
            told: dict[str, object] = {
                "transport": way.store.transport,
                "rests": way.rests,
                "counts": dict(sorted(way.store.counts.items())),
            }
            if isinstance(way.store, peer.PeerStore):
                peers[node] = told | agent_peers.told(way.store)
            else:
                shown[tier.name.lower()] = told
        if peers:
            shown["peer"] = peers
        if self._served is not None:
            shown["served"] = {
                "address": str(self._served.address),
                "transport": self._served.plain,
                "nixl": self._served.nixl,
                "counts": dict(sorted(self._served.counts.all().items())),
            }
        return shown

    def close(self) -> None:
        """Ends all that is looked for and served; the stores are the caller's to close."""
        self._looking.cancel()
        self._deletes.shutdown(wait=True, cancel_futures=True)
        for task in self._seeks:
            task.cancel()
        if self._served is not None:
            self._served.close()


def _told(lost: Callable[[Place], None], place: Place) -> Callable[[str], None]:
    return lambda _: lost(place)


def _record_piece(key: bytes, fingerprint: bytes) -> Piece:
    view = memoryview(bytearray(records.RECORD_BYTES))
    return Piece(records.record_name(key), view, fingerprint=fingerprint)


def _vouches(data: memoryview | bytes, unit: Unit, fingerprint: bytes) -> bool:
    """Whether a record says that this point was whole."""
    try:
        record = records.unpack(data, records.ResumeRecord)
    except StoreError:
        return False
    right = record.key == unit.key and record.fingerprint == fingerprint
    return right and any(
        c.name == unit.name and c.size_bytes == unit.size_bytes for c in record.components
    )


def _token(secret: bytes) -> bytes:
    """By which peers know each other: whoever has the secret."""
    return hashlib.blake2b(b"kvatlas peers", key=secret[:64], digest_size=32).digest()
