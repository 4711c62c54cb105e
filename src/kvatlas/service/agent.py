"""The agent of a node: owns its arena and its disk tier, and serves its engines over a socket.

Engines say what they have and ask what there is, in tokens; keys are made here, so that the secret
never leaves this process. An engine whose state nobody else of its name could use is refused, and
told why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import Counter, OrderedDict, deque
from pathlib import Path

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core.agent import Agent
from kvatlas.core.compat import Member, why_not
from kvatlas.core.families import layout_from_config
from kvatlas.core.keys import PUBLIC, Fingerprint, Keyring, Scope
from kvatlas.core.ledger import Ledger
from kvatlas.core.ledger_values import Limits
from kvatlas.core.policy.registry import make_policy
from kvatlas.core.records import Tier
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.records import checksum_int
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.dram import DramStore
from kvatlas.errors import ConfigError, EngineError, LayoutError
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent_driver import Driver
from kvatlas.service.agent_loads import Engine

REQUESTS_MAX = 16_384  # prompts remembered per engine
CONNECTIONS_MAX = 256
BACKLOG_BYTES_MAX = 64 << 20
GONE_S = 60.0  # how long a process may live on after its connection ended
_STAGING_SHARE = 8  # of the arena beyond the dram tier: for what comes from elsewhere
_STAGING_BYTES_MIN = 64 << 20
_ROUNDING = 0.95  # units fill whole pages


class Settings(msgspec.Struct, frozen=True):
    """What a node gives. ``dram_bytes`` and ``disk_bytes`` count whole tiers, 0: none."""

    path: Path
    dram_bytes: int
    disk: Path | None = None
    disk_bytes: int = 0
    policy: str = "lru_sink"
    secret: bytes = b""
    agent: words.Config = words.Config(write_through=(Tier.DISK,))


class Prompt:
    """A request of an engine, as far as its tokens are known here."""

    def __init__(self, ring: Keyring, root: bytes, grid_tokens: int, tenant: str) -> None:
        self._ring = ring
        self._grid = grid_tokens
        self._parent = root
        self._rest = b""
        self.tenant = tenant
        self.count = 0
        self.keys: list[bytes] = []

    def extend(self, tokens: bytes) -> None:
        """More token ids, 4 bytes each. Raises EngineError for half ones."""
        if len(tokens) % 4:
            raise EngineError("token ids have 4 bytes each")
        self.count += len(tokens) // 4
        data = self._rest + tokens
        whole = len(data) // (4 * self._grid) * 4 * self._grid
        self._rest = data[whole:]
        if whole:
            made = self._ring.chain(self._parent, data[:whole], self._grid)
            self._parent = made[-1]
            self.keys += made


class Peer:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.name = ""  # of the engine, once it has said hello
        self.member: Member | None = None
        self.bye = False
        self.slow = False
        self.prompts: OrderedDict[str, Prompt] = OrderedDict()
        self._out: deque[bytes] = deque()
        self._backlog = 0
        self._more = asyncio.Event()

    def send(self, message: wire.FromAgent) -> None:
        """Queue a message; who does not read loses its connection."""
        data = wire.frame(message)
        self._backlog += len(data)
        if self._backlog > BACKLOG_BYTES_MAX:
            self.slow = True
            with contextlib.suppress(OSError):  # it has ended
                self.sock.shutdown(socket.SHUT_RDWR)  # closed, it would wake nobody
            return
        self._out.append(data)
        self._more.set()

    async def write(self) -> None:
        """Sends what is queued, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._more.wait()
            self._more.clear()
            while self._out:
                data = self._out.popleft()
                await loop.sock_sendall(self.sock, data)
                self._backlog -= len(data)


