"""The pass-through changes no byte, and what looks at the copies cannot touch it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvloop
from http_kit import eventually

from kvatlas.service.http_client import Origin
from kvatlas.service.observe_copies import Copies, Frames, Kind, Piece
from kvatlas.service.observe_tunnel import Tunnel

Run = Callable[[Coroutine[Any, Any, None]], None]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

# Both loops differ in when they begin to read and in how they close.
both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])

ODD_REQUEST = (
    b"POST /v1/Chat/completions?x=%20y HTTP/1.1\r\nHOST: somewhere\r\nX-OdD:   two  spaces \r\n"
    b"x-odd: again\r\nTransfer-Encoding: chunked\r\nTrailer: Sum\r\nExpect: 100-continue\r\n\r\n"
    b"3;ext=1\r\nabc\r\n0\r\nSum: 1\r\n\r\n"
    b"GET /second HTTP/1.1\r\nhost: pipelined\r\n\r\n"
)
ODD_ANSWER = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 Very Fine\r\nServer: else\r\nX-A: 1\r\nx-a: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n00002;y\r\nbc\r\n0\r\nTail: x\r\n\r\n"
    b"HTTP/1.1 503 Busy\r\nContent-Length: 3\r\nRetry-After: 7\r\n\r\nno!"
)


class Router:
    """Somebody's router: what it heard, and a way to answer as a test wants."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.heard: list[bytes] = []
        self.ended = 0
        self.broken = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.talk(reader, writer)
        except ConnectionError:
            self.broken += 1
        finally:
            writer.close()

    async def hear(self, reader: asyncio.StreamReader, size: int) -> None:
        self.heard.append(await reader.readexactly(size))


@contextlib.asynccontextmanager
async def through(
    router: Router, copies: Copies | None = None
) -> AsyncIterator[tuple[Tunnel, Callable[[], Awaitable[Any]]]]:
    """A tunnel to it, and how to open a connection through it."""
    server = await asyncio.start_server(router.serve, "127.0.0.1", 0, limit=1 << 20)
    tunnel = Tunnel(Origin("127.0.0.1", server.sockets[0].getsockname()[1], ""), copies or Copies())
    await tunnel.start()
    try:
        yield tunnel, lambda: asyncio.open_connection("127.0.0.1", tunnel.port, limit=1 << 20)
    finally:
        await tunnel.close()
        server.close()
        await asyncio.sleep(0)


def reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


@both_loops
def test_every_byte_passes_as_it_is_both_ways(run: Run) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await router.hear(reader, len(ODD_REQUEST))
        for at in range(0, len(ODD_ANSWER), 7):
            writer.write(ODD_ANSWER[at : at + 7])
            await writer.drain()

    router = Router(talk)

    async def body() -> None:
        async with through(router) as (_, connect), asyncio.timeout(10):
            reader, writer = await connect()
            writer.write(ODD_REQUEST)
            assert await reader.read(-1) == ODD_ANSWER  # and the end as an end
            writer.close()
        assert router.heard == [ODD_REQUEST]

    run(body())


@both_loops
def test_what_comes_before_the_router_is_there_is_not_lost(run: Run) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await router.hear(reader, 9)
        writer.write(b"yes")

    router = Router(talk)

    async def body() -> None:
        async with through(router) as (tunnel, _), asyncio.timeout(10):
            for _ in range(40):
                sock = socket.create_connection(("127.0.0.1", tunnel.port))
                sock.sendall(b"too early")  # is in the socket before the tunnel accepts it
                reader, writer = await asyncio.open_connection(sock=sock)
                assert await reader.read(-1) == b"yes"
                writer.close()
        assert router.heard == [b"too early"] * 40

    run(body())


@both_loops
def test_a_client_that_ends_its_side_still_gets_its_answer(run: Run) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        router.heard.append(await reader.read(-1))  # to the end
        writer.write(b"answer")

    router = Router(talk)

    async def body() -> None:
        async with through(router) as (tunnel, connect), asyncio.timeout(10):
            reader, writer = await connect()
            writer.write(b"all of it")
            writer.write_eof()
            assert await reader.read(-1) == b"answer"
            await eventually(lambda: not tunnel.wires)
            writer.close()
        assert router.heard == [b"all of it"]

    run(body())


@both_loops
def test_a_client_that_leaves_breaks_the_routers_connection(run: Run) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await router.hear(reader, 3)
        while True:
            writer.write(b"data: token\n\n")
            await writer.drain()
            await asyncio.sleep(0)

    router = Router(talk)

    async def body() -> None:
        async with through(router) as (tunnel, connect):
            reader, writer = await connect()
            writer.write(b"ask")
            await reader.readexactly(5)
            reset(writer)
            await eventually(lambda: router.broken == 1 and not tunnel.wires)

    run(body())


@both_loops
def test_a_router_that_breaks_off_is_no_end_to_the_client(run: Run) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await router.hear(reader, 3)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf of an")
        await router.hear(reader, 4)  # the client has that half
        reset(writer)

    router = Router(talk)

    async def body() -> None:
        async with through(router) as (tunnel, connect), asyncio.timeout(10):
            reader, writer = await connect()
            writer.write(b"ask")
            await reader.readuntil(b"half of an")
            writer.write(b"more")
            with pytest.raises(ConnectionResetError):
                await reader.read(-1)
            await eventually(lambda: not tunnel.wires)
            writer.close()

    run(body())


