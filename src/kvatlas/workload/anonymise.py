"""A trace that can be shown: keyed hashes for names, times shifted and rounded.

What stays is what caches live from: lengths, order of arrival, and which prompts share how many
blocks. Lengths can still tell a known prompt; where that matters, do not publish the trace.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Iterator
from functools import lru_cache

from kvatlas.errors import ConfigError
from kvatlas.workload.trace import TraceRequest

_IDS_KEPT = 1 << 20


def new_secret() -> bytes:
    """A key that nobody knows: without it the way back is closed to everybody."""
    return secrets.token_bytes(32)


def anonymised(
    requests: Iterable[TraceRequest], secret: bytes, time_step_s: float = 1.0
) -> Iterator[TraceRequest]:
    """The same requests, told apart from everything known. Times start at 0, in whole steps.

    Ids, sessions and scopes become BLAKE2b hashes under ``secret``, ids of 63 bits; an id is hashed
    with its scope, so equal ids of two tenants are no longer equal. Think times are rounded too.
    Raises ConfigError where ``time_step_s`` is negative or no number.
    """
    if not 0 <= time_step_s <= 1e6:
        raise ConfigError(f"times in steps of {time_step_s:g} s: 0 to a million is possible")
    key = hashlib.sha256(secret).digest()

    def hashed(kind: bytes, text: str) -> bytes:
        return hashlib.blake2b(kind + text.encode(), key=key, digest_size=8).digest()

    @lru_cache(maxsize=_IDS_KEPT)
    def block(id: int, scope: str) -> int:
        return int.from_bytes(hashed(b"block", f"{id}\0{scope}"), "big") >> 1

    def name(kind: bytes, text: str) -> str:
        return hashed(kind, text).hex() if text else ""

    def stepped(seconds: float) -> float:
        return math.floor(seconds / time_step_s) * time_step_s if time_step_s else seconds

    start_s: float | None = None
    for request in requests:
        start_s = request.arrival_s if start_s is None else start_s
        yield TraceRequest(
            request.index,
            stepped(request.arrival_s - start_s),
            request.input_tokens,
            request.output_tokens,
            tuple([block(id, request.scope) for id in request.hash_ids]),
            name(b"session", request.session),
            None if request.think_s is None else stepped(request.think_s),
            name(b"scope", request.scope),
        )
