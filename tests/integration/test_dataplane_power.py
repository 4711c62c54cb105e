"""The disk store when its process is killed and when the power goes, by seed: what was promised is
there, nothing wrong is read, nothing leaks."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_kit import (
    CAPACITY_BYTES,
    WAIT_S,
    FaultyFiles,
    PowerFiles,
    opened,
    piece_of,
    right,
    run,
    watch,
    whole,
)

from kvatlas.dataplane.tiers.base import Piece, Report
from kvatlas.dataplane.tiers.disk import DiskStore

NAMES = [b"unit-%d" % n for n in range(12)]


# -- the process is killed ------------------------------------------------------------------------


def killed_runs(directory: Path, seeds: range) -> None:
    """One process after the other on one disk, each killed in the middle of its work."""
    promised: dict[bytes, str] = {}
    for seed in seeds:
        draw = random.Random(seed)
        command = [sys.executable, str(Path(__file__).with_name("disk_child.py"))]
        path = os.pathsep.join(filter(None, sys.path))
        child = subprocess.Popen(
            [*command, str(directory), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert child.stdout is not None
        lines = []
        for _ in range(draw.randint(1, 400)):
            lines.append(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().splitlines()
        child.stdout.close()
        child.wait(WAIT_S)
        assert lines[0].strip() == "open"
        for line in lines[1:]:
            told, _, name = line.strip().partition(" ")
            if line and name:
                promised[name.encode()] = told
        store = opened(directory)
        there = {entry.name for entry in store.scan()}
        for name, told in promised.items():
            if told in ("put", "seal"):
                assert right(store, name), f"seed {seed}: {name!r} was reported and is not there"
            elif told == "gone":
                assert name not in there, f"seed {seed}: {name!r} was deleted and is there"
        assert all(right(store, name) for name in there), "written, if never reported"
        assert not {"read_damaged", "read_foreign"} & set(store.counts.all())
        used = sum(held.room for held in store._held.values())
        assert store.free_bytes + used == store.size_bytes
        store.close()
        promised = {n: t for n, t in promised.items() if n in there and t != "gone"}
        for name in there:
            promised[name] = "put"


def test_a_killed_process_loses_nothing_that_was_reported(tmp_path: Path) -> None:
    killed_runs(tmp_path, range(4))


@pytest.mark.long
def test_two_hundred_killed_processes(tmp_path: Path) -> None:
    killed_runs(tmp_path, range(100, 300))


# -- the power goes -------------------------------------------------------------------------------


def one_cut(directory: Path, target: Path, seed: int) -> dict[str, int]:
    """Work until the power goes after so many calls; says what was found afterwards."""
    draw = random.Random(seed)
    files: list[PowerFiles] = []

    def made(path: Path) -> PowerFiles:
        files.append(PowerFiles(path))
        return files[0]

    store = opened(directory, files=made)
    (power,) = files
    watch(store, power)
    store._commits._catalogue._commits = draw.choice([0, 1985])  # a checkpoint, now and then
    sealed: set[bytes] = set()
    dropped: set[bytes] = set()
    before: dict[str, set[bytes]] = {}

    def cut() -> None:
        before.update(sealed=set(sealed), dropped=set(dropped))
        power.cut(target, draw)

    power.on_cut = cut
    power.left = draw.randint(2, 150)
    number = 0
    reported: list[bytes] = []
    while not power.off:
        number += 1
        names = [b"%d-%d-%d" % (seed, number, n) for n in range(draw.randint(1, 3))]
        report = run(store.write, *(piece_of(name) for name in names))
        with power.turn:
            reported += [name for name in names if name not in report.failed]
        if draw.random() < 0.3:
            record = b"%d-%d-record" % (seed, number)
            covered = list(reported)
            report = run(store.write, piece_of(record, lasting=True))
            with power.turn:
                if report == Report() and not power.off:
                    sealed |= {record, *covered}
        if reported and (report.failed or draw.random() < 0.4):
            name = reported.pop(draw.randrange(len(reported)))
            dropped.add(name)
            sealed.discard(name)
            store.delete([name])
    store.close()
    after = opened(target)
    there = {entry.name for entry in after.scan()}
    for name in before["sealed"] - before["dropped"]:
        assert right(after, name), f"seed {seed}: {name!r} was promised and is gone"
    whole_ones = sum(right(after, name) for name in there)
    found = {"there": len(there), "whole": whole_ones, "promised": len(before["sealed"])}
    whole(after)
    assert run(after.write, *map(piece_of, NAMES)) == Report()
    after.close()
    return found


def cuts(directory: Path, seeds: range) -> dict[str, int]:
    total = {"there": 0, "whole": 0, "promised": 0}
    for seed in seeds:
        found = one_cut(directory / f"disk-{seed}", directory / f"after-{seed}", seed)
        for key, count in found.items():
            total[key] += count
    return total


def test_after_a_loss_of_power_what_was_promised_is_there_and_nothing_is_wrong(
    tmp_path: Path,
) -> None:
    total = cuts(tmp_path, range(12))
    assert total["promised"] > 20
    assert total["there"] > total["whole"], "the fault did nothing: no write was torn"


@pytest.mark.long
def test_five_hundred_losses_of_power(tmp_path: Path) -> None:
    total = cuts(tmp_path, range(1000, 1500))
    assert total["there"] > total["whole"] > total["promised"] > 1000


def test_a_store_that_skips_its_sync_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: the promise without the sync."""
    monkeypatch.setattr(
        "kvatlas.dataplane.tiers.disk_commits.Commits._sync", lambda self: None, raising=True
    )
    with pytest.raises(AssertionError, match="was promised and is gone"):
        cuts(tmp_path, range(12))


