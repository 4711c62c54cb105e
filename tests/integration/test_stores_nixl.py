"""Peers that read by NIXL: what may happen to its processes, in the middle of a read, too. Whatever
it is, values come over TCP or not at all, why is counted, and no slot is written into late."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nixl_kit import NixlRig, dead, ready, use_nixl
from stores_kit import finished, nothing_left, values, wait_until

from kvatlas.dataplane.tiers import peer, peer_nixl
from kvatlas.dataplane.tiers.base import Piece, Report
from kvatlas.dataplane.tiers.nixl_wire import Ready
from kvatlas.service import agent_peers

pytestmark = pytest.mark.engine
SIZE = 1 << 20
COUNT = 8
DEADLINE_S = 6.0


NO_PLACES: list[dict[str, Any]] = [
    {"offset": 4096 * (1 << 30)},
    {"offset": -4096},
    {"offset": 100},
    {"size_bytes": SIZE - 1},
    {"size_bytes": 1 << 40},
    {"head": b"no label"},
]
NO_PROCESSES: list[tuple[dict[str, Any], str]] = [
    ({"version": "0.9.0"}, "version"),
    ({"epoch": b"short"}, "senseless"),
    ({"metadata": b"x" * (1 << 17)}, "senseless"),
    ({"size_bytes": -1}, "senseless"),
    ({"address": (1 << 64) - 1}, "senseless"),
    ({"metadata": b"none"}, "join_"),
]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[NixlRig]:
    use_nixl(monkeypatch, tmp_path)
    with nothing_left():
        made = NixlRig(tmp_path, 32 << 20)
        yield made
        made.close()


class Desk:
    """A reader, and pieces in its arena that tell when they were let go of."""

    def __init__(self, rig: NixlRig, **more: Any) -> None:
        self.kept = values(COUNT, SIZE)
        for name, value in self.kept.items():
            rig.put(name, value)
        self.rig = rig
        self.store, self.arena, self.nixl = rig.reader(rig.port, DEADLINE_S, **more)
        self.reports: list[Report] = []
        self.let_go: list[bool] = []
        self.pieces: list[Piece] = []

    def start(self, released: Any = None) -> None:
        """Reads all of them, into the same places every time."""
        self.arena.memory[: COUNT * SIZE] = bytes(COUNT * SIZE)
        self.pieces = [
            Piece(name, self.arena.memory[n * SIZE : (n + 1) * SIZE], released=released)
            for n, name in enumerate(self.kept)
        ]
        self.reports.clear()
        self.store.read(self.pieces, self.reports.append)

    def end(self) -> Report:
        wait_until(lambda: bool(self.reports))
        return self.reports[0]

    def read(self) -> Report:
        self.start()
        return self.end()

    def right(self) -> bool:
        return all(bytes(piece.view) == self.kept[piece.name] for piece in self.pieces)

    @property
    def moved(self) -> dict[str, Any]:
        found: Any = self.store.moved.status()["moved"]
        return {name: way["pieces"] for name, way in found.items() if way["pieces"]}

    @property
    def instead(self) -> dict[str, int]:
        found: Any = self.store.moved.status()["instead"]
        return dict(found)


def tried_again(desk: Desk) -> None:
    """As after its rest."""
    desk.store.nixl._rests_until = 0.0  # type: ignore[union-attr]


# -- the way that it is meant ---------------------------------------------------------------------


def test_two_agents_of_one_node_read_past_the_sockets_and_say_so(rig: NixlRig) -> None:
    desk = Desk(rig)
    assert desk.read() == Report()
    assert desk.right()
    assert desk.store.transport == "nixl/cma"
    assert (desk.moved, desk.instead) == ({"nixl/cma": COUNT}, {})
    assert rig.server.counts.all() == {"lent": COUNT}
    told: Any = agent_peers.told(desk.store)["nixl"]
    assert (told["transport"], told["rests"]) == ("nixl/cma", "")
    assert agent_peers.fault(desk.store) == ""
    desk.store.close()


def test_what_is_not_there_or_wrong_is_told_as_over_tcp(rig: NixlRig) -> None:
    desk = Desk(rig)
    names = list(desk.kept)
    rig.dram.delete([names[0]])
    rig.arena.view(rig.dram._units[names[1]].slot)[9] ^= 1
    rig.arena.mark(rig.dram._units[names[2]].slot.offset, 77)  # recycled
    desk.start()
    desk.pieces[3].view[:1] = b"x"
    report = desk.end()
    assert sorted(report.failed) == sorted([names[0], names[2]])
    assert report.damaged == (names[1],)
    assert desk.store.counts["recycled"] == 1
    assert names[1] not in rig.dram._units  # its owner looked, and threw it out
    assert desk.moved == {"nixl/cma": COUNT - 3}
    desk.store.close()


def test_a_slot_that_is_recycled_in_mid_read_is_a_miss(
    rig: NixlRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(rig)
    name = next(iter(desk.kept))
    slot = rig.dram._units[name].slot
    real = desk.nixl.read

    def read(*words: Any) -> str:
        why = real(*words)
        rig.arena.mark(slot.offset, slot.generation + 1)
        return why

    monkeypatch.setattr(desk.nixl, "read", read)
    assert desk.read() == Report(failed=(name,))
    assert bytes(desk.pieces[0].view) == desk.kept[name]  # they came, and are not believed
    assert desk.store.counts["recycled"] == 1
    assert rig.server.counts.all() == {"lent": COUNT - 1, "recycled": 1}
    assert desk.moved == {"nixl/cma": COUNT - 1}
    desk.store.close()


def test_values_for_elsewhere_come_over_tcp(rig: NixlRig) -> None:
    desk = Desk(rig)
    name, value = next(iter(desk.kept.items()))
    piece = Piece(name, memoryview(bytearray(SIZE)))
    assert finished(lambda done: desk.store.read([piece], done)) == Report()
    assert bytes(piece.view) == value
    assert (desk.moved, desk.instead) == ({"tcp": 1}, {"outside": 1})
    desk.store.close()


def test_where_ucx_would_send_messages_tcp_is_used_alone(
    rig: NixlRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are answered by the other side's processor, and were a tenth as fast."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    desk = Desk(rig)
    assert desk.read() == Report()
    assert (desk.moved, desk.store.transport) == ({"tcp": COUNT}, "tcp")
    assert set(desk.instead) == {"only_tcp"}
    told: Any = agent_peers.told(desk.store)["nixl"]
    assert told["rests"] == "only_tcp"
    assert agent_peers.fault(desk.store) == ""
    desk.store.close()


def test_who_wants_nixl_alone_gets_it_or_nothing(
    rig: NixlRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    desk = Desk(rig, only=True, emulated=True)
    assert desk.store.transport == "nixl"  # and not TCP, before anything was read
    assert desk.read() == Report()
    assert desk.right()
    assert (desk.moved, desk.store.transport) == ({"nixl/tcp": COUNT}, "nixl/tcp")
    os.kill(rig.nixl.child.pid, signal.SIGKILL)
    report = desk.read()
    assert set(report.failed) == set(desk.kept)
    assert "NIXL alone" in report.error
    assert set(desk.moved) == {"nixl/tcp"}
    desk.store.close()


# -- processes that hang or die -------------------------------------------------------------------


def test_a_reading_process_that_hangs_is_dead_before_its_slots_are_free(rig: NixlRig) -> None:
    desk = Desk(rig)
    assert desk.read() == Report()
    pid = desk.nixl.child.pid
    os.kill(pid, signal.SIGSTOP)
    alive: list[bool] = []
    started = time.monotonic()
    desk.start(lambda: alive.append(not dead(pid)))
    assert desk.end() == Report()  # over TCP, by the same deadline
    assert time.monotonic() - started < DEADLINE_S
    assert desk.right()
    assert alive == [False] * COUNT
    assert desk.store.transport == "tcp"
    assert desk.instead["late"] >= 1
    assert agent_peers.fault(desk.store)
    assert desk.nixl.counts.all()["client_late"] >= 1
    ready(desk.nixl)
    tried_again(desk)
    assert desk.read() == Report()
    assert desk.store.transport == "nixl/cma"
    desk.store.close()


def stuck(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """Its reading process, which the kernel does not let go of until it is killed from here."""
    child = desk.nixl.child._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    monkeypatch.setattr(child, "kill", lambda: None)
    return child


def test_slots_of_a_process_that_does_not_die_are_kept_until_it_does(
    rig: NixlRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request ends in time, its places do not."""
    desk = Desk(rig)
    assert desk.read() == Report()
    child = stuck(desk, monkeypatch)
    released: list[float] = []
    started = time.monotonic()
    desk.start(lambda: released.append(time.monotonic()))
    report = desk.end()
    assert time.monotonic() - started < DEADLINE_S
    assert set(report.failed) == set(desk.kept)
    assert released == []
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: len(released) == COUNT)
    assert child.returncode is not None
    desk.store.close()


