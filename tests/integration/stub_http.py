"""An engine's HTTP side for tests of the registry: pages that a test sets, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec


class StubHttp:
    """Use ``async with``. A page that is not set answers 404; ``hang`` never answers at all."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.hang = False
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set(self, path: str, page: Any) -> None:
        self.pages[path] = page.encode() if isinstance(page, str) else msgspec.json.encode(page)

    async def __aenter__(self) -> StubHttp:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split()[1].decode()
                self.asked.append(path)
                if self.hang:
                    continue
                body = self.pages.get(path)
                status = b"404 Not Found" if body is None else b"200 OK"
                body = body or b""
                length = b"content-length: %d\r\n" % len(body)
                writer.write(b"HTTP/1.1 " + status + b"\r\n" + length + b"\r\n" + body)
        self._writers.discard(writer)
        writer.close()
