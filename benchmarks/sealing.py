"""The disk tier sealed beside the same tier in the clear, and both beside what AES-GCM can do here.

Two stores on one file system in one process, round by round in turns, each first in every other
round; a figure is the median over rounds of a ratio within one round. Values of 1 MiB and bodies of
DeepSeek V4 Flash, eight in flight and one at a time. What is written is summed before, as an agent
has it. ``limit``: the library alone, in memory that stays near, on one thread and on as many as
there are cores: no sealed tier is faster than that. The files lie in the directory
``KVATLAS_BENCH_DISK``, else beside the benchmarks.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from rich.console import Console
from rich.table import Table

from benchmarks.dataplane import (
    DEPTH,
    MIB,
    V4_BYTES,
    Rates,
    bench_directory,
    finished,
    memory,
    timed,
)
from kvatlas.dataplane.extents import whole
from kvatlas.dataplane.keystore import FileKeys
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers.base import Piece, checksum_of
from kvatlas.dataplane.tiers.disk import DiskStore

SIZES = {"1 MiB": MIB, "V4 body, 985,664 bytes": V4_BYTES}
COUNT = 256
ONE_BY_ONE = 32
ROUNDS = 15
TENANT = "0123456789abcdef01234567"
WANTED = {"put": 0.75, "get": 0.85}
KINDS = ("clear", "sealed")


def limit(threads: int) -> float:
    """Bytes per second of the library, sealing values of a MiB in memory of each thread's own."""
    turns, key = 400, AESGCM(os.urandom(32))
    rooms = [(memory(MIB), memory(MIB + 4096)[: MIB + 16]) for _ in range(threads)]

    def work(plain: memoryview, into: memoryview) -> None:
        for _ in range(turns):
            key.encrypt_into(bytes(12), plain, b"", into)

    def all_of_them() -> None:
        workers = [threading.Thread(target=work, args=room) for room in rooms]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return timed(all_of_them, threads * turns * MIB)


class Sides:
    """Both stores, and the same values for both."""

    def __init__(self, directory: Path, size: int, undo: ExitStack) -> None:
        block = whole(size)
        arena = memory(COUNT * block)
        self.views = [arena[n * block : n * block + size] for n in range(COUNT)]
        self.sums = [checksum_of(view) for view in self.views]
        self.names = [b"%032d" % n for n in range(COUNT)]
        self.size = size
        sealers = {"clear": None, "sealed": Sealer(FileKeys.create(directory / "keys"))}
        capacity = (COUNT + 8) * whole(size + 512)
        self.stores = {
            kind: DiskStore(directory / kind, capacity, threads=DEPTH, sealer=sealer)
            for kind, sealer in sealers.items()
        }
        for store in self.stores.values():
            undo.callback(store.close)
        self.rates: Rates = {}

    def measure(self, name: str, act: Callable[[], object], size_bytes: int) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF)
        self.rates.setdefault(name, []).append(timed(act, size_bytes))
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.rates.setdefault(f"{name}, CPU", []).append(spent / size_bytes * 1e9)

    def round(self, number: int) -> None:
        """One of all; the first is for the caches."""
        order = random.Random(number).sample(range(COUNT), COUNT)
        kinds = KINDS if number % 2 else KINDS[::-1]
        total = COUNT * self.size

        def piece(n: int, checksum: int = 0) -> Piece:
            return Piece(self.names[n], self.views[n], checksum, tenant=TENANT)

        for kind in kinds:
            writes = [piece(n, self.sums[n]) for n in order]
            store = self.stores[kind]
            self.measure(f"{kind} put", lambda s=store, w=writes: finished(s.write, w), total)  # type: ignore[misc]
        for kind in kinds:
            reads = [piece(n) for n in reversed(order)]
            store = self.stores[kind]
            self.measure(f"{kind} get", lambda s=store, r=reads: finished(s.read, r), total)  # type: ignore[misc]
        few = order[:ONE_BY_ONE]
        for kind in kinds:
            self.measure(
                f"{kind} get, one at a time",
                lambda s=self.stores[kind]: [finished(s.read, [piece(n)]) for n in few],  # type: ignore[misc]
                len(few) * self.size,
            )
        for store in self.stores.values():
            store.delete(self.names)
        if not number:
            self.rates.clear()


def rounds(size: int) -> Rates:
    """All rounds of one size; the limit is taken within them."""
    with bench_directory() as directory, ExitStack() as undo:
        sides = Sides(directory, size, undo)
        for number in range(ROUNDS + 1):
            sides.round(number)
            for threads in sorted({1, os.cpu_count() or 1}):
                sides.rates.setdefault(f"limit, {threads} threads", []).append(limit(threads))
        return sides.rates


def run() -> dict[str, Any]:
    """All of it; prints as it goes."""
    console = Console()
    table = Table("", "", "sealed, GB/s", "clear, GB/s", "ratio", "quartiles", "wanted")
    figures: dict[str, Any] = {}
    for label, size in SIZES.items():
        rates = rounds(size)
        for what in ("put", "get", "get, one at a time"):
            ours, plain = rates[f"sealed {what}"], rates[f"clear {what}"]
            ratios = sorted(a / b for a, b in zip(ours, plain, strict=True))
            ratio = statistics.median(ratios)
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            figures[f"{label}, {what}, sealed / clear"] = round(ratio, 3)
            figures[f"{label}, {what}, quartiles"] = [round(low, 3), round(high, 3)]
            for kind in KINDS:
                speed, spent = (rates[f"{kind} {what}{more}"] for more in ("", ", CPU"))
                figures[f"{label}, {what}, {kind}, GB/s"] = round(statistics.median(speed) / 1e9, 2)
                figures[f"{label}, {what}, {kind}, CPU s/GB"] = round(statistics.median(spent), 3)
            table.add_row(
                what,
                label,
                f"{statistics.median(ours) / 1e9:.2f}",
                f"{statistics.median(plain) / 1e9:.2f}",
                f"{ratio:.2f}",
                f"{low:.2f} … {high:.2f}",
                f"{WANTED.get(what, '')}",
            )
        for name, found in rates.items():
            if name.startswith("limit"):
                figures[f"{label}, {name}, GB/s"] = round(statistics.median(found) / 1e9, 2)
    console.print(table)
    for name, value in figures.items():
        if "CPU" in name or "limit" in name:
            console.print(f"{name}: {value}")
    return figures
