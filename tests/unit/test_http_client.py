"""The HTTP client over real sockets, on uvloop and on asyncio's own loop (tests/conftest.py)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from http_kit import Serve, echo, eventually

from kvatlas.errors import EngineError
from kvatlas.service.http import Headers, Request
from kvatlas.service.http_client import (
    ConnectError,
    HttpClient,
    Lease,
    ResponseError,
    SilenceError,
    origin_of,
)
from kvatlas.service.http_reply import Reply

Behave = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]


@contextlib.asynccontextmanager
async def peer(behave: Behave) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that does as told; yields its URL and the numbers of its connections."""
    accepted: list[int] = []
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(len(accepted))
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await behave(reader, writer, accepted[-1])
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", accepted
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def request_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def test_connections_are_reused_and_bounded(serve: Serve) -> None:
    server = await serve(echo)
    client = HttpClient(idle_max=2)
    url = f"http://127.0.0.1:{server.port}/"
    for _ in range(5):
        await client.get_json(url)
    assert len(server.connections) == 1
    await asyncio.gather(*(client.get_json(url) for _ in range(6)))
    await eventually(lambda: len(server.connections) == 2)
    await client.close()
    await eventually(lambda: not server.connections)


async def test_a_stale_connection_is_replaced_once_and_silently(client: HttpClient) -> None:
    async def behave(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        await request_head(reader)
        writer.write(OK)
        await request_head(reader)  # the second request on a connection: close without a word
        if number == 1:
            writer.write(OK)

    async with peer(behave) as (url, accepted):
        assert (await client.request("GET", url)).body == b"ok"
        assert (await client.request("POST", url, body=b"x")).body == b"ok"
        assert accepted == [0, 1]


async def test_a_request_that_kills_the_engine_is_not_repeated(client: HttpClient) -> None:
    async def behave(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        await request_head(reader)  # a fresh connection that closes without an answer

    async with peer(behave) as (url, accepted):
        with pytest.raises(EngineError, match="without an answer"):
            await client.request("POST", url, body=b"x")
        assert accepted == [0]


async def test_no_second_try_after_the_first_byte_of_an_answer(client: HttpClient) -> None:
    async def behave(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        await request_head(reader)
        writer.write(OK)
        await request_head(reader)
        writer.write(b"HTTP/1.1 2")
        await writer.drain()

    async with peer(behave) as (url, accepted):
        await client.request("GET", url)
        with pytest.raises(EngineError, match="without an answer"):
            await client.request("GET", url)
        assert accepted == [0]


async def test_bytes_after_an_answer_belong_to_nobody(client: HttpClient) -> None:
    async def behave(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        await request_head(reader)
        writer.write(OK + OK.replace(b"ok", b"no"))
        await reader.read()

    async with peer(behave) as (url, accepted):
        for _ in range(3):
            assert (await client.request("GET", url)).body == b"ok"
        assert accepted == [0, 1, 2]


async def test_trailers_without_end_are_not_kept(client: HttpClient) -> None:
    class Heard:
        headers: Headers

        def on_head(self, status: int, headers: Headers, lease: Lease) -> None:
            self.headers = headers

        def on_data(self, data: bytes) -> None: ...

    async def behave(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        await request_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
        writer.write(b"x: y\r\n" * 1000 + b"\r\n")
        await reader.read()

    heard = Heard()
    async with peer(behave) as (url, _):
        await client.exchange("GET", origin_of(url), "/", [], body=b"", sink=heard)
    assert [name for name, _ in heard.headers] == [b"transfer-encoding"]


async def test_connect_errors(client: HttpClient) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:\d+: .*refused"):
        await client.get_json(f"http://127.0.0.1:{port}/")
    with pytest.raises(ConnectError):
        await client.exchange(
            "GET", origin_of("http://no-such-host.invalid"), "/", [], body=b"", sink=Keep()
        )
    with pytest.raises(ValueError, match="only http"):
        origin_of("ftp://example.org")
    for url in ("junk", "ftp://example.org", "http://[", "http://host:port/"):
        with pytest.raises(EngineError, match="write http"):
            await client.get_json(url)


class Keep:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self.data: list[bytes] = []
        self.lease: Lease | None = None
        self.fail = False

    def on_head(self, status: int, headers: Headers, lease: Lease) -> None:
        self.status, self.lease = status, lease

    def on_data(self, data: bytes) -> None:
        if self.fail:
            raise KeyError("planted")
        self.data.append(data)


async def run_with(client: HttpClient, url: str, sink: Keep) -> None:
    await client.exchange("GET", origin_of(url), "/", [], body=b"", sink=sink)


@pytest.mark.parametrize(
    ("answer", "error", "data"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", "middle", b"abc"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "middle", b"abc"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", "", b"abc"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", "", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", "", b"x"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "", b""),
        (b"no http at all\r\n\r\n", "no HTTP", b""),
        (b"HTTP/1.1 200 OK\r\na: " + b"x" * 70_000, "head is over", b""),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "no HTTP", b""),
    ],
)
async def test_answers_and_broken_answers(
    client: HttpClient, answer: bytes, error: str, data: bytes
) -> None:
    async def behave(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        await request_head(reader)
        writer.write(answer)
        await writer.drain()

    async with peer(behave) as (url, _):
        sink = Keep()
        if error:
            with pytest.raises(ResponseError, match=error) as caught:
                await run_with(client, url, sink)
            assert caught.value.started == bool(sink.status)
        else:
            await run_with(client, url, sink)
        assert b"".join(sink.data) == data


async def test_silence_before_and_within_an_answer() -> None:
    client = HttpClient(idle_timeout_s=0.05)

    async def behave(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        await request_head(reader)
        if number:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await reader.read()

    async with peer(behave) as (url, _):
        for started in (False, True):
            with pytest.raises(SilenceError) as caught:
                await run_with(client, url, Keep())
            assert caught.value.started is started
    await client.close()


async def test_what_a_sink_raises_comes_out_and_closes_the_connection(
    serve: Serve, client: HttpClient
) -> None:
    server = await serve(echo)
    sink = Keep()
    sink.fail = True
    with pytest.raises(KeyError, match="planted"):
        await run_with(client, f"http://127.0.0.1:{server.port}", sink)
    await eventually(lambda: not server.connections)


async def test_cancelling_aborts_at_the_server(serve: Serve, client: HttpClient) -> None:
    gone = asyncio.Event()

    async def hang(request: Request, reply: Reply) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    server = await serve(hang)
    task = asyncio.ensure_future(client.request("GET", f"http://127.0.0.1:{server.port}/"))
    await eventually(lambda: server.active == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(1):
        await gone.wait()


async def test_a_paused_lease_stops_the_sender(serve: Serve, client: HttpClient) -> None:
    written = 0

    async def flood(request: Request, reply: Reply) -> None:
        nonlocal written
        reply.start(200, [], 64 << 20)
        while written < 64 << 20:
            reply.write(b"x" * 65536)
            written += 65536
            await reply.drain()
        reply.end()

    server = await serve(flood)

    class Slow(Keep):
        size = 0

        def on_data(self, data: bytes) -> None:
            if not self.size:
                assert self.lease is not None
                self.lease.pause()
            self.size += len(data)

    sink = Slow()
    task = asyncio.ensure_future(run_with(client, f"http://127.0.0.1:{server.port}", sink))
    seen = -1
    while seen != written or not written:  # until nothing moves any more
        seen = written
        await asyncio.sleep(0.05)
    assert written < 32 << 20
    assert sink.lease is not None
    sink.lease.resume()
    async with asyncio.timeout(20):
        await task
    assert sink.size == 64 << 20


async def test_polling_helpers_tell_what_is_wrong(serve: Serve, client: HttpClient) -> None:
    async def answer(request: Request, reply: Reply) -> None:
        if request.path == "/slow":
            await asyncio.Event().wait()
        reply.send(404 if request.path == "/missing" else 200, [], b"<html>")

    server = await serve(answer)
    base = f"http://127.0.0.1:{server.port}"
    for path, said in (("/missing", "status 404"), ("/html", "no JSON"), ("/slow", "within 0.05")):
        with pytest.raises(EngineError, match=said):
            await client.get_json(base + path, timeout_s=0.05 if path == "/slow" else 5)
    with pytest.raises(EngineError, match="longer than allowed"):
        await client.request("GET", base, size_max=3)
    echoing = await serve(echo)
    posted = await client.post_json(f"http://127.0.0.1:{echoing.port}/p?q=1", {"a": [1]})
    assert posted["body"] == '{"a":[1]}'
    assert posted["target"] == "/p?q=1"
