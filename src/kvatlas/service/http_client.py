"""HTTP/1.1 client: kept-alive connections per origin, bodies delivered by callback.

`HttpClient.exchange` is the streaming form: a `Sink` hears of head, data and end as they arrive,
without a task switch per chunk. `HttpClient.request`, `get_json` and `post_json` are for pollers.
Cancelling any of them aborts the request and its connection.

Plain TCP only (``http://``): TLS between the parts of a cluster is not here yet.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools
import msgspec

from kvatlas.errors import EngineError
from kvatlas.service.http import HEAD_BYTES_MAX, Headers, Sweeper, header

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


class Response(msgspec.Struct, frozen=True):
    """A whole response."""

    status: int
    headers: Headers
    body: bytes

    def json(self) -> Any:
        """Raises EngineError when the body is no JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"the answer is no JSON: {error}") from error


class Origin(msgspec.Struct, frozen=True):
    """Scheme-less (host, port) of a base URL, and its path prefix ("" or "/…" without the end)."""

    host: str
    port: int
    prefix: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


_origins: dict[str, Origin] = {}


def origin_of(url: str) -> Origin:
    """Raises ValueError for anything but ``http://host[:port][/prefix]``. Cached."""
    found = _origins.get(url)
    if found is None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r}: only http:// URLs are supported")
        found = Origin(parts.hostname, parts.port or 80, parts.path.rstrip("/"))
        if len(_origins) >= 4096:
            _origins.clear()
        _origins[url] = found
    return found


class HttpClient:
    """A pool of kept-alive connections. One per event loop; close it with `close`.

    ``idle_max`` connections are kept per origin, each at most ``keepalive_s`` unused.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float = 2.0,
        idle_timeout_s: float = 600.0,
        idle_max: int = 256,
        keepalive_s: float = 30.0,
    ) -> None:
        self.connect_timeout_s = connect_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.idle_max = idle_max
        self.keepalive_s = keepalive_s
        self._idle: dict[tuple[str, int], deque[_Connection]] = {}
        self._busy: set[_Connection] = set()
        self._sweeper = Sweeper(min(1.0, idle_timeout_s / 4), self._sweep)

    async def exchange(
        self,
        method: str,
        origin: Origin,
        target: str,
        headers: Headers,
        *,
        body: bytes,
        sink: Sink,
    ) -> None:
        """Sends one request and returns when its response is complete.

        ``target`` is path and query, without the origin's prefix. Host and Content-Length are
        added here. Raises ConnectError, ResponseError or SilenceError.
        """
        payload = _payload(method, origin, target, headers, body)
        connection = self._take(origin)
        if connection is not None:
            try:
                await self._run(connection, origin, method, payload, sink)
                return
            except _StaleError:
                pass
        connection = await self._connect(origin)
        await self._run(connection, origin, method, payload, sink)

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Headers | None = None,
        body: bytes = b"",
        timeout_s: float = 5.0,
        size_max: int = 64 << 20,
    ) -> Response:
        """One whole exchange with ``url`` (path and query included).

        Raises EngineError: no connection, broken, longer than ``size_max``, or over ``timeout_s``.
        """
        parts = urlsplit(url)
        origin = origin_of(f"{parts.scheme}://{parts.netloc}")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        sink = _Collector(size_max)
        try:
            async with asyncio.timeout(timeout_s):
                await self.exchange(method, origin, target, headers or [], body=body, sink=sink)
        except TimeoutError:
            raise EngineError(f"{method} {url}: no answer within {timeout_s:g} s") from None
        except HttpError as error:
            raise EngineError(f"{method} {url}: {error}") from error
        return Response(sink.status, sink.headers, b"".join(sink.parts))

    async def get_json(self, url: str, *, timeout_s: float = 5.0) -> Any:
        """Raises EngineError, also for a status other than 2xx or a body that is no JSON."""
        return _checked(await self.request("GET", url, timeout_s=timeout_s), url)

    async def post_json(self, url: str, obj: object, *, timeout_s: float = 5.0) -> Any:
        """Raises EngineError, also for a status other than 2xx or a body that is no JSON."""
        headers = [(b"content-type", b"application/json")]
        body = obj if isinstance(obj, bytes) else msgspec.json.encode(obj)
        answer = await self.request("POST", url, headers=headers, body=body, timeout_s=timeout_s)
        return _checked(answer, url)

    async def close(self) -> None:
        """Aborts what runs and closes what is idle."""
        self._sweeper.stop()
        for pool in self._idle.values():
            for connection in pool:
                connection.discard()
        self._idle.clear()
        for connection in list(self._busy):
            connection.discard()
        await asyncio.sleep(0)  # lets the transports tell their protocols

    def _take(self, origin: Origin) -> _Connection | None:
        pool = self._idle.get((origin.host, origin.port))
        now = asyncio.get_running_loop().time()
        while pool:
            connection = pool.pop()
            if connection.usable() and now - connection.last_s < self.keepalive_s:
                return connection
            connection.discard()
        return None

    async def _connect(self, origin: Origin) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop), origin.host, origin.port
                )
        except TimeoutError:
            text = f"{origin.authority}: no connection within {self.connect_timeout_s:g} s"
            raise ConnectError(text) from None
        except (OSError, UnicodeError) as error:
            raise ConnectError(f"{origin.authority}: {_reason(error)}") from error
        return connection

    async def _run(
        self, connection: _Connection, origin: Origin, method: str, payload: bytes, sink: Sink
    ) -> None:
        self._busy.add(connection)
        self._sweeper.start()
        try:
            await connection.run(payload, sink, head_only=method == "HEAD")
        except BaseException:
            connection.discard()
            raise
        finally:
            self._busy.discard(connection)
            if not self._busy:
                self._sweeper.stop()
        pool = self._idle.setdefault((origin.host, origin.port), deque())
        if connection.usable() and len(pool) < self.idle_max:
            pool.append(connection)
            connection.pool = pool
        else:
            connection.discard()

    def _sweep(self, now: float) -> None:
        for connection in list(self._busy):
            connection.check_silence(now, self.idle_timeout_s)


def _reason(error: OSError | UnicodeError) -> str:
    """The system's own words; asyncio replaces them."""
    number = error.errno if isinstance(error, OSError) else None
    if number is not None and number > 0:
        return os.strerror(number)
    return str(error)


