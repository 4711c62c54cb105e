"""HTTP/1.1 client: kept-alive connections per origin, bodies delivered by callback.

`HttpClient.exchange` is the streaming form: a `Sink` hears of head, data and end as they arrive,
without a task switch per chunk. `HttpClient.request`, `get_json` and `post_json` are for pollers.
Cancelling any of them aborts the request and its connection.

``https://`` is believed as the client's `Outgoing` says; without one, as this machine does.
"""

from __future__ import annotations

import asyncio
import math
import os
import ssl
from collections import deque
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvatlas.config_tls import is_local
from kvatlas.dataplane.tls import WrongPart, reason_of
from kvatlas.errors import EngineError
from kvatlas.service.http import Headers, Sweeper
from kvatlas.service.http_exchange import (
    ClientConnection,
    ConnectError,
    HttpError,
    Lease,
    ResponseError,
    SilenceError,
    Sink,
    StaleError,
    StatusError,
)
from kvatlas.service.tls import Outgoing, check_session, from_outside

__all__ = [
    "Collector",
    "ConnectError",
    "HttpClient",
    "HttpError",
    "Lease",
    "Origin",
    "Response",
    "ResponseError",
    "SilenceError",
    "Sink",
    "StatusError",
    "origin_of",
]


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

    def said(self) -> str:
        """What a refusal says: the message of an error as OpenAI's API has it, or the beginning."""
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            return msgspec.json.decode(self.body, type=_Refusal).error.message[:500]
        return self.body[:200].decode("utf-8", "replace")


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


class Origin(msgspec.Struct, frozen=True):
    """(host, port) of a base URL, its path prefix ("" or "/…" without the end), and whether it is
    https."""

    host: str
    port: int
    prefix: str
    secure: bool = False

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


_origins: dict[str, Origin] = {}


def origin_of(url: str) -> Origin:
    """Raises ValueError for anything but ``http[s]://host[:port][/prefix]``. Cached."""
    found = _origins.get(url)
    if found is None:
        parts = urlsplit(url)
        port = {"http": 80, "https": 443}.get(parts.scheme)
        if port is None or not parts.hostname:
            raise ValueError(f"{url!r}: only http:// and https:// URLs are supported")
        if parts.port == 0:
            raise ValueError(f"{url!r}: nothing listens on port 0")
        prefix = parts.path.rstrip("/")
        found = Origin(parts.hostname, parts.port or port, prefix, parts.scheme == "https")
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
        outgoing: Outgoing | None = None,
        headers: Headers | None = None,
    ) -> None:
        """``outgoing``: how https is spoken; ``headers`` go with each `request`, and not in the
        clear to another machine."""
        self.connect_timeout_s = connect_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.idle_max = idle_max
        self.keepalive_s = keepalive_s
        self._outgoing = outgoing
        self._headers = headers or []
        self._idle: dict[tuple[str, int, bool], deque[ClientConnection]] = {}
        self._busy: set[ClientConnection] = set()
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
        connect_s: float = math.inf,
    ) -> None:
        """Sends one request and returns when its response is complete.

        ``target`` is path and query, without the origin's prefix. Host and Content-Length are
        added here. ``connect_s``: for this one, where it is shorter than ``connect_timeout_s``.
        Raises ConnectError, ResponseError or SilenceError.
        """
        payload = _payload(method, origin, target, headers, body)
        connection = self._take(origin)
        if connection is not None:
            try:
                await self._run(connection, origin, method, payload, sink)
                return
            except StaleError:
                pass
        connection = await self._connect(origin, min(connect_s, self.connect_timeout_s))
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

        Raises EngineError: no URL that can be asked, no connection, broken, longer than
        ``size_max``, or over ``timeout_s``.
        """
        try:
            parts = urlsplit(url)
            origin = origin_of(f"{parts.scheme}://{parts.netloc}")
        except ValueError as error:
            raise EngineError(f"{method} {url}: {error}: write http[s]://HOST:PORT") from error
        if self._headers and not origin.secure and not is_local(url):
            raise EngineError(f"{method} {url}: a token is not sent in the clear: write https://")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        sink = Collector(size_max)
        try:
            async with asyncio.timeout(timeout_s):
                sent = [*self._headers, *(headers or [])]
                await self.exchange(method, origin, target, sent, body=body, sink=sink)
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

    def _take(self, origin: Origin) -> ClientConnection | None:
        pool = self._idle.get(_place(origin))
        now = asyncio.get_running_loop().time()
        while pool:
            connection = pool.pop()
            if connection.usable() and now - connection.last_s < self.keepalive_s:
                return connection
            connection.discard()
        return None

    async def _connect(self, origin: Origin, timeout_s: float) -> ClientConnection:
        loop = asyncio.get_running_loop()
        out = self._outgoing
        if out is not None and not origin.secure and not out.plain(origin.host):
            raise ConnectError(f"{origin.authority}: not in the clear where [tls] is on: https")
        try:
            async with asyncio.timeout(timeout_s):
                if origin.secure:
                    return await self._connect_secure(loop, origin)
                _, connection = await loop.create_connection(
                    lambda: ClientConnection(loop), origin.host, origin.port
                )
        except TimeoutError:
            text = f"{origin.authority}: no connection within {timeout_s:g} s"
            raise ConnectError(text) from None
        except ssl.SSLError as error:
            raise ConnectError(f"{origin.authority}: {reason_of(error)}") from error
        except (OSError, UnicodeError) as error:
            raise ConnectError(f"{origin.authority}: {_reason(error)}") from error
        return connection

    async def _connect_secure(
        self, loop: asyncio.AbstractEventLoop, origin: Origin
    ) -> ClientConnection:
        outgoing = self._outgoing = self._outgoing or from_outside()
        try:
            transport, connection = await loop.create_connection(
                lambda: ClientConnection(loop), origin.host, origin.port, ssl=outgoing.context()
            )
        except ConnectionResetError as error:
            text = "it ended the TLS handshake; its log says why"
            raise ConnectError(f"{origin.authority}: {text}") from error
        try:
            check_session(transport, outgoing)
        except WrongPart:
            transport.abort()
            raise
        return connection

    async def _run(
        self, connection: ClientConnection, origin: Origin, method: str, payload: bytes, sink: Sink
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
        pool = self._idle.setdefault(_place(origin), deque())
        if connection.usable() and len(pool) < self.idle_max:
            pool.append(connection)
            connection.pool = pool
        else:
            connection.discard()

    def _sweep(self, now: float) -> None:
        for connection in list(self._busy):
            connection.check_silence(now, self.idle_timeout_s)


def _place(origin: Origin) -> tuple[str, int, bool]:
    return origin.host, origin.port, origin.secure


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
        raise StatusError(f"{url}: status {answer.status}: {answer.said()}", status=answer.status)
    return answer.json()


class Collector:
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
