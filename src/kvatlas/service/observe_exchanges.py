"""From copied bytes to exchanges: what was asked, when its answer came, and what it told.

It follows HTTP/1.1 as far as it can. Where it cannot (a piece is missing, an upgrade, no HTTP), the
connection's exchanges count as lost until a piece begins with a request again.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol

import httptools

from kvatlas.service.answer import AnswerReader
from kvatlas.service.body import Usage
from kvatlas.service.http import Headers
from kvatlas.service.http_client import ResponseError
from kvatlas.service.load_answer import Answer
from kvatlas.service.observe_copies import CONNECTIONS_MAX, Kind, Piece

BODY_BYTES_MAX = 64 << 20  # of one request
BODIES_BYTES_MAX = 512 << 20  # of all requests that are not answered yet
PIPELINED_MAX = 64  # requests of one connection that wait for their answers

_REQUEST_LINE = re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH) \S+ HTTP/1\.[01]\r\n")


class Exchange:
    """One request and what became of it. Times are the carrier's; -1 where there is none yet.

    ``asked_s``: when its last byte had come; ``first_s``: when the first byte of the answer's body
    came, ``ended_s`` the last. ``stream``: its events, where it is a stream that can be read.
    """

    __slots__ = (
        *("answer", "asked_s", "body", "ended_s", "first_s", "headers", "method", "path", "state"),
        *("status", "stream", "told", "whole"),
    )

    def __init__(self) -> None:
        self.method = self.path = ""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.asked_s = self.first_s = self.ended_s = -1.0
        self.status = 0
        self.told: dict[str, str] = {}  # the answer's headers
        self.answer = AnswerReader()
        self.stream: Answer | None = None
        self.whole = False  # all of the answer came
        self.state: object = None  # whatever the listener keeps with it

    @property
    def usage(self) -> Usage:
        """What the engine reported, unless it cannot be true."""
        return self.answer.believed

    @property
    def events(self) -> int:
        """Of a streamed answer, those that carry output; -1 where none could be read."""
        return len(self.stream.times) if self.stream is not None else -1

    @property
    def failed(self) -> bool:
        """Whether an event is an error, or none at all, whatever the status said before it."""
        return self.stream is not None and bool(self.stream.error)

    @property
    def streamed(self) -> bool:
        return self.told.get("content-type", "").lower().startswith("text/event-stream")


class Listener(Protocol):
    """Hears of each exchange: once whole as a request, at its first byte, and when it is over."""

    def asked(self, exchange: Exchange) -> None: ...

    def answering(self, exchange: Exchange) -> None: ...

    def over(self, exchange: Exchange) -> None: ...


class Watcher:
    """Takes the pieces of all connections. ``lost``: exchanges that could not be followed, by
    reason; bounded in connections and in bytes of requests."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.lost: Counter[str] = Counter()
        self.bodies_bytes = 0
        self._talks: dict[int, _Talk] = {}

    def take(self, piece: Piece) -> None:
        """Never raises for what a piece may hold."""
        if piece.dropped:
            self.lost["pieces not copied"] = piece.dropped
        talk = self._talks.get(piece.connection)
        if talk is None:
            if len(self._talks) >= CONNECTIONS_MAX:  # its end was dropped
                self._talks.pop(next(iter(self._talks))).cut("copy dropped")
            talk = self._talks[piece.connection] = _Talk(self)
        talk.take(piece)
        if piece.kind is Kind.CLOSED:
            del self._talks[piece.connection]

    def close(self) -> None:
        """Nothing more comes."""
        for talk in self._talks.values():
            talk.cut("the observer ended")
        self._talks.clear()


