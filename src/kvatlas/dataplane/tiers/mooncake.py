"""Values in a Mooncake Store, put from and got into the arena by its own client.

Mooncake (mooncake-transfer-engine, tested with 0.3.13) replicates, places and evicts; its master
alone knows where a value lies, and after a restart it knows nothing. A marker with a random life in
it tells: who finds it gone or changed has lost all that was there, and says so (``lost``).

Its client may hang, and takes the interpreter with it: it lives in a process of its own
(`mooncake_client`) that maps the same arena. An answer that is late ends that process, whose death
is a miss, and another is started: when an operation has ended nothing touches its views.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvatlas.core.records import Tier
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.codec import Codec
from kvatlas.dataplane.keystore import KeyMissing
from kvatlas.dataplane.records import checksum_bytes, checksum_int
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers import framing, mooncake_wire
from kvatlas.dataplane.tiers.base import Counts, Entry, Finish, Life, Piece, asked, let_go
from kvatlas.dataplane.tiers.child import Child, Kind
from kvatlas.dataplane.tiers.framing import HEADER_BYTES, Verdict
from kvatlas.dataplane.tiers.mooncake_wire import (
    GROUP,
    Answer,
    Client,
    End,
    Item,
    Job,
    Ready,
    Seen,
)
from kvatlas.dataplane.tiers.work import Batch, Task, Why, Workers
from kvatlas.errors import ConfigError, StoreError

KEYS_BYTES_MAX = 256 << 20
SEALED_BYTES = 32 << 20  # per thread, of a value that is sealed on its way; more is refused
VERBS = "libibverbs.so.1"


class Settings(msgspec.Struct, frozen=True):
    """Which master, and how. A node gives no memory to the store by this: that is for a process of
    Mooncake's own.

    ``admin_url``: the master's HTTP port, for `scan`; without it the store counts as empty after a
    restart of ours. ``bounce_bytes``: per thread, for values outside the arena. ``connect_s``: for
    one try to connect, in the background.
    """

    master: str = "127.0.0.1:50051"
    hostname: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    buffer_bytes: int = 16 << 20
    bounce_bytes: int = 2 << 20
    prefix: str = "kvatlas:"
    admin_url: str = ""
    threads: int = 4
    queue_max: int = 4096
    deadline_s: float = 10.0
    connect_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises ConfigError on values that cannot work, RDMA without a device among them: Mooncake
        would go on over TCP and not say so."""
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(f"mooncake: protocol is {self.protocol!r}: tcp or rdma")
        if self.protocol == "rdma":
            devices = Path("/sys/class/infiniband")
            if not devices.is_dir() or not any(devices.iterdir()):
                raise ConfigError("mooncake: protocol rdma, and this machine has no RDMA device")
            if os.environ.get("MC_FORCE_TCP"):
                raise ConfigError("mooncake: protocol rdma, and MC_FORCE_TCP is set")
        times = (self.deadline_s, self.connect_s)
        if min(self.threads, self.queue_max) < 1 or not all(0 < t < 86400 for t in times):
            raise ConfigError("mooncake: threads and queue_max must be at least 1, times > 0")
        if self.buffer_bytes < 1 or self.bounce_bytes < mmap.PAGESIZE:
            raise ConfigError("mooncake: buffer_bytes or bounce_bytes (at least a page)")