@both_loops
def test_a_router_that_cannot_be_reached_is_a_broken_connection(run: Run) -> None:
    async def body() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            tunnel = Tunnel(Origin("127.0.0.1", closed.getsockname()[1], ""), Copies())
            await tunnel.start()
            async with asyncio.timeout(10):
                reader, writer = await asyncio.open_connection("127.0.0.1", tunnel.port)
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                with pytest.raises(ConnectionResetError):
                    await reader.read(-1)
                writer.close()
            assert tunnel.unreached == 1
            assert not tunnel.wires
            await tunnel.close()

    run(body())


@both_loops
def test_huge_bodies_pass_at_the_pace_of_whoever_reads(run: Run) -> None:
    block = bytes(range(256)) * 4096  # 1 MiB
    count = 8
    most = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(count):
            assert await reader.readexactly(len(block)) == block
        for _ in range(count):
            writer.write(block)
            await writer.drain()

    router = Router(talk)

    async def body() -> None:
        nonlocal most
        async with through(router) as (tunnel, connect), asyncio.timeout(60):
            reader, writer = await connect()

            async def send() -> None:
                for _ in range(count):
                    writer.write(block)
                    await writer.drain()

            sending = asyncio.create_task(send())
            for _ in range(count):
                assert await reader.readexactly(len(block)) == block
                for wire in tunnel.wires:
                    if wire.client.open:
                        most = max(most, wire.client.transport.get_write_buffer_size())
            await sending
            writer.close()
        assert not router.broken
        assert most < 1 << 20  # of 8 MiB: it was held back, not gathered

    run(body())


# Copies ------------------------------------------------------------------------------------------


async def copied(queue_bytes_max: int = 1 << 20, connections_max: int = 10) -> Any:
    """A carrier's end on a socket, and the other end of it."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    copies = Copies(queue_bytes_max, connections_max)
    await asyncio.get_running_loop().create_connection(lambda: copies, sock=ours)
    return copies, theirs


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def talked(connect: Callable[[], Awaitable[Any]], times: int, size: int) -> None:
    reader, writer = await connect()
    for number in range(times):
        data = bytes([number % 256]) * size
        writer.write(data)
        assert await reader.readexactly(size) == data
    writer.close()


@both_loops
def test_copies_tell_what_passed_in_order(run: Run) -> None:
    async def body() -> None:
        copies, theirs = await copied()
        async with through(Router(echo), copies) as (tunnel, connect), asyncio.timeout(10):
            await talked(connect, 3, 5)
            await eventually(lambda: not tunnel.wires)
            copies.close()
            loop, frames, pieces = asyncio.get_running_loop(), Frames(), list[Piece]()
            while data := await loop.sock_recv(theirs, 11):  # cut anywhere
                pieces += frames.feed(data)
        assert [p.number for p in pieces] == list(range(len(pieces)))
        assert {p.connection for p in pieces} == {1}
        assert pieces[-1].kind is Kind.CLOSED
        for kind in (Kind.ASKED, Kind.ANSWERED):
            assert b"".join(p.data for p in pieces if p.kind is kind) == (
                b"\0" * 5 + b"\1" * 5 + b"\2" * 5
            )
        times = [p.at_s for p in pieces]
        assert times == sorted(times)
        theirs.close()

    run(body())


@both_loops
def test_a_reader_that_stands_still_costs_copies_and_no_byte(run: Run) -> None:
    async def body() -> None:
        copies, theirs = await copied(queue_bytes_max=1 << 16)
        async with through(Router(echo), copies) as (_, connect), asyncio.timeout(30):
            await talked(connect, 60, 1 << 15)
            assert copies.dropped > 10
            # It reads again: the hole shows in the numbers.
            numbers = [piece.number for piece in await asyncio.to_thread(read_on, theirs)]
            assert numbers == sorted(numbers)
            assert len(numbers) + copies.dropped >= 60
        theirs.close()

    run(body())


def read_on(sock: socket.socket) -> list[Piece]:
    frames, found = Frames(), list[Piece]()
    sock.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while data := sock.recv(1 << 16):
            found += frames.feed(data)
    return found


@both_loops
def test_a_reader_that_dies_touches_nothing(run: Run) -> None:
    async def body() -> None:
        copies, theirs = await copied()
        async with through(Router(echo), copies) as (_, connect), asyncio.timeout(10):
            await talked(connect, 2, 10)
            theirs.close()
            await talked(connect, 20, 1 << 14)
            await copies.gone.wait()
            await talked(connect, 3, 10)
            assert copies.opened() == 0  # nothing is kept for nobody

    run(body())


async def test_connections_beyond_the_limit_pass_without_copies() -> None:
    copies, theirs = await copied(connections_max=1)
    async with through(Router(echo), copies) as (_, connect), asyncio.timeout(10):
        reader, writer = await connect()
        writer.write(b"first")
        assert await reader.readexactly(5) == b"first"
        await talked(connect, 2, 10)
        assert copies.unwatched == 1
        writer.close()
    theirs.close()


def test_a_stream_that_no_carrier_sent_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        Frames().feed(b"\xff" * 64)
