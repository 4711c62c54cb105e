"""An S3-compatible store among faults, over a proxy that misbehaves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores_kit import Desk, Proxy, finished, values, wait_until
from stores_rigs import S3Rig, s3_packages

from kvatlas.dataplane.tiers import s3
from kvatlas.dataplane.tiers.base import Piece, Store
from kvatlas.errors import ConfigError

SIZE = 200_000
DEADLINE_S = 1.5

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Rig]:
    if not s3_packages():
        pytest.skip("obstore or moto is not installed: make engines")
    made = S3Rig(tmp_path_factory.mktemp("s3"))
    yield made
    made.close()


@pytest.fixture
def proxy(rig: S3Rig) -> Iterator[Proxy]:
    made = Proxy(rig.port)
    yield made
    made.close()


@contextlib.contextmanager
def opened(rig: S3Rig, port: int, deadline_s: float = 10.0) -> Iterator[Store]:
    store = rig.store(port, deadline_s)
    yield store
    store.close()


def sizes(of: dict[bytes, bytes]) -> dict[bytes, int]:
    return {name: len(value) for name, value in of.items()}


def filled(rig: S3Rig, count: int = 4, seed: int = 0) -> dict[bytes, bytes]:
    made = values(count, SIZE, seed)
    for name, value in made.items():
        rig.put(name, value)
    return made


def test_a_stall_ends_by_the_deadline(rig: S3Rig, proxy: Proxy) -> None:
    kept = filled(rig)
    with opened(rig, proxy.port, DEADLINE_S) as store, opened(rig, rig.port) as other:
        wait_until(lambda: Desk(store).read(sizes(kept))[1] == kept)
        proxy.stalled.set()
        started = time.monotonic()
        report, got = Desk(store).read(sizes(kept))
        assert time.monotonic() - started < DEADLINE_S + 1
        assert not got
        assert set(report.failed) == set(kept)
        assert Desk(other).read(sizes(kept))[1] == kept
        proxy.stalled.clear()
        wait_until(lambda: Desk(store).read(sizes(kept))[1] == kept)


@pytest.mark.parametrize("cut", [50, 700, SIZE // 2])
def test_an_answer_cut_short_is_no_value(rig: S3Rig, proxy: Proxy, cut: int) -> None:
    kept = filled(rig)
    with opened(rig, proxy.port) as store:
        proxy.cut = cut
        report, got = Desk(store).read(sizes(kept))
        assert set(report.failed) == set(kept)
        assert not got
        proxy.cut = None
        assert Desk(store).read(sizes(kept))[1] == kept


def test_a_bit_flipped_on_the_way_is_never_taken(rig: S3Rig, proxy: Proxy) -> None:
    kept = filled(rig)
    with opened(rig, proxy.port) as store:
        for at in (3_000, 40_000):
            proxy.flip = lambda data, at=at: at if len(data) > at else None  # type: ignore[misc]
            report, got = Desk(store).read(sizes(kept))
            assert report.damaged or report.failed
            assert all(kept[name] == value for name, value in got.items())
        proxy.flip = None


def test_wrong_values_are_damaged(rig: S3Rig) -> None:
    kept = filled(rig)
    value = values(1, SIZE, seed=1).popitem()[1]
    rig.put(b"flipped", value, bytes([value[0] ^ 1]) + value[1:])
    rig.put(b"shorter", value[:-1])
    rig.put(b"cut", value, value[:100])
    wrong = dict.fromkeys((b"flipped", b"shorter", b"cut"), SIZE)
    with opened(rig, rig.port) as store:
        report, got = Desk(store).read(sizes(kept) | wrong)
        assert got == kept
        assert set(report.damaged) == set(wrong)
        assert store.counts["quarantined"] == 2  # of less than a head nothing is known
        assert Desk(store).read({b"flipped": SIZE})[0].failed == (b"flipped",)


def test_an_upload_cut_in_the_middle_leaves_nothing(rig: S3Rig, proxy: Proxy) -> None:
    made = values(2, SIZE, seed=7)
    made = {b"up" + name: value for name, value in made.items()}
    with opened(rig, proxy.port, 3.0) as store, opened(rig, rig.port) as direct:
        proxy.cut_up = SIZE // 2
        assert set(Desk(store).write(made).failed) == set(made)
        proxy.cut_up = None
        report, got = Desk(direct).read(sizes(made))
        assert not got
        assert set(report.failed) == set(made)
        assert Desk(store).write(made).failed == ()
        assert Desk(direct).read(sizes(made))[1] == made


def test_a_bucket_that_is_not_there_is_no_miss(rig: S3Rig) -> None:
    """All missing would look like an empty store."""
    settings = s3.Settings(
        "no-such-bucket",
        f"http://127.0.0.1:{rig.port}",
        access_key="key",
        secret_key="secret",
    )
    store = s3.S3Store(settings)
    report = Desk(store).read({b"n": 10})[0]
    assert report.error == "io"
    assert store.counts["failed_no_bucket"] == 1
    store.close()


def test_a_server_that_is_gone_fails_and_one_that_is_back_and_empty_is_a_miss(
    tmp_path: Path, rig: S3Rig
) -> None:
    own = S3Rig(tmp_path)
    kept = filled(own)
    with opened(own, own.port, 5.0) as store:
        assert Desk(store).read(sizes(kept))[1] == kept
        own.kill()
        assert Desk(store).read(sizes(kept))[0].error == "io"
        own._start()
        assert Desk(store).read(sizes(kept))[0].error == "missing"
        piece = Piece(b"n", memoryview(bytearray(10)))
        assert finished(lambda done: store.write([piece], done)).failed == ()
    own.close()


@pytest.mark.parametrize(
    "bad",
    [
        {"bucket": "no"},
        {"endpoint": "ftp://somewhere"},
        {"access_key": "alone"},
        {"prefix": ""},
        {"prefix": "/x/"},
        {"prefix": "x"},
        {"threads": 0},
        {"deadline_s": float("inf")},
        {"retries": -1},
    ],
)
def test_impossible_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        s3.Settings(**{"bucket": "kvatlas", **bad})  # type: ignore[arg-type]
