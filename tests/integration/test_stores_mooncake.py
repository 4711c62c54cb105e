"""Mooncake's client among faults of its master and of the memory behind it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores_kit import Desk, finished, values, wait_until
from stores_rigs import MooncakeRig, mooncake_package

from kvatlas.dataplane.tiers import mooncake
from kvatlas.dataplane.tiers.base import Piece, Store
from kvatlas.errors import ConfigError

SIZE = 200_000
DEADLINE_S = 1.0

pytestmark = [pytest.mark.engine, pytest.mark.long]  # see contract/test_tiers_remote.py


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[MooncakeRig]:
    if not mooncake_package():
        pytest.skip("mooncake-transfer-engine-non-cuda is not installed: make engines")
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
    arena = rig.arena._slots
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
    # Both are connected: a master that stops in mid-setup stops this process, too.
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
    arena = rig.arena._slots
    pieces = [Piece(b"%d" % n, arena[: 8 << 20]) for n in range(12)]
    report = finished(lambda done: store.write(pieces, done))
    assert report.failed
    assert store.counts["write_full"] == len(report.failed)
    store.close()


def test_without_a_master_everything_fails_and_nothing_hangs(tmp_path: Path) -> None:
    if not mooncake_package():
        pytest.skip("mooncake-transfer-engine-non-cuda is not installed: make engines")
    store = mooncake.MooncakeStore(mooncake.Settings(master="127.0.0.1:1", deadline_s=DEADLINE_S))
    started = time.monotonic()
    report = finished(lambda done: store.read([Piece(b"n", memoryview(bytearray(9)))], done))
    assert report.failed == (b"n",)
    store.close()
    assert time.monotonic() - started < 2 * DEADLINE_S + 2


def test_closing_while_the_master_is_stalled_hangs_nobody(rig: MooncakeRig) -> None:
    """Mooncake's own close would keep the interpreter from running until the master is back."""
    store = rig.store(rig.port, DEADLINE_S)
    kept = filled(store, 1)
    rig.master.process.send_signal(signal.SIGSTOP)
    assert Desk(store).read(sizes(kept))[0].error == "late"
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 3 * DEADLINE_S + 2
    assert store.counts["left_open"] == 1
    rig.master.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    "bad",
    [
        {"protocol": "carrier pigeon"},
        {"threads": 0},
        {"deadline_s": float("nan")},
        {"segment_bytes": -1},
        {"bounce_bytes": 4096},
    ],
)
def test_impossible_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        mooncake.Settings(**bad)  # type: ignore[arg-type]
