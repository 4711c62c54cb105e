"""Values in a Mooncake Store, put from and got into registered arena memory by its own client.

Mooncake (mooncake-transfer-engine, tested with 0.3.13) replicates, places and evicts; its master
alone knows where a value lies, and after a restart it knows nothing. A marker with a random life in
it tells: who finds it gone or changed has lost all that was there, and says so (``lost``).

Its calls block in C++ and cannot be ended from outside. One that hangs costs its thread until it
returns, its operation fails by the deadline, and the view is let go of (`Piece.released`) only when
the call is over. Two of them, setup and close, keep the whole interpreter from running while the
master does not answer (0.3.13, seen here): setup is tried in a process of its own first, and close
is left out where the master has just failed to answer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvatlas.core.records import Tier
from kvatlas.dataplane.tiers import framing
from kvatlas.dataplane.tiers.base import Counts, Entry, Finish, Life, Piece, let_go
from kvatlas.dataplane.tiers.framing import HEADER_BYTES, Verdict
from kvatlas.dataplane.tiers.work import Batch, Task, Why, Workers
from kvatlas.errors import ConfigError, StoreError

GROUP = 32  # pieces in one call: a large batch costs a third of the same in several threads
BODY = GROUP * HEADER_BYTES  # in a bounce buffer; labels lie before it
LOOK_S = 1.0  # between two looks at the marker
KEYS_BYTES_MAX = 256 << 20
_GONE, _FULL, _SIZES = -704, (-200,), (-600, -800)  # of mooncake-store's ErrorCode
T = TypeVar("T")
_Act = Callable[[Batch, list[Piece]], None]
_TRY = """
import os, sys
from mooncake.store import MooncakeDistributedStore
host, metadata, protocol, devices, master = sys.argv[1:]
code = MooncakeDistributedStore().setup(host, metadata, 0, 1 << 20, protocol, devices, master)
os._exit(1 if code else 0)
"""
_LEFT: list[object] = []  # what a call that never returned may still touch


class Settings(msgspec.Struct, frozen=True):
    """Which master, and how. ``segment_bytes``: memory that this node gives to the store.

    ``admin_url``: the master's HTTP port, for `scan`; without it the store counts as empty after a
    restart of ours. ``bounce_bytes``: per thread, for values outside the registered memory.
    ``connect_s``: for one try to connect, in the background.
    """

    master: str = "127.0.0.1:50051"
    hostname: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
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
        if self.segment_bytes < 0 or self.buffer_bytes < 1 or self.bounce_bytes <= BODY:
            raise ConfigError(
                f"mooncake: segment_bytes, buffer_bytes or bounce_bytes (above {BODY})"
            )


class MooncakeStore:
    """See `base.Store`. ``memory`` is registered: pieces in it are moved in place."""

    tier = Tier.OBJECT

    def __init__(
        self,
        settings: Settings,
        memory: Sequence[memoryview] = (),
        lost: Callable[[str], None] | None = None,
    ) -> None:
        """Connects in the background. Raises ConfigError where Mooncake is not installed."""
        self._kind = _imported()
        self.settings = settings
        self.transport = settings.protocol
        self._counts = Counts()
        self._life = Life(self._counts, lost)
        self._memory = [_Memory(view) for view in memory]
        self._local = threading.local()
        self._bounces: list[_Memory] = []
        self._lock = threading.Lock()
        self._client: Any = None
        self._why = ""
        self._looked = 0.0
        self._closed = threading.Event()
        self._ready = threading.Event()
        self._workers = Workers(
            "kvatlas-mooncake",
            self._counts,
            threads=settings.threads,
            queue_max=settings.queue_max,
            deadline_s=settings.deadline_s,
        )
        self._opener = threading.Thread(target=self._open, name="kvatlas-mooncake", daemon=True)
        self._opener.start()

    @property
    def counts(self) -> dict[str, int]:
        """Failures by reason."""
        return self._counts.all()

    def write(self, pieces: Sequence[Piece], done: Finish) -> None:
        """See `base.Store`."""
        self._workers.run("write", pieces, self._grouped(pieces, self._write), done)

    def read(self, pieces: Sequence[Piece], done: Finish) -> None:
        """See `base.Store`."""
        self._workers.run("read", pieces, self._grouped(pieces, self._read), done)

    def delete(self, names: Sequence[bytes]) -> None:
        """See `base.Store`. Raises StoreError where the master cannot be asked."""

        def act() -> None:
            for name in names:
                code = self._client.remove(self._key(name), True)
                if code not in (0, _GONE):
                    raise StoreError(f"mooncake: remove failed with {code}")

        if names:
            self._by_deadline(act)

    def scan(self) -> Iterator[Entry]:
        """See `base.Store`; sizes only. Raises StoreError and OSError."""
        if not self.settings.admin_url:
            return
        url = self.settings.admin_url + "/get_all_keys"
        with urllib.request.urlopen(url, timeout=self.settings.deadline_s) as answer:
            said = answer.read(KEYS_BYTES_MAX).decode("utf-8", "replace")
        for key in said.split():
            name = self._name(key)
            if name is None:
                continue
            size = self._by_deadline(partial(self._size, key))
            if size > HEADER_BYTES:
                yield Entry(name, size - HEADER_BYTES)

    def close(self) -> None:
        """See `base.Store`. What hangs in a call is left to it, and counted."""
        if self._closed.is_set():
            return
        self._closed.set()
        clean = self._workers.close()
        self._opener.join(self.settings.deadline_s)
        if self._client is not None and clean:
            try:
                self._in_time(self._shut)
                return
            except StoreError:
                pass
        if self._client is not None or self._opener.is_alive():
            self._counts.add("left_open")
            _LEFT.extend([self._client, *self._memory, *self._bounces])

    # -- opening and ending -----------------------------------------------------------------------

    def _open(self) -> None:
        one = self.settings
        while not self._closed.is_set():
            code = -1
            if self._try_setup():
                client = self._kind()
                memory = (one.segment_bytes, one.buffer_bytes)
                code = client.setup(
                    one.hostname, one.metadata, *memory, one.protocol, one.devices, one.master
                )
            if code == 0 and self._closed.is_set():
                client.close()
                return
            if code == 0:
                self._client = client
                if all(self._register(memory) for memory in self._memory):
                    self._look()
                    self._why = ""
                    self._ready.set()
                    return
                self._why = "the arena cannot be registered"
                self._ready.set()
                return
            self._why = f"no connection to the master at {one.master}"
            self._ready.set()
            self._closed.wait(LOOK_S)
            self._ready.clear()

    def _try_setup(self) -> bool:
        """Whether a client elsewhere gets through to the master, now and in time."""
        one = self.settings
        words = [one.hostname, one.metadata, one.protocol, one.devices, one.master]
        with subprocess.Popen(
            [sys.executable, "-c", _TRY, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as child:
            until = time.monotonic() + self.settings.connect_s
            while child.poll() is None:
                if time.monotonic() > until or self._closed.wait(0.02):
                    child.kill()
            return child.returncode == 0

    def _register(self, memory: _Memory) -> bool:
        return bool(self._client.register_buffer(memory.address, memory.size_bytes) == 0)

    def _shut(self) -> None:
        self._client.is_exist(self.settings.prefix + "life")  # may hang, and harms nobody
        for memory in (*self._memory, *self._bounces):
            self._client.unregister_buffer(memory.address)
        self._client.close()
        self._client = None
        for memory in (*self._memory, *self._bounces):
            memory.release()

    def _look(self) -> None:
        """Whether the master still knows what it knew: the marker says so."""
        with self._lock:
            if self._looked and time.monotonic() - self._looked < LOOK_S:
                return
            self._looked = time.monotonic()
        key = self.settings.prefix + "life"
        found = bytes(self._client.get(key))
        if not found:
            if self._client.put(key, os.urandom(16)) != 0:
                return  # it cannot be asked now
            found = bytes(self._client.get(key))
        self._life.seen(found, f"the master at {self.settings.master} has lost its index")

    def _size(self, key: str) -> int:
        return int(self._client.get_size(key))

    def _by_deadline(self, act: Callable[[], T]) -> T:
        """Raises StoreError where there is no connection, or none in time."""
        if not self._ready.wait(self.settings.deadline_s) or self._why:
            raise StoreError(f"mooncake: {self._why or 'not connected in time'}")
        return self._in_time(act)

    def _in_time(self, act: Callable[[], T]) -> T:
        """In a thread that may be left behind. Raises StoreError."""
        answers: list[T] = []
        problems: list[Exception] = []

        def run() -> None:
            try:
                answers.append(act())
            except Exception as problem:
                problems.append(problem)

        thread = threading.Thread(target=run, name="kvatlas-mooncake-call", daemon=True)
        thread.start()
        thread.join(self.settings.deadline_s)
        if thread.is_alive():
            self._counts.add("hanging")
            raise StoreError("mooncake: no answer in time")
        if problems:
            raise StoreError(str(problems[0])) from problems[0]
        return answers[0]

    # -- one piece --------------------------------------------------------------------------------

    def _grouped(self, pieces: Sequence[Piece], act: _Act) -> Task:
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
                act(batch, [one for one in group if self._may(batch, one)])
            finally:
                for other in group[1:]:
                    let_go(other, self._counts)
            return False

        return task

    def _write(self, batch: Batch, group: list[Piece]) -> None:
        headers = {id(piece): framing.pack(piece) for piece in group}
        for piece in group:
            if headers[id(piece)] is None:
                batch.settle(piece, Why.DAMAGED)
        good = [piece for piece in group if headers[id(piece)]]
        for places in self._placed(batch, good):
            bounce = self._bounce()
            for place in places:
                bounce.view[place.head : place.head + HEADER_BYTES] = (
                    headers[id(place.piece)] or b""
                )
                if place.bounced:
                    bounce.view[BODY : BODY + place.size] = place.piece.view
            codes = self._client.batch_put_from_multi_buffers(*self._call(places, bounce))
            for place, code in zip(places, codes, strict=True):
                why = None if code == 0 else Why.FULL if code in _FULL else Why.IO
                if why is Why.IO:
                    self._counts.add(f"code_{code}")
                batch.settle(place.piece, why)

    def _read(self, batch: Batch, group: list[Piece]) -> None:
        for places in self._placed(batch, group, into=True):
            bounce = self._bounce()
            codes = self._client.batch_get_into_multi_buffers(*self._call(places, bounce))
            for place, code in zip(places, codes, strict=True):
                piece = place.piece
                if place.bounced and code == HEADER_BYTES + place.size:
                    piece.view[:] = bounce.view[BODY : BODY + place.size]
                header = bounce.view[place.head : place.head + HEADER_BYTES]
                batch.settle(piece, self._verdict(code, piece, header))

    def _placed(
        self, batch: Batch, group: list[Piece], *, into: bool = False
    ) -> Iterator[list[_Place]]:
        """What can be moved in place, together; then what has to go by the bounce buffer, one by
        one; what is too large for that is settled."""
        inside: list[_Place] = []
        outside: list[_Place] = []
        for piece in group:
            address = self._address(piece)
            if into and piece.view.readonly:
                batch.settle(piece, Why.INVALID)
            elif address is not None:
                inside.append(_Place(piece, len(inside) * HEADER_BYTES, address))
            elif piece.view.nbytes <= self.settings.bounce_bytes - BODY:
                outside.append(_Place(piece, 0, self._bounce().address + BODY, bounced=True))
            else:
                batch.settle(piece, Why.INVALID)
        if inside:
            yield inside
        for place in outside:
            yield [place]

    def _call(
        self, places: list[_Place], bounce: _Memory
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        keys = [self._key(place.piece.name) for place in places]
        addresses = [[bounce.address + place.head, place.address] for place in places]
        return keys, addresses, [[HEADER_BYTES, place.size] for place in places]

    def _verdict(self, code: int, piece: Piece, header: memoryview) -> Why | None:
        key = self._key(piece.name)
        if code == _GONE:
            self._look()
            return Why.MISSING
        if code != HEADER_BYTES + piece.view.nbytes:
            if code in _SIZES or code >= 0:
                size = self._client.get_size(key)
                if size >= 0 and size != HEADER_BYTES + piece.view.nbytes:
                    return Why.DAMAGED
            self._counts.add(f"code_{code}")
            self._look()
            return Why.IO
        label = framing.unpack(header)
        verdict = framing.judge(label, piece, piece.view.nbytes)
        if verdict is Verdict.BROKEN:
            self._counts.add("quarantined")
            self._client.remove(key, True)
        return None if verdict is Verdict.RIGHT else Why.DAMAGED

    def _may(self, batch: Batch, piece: Piece) -> bool:
        """Whether there is a connection; settles the piece where there is none."""
        if not framing.fit(piece):
            batch.settle(piece, Why.INVALID)
            return False
        if not self._ready.wait(max(0.0, batch.until - time.monotonic())):
            batch.settle(piece, Why.LATE)
            return False
        if self._why or self._client is None:
            batch.settle(piece, Why.IO)
            return False
        return True

    def _address(self, piece: Piece) -> int | None:
        """Where its view lies, if that is registered."""
        if piece.view.readonly:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(piece.view))
        end = address + piece.view.nbytes
        inside = any(m.address <= address and end <= m.end for m in self._memory)
        return address if inside else None

    def _bounce(self) -> _Memory:
        """This thread's own."""
        made: _Memory | None = getattr(self._local, "bounce", None)
        if made is None:
            made = _Memory(memoryview(mmap.mmap(-1, self.settings.bounce_bytes)))
            if not self._register(made):
                raise OSError("mooncake: a buffer cannot be registered")
            self._local.bounce = made
            with self._lock:
                self._bounces.append(made)
        return made

    def _key(self, name: bytes) -> str:
        return f"{self.settings.prefix}v:{name.hex()}"

    def _name(self, key: str) -> bytes | None:
        start = self.settings.prefix + "v:"
        try:
            return bytes.fromhex(key[len(start) :]) if key.startswith(start) else None
        except ValueError:
            return None


class _Place:
    """A piece, where in the bounce buffer its label is, and the address of its bytes."""

    def __init__(self, piece: Piece, head: int, address: int, *, bounced: bool = False) -> None:
        self.piece = piece
        self.head = head
        self.address = address
        self.bounced = bounced
        self.size = piece.view.nbytes


class _Memory:
    """A stretch of memory that stays where it is while this is alive."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._held: ctypes.c_char | None = ctypes.c_char.from_buffer(view)
        self.address = ctypes.addressof(self._held)
        self.size_bytes = view.nbytes
        self.end = self.address + view.nbytes

    def release(self) -> None:
        self._held = None


def _imported() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"mooncake: its client cannot be loaded ({error}): pip install 'kvatlas[mooncake]'"
        ) from error
    return MooncakeDistributedStore
