"""Stores beyond the node, each beside the plainest thing that moves the same bytes.

Values of 1 MiB and of V4 Flash's body (985,664 bytes per 256 tokens), 32 at a time, in alternating
rounds. Our side verifies every byte by checksum, the other side does not. Valkey: a raw socket that
reads into one buffer, and valkey-py. Peer: a bare socket between two processes, one stream that
fills the same places; by NIXL (UCX reads from the other process's memory) NIXL alone, too, and a
memcpy out of the other's mapped arena. Mooncake: its own client, from as many threads and in one
batch, and once more from a thread that gives way while it waits, as ours do. S3: obstore alone
against the same server (moto, Python, slow: it shows what we add, not what S3 can do).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.dataplane import finished
from benchmarks.peers import ROOT
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.tiers import mooncake, mooncake_client, nixl, peer, peer_nixl, valkey
from kvatlas.dataplane.tiers.base import Piece, Store
from kvatlas.dataplane.tiers.framing import HEADER_BYTES

sys.path.insert(0, str(ROOT / "tests" / "engines"))
from nixl_kit import nixl_packages
from stores_kit import start_valkey
from stores_rigs import MooncakeRig, S3Rig, mooncake_package, s3_packages

SIZES = {"1 MiB": 1 << 20, "V4 body": 985_664}
COUNT = 32
ROUNDS = 40
_Act = Callable[[], object]


def run() -> dict[str, Any]:
    """GB/s (median of rounds) per store, size and side, and ratios; prints a table."""
    figures: dict[str, Any] = {}
    for label, size in SIZES.items():
        with tempfile.TemporaryDirectory() as scratch, _arena() as arena:
            for name, sides in _SIDES.items():
                with sides(Path(scratch), arena, size) as acts:
                    if acts is None:
                        figures[f"{name}, {label}"] = "not installed"
                        continue
                    for what, of in acts.items():
                        figures[f"{name} {what}, {label}"] = _measure(of, size)
    _print(figures)
    return figures


def _measure(of: dict[str, _Act], size: int) -> dict[str, Any]:
    """Rounds in turn; ratios are medians of the rounds' own."""
    for act in of.values():
        act()
    rates: dict[str, list[float]] = {side: [] for side in of}
    spent: dict[str, list[float]] = {side: [] for side in of}
    for _ in range(ROUNDS):
        for side, act in of.items():
            used, started = time.process_time(), time.perf_counter()
            act()
            rates[side].append(COUNT * size / (time.perf_counter() - started) / 1e9)
            spent[side].append((time.process_time() - used) * 1e12 / (COUNT * size))
    ours, *others = of
    ratios = {
        f"kvatlas / {other}": round(
            statistics.median(a / b for a, b in zip(rates[ours], rates[other], strict=True)), 3
        )
        for other in others
    }
    found: dict[str, Any] = {side: round(statistics.median(r), 3) for side, r in rates.items()}
    processor = {side: round(statistics.median(ms)) for side, ms in spent.items()}
    return found | ratios | {"processor ms per GB": processor}


def _print(figures: dict[str, Any]) -> None:
    table = Table(title=f"{COUNT} values at a time, median of {ROUNDS} rounds")
    for head in ("what", "GB/s", "kvatlas / other", "processor ms per GB, this process"):
        table.add_column(head)
    for what, found in figures.items():
        if isinstance(found, str):
            table.add_row(what, found, "", "")
            continue
        rates = ", ".join(
            f"{k} {v:.2f}" for k, v in found.items() if isinstance(v, float) and " / " not in k
        )
        ratios = ", ".join(f"{k[10:]} {v:.2f}" for k, v in found.items() if " / " in k)
        spent = ", ".join(f"{k} {v}" for k, v in found["processor ms per GB"].items())
        table.add_row(what, rates, ratios, spent)
    Console().print(table)


@contextlib.contextmanager
def _arena() -> Iterator[Arena]:
    arena = Arena.create(2 * COUNT << 20, directory=None)
    arena._slots[: COUNT << 20] = bytes(range(256)) * (COUNT << 12)
    try:
        yield arena
    finally:
        arena.close()


