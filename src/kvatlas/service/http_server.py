"""HTTP/1.1 server: a coroutine per request, answers written straight to the transport.

The handler gets a whole `Request` and a `Reply`. It is cancelled when the client leaves. Every
resource that a client can hold has a limit and a deadline (`Limits`); one sweeper watches them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import Any
from urllib.parse import urlsplit

import httptools

from kvatlas.dataplane.tls import Identity, Trust, WrongPart
from kvatlas.errors import RequestError
from kvatlas.service.http import Headers, Limits, Request, Sweeper, envelope, header
from kvatlas.service.http_reply import Reply
from kvatlas.service.tls import Door, DoorLimits, peer_of

log = logging.getLogger(__name__)

STRANGERS_BYTES = 64 << 10  # of a body, before it is asked who sends it
_LINGER_NEVER = struct.pack("ii", 1, 0)  # closing then sends RST

Handler = Callable[[Request, Reply], Awaitable[None]]


class HttpServer:
    """Listens on one address. `start`, then `drain` and `close`."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits | None = None,
        trust: Trust | None = None,
        door: DoorLimits | None = None,
    ) -> None:
        """``trust``: what it proves and believes; None: plain HTTP."""
        self.handler = handler
        self.limits = limits or Limits()
        self.trust = trust
        self.door: Door | None = None
        if trust is not None:
            self.door = Door(trust, lambda: _Connection(self, asyncio.get_running_loop()), door)
        self.known: Callable[[Request], None] | None = None  # raises for whom no body is held
        self.draining = False
        self.connections: set[_Connection] = set()
        self.bodies_bytes = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        lim = self.limits
        shortest = min(
            lim.head_timeout_s,
            lim.body_timeout_s,
            lim.idle_timeout_s,
            lim.write_stall_timeout_s,
            lim.linger_s,
        )
        self._sweeper = Sweeper(min(1.0, shortest / 4), self._sweep)
        self._date: tuple[int, bytes] = (0, b"")

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listens; `port` is then the real one. Raises OSError (address in use, not ours)."""
        if self.door is not None:
            await self.door.start(host, port)
            self.port = self.door.port
        else:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(
                lambda: _Connection(self, loop), host, port, backlog=1024
            )
            self.port = self._server.sockets[0].getsockname()[1]
        self._sweeper.start()

    @property
    def active(self) -> int:
        """Requests being answered."""
        return sum(1 for connection in self.connections if connection.busy)

    async def drain(self, timeout_s: float) -> bool:
        """Lets the running requests end; False when some were still running at the deadline.

        The listener stays open meanwhile, so that probes and late clients get an answer.
        """
        self.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        for connection in list(self.connections):
            connection.close_if_idle()
        while self.active:
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def close(self) -> None:
        """Stops listening and breaks what is still connected."""
        self._sweeper.stop()
        if self.door is not None:
            self.door.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = [c.task for c in self.connections if c.task is not None]
        for connection in list(self.connections):
            connection.abort()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets the transports tell their protocols

    def date_line(self) -> bytes:
        """The Date header, made once a second."""
        now = int(asyncio.get_running_loop().time())
        if self._date[0] != now or not self._date[1]:
            self._date = (now, b"date: " + formatdate(usegmt=True).encode() + b"\r\n")
        return self._date[1]

    def _sweep(self, now: float) -> None:
        for connection in list(self.connections):
            connection.check_deadlines(now)


class _Refusal(Exception):
    """Ends a request before its handler ran; the connection closes after the answer."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class _Connection(asyncio.Protocol):
    """One client's connection. Requests are answered one after the other."""

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.task: asyncio.Task[None] | None = None
        self._loop = loop
        self._transport: Any = None  # uvloop's and asyncio's share no typed base
        self._parser: Any = httptools.HttpRequestParser(self)
        self._reply: Reply | None = None
        self._pending: list[bytes] = []  # written in this turn of the loop
        self._queue: deque[Request] = deque()  # pipelined; bounded by one read of the socket
        self._in_head = False
        self._head_bytes = 0
        self._one_message = True  # no request was completed by the bytes being parsed
        self._target = b""
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._answered = False
        self._upgrading = False
        self._discarding = False
        self._paused = False
        self._read_deadline = math.inf
        self._arrived_s = 0.0
        self._write_deadline = math.inf
        self._resumed: asyncio.Future[None] | None = None
        self._who: Identity | None = None
        self._proved = False
        self._address = ""

    # for Reply and HttpServer

    @property
    def busy(self) -> bool:
        return self.task is not None or bool(self._queue)

    @property
    def paused(self) -> bool:
        return self._write_deadline != math.inf

    def write(self, data: bytes) -> None:
        """Everything written in one turn of the event loop leaves in one system call."""
        if self._transport is None:
            return
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def _flush(self) -> None:
        pending = self._pending
        if pending and self._transport is not None:
            if len(pending) == 1:
                self._transport.write(pending[0])
            else:
                self._transport.writelines(pending)
        self._pending = []

    async def drain(self) -> None:
        self._flush()
        if self.paused and self._transport is not None:
            if self._resumed is None:
                self._resumed = self._loop.create_future()
            await asyncio.shield(self._resumed)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def abort_after_flush(self) -> None:
        """Sends what was written, but not the end of the body."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NEVER)
            self._transport.abort()

    def close_if_idle(self) -> None:
        """A kept-alive connection between two requests; one that was just opened is heard."""
        idle = not self.busy and not self._in_head and not self._body_bytes
        if idle and self._answered:
            self.abort_after_flush()

    def check_deadlines(self, now: float) -> None:
        if now > self._write_deadline:
            self.abort()
        elif now > self._read_deadline:
            self._read_deadline = math.inf
            if self.busy:  # a half-sent next request: it dies with the present one
                self._parser = None
            elif self._discarding or not (self._in_head or self._target):
                self.abort_after_flush()
            else:
                self._refuse(_Refusal(408, "the request did not arrive in time", "timeout"))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.connections.add(self)
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        limits = self.server.limits
        self._read_deadline = self._loop.time() + limits.head_timeout_s
        if self.server.trust is not None:
            try:
                self._proved, self._who = peer_of(transport, self.server.trust)
            except WrongPart as error:
                self._refuse(_Refusal(403, str(error), "certificate_refused"))
                return
        if len(self.server.connections) > limits.connections_max:
            text = f"{limits.connections_max} connections are open, the most allowed"
            self._refuse(_Refusal(503, text, "too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self._forget_body()
        self._transport = None
        while self._queue:
            self.server.bodies_bytes -= len(self._queue.popleft().body)
        self._wake()
        if self.task is not None:
            self.task.cancel()

    def eof_received(self) -> bool:
        return False  # a client that closes its side has left

    def pause_writing(self) -> None:
        self._write_deadline = self._loop.time() + self.server.limits.write_stall_timeout_s
        if self._reply is not None and self._reply.on_pause is not None:
            self._reply.on_pause()

    def resume_writing(self) -> None:
        self._write_deadline = math.inf
        self._wake()
        if self._reply is not None and self._reply.on_resume is not None:
            self._reply.on_resume()

    def _wake(self) -> None:
        if self._resumed is not None:
            if not self._resumed.done():
                self._resumed.set_result(None)
            self._resumed = None

    def data_received(self, data: bytes) -> None:
        if self._discarding or self._parser is None:
            return
        self._one_message = True
        try:
            self._feed(data)
            if self._in_head and self._one_message:  # all of it belongs to this head
                self._head_bytes += len(data)
                if self._head_bytes > self.server.limits.head_bytes_max:
                    raise self._head_too_large()
        except _Refusal as refusal:
            self._refuse(refusal)
        except RequestError as error:
            self._refuse(_Refusal(error.status, str(error), error.code))

    def _feed(self, data: bytes) -> None:
        """Parses; an offered upgrade (h2c of some clients) is ignored, as RFC 9110 allows."""
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserCallbackError as error:
                if isinstance(error.__context__, _Refusal | RequestError):
                    raise error.__context__ from None
                raise
            except httptools.HttpParserError as error:
                raise _Refusal(400, f"this is no HTTP/1.1 request: {error}", "bad_http") from None

    def _head_without_upgrade(self) -> bytes:
        """The head just parsed, to be parsed again: httptools skips the body after an upgrade."""
        self._upgrading = False
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise _Refusal(405, "CONNECT is not served here", "method_not_allowed")
        parts = [method, b" ", self._target, b" HTTP/1.1\r\n"]
        for name, value in self._headers:
            if name not in (b"upgrade", b"connection", b"http2-settings"):
                parts += (name, b": ", value, b"\r\n")
        return b"".join((*parts, b"\r\n"))

    # httptools

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._target, self._headers = b"", []
        self._read_deadline = self._loop.time() + self.server.limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # not a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._upgrading = self._parser.should_upgrade()
        if self._upgrading:
            return
        limits = self.server.limits
        headers = self._headers
        size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in headers)
        if size > limits.head_bytes_max:
            raise self._head_too_large()
        self._arrived_s = time.perf_counter()
        self._read_deadline = self._loop.time() + limits.body_timeout_s
        length = header(headers, b"content-length")
        if length and int(length) > limits.body_bytes_max:
            raise self._too_large()
        if header(headers, b"expect").lower() == b"100-continue" and not self.busy:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        limits = self.server.limits
        self._body.append(data)
        self._body_bytes += len(data)
        self.server.bodies_bytes += len(data)
        self._read_deadline += len(data) / limits.body_bytes_per_s_min
        if self.server.known and self._body_bytes - len(data) <= STRANGERS_BYTES < self._body_bytes:
            self.server.known(self._request(b""))
        if self._body_bytes > limits.body_bytes_max:
            raise self._too_large()
        if self.server.bodies_bytes > limits.bodies_bytes_max:
            text = "the request bodies being received fill the gateway's memory limit"
            raise _Refusal(503, text, "overloaded")

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        request = self._request(b"".join(self._body))
        self._body, self._body_bytes = [], 0  # counted on until the request is answered
        self._target = b""
        self._one_message = False
        self._queue.append(request)
        self._read_deadline = math.inf
        if self.task is None:
            self._next()
        elif self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _request(self, body: bytes) -> Request:
        return Request(
            method=self._parser.get_method().decode("latin-1"),
            target=_origin_form(self._target.decode("latin-1")),
            headers=self._headers,
            body=body,
            keep_alive=self._parser.should_keep_alive(),
            http_1_0=self._parser.get_http_version() == "1.0",
            arrived_s=self._arrived_s,
            who=self._who,
            proved=self._proved,
            address=self._address,
        )

    # answering

    def _next(self) -> None:
        request = self._queue.popleft()
        self._reply = self._reply_to(request)
        self.task = self._loop.create_task(self._answer(request, self._reply))

    def _reply_to(self, request: Request) -> Reply:
        server = self.server
        return Reply(self, request, server.date_line(), last=server.draining)

    async def _answer(self, request: Request, reply: Reply) -> None:
        try:
            await self.server.handler(request, reply)
        except asyncio.CancelledError:  # the client left, or the server closes
            reply.ended = True
            self.abort()
        except Exception:
            log.exception("the handler of %s %s failed", request.method, request.path)
        if not reply.ended:
            if reply.started:
                reply.abort()
            else:
                text = "the server failed to answer; its log says why"
                reply.send_json(500, envelope(text, status=500, code="internal_error"))
        self._finished(request)

    def _finished(self, request: Request) -> None:
        self.task = self._reply = None
        self._answered = True
        self.server.bodies_bytes -= len(request.body)
        if self._transport is None or self._transport.is_closing():
            return
        if not request.keep_alive or self._parser is None or self.server.draining:
            if self._transport.can_write_eof() or self._parser is None:
                self._linger()
            else:  # with TLS there is no half of a close, and nothing is left unread
                self.abort_after_flush()
            return
        if self._queue:
            self._next()
        else:
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            if not self._in_head and not self._body_bytes:
                self._read_deadline = self._loop.time() + self.server.limits.idle_timeout_s

    def _refuse(self, refusal: _Refusal) -> None:
        """Answers instead of a handler and closes, unless an earlier request is being answered."""
        self._forget_body()
        self._parser = None
        if self.busy:
            return
        body = envelope(refusal.message, status=refusal.status, code=refusal.code)
        request = Request("", "/", [], b"", keep_alive=False)
        self._reply_to(request).send_json(refusal.status, body)
        self._linger()

    def _linger(self) -> None:
        """Half-closes and reads on for a while: closing at once would reset unread input, and
        with it the answer that the client has not read yet."""
        if self._transport is None:
            return
        self._discarding = True
        self._read_deadline = self._loop.time() + self.server.limits.linger_s
        self._flush()
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def _forget_body(self) -> None:
        self.server.bodies_bytes -= self._body_bytes
        self._body, self._body_bytes = [], 0

    def _head_too_large(self) -> _Refusal:
        text = f"the request head is over {self.server.limits.head_bytes_max} bytes"
        return _Refusal(431, text, "head_too_large")

    def _too_large(self) -> _Refusal:
        text = f"the request body is over {self.server.limits.body_bytes_max} bytes"
        return _Refusal(413, text, "body_too_large")


def _origin_form(target: str) -> str:
    """Path and query of a request's target, which a proxy's client sends as a whole URL."""
    if target.startswith("/") or target == "*":
        return target
    try:
        parts = urlsplit(target)
    except ValueError as error:
        raise _Refusal(400, f"the request's target is no URL: {error}", "bad_http") from None
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
