"""A disk that fails, stalls and loses its power, by seed, and what a store has to show for it."""

from __future__ import annotations

import errno
import itertools
import mmap
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvatlas.dataplane.tiers.base import Piece, Report
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.disk_files import Files

CAPACITY_BYTES = 1 << 20
SEGMENT_BYTES = 256 << 10
SECTOR_BYTES = 512
WAIT_S = 30.0


def room(size_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size_bytes))[:size_bytes]


def content(name: bytes, size_bytes: int) -> memoryview:
    view = room(size_bytes)
    view[:] = random.Random(name).randbytes(size_bytes)
    return view


def size_of(name: bytes) -> int:
    """Follows from the name, so that whoever finds it knows what must be there."""
    return random.Random(name + b"size").choice([1, 500, 4096, 8000, 20_000, 40_000])


def piece_of(name: bytes, *, lasting: bool = False) -> Piece:
    return Piece(name, content(name, size_of(name)), lasting=lasting)


def opened(directory: Path, **more: Any) -> DiskStore:
    return DiskStore(directory, CAPACITY_BYTES, segment_bytes=SEGMENT_BYTES, threads=3, **more)


def run(act: Callable[..., None], *pieces: Piece) -> Report:
    reports: list[Report] = []
    ended = threading.Event()
    act(pieces, lambda report: (reports.append(report), ended.set()))
    assert ended.wait(WAIT_S), "no report came"
    (report,) = reports
    return report


def right(store: DiskStore, name: bytes) -> bool:
    """Reads it; wrong bytes are never right, a miss is no fault."""
    piece = Piece(name, room(size_of(name)))
    report = run(store.read, piece)
    if name in report.failed or name in report.damaged:
        return False
    assert piece.view == content(name, len(piece.view)), f"{name!r}: other bytes were read"
    return True


def whole(store: DiskStore) -> None:
    """Nothing leaks: what is held and what is free make up the disk, and all of it can be used."""
    for name in [entry.name for entry in store.scan()]:
        right(store, name)  # what is damaged leaves
    used = sum(held.room for held in store._held.values())
    assert store.free_bytes + used + store.quarantined_bytes == store.size_bytes
    spans = sorted((held.place, held.place + held.room) for held in store._held.values())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    store.delete([entry.name for entry in store.scan()])
    assert store.free_bytes == store.size_bytes - store.quarantined_bytes


class FaultyFiles(Files):
    """Does what `fault` says before each call: raise, stall, or let it happen.

    ``fault(what, number)`` with what "read", "write" or "sync".
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fault: Callable[[str, int], None] = lambda what, number: None
        self.calls: list[str] = []

    def _before(self, what: str, number: int) -> None:
        self.calls.append(what)
        self.fault(what, number)

    def read(self, number: int, views: Sequence[memoryview], offset: int) -> int:
        self._before("read", number)
        return super().read(number, views, offset)

    def write(self, number: int, views: Sequence[memoryview], offset: int) -> int:
        self._before("write", number)
        return super().write(number, views, offset)

    def sync(self, number: int) -> None:
        self._before("sync", number)
        super().sync(number)


def fails(code: int, *whats: str) -> Callable[[str, int], None]:
    """A disk that answers this error."""

    def fault(what: str, number: int) -> None:
        if what in whats:
            raise OSError(code, "as told")

    return fault


class PowerFiles(Files):
    """Remembers what was never synced. `cut` leaves on a copy of the disk what a loss of power
    would: of each such write all, nothing, or some of its sectors."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.turn = threading.RLock()
        self.unsynced: dict[int, list[tuple[int, bytes, bytes]]] = {}
        self.log_bytes = 0  # of the catalogue's log, synced
        self.left = -1
        self.off = False
        self.on_cut: Callable[[], None] = lambda: None

    def step(self) -> None:
        """One more call; the power goes when there are none left."""
        if self.off:
            raise OSError(errno.EIO, "no power")
        self.left -= 1
        if self.left == 0:
            self.on_cut()
            self.off = True
            raise OSError(errno.EIO, "no power")

    def read(self, number: int, views: Sequence[memoryview], offset: int) -> int:
        with self.turn:
            self.step()
            return super().read(number, views, offset)

    def write(self, number: int, views: Sequence[memoryview], offset: int) -> int:
        with self.turn:
            size = sum(len(view) for view in views)
            old = room(size)
            super().read(number, [old], offset)
            count = super().write(number, views, offset)
            new = b"".join(views)
            self.unsynced.setdefault(number, []).append((offset, bytes(old), new))
            self.step()
            return count

    def sync(self, number: int) -> None:
        with self.turn:
            self.step()
            super().sync(number)
            self.unsynced.pop(number, None)

    def cut(self, target: Path, draw: random.Random) -> None:
        """Call it with `turn` held and no commit under way."""
        shutil.copytree(self.directory, target)
        for number, writes in self.unsynced.items():
            data = bytearray((target / self.path(number).name).read_bytes())
            for offset, old, new in writes:
                for at, kept in torn(old, new, draw):
                    data[offset + at : offset + at + len(kept)] = kept
            (target / self.path(number).name).write_bytes(data)
        log = target / "catalogue.db-wal"
        if log.exists():
            data = bytearray(log.read_bytes())
            end = draw.randint(min(self.log_bytes, len(data)), len(data))
            if draw.random() < 0.5:  # the file had grown, its last bytes were never written
                data[end:] = bytes(len(data) - end)
            else:
                del data[end:]
            log.write_bytes(data)


def torn(old: bytes, new: bytes, draw: random.Random) -> Iterator[tuple[int, bytes]]:
    """What is on the medium of a write that was never synced, sector by sector."""
    share = draw.choice([0.0, 0.5, 0.9, 1.0])
    for at in range(0, len(new), SECTOR_BYTES):
        source = new if draw.random() < share else old
        yield at, source[at : at + SECTOR_BYTES]


def watch(store: DiskStore, files: PowerFiles) -> None:
    """Commits take their turn with the power, and say how much of their log is synced."""
    catalogue = store._commits._catalogue
    log = catalogue.path.with_name("catalogue.db-wal")
    apply, checkpoint = catalogue.apply, catalogue.checkpoint

    def applied(put, drop, *, lasting):  # type: ignore[no-untyped-def]
        with files.turn:
            files.step()
            apply(put, drop, lasting=lasting)
            if lasting:
                files.log_bytes = log.stat().st_size

    def checkpointed() -> None:
        checkpoint()
        files.log_bytes = log.stat().st_size

    catalogue.apply = applied  # type: ignore[method-assign]
    catalogue.checkpoint = checkpointed  # type: ignore[method-assign]