class NodeAgent:
    """The process. Open it with ``async with``, then `serve`."""

    def __init__(self, settings: Settings) -> None:
        """Takes the memory and opens the disk. Raises ConfigError where that cannot be."""
        if settings.dram_bytes < 1 << 20:
            raise ConfigError("agent: dram must have at least 1 MiB: engines copy through it")
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._ring = Keyring(settings.secret)
        self._arena = Arena.create(
            settings.dram_bytes + max(_STAGING_BYTES_MIN, settings.dram_bytes // _STAGING_SHARE)
        )
        self._dram = DramStore(self._arena)
        self._disk: DiskStore | None = None
        sizes = {Tier.DRAM: settings.dram_bytes}
        if settings.disk is not None:
            try:
                self._disk = DiskStore(settings.disk, settings.disk_bytes)
            except BaseException:
                self._arena.close()
                raise
            sizes[Tier.DISK] = int(settings.disk_bytes * _ROUNDING)
        ledgers = {
            tier: Ledger(Limits(size), make_policy(settings.policy, tier))
            for tier, size in sizes.items()
        }
        self._core = Agent(ledgers, settings.agent)
        self._driver: Driver | None = None
        self._listener: socket.socket | None = None
        self._peers: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0

    async def __aenter__(self) -> NodeAgent:
        self._driver = Driver(self._core, self._arena, self._dram, self._disk, ready=self._ready)
        self.counts["found"] = self._driver.found()
        try:
            self._listener = _listen(self.settings.path)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):
                self.settings.path.unlink()
        if self._driver is not None:
            self._driver.close()
        if self._disk is not None:
            self._disk.close()
        # The dram store is not emptied: engines may still copy what they were promised.
        self._arena.close()

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
            sock, _ = await loop.sock_accept(self._listener)
            if len(self._tasks) >= CONNECTIONS_MAX:
                self.counts["connections_refused"] += 1
                sock.close()
                continue
            sock.setblocking(False)
            task = loop.create_task(self._connection(Peer(sock)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # -- connections ----------------------------------------------------------------------------

    async def _connection(self, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        writer = loop.create_task(peer.write())
        frames = wire.Frames()
        try:
            while data := await loop.sock_recv(peer.sock, 1 << 18):
                for body in frames.add(data):
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
            alive = _process_of(peer.sock) if peer.name and not peer.bye else None
            peer.sock.close()
            try:
                if alive is not None:
                    await _ended(alive)
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
            case _ if peer.member is None:
                raise EngineError("say hello first")
            case wire.Want():
                self._want(peer, peer.member, message)
            case wire.Filled():
                peer.send(self._filled(peer, message))
            case wire.Saved(op, sums):
                read = {name: checksum_int(checksum) for name, checksum in sums}
                self.driver.saved(peer.name, op, read)
            case wire.Cancel(request):
                self.driver.tell(words.Cancel(peer.name, request))
            case wire.Release(request, used):
                self.driver.loads.release(peer.name, request, used=used)
            case wire.Bye():
                peer.bye = True
            case wire.End(request):
                peer.prompts.pop(request, None)
                self.driver.loads.release(peer.name, request, used=False)

    def _life(self) -> str:
        return self._arena.path.name if self._arena.path is not None else ""

    def _hello(self, peer: Peer, hello: wire.Hello) -> None:
        _check_version(hello.version)
        if peer.member is not None:
            raise EngineError("hello was said already")
        member = _member(hello)
        for other in self._peers.values():
            if other.member is None or not set(other.member.names) & set(member.names):
                continue
            if reasons := why_not(member, other.member):
                self.counts["refused"] += 1
                raise EngineError(f"not with {other.name}: {'; '.join(reasons)}")
        self._number += 1
        peer.name = f"{hello.name or 'engine'}#{self._number}"
        peer.member = member
        self._peers[peer.name] = peer
        layout, digest = member.layout, member.fingerprint.digest()
        self.driver.loads.engines[peer.name] = Engine(digest, layout.grid_tokens)
        self.driver.tell(words.Attach(peer.name, layout, digest))
        welcome = wire.Welcome(self._life(), layout.grid_tokens, wire.parts_of(layout))
        self._welcome(peer, welcome)

    def _welcome(self, peer: Peer, welcome: wire.Welcome) -> None:
        """With the arena's descriptor; nothing was sent before, so it fits."""
        data = wire.frame(welcome)
        sent = socket.send_fds(peer.sock, [data], [self._arena.fileno()])
        if sent != len(data):
            raise EngineError("the first answer could not be sent in one go")

    # -- requests -------------------------------------------------------------------------------

    def _want(self, peer: Peer, member: Member, want: wire.Want) -> None:
        scope = Scope("tenant", want.scope) if want.scope else PUBLIC
        root = self._ring.root(member.fingerprint.digest(), scope, want.adapter)
        prompt = Prompt(self._ring, root, member.layout.grid_tokens, want.scope)
        prompt.extend(want.tokens)
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
        offer = self._core.offer(ask)
        if offer.tokens <= ask.local_tokens:
            self.counts["not_offered"] += 1
            peer.send(wire.Staged(want.request, ask.local_tokens, why=offer.why))
            return
        self.driver.tell(words.Fetch(ask, offer.tokens))

    def _ready(self, worker: str, staged: wire.Staged) -> None:
        peer = self._peers.get(worker)
        if peer is not None:
            peer.send(staged)

    def _filled(self, peer: Peer, filled: wire.Filled) -> wire.Orders:
        prompt = peer.prompts.get(filled.request)
        if prompt is None or prompt.count != filled.since:
            self.counts["prompt_unknown"] += 1
            return wire.Orders(filled.request, known=False)
        prompt.extend(filled.tokens)
        event = words.Filled(
            peer.name,
            filled.request,
            tuple(prompt.keys[: max(0, filled.blocks)]),
            filled.points,
            tenant=prompt.tenant,
            resumed_tokens=filled.resumed_tokens,
            prompt_tokens=filled.prompt_tokens,
            output_tokens=max(0, prompt.count - filled.prompt_tokens),
        )
        return wire.Orders(filled.request, tuple(self.driver.filled(event)))

    # -- for readers ----------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """What it holds and did."""
        core, driver = self._core, self.driver
        counts = core.counts + driver.counts + driver.loads.counts + self.counts
        tiers: dict[str, object] = {}
        for tier, store in ((Tier.DRAM, self._dram), (Tier.DISK, self._disk)):
            if store is not None:
                usage = core.ledger(tier).usage()
                shown: dict[str, object] = {
                    "transport": store.transport,
                    "capacity_bytes": core.ledger(tier).limits.capacity_bytes,
                    "held_bytes": usage.committed_bytes,
                    "counts": dict(sorted(store.counts.all().items())),
                }
                if isinstance(store, DiskStore):
                    shown["quarantined_bytes"] = store.quarantined_bytes
                tiers[tier.name.lower()] = shown
        return {
            "arena": self._life(),
            "engines": {name: list(p.member.names) for name, p in self._peers.items() if p.member},
            "tiers": tiers,
            "moved_bytes": {f"{k} {t.name.lower()}": n for (k, t), n in core.moved.items()},
            "loaded_tokens": dict(sorted(driver.loads.loaded.items())),
            "counts": dict(sorted(counts.items())),
            "busy": core.busy,
            "staged": driver.loads.held,
        }


def _member(hello: wire.Hello) -> Member:
    """Raises EngineError where the model's state cannot be described."""
    try:
        layout = layout_from_config(
            msgspec.json.decode(hello.config, type=dict[str, object]),
            engine="vllm",
            kv_dtype=hello.kv_dtype,
            block_tokens=hello.block_tokens or None,
        )
    except (LayoutError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineError(f"model {hello.model!r}: {error}") from error
    fingerprint = Fingerprint(
        model=hello.model,
        weights_digest=hello.weights_digest,
        engine=hello.engine,
        engine_version=hello.engine_version,
        layout_digest=layout.digest(),
        block_tokens=layout.grid_tokens,
        kv_dtype=hello.kv_dtype,
        hash_algorithm=hello.hash_algorithm,
    )
    return Member(hello.names, fingerprint, layout)


def _check_version(version: int) -> None:
    if version != wire.VERSION:
        raise EngineError(f"it speaks version {version}, this agent {wire.VERSION}")


def _listen(path: Path) -> socket.socket:
    """Raises ConfigError where another agent answers there, or nothing can be made."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(path))
                except OSError:
                    path.unlink()  # its owner is dead
                else:
                    raise ConfigError(f"{path}: another agent answers there")
        before = os.umask(0o177)  # who may connect may read state
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        sock.listen(64)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(f"socket {path}: {error.strerror or error}") from error
    except ConfigError:
        sock.close()
        raise
    return sock


def _process_of(sock: socket.socket) -> int | None:
    """A descriptor that tells of the other side's end; None: it has ended."""
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return os.pidfd_open(struct.unpack("3i", found)[0])
    except OSError:
        return None


async def _ended(process: int) -> None:
    """Waits for the end of a process whose connection is gone: until then it may copy."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def ended() -> None:
        if not done.done():
            done.set_result(None)

    loop.add_reader(process, ended)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done, GONE_S)
    finally:
        loop.remove_reader(process)
        os.close(process)
