"""One timed answer: what a load generator must see of a response, and no more.

Bytes are looked at as they arrive, in the client's callback, so that a time stamp is the time of
arrival and no task is woken per token.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from kvatlas.service.http import Headers
from kvatlas.service.http_client import Lease

_USAGE = re.compile(rb'"usage":\s*\{|"choices":\s*\[\]')
MAX_HELD_BYTES = 64 << 20  # of an answer that is not a stream, or of one unfinished event


class Answer:
    """A `Sink`. ``clock`` gives seconds; `finish` is to be called when the exchange returned."""

    __slots__ = (
        "_clock",
        "_held",
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
        self._held = b""  # the body so far, or the start of an event
        self._stream = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.times: list[float] = []  # one per event that carried output
        self.usage: dict[str, object] = {}
        self.error = ""  # what the engine said is wrong
        self.done = False  # the answer is whole

    def on_head(self, status: int, headers: Headers, lease: Lease) -> None:
        self.status = status
        self.headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in headers}
        self._stream = self.headers.get("content-type", "").startswith("text/event-stream")

    def on_data(self, data: bytes) -> None:
        if len(self._held) + len(data) > MAX_HELD_BYTES:
            self.error = f"an answer or event of more than {MAX_HELD_BYTES} bytes"
            self._held = b""
            return
        self._held += data
        if self._stream:
            now = self._clock()
            if b"\r" in self._held:
                self._held = self._held.replace(b"\r\n", b"\n")
            *events, self._held = self._held.split(b"\n\n")
            for event in events:
                self._event(event, now)

    def finish(self) -> None:
        """The response ended; without a stream the usage, or the fault, is in its body."""
        if not self._stream:
            self.done = True
            self._read(self._held)

    def _event(self, event: bytes, now: float) -> None:
        if not event.startswith(b"data:"):
            return
        data = event[5:].strip()
        if data == b"[DONE]":
            self.done = True
        elif data.startswith(b'{"error"') or _USAGE.search(data) is not None:
            if self._read(data):
                self.times.append(now)
        elif b'"role"' not in data or not _opening(data):
            self.times.append(now)

    def _read(self, data: bytes) -> bool:
        """Usage and faults of an answer or event; whether it also carries output."""
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            self.error = f"not JSON ({problem}): {data[:200]!r}"
            return False
        if not isinstance(value, dict):
            self.error = "not a JSON object"
            return False
        fault = value.get("error")
        if fault is not None:
            self.error = str(fault.get("message", "")) if isinstance(fault, dict) else str(fault)
        usage = value.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        return bool(value.get("choices"))


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


def _opening(data: bytes) -> bool:
    """Is this the event that only says who speaks, before the first token?"""
    try:
        event = msgspec.json.decode(data, type=_Event)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    deltas = [choice.delta for choice in event.choices]
    return bool(deltas) and not any(
        delta is None
        or delta.content
        or delta.reasoning
        or delta.reasoning_content
        or delta.tool_calls
        for delta in deltas
    )
