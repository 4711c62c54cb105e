"""What is Valkey's own: values in several keys, TTL, a full server, one of another kind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores_kit import Desk, nothing_left, values, wait_until
from stores_rigs import ValkeyRig

from kvatlas.connectors.child import free_ports
from kvatlas.dataplane.tiers.valkey import Settings, ValkeyStore
from kvatlas.errors import ConfigError

CHUNK = 10_000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ValkeyRig]:
    with nothing_left():
        made = ValkeyRig(tmp_path)
        yield made
        made.close()


def opened(rig: ValkeyRig, **more: object) -> ValkeyStore:
    settings = {"port": rig.port, "streams": 2, "deadline_s": 5.0, **more}
    return ValkeyStore(Settings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 7 * CHUNK + 3])
def test_large_values_lie_in_several_keys(rig: ValkeyRig, size: int) -> None:
    store = opened(rig, chunk_bytes=CHUNK)
    kept = values(3, size)
    assert Desk(store).write(kept).failed == ()
    assert Desk(store).read(dict.fromkeys(kept, size))[1] == kept
    assert {(e.name, e.size_bytes) for e in store.scan()} == {(n, size) for n in kept}
    (count,) = rig.ask(b"DBSIZE")
    assert count == 3 * -(-size // CHUNK)
    for wrong in (1, size - 1, size + 1, size + CHUNK, 5):
        report, got = Desk(store).read(dict.fromkeys(kept, wrong))
        assert not got
        assert set(report.damaged) == set(kept)
    assert Desk(store).read(dict.fromkeys(kept, size))[1] == kept
    store.delete(list(kept))
    assert rig.ask(b"DBSIZE") == [0]
    store.close()


def test_a_chunk_that_is_gone_is_a_miss_and_one_that_is_wrong_is_damage(rig: ValkeyRig) -> None:
    store = opened(rig, chunk_bytes=CHUNK)
    kept = values(2, 3 * CHUNK)
    Desk(store).write(kept)
    one, two = kept
    rig.ask(b"DEL", b"kvatlas:c:\2\0\0\0" + one)
    rig.ask(b"SETRANGE", b"kvatlas:c:\1\0\0\0" + two, b"77", b"!")
    report, got = Desk(store).read(dict.fromkeys(kept, 3 * CHUNK))
    assert (report.failed, report.damaged, got) == ((one,), (two,), {})
    store.close()


def test_values_end_with_their_time_to_live(rig: ValkeyRig) -> None:
    store = opened(rig, ttl_s=0.3)
    kept = values(2, 1000)
    Desk(store).write(kept)
    assert Desk(store).read(dict.fromkeys(kept, 1000))[1] == kept
    wait_until(lambda: Desk(store).read(dict.fromkeys(kept, 1000))[1] == {})
    store.close()


def test_a_full_server_fails_what_does_not_fit_and_has_room_again(tmp_path: Path) -> None:
    rig = ValkeyRig(tmp_path, "--maxmemory", "12mb")
    store = opened(rig)
    for seed in range(3):
        made = values(20, 1 << 20, seed)
        report = Desk(store).write(made)
        assert 5 < len(report.failed) < 20
        kept = {n: v for n, v in made.items() if n not in report.failed}
        assert Desk(store).read(dict.fromkeys(kept, 1 << 20))[1] == kept
        store.delete(list(made))
    report = Desk(store).write({b"huge": bytes(20 << 20)})
    assert "OOM" in report.error
    assert store.counts["failed_full"] > 15
    store.close()
    rig.close()


def test_writing_again_keeps_the_value(rig: ValkeyRig) -> None:
    store = opened(rig)
    Desk(store).write({b"n": b"first"})
    assert Desk(store).write({b"n": b"other"}).failed == ()
    assert Desk(store).read({b"n": 5})[1] == {b"n": b"first"}
    store.close()


def test_a_cluster_is_refused_with_a_clear_word(tmp_path: Path) -> None:
    bus = str(free_ports(1)[0])  # else its port and 10,000 more: there may be none so high
    rig = ValkeyRig(tmp_path, "--cluster-enabled", "yes", "--cluster-port", bus)
    store = opened(rig)
    report = Desk(store).write({b"n": b"value"})
    assert "cluster: not supported yet" in report.error
    assert store.counts["failed_cluster"] == 1
    store.close()
    rig.close()


def test_a_password_is_needed_and_used(tmp_path: Path) -> None:
    rig = ValkeyRig(tmp_path, "--requirepass", "open sesame")
    for password, word in (("", "NOAUTH"), ("wrong", "WRONGPASS")):
        store = opened(rig, password=password)
        assert word in Desk(store).write({b"n": b"value"}).error
        assert store.counts["failed_denied"] == 1
        store.close()
    store = opened(rig, password="open sesame", database=3)
    assert Desk(store).write({b"n": b"value"}).error == ""
    store.close()
    rig.close()


def test_a_replica_cannot_be_written_and_says_so(tmp_path: Path, rig: ValkeyRig) -> None:
    replica = ValkeyRig(tmp_path, "--replicaof", "127.0.0.1", str(rig.port))
    store = opened(replica)
    assert "READONLY" in Desk(store).write({b"n": b"value"}).error
    assert store.counts["failed_read_only"] == 1
    store.close()
    replica.close()


def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    rig = ValkeyRig(tmp_path, "--unixsocket", str(path))
    store = ValkeyStore(Settings(str(path), 0))
    kept = values(3, 100_000)
    Desk(store).write(kept)
    assert Desk(store).read(dict.fromkeys(kept, 100000))[1] == kept
    assert store.transport == "unix"
    store.close()
    rig.close()


def test_something_else_on_the_port_is_no_server(rig: ValkeyRig) -> None:
    """Another protocol answers: counted, and nothing hangs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                with listener.accept()[0] as other:
                    other.sendall(b"SSH-2.0-OpenSSH_9.9\r\n" + b"x" * 5000)

        thread = threading.Thread(target=answer)
        thread.start()
        store = ValkeyStore(Settings(port=listener.getsockname()[1], deadline_s=2))
        started = time.monotonic()
        for _ in range(2):
            assert "is no answer" in Desk(store).read({b"n": 3})[0].error
        assert time.monotonic() - started < 5
        assert store.counts["failed_garbled"] == 2
        thread.join()
        store.close()


@pytest.mark.parametrize(
    "bad",
    [
        {"host": ""},
        {"port": 65536},
        {"port": -1},
        {"database": -1},
        {"ttl_s": -1.0},
        {"ttl_s": float("nan")},
        {"ttl_s": 1e-5},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 40},
    ],
)
def test_impossible_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Settings(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", [{"streams": 0}, {"queue_max": 0}, {"deadline_s": 0.0}, {"deadline_s": float("nan")}]
)
def test_impossible_limits_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ValkeyStore(Settings(**bad))  # type: ignore[arg-type]
