"""Bad input of every kind to ``kvatlas serve`` as a process: clear errors, nobody else touched.

Faults of the configuration file that end it with status 2: tests/integration/test_gateway_serve.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from harness import CHAT, COMPLETION, WAIT_S, Answer, FakeWorker, Product, process
from stub_publisher import BLOCK, block_tokens, stored

from kvatlas.config import WorkerConfig
from kvatlas.connectors.child import Child, free_ports
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply

BODY_BYTES_MAX = 100_000


class Server:
    """``kvatlas serve`` in front of workers that run here, and a client of it."""

    def __init__(self, directory: Path) -> None:
        self.config = directory / "kvatlas.toml"
        self.port = free_ports(1)[0]
        self.directory = directory
        self.child: Child
        self.client = Product([])

    def write(self, *workers: WorkerConfig, more: str = "") -> None:
        limits = f"[gateway]\nport = {self.port}\nmax_body_bytes = {BODY_BYTES_MAX}\n"
        tables = [
            f'[[worker]]\nname = "{w.name}"\nurl = "{w.url}"\nlayout = "{w.layout}"\n'
            for w in workers
        ]
        self.config.write_text(limits + "".join(tables) + more)

    async def start(self) -> None:
        url = f"http://127.0.0.1:{self.port}"
        self.child = process(self.directory, "serve", "--config", str(self.config), url=url)
        await asyncio.to_thread(self.child.wait_ready, WAIT_S)

    async def said(self, text: str) -> None:
        async def written() -> bool:
            return text in self.child.log.read_text()

        await self.client.until(written)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path)
    async with server.client.only_as_client(server.port):
        yield server
    server.child.stop()


async def halves(worker: FakeWorker, request: Request, reply: Reply) -> None:
    """An engine that writes half an event and dies."""
    reply.start(200, [(b"content-type", b"text/event-stream")])
    reply.write(b'data: {"choices": []}\n\ndata: {"choi')
    await asyncio.sleep(0)
    reply.abort()


BAD_BODIES = [
    (b"", "bad_json"),
    (b"{", "bad_json"),
    (b"[1]", "bad_json"),
    (b'{"model": "m", "prompt": "\xff"}', "bad_json"),
    (b"[" * 50_000, "bad_json"),
    (b'{"model": "no such model", "prompt": [1]}', "model_not_found"),
    (b'{"model": 7, "prompt": [1]}', "model_not_found"),
    (b'{"model": ["m"], "prompt": [1]}', "model_not_found"),
    (b'{"prompt": "' + b"x" * BODY_BYTES_MAX + b'"}', "body_too_large"),
]


async def test_bad_requests_and_bad_engines_touch_nobody_else(server: Server) -> None:
    gone = WorkerConfig("gone", f"http://127.0.0.1:{free_ports(1)[0]}", layout=str(BLOCK))
    async with FakeWorker("w1") as w1, FakeWorker("w2", halves, models=("broken",)) as w2:
        server.write(gone, w1.config(), w2.config())
        await server.start()
        client = server.client

        async def described() -> bool:
            rows = await client.workers()
            return rows["w1"]["up"] and rows["w2"]["up"]

        await client.until(described)
        assert "engine_down:gone" in await client.flags()
        w1.events.publish(stored("AB", 2))
        await client.answers("AB", {"w1": 2})
        # Somebody else's request, under way all the while.
        w1.gate = asyncio.Event()
        prompt = [*block_tokens("AB"), 1]
        other = asyncio.create_task(client.complete(prompt, stream=True))

        async def under_way() -> bool:
            return await client.in_flight() == {"w1": 1}

        await client.until(under_way)
        for body, code in BAD_BODIES:
            answer = await client.post(COMPLETION, body)
            assert answer.error["code"] == code, body[:50]
            assert 400 <= answer.status < 500
            assert answer.error["type"] == "invalid_request_error"
        half = await client.complete([1], "broken", stream=True)
        assert half.broken
        garbage = (b"\xdd\xff\xff\xff\xff", os.urandom(2000), b"\x91" * 3000, b"")
        for payload in garbage:
            w2.events.publish(raw=payload)
        for frames in ([b"\x00"], [b"", b"", b""], [b"kv", os.urandom(9), b"x"]):
            w2.events.send_frames(frames)

        async def counted() -> bool:
            return bool(await client.feed("w2", "malformed") >= len(garbage))

        await client.until(counted)
        w1.gate.set()
        got = await other
        assert (got.status, got.expected, got.body.count(b"data: ")) == (200, 2 * BLOCK, 4)
        assert await client.blocks("AB") == {"w1": 2}
        assert await client.feed("w1", "malformed") == 0
        assert await client.in_flight() == {}


async def test_all_engines_gone(server: Server) -> None:
    async with FakeWorker("w1") as w1:
        server.write(w1.config())
        await w1.close()
        await server.start()
        never = await server.client.complete([1, 2])
        assert (never.status, never.error["code"]) == (503, "no_engine")
        await w1.listen()

        async def served() -> int:
            return (await server.client.complete([1, 2])).status

        await server.client.until_equal(served, 200)
        await w1.close()
        answers: list[Answer] = [
            await server.client.complete([1, 2]),
            await server.client.post(CHAT, {"model": "m", "messages": [], "stream": True}),
        ]
        for answer in answers:
            assert (answer.status, answer.error["code"]) == (502, "engine_unreachable")
            assert "w1" in answer.error["message"]


async def test_hangup_reads_the_workers_again(server: Server) -> None:
    async with FakeWorker("w1") as w1, FakeWorker("w2") as w2:
        server.write(w1.config())
        await server.start()
        await server.client.until_equal(lambda: served_by(server), "w1")
        server.write(w1.config(), w2.config(), more="[router]\npolcy = 1\n")
        os.kill(server.child.pid, signal.SIGHUP)
        await server.said("did you mean 'policy'")
        assert set(await server.client.workers()) == {"w1"}
        assert await served_by(server) == "w1"
        server.write(w2.config())
        os.kill(server.child.pid, signal.SIGHUP)
        await server.said("kvatlas: reloaded")
        assert set(await server.client.workers()) == {"w2"}
        await server.client.until_equal(lambda: served_by(server), "w2")
        os.kill(server.child.pid, signal.SIGTERM)
        assert await asyncio.to_thread(server.child.wait, WAIT_S) == 0


async def served_by(server: Server) -> str:
    answer = await server.client.complete([1, 2])
    return answer.worker if answer.status == 200 else ""
