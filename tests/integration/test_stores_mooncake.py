"""Mooncake's client among faults of its master and of the memory behind it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores_kit import Desk, finished, nothing_left, values, wait_until
from stores_rigs import MooncakeRig, mooncake_package

from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.tiers import child as children
from kvatlas.dataplane.tiers import mooncake, mooncake_client
from kvatlas.dataplane.tiers.base import Piece, Store
from kvatlas.errors import ConfigError

SIZE = 200_000
DEADLINE_S = 1.0

pytestmark = pytest.mark.engine


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[MooncakeRig]:
    if not mooncake_package():
        pytest.skip(mooncake.missing())
    made = MooncakeRig(tmp_path)
    yield made
    made.close()


def sizes(of: dict[bytes, bytes]) -> dict[bytes, int]:
    return {name: len(value) for name, value in of.items()}


def filled(store: Store, count: int = 4) -> dict[bytes, bytes]:
    made = values(count, SIZE)
    wait_until(lambda: Desk(store).write(made).failed == ())  # it connects in the background
    return made


def test_registered_memory_is_used_in_place(rig: MooncakeRig) -> None:
    store = rig.store(rig.port)
    arena = rig.arena.memory
    value = values(1, SIZE).popitem()[1]
    arena[:SIZE] = value
    assert finished(lambda done: store.write([Piece(b"n", arena[:SIZE])], done)).failed == ()
    target = Piece(b"n", arena[1 << 20 : (1 << 20) + SIZE])
    assert finished(lambda done: store.read([target], done)).failed == ()
    assert bytes(target.view) == value
    large = Piece(b"large", arena[: 8 << 20])
    assert finished(lambda done: store.write([large], done)).failed == ()
    outside = Piece(b"large", memoryview(bytearray(8 << 20)))
    assert finished(lambda done: store.read([outside], done)).failed == (b"large",)
    assert store.transport == "tcp"
    store.close()


def test_a_master_that_lost_its_index_is_told_and_all_is_missing(rig: MooncakeRig) -> None:
    lost: list[str] = []
    store = rig.store(rig.port, 3.0, lost)
    kept = filled(store)
    assert Desk(store).read(sizes(kept))[1] == kept
    rig.restart()
    wait_until(lambda: Desk(store).read(sizes(kept))[0].error == "missing", 60)
    wait_until(lambda: Desk(store).read(sizes(kept))[1] == {} and bool(lost), 60)
    assert "lost its index" in lost[0]
    assert store.counts["restarts"] == 1
    assert list(store.scan()) == []
    wait_until(lambda: Desk(store).write(kept).failed == (), 60)
    assert Desk(store).read(sizes(kept))[1] == kept
    store.close()


def test_a_stall_ends_by_the_deadline(rig: MooncakeRig) -> None:
    store, other = rig.store(rig.port, DEADLINE_S), rig.store(rig.port)
    kept = filled(store)
    wait_until(lambda: Desk(other).read(sizes(kept))[1] == kept)
    processes = (rig.master.process, rig.segment)
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda stat=stat: ") T" in stat.read_text())  # type: ignore[misc]
    released: list[bytes] = []
    pieces = [
        Piece(n, memoryview(bytearray(SIZE)), released=lambda n=n: released.append(n))  # type: ignore[misc]
        for n in kept
    ]
    started = time.monotonic()
    report = finished(lambda done: store.read(pieces, done))
    assert time.monotonic() - started < DEADLINE_S + 1
    assert report.failed  # what was on its way already may have come
    for process in processes:
        process.send_signal(signal.SIGCONT)
    wait_until(lambda: sorted(released) == sorted(kept), 60)  # the calls came back
    wait_until(lambda: Desk(other).read(sizes(kept))[1] == kept, 60)
    wait_until(lambda: Desk(store).read(sizes(kept))[1] == kept, 60)
    store.close()
    other.close()


def test_a_store_whose_memory_died_gives_whole_values_or_none(rig: MooncakeRig) -> None:
    store = rig.store(rig.port, 3.0)
    kept = filled(store)
    rig.segment.kill()
    rig.segment.wait()
    report, got = Desk(store).read(sizes(kept))
    assert not got
    assert set(report.failed) == set(kept)
    store.close()


def test_wrong_values_are_damaged_and_thrown_out(rig: MooncakeRig) -> None:
    store = rig.store(rig.port)
    kept = filled(store)
    value = values(1, SIZE, seed=1).popitem()[1]
    rig.put(b"flipped", value, bytes([value[0] ^ 1]) + value[1:])
    rig.put(b"shorter", value[:-1])
    rig.put(b"cut", value, value[:100])
    report, got = Desk(store).read(
        sizes(kept) | dict.fromkeys((b"flipped", b"shorter", b"cut"), SIZE)
    )
    assert got == kept
    assert set(report.damaged) == {b"flipped", b"shorter", b"cut"}
    assert Desk(store).read({b"flipped": SIZE})[0].failed == (b"flipped",)
    store.close()


def test_a_full_store_says_so(rig: MooncakeRig) -> None:
    store = rig.store(rig.port)
    arena = rig.arena.memory
    pieces = [Piece(b"%d" % n, arena[: 8 << 20]) for n in range(12)]
    report = finished(lambda done: store.write(pieces, done))
    assert report.failed
    assert store.counts["write_full"] == len(report.failed)
    store.close()


def test_without_a_master_everything_fails_and_nothing_hangs() -> None:
    if not mooncake_package():
        pytest.skip(mooncake.missing())
    arena = Arena.create(1 << 20, directory=None)
    settings = mooncake.Settings(master="127.0.0.1:1", deadline_s=DEADLINE_S)
    store = mooncake.MooncakeStore(settings, arena)
    started = time.monotonic()
    report = finished(lambda done: store.read([Piece(b"n", memoryview(bytearray(9)))], done))
    assert report.failed == (b"n",)
    assert report.silent
    store.close()
    assert time.monotonic() - started < 2 * DEADLINE_S + 2
    arena.close()


def test_closing_while_the_master_is_stalled_hangs_nobody(rig: MooncakeRig) -> None:
    """Mooncake's own close would keep its interpreter from running until the master is back."""
    store = rig.store(rig.port, DEADLINE_S)
    kept = filled(store, 1)
    rig.master.process.send_signal(signal.SIGSTOP)
    assert Desk(store).read(sizes(kept))[0].error in ("late", "io")
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < DEADLINE_S
    rig.master.process.send_signal(signal.SIGCONT)


