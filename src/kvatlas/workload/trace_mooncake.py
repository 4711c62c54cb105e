"""Mooncake's JSON lines: the form that we also write.

``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``, one per block of
the prompt, the last of which may be cut short (512 tokens in Mooncake's own traces, 64 or 16 in
others). Equal leading ids mean an equal prefix. Source: the Mooncake paper (FAST'25) and its trace
files. Optional beside them: ``session_id`` and ``delay`` (ms after the session's answer before it,
as AIPerf reads them), and ``scope``, which is ours: ids of different scopes are never the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvatlas.workload.trace_lines import BLOCK_TOKENS_MAX, Options, Row, fault, lines

NAME = "mooncake"
GUESS_LINES_MAX = 10_000
USUAL_BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session_id: str | int = ""
    delay: float | None = None
    scope: str = ""


def recognises(line: bytes) -> bool:
    """By the names of its fields."""
    return b'"hash_ids"' in line and b'"input_length"' in line


def read(path: Path, block_tokens: int, options: Options) -> Iterator[Row]:
    """Yields the rows of a file. Raises TraceError for a line that is not of this form."""
    decode = msgspec.json.Decoder(_Line).decode
    for number, line in lines(path):
        try:
            raw = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise fault(path, number, str(error)) from error
        yield Row(
            number,
            raw.timestamp / 1000,
            raw.input_length,
            raw.output_length,
            raw.hash_ids,
            str(raw.session_id),
            None if raw.delay is None else raw.delay / 1000,
            raw.scope,
        )


def block_tokens_of(path: Path, options: Options) -> int:
    """As asked for, or the power of two that the first prompt of two blocks or more allows.

    There is just one: n blocks have more than (n-1) and at most n blocks' tokens. Where no prompt
    among the first ``GUESS_LINES_MAX`` has two blocks, Mooncake's own 512. Raises TraceError as
    `read` does.
    """
    if options.block_tokens is not None:
        return options.block_tokens
    for row in itertools.islice(read(path, 0, options), GUESS_LINES_MAX):
        blocks = len(row.hash_ids)
        if blocks >= 2 and row.input_tokens >= blocks:
            size = 1 << (-(-row.input_tokens // blocks) - 1).bit_length()
            if size <= BLOCK_TOKENS_MAX:  # else its line is at fault, which reading it will say
                return size
    return USUAL_BLOCK_TOKENS
