"""A raw HTTP client and other helpers of the tests of the HTTP layer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer

Serve = Callable[..., Awaitable[HttpServer]]


async def echo(request: Request, reply: Reply) -> None:
    reply.send_json(
        200,
        {
            "method": request.method,
            "target": request.target,
            "body": request.body.decode("latin-1"),
            "headers": [[n.decode(), v.decode("latin-1")] for n, v in request.headers],
        },
    )


class Raw:
    """A client that writes what it is told and reads what comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, server: HttpServer) -> Raw:
        return cls(*await asyncio.open_connection("127.0.0.1", server.port))

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(5):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines[1:] if line]
        return int(lines[0].split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        async with asyncio.timeout(5):
            body = await self.reader.readexactly(int(headers["content-length"]))
        return status, headers, body

    async def until_closed(self) -> bytes:
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read(-1)
        return b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


async def ask(server: HttpServer, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """One request, one whole answer, and the connection."""
    raw = await Raw.to(server)
    try:
        await raw.say(data)
        return await raw.answer()
    finally:
        await raw.close()


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.002)
