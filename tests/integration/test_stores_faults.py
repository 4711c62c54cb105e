"""Every store beyond the node among faults: a counted failure by the deadline, never wrong bytes,
nothing left behind. Servers are real; what is between is a proxy that misbehaves."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores_kit import Desk, Proxy, finished, nothing_left, values, wait_until
from stores_rigs import RIGS, Rig

from kvatlas.dataplane.tiers.base import Piece, Store, checksum_of

SIZE = 200_000
DEADLINE_S = 0.6


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with nothing_left():
        made = RIGS[request.param](tmp_path)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def proxy(rig: Rig) -> Iterator[Proxy]:
    made = Proxy(rig.port)
    yield made
    made.close()


@contextlib.contextmanager
def opened(rig: Rig, port: int, deadline_s: float = 5.0, **more: list[str]) -> Iterator[Store]:
    store = rig.store(port, deadline_s, **more)
    try:
        yield store
    finally:
        store.close()


def filled(rig: Rig, count: int = 8) -> dict[bytes, bytes]:
    made = values(count, SIZE)
    for name, value in made.items():
        rig.put(name, value)
    return made


def sizes(of: dict[bytes, bytes]) -> dict[bytes, int]:
    return {name: len(value) for name, value in of.items()}


def test_all_arrives_where_nothing_is_wrong(rig: Rig, proxy: Proxy) -> None:
    kept = filled(rig)
    with opened(rig, proxy.port) as store:
        report, got = Desk(store).read(sizes(kept) | {b"never": 9})
        assert got == kept
        assert report.failed == (b"never",)
        assert report.damaged == ()
        assert {entry.name for entry in store.scan()} == set(kept)
        assert store.transport == "tcp"


def test_a_server_that_is_not_there_is_told_at_once(rig: Rig) -> None:
    rig.kill()
    with opened(rig, rig.port) as store:
        started = time.monotonic()
        report, got = Desk(store).read({b"x": 5})
        assert time.monotonic() - started < 3
        assert report.error
        assert not got
        assert store.counts["failed_broken"] == 1


def test_a_stall_ends_by_the_deadline_and_blocks_no_other_store(rig: Rig, proxy: Proxy) -> None:
    kept = filled(rig)
    with opened(rig, proxy.port, DEADLINE_S) as store, opened(rig, rig.port) as other:
        assert not Desk(store).read(sizes(kept))[0].failed
        proxy.stalled.set()
        started = time.monotonic()
        over = threading.Event()
        reports = []
        pieces = [Piece(n, memoryview(bytearray(len(v)))) for n, v in kept.items()]
        store.read(pieces, lambda report: (reports.append(report), over.set()))  # type: ignore[func-returns-value]
        assert Desk(other).read(sizes(kept))[1] == kept
        assert not over.is_set()
        assert over.wait(3)
        assert time.monotonic() - started < DEADLINE_S + 1
        assert "not done within" in reports[0].error
        assert store.counts["failed_timeout"] >= 1
        proxy.stalled.clear()
        wait_until(lambda: Desk(store).read(sizes(kept))[1] == kept)


def test_a_server_that_trickles_ends_by_the_deadline_too(rig: Rig, proxy: Proxy) -> None:
    kept = filled(rig, 2)
    with opened(rig, proxy.port, DEADLINE_S) as store:
        assert not Desk(store).read(sizes(kept))[0].failed
        proxy.slow.set()
        started = time.monotonic()
        report, got = Desk(store).read(sizes(kept))
        assert time.monotonic() - started < DEADLINE_S + 1
        assert not got
        assert "not done within" in report.error
        proxy.slow.clear()
        wait_until(lambda: Desk(store).read(sizes(kept))[1] == kept)


def test_more_than_may_wait_is_refused_not_queued(rig: Rig, proxy: Proxy) -> None:
    filled(rig, 1)
    with opened(rig, proxy.port, DEADLINE_S) as store:
        proxy.stalled.set()
        reports = []
        for _ in range(200):
            piece = Piece(b"name-0\0\r\n*", memoryview(bytearray(SIZE)))
            store.read([piece], reports.append)
        wait_until(lambda: len(reports) >= 130, DEADLINE_S)  # those refused do not wait
        wait_until(lambda: len(reports) == 200)
        assert store.counts["failed_busy"] >= 130
        assert all(report.error for report in reports)


def test_a_connection_cut_in_mid_answer_gives_whole_values_or_none(rig: Rig, proxy: Proxy) -> None:
    kept = filled(rig)
    with opened(rig, proxy.port) as store:
        for cut in (100, 700, SIZE // 2, SIZE + 600, 3 * SIZE):
            proxy.cut = cut
            report, got = Desk(store).read(sizes(kept))
            assert all(kept[name] == value for name, value in got.items())
            assert report.failed or report.error
            assert not report.damaged
        proxy.cut = None
        assert Desk(store).read(sizes(kept))[1] == kept


@pytest.mark.parametrize("at", [3, 70, 300, 5_000, 30_000])
def test_a_bit_flipped_on_the_way_is_never_taken(rig: Rig, proxy: Proxy, at: int) -> None:
    """In the label and in the value, by turns: the bytes from the server pass in chunks."""
    kept = filled(rig)
    with opened(rig, proxy.port, 1.5) as store:
        assert not Desk(store).read(sizes(kept))[0].failed
        seen = []

        def flip(data: bytearray) -> int | None:
            if len(data) <= at:
                return None
            seen.append(at)
            return at

        proxy.flip = flip
        report, got = Desk(store).read(sizes(kept))
        assert seen
        assert report.damaged or report.failed or report.error
        assert all(kept[name] == value for name, value in got.items())
        proxy.flip = None
        # What looked broken may have been thrown away; it is written anew, as after any miss.
        assert not Desk(store).read(sizes(kept))[0].damaged
        filled(rig)
        assert Desk(store).read(sizes(kept))[1] == kept


def test_wrong_values_are_told_as_damaged_and_others_arrive(rig: Rig) -> None:
    kept = filled(rig, 3)
    value = values(1, SIZE, seed=1).popitem()[1]
    flipped = bytes([value[0] ^ 1]) + value[1:]
    rig.put(b"flipped", value, flipped)
    rig.put(b"shorter", value[:-1])
    rig.put(b"longer", value + b"!")
    rig.put(b"other", value)
    wrong = [b"flipped", b"shorter", b"longer"]
    with opened(rig, rig.port) as store:
        asked = sizes(kept) | dict.fromkeys([*wrong, b"other"], SIZE)
        report, got = Desk(store).read(asked, other=checksum_of(b"something else"))
        assert set(report.damaged) == {*wrong, b"other"}
        assert not report.failed
        assert got == kept
        assert store.counts["damaged"] == 4


def test_a_restart_is_told_and_what_is_gone_is_missing(rig: Rig) -> None:
    kept = filled(rig)
    lost: list[str] = []
    with opened(rig, rig.port, lost=lost) as store:
        assert Desk(store).read(sizes(kept))[1] == kept
        rig.restart()
        report, got = Desk(store).read(sizes(kept))
        assert not got
        assert set(report.failed) == set(kept)
        assert lost
        assert store.counts["restarts"] >= 1
        again = filled(rig, 2)
        assert Desk(store).read(sizes(again))[1] == again


def test_closing_ends_what_is_in_flight(rig: Rig, proxy: Proxy) -> None:
    kept = filled(rig)
    store = rig.store(proxy.port, 30.0)
    proxy.stalled.set()
    released: list[bytes] = []
    pieces = [
        Piece(n, memoryview(bytearray(len(v))), released=lambda n=n: released.append(n))  # type: ignore[misc]
        for n, v in kept.items()
    ]
    reports = []
    for piece in pieces:
        store.read([piece], reports.append)
    started = time.monotonic()
    store.close()
    store.close()
    assert time.monotonic() - started < 5
    assert len(reports) == len(kept)
    assert all(report.error for report in reports)
    assert sorted(released) == sorted(kept)
    report = finished(lambda done: store.read(pieces, done))
    assert "closed" in report.error


def test_closing_ends_a_connection_that_is_being_made(rig: Rig, proxy: Proxy) -> None:
    proxy.stalled.set()
    store = rig.store(proxy.port, 30.0)
    reports = []
    store.read([Piece(b"n", memoryview(bytearray(9)))], reports.append)
    wait_until(lambda: proxy.connections > 0)
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 5
    assert reports[0].error


def test_a_store_can_be_closed_by_the_one_it_reports_to(rig: Rig) -> None:
    store = rig.store(rig.port)
    closed = threading.Event()

    def done(_: object) -> None:
        store.close()
        closed.set()

    store.read([Piece(b"n", memoryview(bytearray(9)))], done)
    assert closed.wait(10)
    assert "done_raised" not in store.counts


def test_bad_pieces_are_refused_before_anything_is_sent(rig: Rig) -> None:
    room = memoryview(bytearray(8))
    bad = [
        Piece(b"", room),
        Piece(b"n" * 256, room),
        Piece(b"n", room[::2]),
        Piece(b"n", room[:0]),
        Piece(b"n", room.cast("Q")),
        Piece(b"n" * 200, room, tenant="t" * 300),
    ]
    with opened(rig, rig.port) as store:
        for piece in bad:
            report = finished(lambda done, piece=piece: store.read([piece], done))  # type: ignore[misc]
            assert report.failed == (piece.name,)
            assert "not fit" in report.error
        fixed = Piece(b"n", memoryview(b"readonly"))
        assert "not fit" in finished(lambda done: store.read([fixed], done)).error
        assert finished(lambda done: store.read([], done)).error == ""
        report = finished(lambda done: store.read([bad[0], Piece(b"n", room)], done))
        assert report.failed == (b"", b"n")
        assert store.counts["failed_invalid"] == len(bad) + 2


def test_writes_cut_in_the_middle_leave_nothing_that_is_read(rig: Rig, proxy: Proxy) -> None:
    if not rig.writes:
        with opened(rig, rig.port) as store:
            report = Desk(store).write(values(1, SIZE))
            assert "its own agent" in report.error
        return
    made = values(8, SIZE, seed=2)
    with opened(rig, proxy.port) as store, opened(rig, rig.port) as direct:
        proxy.cut_up = 3 * SIZE
        report = Desk(store).write(made)
        assert report.failed or report.error
        proxy.cut_up = None
        report, got = Desk(direct).read(sizes(made))
        assert all(made[name] == value for name, value in got.items())
        assert report.failed
        assert not report.damaged
        assert Desk(store).write(made).failed == ()
        assert Desk(direct).read(sizes(made))[1] == made


def test_two_writers_of_one_name_agree(rig: Rig) -> None:
    if not rig.writes:
        pytest.skip("this store is written by nobody")
    made = values(6, SIZE, seed=3)
    with opened(rig, rig.port) as one, opened(rig, rig.port) as two:
        reports = []
        for _ in range(5):
            for store in (one, two):
                pieces = [Desk(store).piece(name, value) for name, value in made.items()]
                store.write(pieces, reports.append)
        wait_until(lambda: len(reports) == 10)
        assert not any(report.failed or report.error for report in reports)
        assert Desk(one).read(sizes(made))[1] == made
        one.delete(list(made))
        assert not Desk(two).read(sizes(made))[1]
