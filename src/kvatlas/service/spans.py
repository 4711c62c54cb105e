"""Spans of requests as the gateway keeps them and as its exporter process reads them."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Mapping, Sequence

import msgspec

INTERNAL, SERVER, CLIENT = 0, 1, 2  # as OpenTelemetry numbers kinds of spans

#: Of a frame to the exporter process: its length, little endian.
HEAD = struct.Struct("<I")
FRAME_BYTES_MAX = 16 << 20

_SAMPLED = 1
_RATIO_BITS = 56  # of a trace id: those that W3C asks to be random
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

Value = str | bool | int | float | list[str]


class Span(msgspec.Struct, array_like=True, gc=False):
    """``parent`` 0: none. Times are of `time.perf_counter`. ``error`` "": it went well."""

    trace: str  # 32 hex digits
    id: int
    parent: int
    name: str
    kind: int
    began_s: float
    ended_s: float
    attributes: dict[str, Value]
    error: str = ""


class Batch(msgspec.Struct, array_like=True):
    """``offset_s``: from `time.perf_counter` to seconds since 1970."""

    offset_s: float
    spans: Sequence[Span]


class Exporting(msgspec.Struct, frozen=True):
    """What an exporter process is started with."""

    url: str
    service_name: str
    version: str
    timeout_s: float


class Report(msgspec.Struct, frozen=True):
    """What became of one batch. ``error`` "": the collector took it."""

    spans: int
    error: str = ""


class Context(msgspec.Struct, frozen=True):
    """Where a request stands in a trace (W3C Trace Context). ``parent``: its caller's span, 0 for
    none; ``id``: its own. ``broken``: its caller's header was none, so that it begins anew."""

    trace: str
    id: int
    parent: int
    sampled: bool
    broken: bool = False

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """For whoever goes on with it. A state of a trace that is not gone on with is ended."""
        told = ("traceparent", f"00-{self.trace}-{self.id:016x}-{int(self.sampled):02x}")
        return (told, ("tracestate", "")) if self.broken else (told,)


def context_of(headers: Mapping[str, str], sample_ratio: float) -> Context:
    """As its caller says; where he says nothing, ``sample_ratio`` of all requests are kept."""
    given = headers.get("traceparent")
    found = _TRACEPARENT.fullmatch(given.strip()) if given is not None else None
    if found is not None and _is_one(found):
        sampled = bool(int(found[4], 16) & _SAMPLED)
        return Context(found[2], new_id(), int(found[3], 16), sampled)
    number = random.getrandbits(128) | 1
    sampled = (number & ((1 << _RATIO_BITS) - 1)) < sample_ratio * (1 << _RATIO_BITS)
    return Context(f"{number:032x}", new_id(), 0, sampled, given is not None)


def new_id() -> int:
    """Of a span: never 0."""
    return random.getrandbits(64) or 1


def _is_one(found: re.Match[str]) -> bool:
    """A later version may say more than this one."""
    version, trace, span, _, more = found.groups()
    return (
        version != "ff"
        and (version != "00" or more is None)
        and bool(int(trace, 16) and int(span, 16))
    )
