"""The process in which Mooncake's own client lives: it may hang or die, and nothing else with it.

Some of its calls keep the whole interpreter from running while the master does not answer (setup
and close: 90 s were seen with 0.3.13), and its threads may end the process at exit. Here that ends
this process alone: whoever started it kills it when an answer is late, and starts another.

Whoever asks it to move values waits in a loop that never sleeps (0.3.13), and takes a core from the
threads that move them. Here those who wait do nothing else, and give way (`WAIT_NICE`).
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from kvatlas.dataplane.arena import Arena, address_of
from kvatlas.dataplane.records import checksum_bytes, checksum_int
from kvatlas.dataplane.tiers import child, framing, mooncake_wire
from kvatlas.dataplane.tiers.base import Piece
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
from kvatlas.dataplane.tiers.work import Why

LOOK_S = 1.0  # between two looks at the marker
_GONE, _FULL, _SIZES = -704, (-200,), (-600, -800)  # of mooncake-store's ErrorCode
WAIT_NICE = 5  # a third of a turn; more would wait for long where a machine is busy


Items = tuple[Item, ...]


class Memory:
    """A stretch of memory that stays where it is while this is alive."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.address = address_of(view)


class Served:
    """One client of a master, at work for the other side of a socket."""

    def __init__(self, given: Client, kind: Any) -> None:
        """Connects. Raises OSError where the master does not let it."""
        self._prefix = given.prefix
        self._socket = socket.socket(fileno=given.socket)
        self._arena = Arena.open(given.arena)
        self._shared = Memory(self._arena.memory)
        self._bounce = Memory(memoryview(mmap.mmap(given.bounce, given.bounce_bytes)))
        self._local = threading.local()
        self._lock = threading.Lock()
        self._looked = 0.0
        self._client = kind()
        code = self._client.setup(
            given.host,
            given.metadata,
            0,
            given.buffer_bytes,
            given.protocol,
            given.devices,
            given.master,
        )
        if code:
            raise OSError(f"setup failed with {code}")
        for memory in (self._shared, self._bounce):
            self._register(memory)
        self._threads = ThreadPoolExecutor(given.threads, "mooncake")
        self._waiters = ThreadPoolExecutor(given.threads, "mooncake-wait", _give_way)

    def _register(self, memory: Memory) -> None:
        if self._client.register_buffer(memory.address, memory.view.nbytes):
            raise OSError("memory cannot be registered")

    def serve(self) -> None:
        """Until the other side ends. Raises OSError then."""
        self._look()
        self._send(Ready())
        while True:
            self._threads.submit(self._work, mooncake_wire.job(self._socket))

    def _send(self, message: Answer | Ready | Seen) -> None:
        with self._lock:
            child.send(self._socket, message)

    def _work(self, job: Job) -> None:
        act = {
            "write": self._write,
            "read": self._read,
            "find": self._find,
            "delete": self._delete,
            "size": self._size,
        }[job.what]
        counts: Counter[str] = Counter()
        try:
            ends = act(job.items, counts)
        except Exception:  # Mooncake's, or ours: the other side counts it
            counts["fault"] += 1
            ends = [End(Why.IO)] * len(job.items)
        try:
            self._send(Answer(job.number, tuple(ends), counts))
        except OSError:
            os._exit(0)

    # -- what it can do -------------------------------------------------------------------------

    def _write(self, items: Items, counts: Counter[str]) -> list[End]:
        ends = [End(Why.DAMAGED)] * len(items)
        headers = [item.label or framing.pack(self._piece(item)) for item in items]
        right = [n for n, header in enumerate(headers) if header is not None]
        heads = self._heads()
        for turn in _apart(items, right):
            for at, n in enumerate(turn):
                heads.view[at * HEADER_BYTES :][:HEADER_BYTES] = headers[n] or b""
            going = [items[n] for n in turn]
            codes = self._moved(self._client.batch_put_from_multi_buffers, going, heads)
            for n, code in zip(turn, codes, strict=True):
                why = "" if code == 0 else Why.FULL if code in _FULL else Why.IO
                if why == Why.IO:
                    counts[f"code_{code}"] += 1
                ends[n] = End(why)
        return ends

    def _read(self, items: Items, counts: Counter[str]) -> list[End]:
        ends = [End(Why.IO)] * len(items)
        again: list[int] = []
        for turn in _apart(items, range(len(items))):
            for n, end in self._got(items, turn, counts):
                ends[n] = end
                if end.why == Why.DAMAGED:
                    again.append(n)
        # A value that was removed while it was read is gone, not damaged: look once more.
        for n in again:
            ((_, ends[n]),) = self._got(items, [n], counts)
            if ends[n].why == Why.DAMAGED:
                counts["quarantined"] += 1
                self._client.remove(self._key(items[n].name), True)
        return ends

    def _got(
        self, items: Items, turn: list[int], counts: Counter[str]
    ) -> Iterator[tuple[int, End]]:
        heads = self._heads()
        going = [items[n] for n in turn]
        codes = self._moved(self._client.batch_get_into_multi_buffers, going, heads)
        for at, (n, code) in enumerate(zip(turn, codes, strict=True)):
            header = heads.view[at * HEADER_BYTES :][:HEADER_BYTES]
            yield n, self._verdict(code, items[n], header, counts)

    def _verdict(self, code: int, item: Item, header: memoryview, counts: Counter[str]) -> End:
        want = HEADER_BYTES + item.size_bytes
        if code == _GONE:
            self._look()
            return End(Why.MISSING)
        if code != want:
            if code in _SIZES or code >= 0:
                size = self._client.get_size(self._key(item.name))
                if size >= 0 and size != want:
                    return End(Why.FOREIGN)
            counts[f"code_{code}"] += 1
            self._look()
            return End(Why.IO)
        if item.sealed:
            return End(label=bytes(header))
        piece = self._piece(item)
        verdict = framing.judge(framing.unpack(header), piece, item.size_bytes)
        if verdict is not Verdict.RIGHT:
            return End(Why.DAMAGED if verdict is Verdict.BROKEN else Why.FOREIGN)
        checksum = checksum_bytes(piece.checksum)
        return End("", checksum, piece.index, piece.tenant, piece.fingerprint)

    def _find(self, items: Items, counts: Counter[str]) -> list[End]:
        codes = self._client.batch_is_exist([self._key(item.name) for item in items])
        if 1 not in codes:
            self._look()
        return [End("" if c == 1 else Why.MISSING if c == 0 else Why.IO) for c in codes]

    def _delete(self, items: Items, counts: Counter[str]) -> list[End]:
        codes = [self._client.remove(self._key(item.name), True) for item in items]
        return [End("" if code in (0, _GONE) else Why.IO) for code in codes]

    def _size(self, items: Items, counts: Counter[str]) -> list[End]:
        return [End(size_bytes=self._client.get_size(self._key(item.name))) for item in items]

    def _look(self) -> None:
        """Whether the master still knows what it knew: the marker says so."""
        with self._lock:
            if self._looked and time.monotonic() - self._looked < LOOK_S:
                return
            self._looked = time.monotonic()
        key = self._prefix + "life"
        found = bytes(self._client.get(key))
        if not found:
            if self._client.put(key, os.urandom(16)) != 0:
                return  # it cannot be asked now
            found = bytes(self._client.get(key))
        self._send(Seen(found))

    # -- places ---------------------------------------------------------------------------------

    def _memory(self, item: Item) -> Memory:
        return self._bounce if item.bounced else self._shared

    def _piece(self, item: Item) -> Piece:
        view = self._memory(item).view[item.offset : item.offset + item.size_bytes]
        checksum = checksum_int(item.checksum)
        return Piece(item.name, view, checksum, item.index, item.tenant, item.fingerprint)

    def _moved(self, call: Callable[..., list[int]], items: list[Item], heads: Memory) -> list[int]:
        """What ``call`` says of each item: bytes, or a code."""
        places = [
            [heads.address + n * HEADER_BYTES, self._memory(item).address + item.offset]
            for n, item in enumerate(items)
        ]
        sizes = [[HEADER_BYTES, item.size_bytes] for item in items]
        keys = [self._key(item.name) for item in items]
        return self._waiters.submit(call, keys, places, sizes).result()

    def _heads(self) -> Memory:
        """This thread's own, for labels."""
        made: Memory | None = getattr(self._local, "heads", None)
        if made is None:
            made = Memory(memoryview(mmap.mmap(-1, GROUP * HEADER_BYTES)))
            self._register(made)
            self._local.heads = made
        return made

    def _key(self, name: bytes) -> str:
        return f"{self._prefix}v:{name.hex()}"


def _give_way() -> None:
    """The calling thread alone, as Linux takes it."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, min(19, nice + WAIT_NICE))


def _apart(items: Items, numbers: Iterable[int]) -> Iterator[list[int]]:
    """In turns without a name twice: Mooncake mixes up what a batch names twice."""
    left = list(numbers)
    while left:
        seen: set[bytes] = set()
        turn: list[int] = []
        rest: list[int] = []
        for n in left:
            (rest if items[n].name in seen else turn).append(n)
            seen.add(items[n].name)
        yield turn
        left = rest


def _work() -> None:
    given = msgspec.json.decode(sys.argv[1], type=Client)
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415  it loads much

    Served(given, MooncakeDistributedStore).serve()


if __name__ == "__main__":
    child.serve(_work)
