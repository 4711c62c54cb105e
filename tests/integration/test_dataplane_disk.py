"""The disk store against what disks, power supplies and processes do. Nothing wrong is ever read,
and nothing leaks."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from disk_kit import (
    CAPACITY_BYTES,
    SEGMENT_BYTES,
    WAIT_S,
    FaultyFiles,
    content,
    fails,
    opened,
    piece_of,
    right,
    room,
    run,
    size_of,
    whole,
)

from kvatlas.core.units import Part, name_of
from kvatlas.dataplane.codec import Codec
from kvatlas.dataplane.records import (
    Component,
    ResumeRecord,
    checksum_bytes,
    pack,
    record_name,
    unpack,
)
from kvatlas.dataplane.tiers.base import Piece, Report
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.errors import ConfigError


class Rig:
    """A store on a disk that does as it is told."""

    def __init__(self, directory: Path, **more: object) -> None:
        def made(path: Path) -> FaultyFiles:
            self.files = FaultyFiles(path)
            return self.files

        options = {"segment_bytes": SEGMENT_BYTES, "threads": 3, "deadline_s": WAIT_S, **more}
        self.store = DiskStore(directory, CAPACITY_BYTES, files=made, **options)  # type: ignore[arg-type]

    def again(self, directory: Path) -> DiskStore:
        """The same after a restart."""
        self.store.close()
        return opened(directory)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    made = Rig(tmp_path)
    yield made  # type: ignore[misc]
    made.files.fault = lambda what, number: None
    made.store.close()


NAMES = [b"unit-%d" % n for n in range(12)]


# -- the medium fails -----------------------------------------------------------------------------


def test_a_place_that_cannot_be_read_is_a_miss_and_not_used_again(rig: Rig) -> None:
    store = rig.store
    assert run(store.write, *map(piece_of, NAMES)) == Report()
    rig.files.fault = fails(errno.EIO, "read")
    report = run(store.read, Piece(NAMES[0], room(size_of(NAMES[0]))))
    assert report.failed == (NAMES[0],)
    assert report.error == "io"
    rig.files.fault = fails(0)
    assert not right(store, NAMES[0])
    assert all(right(store, name) for name in NAMES[1:])
    assert store.quarantined_bytes > 0
    assert store.counts.all()["quarantined"] == 1
    whole(store)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_writes_that_fail_keep_nothing_and_reads_go_on(rig: Rig, code: int) -> None:
    store = rig.store
    assert run(store.write, piece_of(b"before")) == Report()
    rig.files.fault = fails(code, "write")
    report = run(store.write, *map(piece_of, NAMES))
    assert set(report.failed) == set(NAMES)
    assert report.error == ("full" if code == errno.ENOSPC else "io")
    assert right(store, b"before")
    assert [entry.name for entry in store.scan()] == [b"before"]
    rig.files.fault = fails(0)
    assert run(store.write, piece_of(b"after")) == Report()
    whole(store)


def test_what_could_not_be_synced_is_not_promised(rig: Rig, tmp_path: Path) -> None:
    rig.files.fault = fails(errno.EIO, "sync")
    assert run(rig.store.write, piece_of(b"record", lasting=True)).failed == (b"record",)
    assert not right(rig.store, b"record")
    rig.files.fault = fails(0)
    rig.files.calls.clear()
    assert run(rig.store.write, piece_of(b"record", lasting=True)) == Report()
    assert "sync" in rig.files.calls, "what was written before must be synced now"
    whole(rig.store)


def test_only_what_must_last_is_synced(rig: Rig) -> None:
    run(rig.store.write, *map(piece_of, NAMES))
    assert "sync" not in rig.files.calls
    run(rig.store.write, piece_of(b"record", lasting=True))
    assert rig.files.calls.count("sync") >= 1
    rig.files.calls.clear()
    run(rig.store.write, piece_of(b"record-2", lasting=True))
    assert rig.files.calls.count("sync") == 1


def test_a_catalogue_that_cannot_be_written_to_fails_the_write(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = rig.store
    run(store.write, *map(piece_of, NAMES))
    apply = store._commits._catalogue.apply

    def full(*args: object, **kwargs: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store._commits._catalogue, "apply", full)
    assert run(store.write, piece_of(b"late")).failed == (b"late",)
    store.delete([NAMES[0]])  # found by nobody, though it could not be written down
    assert not right(store, NAMES[0])
    monkeypatch.setattr(store._commits._catalogue, "apply", apply)
    assert run(store.write, piece_of(b"next")) == Report()
    again = rig.again(tmp_path)
    assert not right(again, NAMES[0])
    assert right(again, b"next")
    whole(again)
    again.close()


def test_a_resume_record_comes_last_and_says_what_must_be_there(rig: Rig, tmp_path: Path) -> None:
    key = b"k" * 32
    names = [name_of(key, part) for part in Part]
    units = [Piece(n, content(n, size_of(n)), index=12, fingerprint=b"f" * 32) for n in names]
    assert run(rig.store.write, *units) == Report()
    parts = tuple(
        Component(part, each.name, len(each.view), checksum_bytes(each.checksum))
        for part, each in zip(Part, units, strict=True)
    )
    packed = pack(ResumeRecord(key, 12, parts, fingerprint=b"f" * 32))
    seal = Piece(record_name(key), memoryview(packed), index=12, lasting=True)
    rig.files.calls.clear()
    assert run(rig.store.write, seal) == Report()
    assert rig.files.calls[-1] == "sync"
    again = rig.again(tmp_path)
    entries = {entry.name: entry for entry in again.scan()}
    read = Piece(record_name(key), room(entries[record_name(key)].size_bytes))
    assert run(again.read, read) == Report()
    record = unpack(read.view, ResumeRecord)
    assert record.key == key
    for each in record.components:
        entry = entries[each.name]
        assert (entry.size_bytes, entry.index) == (each.size_bytes, record.index)
        assert checksum_bytes(entry.checksum) == each.checksum
        back = Piece(each.name, room(each.size_bytes), entry.checksum, fingerprint=b"f" * 32)
        assert run(again.read, back) == Report()
    again.close()


def test_a_caller_that_fails_harms_nobody_else(rig: Rig) -> None:
    def fails(*report: Report) -> None:
        raise ValueError("as told")

    for _ in range(5):  # more than there are threads
        rig.store.write([piece_of(b"one")], fails)
        rig.store.read([Piece(b"none", room(5), released=fails)], fails)
    assert run(rig.store.write, piece_of(b"two")) == Report()
    counts = rig.store.counts.all()
    assert 1 <= counts["done_failed"] <= 10
    assert counts["released_failed"] >= 1


# -- bytes change behind its back -----------------------------------------------------------------


def spoil(store: DiskStore, name: bytes, at: int, data: bytes) -> None:
    """Write into a stored unit, from its first byte on counted by ``at``."""
    held = store._held[name]
    number, offset = divmod(held.place, store._room.segment_bytes)
    with store._files.path(number).open("r+b") as file:
        file.seek(offset + (at if at >= 0 else held.room + at))
        file.write(data)


@pytest.mark.parametrize("name", [b"unit-%d" % n for n in range(6)])
def test_another_unit_in_its_place_is_noticed(rig: Rig, name: bytes) -> None:
    """What a lost or misdirected write leaves: whole, with a right checksum, and not this."""
    store = rig.store
    size = size_of(name)
    other = Piece(b"other", content(b"other", size))
    assert run(store.write, Piece(name, content(name, size)), other) == Report()
    held = store._held[b"other"]
    number, offset = divmod(held.place, store._room.segment_bytes)
    with store._files.path(number).open("rb") as file:
        file.seek(offset)
        data = file.read(held.room)
    spoil(store, name, 0, data)
    assert run(store.read, Piece(name, room(size))).damaged == (name,)
    assert store.counts.all()["read_foreign"] == 1
    whole(store)


def test_random_damage_is_always_noticed(rig: Rig) -> None:
    store, draw = rig.store, random.Random(3)
    for round_ in range(60):
        name = b"round-%d" % round_
        size = size_of(name)
        assert run(store.write, Piece(name, content(name, size))) == Report()
        held = store._held[name]
        # Past the label lies only padding; what is damaged there harms nobody.
        end = size + len(disk_label(store, name))
        at = draw.randrange(end)
        count = min(draw.choice([1, 1, 8, 600]), end - at)
        number, offset = divmod(held.place, store._room.segment_bytes)
        with store._files.path(number).open("rb") as file:
            file.seek(offset + at)
            old = file.read(count)
        new = draw.choice([bytes(count), draw.randbytes(count), bytes(b ^ 128 for b in old)])
        spoil(store, name, at, new)
        report = run(store.read, Piece(name, room(size)))
        assert report.damaged == (() if new == old else (name,))
        store.delete([name])
    whole(store)


def disk_label(store: DiskStore, name: bytes) -> bytes:
    return pack(store._held[name].label)


def test_a_file_that_was_cut_is_noticed_at_once_and_after_a_restart(
    rig: Rig, tmp_path: Path
) -> None:
    store = rig.store
    pieces = [Piece(name, content(name, 60_000)) for name in NAMES]
    assert run(store.write, *pieces) == Report()
    os.truncate(store._files.path(0), 100_000)
    reports = [run(store.read, Piece(name, room(60_000))) for name in NAMES[:6]]
    assert any(report.damaged for report in reports)
    again = rig.again(tmp_path)
    for name in [entry.name for entry in again.scan()]:
        piece = Piece(name, room(60_000))
        report = run(again.read, piece)
        assert report.damaged or piece.view == content(name, 60_000)
    assert run(again.write, *(Piece(b"new-%d" % n, content(b"x", 60_000)) for n in range(3)))
    whole(again)
    again.close()


@pytest.mark.parametrize("damage", ["gone", "text", "cut", "middle", "form"])
def test_a_damaged_catalogue_is_an_empty_store_or_a_right_one(
    rig: Rig, tmp_path: Path, damage: str
) -> None:
    run(rig.store.write, *map(piece_of, NAMES))
    rig.store.close()
    path = tmp_path / "catalogue.db"
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "form":
        with sqlite3.connect(path) as db:
            db.execute("UPDATE meta SET value = 99 WHERE key = 'form'")
        db.close()
    else:
        middle = data[: len(data) // 2]
        path.write_bytes(
            {"text": b"no database" * 500, "cut": middle}.get(
                damage, middle + os.urandom(2000) + data[len(middle) + 2000 :]
            )
        )
    again = opened(tmp_path)
    if damage not in ("gone", "middle"):  # there it may have hit nothing
        assert again.counts.all().get("catalogue_lost") == 1
    assert run(again.write, *map(piece_of, NAMES)) == Report()
    assert all(right(again, name) for name in NAMES)
    whole(again)
    again.close()


def test_rows_that_cannot_be_are_left_out(rig: Rig, tmp_path: Path) -> None:
    run(rig.store.write, *map(piece_of, NAMES))
    rig.store.close()
    with sqlite3.connect(tmp_path / "catalogue.db") as db:
        order = "(SELECT name FROM units ORDER BY place LIMIT 1 OFFSET ?)"
        db.execute(f"UPDATE units SET label = x'00' WHERE name = {order}", (0,))
        db.execute(f"UPDATE units SET place = -4096 WHERE name = {order}", (3,))
        db.execute(f"UPDATE units SET place = 1 << 40 WHERE name = {order}", (5,))
        db.execute(f"UPDATE units SET room = room + 4096 WHERE name = {order}", (7,))
    db.close()
    again = opened(tmp_path)
    assert again.counts.all()["found_unusable"] >= 4
    assert len(list(again.scan())) >= len(NAMES) - 6
    whole(again)
    again.close()


# -- limits and deadlines -------------------------------------------------------------------------


class Stall:
    """Holds calls until it is told to let them go on."""

    def __init__(self, *whats: str) -> None:
        self.whats = whats
        self.reached = threading.Semaphore(0)
        self.go = threading.Event()

    def __call__(self, what: str, number: int) -> None:
        if what in self.whats:
            self.reached.release()
            assert self.go.wait(WAIT_S)


def test_a_stalled_disk_fails_by_the_deadline_and_harms_nobody_later(tmp_path: Path) -> None:
    rig = Rig(tmp_path, deadline_s=0.3, threads=2)
    store = rig.store
    assert run(store.write, *map(piece_of, NAMES)) == Report()
    stall = Stall("read", "write")
    rig.files.fault = stall
    released: list[bytes] = []
    pieces = [
        Piece(name, room(size_of(name)), released=lambda name=name: released.append(name))  # type: ignore[misc]
        for name in NAMES[:5]
    ]
    began = time.monotonic()
    report = run(store.read, *pieces)
    assert set(report.failed) == set(NAMES[:5])
    assert report.error == "late"
    assert time.monotonic() - began < 10
    hanging = sum(stall.reached.acquire(blocking=False) for _ in range(2))
    assert 3 <= len(released) <= 5 - hanging, "what hangs in the kernel still touches its view"
    stall.go.set()
    store.close()  # which leaves a thread that takes its time
    until = time.monotonic() + 10.0
    while len(released) < 5 and time.monotonic() < until:
        time.sleep(0.001)
    assert sorted(released) == NAMES[:5]
    assert store.counts.all()["read_late"] == 5
    again = opened(tmp_path)
    assert all(right(again, name) for name in NAMES)
    whole(again)
    again.close()


def test_a_write_that_came_too_late_is_not_there(tmp_path: Path) -> None:
    rig = Rig(tmp_path, deadline_s=0.3)
    stall = Stall("write")
    rig.files.fault = stall
    assert run(rig.store.write, piece_of(b"slow")).failed == (b"slow",)
    free = rig.store.size_bytes - rig.store.free_bytes
    assert free > 0, "its room must not be anybody else's while it may still be written"
    stall.go.set()
    again = rig.again(tmp_path)
    assert not right(again, b"slow")
    whole(again)
    again.close()


def test_too_much_at_once_is_refused_and_said(tmp_path: Path) -> None:
    rig = Rig(tmp_path, queue_max=8, threads=2)
    stall = Stall("write")
    rig.files.fault = stall
    done = threading.Event()
    rig.store.write([piece_of(name) for name in NAMES[:8]], lambda report: done.set())
    stall.reached.acquire()
    report = run(rig.store.write, piece_of(b"more"))
    assert (report.failed, report.error) == ((b"more",), "busy")
    assert rig.store.counts.all()["write_busy"] == 1
    stall.go.set()
    assert done.wait(WAIT_S)
    assert run(rig.store.write, piece_of(b"more")) == Report()
    rig.store.close()


def test_many_reads_of_one_unit_are_one_read_of_the_disk(rig: Rig) -> None:
    name, size = b"shared", 200_000
    assert run(rig.store.write, Piece(name, content(name, size))) == Report()
    stall = Stall("read")
    rig.files.fault = stall
    reports: list[Report] = []
    ended = threading.Semaphore(0)
    pieces = [Piece(name, room(size)) for _ in range(20)]
    fits = threading.Event()

    def done(report: Report) -> None:
        reports.append(report)
        ended.release()

    for piece in pieces:
        rig.store.read([piece], done)
    stall.reached.acquire()
    until = time.monotonic() + WAIT_S
    while rig.store._workers._queue.qsize() and time.monotonic() < until:
        fits.wait(0.001)
    stall.go.set()
    for _ in pieces:
        assert ended.acquire(timeout=WAIT_S)
    assert reports == [Report()] * 20
    assert all(piece.view == content(name, size) for piece in pieces)
    assert rig.files.calls.count("read") <= 3


# -- places ---------------------------------------------------------------------------------------


def test_two_agents_do_not_share_a_directory(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another agent"):
        opened(tmp_path)


def test_no_room_and_no_right_are_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be made that large"):
        DiskStore(tmp_path / "huge", 1 << 60, segment_bytes=SEGMENT_BYTES)
    assert not list((tmp_path / "huge").glob("segment-*"))  # nothing was filled up on the way
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        opened(tmp_path / "file")
    for capacity in (0, -1, 100, 1.5, float("nan")):
        with pytest.raises(ConfigError):
            DiskStore(tmp_path / "small", capacity)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        opened(tmp_path / "bad", deadline_s=float("nan"))
    opened(tmp_path / "huge").close()  # the failed one left no lock


def test_a_read_only_disk_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("kvatlas.dataplane.tiers.disk_files.os.open", read_only)
    with pytest.raises(ConfigError, match="Read-only"):
        opened(tmp_path)


def test_it_grows_shrinks_and_drains(rig: Rig, tmp_path: Path) -> None:
    store = rig.store
    names = [b"unit-%d" % n for n in range(200)]
    report = run(store.write, *(Piece(name, content(name, 20_000)) for name in names))
    full = [name for name in names if name not in report.failed]
    assert store.resize(2 * CAPACITY_BYTES) == []
    assert store.size_bytes == 2 * CAPACITY_BYTES
    more = [Piece(b"more-%d" % n, content(b"more-%d" % n, 20_000)) for n in range(10)]
    assert run(store.write, *more) == Report()
    in_the_way = store.resize(SEGMENT_BYTES)
    assert set(in_the_way) < {*full, *(piece.name for piece in more)}
    assert run(store.read, *(Piece(name, room(20_000)) for name in in_the_way)) == Report()
    store.delete(in_the_way)
    assert [path.name for path in tmp_path.glob("segment-*")] == ["segment-00000.kv"]
    assert store.size_bytes == SEGMENT_BYTES
    rest = store.resize(0)
    assert set(rest) == {entry.name for entry in store.scan()}
    assert run(store.write, piece_of(b"none")).error == "full"
    store.delete(rest)
    assert not list(tmp_path.glob("segment-*"))
    assert store.resize(CAPACITY_BYTES) == []
    assert run(store.write, *map(piece_of, NAMES)) == Report()
    whole(store)


def test_a_segment_with_broken_places_goes_like_others(rig: Rig, tmp_path: Path) -> None:
    store = rig.store
    run(store.write, *map(piece_of, NAMES))
    rig.files.fault = fails(errno.EIO, "read")
    run(store.read, *(Piece(name, room(size_of(name))) for name in NAMES[:6]))
    rig.files.fault = fails(0)
    assert store.quarantined_bytes > 0
    store.delete(store.resize(0))
    assert not list(tmp_path.glob("segment-*"))
    assert (store.size_bytes, store.free_bytes, store.quarantined_bytes) == (0, 0, 0)
    store.resize(CAPACITY_BYTES)
    assert store.free_bytes == CAPACITY_BYTES


def test_a_smaller_disk_after_a_restart_forgets_what_lay_beyond(rig: Rig, tmp_path: Path) -> None:
    run(rig.store.write, *(Piece(b"%d" % n, content(b"%d" % n, 20_000)) for n in range(45)))
    rig.store.close()
    again = DiskStore(tmp_path, SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
    assert again.counts.all()["found_unusable"] > 0
    assert len(list(tmp_path.glob("segment-*"))) == 1
    assert 0 < len(list(again.scan())) < 45
    for entry in again.scan():
        assert run(again.read, Piece(entry.name, room(20_000))) == Report()
    again.close()


@pytest.mark.parametrize("segment_bytes", [SEGMENT_BYTES // 2, 2 * SEGMENT_BYTES])
def test_of_segments_of_another_size_the_first_is_kept_as_far_as_it_reaches(
    rig: Rig, tmp_path: Path, segment_bytes: int
) -> None:
    run(rig.store.write, *(Piece(b"%d" % n, content(b"%d" % n, 20_000)) for n in range(45)))
    before = rig.store._held.values()
    assert any(held.place >= SEGMENT_BYTES for held in before)
    ends = min(segment_bytes, SEGMENT_BYTES)
    fit = {held.label.name for held in before if held.place + held.room <= ends}
    rig.store.close()
    again = DiskStore(tmp_path, CAPACITY_BYTES, segment_bytes=segment_bytes)
    assert again.counts.all()["found_unusable"] == len(before) - len(fit)
    assert {entry.name for entry in again.scan()} == fit
    for name in fit:
        assert run(again.read, Piece(name, room(20_000))) == Report()
    again.delete(list(fit))
    assert run(again.write, *map(piece_of, NAMES)) == Report()
    whole(again)
    again.close()


@pytest.mark.parametrize("share", [0.5, 0.99, 1.01, 3])
def test_a_disk_of_one_segment_is_resized_over_a_restart(tmp_path: Path, share: float) -> None:
    """Below 1 GiB the one segment is as large as the disk."""
    store = DiskStore(tmp_path, CAPACITY_BYTES)
    written = [piece_of(b"%d" % n) for n in range(60)]
    written = [p for p in written if p.name not in run(store.write, p).failed]
    ends = {held.label.name: held.place + held.room for held in store._held.values()}
    store.close()
    again = DiskStore(tmp_path, int(share * CAPACITY_BYTES))
    fit = {name for name, end in ends.items() if end <= again.size_bytes}
    assert {entry.name for entry in again.scan()} == fit
    assert fit
    assert (share < 0.6) == (len(fit) < 0.9 * len(written))
    assert all(right(again, name) for name in fit)
    again.close()
    back = DiskStore(tmp_path, CAPACITY_BYTES)
    assert {entry.name for entry in back.scan()} == fit
    assert run(back.write, *(p for p in written if p.name not in fit)).damaged == ()
    whole(back)
    back.close()


def test_bytes_at_odd_addresses_are_stored_all_the_same(rig: Rig) -> None:
    odd = memoryview(bytearray(100_001))[1:]
    odd[:] = content(b"odd", 100_000)
    assert run(rig.store.write, Piece(b"odd", odd)) == Report()
    back = memoryview(bytearray(100_001))[1:]
    assert run(rig.store.read, Piece(b"odd", back)) == Report()
    assert back == odd


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.PLANES])
def test_coded_units_are_smaller_and_checked_like_others(tmp_path: Path, codec: Codec) -> None:
    rig = Rig(tmp_path, codec=codec)
    data = room(200_000)
    data[1::2] = bytes(60 + n % 3 for n in range(100_000))
    assert run(rig.store.write, Piece(b"floats", data)) == Report()
    assert run(rig.store.write, Piece(b"noise", content(b"noise", 50_000))) == Report()
    assert rig.store._held[b"floats"].room < 100_000
    for name, size in ((b"floats", 200_000), (b"noise", 50_000)):
        piece = Piece(name, room(size))
        assert run(rig.store.read, piece) == Report()
        assert piece.view == (data if name == b"floats" else content(name, size))
    spoil(rig.store, b"floats", 50, b"damage")
    assert run(rig.store.read, Piece(b"floats", room(200_000))).damaged == (b"floats",)
    rig.store.close()
    other = opened(tmp_path)  # as raw: what is there is read as it was written
    assert run(other.read, Piece(b"noise", room(50_000))) == Report()
    other.close()
