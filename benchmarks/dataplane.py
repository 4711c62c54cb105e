"""The data plane beside what the machine can do: the arena beside memcpy, the disk beside O_DIRECT.

All in one process and interleaved; a figure is the median over rounds of a ratio within one round,
since on a busy machine the absolute numbers say little. Blocks of 1 MiB, and bodies of DeepSeek V4
Flash: 62 pages (21 of 37,376, 21 of 8,448 and 20 of 1,168 bytes) per 256 tokens, which lie apart in
an engine and in one slot here. The disk's files lie in the directory ``KVATLAS_BENCH_DISK``, else
beside the benchmarks; fio is used where it is installed, beside a loop of our own over preadv.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.extents import GRAIN_BYTES, Extents, whole
from kvatlas.dataplane.tiers.base import Piece, Report, checksum_of
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.dram import DramStore, Unit

V4_PAGES = (37_376,) * 21 + (8_448,) * 21 + (1_168,) * 20
V4_BYTES = sum(V4_PAGES)
MIB = 1 << 20
UNITS = 128
ROUNDS = 15
DISK_UNITS = 256
DISK_ROUNDS = 7
DEPTH = 8
WAIT_S = 120.0
FLOORS = {"dram": 0.9, "disk": 0.8}
LOOKUP_BLOCKS = 400
Rates = dict[str, list[float]]


def memory(size_bytes: int) -> memoryview:
    """Filled pages, huge where allowed, of random bytes."""
    made = mmap.mmap(-1, size_bytes)
    made.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(made)
    block = random.Random(size_bytes).randbytes(MIB)
    for at in range(0, size_bytes, MIB):
        view[at : at + MIB] = block[: size_bytes - at]
    return view


def timed(
    act: Callable[[], object], size_bytes: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes per second."""
    start = clock()
    act()
    return size_bytes / (clock() - start)


def finished(act: Callable[..., None], pieces: list[Piece]) -> None:
    """One operation; anything but a full success ends the benchmark."""
    ended = threading.Event()
    reports: list[Report] = []
    act(pieces, lambda report: (reports.append(report), ended.set()))
    if not ended.wait(WAIT_S) or reports != [Report()]:
        raise RuntimeError(f"not all arrived: {reports}")


# -- dram -----------------------------------------------------------------------------------------


def parts_of(view: memoryview, sizes: tuple[int, ...]) -> list[memoryview]:
    """Pages that follow each other in ``view``, with a gap between: as an engine's layers lie."""
    parts, at = [], 0
    for size in sizes:
        parts.append(view[at : at + size])
        at += size + 4096
    return parts


def dram() -> Iterator[tuple[str, str, Rates]]:
    """What `write` and `read` do for blocks, and copies in place for pages."""
    for label, sizes in (("1 MiB", (MIB,)), ("V4 body, 62 pages", V4_PAGES)):
        size = sum(sizes)
        stride = whole(size + 4096 * len(sizes))
        outside = memory(UNITS * stride)
        plain = memory(UNITS * whole(size))
        engine = [parts_of(outside[n * stride : (n + 1) * stride], sizes) for n in range(UNITS)]
        target = [plain[n * whole(size) : n * whole(size) + size] for n in range(UNITS)]
        arena = Arena.create((UNITS + 2) * whole(size), directory=None)
        store = DramStore(arena)
        yield "dram", label, dram_rounds(store, engine, target)
        store.close()
        arena.close()


def dram_rounds(
    store: DramStore, engine: list[list[memoryview]], target: list[memoryview]
) -> Rates:
    """Put, get and the two memcpy of the same parts, one round after the other."""
    total = UNITS * len(target[0])
    names = [b"%d" % n for n in range(UNITS)]

    def copied_in() -> None:
        for parts, joined in zip(engine, target, strict=True):
            at = 0
            for part in parts:
                joined[at : at + len(part)] = part
                at += len(part)

    def copied_out() -> None:
        for parts, joined in zip(engine, target, strict=True):
            at = 0
            for part in parts:
                part[:] = joined[at : at + len(part)]
                at += len(part)

    def put() -> None:
        if len(engine[0]) == 1:
            finished(store.write, [Piece(n, p[0]) for n, p in zip(names, engine, strict=True)])
            return
        for name, parts in zip(names, engine, strict=True):
            put_parts(store, name, parts)

    def get() -> None:
        if len(engine[0]) == 1:
            finished(store.read, [Piece(n, p[0]) for n, p in zip(names, engine, strict=True)])
            return
        for name, parts in zip(names, engine, strict=True):
            get_parts(store, name, parts)

    rates: Rates = {"put": [], "get": [], "memcpy put": [], "memcpy get": []}
    for round_ in range(ROUNDS + 1):
        acts = {"memcpy put": copied_in, "put": put, "memcpy get": copied_out, "get": get}
        for name, act in acts.items():
            rate = timed(act, total, time.thread_time)  # nothing here waits for anything
            if round_:  # the first one is for the caches
                rates[name].append(rate)
        store.delete(names)
    return rates


