"""TLS between parts: who gets in, who is told why not, and what a flood of handshakes may hold."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from http_kit import echo, eventually
from tls_kit import Authority

from kvatlas.cli.certs import issue
from kvatlas.config_tls import TlsConfig
from kvatlas.dataplane.tls import Part, Trust, WrongPart, asking, check, identity_of
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service.http import Request
from kvatlas.service.http_client import HttpClient
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.tls import DoorLimits, Outgoing, from_outside, to_agents, to_engines


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


async def who(request: Request, reply: Reply) -> None:
    reply.send_json(200, {"who": str(request.who or ""), "address": request.address})


class Stand:
    """Servers and clients that are closed at the end."""

    def __init__(self) -> None:
        self.open: list[HttpServer | HttpClient] = []

    async def server(self, trust: Trust | None, door: DoorLimits | None = None) -> HttpServer:
        made = HttpServer(who, trust=trust, door=door)
        await made.start()
        self.open.append(made)
        return made

    async def ask(self, server: HttpServer, outgoing: Outgoing, scheme: str = "https") -> object:
        client = HttpClient(connect_timeout_s=5.0, outgoing=outgoing)
        self.open.append(client)
        return await client.get_json(f"{scheme}://127.0.0.1:{server.port}/")


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    made = Stand()
    yield made
    for one in reversed(made.open):
        await one.close()


async def test_each_side_hears_who_the_other_is(authority: Authority, stand: Stand) -> None:
    server = await stand.server(authority.trust("agent", "node0"))
    told = await stand.ask(server, to_agents(authority.trust("gateway", "front")))
    assert told == {"who": "kvatlas://gateway/front", "address": "127.0.0.1"}
    assert server.door is not None
    assert server.door.counts == {"admitted": 1}
    assert server.door.shaking == 0


@pytest.mark.parametrize("part", ["gateway", "engine"])
async def test_a_good_certificate_of_the_wrong_part_is_no_agent(
    authority: Authority, stand: Stand, part: str
) -> None:
    server = await stand.server(authority.trust(cast(Part, part), "mallory"))
    with pytest.raises(EngineError, match=rf"is of kvatlas://{part}/mallory: agent is wanted"):
        await stand.ask(server, to_agents(authority.trust("gateway")))


async def test_a_clients_certificate_serves_nothing(authority: Authority, stand: Stand) -> None:
    """It has no purpose to serve: OpenSSL itself says so."""
    cert, key = issue(authority.folder, "client", "mallory", ["127.0.0.1"])
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(cert, key)
    trust = authority.trust("agent")
    trust._files = type(trust._files)(
        server_side, server_side, server_side, server_side, (), trust._files.life
    )
    server = await stand.server(trust)
    with pytest.raises(EngineError, match=r"certificate refused: un(supported|suitable)"):
        await stand.ask(server, to_agents(authority.trust("gateway")))


async def test_another_authority_is_not_believed_by_either_side(
    authority: Authority, stand: Stand, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    server = await stand.server(authority.trust("agent"))
    with pytest.raises(EngineError, match="certificate refused"):
        await stand.ask(server, to_agents(other.trust("gateway")))
    own = other.config("gateway", "impostor")
    mixed = from_outside(authority.ca, own.cert, own.key, ("agent",))
    with pytest.raises(EngineError, match=r"refused our certificate"):
        await stand.ask(server, mixed)
    assert server.door is not None
    await eventually(lambda: server.door.counts["refused"] >= 1)  # type: ignore[union-attr]


async def test_what_has_expired_is_refused(
    authority: Authority, stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    server = await stand.server(authority.trust("agent"))
    cert, key = authority.expired("gateway")
    context = asking(authority.ca, str(cert), str(key))
    asks = Outgoing(lambda: context, lambda der: None, lambda host: False)
    with pytest.raises(EngineError, match="where it refused our certificate, its log says why"):
        await stand.ask(server, asks)
    with pytest.raises(ConfigError, match=r"old\.pem has expired"):
        from_outside(authority.ca, str(cert), str(key))
    assert "certificate refused: certificate has expired" in caplog.text
    with pytest.raises(ConfigError, match=r"old\.pem has expired"):
        Trust(TlsConfig(authority.ca, str(cert), str(key)), "gateway")


async def test_a_plain_client_is_told_to_speak_tls(authority: Authority, stand: Stand) -> None:
    server = await stand.server(authority.trust("agent"))
    with pytest.raises(EngineError, match=r"status 400: .*this port speaks TLS only"):
        await stand.ask(server, from_outside(authority.ca), scheme="http")
    assert server.door is not None
    assert server.door.counts == {"plain": 1}


async def test_where_tls_is_on_nothing_is_asked_in_the_clear(
    authority: Authority, stand: Stand
) -> None:
    server = await stand.server(None)
    trust = authority.trust("gateway")
    with pytest.raises(EngineError, match=r"not in the clear where \[tls\] is on"):
        await stand.ask(server, to_agents(trust), scheme="http")
    assert await stand.ask(server, to_engines(trust), scheme="http")  # of this machine
    assert not to_engines(trust).plain("10.0.0.1")
    assert to_engines(authority.trust("gateway", plain_engines=True)).plain("10.0.0.1")


async def test_a_server_without_tls_is_not_spoken_to(authority: Authority, stand: Stand) -> None:
    server = await stand.server(None)
    with pytest.raises(EngineError, match=r"(?i)wrong.version|record layer|packet length"):
        await stand.ask(server, to_agents(authority.trust("gateway")))


async def test_nothing_older_than_tls_1_3_comes_in(
    authority: Authority, stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    server = await stand.server(authority.trust("agent"))
    old = authority.asking("gateway")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(EngineError, match="ended the TLS handshake; its log says why"):
        await stand.ask(server, Outgoing(lambda: old, lambda der: None, lambda host: False))
    assert "refused: unsupported protocol" in caplog.text


async def test_who_has_no_certificate_is_nobody(authority: Authority, stand: Stand) -> None:
    server = await stand.server(authority.trust("agent"))
    told = await stand.ask(server, from_outside(authority.ca, parts=("agent",)))
    assert told == {"who": "", "address": "127.0.0.1"}


async def test_an_engine_of_another_authority_only_where_that_is_named(
    authority: Authority, stand: Stand, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path / "engines")
    server = await stand.server(foreign.trust("agent"))  # a part, in a cluster of its own
    with pytest.raises(EngineError, match="certificate refused"):
        await stand.ask(server, to_engines(authority.trust("gateway")))
    trust = authority.trust("gateway", engines_ca=foreign.ca)
    with pytest.raises(EngineError, match="engine is wanted"):
        await stand.ask(server, to_engines(trust))
    with pytest.raises(EngineError, match="certificate refused"):
        await stand.ask(server, to_agents(trust))  # who signs engines signs no agents


async def test_a_clients_ca_makes_nobody_an_operator(
    authority: Authority, stand: Stand, tmp_path: Path
) -> None:
    users = Authority(tmp_path / "users")
    server = await stand.server(authority.trust("gateway", clients_ca=users.ca))
    forged = users.config("client", "ops")
    told = await stand.ask(server, from_outside(authority.ca, forged.cert, forged.key))
    assert told == {"who": "", "address": "127.0.0.1"}
    real = authority.config("client", "ops")
    told = await stand.ask(server, from_outside(authority.ca, real.cert, real.key))
    assert told == {"who": "kvatlas://client/ops", "address": "127.0.0.1"}


# -- files that change ----------------------------------------------------------------------------


class Hand:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_new_files_count_for_new_connections_and_old_ones_live_on(
    authority: Authority, stand: Stand, tmp_path: Path
) -> None:
    hand = Hand()
    config = authority.config("agent", "node0")
    server = await stand.server(Trust(config, "agent", clock=hand))
    before = _bytes_of(await _shown(server, authority.asking()))
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=authority.asking("gateway")
    )
    issue(authority.folder, "agent", "node0", ("127.0.0.1",))
    assert _bytes_of(await _shown(server, authority.asking())) == before  # looked just now
    hand.now += 2
    after = _bytes_of(await _shown(server, authority.asking()))
    assert after != before
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()


async def test_files_that_cannot_be_used_change_nothing(
    authority: Authority, stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    hand = Hand()
    config = authority.config("agent", "node0")
    trust = Trust(config, "agent", clock=hand)
    server = await stand.server(trust)
    before = _bytes_of(await _shown(server, authority.asking()))
    Path(config.cert).write_text("half a certifi")
    hand.now += 2
    assert _bytes_of(await _shown(server, authority.asking())) == before
    assert trust.counts["reload_failed"] == 1
    assert "no certificate in PEM form" in trust.error
    assert "certificates not taken up" in caplog.text
    issue(authority.folder, "agent", "node0", ("127.0.0.1",))
    hand.now += 2
    assert _bytes_of(await _shown(server, authority.asking())) != before
    assert trust.error == ""


async def test_an_authority_that_is_replaced_is_believed_no_more(
    authority: Authority, stand: Stand, tmp_path: Path
) -> None:
    hand = Hand()
    other = Authority(tmp_path / "other")
    config = authority.config("agent", "node0")
    server = await stand.server(Trust(config, "agent", clock=hand))
    gateway = authority.config("gateway", "old")
    outgoing = from_outside(authority.ca, gateway.cert, gateway.key, ("agent",))
    assert await stand.ask(server, outgoing)
    old_ca = tmp_path / "old.pem"
    old_ca.write_bytes(Path(config.ca).read_bytes())
    Path(config.ca).write_bytes(Path(other.ca).read_bytes())
    hand.now += 2
    with pytest.raises(EngineError, match=r"refused our certificate"):
        await stand.ask(server, from_outside(str(old_ca), gateway.cert, gateway.key, ("agent",)))


def test_what_ends_soon_is_said(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    config = authority.config("agent")
    life = Trust(config, "agent").life
    assert "ends in" not in caplog.text
    late = life.begins_s + 0.91 * (life.ends_s - life.begins_s)
    Trust(config, "agent", wall=lambda: late)
    assert "ends in" in caplog.text


# -- files that cannot be a part's ----------------------------------------------------------------


def test_a_part_does_not_start_with_anothers_certificate(authority: Authority) -> None:
    config = authority.config("agent")
    with pytest.raises(ConfigError, match="is of kvatlas://agent/one: this is gateway"):
        Trust(config, "gateway")


def test_key_and_certificate_belong_together(authority: Authority) -> None:
    one, two = authority.config("agent", "a"), authority.config("agent", "b")
    with pytest.raises(ConfigError, match="key values mismatch"):
        Trust(TlsConfig(one.ca, one.cert, two.key), "agent")


def test_a_name_with_a_path_trick_is_nobody() -> None:
    with pytest.raises(WrongPart, match="which is nobody"):
        identity_of(["kvatlas://agent/../gateway/a"])
    with pytest.raises(WrongPart, match="which is nobody"):
        identity_of(["kvatlas://agent/a", "kvatlas://gateway/a"])
    assert identity_of(["https://example.org"]) is None
    with pytest.raises(WrongPart, match="no part of a cluster"):
        check(None, ("agent",))


# -- floods ---------------------------------------------------------------------------------------


async def test_a_handshake_that_never_ends_is_ended(authority: Authority, stand: Stand) -> None:
    server = await stand.server(authority.trust("agent"), DoorLimits(8, 0.1))
    silent = await asyncio.open_connection("127.0.0.1", server.port)
    slow = await asyncio.open_connection("127.0.0.1", server.port)
    slow[1].write(b"\x16\x03\x01\x02\x00")  # the head of a ClientHello, and nothing of it
    async with asyncio.timeout(5):
        assert await _until_closed(silent[0]) == b""
        await _until_closed(slow[0])
    door = server.door
    assert door is not None
    await eventually(lambda: door.counts["slow"] == 2 and door.shaking == 0)
    for _, writer in (silent, slow):
        writer.close()


async def test_many_silent_connections_keep_nobody_out(authority: Authority, stand: Stand) -> None:
    """Whoever has waited longest gives way, so at most ``handshakes_max`` are held."""
    server = await stand.server(authority.trust("agent"), DoorLimits(4, 30.0))
    door = server.door
    assert door is not None
    crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(12)]
    await eventually(lambda: door.counts["crowded"] == 8)
    assert door.shaking == 4
    told = await stand.ask(server, to_agents(authority.trust("gateway", "front")))
    assert told == {"who": "kvatlas://gateway/front", "address": "127.0.0.1"}
    assert door.shaking <= 4
    for _, writer in crowd:
        writer.close()


async def test_a_crowd_of_half_handshakes_is_no_better_off(
    authority: Authority, stand: Stand
) -> None:
    server = await stand.server(authority.trust("agent"), DoorLimits(4, 30.0))
    door = server.door
    assert door is not None
    crowd = []
    for number in range(12):
        crowd.append(await asyncio.open_connection("127.0.0.1", server.port))
        crowd[-1][1].write(b"\x16\x03\x01\x02\x00")
        await eventually(lambda number=number: door.shaking == min(number + 1, 4))
    async with asyncio.timeout(5):
        for reader, _ in crowd[:8]:
            await _until_closed(reader)
    assert door.counts["crowded"] == 8
    assert not server.connections
    for _, writer in crowd:
        writer.close()


async def test_an_answer_that_breaks_off_is_seen_to(authority: Authority, stand: Stand) -> None:
    async def breaks(request: Request, reply: Reply) -> None:
        reply.start(200, [(b"content-type", b"text/plain")])
        reply.write(b"half an ans")
        await reply.drain()
        reply.abort()

    server = HttpServer(breaks, trust=authority.trust("agent"))
    await server.start()
    stand.open.append(server)
    with pytest.raises(EngineError, match="in the middle of its answer"):
        await stand.ask(server, to_agents(authority.trust("gateway")))


async def test_an_answer_that_ends_the_connection_ends_it_at_once(authority: Authority) -> None:
    server = HttpServer(echo, trust=authority.trust("agent"))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=authority.asking())
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(5):
        assert b'"method":"GET"' in await reader.read()
    assert asyncio.get_running_loop().time() - began < server.limits.linger_s
    writer.close()
    await server.close()


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def _shown(server: HttpServer, context: ssl.SSLContext) -> ssl.SSLObject:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    session: ssl.SSLObject = writer.get_extra_info("ssl_object")
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return session


def _bytes_of(session: ssl.SSLObject) -> bytes:
    return session.getpeercert(True) or b""
