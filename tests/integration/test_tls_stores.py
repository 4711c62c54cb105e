"""TLS under the stores: peers that prove they are agents, and a Valkey behind TLS."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores_kit import Desk, Proxy, nothing_left, values, wait_until
from stores_rigs import PeerRig, ValkeyRig
from tls_kit import Authority

from kvatlas.cli.certs import issue
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.tiers import peer, valkey
from kvatlas.dataplane.tiers.base import Piece, Report
from kvatlas.dataplane.tiers.opening import open_object
from kvatlas.dataplane.tls import Trust
from kvatlas.errors import ConfigError
from kvatlas.service import agent_peers


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


class SecureRig(PeerRig):
    """A peer that speaks TLS."""

    def __init__(self, directory: Path, trust: Trust) -> None:
        super().__init__(directory, 32 << 20)
        self.server.close()
        self.server = peer.PeerServer(self.dram, token=b"secret", send_s=5.0, trust=trust)
        self.port = self.server.address[1]

    def asked(self, trust: Trust | None, deadline_s: float = 10.0) -> tuple[bool, str]:
        """Whether somebody reads a value here, and what he is told where he does not."""
        self.put(b"n", b"v" * 100)
        settings = peer.Settings("127.0.0.1", self.port, b"secret", deadline_s=deadline_s)
        store = peer.PeerStore(settings, trust=trust)
        reports: list[Report] = []
        place = bytearray(100)
        store.read([Piece(b"n", memoryview(place))], reports.append)
        wait_until(lambda: bool(reports))
        store.close()
        return bytes(place) == b"v" * 100, reports[0].error


@pytest.fixture
def rig(tmp_path: Path, authority: Authority) -> Iterator[SecureRig]:
    with nothing_left():
        made = SecureRig(tmp_path, authority.trust("agent", "node0"))
        yield made
        made.close()


def test_agents_read_from_each_other_whole_and_small(rig: SecureRig, authority: Authority) -> None:
    held = values(40, 300_000) | {b"small %d" % n: bytes([n]) * 7 for n in range(30)}
    for name, value in held.items():
        rig.put(name, value)
    settings = peer.Settings("127.0.0.1", rig.port, b"secret")
    store = peer.PeerStore(settings, trust=authority.trust("agent", "node1"))
    report, found = Desk(store).read({name: len(value) for name, value in held.items()})
    assert found == held
    assert not report.failed
    assert store.transport == rig.server.plain == "tls"
    assert {entry.name for entry in store.scan()} == set(held)
    store.close()


def test_bytes_on_the_way_are_not_those_of_the_value(rig: SecureRig, authority: Authority) -> None:
    seen = bytearray()
    proxy = Proxy(rig.port)
    proxy.flip = seen.extend  # which turns nothing over
    rig.put(b"n", b"secret of a tenant " * 5000)
    settings = peer.Settings("127.0.0.1", proxy.port, b"secret")
    store = peer.PeerStore(settings, trust=authority.trust("agent", "node1"))
    assert Desk(store).read({b"n": 95_000})[1] == {b"n": b"secret of a tenant " * 5000}
    store.close()
    proxy.close()
    assert len(seen) > 95_000
    assert b"secret of a tenant" not in seen


def test_a_gateway_is_no_peer(rig: SecureRig, authority: Authority, tmp_path: Path) -> None:
    assert rig.asked(authority.trust("agent", "node1")) == (True, "")
    read, error = rig.asked(authority.trust("gateway", "front"))
    assert not read
    assert error
    assert rig.server.counts.all()["denied_tls"] >= 1
    other = Authority(tmp_path / "other").trust("agent", "mallory")
    assert rig.asked(other)[0] is False


def test_a_gateways_certificate_lends_nothing(tmp_path: Path, authority: Authority) -> None:
    with nothing_left():
        rig = SecureRig(tmp_path, authority.trust("gateway", "mallory"))
        read, error = rig.asked(authority.trust("agent", "node1"))
        rig.close()
    assert not read
    assert "is of kvatlas://gateway/mallory: agent is wanted" in error


def test_a_plain_peer_is_told_to_speak_tls(rig: SecureRig) -> None:
    read, error = rig.asked(None)
    assert not read
    assert "speaks TLS only" in error
    assert rig.server.counts.all()["denied_plain"] >= 1


def test_a_peer_without_tls_is_not_read(tmp_path: Path, authority: Authority) -> None:
    with nothing_left():
        rig = PeerRig(tmp_path)
        rig.put(b"n", b"v" * 100)
        settings = peer.Settings("127.0.0.1", rig.port, b"secret", deadline_s=5.0)
        store = peer.PeerStore(settings, trust=authority.trust("agent"))
        report, found = Desk(store).read({b"n": 100})
        store.close()
        rig.close()
    assert found.get(b"n") != b"v" * 100
    assert report.silent


def test_a_handshake_that_stalls_ends_by_its_deadline(tmp_path: Path, authority: Authority) -> None:
    with nothing_left():
        rig = SecureRig(tmp_path, authority.trust("agent"))
        rig.server._limits = (64, 0.3, 5.0)
        with socket.create_connection(("127.0.0.1", rig.port)) as slow:
            slow.sendall(b"\x16\x03\x01\x02\x00")
            wait_until(lambda: rig.server.counts.all().get("connections_slow", 0) == 1)
        rig.close()


def test_what_is_not_encrypted_is_not_taken_by_itself(tmp_path: Path) -> None:
    """NIXL moves bytes past TLS: only who asks for it by name gets it."""
    arena = Arena.create(1 << 20, directory=None)
    assert agent_peers.reader("auto", arena, encrypted=True) == "not_encrypted"
    arena.close()


# -- Valkey ---------------------------------------------------------------------------------------


@pytest.fixture
def front(tmp_path: Path, authority: Authority) -> Iterator[Proxy]:
    """What a Valkey with TLS shows: the binary of the tests is built without it."""
    (tmp_path / "valkey").mkdir()
    rig = ValkeyRig(tmp_path / "valkey")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*issue(authority.folder, "engine", "valkey", ["127.0.0.1"]))
    context.load_verify_locations(authority.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    made = Proxy(rig.port, context)
    yield made
    made.close()
    rig.close()


def _opened(url: str) -> valkey.ValkeyStore:
    arena = Arena.create(1 << 20, directory=None)
    try:
        made = open_object(url, arena, lambda why: None)
        assert isinstance(made, valkey.ValkeyStore)
        return made
    finally:
        arena.close()


@pytest.mark.parametrize("scheme", ["valkeys", "rediss"])
def test_values_go_to_a_valkey_over_tls(front: Proxy, authority: Authority, scheme: str) -> None:
    cert, key = issue(authority.folder, "agent", "node0", ["127.0.0.1"])
    url = f"{scheme}://127.0.0.1:{front.port}?ca={authority.ca}&cert={cert}&key={key}"
    store = _opened(url)
    assert store.transport == "tls"
    held = values(20, 200_000)
    desk = Desk(store)
    desk.write(held)
    assert desk.read({name: len(value) for name, value in held.items()})[1] == held
    store.close()


def test_a_valkey_whose_certificate_is_of_another_is_not_used(
    front: Proxy, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    store = _opened(f"valkeys://127.0.0.1:{front.port}?ca={other.ca}&deadline_s=5")
    report, _ = Desk(store).read({b"n": 10})
    assert "certificate refused" in report.error
    store.close()


def test_tls_files_without_tls_are_refused(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="write valkeys://"):
        _opened(f"valkey://127.0.0.1:1?ca={authority.ca}")
    with pytest.raises(ConfigError, match="not for a Unix socket"):
        _opened("valkeys:///run/valkey.sock")