def put_parts(store: DramStore, name: bytes, parts: list[memoryview]) -> None:
    """As an engine saves: reserve, copy in place, commit."""
    slot = store.reserve(name, sum(map(len, parts)))
    if slot is None:
        raise RuntimeError("no room")
    store.commit(name, Unit(slot, store.arena.copy_in(slot, parts)))


def get_parts(store: DramStore, name: bytes, parts: list[memoryview]) -> None:
    """As an engine loads: pin, copy out, check, unpin."""
    unit = store.pin(name)
    if unit is None:
        raise RuntimeError("gone")
    checksum = store.arena.copy_out(unit.slot, parts)
    store.unpin(unit.slot)
    if checksum != unit.checksum:
        raise RuntimeError("damaged")


# -- disk -----------------------------------------------------------------------------------------


@contextmanager
def bench_directory() -> Iterator[Path]:
    """On the file system that is measured; gone afterwards."""
    where = os.environ.get("KVATLAS_BENCH_DISK") or Path(__file__).parent
    path = Path(tempfile.mkdtemp(prefix="disk-", dir=where))
    try:
        yield path
    finally:
        shutil.rmtree(path)


class Raw:
    """`DEPTH` threads with preadv and pwritev at random places of a preallocated file."""

    def __init__(self, path: Path, block_bytes: int, slots: list[memoryview]) -> None:
        self.block_bytes = block_bytes
        self.slots = slots
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, len(slots) * block_bytes)
        self.order = list(range(len(slots)))

    def run(self, call: Callable[..., int]) -> None:
        """One pass over all blocks."""
        random.shuffle(self.order)
        work = iter(list(self.order))
        lock = threading.Lock()

        def loop() -> None:
            while True:
                with lock:
                    n = next(work, None)
                if n is None:
                    return
                if call(self.fd, [self.slots[n]], n * self.block_bytes) != self.block_bytes:
                    raise RuntimeError("a short transfer")

        threads = [threading.Thread(target=loop) for _ in range(DEPTH)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def fio(path: Path, kind: str, block_bytes: int, total: int) -> float | None:
    """Bytes per second of fio's io_uring engine with the same pattern; None: it is not here."""
    if shutil.which("fio") is None:
        return None
    options = {
        "name": "a",
        "filename": str(path),
        "size": total,
        "rw": f"rand{kind}",
        "bs": block_bytes,
        "iodepth": DEPTH,
        "ioengine": "io_uring",
        "direct": 1,
        "output-format": "json",
    }
    command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job[kind]["bw_bytes"])


def disk() -> Iterator[tuple[str, str, Rates]]:
    """Store, raw loop and fio in turns."""
    for label, size in (("1 MiB", MIB), ("V4 body, 985,664 bytes", V4_BYTES)):
        block = whole(size)
        room = whole(size + 512)
        arena = memory(DISK_UNITS * block)
        slots = [arena[n * block : (n + 1) * block] for n in range(DISK_UNITS)]
        with bench_directory() as directory:
            capacity = (DISK_UNITS + 8) * room
            store = DiskStore(directory / "store", capacity, threads=DEPTH)
            raw = Raw(directory / "raw", block, slots)
            rates = disk_rounds(store, raw, [slot[:size] for slot in slots], directory / "raw")
            os.close(raw.fd)
            store.close()
            note = "" if store.transport == "O_DIRECT" else " (no O_DIRECT here)"
        yield "disk", label + note, rates


def disk_rounds(store: DiskStore, raw: Raw, views: list[memoryview], path: Path) -> Rates:
    """Put and get of all units, as one operation each, beside the same by other means."""
    size = len(views[0])
    total, useful = len(views) * raw.block_bytes, len(views) * size
    names = [b"%d" % n for n in range(len(views))]
    checksums = [checksum_of(view) for view in views]
    rates: Rates = {key: [] for key in ("put", "get", "raw put", "raw get", "fio put", "fio get")}
    cpu: Rates = {key: [] for key in ("put", "get", "raw put", "raw get")}

    def measure(name: str, act: Callable[[], object], size_bytes: int) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF)
        rates[name].append(timed(act, size_bytes))
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        cpu[name].append(spent / size_bytes * 1e9)

    for round_ in range(DISK_ROUNDS + 1):
        shuffled = random.Random(round_).sample(range(len(views)), len(views))
        # Known since a unit came to dram, as its agent has it.
        writes = [Piece(names[n], views[n], checksums[n]) for n in shuffled]
        reads = [Piece(names[n], views[n]) for n in reversed(shuffled)]
        measure("raw put", lambda: raw.run(os.pwritev), total)
        measure("put", lambda pieces=writes: finished(store.write, pieces), useful)  # type: ignore[misc]
        measure("raw get", lambda: raw.run(os.preadv), total)
        measure("get", lambda pieces=reads: finished(store.read, pieces), useful)  # type: ignore[misc]
        for kind, name in (("write", "fio put"), ("read", "fio get")):
            if (rate := fio(path, kind, raw.block_bytes, total)) is not None:
                rates[name].append(rate)
        if not round_:
            for each in (*rates.values(), *cpu.values()):
                each.clear()
        store.delete(names)
    for name, spent in cpu.items():
        rates[f"{name}, CPU seconds per GB"] = spent
    return rates


