"""A recording of observed traffic, without its content: one JSON line per answered request.

A line is one of Mooncake's trace format (lengths, times, keyed hashes of blocks), so that all that
reads traces reads it; what was measured stands beside it under ``observed``. Lines are in order of
the ends of answers, not of arrival (readers of traces: ``--sort``). Neither text nor token ids are
kept; without the key of the hashes nobody can tell whether a prompt was there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from kvatlas.errors import ConfigError, TraceError
from kvatlas.workload.trace_lines import lines

FORMAT = 1
MAX_BYTES = 4 << 30

Mode = Literal["front", "mirror", "log"]


class About(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the whole recording, in its first line. ``started``: when, as ISO 8601. ``ttft``: what
    the time to the first token was measured as, "" where it was not."""

    format: int
    version: str
    mode: Mode
    started: str
    block_tokens: int
    ttft: str = ""
    engines: tuple[str, ...] = ()


class Decided(msgspec.Struct, frozen=True, omit_defaults=True):
    """What kvatlas would have chosen in the state that the engines really had, as their events
    tell it. Times are predictions; ``there``: of the engine that did serve it, ``elsewhere``: the
    deepest of all others; -1 where it is not known who served it, or it had no plan."""

    engine: str
    resume_tokens: int
    ttft_s: float
    elsewhere_tokens: int = -1
    there_resume_tokens: int = -1
    there_ttft_s: float = -1.0


class Observed(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was measured of one request. Figures are -1 where nothing told them.

    ``output``: who told the output tokens: the engine, the number of streamed events, or the
    request's own limit. ``engine``, and ``told``: who served it, and what said so. ``unkeyed``:
    why its ids say nothing of what it shares. ``lost``: requests so far that are in no line, by
    reason.
    """

    ttft_s: float = -1.0
    e2e_s: float = -1.0
    cached_tokens: int = -1
    output: Literal["usage", "events", "limit", "none"] = "none"
    engine: str = ""
    told: Literal["", "answer", "log", "events"] = ""
    unkeyed: str = ""
    whole: bool = True
    decided: Decided | None = None
    lost: dict[str, int] = {}
    about: About | None = None


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line. ``timestamp`` in ms since the recording began."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    observed: Observed
    scope: str = ""


class Recording:
    """Writes until ``max_bytes``; ``error`` then says so, or why else it stopped."""

    def __init__(self, path: Path, about: About, max_bytes: int = MAX_BYTES) -> None:
        """Raises ConfigError where ``path`` cannot be made, or is there already."""
        self.rows = 0
        self.error = ""
        self._about: About | None = about
        self._left = max_bytes
        self._path = path
        self._file: BinaryIO | None = None
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {path}: cannot be made: {error.strerror}") from error
        self._file = os.fdopen(fd, "wb", buffering=0)

    def write(self, row: Row, lost: Mapping[str, int]) -> None:
        """One more line, with what was ``lost`` until now."""
        if self._file is None:
            return
        observed = msgspec.structs.replace(row.observed, lost=dict(lost), about=self._about)
        line = msgspec.json.encode(msgspec.structs.replace(row, observed=observed)) + b"\n"
        if len(line) > self._left:
            self._stop("it is as long as it may be (--max-bytes)")
            return
        try:
            self._file.write(line)
        except OSError as error:
            self._stop(str(error.strerror or error))
            return
        self._about = None
        self._left -= len(line)
        self.rows += 1

    def _stop(self, reason: str) -> None:
        self.error = f"nothing is recorded any more: {reason}"
        self.close()

    def close(self) -> None:
        """The file is whole; one without a line goes away."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
            if not self.rows:
                self._path.unlink(missing_ok=True)


class Recorded(msgspec.Struct, frozen=True):
    """A whole recording, its rows in order of arrival."""

    about: About
    rows: tuple[Row, ...]
    lost: dict[str, int]


def read(path: Path) -> Recorded:
    """A recording as written above; a last line that was cut short is left out.

    Raises TraceError with file and line where it is none, or is damaged.
    """
    decode = msgspec.json.Decoder(Row).decode
    rows: list[Row] = []
    about: About | None = None
    lost: dict[str, int] = {}
    for number, line in lines(path):
        try:
            row = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if rows and not line.endswith(b"\n"):
                break
            text = f"{path}:{number}: not of a recording of `kvatlas observe`: {error}"
            raise TraceError(text) from error
        about = about or row.observed.about
        if about is None:
            raise TraceError(f"{path}:{number}: the first line does not tell of the recording")
        if about.format != FORMAT:
            raise TraceError(
                f"{path}: recorded in format {about.format} by kvatlas {about.version}; "
                f"this one reads format {FORMAT}"
            )
        blocks = -(-row.input_length // about.block_tokens)
        if row.input_length < 1 or len(row.hash_ids) != blocks:
            raise TraceError(
                f"{path}:{number}: {len(row.hash_ids)} hashes for {row.input_length} tokens"
            )
        for reason, count in row.observed.lost.items():
            lost[reason] = max(lost.get(reason, 0), count)
        rows.append(row)
    if about is None:
        raise TraceError(f"{path}: no requests in it")
    rows.sort(key=lambda row: row.timestamp)
    return Recorded(about, tuple(rows), lost)
