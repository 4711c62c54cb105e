"""Two agents' dram, one reading from the other: what the other side may do to each of them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from stores_kit import Desk, Proxy, finished, nothing_left, values, wait_until
from stores_rigs import PeerRig

from kvatlas.dataplane.tiers import framing, peer
from kvatlas.dataplane.tiers.base import Entry, Piece, Report, checksum_of
from kvatlas.errors import ConfigError, StoreError


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[PeerRig]:
    with nothing_left():
        made = PeerRig(tmp_path, 32 << 20)
        yield made
        made.close()


def test_a_slot_that_is_recycled_during_a_slow_read_is_a_miss(rig: PeerRig) -> None:
    value = values(1, 12 << 20).popitem()[1]
    rig.put(b"n", value)
    proxy = Proxy(rig.port)
    store = rig.store(proxy.port)
    passed = [0]

    def stall(data: bytearray) -> None:
        passed[0] += len(data)
        if passed[0] > 1 << 20:
            proxy.stalled.set()

    proxy.flip = stall  # type: ignore[assignment]
    reports = []
    store.read([Piece(b"n", memoryview(bytearray(len(value))))], reports.append)
    wait_until(proxy.stalled.is_set)
    proxy.flip = None
    slot = rig.dram._units[b"n"].slot
    rig.arena.mark(slot.offset, slot.generation + 1)
    proxy.stalled.clear()
    wait_until(lambda: bool(reports))
    assert reports[0].failed == (b"n",)
    assert not reports[0].damaged
    assert store.counts["recycled"] == 1
    rig.arena.mark(slot.offset, slot.generation)
    assert Desk(store).read({b"n": len(value)})[1] == {b"n": value}
    store.close()
    proxy.close()


def test_a_reader_that_stops_reading_holds_no_slot_for_long(rig: PeerRig) -> None:
    """The server's send ends by its deadline, and the pin with it."""
    rig.put(b"n", bytes(24 << 20))
    proxy = Proxy(rig.port)
    store = rig.store(proxy.port, 30.0)
    reports: list[Report] = []
    passed = [0]

    def stall(data: bytearray) -> None:
        passed[0] += len(data)
        if passed[0] > 1 << 20:
            proxy.stalled.set()

    proxy.flip = stall  # type: ignore[assignment]
    store.read([Piece(b"n", memoryview(bytearray(24 << 20)))], reports.append)
    wait_until(proxy.stalled.is_set)
    wait_until(lambda: rig.server.counts.all().get("connections_slow") == 1)
    rig.dram.delete([b"n"])
    assert rig.dram.free_bytes == rig.arena.size_bytes
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 3
    assert reports[0].error
    proxy.close()


def test_the_token_must_be_known(rig: PeerRig) -> None:
    rig.put(b"n", b"value")
    store = peer.PeerStore(peer.Settings("127.0.0.1", rig.port, b"wrong", deadline_s=3.0))
    assert "token" in Desk(store).read({b"n": 5})[0].error
    assert store.counts["failed_denied"] == 1
    assert rig.server.counts.all()["denied"] == 1
    store.close()


