"""The HTTP server over real sockets, on uvloop and on asyncio's own loop (tests/conftest.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
from http_kit import Raw, Serve, ask, echo, eventually

from kvatlas.service.http import Request
from kvatlas.service.http_client import (
    HttpClient,
)
from kvatlas.service.http_reply import Reply

# ---- server: what requests may look like


async def test_a_connection_is_kept_and_pipelined_requests_are_answered_in_order(
    serve: Serve,
) -> None:
    server = await serve(echo)
    raw = await Raw.to(server)
    await raw.say(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % i for i in range(20)))
    for i in range(20):
        _, _, body = await raw.answer()
        assert json.loads(body)["target"] == f"/{i}"
    await raw.say(b"POST /after HTTP/1.1\r\ncontent-length: 2\r\n\r\nhi")
    _, headers, body = await raw.answer()
    assert json.loads(body)["body"] == "hi"
    assert "connection" not in headers
    assert "date" in headers
    await raw.close()


async def test_a_request_in_single_bytes(serve: Serve) -> None:
    server = await serve(echo)
    raw = await Raw.to(server)
    for byte in b"POST /x?y=1 HTTP/1.1\r\nA: b\r\ncontent-length: 3\r\n\r\nabc":
        await raw.say(bytes([byte]))
        await asyncio.sleep(0)
    _, _, body = await raw.answer()
    assert json.loads(body)["target"] == "/x?y=1"
    assert json.loads(body)["body"] == "abc"
    await raw.close()


async def test_chunked_requests_and_trailers(serve: Serve) -> None:
    server = await serve(echo)
    head = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    _, _, body = await ask(server, head + b"3;x=y\r\nabc\r\n4\r\ndefg\r\n0\r\nT: v\r\n\r\n")
    assert json.loads(body)["body"] == "abcdefg"
    assert json.loads(body)["headers"] == [["transfer-encoding", "chunked"]]


async def test_expect_100_continue(serve: Serve) -> None:
    server = await serve(echo, body_bytes_max=10)
    raw = await Raw.to(server)
    await raw.say(b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
    assert (await raw.head())[0] == 100
    await raw.say(b"ok")
    assert (await raw.answer())[0] == 200
    await raw.say(b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 11\r\n\r\n")
    assert (await raw.answer())[0] == 413  # told before it sent the body
    await raw.close()


@pytest.mark.parametrize("body", [b"grant=1&x=2", b""])
async def test_an_offer_to_upgrade_to_http2_is_ignored_and_loses_no_body(
    serve: Serve, body: bytes
) -> None:
    server = await serve(echo)
    raw = await Raw.to(server)
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    head = b"POST /first HTTP/1.1\r\n" + offer + b"content-length: %d\r\n\r\n" % len(body)
    await raw.say(head + body + b"GET /second HTTP/1.1\r\n\r\n")
    for target, expected in (("/first", body.decode()), ("/second", "")):
        _, _, answer = await raw.answer()
        assert json.loads(answer)["target"] == target
        assert json.loads(answer)["body"] == expected
    await raw.close()


STREAM = (
    b"POST /1 HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc"
    b"POST /2 HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nde\r\n1\r\nf\r\n0\r\nt: v\r\n\r\n"
    b"POST /3 HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\ngh"
    b"POST /4 HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\ntransfer-encoding: chunked\r\n\r\n"
    b"2\r\nij\r\n0\r\n\r\nGET /5?q HTTP/1.1\r\n\r\n"
)


async def test_requests_mean_the_same_however_they_are_cut(serve: Serve) -> None:
    expected = [("/1", "abc"), ("/2", "def"), ("/3", "gh"), ("/4", "ij"), ("/5?q", "")]
    server = await serve(echo)
    for place in range(len(STREAM)):
        raw = await Raw.to(server)
        await raw.say(STREAM[:place])
        for _ in range(3):  # the server, on this very loop, reads the first part
            await asyncio.sleep(0)
        await raw.say(STREAM[place:])
        for target, body in expected:
            _, _, answer = await raw.answer()
            found = json.loads(answer)
            assert (found["target"], found["body"]) == (target, body), place
        await raw.close()


async def test_http_1_0_and_absolute_targets(serve: Serve) -> None:
    async def stream(request: Request, reply: Reply) -> None:
        reply.start(200, [])
        reply.write(request.target.encode())
        reply.end(b" end")

    server = await serve(stream)
    raw = await Raw.to(server)
    await raw.say(b"GET http://host/path?q HTTP/1.0\r\n\r\n")
    status, headers = await raw.head()
    assert status == 200
    assert "transfer-encoding" not in headers
    assert await raw.until_closed() == b"/path?q end"
    await raw.close()


async def test_head_gets_the_head_alone(serve: Serve, client: HttpClient) -> None:
    server = await serve(echo)
    raw = await Raw.to(server)
    await raw.say(b"HEAD /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n")
    status, headers = await raw.head()
    assert status == 200
    assert int(headers["content-length"]) > 0
    _, _, body = await raw.answer()
    assert json.loads(body)["target"] == "/b"
    await raw.close()
    answer = await client.request("HEAD", f"http://127.0.0.1:{server.port}/a")
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbad header: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400),
        (b"CONNECT host:443 HTTP/1.1\r\n\r\n", 405),
        (b"POST http://[x]/ HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\na: " + b"x" * 2000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + b"x" * 2000, 431),
        (b"GET /" + b"x" * 2000, 431),
        (b"POST / HTTP/1.1\r\ncontent-length: 101\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n65\r\n" + b"x" * 101, 413),
    ],
)
async def test_bad_requests_get_an_envelope_and_a_closed_connection(
    serve: Serve, data: bytes, status: int
) -> None:
    server = await serve(echo, head_bytes_max=1000, body_bytes_max=100)
    raw = await Raw.to(server)
    await raw.say(data)
    found, headers, body = await raw.answer()
    assert found == status
    assert headers["connection"] == "close"
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert await raw.until_closed() == b""
    await raw.close()
    assert server.bodies_bytes == 0


async def test_an_early_answer_survives_a_client_that_is_still_sending(serve: Serve) -> None:
    server = await serve(echo, body_bytes_max=1000)
    raw = await Raw.to(server)
    await raw.say(b"POST / HTTP/1.1\r\ncontent-length: 3000000\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        for _ in range(30):
            await raw.say(b"x" * 100_000)
    assert (await raw.answer())[0] == 413
    await raw.close()


async def test_all_bodies_together_are_bounded(serve: Serve) -> None:
    server = await serve(echo, bodies_bytes_max=1000)
    first = await Raw.to(server)
    await first.say(b"POST / HTTP/1.1\r\ncontent-length: 900\r\n\r\n" + b"x" * 800)
    await eventually(lambda: server.bodies_bytes == 800)
    status, _, _ = await ask(server, b"POST / HTTP/1.1\r\ncontent-length: 300\r\n\r\n" + b"y" * 300)
    assert status == 503
    await first.say(b"x" * 100)
    assert (await first.answer())[0] == 200
    await first.close()
    await eventually(lambda: server.bodies_bytes == 0)


async def test_connections_are_bounded(serve: Serve) -> None:
    server = await serve(echo, connections_max=2)
    held = [await Raw.to(server) for _ in range(2)]
    await eventually(lambda: len(server.connections) == 2)
    third = await Raw.to(server)
    assert (await third.answer())[0] == 503
    await third.close()
    await held[0].close()
    await eventually(lambda: len(server.connections) < 2)
    assert (await ask(server, b"GET / HTTP/1.1\r\n\r\n"))[0] == 200
    await held[1].close()


# ---- server: slow and leaving clients


@pytest.mark.parametrize("begin", [b"GET / HT", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nab"])
async def test_half_a_request_times_out(serve: Serve, begin: bytes) -> None:
    server = await serve(echo, head_timeout_s=0.05, body_timeout_s=0.05)
    raw = await Raw.to(server)
    await raw.say(begin)
    assert (await raw.answer())[0] == 408
    await raw.until_closed()
    await raw.close()


async def test_idle_connections_are_closed(serve: Serve) -> None:
    server = await serve(echo, head_timeout_s=0.05, idle_timeout_s=0.05)
    fresh, used = await Raw.to(server), await Raw.to(server)
    await used.say(b"GET / HTTP/1.1\r\n\r\n")
    await used.answer()
    assert await fresh.until_closed() == b""
    assert await used.until_closed() == b""
    await fresh.close()
    await used.close()


async def test_a_client_that_does_not_read_is_paused_and_then_dropped(serve: Serve) -> None:
    done = asyncio.Event()
    written = 0

    async def flood(request: Request, reply: Reply) -> None:
        nonlocal written
        reply.start(200, [])
        try:
            while written < 1 << 30:
                reply.write(b"x" * 65536)
                written += 65536
                await reply.drain()
                await asyncio.sleep(0)
        finally:
            done.set()

    server = await serve(flood, write_stall_timeout_s=0.1)
    raw = await Raw.to(server)
    await raw.say(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(10):
        await done.wait()
    assert written < 64 << 20  # the sockets' buffers, not our memory
    await raw.close()
    await eventually(lambda: not server.connections)


async def test_a_client_that_leaves_cancels_the_handler(serve: Serve) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(request: Request, reply: Reply) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    server = await serve(hang)
    raw = await Raw.to(server)
    await raw.say(b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\nx")
    await started.wait()
    assert server.active == 1
    await raw.close()
    async with asyncio.timeout(1):
        await cancelled.wait()
    await eventually(lambda: server.active == 0 and server.bodies_bytes == 0)


async def test_a_failing_handler_is_a_500_or_a_broken_stream(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: Request, reply: Reply) -> None:
        if request.path == "/late":
            reply.start(200, [])
            reply.write(b"half")
        elif request.path == "/short":
            reply.start(200, [], 10)
            reply.end(b"half")
            return
        elif request.path == "/nothing":
            return
        raise RuntimeError("planted")

    server = await serve(fail)
    for path in (b"/early", b"/nothing"):
        status, _, body = await ask(server, b"GET %b HTTP/1.1\r\n\r\n" % path)
        assert status == 500
        assert json.loads(body)["error"]["type"] == "server_error"
        assert b"planted" not in body
    for path, expected in ((b"/late", b"4\r\nhalf\r\n"), (b"/short", b"half")):
        raw = await Raw.to(server)
        await raw.say(b"GET %b HTTP/1.1\r\n\r\n" % path)
        await raw.head()
        assert await raw.until_closed() == expected
        await raw.close()
    assert caplog.text.count("RuntimeError: planted") == 2


async def test_a_body_that_ends_with_its_connection_is_broken_by_a_reset(serve: Serve) -> None:
    async def fail(request: Request, reply: Reply) -> None:
        reply.start(200, [])
        reply.write(b"half")
        await asyncio.sleep(0)
        reply.abort()

    server = await serve(fail)
    raw = await Raw.to(server)
    await raw.say(b"GET / HTTP/1.0\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        async with asyncio.timeout(5):
            await raw.reader.read(-1)
    await raw.close()


async def test_drain_lets_requests_end_and_closes_connections(serve: Serve) -> None:
    release = asyncio.Event()

    async def wait(request: Request, reply: Reply) -> None:
        if request.path == "/slow":
            await release.wait()
        reply.send(200, [], b"done")

    server = await serve(wait)
    idle, busy = await Raw.to(server), await Raw.to(server)
    await idle.say(b"GET / HTTP/1.1\r\n\r\n")
    await idle.answer()
    await busy.say(b"GET /slow HTTP/1.1\r\n\r\n")
    await eventually(lambda: server.active == 1)
    assert not await server.drain(0.02)
    draining = asyncio.ensure_future(server.drain(5))
    assert await idle.until_closed() == b""
    status, headers, _ = await ask(server, b"GET / HTTP/1.1\r\n\r\n")
    assert (status, headers["connection"]) == (200, "close")
    release.set()
    assert (await busy.answer())[2] == b"done"
    assert await busy.until_closed() == b""
    assert await draining
    await idle.close()
    await busy.close()


async def test_a_connection_opened_just_before_the_drain_is_answered(serve: Serve) -> None:
    server = await serve(echo)
    busy, fresh = await Raw.to(server), await Raw.to(server)
    await busy.say(b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nab")
    await eventually(lambda: len(server.connections) == 2)
    await server.drain(0.02)
    await fresh.say(b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\nok")
    status, headers, _ = await fresh.answer()
    assert (status, headers["connection"]) == (200, "close")
    assert await fresh.until_closed() == b""
    await busy.close()
    await fresh.close()


async def test_small_writes_leave_at_once(serve: Serve) -> None:
    server = await serve(echo)
    raw = await Raw.to(server)
    await eventually(lambda: bool(server.connections))
    (connection,) = server.connections
    sock = connection._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await raw.close()
