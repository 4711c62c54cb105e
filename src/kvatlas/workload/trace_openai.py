"""Request logs of an OpenAI-style API, JSON lines: text → tokens → ids of blocks.

A line is a request body, alone or under ``body`` or ``request``, with its time beside it:
``timestamp``, ``time``, ``ts``, ``created`` or ``created_at`` as ISO 8601 or a number (seconds,
ms, µs or ns, told apart by its size). Chats have ``messages``, completions ``prompt`` (text or
token ids), plain logs ``input`` (text). ``session_id`` or ``conversation_id``, and ``tenant`` or
``scope``, are taken where they stand, as hashes. Nothing of the content is kept.

What is approximate: ids are right as far as the tokenizer and template are those of the model that
will serve; output tokens are those of ``usage``, else of the logged ``output`` text, else the limit
that the request asked for (``max_completion_tokens``, ``max_tokens``), else 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.workload.trace_lines import Options, Row, Tokenize, fault, lines
from kvatlas.workload.trace_tokens import Hashed

NAME = "openai"
USUAL_BLOCK_TOKENS = 16
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_TIMES = ("timestamp", "time", "ts", "created", "created_at")


def recognises(line: bytes) -> bool:
    """By the names of what holds a prompt."""
    return line.lstrip().startswith(b"{") and any(
        name in line for name in (b'"messages"', b'"prompt"', b'"input"')
    )


def block_tokens_of(path: Path, options: Options) -> int:
    """Whatever is asked for: the ids of blocks are made here."""
    return options.block_tokens or USUAL_BLOCK_TOKENS


def read(path: Path, block_tokens: int, options: Options) -> Iterator[Row]:
    """Rows with hashed ids, one per prompt. Raises TraceError for what cannot be read or keyed,
    ConfigError without a tokenizer."""
    if options.tokenize is None:
        raise ConfigError(f"{path}: a log of requests needs the model's tokenizer (--tokenizer)")
    hashed = Hashed(block_tokens, options.secret)
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    start_s: float | None = None
    for number, line in lines(path):
        try:
            entry = decode(line)
            at_s = _time_s(entry)
            api_path, body = _request(entry)
            prompts = options.tokenize(api_path, body)
            output_tokens = _output_tokens(entry, body, options.tokenize)
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            raise fault(path, number, str(error)) from error
        start_s = at_s if start_s is None else start_s
        scope = hashed.name(_text(entry, "tenant") or _text(entry, "scope"))
        session = hashed.name(_text(entry, "session_id") or _text(entry, "conversation_id"))
        for tokens in prompts:
            yield Row(
                number,
                round(at_s - start_s, 6),
                len(tokens) // 4,
                output_tokens,
                hashed.ids(tokens, scope),
                session,
                None,
                scope,
            )


def _text(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    return str(value) if isinstance(value, str | int) else ""


def _time_s(entry: Mapping[str, Any]) -> float:
    """Seconds since 1970, or since wherever a small number counts from."""
    value = next((entry[name] for name in _TIMES if entry.get(name) is not None), None)
    if isinstance(value, str):
        when = datetime.fromisoformat(value)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"no time: one of {', '.join(_TIMES)} is needed beside the body")
    for above, factor in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
        if abs(value) >= above:
            return value / factor
    return float(value)


def _request(entry: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    body = next((entry[n] for n in ("body", "request") if isinstance(entry.get(n), dict)), entry)
    if "messages" in body:
        return CHAT, body
    if "prompt" in body:
        return COMPLETION, body
    if isinstance(body.get("input"), str):
        return COMPLETION, {"prompt": body["input"]}
    raise ValueError("no messages, no prompt and no input text in it")


def _output_tokens(entry: Mapping[str, Any], body: Mapping[str, Any], tokenize: Tokenize) -> int:
    answer = entry.get("response")
    usage = (answer if isinstance(answer, dict) else entry).get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
        return int(usage["completion_tokens"])
    if isinstance(entry.get("output"), str):
        text = {"prompt": entry["output"], "add_special_tokens": False}
        return len(tokenize(COMPLETION, text)[0]) // 4
    for name in ("max_completion_tokens", "max_tokens"):
        if isinstance(body.get(name), int):
            return int(body[name])
    return 1
