"""One suite for all stores: what `Store` promises, whatever carries the bytes.

A store is added by a `Kit` in `KITS`: how it is opened, what it can do, how a test damages it.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sealing_kit import sealer_of

from kvatlas.core.records import Tier
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.tiers.base import NAME_BYTES_MAX, Piece, Report, Store, checksum_of
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.dram import DramStore

CAPACITY_BYTES = 8 << 20
SIZES = (1, 100, 4095, 4096, 4097, 37_376, 985_664, 1 << 20)
WAIT_S = 30.0


class Kit:
    """A kind of store. ``lasts``: it is there after a restart; ``tells``: `scan` knows what was
    kept beside the bytes; ``limited``: it has room for `CAPACITY_BYTES` and no more."""

    tier: Tier
    lasts = False
    tells = True
    limited = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.arena = Arena.create(CAPACITY_BYTES, directory=None)

    def open(self) -> Store:
        """Again after `Store.close`: a restart."""
        raise NotImplementedError

    def damage(self, store: Any, name: bytes) -> None:
        """Flip one stored bit of a value."""
        raise NotImplementedError

    def close(self) -> None:
        """Whatever it started."""
        self.arena.close()


class Dram(Kit):
    tier = Tier.DRAM

    def open(self) -> Store:
        return DramStore(self.arena)

    def damage(self, store: DramStore, name: bytes) -> None:
        self.arena.view(store._units[name].slot)[-1] ^= 1


class Disk(Kit):
    tier = Tier.DISK
    lasts = True

    def open(self) -> Store:
        return DiskStore(self.directory, CAPACITY_BYTES, segment_bytes=4 << 20)

    def damage(self, store: DiskStore, name: bytes) -> None:
        held = store._held[name]
        number, offset = divmod(held.place, store._room.segment_bytes)
        with store._files.path(number).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


class SealedDisk(Disk):
    def open(self) -> Store:
        sealer = sealer_of(self.directory / "keys")
        return DiskStore(
            self.directory / "disk", CAPACITY_BYTES, segment_bytes=4 << 20, sealer=sealer
        )


KITS: tuple[type[Kit], ...] = (Dram, Disk, SealedDisk)


@pytest.fixture(params=KITS, ids=lambda kit: kit.__name__.lower())
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kit]:
    made: Kit = request.param(tmp_path)
    yield made
    made.close()


@pytest.fixture
def store(kit: Kit) -> Iterator[Store]:
    made = kit.open()
    yield made
    made.close()


def room(size_bytes: int) -> memoryview:
    """Bytes as the arena has them: from a page's start on."""
    return memoryview(mmap.mmap(-1, size_bytes))[:size_bytes]


def value(name: bytes, size_bytes: int, **more: Any) -> Piece:
    """A piece whose bytes follow from its name."""
    view = room(size_bytes)
    view[:] = random.Random(name).randbytes(size_bytes)
    return Piece(name, view, **more)


def blank(piece: Piece, **more: Any) -> Piece:
    """Room to read the same value into."""
    return Piece(piece.name, room(len(piece.view)), **more)


def start(act: Callable[..., None], pieces: Sequence[Piece]) -> Callable[[], Report]:
    """Begins an operation; the function waits for its report and sees that it is the only one."""
    reports: list[Report] = []
    ended = threading.Event()

    def done(report: Report) -> None:
        reports.append(report)
        ended.set()

    act(pieces, done)

    def wait() -> Report:
        assert ended.wait(WAIT_S), "no report came"
        (report,) = reports
        return report

    return wait


def run(act: Callable[..., None], *pieces: Piece) -> Report:
    return start(act, pieces)()


def same(left: Piece, right: Piece) -> bool:
    return bytes(left.view) == bytes(right.view)


# -- there and back -------------------------------------------------------------------------------


def test_what_was_written_is_read_whatever_its_size(store: Store) -> None:
    pieces = [value(b"value-%d" % size, size) for size in SIZES]
    assert run(store.write, *pieces) == Report()
    again = [blank(piece) for piece in pieces]
    assert run(store.read, *again) == Report()
    for piece, read in zip(pieces, again, strict=True):
        assert same(piece, read)
        assert piece.checksum in (0, read.checksum)
        assert read.checksum == checksum_of(piece.view)


def test_it_says_what_it_is(kit: Kit, store: Store) -> None:
    assert store.tier is kit.tier
    assert store.transport


def test_nothing_to_do_is_done(store: Store) -> None:
    assert run(store.write) == Report()
    assert run(store.read) == Report()
    store.delete([])
    assert list(store.scan()) == []


def test_what_is_not_there_is_named_and_the_rest_arrives(store: Store) -> None:
    there = value(b"there", 5000)
    assert run(store.write, there) == Report()
    read, gone = blank(there), Piece(b"gone", room(5000))
    report = run(store.read, read, gone)
    assert (report.failed, report.damaged, report.error) == ((b"gone",), (), "")
    assert same(there, read)