class MooncakeStore:
    """See `base.Shared`. Pieces in the arena are moved in place."""

    tier = Tier.OBJECT

    def __init__(
        self,
        settings: Settings,
        arena: Arena,
        lost: Callable[[str], None] | None = None,
        sealer: Sealer | None = None,
    ) -> None:
        """Connects in the background. Raises ConfigError where Mooncake is not installed."""
        if why := missing():
            raise ConfigError(f"mooncake: {why}")
        self.settings = settings
        self.transport = settings.protocol
        self._counts = Counts()
        self._arena = arena
        self._sealer = sealer
        bounce_bytes = max(settings.bounce_bytes, SEALED_BYTES if sealer is not None else 0)
        self._bounce = _Bounce(settings.threads, bounce_bytes)
        self._process = _Process(settings, arena, self._bounce, self._counts, lost)
        self._workers = Workers(
            "kvatlas-mooncake",
            self._counts,
            threads=settings.threads,
            queue_max=settings.queue_max,
            deadline_s=settings.deadline_s,
        )

    @property
    def counts(self) -> dict[str, int]:
        """Failures by reason."""
        return self._counts.all()

    def write(self, pieces: Sequence[Piece], done: Finish) -> None:
        """See `base.Store`."""
        self._workers.run("write", pieces, self._grouped(pieces, self._move("write")), done)

    def read(self, pieces: Sequence[Piece], done: Finish) -> None:
        """See `base.Store`."""
        self._workers.run("read", pieces, self._grouped(pieces, self._move("read")), done)

    def find(self, names: Sequence[bytes], done: Finish) -> None:
        """See `base.Shared`."""
        pieces = asked(names)
        self._workers.run("find", pieces, self._grouped(pieces, self._find), done)

    def delete(self, names: Sequence[bytes]) -> None:
        """See `base.Store`. Raises StoreError where the master cannot be asked."""
        until = time.monotonic() + self.settings.deadline_s
        for start in range(0, len(names), GROUP):
            items = tuple(Item(name) for name in names[start : start + GROUP])
            ends = self._process.ask("delete", items, until)
            if ends is None or any(end.why for end in ends):
                raise StoreError("mooncake: the master did not remove it")

    def scan(self) -> Iterator[Entry]:
        """See `base.Store`; sizes only. Raises StoreError and OSError."""
        if not self.settings.admin_url:
            return
        url = self.settings.admin_url + "/get_all_keys"
        with urllib.request.urlopen(url, timeout=self.settings.deadline_s) as answer:
            said = answer.read(KEYS_BYTES_MAX).decode("utf-8", "replace")
        names = [name for key in said.split() if (name := self._name(key)) is not None]
        for start in range(0, len(names), GROUP):
            part = names[start : start + GROUP]
            until = time.monotonic() + self.settings.deadline_s
            ends = self._process.ask("size", tuple(map(Item, part)), until)
            if ends is None:
                raise StoreError("mooncake: the master does not answer")
            for name, end in zip(part, ends, strict=True):
                if end.size_bytes > HEADER_BYTES:
                    yield Entry(name, end.size_bytes - HEADER_BYTES)

    def labels(self) -> None:
        """See `base.Shared`: its client reads whole values alone, so it is not asked."""

    def close(self) -> None:
        """See `base.Store`: the client's process is gone afterwards."""
        self._process.close()
        if self._workers.close():
            self._bounce.close()

    # -- many pieces at a time --------------------------------------------------------------------

    def _grouped(self, pieces: Sequence[Piece], act: Callable[[Batch, list[Piece]], None]) -> Task:
        """A thread takes many pieces of an operation at a time: one call for all of them."""
        waiting = {id(piece): piece for piece in pieces}
        lock = threading.Lock()

        def take() -> Piece | None:
            with lock:
                return waiting.pop(next(iter(waiting))) if waiting else None

        def task(batch: Batch, piece: Piece) -> bool:
            with lock:
                waiting.pop(id(piece), None)
            group = [piece]
            while len(group) < GROUP and (other := take()) is not None:
                if batch.start(other):
                    group.append(other)
            try:
                act(batch, group)
            finally:
                for other in group[1:]:
                    let_go(other, self._counts)
            return False

        return task

    def _find(self, batch: Batch, group: list[Piece]) -> None:
        items = tuple(Item(piece.name) for piece in group)
        self._settle(batch, group, self._process.ask("find", items, batch.until))

    def _settle(self, batch: Batch, group: Sequence[Piece], ends: Sequence[End] | None) -> None:
        for n, piece in enumerate(group):
            if ends is None:
                late = time.monotonic() >= batch.until
                batch.settle(piece, Why.LATE if late else Why.IO)
            else:
                batch.settle(piece, Why(ends[n].why) if ends[n].why else None)

    def _move(self, what: str) -> Callable[[Batch, list[Piece]], None]:
        into = what == "read"

        def act(batch: Batch, group: list[Piece]) -> None:
            fit = [piece for piece in group if framing.fit(piece, into=into)]
            for piece in group:
                if piece not in fit:
                    batch.settle(piece, Why.INVALID)
            places = [(piece, self._arena.offset_of(piece.view)) for piece in fit]
            if what == "write" and self._sealer is not None:
                places = [(piece, None) for piece in fit]
            inside = [(piece, at) for piece, at in places if at is not None]
            if inside:
                items = tuple(self._item(piece, at) for piece, at in inside)
                ends = self._process.ask(what, items, batch.until)
                if self._sealer is not None and ends is not None:
                    for n, (piece, _) in enumerate(inside):
                        batch.settle(piece, self._open(batch, piece, items[n], ends[n]))
                else:
                    self._ended(batch, [piece for piece, _ in inside], ends)
            outside = [piece for piece, at in places if at is None]
            self._by_bounce(what, batch, outside)

        return act

    def _by_bounce(self, what: str, batch: Batch, waiting: list[Piece]) -> None:
        """Values that lie outside of the arena, as many at a time as have room."""
        view, base = self._bounce.mine()
        while waiting:
            placed: list[tuple[Piece, int]] = []
            at = 0
            while waiting and at + waiting[0].view.nbytes <= len(view):
                piece = waiting.pop(0)
                placed.append((piece, at))
                at += piece.view.nbytes
            if not placed:
                batch.settle(waiting.pop(0), Why.INVALID)  # too large for that
                continue
            labels = [b""] * len(placed)
            if what == "write":
                placed, labels = self._put(batch, view, placed)
            items = tuple(
                self._item(piece, base + at, bounced=True, label=label)
                for (piece, at), label in zip(placed, labels, strict=True)
            )
            ends = self._process.ask(what, items, batch.until) if items else ()
            for n, (piece, at) in enumerate(placed if what == "read" and ends else ()):
                stored = view[at : at + piece.view.nbytes]
                if ends and self._sealer is not None:
                    batch.settle(piece, self._open(batch, piece, items[n], ends[n], stored))
                elif ends and not ends[n].why:
                    piece.view[:] = stored
            if what == "write" or self._sealer is None or ends is None:
                self._ended(batch, [piece for piece, _ in placed], ends)

    def _put(
        self, batch: Batch, view: memoryview, placed: list[tuple[Piece, int]]
    ) -> tuple[list[tuple[Piece, int]], list[bytes]]:
        """Into the bounce memory, sealed where that is wanted; what is there, and its labels."""
        there: list[tuple[Piece, int]] = []
        labels: list[bytes] = []
        for piece, at in placed:
            room = view[at : at + piece.view.nbytes]
            label = b""
            if self._sealer is None:
                room[:] = piece.view
            else:
                try:
                    made = framing.coded(piece, Codec.RAW, self._sealer, room)
                except KeyMissing:
                    batch.settle(piece, Why.NO_KEY)
                    continue
                if made is None:  # its bytes were wrong before they came here
                    batch.settle(piece, Why.DAMAGED)
                    continue
                label = made[0]
            there.append((piece, at))
            labels.append(label)
        return there, labels

    def _open(
        self, batch: Batch, piece: Piece, item: Item, end: End, stored: memoryview | None = None
    ) -> Why | None:
        """What a sealed value turned out to be; in place, or from ``stored``. One that was removed
        while it was read is gone, not damaged: looked at once more."""
        for again in (False, True):
            if end.why:
                return Why(end.why)
            label = framing.unpack(end.label)
            verdict = framing.judge(
                label, piece, piece.view.nbytes, stored=stored, sealer=self._sealer
            )
            if verdict is not Verdict.BROKEN or again:
                break
            ends = self._process.ask("read", (item,), batch.until)
            if ends is None:
                return Why.IO
            (end,) = ends
        verdict.count(self._counts)
        if verdict.goes:
            self._process.ask("delete", (Item(piece.name),), batch.until)
        if verdict.missing:
            return Why.MISSING
        wrong = Why.DAMAGED if verdict is Verdict.BROKEN else Why.FOREIGN
        return None if verdict is Verdict.RIGHT else wrong

    def _ended(self, batch: Batch, group: Sequence[Piece], ends: Sequence[End] | None) -> None:
        for piece, end in zip(group, ends or (), strict=False):
            if end.checksum:
                piece.checksum, piece.index = checksum_int(end.checksum), end.index
                piece.tenant, piece.fingerprint = end.tenant, end.fingerprint
        self._settle(batch, group, ends)

    def _item(
        self, piece: Piece, offset: int, *, bounced: bool = False, label: bytes = b""
    ) -> Item:
        return Item(
            piece.name,
            offset,
            piece.view.nbytes,
            bounced,
            checksum_bytes(piece.checksum),
            piece.index,
            piece.tenant,
            piece.fingerprint,
            self._sealer is not None,
            label,
        )

    def _name(self, key: str) -> bytes | None:
        start = self.settings.prefix + "v:"
        try:
            return bytes.fromhex(key[len(start) :]) if key.startswith(start) else None
        except ValueError:
            return None


