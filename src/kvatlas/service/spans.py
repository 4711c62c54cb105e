"""Where a request stands in a trace, and what is noted of it for its spans.

Noting is all that the gateway's process does: one `Record` per request, which the process that
sends spans makes into them (`service.tracing_spans`).
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from kvatlas.core.ladder import Fallback

#: Of a frame to that process: its length, little endian.
HEAD = struct.Struct("<I")
FRAME_BYTES_MAX = 64 << 20

_SAMPLED = 1
_RANDOM = (1 << 56) - 1  # of a trace id: the bits that W3C asks to be random
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Step(msgspec.Struct, array_like=True, gc=False):
    """What happened on its way: it was sent, its first half was done, its first token came. All
    but the first three are of who it was sent to, as in `Target`, but for ``cached_tokens``."""

    what: Literal["sent", "prefilled", "first_token"]
    at_s: float
    worker: str = ""
    half: str = ""
    tier_tokens: tuple[int, ...] = ()
    wait_s: float = 0.0
    load_s: float = 0.0
    cached_tokens: int = -1


class Record(msgspec.Struct, array_like=True, gc=False):
    """One request. Times are of `time.perf_counter`; what is not known of it is -1 or "".

    ``parent``: its caller's span, 0 for none. ``refused``: why it got no engine. ``best``: the
    first of its plans.
    """

    trace: str  # 32 hex digits
    id: int
    parent: int
    request_id: str
    path: str
    model: str
    streams: bool
    max_tokens: int
    tenant_class: str
    began_s: float
    ended_s: float = 0.0
    looked_up_s: float = 0.0
    routed_s: float = 0.0
    refused: str = ""
    unkeyed: str = ""
    best: str = ""
    prompt_tokens: int = -1
    expected_hit_tokens: int = 0
    steps: list[Step] = []
    fallbacks: list[Fallback] = []
    status: int = 0
    engine: str = ""
    prefilled_by: str = ""
    input_tokens: int = -1
    cached_tokens: int = -1
    output_tokens: int = -1
    ttft_s: float = -1.0


class Batch(msgspec.Struct, array_like=True):
    """``offset_s``: from `time.perf_counter` to seconds since 1970."""

    offset_s: float
    records: Sequence[Record]


class Exporting(msgspec.Struct, frozen=True):
    """What an exporter process is started with."""

    url: str
    service_name: str
    version: str
    timeout_s: float


class Report(msgspec.Struct, frozen=True):
    """What became of one batch. ``error`` "": the collector took it."""

    requests: int
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
    sampled = (number & _RANDOM) < sample_ratio * (_RANDOM + 1)
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
