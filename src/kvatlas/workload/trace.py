"""Request traces in Mooncake's form, read as a stream, and the token ids that they stand for.

One JSON object a line: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and
``hash_ids``, one id per block of the prompt (512 tokens in Mooncake's traces, 64 in others). Equal
leading ids mean an equal prefix. Source: the Mooncake paper (FAST'25) and its trace files.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from kvatlas.errors import TraceError

BLOCK_TOKENS = 512
VOCAB_SIZE = 65_536  # below every current model's vocabulary but the smallest
_MAX_LINE_BYTES = 16 << 20


class TraceRequest(msgspec.Struct, frozen=True):
    """One request: when it arrives (seconds from the start of the trace) and what it asks."""

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read(
    path: Path, *, block_tokens: int = BLOCK_TOKENS, limit: int | None = None
) -> Iterator[TraceRequest]:
    """Yields the first ``limit`` requests of a ``.jsonl`` or ``.jsonl.xz`` file, one at a time.

    Raises TraceError with the line at fault: not JSON, a field missing or negative, arrivals that
    go back in time, or a number of ``hash_ids`` that ``input_length`` does not explain.
    """
    decoder = msgspec.json.Decoder(_Line)
    last_ms = 0.0
    index = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(_lines(file, path), start=1):
                if not line.strip():
                    continue
                if limit is not None and index >= limit:
                    return
                try:
                    raw = decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise TraceError(f"{path}:{number}: {error}") from error
                _check(raw, f"{path}:{number}", last_ms, block_tokens)
                last_ms = raw.timestamp
                yield TraceRequest(
                    index,
                    raw.timestamp / 1000,
                    raw.input_length,
                    raw.output_length,
                    raw.hash_ids,
                )
                index += 1
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return path.open("rb")


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Lines of bounded length, so that a file without any cannot fill the memory."""
    number = 0
    while line := file.readline(_MAX_LINE_BYTES):
        number += 1
        if len(line) == _MAX_LINE_BYTES:
            raise TraceError(f"{path}:{number}: the line is longer than {_MAX_LINE_BYTES} bytes")
        yield line


def _check(line: _Line, where: str, last_ms: float, block_tokens: int) -> None:
    if line.timestamp < 0:
        raise TraceError(f"{where}: timestamp {line.timestamp:g} is negative")
    if line.timestamp < last_ms:
        raise TraceError(
            f"{where}: timestamp {line.timestamp:g} comes after {last_ms:g}: sort the trace first"
        )
    if line.input_length < 1:
        raise TraceError(f"{where}: input_length {line.input_length}: at least one token is needed")
    if line.output_length < 0:
        raise TraceError(f"{where}: output_length {line.output_length} is negative")
    if any(hash_id < 0 for hash_id in line.hash_ids):
        raise TraceError(f"{where}: hash_ids must not be negative")
    blocks = -(-line.input_length // block_tokens)
    if len(line.hash_ids) != blocks:
        raise TraceError(
            f"{where}: {len(line.hash_ids)} hash_ids, but input_length {line.input_length} makes "
            f"{blocks} blocks of {block_tokens} tokens: is the block size right?"
        )


def tokens_of(
    request: TraceRequest, *, block_tokens: int = BLOCK_TOKENS, vocab_size: int = VOCAB_SIZE
) -> bytes:
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
