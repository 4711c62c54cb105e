"""One timed answer: what a load generator must see of a response, and no more.

Bytes are looked at as they arrive, in the client's callback, so that a time stamp is the time of
arrival and no task is woken per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvatlas.service.http import Headers
from kvatlas.service.http_client import Lease, ResponseError

BODY_BYTES_MAX = 64 << 20  # of an answer that is not a stream
EVENT_BYTES_MAX = 4 << 20  # of one unfinished event of a stream
TOKENS_MAX = 1 << 48  # a count beyond it is none
_DIGITS_MAX = 20  # of a count in a header: longer ones are none
_SHOWN = 200  # bytes of an answer that an error shows


class Answer:
    """A `Sink`. ``clock`` gives seconds; `finish` is to be called when the exchange returned."""

    __slots__ = (
        "_body",
        "_clock",
        "_held",
        "_spoke",
        "_stream",
        "done",
        "error",
        "headers",
        "status",
        "times",
        "usage",
    )

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held = b""  # the start of an event
        self._body = bytearray()  # of what is no stream
        self._spoke = False  # there was a choice in it
        self._stream = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.times: list[float] = []  # one per event that carried output
        self.usage: dict[str, object] = {}
        self.error = ""  # what the engine said is wrong, or what is wrong with what it said
        self.done = False  # the answer is whole

    def on_head(self, status: int, headers: Headers, lease: Lease) -> None:
        self.status = status
        self.headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in headers}
        kind = self.headers.get("content-type", "").lower()
        self._stream = status == 200 and kind.startswith("text/event-stream")

    def on_data(self, data: bytes) -> None:
        """Raises ResponseError where the answer is too long to be one."""
        if not self._stream:
            self._body += data
            if len(self._body) > BODY_BYTES_MAX:
                self._body.clear()
                raise _too_long("an answer", BODY_BYTES_MAX)
            return
        now = self._clock()
        self._held += data
        if b"\r" in self._held:
            self._held = self._held.replace(b"\r\n", b"\n")
        *events, self._held = self._held.split(b"\n\n")
        for event in events:
            self._event(event, now)
        if len(self._held) > EVENT_BYTES_MAX:
            self._held = b""
            raise _too_long("an event of the answer", EVENT_BYTES_MAX)

    def finish(self) -> None:
        """The response ended; without a stream the usage, or the fault, is in its body."""
        if not self._stream:
            self.done = True
            if self.status != 200:
                self.error = self._refusal()
                return
            self._read(bytes(self._body))
        if self.done and not self._spoke and not self.error:
            self.error = "there is no output in it"

    def _event(self, event: bytes, now: float) -> None:
        data = event[5:] if event.startswith(b"data:") and b"\n" not in event else _data_of(event)
        data = data.strip()
        if not data:  # a comment that keeps the connection open
            return
        if data == b"[DONE]":
            self.done = True
        elif self._read(data):
            self.times.append(now)

    def _read(self, data: bytes) -> bool:
        """Usage and faults of an answer or event; whether it also carries output."""
        try:
            value = _BODY.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
            form = isinstance(problem, msgspec.ValidationError)
            what = "JSON of another form" if form else "not JSON"
            self.error = self.error or f"{what} ({problem}): {_text(data)}"
            return False
        if value.error is not None:
            self.error = self.error or _message(value.error) or "an error without a text"
        if isinstance(value.usage, dict):
            self.usage = value.usage
        choices = value.choices or ()
        self._spoke |= bool(choices)
        return bool(choices) and not all(_opening(choice) for choice in choices)

    def _refusal(self) -> str:
        """What an answer with another status than 200 says."""
        if 300 <= self.status < 400:
            where = self.headers.get("location", "")
            return f"it leads to {where or 'nowhere'}: give the address where it is answered"
        try:
            said = _message(_BODY.decode(self._body).error)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            said = ""
        return said or _text(bytes(self._body))


class _Delta(msgspec.Struct):
    role: object = None
    content: object = None
    reasoning: object = None
    reasoning_content: object = None
    tool_calls: object = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: object = None
    error: object = None


_BODY = msgspec.json.Decoder(_Body)


def tokens(value: object) -> int | None:
    """A count of tokens as an answer tells it; None where it is none."""
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= TOKENS_MAX
    return value if known else None  # type: ignore[return-value]


def header_tokens(text: str) -> int | None:
    """Such a count as a header tells it; None where it is none, or has far too many digits."""
    known = text.isdecimal() and len(text) <= _DIGITS_MAX
    return tokens(int(text)) if known else None


def cached_tokens(usage: Mapping[str, Any]) -> int | None:
    """How much of the prompt was not computed, by an answer's usage; None where it does not say."""
    details = usage.get("prompt_tokens_details")
    return tokens(details.get("cached_tokens")) if isinstance(details, dict) else None


def _opening(choice: _Choice) -> bool:
    """Does it only say who speaks, before the first token?"""
    delta = choice.delta
    return (
        delta is not None
        and delta.role is not None
        and not (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
    )


def _data_of(event: bytes) -> bytes:
    """The data of an event that has other fields too, or more than one line of it."""
    lines = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def _message(error: object) -> str:
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")


def _text(data: bytes) -> str:
    return repr(data[:_SHOWN].decode("utf-8", "replace")) if data else "it is empty"


def _too_long(what: str, most: int) -> ResponseError:
    return ResponseError(f"{what} is longer than {most} bytes", started=True)
