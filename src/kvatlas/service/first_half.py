"""The prefill half of a pair, asked over HTTP: its answer is read whole and never shown, but for an
error that is the client's own."""

from __future__ import annotations

import asyncio

import msgspec

from kvatlas.service.http import Headers
from kvatlas.service.http_client import (
    Collector,
    ConnectError,
    HttpClient,
    HttpError,
    SilenceError,
    origin_of,
)
from kvatlas.service.pair_protocols import Prefilled, prefilled, undelivered

_MISSING = {
    "no_state": "its answer does not say where the state lies",
    "short": "it holds less than the prompt",
}
_ANSWER_BYTES_MAX = 8 << 20  # one token, and where the state lies


class FirstEnd(msgspec.Struct, frozen=True):
    """How it ended: ``reason`` "" when it is done. ``shown``: a client's own fault, as it came."""

    reason: str = ""
    status: int = 200
    error: str = ""
    done: Prefilled = Prefilled()
    shown: Collector | None = None


async def first_half(
    client: HttpClient,
    url: str,
    target: str,
    headers: Headers,
    body: bytes,
    *,
    timeout_s: float,
    hands_on: bool,
) -> FirstEnd:
    """Asks, and reads the answer. ``hands_on``: the answer must say where the state lies."""
    answer = Collector(_ANSWER_BYTES_MAX)
    try:
        async with asyncio.timeout(timeout_s):
            await client.exchange("POST", origin_of(url), target, headers, body=body, sink=answer)
    except TimeoutError:
        return FirstEnd("timeout", 504, f"no answer within {timeout_s:g} s")
    except ConnectError as error:
        return FirstEnd("connect", 502, str(error))
    except SilenceError as error:
        return FirstEnd("timeout", 504, str(error))
    except HttpError as error:
        return FirstEnd("failed", 502, str(error))
    status = answer.status
    if status == 503:
        return FirstEnd("refused", status, "it answered 503")
    if 400 <= status < 500:
        return FirstEnd("client", status, shown=answer)
    if status != 200:
        return FirstEnd("failed", status, f"it answered {status}")
    done = prefilled(b"".join(answer.parts))
    if done.broken:
        return FirstEnd("failed", 502, "it gave the request up")
    missing = undelivered(done) if hands_on else ""
    if missing:
        return FirstEnd(missing, 502, _MISSING[missing])
    return FirstEnd(done=done)