def _pieces(arena: Arena, size: int, half: int) -> list[Piece]:
    base = half * (COUNT << 20)
    return [
        Piece(b"unit-%d" % n, arena._slots[base + (n << 20) : base + (n << 20) + size])
        for n in range(COUNT)
    ]


def _reads(store: Store, arena: Arena, size: int) -> _Act:
    return lambda: finished(store.read, _pieces(arena, size, 1))


# -- valkey ---------------------------------------------------------------------------------------


def _plain_valkey(arena: Arena, size: int, port: int) -> tuple[_Act, ...]:
    """Get and set by a raw socket, get and set by valkey-py, and the end of both."""
    import valkey as client  # noqa: PLC0415

    raw = socket.create_connection(("127.0.0.1", port))
    library = client.Valkey(port=port)
    whole = HEADER_BYTES + size
    step = whole + 64
    places = memoryview(mmap.mmap(-1, COUNT * step))

    def ask(*words: bytes) -> None:
        raw.sendall(valkey.command(words))

    def plain_get() -> None:
        want = len(b"$%d\r\n" % whole) + whole + 2
        for n in range(COUNT):
            ask(b"GET", b"kvatlas:v:unit-%d" % n)
            got = 0
            place = places[n * step : n * step + want]
            while got < want:
                got += raw.recv_into(place[got:], 0, socket.MSG_WAITALL)

    def plain_set() -> None:
        for n in range(COUNT):
            start = b"*3\r\n$3\r\nSET\r\n$6\r\nraw-%02d\r\n$%d\r\n" % (n, size)
            raw.sendall(start)
            raw.sendall(_pieces(arena, size, 0)[n].view)
            raw.sendall(b"\r\n")
            raw.recv_into(places, 5)

    def library_set() -> None:
        for n, piece in enumerate(_pieces(arena, size, 0)):
            library.set(f"lib-{n}", piece.view)

    def library_get() -> None:
        for n in range(COUNT):
            library.get(f"kvatlas:v:unit-{n}")

    def end() -> None:
        raw.close()
        library.close()

    return plain_get, plain_set, library_get, library_set, end


@contextlib.contextmanager
def _valkey(scratch: Path, arena: Arena, size: int) -> Iterator[dict[str, dict[str, _Act]]]:
    server = start_valkey(scratch)
    stores = [
        valkey.ValkeyStore(valkey.Settings(port=server.port, streams=n, deadline_s=60))
        for n in (2, 1)
    ]
    finished(stores[0].write, _pieces(arena, size, 0))
    plain_get, plain_set, library_get, library_set, end = _plain_valkey(arena, size, server.port)

    def ours_set() -> None:
        stores[0].delete([b"set-%d" % n for n in range(COUNT)])
        pieces = _pieces(arena, size, 0)
        for n, piece in enumerate(pieces):
            piece.name = b"set-%d" % n
        finished(stores[0].write, pieces)

    read = {
        "kvatlas": _reads(stores[0], arena, size),
        "raw socket": plain_get,
        "valkey-py": library_get,
        "kvatlas, 1 stream": _reads(stores[1], arena, size),
    }
    write = {"kvatlas, deleting first": ours_set, "raw socket": plain_set, "valkey-py": library_set}
    try:
        yield {"get": read, "set": write}
    finally:
        for store in stores:
            store.close()
        end()
        server.kill()


# -- peer -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _peer(scratch: Path, arena: Arena, size: int) -> Iterator[dict[str, dict[str, _Act]]]:
    with _peer_child(size, "tcp") as (_, (peer_port, bare_port, _)):
        stores = [
            peer.PeerStore(peer.Settings("127.0.0.1", peer_port, streams=n, deadline_s=60))
            for n in (2, 1)
        ]
        bare = socket.create_connection(("127.0.0.1", bare_port))
        try:
            yield {
                "get": {
                    "kvatlas": _reads(stores[0], arena, size),
                    "bare socket": lambda: _from_bare(bare, arena, size),
                    "kvatlas, 1 stream": _reads(stores[1], arena, size),
                }
            }
        finally:
            for store in stores:
                store.close()
            bare.close()


