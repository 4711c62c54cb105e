"""What broke the product when somebody tried to break it, each by the wire that it came by."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from harness import WAIT_S, FakeWorker, Product, process

from kvatlas.config import RouterConfig
from kvatlas.connectors.child import free_ports
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply


async def boasts(worker: FakeWorker, request: Request, reply: Reply) -> None:
    """An engine whose usage figures are beyond all numbers."""
    many = b"1" + b"0" * 400
    usage = b'{"prompt_tokens":%b,"completion_tokens":1,"prompt_tokens_details":' % many
    usage += b'{"cached_tokens":%b}}' % many
    reply.send_json(200, b'{"choices":[],"usage":%b}' % usage)


async def test_usage_beyond_all_numbers_leaves_no_count_behind() -> None:
    async with FakeWorker("w1", boasts) as w1, Product([w1.config()]) as product:
        assert (await product.complete([1, 2])).status == 200
        await product.until_equal(product.in_flight, {})
        assert "usage_violations" in await product.flags()


async def test_targets_that_are_no_url_do_not_fill_the_room_for_bodies() -> None:
    async with FakeWorker("w1") as w1, Product([w1.config()]) as product:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", product.port)
            body = b"x" * 1000
            head = b"POST http://[x]/v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            async with asyncio.timeout(10):
                assert b" 400 " in await reader.readline()
            writer.close()
        assert product.gateway._server.bodies_bytes == 0


async def test_a_hangup_while_it_starts_does_not_end_it(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    engine = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = engine.sockets[0].getsockname()[1]
    own = free_ports(1)[0]
    config = tmp_path / "kvatlas.toml"
    worker = f'[[worker]]\nname = "a"\nurl = "http://127.0.0.1:{port}"\n'
    config.write_text(f"[gateway]\nport = {own}\n{worker}")
    url = f"http://127.0.0.1:{own}"
    child = process(tmp_path, "serve", "--config", str(config), url=url)
    try:
        async with asyncio.timeout(WAIT_S):
            await asked.wait()
            os.kill(child.pid, signal.SIGHUP)
            while "kvatlas: reloaded" not in child.log.read_text():
                assert child.alive, child.log.read_text()
                await asyncio.sleep(0.01)
    finally:
        child.stop()
        engine.close()


async def test_a_full_disk_under_the_decision_log_fails_no_request() -> None:
    router = RouterConfig(decision_log="/dev/full")
    async with FakeWorker("w1") as w1, Product([w1.config()], router=router) as product:
        for _ in range(3):
            assert (await product.complete([1, 2])).status == 200
        await product.until_equal(product.in_flight, {})
        assert "decision_log:file" in await product.flags()
        assert await product.metric("kvatlas_requests_total", status="200") == 3
