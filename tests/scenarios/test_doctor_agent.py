"""``kvatlas doctor`` beside a real agent: its keys, its disk, and one that has gone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from fake_engine import FakeEngine, hello, model_config
from harness import FakeWorker, Product, shared_secret

from kvatlas.config import AgentConfig
from kvatlas.connectors.child import free_ports
from kvatlas.service.http_client import HttpClient
from kvatlas.validate.doctor import Cluster, examine
from kvatlas.validate.doctor.engines import Patience
from kvatlas.validate.exactness_tiers import AgentProcess

GRID = 16
SECRET = b"a secret that gateway and agents share"
PATIENCE = Patience(answer_s=20.0, event_s=0.1)


async def test_an_agents_keys_and_disk(tmp_path: Path) -> None:
    config, keys = shared_secret(tmp_path, SECRET)
    (port,) = free_ports(1)
    agent = AgentProcess(tmp_path, [f"--listen={port}", f"--config={config}"])
    await asyncio.to_thread(agent.start)
    client = HttpClient()
    try:
        async with FakeWorker("w0") as fake:
            fake.cache_config = f'block_size="{GRID}",cache_dtype="auto"'
            worker = fake.config(layout=str(model_config()))
            node = AgentConfig(name="node", url=f"http://127.0.0.1:{port}", workers=("w0",))
            async with Product([worker], keys=keys, agents=[node]) as product:
                await product.settled()
                cluster = Cluster((worker,), product.url, (node,), product.config, SECRET)

                async def found(**changes: Any) -> dict[str, str]:
                    changed = msgspec.structs.replace(cluster, **changes)
                    report = await examine(client, changed, PATIENCE)
                    checks = ("agent", "store-keys", "disk")
                    return {f.check: f.status for f in report.findings if f.check in checks}

                alone = {"agent": "ok", "store-keys": "not shown", "disk": "ok"}
                assert await found() == alone  # no engine is attached to it
                with FakeEngine(agent.socket, hello(block_tokens=GRID, model="m")):
                    await product.until(lambda: _unflagged(product))
                    assert await found() == alone | {"store-keys": "ok"}
                    assert (await found(secret=b""))["store-keys"] == "ok"  # by the gateway's word
                    other = b"a secret of somebody else"
                    assert (await found(secret=other))["store-keys"] == "wrong"
                await asyncio.to_thread(agent.end)
                assert await found() == dict.fromkeys(alone, "not shown")
    finally:
        await client.close()
        await asyncio.to_thread(agent.end)


async def _unflagged(product: Product) -> bool:
    return not any(flag.startswith("agent_apart") for flag in await product.flags())