def _from_bare(bare: socket.socket, arena: Arena, size: int) -> None:
    bare.sendall(struct.pack("<I", COUNT))
    for piece in _pieces(arena, size, 1):
        got = 0
        while got < size:
            got += bare.recv_into(piece.view[got:], 0, socket.MSG_WAITALL)


@contextlib.contextmanager
def _peer_child(
    size: int, transport: str
) -> Iterator[tuple[subprocess.Popen[str], tuple[int, ...]]]:
    """The other process, and what it says: ports of the agent and of the bare socket, and the
    descriptor of its arena."""
    command = [sys.executable, "-m", "benchmarks.stores", str(size), transport]
    child = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        yield child, tuple(map(int, child.stdout.readline().split()))
    finally:
        child.kill()
        child.wait()


def _serve(size: int, transport: str) -> None:
    """The other process: an agent's dram, and a bare socket that sends the same bytes."""
    from kvatlas.dataplane.tiers.dram import DramStore  # noqa: PLC0415

    with _arena() as source, _arena() as arena:
        dram = DramStore(arena)
        finished(dram.write, _pieces(source, size, 0))
        lends = nixl.Nixl(arena) if transport == "nixl" else None
        if lends is not None:
            lends.wait()
        server = peer.PeerServer(dram, nixl=lends)
        listener = socket.create_server(("127.0.0.1", 0))
        print(server.address[1], listener.getsockname()[1], arena.fileno(), flush=True)
        sock, _ = listener.accept()
        while count := sock.recv(4):
            for piece in _pieces(source, size, 0)[: struct.unpack("<I", count)[0]]:
                sock.sendall(piece.view)


@contextlib.contextmanager
def _nixl(scratch: Path, arena: Arena, size: int) -> Iterator[dict[str, dict[str, _Act]] | None]:
    """The same by NIXL: two agents of one node, past the sockets."""
    packages = nixl_packages(Path(tempfile.mkdtemp(dir=scratch)))
    if packages is None:
        yield None
        return
    sys.path.insert(0, str(packages))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(packages)
    with _peer_child(size, "nixl") as (child, (peer_port, bare_port, fd)):
        ours = nixl.Nixl(arena)
        ours.wait()
        settings = peer.Settings("127.0.0.1", peer_port, deadline_s=60)
        store = peer.PeerStore(settings, nixl=peer_nixl.Reader(arena, ours, only=True))
        there = Arena.open(f"/proc/{child.pid}/fd/{fd}")
        bare = socket.create_connection(("127.0.0.1", bare_port))
        read = _reads(store, arena, size)
        read()
        joined = store.nixl._joined  # type: ignore[union-attr]
        base = COUNT << 20
        steps = [(base + (n << 20), n << 20, size) for n in range(COUNT)]

        def alone() -> None:
            if ours.read(joined.epoch, steps, time.monotonic() + 60):
                raise SystemExit("NIXL alone failed")

        def memcpy() -> None:
            for here, other, length in steps:
                arena.memory[here : here + length] = there.memory[other : other + length]

        try:
            yield {
                f"get over {store.transport}": {
                    "kvatlas": read,
                    "bare socket": lambda: _from_bare(bare, arena, size),
                    "NIXL alone": alone,
                    "memcpy": memcpy,
                }
            }
        finally:
            store.close()
            there.close()
            bare.close()
            sys.path.remove(str(packages))
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before


# -- mooncake -------------------------------------------------------------------------------------


