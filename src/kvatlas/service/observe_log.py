"""A router's own request log, JSON lines, as observed requests. Bad lines are counted and left out.

A line needs the request's body (an object, or its text) and a time. All else is taken where it
stands, under the names of usual logs (`_NAMES`). What NGINX logs as its time is that of the end:
the time that the request took is subtracted. The time at which a response's *headers* came is not
taken for that of its first token: engines send them before they have computed anything.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from kvatlas.errors import TraceError
from kvatlas.service import body as bodies
from kvatlas.service.observe_shadow import Ended, Seen, Shadow
from kvatlas.service.relay import CLIENT_CLOSED
from kvatlas.workload.trace_lines import LINE_BYTES_MAX

_POLL_S = 0.5
_UNTIL_S = 4_102_444_800.0  # 2100: no log tells of later times, or of those before 1970
_SPAN_S = 366 * 86_400.0  # of a log; a time farther from its first is a mistake
_PENDING = 256  # requests handed on before those are waited for

#: What is taken → (name in the log, factor to seconds).
_NAMES: dict[str, tuple[tuple[str, float], ...]] = {
    "began": tuple((n, 1.0) for n in ("timestamp", "ts", "start_time", "created", "created_at")),
    "ended": tuple((n, 1.0) for n in ("msec", "time_iso8601")),
    "ttft": (("ttft_s", 1.0), ("ttft_ms", 1e-3), ("time_to_first_token", 1.0)),
    "e2e": (("e2e_s", 1.0), ("request_time", 1.0), ("e2e_ms", 1e-3), ("duration", 1e-3)),
}
_BODIES = ("body", "request_body", "request")
_ENGINES = ("served_by", "engine", "worker", "upstream_addr", "upstream_host")
_STATUS = ("status", "response_code")
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"


class LogReader:
    """`play` hands a log's requests to a shadow. ``bad``: lines left out, by reason; ``example``:
    the first of them, as place and reason."""

    def __init__(self, path: Path, shadow: Shadow) -> None:
        self.bad: Counter[str] = Counter()
        self.example = ""
        self.timed = 0  # lines that tell their time to first token
        self._path = path
        self._shadow = shadow
        self._first_s: float | None = None

    async def play(self, *, follow: asyncio.Event | None = None) -> None:
        """To the end of the file; with ``follow`` on and on as it grows or is replaced, until that
        is set. Raises TraceError where it cannot be read at all."""
        number = 0
        async for line in _lines(self._path, follow):
            number += 1
            if line.isspace():
                continue
            try:
                seen, ended = self._read(line)
            except ValueError as error:
                self._left_out(number, str(error))
                continue
            case = self._shadow.begin(seen)
            if case is not None:
                self._shadow.end(case, ended)
            if self._shadow.pending >= _PENDING:
                await self._shadow.settle()
        await self._shadow.settle()

    def _left_out(self, number: int, reason: str) -> None:
        self.bad[reason] += 1
        self._shadow.lost[f"line: {reason}"] += 1
        self.example = self.example or f"{self._path}:{number}: {reason}"

    def _read(self, line: bytes) -> tuple[Seen, Ended]:
        """Raises ValueError, with a reason that does not name what the line holds. A line is
        written when its answer is over: how the engines were when it came is not known."""
        if len(line) > LINE_BYTES_MAX:
            raise ValueError("longer than a line may be")
        try:
            entry = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ValueError("no JSON") from None
        if not isinstance(entry, dict):
            raise ValueError("no JSON object")
        raw, path = _request(entry)
        e2e_s, ttft_s = _duration(entry, "e2e"), _duration(entry, "ttft")
        self.timed += ttft_s >= 0
        at_s = _arrival_s(entry, e2e_s)
        if self._first_s is None:
            self._first_s = at_s
        if abs(at_s - self._first_s) > _SPAN_S:
            raise ValueError("a time more than a year from that of the first line")
        answer = entry.get("response") if isinstance(entry.get("response"), dict) else entry
        assert isinstance(answer, dict)
        usage = bodies.usage_of(bodies.Answer(usage=answer.get("usage")))
        engine = next((e for n in _ENGINES if isinstance(e := entry.get(n), str) and e), "")
        ended = Ended(
            status=_status(entry),
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            usage=(usage or bodies.Usage()).believed,
            engine=engine,
            told="log" if engine else "",
        )
        return Seen("POST", path, {}, raw, at_s - self._first_s, live=False), ended


def _request(entry: Mapping[str, Any]) -> tuple[bytes, str]:
    """The request's body, and the endpoint that takes such a one."""
    body: object = next((entry[n] for n in _BODIES if entry.get(n)), entry)
    if isinstance(body, str):
        raw = body.encode("utf-8", "surrogatepass")
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ValueError("its body is no JSON") from None
    if not isinstance(body, dict):
        raise ValueError("no request body")
    if "messages" in body:
        return msgspec.json.encode(body), _CHAT
    if "prompt" in body:
        return msgspec.json.encode(body), _COMPLETION
    raise ValueError("no messages and no prompt")


