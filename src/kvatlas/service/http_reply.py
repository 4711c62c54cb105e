"""One answer to one client: framing of whole, chunked and until-close bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from kvatlas.service.http import REASONS, Headers, Request

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")


class Wire(Protocol):
    """The connection as a reply sees it."""

    @property
    def paused(self) -> bool:
        """Whether the client reads more slowly than we write."""
        ...

    def write(self, data: bytes) -> None:
        """Never blocks; what one turn of the event loop writes leaves together."""
        ...

    def abort_after_flush(self) -> None:
        """Sends what was written, then closes the connection."""
        ...

    def reset(self) -> None:
        """Breaks the connection so that the client gets an error, not an end."""
        ...

    async def drain(self) -> None: ...


class Reply:
    """The way back to one client: `send` once, or `start`, `write` any number, `end`.

    After the client left, writes do nothing. ``on_pause`` and ``on_resume`` tell when the client
    reads more slowly than we write.
    """

    __slots__ = (
        "_chunked",
        "_date_line",
        "_left",
        "_mute",
        "_wire",
        "ended",
        "on_pause",
        "on_resume",
        "request",
        "started",
    )

    def __init__(self, wire: Wire, request: Request, date_line: bytes, *, last: bool) -> None:
        """``last``: the connection closes after this reply."""
        self._wire = wire
        self._date_line = date_line
        if last:
            request.keep_alive = False
        self.request = request
        self.started = False
        self.ended = False
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self._chunked = False
        self._mute = False  # HEAD, 204, 304: a head and no body
        self._left = 0

    @property
    def paused(self) -> bool:
        """Whether ``on_pause`` would have been called by now, had it been set."""
        return self._wire.paused

    def start(self, status: int, headers: Headers, length: int | None = None) -> None:
        """Writes the head. ``length`` None: chunked (until the connection closes for HTTP/1.0).

        Content-Length, Transfer-Encoding, Connection and Date are added here.
        """
        assert not self.started, "a reply starts once"
        self.started = True
        request = self.request
        reason = REASONS.get(status, b"Status")
        parts = [b"HTTP/1.1 %d %b\r\n" % (status, reason)]
        dated = False
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
            dated = dated or name.lower() == b"date"
        if not dated:
            parts.append(self._date_line)
        empty = status in (204, 304)
        self._mute = empty or request.method == "HEAD"
        if length is not None:
            if not empty:
                parts.append(b"content-length: %d\r\n" % length)
            self._left = length
        elif request.http_1_0:
            request.keep_alive = False
        elif not empty:
            parts.append(b"transfer-encoding: chunked\r\n")
            self._chunked = not self._mute
        if not request.keep_alive:
            parts.append(b"connection: close\r\n")
        elif request.http_1_0:
            parts.append(b"connection: keep-alive\r\n")
        parts.append(b"\r\n")
        self._wire.write(b"".join(parts))

    def write(self, data: bytes) -> None:
        """Writes body bytes; never blocks (see ``on_pause`` and `drain`)."""
        if not data or self._mute or self.ended:
            return
        if self._chunked:
            self._wire.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._left -= len(data)
            self._wire.write(data)

    def end(self, data: bytes = b"") -> None:
        """Ends the body; the connection goes on to its next request."""
        self.write(data)
        if self.ended:
            return
        if self._left > 0 and not self._mute:  # fewer bytes than promised: never a silent success
            self.abort()
            return
        self.ended = True
        if self._chunked:
            self._wire.write(b"0\r\n\r\n")

    def send(self, status: int, headers: Headers, body: bytes = b"") -> None:
        """A whole answer."""
        self.start(status, headers, len(body))
        self.end(body)

    def send_json(self, status: int, obj: object, headers: Headers | None = None) -> None:
        """A whole JSON answer; bytes are taken as JSON already."""
        body = obj if isinstance(obj, bytes) else msgspec.json.encode(obj)
        self.send(status, [JSON, *(headers or [])], body)

    def abort(self) -> None:
        """Breaks the connection, so that the client cannot take what it has for the whole."""
        framed = self._chunked or self._left > 0
        self.ended = True
        if self.started and not framed:  # a close would be the end of this body
            self._wire.reset()
        else:
            self._wire.abort_after_flush()

    async def drain(self) -> None:
        """Waits until the client has read enough of what was written."""
        await self._wire.drain()