def test_another_server_is_no_agent(rig: PeerRig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as other:
                other.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        store = peer.PeerStore(peer.Settings("127.0.0.1", port, deadline_s=3.0))
        assert "no kvatlas agent" in Desk(store).read({b"n": 5})[0].error
        thread.join()
        store.close()


@pytest.mark.parametrize("proof", ["random", "reflected"])
def test_a_server_that_does_not_know_the_token_is_not_read(proof: str) -> None:
    """It would pass on any bytes, under a label that is right for them."""
    lie = framing.header_of(Entry(b"n", 5, checksum_of(b"wrong")))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as other:
                other.sendall(peer.MAGIC + bytes(16) + (nonce := os.urandom(16)))
                said = other.recv(40, socket.MSG_WAITALL)
                assert said[8:24] == peer._proof(b"secret", nonce)
                other.sendall(said[8:24] if proof == "reflected" else os.urandom(16))
                with contextlib.suppress(ConnectionError):
                    other.sendall(lie + b"wrong" + b"\1")
                    other.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        store = peer.PeerStore(peer.Settings("127.0.0.1", port, b"secret", deadline_s=3.0))
        report, found = Desk(store).read({b"n": 5})
        assert "does not know our token" in report.error
        assert found == {}
        thread.join()
        assert store.counts["failed_denied"] == 1
        store.close()


@pytest.mark.parametrize(
    "request_",
    [
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 5) + b"\xc1" * 5,
        struct.pack("<I", 3) + b"\x93\x01\x02",
        struct.pack("<I", 1) + msgspec.msgpack.encode(7),
        struct.pack("<I", 200) + b"short",
    ],
)
def test_requests_that_make_no_sense_end_their_connection_only(
    rig: PeerRig, request_: bytes
) -> None:
    rig.put(b"n", b"value")
    with socket.create_connection(("127.0.0.1", rig.port), 5) as sock:
        said = sock.recv(40, socket.MSG_WAITALL)
        ours = os.urandom(16)
        sock.sendall(peer.MAGIC + peer._proof(b"secret", said[24:]) + ours)
        assert sock.recv(16, socket.MSG_WAITALL) == peer._proof(b"secret", b"server" + ours)
        sock.sendall(request_)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""
    store = rig.store(rig.port)
    assert Desk(store).read({b"n": 5})[1] == {b"n": b"value"}
    store.close()


def test_connections_have_a_limit(tmp_path: Path) -> None:
    rig = PeerRig(tmp_path)
    rig.server.close()
    rig.server = peer.PeerServer(rig.dram, connections_max=3)
    socks = [socket.create_connection(rig.server.address) for _ in range(6)]
    wait_until(lambda: rig.server.counts.all().get("refused_connections") == 3)
    for sock in socks:
        sock.close()
    rig.close()


def test_a_piece_whose_release_fails_is_reported_all_the_same(rig: PeerRig) -> None:
    rig.put(b"n", b"value")
    store = rig.store(rig.port)

    def fails() -> None:
        raise RuntimeError("the caller's fault")

    pieces = [Piece(b"n", memoryview(bytearray(5)), released=fails)]
    assert finished(lambda done: store.read(pieces, done)) == Report()
    assert bytes(pieces[0].view) == b"value"
    assert store.counts["released_failed"] == 1
    store.close()


def test_a_large_catalogue_comes_in_parts(rig: PeerRig) -> None:
    pieces = [Piece(b"%d" % n, memoryview(b"x"), index=n, tenant="t") for n in range(5000)]
    assert finished(lambda done: rig.dram.write(pieces, done)).failed == ()
    store = rig.store(rig.port)
    found = list(store.scan())
    assert {entry.name for entry in found} == {piece.name for piece in pieces}
    assert {entry.index for entry in found} == set(range(5000))
    with pytest.raises(StoreError):
        store.delete([b"1"])
    store.close()


def test_idle_connections_end_and_are_made_anew(tmp_path: Path) -> None:
    rig = PeerRig(tmp_path)
    rig.server.close()
    rig.server = peer.PeerServer(rig.dram, token=b"secret", idle_s=0.1)
    rig.put(b"n", b"value")
    store = rig.store(rig.server.address[1])
    for turn in range(1, 3):
        assert Desk(store).read({b"n": 5})[1] == {b"n": b"value"}
        wait_until(lambda turn=turn: rig.server.counts.all().get("connections_slow", 0) >= turn)  # type: ignore[misc]
    started = time.monotonic()
    store.close()
    rig.close()
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("bad", [{"host": ""}, {"port": 0}, {"port": 70_000}])
def test_impossible_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        peer.Settings(**{"host": "h", "port": 1, **bad})  # type: ignore[arg-type]
