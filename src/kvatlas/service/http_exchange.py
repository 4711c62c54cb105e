"""One exchange at a time over one connection to an engine, its answer delivered by callback."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import httptools

from kvatlas.dataplane.tls import reason_of
from kvatlas.errors import EngineError
from kvatlas.service.http import HEAD_BYTES_MAX, Headers, header

#: A kept-alive connection that dies this soon after we wrote to it, before any answer, was closed
#: by the peer while idle: the request is sent once more. Later deaths may be the request's doing.
STALE_WINDOW_S = 1.0


class HttpError(EngineError):
    """Base of what can go wrong with one exchange."""


class ConnectError(HttpError):
    """No connection: nothing of the request was sent."""


class ResponseError(HttpError):
    """The connection broke, or what came is no HTTP. ``started``: the head had arrived."""

    def __init__(self, message: str, *, started: bool) -> None:
        super().__init__(message)
        self.started = started


class SilenceError(ResponseError):
    """Nothing came for the idle timeout."""


class StatusError(EngineError):
    """An answer with a status other than 2xx, where only 2xx will do."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Sink(Protocol):
    """Hears one response: head once, then data any number of times.

    Called while the bytes are being read; `HttpClient.exchange` returns or raises a little later,
    and ``lease.on_end``, where the sink set it, is called with the last bytes.
    What a sink raises comes out of `exchange`, and the connection is closed.
    """

    def on_head(self, status: int, headers: Headers, lease: Lease) -> None: ...

    def on_data(self, data: bytes) -> None: ...


class Lease(Protocol):
    """What a sink may do to its connection: hold it back, and hear of the complete answer."""

    on_end: Callable[[], None] | None

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class StaleError(Exception):
    """A kept-alive connection had been closed by the peer before our request reached it."""


class ClientConnection(asyncio.Protocol):
    """One connection; runs one exchange at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: Any = None
        self._parser: Any = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: Headers = []
        self._parts: list[bytes] = []
        self._head_bytes = 0
        self._head_only = False
        self._started = False  # the head was given to the sink
        self._touched = False  # any byte of the response arrived
        self._until_eof = False
        self._keep = False
        self._paused = False
        self._used = False
        self._secure = False
        self._sent_s = 0.0
        self.last_s = 0.0
        self.pool: deque[ClientConnection] | None = None
        self.on_end: Callable[[], None] | None = None

    # what HttpClient asks

    def usable(self) -> bool:
        return self._keep and self._transport is not None and not self._transport.is_closing()

    def discard(self) -> None:
        self._keep = False
        if self._done is not None and not self._done.done():
            self._fail("the client was closed")
        if self._transport is not None:
            self._transport.abort()

    async def run(self, payload: bytes, sink: Sink, *, head_only: bool) -> None:
        """Sends a whole request; returns when ``sink`` has its answer. Raises HttpError."""
        assert self._done is None, "one exchange at a time"
        self.pool = self.on_end = None
        self._sink, self._head_only = sink, head_only
        self._started = self._touched = self._until_eof = self._keep = False
        self._head_bytes = 0
        self._sent_s = self.last_s = self._loop.time()
        self._done = self._loop.create_future()
        self._transport.write(payload)
        try:
            await self._done
        finally:
            self._done = self._sink = None
            self._used = True
        if self._paused:
            self.resume()

    def check_silence(self, now: float, idle_timeout_s: float) -> None:
        if not self._paused and now - self.last_s > idle_timeout_s and self._done is not None:
            text = f"the engine was silent for {idle_timeout_s:g} s"
            self._settle(SilenceError(text, started=self._started))

    # Lease

    def pause(self) -> None:
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self.last_s = self._loop.time()
            if not self._transport.is_closing():
                self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._secure = transport.get_extra_info("ssl_object") is not None
        self._parser = httptools.HttpResponseParser(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self._keep = False  # bytes that nobody asked for
            self._transport.abort()
            return
        self.last_s = self._loop.time()
        self._touched = True
        if not self._started:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
            self._flush()
        except httptools.HttpParserCallbackError as error:  # raised by the sink
            self._settle(error.__context__ or error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the engine's answer is no HTTP: {error}")
        except Exception as error:  # raised by the sink: whoever awaits the exchange gets it
            self._settle(error)
        if not self._started and self._head_bytes > HEAD_BYTES_MAX:
            self._fail(f"the engine's response head is over {HEAD_BYTES_MAX} bytes")

    def eof_received(self) -> bool:
        if self._until_eof and self._done is not None and not self._done.done():
            self._complete(keep=False)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep = False
        if self.pool is not None and self in self.pool:
            self.pool.remove(self)
        self._transport = None
        if self._done is None or self._done.done():
            return
        early = self._loop.time() - self._sent_s < STALE_WINDOW_S
        why = f": {reason_of(exc)}" if isinstance(exc, ssl.SSLError) else ""
        if self._secure and not self._used and not why:
            why = ": where it refused our certificate, its log says why"
        if self._used and not self._touched and early:
            self._done.set_exception(StaleError())
        elif self._started:
            self._fail(f"the engine closed the connection in the middle of its answer{why}")
        else:
            self._fail(f"the engine closed the connection without an answer{why}")

    # httptools

    def on_message_begin(self) -> None:
        if self._done is None or self._done.done():
            raise ResponseError("a second answer to one request", started=True)
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._started:  # trailers have no end, and nobody reads them
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._started:
            return
        self._started = True
        headers = self._headers
        bodyless = self._head_only or status in (204, 304)
        self._until_eof = not bodyless and not (
            header(headers, b"content-length") or header(headers, b"transfer-encoding")
        )
        assert self._sink is not None
        self._sink.on_head(status, headers, self)
        if self._head_only:  # the parser would wait for the body that the head describes
            self._complete(keep=False)

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._started and not (self._done is None or self._done.done()):
            self._flush()
            self._complete(keep=self._parser.should_keep_alive())

    def _flush(self) -> None:
        parts = self._parts
        if parts and self._sink is not None:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            self._parts = []
            self._sink.on_data(data)

    def _complete(self, *, keep: bool) -> None:
        assert self._done is not None
        self._keep = keep
        try:
            if self.on_end is not None:
                self.on_end()
        except Exception as error:  # the sink's: whoever awaits the exchange gets it
            self._settle(error)
        else:
            self._done.set_result(None)

    def _fail(self, text: str) -> None:
        self._settle(ResponseError(text, started=self._started))

    def _settle(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self._keep = False
        if self._transport is not None:
            self._transport.abort()
