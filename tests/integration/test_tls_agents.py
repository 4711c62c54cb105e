"""A gateway and an agent that prove who they are: pages, events, and who is not let in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from fake_engine import GRID, FakeEngine, tokens_of
from tls_kit import Authority

from kvatlas.cli import doctor
from kvatlas.config import AgentConfig
from kvatlas.config_tls import AdminConfig, AuditConfig
from kvatlas.connectors.agent_client import Refusal, ask
from kvatlas.core.events import Event
from kvatlas.core.records import Publisher
from kvatlas.errors import EngineError
from kvatlas.service import agent_wire as wire
from kvatlas.service.admin import Guard, Safety, safety_of
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.service.agent_announce import LISTENS_S, Announcer, Listeners
from kvatlas.service.agent_front import AgentDescription
from kvatlas.service.agents import Agents
from kvatlas.service.engines import Timing
from kvatlas.service.feed import Feed, Source
from kvatlas.service.feed_socket import Curve, new_curve
from kvatlas.service.http_client import HttpClient
from kvatlas.service.tls import from_outside, to_agents
from kvatlas.validate.doctor import examine, from_config
from kvatlas.validate.doctor.engines import Patience
from kvatlas.validate.exactness_tiers import SLOW

PROMPT = tokens_of(1, 10 * GRID + 5)
FAST = Timing(poll_s=0.02, retry_max_s=0.05, timeout_s=5.0)
NODE = Publisher("node0")


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


class Heard:
    """What a directory would be told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def apply(self, publisher: Publisher, events: list[Event]) -> object:
        from kvatlas.core.claims import Applied

        self.events += events
        return Applied()

    def reset(self, publisher: Publisher) -> None: ...

    def believe(self, publisher: Publisher, believed: bool) -> None: ...


class Watch:
    """The gateway's side of one agent."""

    def __init__(self, url: str, client: HttpClient, curve: Curve | None) -> None:
        self.heard = Heard()
        self.client = client
        self.feed = Feed(self.heard, curve=curve)  # type: ignore[arg-type]
        self.agents = Agents(
            self.feed,
            client,
            tell=lambda event: None,
            ranks=lambda worker: (),
            timing=FAST,
            curve=curve,
        )
        self.config = AgentConfig("node0", url, ("w",))

    async def __aenter__(self) -> Watch:
        await self.agents.take([self.config])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.agents.close()
        await self.feed.close()
        await self.client.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def settings(folder: Path, authority: Authority | None) -> Settings:
    trust = authority.trust("agent", "node0") if authority is not None else None
    safety = Safety(trust, Guard(AdminConfig(), closed=trust is not None))
    return Settings(
        folder / "agent.sock",
        64 << 20,
        prefill_tokens_per_s=SLOW,
        secret=b"s" * 32,
        listen=("127.0.0.1", 0),
        agent=msgspec.structs.replace(Settings(folder, 1 << 20).agent, write_through=()),
        safety=safety,
    )


@pytest.fixture
async def agent(tmp_path: Path, authority: Authority) -> AsyncIterator[NodeAgent]:
    async with NodeAgent(settings(tmp_path, authority)) as made:
        serving = asyncio.get_running_loop().create_task(made.serve())
        yield made
        serving.cancel()


async def test_a_gateway_hears_what_an_agent_holds_encrypted(
    agent: NodeAgent, authority: Authority
) -> None:
    assert agent.front.url.startswith("https://")
    client = HttpClient(outgoing=to_agents(authority.trust("gateway", "front")))
    async with Watch(agent.front.url, client, new_curve()) as watch:
        engine = await asyncio.to_thread(FakeEngine, agent.settings.path)
        assert await asyncio.to_thread(engine.save, "r", PROMPT) == 10
        await eventually(lambda: bool(watch.heard.events))
        (status,) = watch.feed.status()
        assert status.connected
        assert len(status.source.curve_key) == 40
        await asyncio.to_thread(engine.client.close)


async def test_nobody_else_reads_its_pages(agent: NodeAgent, authority: Authority) -> None:
    nobody = HttpClient(outgoing=from_outside(authority.ca, parts=("agent",)))
    other = authority.config("agent", "node1")
    peer = HttpClient(outgoing=from_outside(authority.ca, other.cert, other.key, ("agent",)))
    for client, status in ((nobody, 401), (peer, 403)):
        for path in ("/kvatlas/agent", "/metrics", "/kvatlas/agent/pull"):
            told = await client.request("GET", agent.front.url + path)
            assert told.status == status, path
            assert "is wanted ([admin])" in told.json()["error"]["message"]
        health = await client.request("GET", f"{agent.front.url}/health")
        assert health.json() == {"status": "ok"}
        await client.close()