def test_a_store_that_does_not_check_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: bytes given out as they come."""
    fetch: Callable[..., object] = DiskStore._fetch

    def trusting(self: DiskStore, held: object, piece: Piece) -> object:
        fetch(self, held, piece)
        return None

    monkeypatch.setattr(DiskStore, "_fetch", trusting)
    with pytest.raises(AssertionError, match="other bytes were read"):
        cuts(tmp_path, range(12))


# -- all at once ----------------------------------------------------------------------------------


def test_many_threads_on_a_disk_that_fails_now_and_then(tmp_path: Path) -> None:
    """Writes, reads, deletes and resizes of few names from six threads: never other bytes, and in
    the end every byte is accounted for."""
    made: list[FaultyFiles] = []

    def faulty(path: Path) -> FaultyFiles:
        made.append(FaultyFiles(path))
        return made[0]

    store = opened(tmp_path, files=faulty, queue_max=64)
    chance, turn = random.Random(5), threading.Lock()

    def fault(what: str, number: int) -> None:
        with turn:
            draw = chance.random()
        if draw < 0.02:
            raise OSError(errno.EIO if draw < 0.01 else errno.ENOSPC, "as told")

    made[0].fault = fault

    def work(seed: int) -> int:
        draw, arrived = random.Random(seed), 0
        for _ in range(120):
            names = list({b"unit-%d" % draw.randrange(60) for _ in range(3)})
            what = draw.random()
            if what < 0.45:
                run(store.write, *(piece_of(n, lasting=draw.random() < 0.05) for n in names))
            elif what < 0.8:
                arrived += sum(right(store, name) for name in names)
            elif what < 0.97:
                store.delete(names)
            else:
                store.resize(draw.choice([CAPACITY_BYTES // 2, CAPACITY_BYTES, CAPACITY_BYTES * 2]))
        return arrived

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(work, range(6))) > 50
    made[0].fault = lambda what, number: None
    assert "fault" not in store.counts.all()
    store.delete(store.resize(CAPACITY_BYTES))
    held = [entry.name for entry in store.scan()]
    whole(store)
    run(store.write, *map(piece_of, held[:5]))
    store.close()
    again = opened(tmp_path)
    assert all(right(again, name) for name in [entry.name for entry in again.scan()])
    whole(again)
    again.close()