def test_not_even_a_peer_that_goes_away_then_sets_them_free(
    rig: NixlRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(rig)
    assert desk.read() == Report()
    child = stuck(desk, monkeypatch)
    released: list[int] = []
    desk.start(lambda: released.append(child.pid))
    wait_until(lambda: len(rig.dram._slots._holds) == COUNT)
    rig.server.close()
    assert set(desk.end().failed) == set(desk.kept)
    assert released == []
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: len(released) == COUNT)
    desk.store.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("side", ["reader", "owner"])
def test_a_process_lost_in_mid_read(
    rig: NixlRig, monkeypatch: pytest.MonkeyPatch, side: str, number: signal.Signals
) -> None:
    """By messages, because those are slow enough to be met on their way."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    desk = Desk(rig, emulated=True)
    rig.nixl.close()
    rig.server.close()
    rig._serve(rig.port)
    rig.nixl.wait()
    assert desk.read() == Report()
    assert desk.store.transport == "nixl/tcp"
    child = desk.nixl.child if side == "reader" else rig.nixl.child
    pid = child.pid
    alive: list[bool] = []
    reading = desk.nixl.child.pid
    desk.start(lambda: alive.append(not dead(reading)))
    wait_until(lambda: desk.arena.memory[0] != 0 or bool(desk.reports))
    os.kill(pid, number)
    report = desk.end()
    arrived = [piece for piece in desk.pieces if piece.name not in report.failed]
    assert report.damaged == ()
    assert all(bytes(piece.view) == desk.kept[piece.name] for piece in arrived)
    assert len(alive) == COUNT
    if "tcp" in desk.moved:  # it was met on its way
        assert not any(alive[-desk.moved["tcp"] :])
        assert sum(desk.instead.values()) >= 1
    assert desk.read() == Report()  # whatever it was, values come
    assert desk.right()
    if number == signal.SIGSTOP and not dead(pid):
        os.kill(pid, signal.SIGCONT)
    desk.store.close()


def test_an_owners_process_that_hangs_is_replaced_when_it_is_asked_for(rig: NixlRig) -> None:
    desk = Desk(rig)
    pid = rig.nixl.child.pid
    os.kill(pid, signal.SIGSTOP)
    assert desk.read() == Report()
    assert desk.moved == {"tcp": COUNT}
    assert desk.instead["not_ready_there"] >= 1
    assert dead(pid)
    ready(rig.nixl)
    tried_again(desk)
    assert desk.read() == Report()
    assert desk.store.transport == "nixl/cma"
    desk.store.close()


def test_a_process_that_dies_is_started_anew_and_found_again(rig: NixlRig) -> None:
    desk = Desk(rig)
    assert desk.read() == Report()
    for child in (desk.nixl.child, rig.nixl.child):
        before = child.pid
        os.kill(before, signal.SIGKILL)
        assert desk.read() == Report()
        assert desk.right()
        wait_until(lambda: child.pid != before)  # noqa: B023
        ready(desk.nixl)
        ready(rig.nixl)
        tried_again(desk)
        desk.read()
        assert desk.read() == Report()
        assert desk.store.transport == "nixl/cma"
    desk.store.close()


def test_an_owner_that_starts_anew_with_another_arena_is_read_by_its_new_one(rig: NixlRig) -> None:
    desk = Desk(rig)
    assert desk.read() == Report()
    rig.restart()
    rig.nixl.wait()
    report = desk.read()
    assert set(report.failed) == set(desk.kept)  # it holds nothing, and nothing old is read
    for name, value in values(COUNT, SIZE, seed=1).items():
        rig.put(name, value)
        desk.kept[name] = value
    assert desk.read() == Report()
    assert desk.right()
    ready(desk.nixl)  # anew, too: what UCX says is of this peer
    assert desk.read() == Report()
    assert desk.right()
    assert desk.store.transport == "nixl/cma"
    assert set(desk.instead) == {"starting"}
    desk.store.close()


def test_nothing_is_left_of_readers_that_end_in_mid_read(rig: NixlRig) -> None:
    desk = Desk(rig)
    assert desk.read() == Report()
    pid = desk.nixl.child.pid
    os.kill(pid, signal.SIGSTOP)
    desk.start()
    closing = threading.Thread(target=desk.store.close)
    closing.start()
    closing.join(2 * DEADLINE_S)
    assert not closing.is_alive()
    assert dead(pid)
    rig.dram.delete(list(desk.kept))
    wait_until(lambda: rig.dram.free_bytes == rig.arena.size_bytes)


# -- words that make no sense ---------------------------------------------------------------------


def test_places_that_cannot_be_are_not_read(rig: NixlRig, monkeypatch: pytest.MonkeyPatch) -> None:
    change: dict[str, Any] = {}
    real = peer_nixl.Lender._loan

    def lies(self: Any, names: Any, epoch: bytes) -> Any:
        loan, units = real(self, names, epoch)
        places = [msgspec.structs.replace(place, **change) for place in loan.places]
        return msgspec.structs.replace(loan, places=places), units

    monkeypatch.setattr(peer_nixl.Lender, "_loan", lies)
    desk = Desk(rig)
    asked: list[Any] = []
    monkeypatch.setattr(desk.nixl, "read", lambda *words: asked.append(words) or "")
    for turn, change in enumerate(NO_PLACES):
        tried_again(desk)
        assert desk.read() == Report()
        assert desk.right()
        assert asked == [], change
        assert set(desk.instead) == {"senseless"}
        assert desk.moved == {"tcp": COUNT * (turn + 1)}
    desk.store.close()


def test_processes_that_cannot_be_joined_are_not(
    rig: NixlRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    change: dict[str, Any] = {}
    desk = Desk(rig)
    real = rig.nixl.alive

    def lies() -> Ready | None:
        there = real()
        return None if there is None else msgspec.structs.replace(there, **change)

    monkeypatch.setattr(rig.nixl, "alive", lies)
    before: dict[str, int] = {}
    for change, why in NO_PROCESSES:
        tried_again(desk)
        assert desk.read() == Report()
        assert desk.right()
        found = {name for name, count in desk.instead.items() if count > before.get(name, 0)}
        assert any(name.startswith(why) for name in found), (change, found)
        before = desk.instead
    assert set(desk.moved) == {"tcp"}
    desk.store.close()


def test_a_loan_ends_with_its_connection(rig: NixlRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_nixl, "LOAN_S", 0.2)
    desk = Desk(rig)
    assert desk.read() == Report()
    os.kill(desk.nixl.child.pid, signal.SIGSTOP)
    desk.start()
    wait_until(lambda: rig.server.counts.all().get("connections_slow", 0) >= 1)
    rig.dram.delete(list(desk.kept))
    wait_until(lambda: rig.dram.free_bytes == rig.arena.size_bytes)
    report = desk.end()
    assert set(report.failed) == set(desk.kept)  # gone, and none of it is believed
    desk.store.close()


def test_a_peer_without_nixl_is_read_over_tcp(rig: NixlRig) -> None:
    desk = Desk(rig)
    rig.server.close()
    rig.server = peer.PeerServer(rig.dram, token=b"secret", port=rig.port)
    assert desk.read() == Report()
    assert (desk.moved, set(desk.instead)) == ({"tcp": COUNT}, {"no_nixl_there"})
    desk.store.close()
