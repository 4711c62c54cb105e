"""Request traces: one form for all of them, read as a stream, and the tokens they stand for.

`open_trace` recognises the format of a file; one module per format reads it (`trace_mooncake.py`
and its siblings), and what all must obey is checked here. Generated workloads (`families.py`)
have the same form. Memory does not grow with the length of a trace.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import msgspec

from kvatlas.errors import ConfigError, TraceError
from kvatlas.workload import (
    trace_azure,
    trace_mooncake,
    trace_openai,
    trace_sessions,
    trace_tokens,
)
from kvatlas.workload.trace_lines import BLOCK_TOKENS_MAX, Options, Row, Tokenize, fault, lines

VOCAB_SIZE = 65_536  # below every current model's vocabulary but the smallest
TOKENS_MAX = 1 << 26  # of one prompt or answer: far above any model's window
ARRIVAL_MAX_S = 1e9  # thirty years
SORT_BYTES_MAX = 1 << 30
_ID_END = 1 << 63


class _Format(Protocol):
    """What the module of a format offers."""

    NAME: str

    def recognises(self, line: bytes) -> bool: ...

    def block_tokens_of(self, path: Path, options: Options) -> int: ...

    def read(self, path: Path, block_tokens: int, options: Options) -> Iterator[Row]: ...


_READERS: tuple[_Format, ...] = (
    trace_mooncake,
    trace_sessions,
    trace_azure,
    trace_tokens,
    trace_openai,
)
FORMATS = {reader.NAME: reader for reader in _READERS}


class TraceRequest(msgspec.Struct, frozen=True):
    """One request: when it arrives (seconds from the start of the trace) and what it asks.

    ``hash_ids`` has one id per block of the prompt; the last block may be cut short, and is one of
    the trace's ids all the same. Equal leading ids of one ``scope`` (tenant; "" where the trace
    knows none) mean an equal prefix. ``session`` names the requests of one conversation, in order.

    ``think_s`` is for closed-loop use: the seconds between the end of the session's answer before
    this request and its arrival. None: the first of its session, or not known; then ``arrival_s``
    alone counts.
    """

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    session: str = ""
    think_s: float | None = None
    scope: str = ""


class Trace:
    """A workload that can be read again and again: each iteration starts anew, in arrival order.

    ``name`` is the file or the preset, ``format`` what it was read as. Iterating raises TraceError
    where a line is at fault.
    """

    def __init__(
        self,
        name: str,
        format: str,
        block_tokens: int,
        read: Callable[[], Iterator[TraceRequest]],
    ) -> None:
        if not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
            raise ConfigError(
                f"{name}: block_tokens {block_tokens}: 1 to {BLOCK_TOKENS_MAX} are possible"
            )
        self.name = name
        self.format = format
        self.block_tokens = block_tokens
        self._read = read

    def __iter__(self) -> Iterator[TraceRequest]:
        return self._read()


def open_trace(
    path: Path,
    *,
    format: str | None = None,
    block_tokens: int | None = None,
    sort: bool = False,
    session_gap_s: float = 60.0,
    seed: int = 0,
    tokenize: Tokenize | None = None,
    secret: bytes = b"",
) -> Trace:
    """The trace in a file. ``format`` and ``block_tokens`` default to what the file itself shows.

    ``sort`` puts requests in order of arrival first, which keeps them in memory: up to
    ``SORT_BYTES_MAX``. The rest is for single formats: `trace_lines.Options`.

    Raises TraceError where the file cannot be read or its format cannot be told, ConfigError for
    an option that does not fit.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"{path}: unknown format {format!r}: use one of {', '.join(FORMATS)}")
    if not 0 < session_gap_s <= ARRIVAL_MAX_S:
        raise ConfigError(f"--session-gap-s {session_gap_s:g}: a positive time is needed")
    if path.is_fifo():
        raise TraceError(f"{path}: a pipe can be read once, a trace is read again: give a file")
    options = Options(block_tokens, session_gap_s, seed, tokenize, secret)
    reader = FORMATS[format] if format else _recognised(path)
    size = reader.block_tokens_of(path, options)

    def read() -> Iterator[TraceRequest]:
        rows = _sound(path, reader.read(path, size, options), size)
        return _ordered(path, _sorted(path, rows) if sort else rows)

    return Trace(str(path), reader.NAME, size, read)


def _recognised(path: Path) -> _Format:
    for number, line in lines(path):
        for reader in FORMATS.values():
            if reader.recognises(line):
                return reader
        known = ", ".join(FORMATS)
        raise fault(path, number, f"the format cannot be told; name it (--format): {known}")
    raise TraceError(f"{path}: no requests in it")