class _Talk:
    """One connection."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.waiting: deque[Exchange] = deque()
        self.now_s = 0.0
        self._number = 0
        self._blind = False
        self._renew()

    def _renew(self) -> None:
        self.asks = _Asks(self)
        self.answers = _Answers(self)

    def take(self, piece: Piece) -> None:
        self.now_s = piece.at_s
        if piece.number != self._number:
            self.cut("copy dropped")
        self._number = (piece.number + 1) & 0xFFFFFFFF
        if piece.kind is Kind.CLOSED:
            if not self._blind:
                self.answers.closed()
            self.cut("")
            return
        if self._blind:
            if piece.kind is not Kind.ASKED or not _REQUEST_LINE.match(piece.data):
                return
            self._blind = False
            self._renew()
        try:
            (self.asks if piece.kind is Kind.ASKED else self.answers).feed(piece.data)
        except httptools.HttpParserUpgrade:
            self.cut("upgraded")
        except httptools.HttpParserCallbackError as error:
            match error.__context__:
                case _HeadOver():
                    self.answers = _Answers(self)
                case _Unread() as unread:
                    self.cut(str(unread))
                case other:
                    raise other or error from None
        except httptools.HttpParserError:
            self.cut("not HTTP")

    def cut(self, reason: str) -> None:
        """What is under way cannot be followed any more; "" where its connection just ended."""
        self.asks.drop()
        if reason:
            self.watcher.lost[reason] += max(1, len(self.waiting)) if not self._blind else 0
            self._blind = True
        for exchange in self.waiting:
            self.done(exchange, whole=False, lost=bool(reason))
        self.waiting.clear()

    def done(self, exchange: Exchange, *, whole: bool, lost: bool = False) -> None:
        self.watcher.bodies_bytes -= len(exchange.body)
        exchange.ended_s, exchange.whole = self.now_s, whole
        if lost:
            exchange.status = -1
        self.watcher.listener.over(exchange)
        exchange.body = b""


class _Asks:
    """The client's side of the parser."""

    def __init__(self, talk: _Talk) -> None:
        self._talk = talk
        self._parser: Any = httptools.HttpRequestParser(self)
        self._exchange = Exchange()
        self._target = b""
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def drop(self) -> None:
        self._talk.watcher.bodies_bytes -= self._size_bytes
        self._parts, self._size_bytes = [], 0

    def on_message_begin(self) -> None:
        self._exchange, self._target = Exchange(), b""

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        self._exchange.headers.setdefault(key, value.decode("latin-1"))

    def on_body(self, data: bytes) -> None:
        watcher = self._talk.watcher
        full = watcher.bodies_bytes + len(data) > BODIES_BYTES_MAX
        if full or self._size_bytes + len(data) > BODY_BYTES_MAX:
            raise _Unread("body too large")
        self._parts.append(data)
        self._size_bytes += len(data)
        watcher.bodies_bytes += len(data)

    def on_message_complete(self) -> None:
        talk, exchange = self._talk, self._exchange
        if len(talk.waiting) >= PIPELINED_MAX:
            raise _Unread("too many requests without an answer")
        exchange.method = self._parser.get_method().decode("latin-1")
        exchange.path = self._target.decode("latin-1").partition("?")[0]
        exchange.body = b"".join(self._parts)
        self._parts, self._size_bytes = [], 0  # counted on until it is answered
        exchange.asked_s = talk.now_s
        talk.waiting.append(exchange)
        talk.watcher.listener.asked(exchange)


class _Answers:
    """The router's side."""

    def __init__(self, talk: _Talk) -> None:
        self._talk = talk
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._at: Exchange | None = None  # whose answer has begun
        self._until_eof = False

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def closed(self) -> None:
        """The end of the connection is the end of an answer without a length."""
        if self._at is not None and self._until_eof:
            self._finish(self._at)

    def on_message_begin(self) -> None:
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._at is None:  # not a trailer
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 and status != 101:
            return
        if not self._talk.waiting:
            raise _Unread("an answer to nothing")
        exchange = self._at = self._talk.waiting[0]
        exchange.status = status
        for name, value in self._headers:
            key = name.decode("latin-1").lower()
            exchange.told.setdefault(key, value.decode("latin-1"))
        bodyless = exchange.method == "HEAD" or status in (204, 304)
        framed = "content-length" in exchange.told or "transfer-encoding" in exchange.told
        self._until_eof = not bodyless and not framed
        exchange.answer.head(status, self._headers, withhold=False)
        if status == 200 and exchange.streamed and "content-encoding" not in exchange.told:
            exchange.stream = Answer(lambda: self._talk.now_s)
            exchange.stream.on_head(status, self._headers, _Free())
        if exchange.method == "HEAD":  # the parser would wait for the body that the head describes
            self._finish(exchange)
            raise _HeadOver

    def on_body(self, data: bytes) -> None:
        exchange = self._at
        if exchange is None:
            return
        if exchange.first_s < 0:
            exchange.first_s = self._talk.now_s
            self._talk.watcher.listener.answering(exchange)
        exchange.answer.feed(data)
        if exchange.stream is not None:
            try:
                exchange.stream.on_data(data)
            except ResponseError:
                raise _Unread("answer too large") from None

    def on_message_complete(self) -> None:
        if self._at is not None and not self._until_eof:
            self._finish(self._at)

    def _finish(self, exchange: Exchange) -> None:
        exchange.answer.finish()
        if exchange.stream is not None:
            exchange.stream.finish()
        self._at = None
        self._talk.waiting.popleft()
        whole = exchange.answer.says_end and not exchange.answer.truncated
        self._talk.done(exchange, whole=whole)


class _Free:
    """A `Lease` on bytes that are copies: nothing holds them back."""

    on_end: Callable[[], None] | None = None

    def pause(self) -> None:
        """They come as they come."""

    def resume(self) -> None:
        """They come as they come."""


class _HeadOver(Exception):
    """The answer to a HEAD ends with its head."""


class _Unread(Exception):
    """This connection is not looked at any more; the text says why."""
