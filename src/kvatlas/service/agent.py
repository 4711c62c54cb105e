"""The agent of a node: owns its arena and its disk tier, and serves its engines over a socket.

Engines say what they have and ask what there is, in tokens; keys are made here, so that the secret
never leaves this process. Keys begin with what an engine computes with: old and new engines of one
name live here side by side while they are exchanged, and none gets what another kind of them made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core.agent import Agent
from kvatlas.core.compat import Member, not_shared, why_not
from kvatlas.core.keys import Keyring
from kvatlas.core.ledger import Ledger
from kvatlas.core.ledger_values import Limits
from kvatlas.core.policy.registry import make_policy
from kvatlas.core.records import Tier
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.codec import Codec
from kvatlas.dataplane.keystore import FileKeys
from kvatlas.dataplane.records import SUM_BYTES, checksum_int
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers.base import Shared
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.dram import DramStore
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service import agent_wire as wire
from kvatlas.service.admin import Safety
from kvatlas.service.agent_driver import Driver
from kvatlas.service.agent_errands import Errands, taken
from kvatlas.service.agent_front import Front, Served
from kvatlas.service.agent_loads import Engine
from kvatlas.service.agent_member import member_of
from kvatlas.service.agent_pages import Pages
from kvatlas.service.agent_pulls import Pulls
from kvatlas.service.agent_purge import Purges
from kvatlas.service.agent_shared import Place, SharedSettings, opened
from kvatlas.service.agent_socket import Peer, Prompt, UnprovedError, ended, listen, process_of
from kvatlas.service.agent_status import own_tiers
from kvatlas.service.rdma_ports import INFINIBAND, read_ports
from kvatlas.service.tenant_limits import Limited

log = logging.getLogger(__name__)

REQUESTS_MAX = 16_384  # prompts remembered per engine
CONNECTIONS_MAX = 256
ACCEPT_AGAIN_S = 0.1
_STAGING_SHARE = 8  # of the arena beyond the dram tier: for what comes from elsewhere
_STAGING_BYTES_MIN = 64 << 20
_ROUNDING = 0.95  # units fill whole pages


class Settings(msgspec.Struct, frozen=True):
    """What a node gives. ``dram_bytes`` and ``disk_bytes`` count whole tiers, 0: none.

    ``shared``: its stores and peers, and where it serves peers itself. ``prefill_tokens_per_s``: of
    its engines; what takes longer to load than to compute so fast is not loaded. ``infiniband``:
    where the kernel counts what RDMA ports move. ``seal_keys``: a directory of keys; what goes to
    disk and to stores is sealed with them.
    """

    path: Path
    dram_bytes: int
    disk: Path | None = None
    disk_bytes: int = 0
    disk_codec: Codec = Codec.RAW
    policy: str = "lru_sink"
    secret: bytes = b""
    shared: SharedSettings = SharedSettings()
    agent: words.Config = words.Config(write_through=(Tier.DISK,))
    listen: tuple[str, int] | None = None  # of its pages; what it holds is announced beside them
    events_port: int = 0  # and at the next one it can be asked for again; 0: at free ones
    prefill_tokens_per_s: float = 8000.0
    infiniband: Path = INFINIBAND
    tenants_required: bool = False  # of a salt that proves none, nothing is kept or loaded
    seal_keys: Path | None = None
    safety: Safety = Safety()


class NodeAgent:
    """The process. Open it with ``async with``, then `serve`."""

    def __init__(self, settings: Settings) -> None:
        """Takes the memory and opens the disk. Raises ConfigError where that cannot be."""
        if settings.dram_bytes < 1 << 20:
            raise ConfigError("agent: dram must have at least 1 MiB: engines copy through it")
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._ring = Keyring(settings.secret)
        #: A tenant's key dropped here is a tenant that cannot be read from disk or store any more.
        self.keys = None if settings.seal_keys is None else FileKeys(settings.seal_keys)
        sealer = None if self.keys is None else Sealer(self.keys)
        self._arena = Arena.create(
            settings.dram_bytes + max(_STAGING_BYTES_MIN, settings.dram_bytes // _STAGING_SHARE)
        )
        self._dram = DramStore(self._arena)
        self._disk: DiskStore | None = None
        sizes = {Tier.DRAM: settings.dram_bytes}
        if settings.disk is not None:
            try:
                self._disk = DiskStore(
                    settings.disk, settings.disk_bytes, codec=settings.disk_codec, sealer=sealer
                )
            except BaseException:
                self._arena.close()
                raise
            sizes[Tier.DISK] = int(self._disk.size_bytes * _ROUNDING)
        ledgers = {
            tier: Ledger(Limits(size), make_policy(settings.policy, tier))
            for tier, size in sizes.items()
        }
        self._core = Agent(ledgers, settings.agent)
        self._driver: Driver | None = None
        self._listener: socket.socket | None = None
        self._shared: dict[Place, Shared] = {}
        try:
            self._shared = opened(settings.shared, settings.secret, self._arena, self._lost, sealer)
        except BaseException:
            self._close()
            raise
        self._peers: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self._closing = False  # our memory outlives us as long as an engine maps it
        self.front = Front(
            held=self._core.held,
            engines=self._served,
            status=self.status,
            problems=self._problems,
            ports=lambda: read_ports(settings.infiniband),
            safety=settings.safety,
        )

    async def __aenter__(self) -> NodeAgent:
        if self.settings.listen is not None:
            try:
                where = self.settings.listen
                await self.front.start(self._life(), *where, self.settings.events_port)
            except BaseException:
                self._close()
                raise
        self._driver = Driver(
            self._core,
            self._arena,
            self._dram,
            self._disk,
            self._shared,
            ready=self._ready,
            announce=self.front.announce,
        )
        self._pages = Pages(
            self._ring,
            self._core,
            self._driver,
            send=self._ready,
            seek_s=self.settings.shared.seek_s,
            tenants_required=self.settings.tenants_required,
        )
        given = {Tier.DRAM: self.settings.dram_bytes}
        if self._disk is not None:
            given[Tier.DISK] = self.settings.disk_bytes
        self.errands = Errands(
            self._core,
            self._driver,
            self._ring,
            members=self._members,
            tiers=self._tiers,
            given=given,
        )
        self.front.limited = Limited(self._ring, self._driver.tell, self._life())
        self.front.pulls = Pulls(self._ring, self.errands, self._core, self._life())
        self.front.purges = Purges(self._ring, self._core, self._driver, self.front, self.keys)
        self.counts["found"] = self._driver.found()
        try:
            self._listener = listen(self.settings.path)
            self._driver.ways.serve(self._dram, self.settings.shared, self.settings.secret)
        except BaseException:
            await self.front.close()
            self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.errands.close()
        await self.front.close()
        self._close()

    def _close(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):  # first: once it is closed, it may be another's
                self.settings.path.unlink()
            self._listener.close()
        if self._driver is not None:
            self._driver.close()
        for store in self._shared.values():
            store.close()
        if self._disk is not None:
            self._disk.close()
        # The dram store is not emptied: engines may still copy what they were promised.
        self._arena.close()

    def _lost(self, place: Place) -> None:
        """A shared store has lost all that it held (from any thread)."""
        if self._driver is not None:
            self._driver.ways.lost(place)

    @property
    def driver(self) -> Driver:
        """What drives the machine."""
        assert self._driver is not None, "not started"
        return self._driver

    async def serve(self) -> None:
        """Takes connections until cancelled."""
        assert self._listener is not None, "not started"
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor is left, say
                self.counts["accept_failed"] += 1
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self._tasks) >= CONNECTIONS_MAX:
                self.counts["connections_refused"] += 1
                sock.close()
                continue
            sock.setblocking(False)
            task = loop.create_task(self._connection(Peer(sock)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # It may be cancelled before its first step, or within its last ones.
            task.add_done_callback(partial(_closed, sock))

    # -- connections ----------------------------------------------------------------------------

    async def _connection(self, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        writer = loop.create_task(peer.write())
        frames = wire.Frames()
        try:
            while True:
                with frames.room() as room:
                    count = await loop.sock_recv_into(peer.sock, room)
                if not count:
                    break
                for body in frames.came(count):
                    self._take(peer, wire.from_engine(body))
        except EngineError as error:
            self.counts["bad_messages"] += 1
            with contextlib.suppress(OSError, EngineError):
                peer.sock.send(wire.frame(wire.Refused(str(error))))
        except OSError:
            pass
        finally:
            if peer.slow:
                self.counts["connections_slow"] += 1
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            waits = peer.name and not peer.bye and not self._closing
            alive = process_of(peer.sock) if waits else None
            peer.sock.close()
            try:
                if alive is not None:
                    await ended(alive)
            finally:
                if peer.name:
                    del self._peers[peer.name]
                    self.driver.gone(peer.name)

    def _take(self, peer: Peer, message: wire.FromEngine) -> None:
        match message:
            case wire.Hello():
                self._hello(peer, message)
            case wire.Map(version):
                _check_version(version)
                self._welcome(peer, wire.Welcome(self._life()))
            case wire.AskStatus():
                peer.send(wire.Status(msgspec.json.encode(self.status())))
            case wire.Errand() | wire.Recall() | wire.Resize() | wire.Drain():
                taken(self.errands, self.settings.safety.guard, peer, message)
            case _ if peer.member is None:
                raise EngineError("say hello first")
            case wire.Want():
                self._want(peer, peer.member, message)
            case wire.Filled():
                peer.send(self._filled(peer, message))
            case wire.Saved(op, sums):
                if any(len(checksum) > SUM_BYTES for _, checksum in sums):
                    raise EngineError(f"checksums have {SUM_BYTES} bytes")
                read = {name: checksum_int(checksum) for name, checksum in sums}
                self.driver.saved(peer.name, op, read)
            case wire.Look() | wire.Take() | wire.Give():
                answer = self._pages.answer(peer.name, peer.member, message)
                if answer is not None:
                    peer.send(answer)
            case wire.Cancel(request):
                self.driver.tell(words.Cancel(peer.name, request))
            case wire.Release(request, used):
                self.driver.loads.release(peer.name, request, used=used)
            case wire.Bye():
                peer.bye = True
            case wire.End(request):
                peer.prompts.pop(request, None)
                self.driver.tell(words.Cancel(peer.name, request))
                self.driver.loads.release(peer.name, request, used=False)

    def _life(self) -> str:
        return self._arena.path.name if self._arena.path is not None else ""

    def _hello(self, peer: Peer, hello: wire.Hello) -> None:
        _check_version(hello.version)
        if peer.member is not None:
            raise EngineError("hello was said already")
        member = member_of(hello)
        if self.settings.agent.spacing is not None:
            try:
                self.settings.agent.spacing.positions(member.layout.grid_tokens, 0, 0)
            except ConfigError as error:
                raise EngineError(f"--points: {error}") from error
        self._number += 1
        peer.name = f"{hello.name or 'engine'}#{self._number}"
        self._tell_apart(peer.name, member)
        peer.member = member
        self._peers[peer.name] = peer
        layout, digest = member.layout, member.fingerprint.digest()
        self.driver.loads.engines[peer.name] = Engine(digest, layout.grid_tokens)
        minimal = bool(layout.minimal_on)
        rate = self.settings.prefill_tokens_per_s
        self.driver.tell(words.Attach(peer.name, layout, digest, minimal, rate))
        parts = wire.parts_of(layout, hello.ranks)
        welcome = wire.Welcome(self._life(), layout.grid_tokens, parts, minimal)
        self._welcome(peer, welcome)

    def _tell_apart(self, name: str, member: Member) -> None:
        """Say so, where it serves a name that another engine serves from other state."""
        for other, theirs in self._members().items():
            if set(theirs.names) & set(member.names) and (reasons := why_not(member, theirs)):
                self.counts["not_shared"] += 1
                log.warning("%s shares nothing with %s: %s", name, other, "; ".join(reasons))
                return

    def _welcome(self, peer: Peer, welcome: wire.Welcome) -> None:
        """With the arena's descriptor; nothing was sent before, so it fits."""
        data = wire.frame(welcome)
        sent = socket.send_fds(peer.sock, [data], [self._arena.fileno()])
        if sent != len(data):
            raise EngineError("the first answer could not be sent in one go")

    # -- requests -------------------------------------------------------------------------------

    def _want(self, peer: Peer, member: Member, want: wire.Want) -> None:
        try:
            prompt = Prompt.of(self._ring, member, want, proved=self.settings.tenants_required)
        except UnprovedError as error:
            self.counts["salts_refused"] += 1
            peer.send(wire.Staged(want.request, want.local_tokens, why=str(error)))
            return
        peer.prompts[want.request] = prompt
        if len(peer.prompts) > REQUESTS_MAX:
            peer.prompts.popitem(last=False)
            self.counts["prompts_forgotten"] += 1
        ask = words.Ask(
            want.request,
            peer.name,
            tuple(prompt.keys[: member.layout.asked_blocks(prompt.count)]),
            max(0, want.local_tokens),
            prompt.count,
            want.deadline_s,
            prompt.tenant,
        )
        self._seek(peer, member.fingerprint.digest(), ask)

    def _seek(self, peer: Peer, fingerprint: bytes, ask: words.Ask) -> None:
        """Look in shared tiers for what goes on where the node's own end."""
        driver, loop = self.driver, asyncio.get_running_loop()
        offer = self._core.offer(ask)
        tokens = max(offer.tokens, ask.local_tokens)
        beyond = self._core.unknown(ask, tokens) if driver.ways.any else []
        prompt, began = peer.prompts[ask.request], loop.time()

        def found() -> None:
            left_s = ask.deadline_s - (loop.time() - began)
            if peer.prompts.get(ask.request) is prompt and peer.name in self._peers:
                left = msgspec.structs.replace(ask, deadline_s=left_s)
                self._fetch(peer, left, self._core.offer(left))
            else:  # it ended meanwhile
                peer.send(wire.Staged(ask.request, ask.local_tokens, why="not wanted any more"))

        limit_s = min(self.settings.shared.seek_s, ask.deadline_s / 2)
        if not any(beyond) or not driver.ways.seek(beyond, fingerprint, limit_s, found):
            self._fetch(peer, ask, offer)

    def _fetch(self, peer: Peer, ask: words.Ask, offer: words.Offer) -> None:
        if offer.tokens <= ask.local_tokens:
            self.counts["not_offered"] += 1
            peer.send(wire.Staged(ask.request, ask.local_tokens, why=offer.why))
            return
        self.driver.tell(words.Fetch(ask, offer.tokens))

    def _ready(self, worker: str, told: wire.FromAgent) -> None:
        peer = self._peers.get(worker)
        if peer is not None:
            peer.send(told)

    def _filled(self, peer: Peer, filled: wire.Filled) -> wire.Orders:
        prompt = peer.prompts.get(filled.request)
        if prompt is None or prompt.count != filled.since:
            self.counts["prompt_unknown"] += 1
            return wire.Orders(filled.request, known=False)
        prompt.extend(filled.tokens)
        prompt_tokens = min(max(filled.prompt_tokens, 0), prompt.count)
        event = words.Filled(
            peer.name,
            filled.request,
            tuple(prompt.keys[: max(0, filled.blocks)]),
            filled.points,
            tenant=prompt.tenant,
            resumed_tokens=filled.resumed_tokens,
            prompt_tokens=prompt_tokens,
            output_tokens=prompt.count - prompt_tokens,
        )
        return wire.Orders(filled.request, tuple(self.driver.filled(event)))

    # -- for readers ----------------------------------------------------------------------------

    def _members(self) -> dict[str, Member]:
        return {name: p.member for name, p in self._peers.items() if p.member is not None}

    def _tiers(self) -> set[Tier]:
        own = {Tier.DISK} if self._disk is not None else set()
        return own | {tier for tier, _ in self._shared if tier is Tier.OBJECT}

    def _served(self) -> dict[str, Served]:
        return {
            name: Served(m, self._ring.root(m.fingerprint.digest()).hex())
            for name, m in self._members().items()
        }

    def _problems(self) -> dict[str, str]:
        found = self.driver.ways.problems()
        if self._core.draining:
            found["draining"] = "it saves nothing more and ends when its memory is on disk"
        if self._disk is not None and self._disk.quarantined_bytes:
            found["quarantined"] = (
                f"{self._disk.quarantined_bytes} bytes of {self.settings.disk} could not be read or"
                " written and are not used again before a restart: look at that disk"
            )
        return found

    def status(self) -> dict[str, object]:
        """What it holds and did."""
        core, driver = self._core, self.driver
        counts = (
            core.counts
            + driver.counts
            + driver.loads.counts
            + self.counts
            + self.front.counts
            + self.errands.counts
        )
        counts += driver.ways.counts
        tiers = own_tiers(core, self._dram, self._disk) | driver.ways.status()
        return {
            "arena": self._life(),
            "listens": self.front.url,
            "engines": {name: list(p.member.names) for name, p in self._peers.items() if p.member},
            "not_shared": not_shared(self._members()),
            "tiers": tiers,
            "moved_bytes": {f"{k} {t.name.lower()}": n for (k, t), n in core.moved.items()},
            "loaded_tokens": dict(sorted(driver.loads.loaded.items())),
            "counts": dict(sorted(counts.items())),
            "busy": core.busy,
            "staged": driver.loads.held,
            "errands": self.errands.status(),
            "draining": core.draining,
        }


def _closed(sock: socket.socket, _: object) -> None:
    sock.close()


def _check_version(version: int) -> None:
    if version != wire.VERSION:
        raise EngineError(f"it speaks version {version}, this agent {wire.VERSION}")