def _sorted(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """Rows in order of arrival, those of one moment as in the file; the first not before 0."""
    kept: list[tuple[float, bytes]] = []
    size_bytes = 0
    for row in rows:
        packed = msgspec.msgpack.encode(row)
        size_bytes += len(packed) + 100  # 100: the entry itself
        if size_bytes > SORT_BYTES_MAX:
            raise fault(path, row.line, f"more than {SORT_BYTES_MAX} bytes to sort: split it")
        kept.append((row.arrival_s, packed))
    kept.sort(key=itemgetter(0))
    shift_s = max(0.0, -kept[0][0]) if kept else 0.0
    for _, packed in kept:
        row = msgspec.msgpack.decode(packed, type=Row)
        yield msgspec.structs.replace(row, arrival_s=row.arrival_s + shift_s) if shift_s else row


def _sound(path: Path, rows: Iterator[Row], block_tokens: int) -> Iterator[Row]:
    """The rows that are possible by themselves; the first that is not ends it."""
    for row in rows:
        reason = _contradiction(row, block_tokens)
        if reason:
            raise fault(path, row.line, reason)
        yield row


def _ordered(path: Path, rows: Iterator[Row]) -> Iterator[TraceRequest]:
    last_s = 0.0
    for index, row in enumerate(rows):
        if not last_s <= row.arrival_s <= ARRIVAL_MAX_S:
            raise fault(path, row.line, _disorder(row.arrival_s, last_s))
        last_s = row.arrival_s
        yield TraceRequest(
            index,
            row.arrival_s,
            row.input_tokens,
            row.output_tokens,
            tuple(row.hash_ids),
            row.session,
            row.think_s,
            row.scope,
        )


def _disorder(arrival_s: float, last_s: float) -> str:
    """Why a request cannot arrive then."""
    if arrival_s > ARRIVAL_MAX_S:
        return f"timestamp {arrival_s * 1000:g} ms is none"
    if arrival_s < 0:
        return (
            f"timestamp {arrival_s * 1000:g} is negative, or before the first one: "
            "sort the trace first (--sort)"
        )
    return (
        f"timestamp {arrival_s * 1000:g} comes after {last_s * 1000:g}: "
        "sort the trace first (--sort)"
    )


def _contradiction(row: Row, block_tokens: int) -> str:
    """What is wrong with a row by itself; "" where nothing is."""
    if not math.isfinite(row.arrival_s):
        return f"timestamp {row.arrival_s * 1000:g} ms is none"
    if row.input_tokens < 1:
        return f"input_length {row.input_tokens}: at least one token is needed"
    if row.output_tokens < 0:
        return f"output_length {row.output_tokens} is negative"
    if max(row.input_tokens, row.output_tokens) > TOKENS_MAX:
        return f"lengths above {TOKENS_MAX} tokens are believed of no request"
    if row.think_s is not None and not 0 <= row.think_s <= ARRIVAL_MAX_S:
        return f"delay {row.think_s * 1000:g} ms is none"
    blocks = -(-row.input_tokens // block_tokens)
    if len(row.hash_ids) != blocks:
        return (
            f"{len(row.hash_ids)} hash_ids, but input_length {row.input_tokens} makes "
            f"{blocks} blocks of {block_tokens} tokens: is the block size right?"
        )
    if len(set(row.hash_ids)) < blocks:
        twice = next(i for i, count in Counter(row.hash_ids).items() if count > 1)
        return f"hash id {twice} twice in one prompt: an id names all that leads up to its block"
    if min(row.hash_ids) < 0:
        return "hash_ids must not be negative"
    if max(row.hash_ids) >= _ID_END:
        return "hash_ids must be below 2**63"
    return ""


def tokens_of(request: TraceRequest, *, block_tokens: int, vocab_size: int = VOCAB_SIZE) -> bytes:
    """The prompt's token ids (uint32, little endian), the same in every process.

    Each hash id stands for one fixed block of ids below ``vocab_size``; the last is cut short.
    """
    bits = min(vocab_size, 1 << 24).bit_length() - 1
    if bits < 1:
        raise ValueError("vocab_size: at least 2 ids are needed")
    whole = b"".join([_block(hash_id, block_tokens, bits) for hash_id in request.hash_ids])
    return whole[: request.input_tokens * 4]


@lru_cache(maxsize=8192)
def _block(hash_id: int, block_tokens: int, bits: int) -> bytes:
    """Pseudo-random ids of ``bits`` bits, written plane by plane so that no loop sees a token."""
    planes = -(-bits // 8)
    noise = hashlib.shake_128(b"kvatlas.trace.1\0%d" % hash_id).digest(block_tokens * planes)
    out = bytearray(block_tokens * 4)
    for plane in range(planes):
        digits = noise[plane * block_tokens : (plane + 1) * block_tokens]
        width = min(8, bits - plane * 8)
        out[plane::4] = digits if width == 8 else digits.translate(_masks()[width])
    return bytes(out)


@lru_cache(maxsize=1)
def _masks() -> tuple[bytes, ...]:
    """Entry w maps a byte to its lowest w bits."""
    return tuple(bytes(byte & ((1 << width) - 1) for byte in range(256)) for width in range(9))
