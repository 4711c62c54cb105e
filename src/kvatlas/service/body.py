"""Request bodies in, usage figures out. Bytes are never re-made where they can be left alone.

A body reaches the engine exactly as the client sent it. `splice` is the one exception, for the few
top-level fields that the gateway itself sets: it inserts bytes, and where the client gave the field
already it recomposes the top level alone, every other value byte for byte as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvatlas.errors import RequestError

_decode = msgspec.json.Decoder().decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def parse(raw: bytes) -> dict[str, object]:
    """The JSON object in ``raw``. Raises RequestError (400) that tells what is wrong and where."""
    if not raw.strip():
        raise RequestError("the request body is empty: a JSON object is expected", code="bad_json")
    try:
        body = _decode(raw)
    except msgspec.DecodeError as error:
        raise RequestError(f"the request body is no JSON: {error}", code="bad_json") from error
    except UnicodeDecodeError as error:
        text = f"the request body is not UTF-8: {error.reason} (byte {error.start})"
        raise RequestError(text, code="bad_json") from error
    except RecursionError as error:
        text = "the request body is nested too deeply"
        raise RequestError(text, code="bad_json") from error
    if not isinstance(body, dict):
        kind = type(body).__name__
        raise RequestError(f"the request body is a JSON {kind}, not an object", code="bad_json")
    return body


def splice(raw: bytes, body: Mapping[str, object], fields: Mapping[str, object]) -> bytes:
    """``raw`` with the top-level ``fields`` set. ``body`` is what `parse` made of ``raw``."""
    if any(name in body for name in fields):
        return edited(raw, fields)
    if not body:
        return msgspec.json.encode(fields)
    start = raw.index(b"{") + 1
    return b"".join((raw[:start], msgspec.json.encode(fields)[1:-1], b",", raw[start:]))


def edited(raw: bytes, fields: Mapping[str, object], left_out: Iterable[str] = ()) -> bytes:
    """``raw`` with its top level recomposed: ``fields`` set, others left out, each value that
    stays byte for byte as it was."""
    parts: dict[str, object] = dict(_decode_raw(raw))
    for name in left_out:
        parts.pop(name, None)
    parts.update(fields)
    return msgspec.json.encode(parts)


def with_usage(options: object, raw: bytes) -> object:
    """The stream_options of ``raw`` with include_usage set; its other members as they were."""
    if isinstance(options, dict) and options:
        outer = _decode_raw(raw)["stream_options"]
        return {**_decode_raw(outer), "include_usage": True}
    return {"include_usage": True}


#: A member of vLLM's ``vllm_xargs`` that makes the engine announce a hit as if it stored it.
REPORT_MODE = "kv_cache_report_mode"
#: Fields of vLLM that it takes from ``vllm_xargs``, too, where only text, numbers and lists pass:
#: its connectors read them as objects, in the process of all requests, which ends with it.
_HAND_OVERS = ("kv_transfer_params", "ec_transfer_params")


def asks_for_report(body: Mapping[str, object]) -> bool:
    """Whether a request wants its hit announced (vLLM 0.32, `KVCacheManager`)."""
    return _has_extra(body, (REPORT_MODE,))


def has_extras(body: Mapping[str, object]) -> bool:
    """Whether there are members of ``vllm_xargs`` that are not a client's to say."""
    return _has_extra(body, (REPORT_MODE, *_HAND_OVERS))


def without_extras(raw: bytes) -> object:
    """The ``vllm_xargs`` of ``raw`` without those; its other members as they were.

    A directory cannot tell a report of one block from a second block that was stored, and would
    promise it for longer than it is there.
    """
    extra = _decode_raw(_decode_raw(raw)["vllm_xargs"])
    return {n: value for n, value in extra.items() if n != REPORT_MODE and n not in _HAND_OVERS}


def _has_extra(body: Mapping[str, object], names: Iterable[str]) -> bool:
    extra = body.get("vllm_xargs")
    return isinstance(extra, dict) and any(name in extra for name in names)


#: By these the halves of a pair find each other's state: the gateway's alone to say.
PAIRING_FIELDS = (
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "disagg_prefill_dp_rank",
)


def pairs_itself(body: Mapping[str, object]) -> bool:
    """Whether a client sets what is the gateway's to say: such fields name hosts and blocks."""
    return any(name in body for name in PAIRING_FIELDS) or _has_extra(body, _HAND_OVERS)


#: No prompt or answer has this many tokens: a figure above it would drown all that are true.
COUNT_MAX = 1 << 31


class Usage(msgspec.Struct, frozen=True):
    """What an engine reported; -1 where it did not. ``violation`` says why it cannot be true."""

    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1
    violation: str = ""

    @property
    def believed(self) -> Usage:
        """Nothing of what cannot be true."""
        return Usage() if self.violation else self


class Answer(msgspec.Struct):
    """The two members of an engine's answer, or of one event of it, that the gateway reads."""

    usage: Any = None
    choices: Any = None

    def is_usage_only(self) -> bool:
        """The extra event of ``include_usage``: usage and an empty list of choices."""
        return self.usage is not None and self.choices == []


_decode_answer = msgspec.json.Decoder(Answer).decode


def parse_answer(raw: bytes) -> Answer | None:
    """None where ``raw`` is no JSON object."""
    try:
        return _decode_answer(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def usage_of(answer: Answer) -> Usage | None:
    """Checks 0 <= cached <= prompt. None where the answer reports no usage."""
    if answer.usage is None:
        return None
    if not isinstance(answer.usage, dict):
        return Usage(violation="usage is no object")
    usage = answer.usage
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    counts = []
    for name, value in (
        ("prompt_tokens", usage.get("prompt_tokens")),
        ("completion_tokens", usage.get("completion_tokens")),
        ("cached_tokens", cached),
    ):
        count = -1 if value is None else value
        if (
            not isinstance(count, int)
            or isinstance(count, bool)
            or (count < 0 and value is not None)
            or count > COUNT_MAX
        ):
            return Usage(violation=f"{name} is {value!r}"[:200])
        counts.append(count)
    prompt_tokens, completion_tokens, cached_tokens = counts
    violation = ""
    if cached_tokens > max(prompt_tokens, 0):
        violation = f"cached_tokens {cached_tokens} > prompt_tokens {prompt_tokens}"
    return Usage(prompt_tokens, completion_tokens, cached_tokens, violation)