def _payload(method: str, origin: Origin, target: str, headers: Headers, body: bytes) -> bytes:
    parts = [f"{method} {origin.prefix}{target} HTTP/1.1\r\nhost: {origin.authority}\r\n".encode()]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    if body or method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
        parts.append(b"content-length: %d\r\n" % len(body))
    parts.append(b"\r\n")
    parts.append(body)
    return b"".join(parts)


def _checked(answer: Response, url: str) -> Any:
    if not 200 <= answer.status < 300:
        text = answer.body[:200].decode("utf-8", "replace")
        raise StatusError(f"{url}: status {answer.status}: {text}", status=answer.status)
    return answer.json()


class _StaleError(Exception):
    """A kept-alive connection had been closed by the peer before our request reached it."""


class _Collector:
    """A sink that keeps the whole body, up to ``size_max`` bytes."""

    def __init__(self, size_max: int) -> None:
        self.status = 0
        self.headers: Headers = []
        self.parts: list[bytes] = []
        self._left = size_max

    def on_head(self, status: int, headers: Headers, lease: Lease) -> None:
        self.status, self.headers = status, headers

    def on_data(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise ResponseError("the answer is longer than allowed", started=True)
        self.parts.append(data)


class _Connection(asyncio.Protocol):
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
        self._sent_s = 0.0
        self.last_s = 0.0
        self.pool: deque[_Connection] | None = None
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
        if not self._paused and self._transport is not None:
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
        if self._used and not self._touched and early:
            self._done.set_exception(_StaleError())
        elif self._started:
            self._fail("the engine closed the connection in the middle of its answer")
        else:
            self._fail("the engine closed the connection without an answer")

    # httptools

    def on_message_begin(self) -> None:
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
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
