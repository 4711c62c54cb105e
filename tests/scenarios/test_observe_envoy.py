"""A real Envoy as the router that is observed: from in front of it, and by what it mirrors."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from harness import COMPLETION, FakeWorker, Product, fresh_tokens
from install import missing, venv_of
from observe_kit import Observed, until

from kvatlas.config import Config
from kvatlas.connectors.child import Child, free_ports
from kvatlas.service.observe_record import read
from kvatlas.service.observe_runs import Observer, Settings, mirrored

pytestmark = pytest.mark.engine

CONFIG = Path(__file__).with_name("envoy_mirror.yaml")
SECRET = b"the same in both recordings"


@contextlib.asynccontextmanager
async def envoy(folder: Path, mirror: int, engines: list[str]) -> AsyncIterator[int]:
    """Its port."""
    if why := missing("envoy"):
        pytest.skip(why)
    listen, admin = free_ports(2)
    text = CONFIG.read_text("utf-8")
    words = {"LISTEN": listen, "ADMIN": admin, "MIRROR": mirror}
    words |= dict(zip(("FIRST", "SECOND"), map(int, engines), strict=True))
    for name, value in words.items():
        text = text.replace(f"port_value: {name}", f"port_value: {value}")
    (folder / "envoy.yaml").write_text(text)
    argv = [str(venv_of("envoy") / "bin" / "envoy"), "-c", str(folder / "envoy.yaml")]
    argv += ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
    url = f"http://127.0.0.1:{admin}"
    child = Child("envoy", argv, log=folder / "envoy.log", url=url, health="/ready")
    child.start()
    try:
        await asyncio.to_thread(child.wait_ready, 60.0)
        yield listen
    finally:
        await asyncio.to_thread(child.stop)


async def test_both_ways_see_the_same_requests(tmp_path: Path) -> None:
    settings = Settings(
        record=str(tmp_path / "mirrored"),
        mode="mirror",
        block_tokens=16,
        secret=SECRET,
        started_s=time.monotonic(),
    )
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(f"w{i}")) for i in range(2)]
        observer = await stack.enter_async_context(Observer(settings))
        mirror = await stack.enter_async_context(mirrored(observer, "127.0.0.1", 0))
        ports = [worker.config().url.rpartition(":")[2] for worker in workers]
        port = await stack.enter_async_context(envoy(tmp_path, mirror.port, ports))
        config = Config(worker=tuple(worker.config() for worker in workers))
        front = Observed(
            port, tmp_path / "front", secret=SECRET, served_by="x-served-by", config=config
        )
        async with front.watching() as tunnel, Product([]).only_as_client(tunnel.port) as client:
            for seed in range(6):
                body = {"model": "m", "prompt": fresh_tokens(60 + seed, seed), "max_tokens": 4}
                body |= {"stream": True, "stream_options": {"include_usage": True}}
                answer = await client.post(COMPLETION, body)
                assert answer.status == 200
                assert answer.body.endswith(b"data: [DONE]\n\n")
            await until(lambda: observer.recording.rows == 6)
    rows, copied = front.recorded.rows, read(tmp_path / "mirrored").rows
    assert len(rows) == 6
    assert [r.hash_ids for r in rows] == [r.hash_ids for r in copied]
    assert sorted(r.observed.engine for r in rows) == ["w0"] * 3 + ["w1"] * 3
    assert all(r.observed.ttft_s > 0 for r in rows)
    assert all(r.observed.ttft_s < 0 for r in copied)
    assert sum(len(worker.got) for worker in workers) == 6  # nobody was asked twice