def missing() -> str:
    """Why its client cannot run here, and what to do; "" where it can. Nothing is imported."""
    if importlib.util.find_spec("mooncake") is None:
        return "its client is not installed: pip install 'kvatlas[mooncake]'"
    try:
        ctypes.CDLL(VERBS)
    except OSError as error:
        return f"its client needs {VERBS}, also for TCP ({error}): install libibverbs1"
    return ""


class _Bounce:
    """Memory that both processes map, a part of it for each thread of ours."""

    def __init__(self, threads: int, size_bytes: int) -> None:
        self.size_bytes = threads * size_bytes
        self.fd = os.memfd_create("kvatlas-mooncake", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size_bytes)
        self._map = mmap.mmap(self.fd, self.size_bytes)
        self._part = size_bytes
        self._local = threading.local()
        self._lock = threading.Lock()
        self._taken = 0

    def mine(self) -> tuple[memoryview, int]:
        """This thread's part, and where it begins."""
        at: int | None = getattr(self._local, "at", None)
        if at is None:
            with self._lock:
                at = self._taken
                self._taken += self._part
            self._local.at = at
        return memoryview(self._map)[at : at + self._part], at

    def close(self) -> None:
        """Again: nothing. What a part of is still held goes with the last who holds it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):
            self._map.close()


class _Process:
    """The client's process, started anew whenever it ended."""

    def __init__(
        self,
        settings: Settings,
        arena: Arena,
        bounce: _Bounce,
        counts: Counts,
        lost: Callable[[str], None] | None,
    ) -> None:
        self._counts = counts
        self._master = settings.master
        self._life = Life(counts, lost)
        fds = arena.fileno(), bounce.fd
        kind = Kind(
            "mooncake",
            "kvatlas.dataplane.tiers.mooncake_client",
            fds,
            lambda end: msgspec.json.encode(_client(settings, *fds, bounce.size_bytes, end)),
            mooncake_wire.from_client,
            self._take,
            ready_s=settings.connect_s,
        )
        self._child = Child(kind, counts)

    def ask(self, what: str, items: tuple[Item, ...], until: float) -> tuple[End, ...] | None:
        """None: it did not answer, and nothing of it goes on."""
        answer = self._child.ask(lambda number: Job(number, what, items), until)
        return answer.ends if isinstance(answer, Answer) else None

    def _take(self, message: object) -> bool | Answer | None:
        match message:
            case Ready():
                return True
            case Seen(life):
                self._life.seen(life, f"the master at {self._master} has lost its index")
            case Answer(_, _, counts):
                for name, count in counts.items():
                    self._counts.add(name, count)
                return message
        return None

    def close(self) -> None:
        """It is gone, and whoever waits hears of that."""
        self._child.close()


def _client(one: Settings, arena: int, bounce: int, bounce_bytes: int, end: int) -> Client:
    return Client(
        arena,
        bounce,
        bounce_bytes,
        end,
        one.hostname,
        one.metadata,
        one.protocol,
        one.devices,
        one.master,
        one.buffer_bytes,
        one.threads,
        one.prefix,
    )
