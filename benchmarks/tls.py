"""What TLS costs between parts: the bulk of the peer protocol, and HTTP with and without.

A peer in a process of its own lends the same memory at two ports, plain and with TLS; values of
1 MiB, 32 at a time, in alternating rounds, every byte verified. HTTP: requests of a small body over
a kept-alive connection, and one connection each (TLS: a handshake of both sides' certificates).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.dataplane import finished
from benchmarks.peers import ROOT
from kvatlas.cli.certs import issue, make_ca
from kvatlas.config_tls import TlsConfig
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.tiers.base import Piece, checksum_of
from kvatlas.dataplane.tiers.dram import DramStore
from kvatlas.dataplane.tiers.peer import PeerServer, PeerStore, Settings
from kvatlas.dataplane.tls import Part, Trust
from kvatlas.service.http import Request
from kvatlas.service.http_client import HttpClient
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.tls import to_agents

HOST = "127.0.0.1"
TOKEN = b"t" * 32
SIZE, COUNT, ROUNDS = 1 << 20, 32, 30
STREAMS = (1, 2)
REQUESTS, CONNECTIONS = 2000, 200
_SLOTS = 2 * COUNT * SIZE


def run() -> dict[str, Any]:
    """GB/s of the peer protocol and ratios; microseconds per HTTP exchange; prints a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_ca(folder)
        for part in ("gateway", "agent"):
            issue(folder, part, "bench", [HOST])
        figures: dict[str, Any] = {}
        with _peer(folder) as ports:
            for streams in STREAMS:
                figures[f"peer, {streams} streams"] = _bulk(folder, ports, streams)
        figures |= uvloop.run(_http(folder))
    table = Table("what", "plain", "TLS", "TLS / plain")
    for what, found in figures.items():
        table.add_row(what, f"{found['plain']:.4g}", f"{found['tls']:.4g}", f"{found['ratio']:.2f}")
    Console().print(table)
    print("peer: GB/s; HTTP: microseconds per exchange, client and server in one thread")
    return figures


def _trust(folder: Path, part: Part) -> Trust:
    files = (folder / f"{part}-bench{end}" for end in (".pem", ".key"))
    return Trust(TlsConfig(str(folder / "ca.pem"), *map(str, files)), part)


@contextlib.contextmanager
def _peer(folder: Path) -> Iterator[dict[str, int]]:
    argv = [sys.executable, "-m", "benchmarks.tls", str(folder)]
    child = subprocess.Popen(
        argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        yield json.loads(child.stdout.readline())
    finally:
        child.stdin.close()  # it ends then
        child.wait(30)
        child.stdout.close()


def _lend(folder: Path) -> None:
    """The child: until its stdin ends."""
    with contextlib.closing(Arena.create(_SLOTS)) as arena:
        dram = DramStore(arena)
        for number in range(COUNT):
            value = memoryview(bytes([number]) * SIZE)
            piece = Piece(b"%d" % number, value, checksum_of(value))
            finished(dram.write, [piece])
        plain = PeerServer(dram, token=TOKEN)
        secure = PeerServer(dram, token=TOKEN, trust=_trust(folder, "agent"))
        print(json.dumps({"plain": plain.address[1], "tls": secure.address[1]}), flush=True)
        sys.stdin.read()
        plain.close()
        secure.close()


def _bulk(folder: Path, ports: dict[str, int], streams: int) -> dict[str, float]:
    place = memoryview(bytearray(COUNT * SIZE))
    stores = {
        side: PeerStore(
            Settings(HOST, ports[side], TOKEN, streams=streams),
            trust=_trust(folder, "agent") if side == "tls" else None,
        )
        for side in ("plain", "tls")
    }

    def read(store: PeerStore) -> None:
        pieces = [Piece(b"%d" % n, place[n * SIZE : (n + 1) * SIZE]) for n in range(COUNT)]
        finished(store.read, pieces)

    times: dict[str, list[float]] = {side: [] for side in stores}
    for turn in range(ROUNDS + 3):
        for side, store in stores.items():
            began = time.perf_counter()
            read(store)
            if turn >= 3:
                times[side].append(time.perf_counter() - began)
    for store in stores.values():
        store.close()
    rate = {side: COUNT * SIZE / statistics.median(took) / 1e9 for side, took in times.items()}
    return {**rate, "ratio": rate["tls"] / rate["plain"]}


async def _http(folder: Path) -> dict[str, dict[str, float]]:
    async def answer(_: Request, reply: Reply) -> None:
        reply.send_json(200, {"ok": True})

    kept: dict[str, float] = {}
    new: dict[str, float] = {}
    for side in ("plain", "tls"):
        secure = side == "tls"
        server = HttpServer(answer, trust=_trust(folder, "agent") if secure else None)
        await server.start()
        url = f"{'https' if secure else 'http'}://{HOST}:{server.port}/"
        outgoing = to_agents(_trust(folder, "gateway")) if secure else None
        for into, count, keepalive_s in ((kept, REQUESTS, 30.0), (new, CONNECTIONS, 0.0)):
            client = HttpClient(outgoing=outgoing, keepalive_s=keepalive_s)
            await client.get_json(url)
            began = time.perf_counter()
            for _ in range(count):
                await client.get_json(url)
            into[side] = (time.perf_counter() - began) / count * 1e6
            await client.close()
        await server.close()
    return {
        name: {**found, "ratio": found["tls"] / found["plain"]}
        for name, found in (("HTTP, kept alive", kept), ("HTTP, a connection each", new))
    }


if __name__ == "__main__":
    _lend(Path(sys.argv[1]))
