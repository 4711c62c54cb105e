"""Writes requests as Mooncake's JSON lines, to a new file that appears whole or not at all."""

from __future__ import annotations

import gzip
import lzma
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.workload.trace import TraceRequest


def write(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Writes a trace and returns the number of its requests. ``.xz`` and ``.gz`` are compressed.

    An existing file is never overwritten: ConfigError, as for a place that cannot be written to.
    Where ``requests`` raises, nothing is left behind.
    """
    if path.exists():
        raise ConfigError(f"{path}: exists already and is not overwritten")
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    os.close(handle)
    draft = Path(name)
    try:
        with _open(draft, path.suffix) as file:
            count = 0
            for request in requests:
                file.write(encode(request))
                count += 1
        os.link(draft, path)  # unlike a rename it fails where somebody else was faster
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink()
    return count


def encode(request: TraceRequest) -> bytes:
    """One line. Times are kept to the microsecond; what is not known is left out."""
    line: dict[str, object] = {
        "timestamp": _ms(request.arrival_s),
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": request.hash_ids,
    }
    if request.session:
        line["session_id"] = request.session
    if request.think_s is not None:
        line["delay"] = _ms(request.think_s)
    if request.scope:
        line["scope"] = request.scope
    return msgspec.json.encode(line) + b"\n"


def _ms(seconds: float) -> int | float:
    ms = round(seconds * 1000, 3)
    return int(ms) if ms.is_integer() else ms


def _open(path: Path, suffix: str) -> BinaryIO:
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path, "wb", preset=1))
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "wb"))
    return path.open("wb")
