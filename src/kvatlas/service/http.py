"""What the HTTP/1.1 server and client share: headers, limits, requests, errors, a sweeper.

Why a layer of our own on httptools (llhttp) and not a framework: docs/decisions/002-http-layer.md.
Header names and values are bytes as they were on the wire; names compare in lower case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvatlas.dataplane.tls import Identity

Headers = list[tuple[bytes, bytes]]

#: Headers that speak of one connection and never pass a proxy (RFC 9110 §7.6.1, and the older
#: Proxy-* and Keep-Alive); HTTP2-Settings belongs to an upgrade that we do not take.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

#: nginx and node allow 8 to 16 KiB per line and 32 KiB in all; bearer tokens of some identity
#: providers alone reach 16 KiB.
HEAD_BYTES_MAX = 64 << 10

REASONS: dict[int, bytes] = {status.value: status.phrase.encode() for status in HTTPStatus}


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes, default: bytes = b"") -> bytes:
    """The first value of ``name`` (given in lower case)."""
    for key, value in headers:
        if key.lower() == name:
            return value
    return default


def connection_tokens(headers: Headers) -> frozenset[bytes]:
    """What the Connection header names as hop-by-hop besides the usual, in lower case."""
    value = header(headers, b"connection")
    if not value or value.lower() in (b"keep-alive", b"close"):
        return frozenset()
    return frozenset(token.strip().lower() for token in value.split(b","))


def envelope(
    message: str, *, status: int, code: str | None = None, param: str | None = None
) -> bytes:
    """OpenAI's error body. The type follows from the status: the client's fault or the server's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


class Limits(msgspec.Struct, frozen=True):
    """What one client, and all of them together, may hold.

    A request body gets ``body_timeout_s`` plus the time that its bytes take at
    ``body_bytes_per_s_min``; a client that reads nothing for ``write_stall_timeout_s`` while we
    have something to say is dropped.
    """

    body_bytes_max: int = 64 << 20
    bodies_bytes_max: int = 1 << 30  # of all requests together
    connections_max: int = 4096
    head_bytes_max: int = HEAD_BYTES_MAX
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    body_bytes_per_s_min: float = 64 << 10
    idle_timeout_s: float = 75.0
    write_stall_timeout_s: float = 60.0
    linger_s: float = 2.0  # reading on after an early answer, so that the client can see it


class Request(msgspec.Struct):
    """A whole request. Header names are in lower case; ``target`` is path and query as sent.
    ``arrived_s``: when its head was there, on `time.perf_counter`. ``who``: whom the certificate of
    its connection names; ``proved``: there is one, of whatever authority; ``address``: where it
    came from."""

    method: str
    target: str
    headers: Headers
    body: bytes
    keep_alive: bool
    http_1_0: bool = False
    arrived_s: float = 0.0
    who: Identity | None = None
    proved: bool = False
    address: str = ""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    def header(self, name: str, default: str = "") -> str:
        """The first value of ``name`` (lower case), decoded as latin-1."""
        return header(self.headers, name.encode(), default.encode()).decode("latin-1")


class Sweeper:
    """Calls ``sweep(now)`` every ``interval_s`` while started: one timer for all connections."""

    def __init__(self, interval_s: float, sweep: Callable[[float], None]) -> None:
        self._interval_s = interval_s
        self._sweep = sweep
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Does nothing when already started."""
        if self._handle is None:
            loop = asyncio.get_running_loop()
            self._handle = loop.call_later(self._interval_s, self._run, loop)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = loop.call_later(self._interval_s, self._run, loop)
        self._sweep(loop.time())