def test_a_client_that_dies_in_mid_read_is_a_miss_and_another_follows(rig: MooncakeRig) -> None:
    store = rig.store(rig.port, 5.0)
    kept = filled(store)
    assert isinstance(store, mooncake.MooncakeStore)
    child = store._process._child._child
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    threading.Timer(0.1, child.kill).start()
    started = time.monotonic()
    report, got = Desk(store).read(sizes(kept))
    assert time.monotonic() - started < 4.0
    assert (set(report.failed), got) == (set(kept), {})
    wait_until(lambda: Desk(store).read(sizes(kept))[1] == kept, 60)
    assert store.counts["client_ended"] == 1
    assert store._process._child._child is not child
    store.close()


def test_a_client_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    if not mooncake_package():
        pytest.skip(mooncake.missing())
    real = children.subprocess.Popen

    def no_process(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(children.subprocess, "Popen", real)
        raise OSError("no process is left")

    monkeypatch.setattr(children.subprocess, "Popen", no_process)
    arena = Arena.create(1 << 20, directory=None)
    settings = mooncake.Settings(master="127.0.0.1:1", deadline_s=20.0)
    store = mooncake.MooncakeStore(settings, arena)
    started = time.monotonic()
    report = finished(lambda done: store.read([Piece(b"n", memoryview(bytearray(9)))], done))
    assert (report.error, report.silent) == ("io", True)
    assert time.monotonic() - started < 10.0
    assert store.counts["client_not_started"] == 1
    wait_until(lambda: store._process._child._child is not None)
    store.close()
    arena.close()


def test_nothing_of_the_client_is_left(rig: MooncakeRig) -> None:
    with nothing_left():
        store = rig.store(rig.port)
        filled(store, 1)
        assert isinstance(store, mooncake.MooncakeStore)
        child = store._process._child._child
        assert child is not None
        store.close()
        assert child.returncode is not None
        del store


def test_threads_that_wait_in_its_loop_give_way_and_no_others(rig: MooncakeRig) -> None:
    """They take a core from those that move the bytes otherwise, and verify nothing themselves."""
    store = rig.store(rig.port)
    assert Desk(store).read(sizes(filled(store)))[0].failed == ()
    assert isinstance(store, mooncake.MooncakeStore)
    child = store._process._child._child
    assert child is not None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    tasks = [int(task.name) for task in Path(f"/proc/{child.pid}/task").iterdir()]
    nice = Counter(os.getpriority(os.PRIO_PROCESS, task) for task in tasks)
    assert 1 <= nice.pop(min(19, own + mooncake_client.WAIT_NICE)) <= store.settings.threads
    assert set(nice) == {own}
    store.close()


@pytest.mark.parametrize(
    "bad",
    [
        {"protocol": "carrier pigeon"},
        {"threads": 0},
        {"deadline_s": float("nan")},
        {"bounce_bytes": 100},
    ],
)
def test_impossible_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        mooncake.Settings(**bad)  # type: ignore[arg-type]
