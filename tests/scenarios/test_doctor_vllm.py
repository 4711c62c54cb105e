"""``kvatlas doctor`` on a real vLLM behind the real gateway: sound, and with faults between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from harness import Product, shared_secret
from real_engines import READY_S, vllm_engine

from kvatlas.config import WorkerConfig
from kvatlas.connectors.vllm_cpu import VllmEngine
from kvatlas.service.http_client import HttpClient
from kvatlas.validate.doctor import Cluster, Report, examine
from kvatlas.validate.doctor.engines import Patience
from kvatlas.validate.doctor.plants import PLANTS
from kvatlas.validate.doctor.stage import SECRET, Liar

pytestmark = pytest.mark.engine

PATIENCE = Patience(answer_s=60.0, event_s=5.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    server = vllm_engine(tmp_path_factory.mktemp("vllm"))
    server.start()
    try:
        server.wait_ready(READY_S)
        yield server
    finally:
        server.stop()


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    await client.close()


async def examined(client: HttpClient, url: str, folder: Path) -> Report:
    """The engine at ``url`` behind a gateway of its own."""
    _, keys = shared_secret(folder, SECRET)
    async with Product([WorkerConfig(name="w0", url=url)], keys=keys) as product:
        await product.settled()
        gateway = product.url
        cluster = Cluster(product.config.worker, gateway, (), product.config, SECRET)
        return await examine(client, cluster, PATIENCE)


async def test_a_sound_vllm_is_sound_through_and_through(
    client: HttpClient, engine: VllmEngine, tmp_path: Path
) -> None:
    report = await examined(client, engine.url, tmp_path)
    not_well = [f for f in report.findings if f.status in ("wrong", "not shown")]
    assert not_well == []
    seen = {f.check: f for f in report.findings if f.status == "ok"}
    assert {"keys", "fingerprint", "routed-hit", "replay", "salt", "right-answer"} <= set(seen)
    found = seen["routed-hit"].compared
    assert found["expected"] == found["engine reported"]


@pytest.mark.parametrize("name", ["salt-ignored", "promise-broken", "metrics-gone"])
async def test_faults_before_a_real_engine(
    client: HttpClient, engine: VllmEngine, tmp_path: Path, name: str
) -> None:
    plant = next(plant for plant in PLANTS if plant.name == name)
    lies = next(iter(plant.plan().lies.values()))
    liar = Liar(engine.url, lies, client)
    await liar.server.start("127.0.0.1", 0)
    try:
        report = await examined(client, f"http://127.0.0.1:{liar.server.port}", tmp_path)
    finally:
        await liar.server.close()
    named = [f for f in report.findings if (f.check, f.status) == (plant.check, plant.status)]
    assert named, msgspec.to_builtins(report)
