"""One answer of an engine, streamed or whole: its usage is read while the bytes pass."""

from __future__ import annotations

from kvatlas.service.body import Usage, parse_answer, usage_of
from kvatlas.service.http import Headers, header
from kvatlas.service.sse import EventStream

#: Whole answers up to this size are read for their usage; longer ones count as not reporting it.
ANSWER_BYTES_MAX = 8 << 20


class AnswerReader:
    """`head`, then `feed` each piece, then `finish`. Without `head` nothing is read of it.

    ``usage`` is what the engine reported, once it is finished. ``truncated``: it ended inside an
    event. ``says_end``: it is seen from the answer itself that all of it came, or nothing of it
    was read.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.truncated = False
        self.says_end = True
        self.withholds = False  # the client does not get all of it
        self._events: EventStream | None = None
        self._parts: list[bytes] | None = None  # of a whole JSON answer
        self._size_bytes = 0

    @property
    def at_boundary(self) -> bool:
        """Whether it is a stream of which the client has seen whole events only."""
        return self._events is not None and self._events.at_boundary

    @property
    def believed(self) -> Usage:
        """What was reported, unless it cannot be true."""
        return self.usage.believed if self.usage is not None else Usage()

    def first_token_s(self, first_byte_s: float) -> float:
        """When the first token came, of an answer whose first byte came then; -1 where it was not
        streamed, and has more than one: then that is when the last one came, or later."""
        shown = self._events is not None or 0 <= self.believed.completion_tokens <= 1
        return first_byte_s if shown else -1.0

    def head(self, status: int, headers: Headers, *, withhold: bool) -> None:
        """Decides how it is read. ``withhold``: the usage event of a stream was asked for by us,
        not by the client."""
        if status != 200 or header(headers, b"content-encoding"):
            return
        kind = header(headers, b"content-type").lower()
        if kind.startswith(b"text/event-stream"):
            self._events = EventStream(withhold=withhold)
            self.withholds = withhold
        elif kind.startswith(b"application/json"):
            self._parts = []

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes; returns those for the client now."""
        if self._events is not None:
            return self._events.feed(data)
        if self._parts is not None:
            self._parts.append(data)
            self._size_bytes += len(data)
            if self._size_bytes > ANSWER_BYTES_MAX:
                self._parts = None
        return data

    def finish(self) -> bytes:
        """All that will come is there; returns what was held back for the client."""
        rest = b""
        if self._events is not None:
            rest = self._events.finish()
            self.truncated, self.says_end = self._events.truncated, self._events.done
            self.usage = self._events.usage
        elif self._parts is not None:
            answer = parse_answer(b"".join(self._parts))
            self.says_end = answer is not None
            self.usage = usage_of(answer) if answer is not None else None
        return rest
