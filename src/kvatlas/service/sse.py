"""Reads the usage out of an event stream while its bytes pass through as they are.

The stream arrives in arbitrary pieces, so events are told apart by their blank lines only (LF,
CRLF and CR, WHATWG "Server-sent events" §9.2.6), never by packets. Nearly every piece is some
whole events without the word usage: those cost one search.
"""

from __future__ import annotations

import re

from kvatlas.service.body import Usage, parse_answer, usage_of

#: An event longer than this is passed on unread: usage events are a few hundred bytes.
EVENT_BYTES_MAX = 64 << 10

_KEY = b'"usage"'
# The groups are atomic: the CRLF of one line must not be taken for two line ends.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_END_MARKER = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\](?:[\r\n]|$)")
_TAIL = 3  # bytes of a blank line that may have come before the piece that completes it
_CR = 13


class EventStream:
    """Follows one stream. ``withhold``: the usage-only event is not for this client.

    When it is, every event is sent on once complete; otherwise bytes are sent on at once.
    """

    def __init__(self, *, withhold: bool) -> None:
        self.usage: Usage | None = None
        self.done = False  # the end marker was seen
        self.truncated = False  # the stream ended inside an event
        self._withhold = withhold
        self._held = bytearray()  # of the event that is not complete yet
        self._sent = 0  # bytes of it that were sent on
        self._oversize = False

    @property
    def at_boundary(self) -> bool:
        """Whether the client has seen whole events only, so that another may follow."""
        return not (self._sent if self._withhold else self._held)

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of the stream; returns those to send on now."""
        held = self._held
        if not held and _KEY not in data and data.endswith(b"\n\n"):
            self._note_end(data)
            return data
        search_from = max(0, len(held) - _TAIL)
        held += data
        out = self._take_events(search_from)
        if len(held) > EVENT_BYTES_MAX:
            out.append(bytes(held[self._sent :]))
            del held[:-_TAIL]
            self._sent = len(held)
            self._oversize = True
        return b"".join(out) if self._withhold else data

    def finish(self) -> bytes:
        """The stream is complete; its last event may lack the blank line. What is left to send.

        Where the last event is cut in the middle, sets `truncated` and keeps it back.
        """
        rest = bytes(self._held)
        if self._oversize or not rest.strip(b"\r\n"):
            self.truncated = self._oversize
            return rest[self._sent :] if self._withhold else b""
        if not _is_whole(rest):
            self.truncated = True
            return b""
        out = self._event(rest)
        self._held.clear()
        return out if self._withhold else b""

    def _take_events(self, search_from: int) -> list[bytes]:
        held, out = self._held, []
        start = 0
        while (blank := _BLANK_LINE.search(held, search_from)) is not None:
            end = blank.end()
            if end == len(held) and held[-1] == _CR:
                break  # perhaps half of a CRLF
            if self._oversize:
                out.append(bytes(held[self._sent : end]))
                self._oversize, self._sent = False, 0
            else:
                out.append(self._event(bytes(held[start:end])))
            start = search_from = end
        del held[:start]
        return out

    def _event(self, event: bytes) -> bytes:
        """Reads one event; returns what of it the client gets."""
        self._note_end(event)
        if _KEY not in event:
            return event
        answer = parse_answer(_payload(event))
        usage = usage_of(answer) if answer is not None else None
        if answer is None or usage is None:
            return event
        self.usage = usage
        if not (self._withhold and answer.is_usage_only()):
            return event
        return event[: len(event) - len(event.lstrip(b"\r\n"))]

    def _note_end(self, data: bytes) -> None:
        if b"[DONE]" in data and _END_MARKER.search(data):
            self.done = True


def _payload(event: bytes) -> bytes:
    """The data of one event: its data lines, joined."""
    lines = []
    for line in event.splitlines():
        if line.startswith(b"data:"):
            lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
    return b"\n".join(lines)


def _is_whole(event: bytes) -> bool:
    """Whether an event without its blank line is nevertheless a whole one."""
    payload = _payload(event)
    if payload:
        return payload == b"[DONE]" or parse_answer(payload) is not None
    return all(line[:1] in (b":", b"") for line in event.splitlines())
