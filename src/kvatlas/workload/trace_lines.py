"""Trace files line by line, within limits, and what a format's reader makes of one line.

Plain, ``.xz`` and ``.gz`` files are read as streams. Every fault becomes a TraceError that begins
with ``file:line:``.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from kvatlas.errors import TraceError

LINE_BYTES_MAX = 64 << 20
BLOCK_TOKENS_MAX = 1 << 20


# (API path, request body) → token ids of each of its prompts, uint32 little endian.
# Raises ValueError with the reason where they cannot be known.
Tokenize = Callable[[str, Mapping[str, Any]], tuple[bytes, ...]]


class Options(msgspec.Struct, frozen=True):
    """What a reader may be told. ``block_tokens`` None: as the file shows, or the format's usual.

    ``session_gap_s`` and ``seed``: mean time between the starts of sessions whose file knows none.
    ``tokenize``: for files that hold text. ``secret`` keys the hash of tokens that become ids.
    """

    block_tokens: int | None = None
    session_gap_s: float = 60.0
    seed: int = 0
    tokenize: Tokenize | None = None
    secret: bytes = b""


class Row(msgspec.Struct, frozen=True):
    """One request as its line tells it, not yet checked."""

    line: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int]
    session: str = ""
    think_s: float | None = None
    scope: str = ""


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number from 1, line) of a file, without the blank lines.

    Raises TraceError where the file cannot be read, its compression is damaged or cut off, or a
    line is longer than ``LINE_BYTES_MAX``.
    """
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if number == 1:  # editors on Windows begin a file with a mark
                    line = line.removeprefix(BOM_UTF8)
                if len(line) > LINE_BYTES_MAX:
                    raise fault(path, number, f"the line is longer than {LINE_BYTES_MAX} bytes")
                if line and not line.isspace():
                    yield number, line
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        reason = f"cannot be read on: the compressed file is damaged or cut off: {error}"
        raise fault(path, number + 1, reason) from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error


def fault(path: Path, line: int, reason: str) -> TraceError:
    """The error that says where and why."""
    return TraceError(f"{path}:{line}: {reason}")


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    return path.open("rb")
