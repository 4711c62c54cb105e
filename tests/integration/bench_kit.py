"""Stub engines for benches, and what may stand before one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable

from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.core.layout import plain
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.workload.spec import EngineSpec

SPEC = EngineSpec(blocks=8192, prefill_tokens_per_s=1e5, decode_step_s=0.01, time_scale=0.0)


@contextlib.asynccontextmanager
async def stubs(count: int = 1) -> AsyncIterator[StubCluster]:
    options = StubOptions(plain(16), SPEC, model_name="m", count=count, events=False)
    async with StubCluster(options) as cluster:
        yield cluster


class Between:
    """Stands before a stub engine: what it sees is counted, what it is told to do it does."""

    def __init__(self, url: str, change: Callable[[Request], tuple[int, bytes] | None]) -> None:
        self._url = url.removeprefix("http://")
        self._change = change
        self._server = HttpServer(self._handle)
        self.paths: Counter[str] = Counter()
        self.prompts: list[str] = []

    async def _handle(self, request: Request, reply: Reply) -> None:
        self.paths[request.path] += 1
        if request.method == "POST" and request.body:
            self.prompts.append(str(json.loads(request.body).get("prompt")))
        instead = self._change(request)
        if instead is not None:
            reply.send(instead[0], [(b"content-type", b"application/json")], instead[1])
            return
        host, _, port = self._url.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        target = request.path + (f"?{request.query}" if request.query else "")
        head = f"{request.method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        head += f"content-length: {len(request.body)}\r\n\r\n"
        try:
            writer.write(head.encode() + request.body)
            answer = await reader.read(-1)
        finally:
            writer.close()  # also where whoever asked has left
        top, _, body = answer.partition(b"\r\n\r\n")
        kind = b"text/event-stream" if b"event-stream" in top else b"application/json"
        if b"chunked" in top.lower():
            body = unchunked(body)
        reply.send(int(top.split()[1]), [(b"content-type", kind)], body)

    async def __aenter__(self) -> Between:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"


def unchunked(body: bytes) -> bytes:
    out = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        count = int(size, 16)
        out, body = out + rest[:count], rest[count + 2 :] if count else b""
    return out
