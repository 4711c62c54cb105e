"""The pages of an agent: for Prometheus, for probes, for the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from fake_engine import GRID, FakeEngine, tokens_of

from kvatlas.cli.main import main
from kvatlas.core.agent_values import Drain
from kvatlas.errors import ConfigError
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.service.agent_front import AgentDescription
from kvatlas.service.http_client import HttpClient, Response
from kvatlas.validate.exactness_tiers import SLOW

PROMPT = tokens_of(1, 10 * GRID + 5)


class Stand:
    def __init__(self, agent: NodeAgent, client: HttpClient) -> None:
        self.agent = agent
        self.url = agent.front.url
        self._client = client

    async def ask(self, path: str, method: str = "GET") -> Response:
        return await self._client.request(method, self.url + path, timeout_s=10)

    async def metrics(self) -> dict[str, float]:
        text = (await self.ask("/metrics")).body.decode()
        return {n: float(v) for n, v in re.findall(r"(?m)^(kvatlas_agent_\S+) (\S+)$", text)}


def _settings(folder: Path, **more: object) -> Settings:
    made = Settings(
        folder / "agent.sock",
        64 << 20,
        folder / "disk",
        256 << 20,
        prefill_tokens_per_s=SLOW,
        secret=b"s" * 32,
        listen=("127.0.0.1", 0),
    )
    return msgspec.structs.replace(made, **more)


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    client = HttpClient()
    async with NodeAgent(_settings(tmp_path)) as agent:
        serving = asyncio.get_running_loop().create_task(agent.serve())
        yield Stand(agent, client)
        serving.cancel()
        await client.close()


async def test_figures_follow_what_it_does(stand: Stand) -> None:
    path = stand.agent.settings.path
    engine = await asyncio.to_thread(FakeEngine, path)
    assert await asyncio.to_thread(engine.save, "r", PROMPT) == 10
    assert (await asyncio.to_thread(engine.load, "q", PROMPT))[0] == 10 * GRID
    async with asyncio.timeout(20):
        while stand.agent.driver.agent.busy:
            await asyncio.sleep(0.005)
    found = await stand.metrics()
    assert found['kvatlas_agent_tier_units{tier="dram"}'] == 10
    assert found['kvatlas_agent_tier_units{tier="disk"}'] == 10
    size = found['kvatlas_agent_tier_held_bytes{tier="dram"}']
    assert found['kvatlas_agent_moved_bytes_total{operation="save",tier="dram"}'] == size > 0
    assert found['kvatlas_agent_moved_bytes_total{operation="write",tier="disk"}'] == size
    assert found['kvatlas_agent_loaded_tokens_total{tier="dram"}'] == 10 * GRID
    assert found['kvatlas_agent_tier_transport_info{tier="dram",transport="shm"}'] == 1
    assert found['kvatlas_agent_events_total{event="keys_announced"}'] == 20
    assert found["kvatlas_agent_engines"] == 1
    await asyncio.to_thread(engine.client.close)


async def test_its_description_is_what_the_gateway_reads(stand: Stand) -> None:
    engine = await asyncio.to_thread(FakeEngine, stand.agent.settings.path)
    told = msgspec.json.decode((await stand.ask("/kvatlas/agent")).body, type=AgentDescription)
    assert told.events.startswith("tcp://127.0.0.1:")
    assert told.replay != told.events
    (served,) = told.engines.values()
    assert served.member.names == ("tiny",)
    assert len(bytes.fromhex(served.root)) == 16
    await asyncio.to_thread(engine.client.close)


async def test_health_tells_what_is_degraded(stand: Stand) -> None:
    assert (await stand.ask("/health")).body == b'{"status":"ok","flags":[],"details":{}}'
    stand.agent.driver.tell(Drain())
    health = msgspec.json.decode((await stand.ask("/health")).body)
    assert (health["status"], health["flags"]) == ("degraded", ["draining"])
    assert (await stand.metrics())["kvatlas_agent_draining"] == 1


async def test_nothing_can_be_changed_there(stand: Stand) -> None:
    assert (await stand.ask("/kvatlas/agent", "POST")).status == 405
    assert (await stand.ask("/kvatlas/drain")).status == 404


async def test_an_address_that_is_taken_is_told(stand: Stand, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    taken = _settings(other, listen=("127.0.0.1", int(stand.url.rpartition(":")[2])))
    with pytest.raises(ConfigError, match="--listen: 127"):
        async with NodeAgent(taken):
            pass
    assert not (other / "agent.sock").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--listen", "here"], "HOST:PORT is wanted"),
        (["--listen", "127.0.0.1:70000"], "HOST:PORT is wanted"),
        (["--events-port", "65535"], "no port with another after it"),
    ],
)
def test_addresses_that_are_none_are_told(
    words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):  # that of argparse, which has its own lines
        assert main(["agent", "--socket", str(tmp_path / "a.sock"), *words]) == 2
    assert why in capsys.readouterr().err