class _MooncakeClient:
    """Its own client, moving the same bytes between places in the same arena."""

    def __init__(self, settings: mooncake.Settings, arena: Arena, size: int) -> None:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415

        self._client = MooncakeDistributedStore()
        master = (settings.protocol, settings.devices, settings.master)
        where = (settings.hostname, settings.metadata, 0, settings.buffer_bytes)
        if self._client.setup(*where, *master):
            raise SystemExit("Mooncake's own client did not connect")
        base = ctypes.addressof(ctypes.c_char.from_buffer(arena.memory))
        self._client.register_buffer(base, arena.size_bytes)
        self._keys = [f"alone-{n}" for n in range(COUNT)]
        self._sources = [base + (n << 20) for n in range(COUNT)]
        self._targets = [base + ((COUNT + n) << 20) for n in range(COUNT)]
        self._sizes = [size] * COUNT
        self._client.batch_put_from(self._keys, self._sources, self._sizes)
        self._threads = ThreadPoolExecutor(settings.threads)
        nice = (mooncake_client.WAIT_NICE,)
        self._yielding = ThreadPoolExecutor(1, initializer=os.nice, initargs=nice)

    def threads_get(self) -> None:
        got = self._threads.map(self._client.get_into, self._keys, self._targets, self._sizes)
        self._check(list(got))

    def batch_get(self) -> None:
        self._check(list(self._client.batch_get_into(self._keys, self._targets, self._sizes)))

    def yielding_get(self) -> None:
        self._yielding.submit(self.batch_get).result()

    def threads_put(self) -> None:
        self._forget()
        list(self._threads.map(self._client.put_from, self._keys, self._sources, self._sizes))

    def batch_put(self) -> None:
        self._forget()
        self._client.batch_put_from(self._keys, self._sources, self._sizes)

    def close(self) -> None:
        self._threads.shutdown()
        self._yielding.shutdown()

    def _forget(self) -> None:
        for key in self._keys:
            self._client.remove(key, True)

    def _check(self, got: list[int]) -> None:
        if got != self._sizes:
            raise SystemExit("Mooncake's own client failed")


@contextlib.contextmanager
def _mooncake(
    scratch: Path, arena: Arena, size: int
) -> Iterator[dict[str, dict[str, _Act]] | None]:
    if not mooncake_package():
        yield None
        return
    rig = MooncakeRig(scratch, segment_bytes=512 << 20)
    settings = mooncake.Settings(master=f"127.0.0.1:{rig.port}", deadline_s=60)
    store = mooncake.MooncakeStore(settings, arena)
    finished(store.write, _pieces(arena, size, 0))
    client = _MooncakeClient(settings, arena, size)

    def ours_put() -> None:
        store.delete([piece.name for piece in _pieces(arena, size, 0)])
        finished(store.write, _pieces(arena, size, 0))

    try:
        yield {
            "get": {
                "kvatlas": _reads(store, arena, size),
                "client, 4 threads": client.threads_get,
                "client, one batch": client.batch_get,
                "client, one batch, giving way": client.yielding_get,
            },
            "put": {
                "kvatlas, deleting first": ours_put,
                "client, 4 threads": client.threads_put,
                "client, one batch": client.batch_put,
            },
        }
    finally:
        client.close()
        store.close()
        rig.kill()
        rig.arena.close()


# -- s3 -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _s3(scratch: Path, arena: Arena, size: int) -> Iterator[dict[str, dict[str, _Act]] | None]:
    if not s3_packages():
        yield None
        return
    rig = S3Rig(scratch)
    store = rig.store(rig.port, 60.0)
    finished(store.write, _pieces(arena, size, 0))
    api, bucket = store._api, store._bucket  # type: ignore[attr-defined]
    pool = ThreadPoolExecutor(4)
    keys = [store._key(b"unit-%d" % n) for n in range(COUNT)]  # type: ignore[attr-defined]

    def alone() -> None:
        sizes = pool.map(lambda key: len(api.get(bucket, key).bytes()), keys)
        if set(sizes) != {size + HEADER_BYTES}:
            raise SystemExit("obstore failed")

    try:
        yield {"get": {"kvatlas": _reads(store, arena, size), "obstore, 4 threads": alone}}
    finally:
        pool.shutdown()
        store.close()
        rig.close()


_SIDES: dict[str, Callable[..., Any]] = {
    "valkey": _valkey,
    "peer": _peer,
    "peer by NIXL": _nixl,
    "mooncake": _mooncake,
    "s3": _s3,
}


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