def _duration(entry: Mapping[str, Any], what: str) -> float:
    """In seconds; -1 where there is none, or none that can be."""
    for name, factor in _NAMES[what]:
        value = _number(entry.get(name))
        if value is not None and 0 <= value * factor < 1e7:
            return value * factor
    return -1.0


def _arrival_s(entry: Mapping[str, Any], e2e_s: float) -> float:
    """Raises ValueError where no time tells it."""
    for name, _ in _NAMES["began"]:
        if entry.get(name) is not None:
            return _moment(entry[name])
    for name, _ in _NAMES["ended"]:
        if entry.get(name) is not None:
            return _moment(entry[name]) - max(0.0, e2e_s)
    raise ValueError("no time")


def _moment(value: object) -> float:
    """Seconds since 1970. Raises ValueError for what is no time, or none that can be."""
    seconds = _seconds(value)
    if not 0 <= seconds < _UNTIL_S:
        raise ValueError("a time before 1970 or after 2099")
    return seconds


def _seconds(value: object) -> float:
    """From ISO 8601 or a number of s, ms, µs or ns, told by its size."""
    number = _number(value)
    if number is None and isinstance(value, str):
        try:
            when = datetime.fromisoformat(value)
            return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise ValueError("a time that is none") from None
    if number is None:
        raise ValueError("a time that is none")
    for above, factor in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
        if abs(number) >= above:
            return number / factor
    return number


def _number(value: object) -> float | None:
    """Logs quote numbers, or not."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _status(entry: Mapping[str, Any]) -> int:
    number = next((n for name in _STATUS if (n := _number(entry.get(name))) is not None), 200.0)
    return int(number) if 0 < number < 1000 else CLIENT_CLOSED


async def _lines(path: Path, follow: asyncio.Event | None) -> AsyncIterator[bytes]:
    """Whole lines; the last one may lack its break where nobody follows."""
    try:
        file: BinaryIO = path.open("rb")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    held = b""
    try:
        while True:
            line = held + file.readline(LINE_BYTES_MAX + 2 - len(held))
            held = b""
            if line.endswith(b"\n") or len(line) > LINE_BYTES_MAX:
                yield line
                continue
            if follow is None:
                if line:
                    yield line
                return
            held = line
            try:
                async with asyncio.timeout(_POLL_S):
                    await follow.wait()
                return
            except TimeoutError:
                file, held = _renewed(path, file, held)
    finally:
        file.close()


def _renewed(path: Path, file: BinaryIO, held: bytes) -> tuple[BinaryIO, bytes]:
    """The file that has this name now, where the old one was moved away or begun anew."""
    try:
        now, was = path.stat(), os.fstat(file.fileno())
        if now.st_ino == was.st_ino and now.st_size >= file.tell():
            return file, held
        fresh = path.open("rb")
    except OSError:  # between two files
        return file, held
    file.close()
    return fresh, b""