# -- small things ---------------------------------------------------------------------------------


def micros(act: Callable[[], object], times: int) -> float:
    """Median of single calls, in µs."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        act()
        taken.append((time.perf_counter() - start) * 1e6)
    return statistics.median(taken)


def small() -> dict[str, float]:
    """Lookups, commits, and how full an area gets before a unit does not fit any more."""
    arena = memory(8 * GRAIN_BYTES)
    names = [b"%032d" % n for n in range(LOOKUP_BLOCKS)]
    with bench_directory() as directory:
        store = DiskStore(directory, 64 * MIB)
        finished(store.write, [Piece(name, arena[:4096]) for name in names])
        file = os.open(directory / "synced", os.O_RDWR | os.O_CREAT, 0o600)
        figures = {
            "a page written and fdatasync, µs": micros(
                lambda: (os.pwrite(file, arena[:4096], 0), os.fdatasync(file)), 100
            ),
            "lookup of 400 blocks, disk, µs": micros(lambda: store.has(names), 200),
            "write of 4 KiB, reported, µs": micros(
                _numbered(lambda name: finished(store.write, [Piece(name, arena[:4096])])), 300
            ),
            "the same, lasting, µs": micros(
                _numbered(
                    lambda name: finished(store.write, [Piece(name, arena[:4096], lasting=True)]),
                    1000,
                ),
                100,
            ),
            "delete, µs": micros(_numbered(lambda name: store.delete([name])), 300),
        }
        os.close(file)
        store.close()
    memory_store = DramStore(Arena.create(4 * MIB, directory=None))
    finished(memory_store.write, [Piece(name, arena[:4096]) for name in names])
    figures["lookup of 400 blocks, dram, µs"] = micros(lambda: memory_store.has(names), 200)
    memory_store.close()
    memory_store.arena.close()
    for label, sizes in (
        ("V4 Flash, minimal points", [V4_BYTES] * 7 + [4_100_000]),
        ("V4 Flash, full points", [V4_BYTES] * 7 + [15_467_904]),
        ("three models", [V4_BYTES, 4_100_000, 1_400_000, 524_288, 65_536]),
    ):
        figures[f"room in use at the first refusal, {label}"] = fullness(sizes)
    return figures


def _numbered(act: Callable[[bytes], object], start: int = 0) -> Callable[[], object]:
    numbers = itertools.count(start)
    return lambda: act(b"%d" % next(numbers))


def fullness(sizes: list[int], area_bytes: int = 4 << 30, turns: int = 20_000) -> float:
    """Units come, and when there is no room a random one goes: the worst an eviction can do.
    Share of the area in use whenever something was refused."""
    extents, draw = Extents(area_bytes), random.Random(4)
    held: list[tuple[int, int]] = []
    shares = []
    for _ in range(turns):
        size = draw.choice(sizes)
        while (offset := extents.take(size)) is None:
            shares.append(1 - extents.free_bytes / area_bytes)
            extents.give(*held.pop(draw.randrange(len(held))))
        held.append((offset, size))
    return statistics.fmean(shares)


def run() -> dict[str, Any]:
    """All of it; prints as it goes."""
    console = Console()
    table = Table("", "", "GB/s", "beside", "GB/s", "ratio", "spread", "floor")
    figures: dict[str, Any] = {}
    for tier, label, rates in (*dram(), *disk()):
        for what in ("put", "get"):
            for other in ("memcpy", "raw", "fio"):
                base = rates.get(f"{other} {what}")
                if not base:
                    continue
                ratios = sorted(a / b for a, b in zip(rates[what], base, strict=True))
                ratio = statistics.median(ratios)
                figures[f"{tier}, {label}, {what} / {other}"] = round(ratio, 3)
                table.add_row(
                    f"{tier} {what}",
                    label,
                    f"{statistics.median(rates[what]) / 1e9:.2f}",
                    other,
                    f"{statistics.median(base) / 1e9:.2f}",
                    f"{ratio:.2f}",
                    f"{ratios[len(ratios) // 4]:.2f} … {ratios[-1 - len(ratios) // 4]:.2f}",
                    f"{FLOORS[tier]}",
                )
            if spent := rates.get(f"{what}, CPU seconds per GB"):
                raw = statistics.median(rates[f"raw {what}, CPU seconds per GB"])
                figures[f"{tier}, {label}, {what}, CPU s/GB"] = round(statistics.median(spent), 3)
                figures[f"{tier}, {label}, raw {what}, CPU s/GB"] = round(raw, 3)
    console.print(table)
    more = {name: round(value, 3) for name, value in small().items()}
    for name, value in (*more.items(), *((k, v) for k, v in figures.items() if "CPU" in k)):
        console.print(f"{name}: {value}")
    return figures | more