def test_if_nothing_arrives_it_says_why(store: Store) -> None:
    report = run(store.read, Piece(b"a", room(10)), Piece(b"b", room(10)))
    assert set(report.failed) == {b"a", b"b"}
    assert not report.damaged


def test_catalogue_lists_what_is_held(kit: Kit, store: Store) -> None:
    pieces = [
        value(b"unit-%d" % n, 3000 + n, index=n, tenant=f"t{n}", fingerprint=b"print")
        for n in range(20)
    ]
    assert run(store.write, *pieces) == Report()
    store.delete([b"unit-3", b"unit-3", b"never there"])
    entries = {entry.name: entry for entry in store.scan()}
    assert set(entries) == {piece.name for piece in pieces} - {b"unit-3"}
    for piece in pieces:
        if (entry := entries.get(piece.name)) is not None:
            assert entry.size_bytes == len(piece.view)
            assert entry.checksum in (0, checksum_of(piece.view))
            told = (entry.index, entry.tenant, entry.fingerprint)
            assert not kit.tells or told == (piece.index, piece.tenant, piece.fingerprint)


def test_views_are_let_go_of_once(store: Store) -> None:
    released: list[bytes] = []

    def piece(name: bytes, fresh: bool) -> Piece:
        made = value(name, 5000, released=lambda: released.append(name))
        return made if fresh else blank(made, released=made.released)

    names = [b"%d" % n for n in range(8)]
    run(store.write, *(piece(name, True) for name in names))
    run(store.read, *(piece(name, False) for name in [*names, b"gone"]))
    store.close()
    assert sorted(released) == sorted([*names, *names, b"gone"])


# -- what is wrong --------------------------------------------------------------------------------


def test_another_checksum_is_damage(store: Store) -> None:
    piece = value(b"name", 5000)
    assert run(store.write, piece) == Report()
    right = blank(piece, checksum=checksum_of(piece.view))
    assert run(store.read, right) == Report()
    wrong = blank(piece, checksum=checksum_of(piece.view) ^ 1)
    assert run(store.read, wrong).damaged == (b"name",)


@pytest.mark.parametrize("size_bytes", [1, 4096, 4999, 5001, 100_000])
def test_another_size_is_damage(store: Store, size_bytes: int) -> None:
    assert run(store.write, value(b"name", 5000)) == Report()
    assert run(store.read, Piece(b"name", room(size_bytes))).damaged == (b"name",)


def test_bytes_that_were_wrong_before_they_came_are_not_given_out(store: Store) -> None:
    piece = value(b"name", 5000)
    piece.checksum = checksum_of(piece.view)
    piece.view[7] ^= 1
    written = run(store.write, piece)
    assert written in (Report(), Report(damaged=(b"name",)))
    read = run(store.read, blank(piece))
    assert (read.failed if written.damaged else read.damaged) == (b"name",)


@pytest.mark.parametrize("size_bytes", [1, 4096, 985_664])
def test_a_flipped_bit_is_damage_once_and_then_nothing(
    kit: Kit, store: Store, size_bytes: int
) -> None:
    piece, other = value(b"name", size_bytes), value(b"other", 5000)
    assert run(store.write, piece, other) == Report()
    kit.damage(store, b"name")
    report = run(store.read, blank(piece), blank(other))
    assert (report.failed, report.damaged) == ((), (b"name",))
    assert run(store.read, blank(piece)).failed == (b"name",)
    assert b"name" not in {entry.name for entry in store.scan()}
    assert run(store.write, value(b"name", size_bytes)) == Report()
    read = blank(piece)
    assert run(store.read, read) == Report()
    assert same(piece, read)


def test_state_of_another_fingerprint_is_not_given_out(kit: Kit, store: Store) -> None:
    piece = value(b"name", 5000, fingerprint=b"one")
    assert run(store.write, piece) == Report()
    assert run(store.read, blank(piece, fingerprint=b"one")) == Report()
    assert run(store.read, blank(piece, fingerprint=b"two")).damaged == (b"name",)


@pytest.mark.parametrize(
    ("name", "view"),
    [
        (b"", memoryview(bytearray(10))),
        (b"n" * (NAME_BYTES_MAX + 1), memoryview(bytearray(10))),
        (b"empty", memoryview(bytearray())),
        (b"gaps", memoryview(bytearray(10))[::2]),
        (b"numbers", memoryview(bytearray(16)).cast("Q")),
        (b"rows", memoryview(bytearray(16)).cast("B", (4, 4))),
    ],
)
def test_what_cannot_be_stored_is_refused_alone(
    store: Store, name: bytes, view: memoryview
) -> None:
    good = value(b"good", 5000)
    for act in (store.write, store.read):
        report = run(act, good, Piece(name, view))
        assert report.failed == (name,)
    assert [entry.name for entry in store.scan()] == [b"good"]


def test_a_view_that_cannot_be_written_to_is_refused_and_nothing_is_lost(store: Store) -> None:
    piece = value(b"name", 5000)
    assert run(store.write, piece) == Report()
    assert run(store.read, Piece(b"name", memoryview(bytes(5000)))).failed == (b"name",)
    assert run(store.read, blank(piece)) == Report()