async def test_the_doctor_gets_to_agents(
    agent: NodeAgent, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks gateways, engines and agents, and is refused by their pages alone."""
    ops = authority.config("client", "ops")
    monkeypatch.setenv("KVATLAS_CA", ops.ca)
    monkeypatch.setenv("KVATLAS_CERT", ops.cert)
    monkeypatch.setenv("KVATLAS_KEY", ops.key)
    file = tmp_path / "kvatlas.toml"
    file.write_text(
        '[[worker]]\nname = "a"\nurl = "https://127.0.0.1:9"\n'
        f'[[agent]]\nname = "n"\nurl = "{agent.front.url}"\nworkers = ["a"]\n'
    )
    asked = doctor.client("")
    report = await examine(asked, from_config(file), Patience(5.0, 0.1))
    await asked.close()
    (found,) = (finding for finding in report.findings if finding.check == "agent")
    assert "with the right 'read' is wanted" in found.why


async def test_who_told_no_key_over_tls_hears_no_event(
    agent: NodeAgent, authority: Authority
) -> None:
    """Neither in the clear, nor with a key that nobody vouched for: the gateway's is heard at the
    same time, so it is not that nothing was said."""
    client = HttpClient(outgoing=to_agents(authority.trust("gateway", "front")))
    told = msgspec.json.decode(
        (await client.request("GET", f"{agent.front.url}/kvatlas/agent")).body,
        type=AgentDescription,
    )
    loop_feeds = []
    for curve, key in ((None, ""), (new_curve(), told.curve_key)):
        heard = Heard()
        feed = Feed(heard, curve=curve)  # type: ignore[arg-type]
        feed.add(NODE, Source(told.events, told.replay, curve_key=key))
        loop_feeds.append((feed, heard))
    async with Watch(agent.front.url, client, new_curve()) as watch:
        engine = await asyncio.to_thread(FakeEngine, agent.settings.path)
        assert await asyncio.to_thread(engine.save, "r", PROMPT) == 10
        await eventually(lambda: bool(watch.heard.events))
        await asyncio.to_thread(engine.client.close)
    for feed, heard in loop_feeds:
        assert not feed.status()[0].connected
        assert not heard.events
        await feed.close()


async def test_an_agent_without_tls_is_not_listened_to(
    tmp_path: Path, authority: Authority
) -> None:
    async with NodeAgent(settings(tmp_path, None)) as plain:
        client = HttpClient(outgoing=to_agents(authority.trust("gateway")))
        async with Watch(plain.front.url, client, new_curve()) as watch:
            node = watch.agents.nodes["node0"]
            await eventually(lambda: "not in the clear" in node.error)
            assert not watch.feed.status()


async def test_an_agent_that_announces_in_the_clear_is_not_listened_to(
    tmp_path: Path, authority: Authority
) -> None:
    """TLS in front of it changes nothing of that: its description names no key."""
    async with NodeAgent(settings(tmp_path, authority)) as agent:
        agent.front._listeners = None
        client = HttpClient(outgoing=to_agents(authority.trust("gateway")))
        async with Watch(agent.front.url, client, new_curve()) as watch:
            node = watch.agents.nodes["node0"]
            await eventually(lambda: "announces in the clear" in node.error)


async def test_an_agent_does_not_pass_as_a_gateway(agent: NodeAgent, authority: Authority) -> None:
    config = authority.config("agent", "mallory")
    client = HttpClient(outgoing=from_outside(authority.ca, config.cert, config.key, ("agent",)))
    async with Watch(agent.front.url, client, new_curve()) as watch:
        node = watch.agents.nodes["node0"]
        await eventually(lambda: "status 403" in node.error)
        assert "kvatlas://agent/mallory" in node.error


async def test_who_was_not_let_in_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZMQ itself would stay away for ever."""
    monkeypatch.setattr("kvatlas.service.feed._REOPEN_S", 0.05)
    listeners, curve, heard = Listeners(), new_curve(), Heard()
    announcer = Announcer(lambda: (), listeners=listeners)
    feed = Feed(heard, curve=curve)  # type: ignore[arg-type]
    key = listeners.curve.public
    feed.add(NODE, Source(announcer.endpoint, announcer.replay_endpoint, curve_key=key))
    await eventually(lambda: "its handshake failed" in feed.status()[0].error)
    assert listeners.let_in(curve.public)
    await eventually(lambda: feed.idle(NODE))
    await feed.close()
    await announcer.close()


async def test_a_key_is_good_for_a_while(tmp_path: Path) -> None:
    now = [100.0]
    listeners = Listeners(lambda: now[0])
    curve = new_curve()
    key = curve.public.encode()
    assert not listeners.callback("", key)
    assert not listeners.let_in("short")
    assert listeners.let_in(curve.public)
    assert listeners.callback("", key)
    now[0] += LISTENS_S + 1
    assert not listeners.callback("", key)
    announcer = Announcer(lambda: (), listeners=listeners)
    await announcer.close()


async def test_a_plain_client_of_an_agent_is_told(agent: NodeAgent) -> None:
    client = HttpClient()
    url = agent.front.url.replace("https", "http")
    with pytest.raises(EngineError, match="this port speaks TLS only"):
        await client.get_json(f"{url}/health")
    await client.close()


async def test_what_is_asked_at_its_socket_is_written_down_before_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = AuditConfig(str(tmp_path / "audit.jsonl"))
    safety = safety_of(AdminConfig(), audit, None, "agent", closed=False)
    assert safety.guard.audit is not None
    made = msgspec.structs.replace(settings(tmp_path, None), safety=safety)
    async with NodeAgent(made) as agent:
        serving = asyncio.get_running_loop().create_task(agent.serve())
        resize = wire.Resize("dram", 32 << 20)
        await asyncio.to_thread(ask, made.path, resize)
        (line,) = map(msgspec.json.decode, (tmp_path / "audit.jsonl").read_bytes().splitlines())
        assert (line["what"], line["target"], line["outcome"]) == ("resize", "dram", "begins")
        assert line["who"] == f"uid {os.getuid()}"
        assert line["address"] == f"pid {os.getpid()}"
        before = agent.status()["tiers"]
        monkeypatch.setattr(safety.guard.audit, "_write", lambda line, sync: False)
        with pytest.raises(Refusal, match="audit log cannot be written"):
            await asyncio.to_thread(ask, made.path, wire.Resize("dram", 16 << 20))
        assert agent.status()["tiers"] == before
        serving.cancel()
    safety.guard.audit.close()
