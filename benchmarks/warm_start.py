"""A snapshot of a directory and its restore: bytes, seconds, and how long one piece holds the loop.

64 engines hold chains of 128 blocks each. What is timed is what a gateway does between its slices:
claims to pieces to proved frames on one side, frames to claims of lives in doubt on the other.
Times are of a core (`time.thread_time`): what others do on this machine is not in them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.directory import CHURN_BLOCK_TOKENS, chains, resident_bytes
from benchmarks.peers import ROOT
from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Dispatcher, Join
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import plain
from kvatlas.core.records import Place, Publisher
from kvatlas.core.router import Router
from kvatlas.core.snapshot import Restore, engine_pieces
from kvatlas.core.snapshot_frames import NONCE_BYTES, Reader, Writer, encoded

WORKERS = 64
HOLDERS = (1_000_000, 10_000_000)
_FINGERPRINT = b"\1" * 32
_SECRET = b"a secret for the benchmark"
_PLACE = Place(1000, 1.0, 0, 0, True, False)


def _gateway() -> Dispatcher:
    ring = Keyring(_SECRET)
    dispatcher = Dispatcher(Directory(ring), Router(), ring)
    for number in range(WORKERS):
        join = Join(Publisher(f"worker-{number}"), plain(CHURN_BLOCK_TOKENS), _FINGERPRINT)
        dispatcher.handle(join, 0.0)
    return dispatcher


def measure(holders: int) -> dict[str, float]:
    """One snapshot, read as it is written; in a process of its own."""
    old = _gateway()
    directory, publishers = old.directory, old.directory.publishers()
    events = chains(1, CHURN_BLOCK_TOKENS)
    while directory.holders < holders:
        for publisher in publishers:
            directory.apply(publisher, [next(events)])
    new, nonce = _gateway(), bytes(NONCE_BYTES)
    before = resident_bytes()
    writer, reader = Writer(Keyring(_SECRET), nonce), Reader(Keyring(_SECRET), nonce)
    restore = Restore(new, lambda publisher, place: "")
    written: list[float] = []
    read: list[float] = []
    size = 0

    def carry(frame: bytes) -> None:
        nonlocal size
        size += len(frame)
        began = time.thread_time()
        reader.feed(frame)
        for piece in reader.pieces():
            restore.take(piece)
        read.append(time.thread_time() - began)

    carry(writer.opening())
    for publisher in publishers:
        pieces = engine_pieces(directory, publisher, _PLACE)
        while True:
            began = time.thread_time()
            piece = next(pieces, None)
            if piece is None:
                break
            frame = writer.frame(encoded(piece))
            written.append(time.thread_time() - began)
            carry(frame)
    carry(writer.closing())
    began = time.thread_time()
    taken = restore.commit()
    commit_s = time.thread_time() - began
    after = resident_bytes()
    for publisher in publishers:
        new.believe(publisher, True)
    assert taken.holders == new.directory.holders == directory.holders
    first = publishers[0]
    assert set(new.directory.holdings(first)) == set(directory.holdings(first))
    return {
        "holders": float(directory.holders),
        "bytes": float(size),
        "write_s": sum(written),
        "read_s": sum(read),
        "commit_ms": 1e3 * commit_s,
        "write_max_ms": 1e3 * max(written),
        "write_p50_ms": 1e3 * sorted(written)[len(written) // 2],
        "read_max_ms": 1e3 * max(read),
        "read_p50_ms": 1e3 * sorted(read)[len(read) // 2],
        "grown_mb": (after - before) / 1e6,
    }


def _alone(holders: int) -> dict[str, float]:
    code = (
        "import json, sys; from benchmarks import warm_start as w;"
        "print(json.dumps(w.measure(int(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, str(holders)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def run() -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    table = Table(title=f"a snapshot of {WORKERS} engines' blocks", title_justify="left")
    for column in (
        *("holders", "MB", "bytes each", "written in s", "read in s", "taken up in ms"),
        *("a piece, written: ms", "read: ms (median, longest)"),
    ):
        table.add_column(column, justify="right")
    figures: dict[str, Any] = {}
    for holders in HOLDERS:
        row = figures[str(holders)] = _alone(holders)
        table.add_row(
            f"{row['holders']:,.0f}",
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['bytes'] / row['holders']:.1f}",
            f"{row['write_s']:.2f}",
            f"{row['read_s']:.2f}",
            f"{row['commit_ms']:.1f}",
            f"{row['write_p50_ms']:.2f}, {row['write_max_ms']:.1f}",
            f"{row['read_p50_ms']:.2f}, {row['read_max_ms']:.1f}",
        )
    Console(width=120).print(table)
    return figures