# -- immutable ------------------------------------------------------------------------------------


def test_a_name_keeps_its_value(store: Store) -> None:
    first, other = value(b"name", 5000), value(b"other", 5000)
    assert run(store.write, first) == Report()
    assert run(store.write, value(b"name", 5000)) == Report()
    run(store.write, Piece(b"name", other.view))
    read = blank(first)
    assert run(store.read, read) == Report()
    assert same(first, read)


def test_two_writers_of_one_name_leave_one_value(store: Store) -> None:
    for round_ in range(20):
        name = b"round-%d" % round_
        views = [value(b"%d-%d" % (round_, n), 200_000).view for n in (1, 2, 1, 2)]
        with ThreadPoolExecutor(len(views)) as threads:
            pieces = [Piece(name, view) for view in views]
            for wait in threads.map(lambda piece: start(store.write, [piece]), pieces):
                wait()
        read = Piece(name, room(200_000))
        assert run(store.read, read) == Report()
        assert bytes(read.view) in {bytes(view) for view in views}
        store.delete([name])


def test_what_was_deleted_is_gone_and_can_come_again(store: Store) -> None:
    piece = value(b"name", 5000)
    assert run(store.write, piece) == Report()
    store.delete([b"name"])
    assert run(store.read, blank(piece)).failed == (b"name",)
    other = Piece(b"name", value(b"other", 7000).view)
    assert run(store.write, other) == Report()
    read = blank(other)
    assert run(store.read, read) == Report()
    assert same(other, read)


# -- many at once, and limits ---------------------------------------------------------------------


def test_many_readers_and_writers_at_once(store: Store) -> None:
    pieces = [value(b"unit-%d" % n, 40_000 + n) for n in range(60)]
    waits = [start(store.write, [piece]) for piece in pieces]
    assert all(wait() == Report() for wait in waits)
    draw = random.Random(1)
    reads = [blank(draw.choice(pieces)) for _ in range(300)]
    waits = [start(store.read, reads[n : n + 10]) for n in range(0, 300, 10)]
    assert all(wait() == Report() for wait in waits)
    for read in reads:
        assert checksum_of(read.view) == checksum_of(value(read.name, len(read.view)).view)


def test_reads_while_it_is_deleted_and_written_anew(store: Store) -> None:
    """A place that is recycled during a read gives the old bytes or none: never others."""
    pieces = [value(b"unit-%d" % n, 300_000) for n in range(8)]
    truth = {piece.name: checksum_of(piece.view) for piece in pieces}
    run(store.write, *pieces)
    draw = random.Random(2)
    arrived = 0
    for _ in range(60):
        chosen = draw.sample(pieces, 4)
        reads = [blank(piece) for piece in chosen]
        wait = start(store.read, reads)
        store.delete([draw.choice(chosen).name])
        other = start(store.write, [draw.choice(pieces)])
        report = wait()
        other()
        assert not report.damaged
        for read in reads:
            if read.name not in report.failed:
                arrived += 1
                assert checksum_of(read.view) == truth[read.name]
    assert arrived > 100


def test_a_full_store_says_so_and_has_room_again(kit: Kit, store: Store) -> None:
    if not kit.limited:
        pytest.skip("this store has no limit of its own")
    for round_ in range(3):
        pieces = [value(b"%d-%d" % (round_, n), 1 << 20) for n in range(12)]
        report = run(store.write, *pieces)
        assert 1 <= len(report.failed) <= 6
        kept = [piece for piece in pieces if piece.name not in report.failed]
        for piece in kept:
            read = blank(piece)
            assert run(store.read, read) == Report()
            assert same(piece, read)
        huge = Piece(b"huge", room(2 * CAPACITY_BYTES))
        report = run(store.write, huge)
        assert report.failed == (b"huge",)
        assert report.error
        store.delete([piece.name for piece in pieces])
    assert list(store.scan()) == []


def test_after_the_end_everything_fails(store: Store) -> None:
    piece = value(b"name", 5000)
    assert run(store.write, piece) == Report()
    store.close()
    for act in (store.read, store.write):
        report = run(act, blank(piece))
        assert report.failed == (b"name",)
        assert report.error


def test_a_restart_finds_what_was_there(kit: Kit) -> None:
    if not kit.lasts:
        pytest.skip("nothing of this store outlives its process")
    first = kit.open()
    pieces = [value(b"unit-%d" % n, 50_000 + n, index=n) for n in range(20)]
    assert run(first.write, *pieces) == Report()
    first.delete([b"unit-4"])
    first.close()
    second = kit.open()
    assert {entry.name for entry in second.scan()} == {p.name for p in pieces} - {b"unit-4"}
    for piece in pieces:
        read = blank(piece)
        report = run(second.read, read)
        assert report.failed == ((b"unit-4",) if piece.name == b"unit-4" else ())
        assert report.failed or same(piece, read)
    second.close()
