"""Azure's inference traces (2023): a CSV of time, prompt tokens and output tokens.

It knows no content, so every prompt is new: the traces say how load comes, not what a cache holds.
Source: github.com/Azure/AzurePublicDataset (CC-BY-4.0), Patel et al., Splitwise (ISCA 2024).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from kvatlas.workload.trace_lines import Options, Row, fault, lines

NAME = "azure"
USUAL_BLOCK_TOKENS = 512
_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def recognises(line: bytes) -> bool:
    """By the header."""
    return line.lstrip(b"\xef\xbb\xbf").startswith(b"TIMESTAMP,")


def block_tokens_of(path: Path, options: Options) -> int:
    """Whatever is asked for: the ids are made here."""
    return options.block_tokens or USUAL_BLOCK_TOKENS


def read(path: Path, block_tokens: int, options: Options) -> Iterator[Row]:
    """Rows with ids that occur once. Raises TraceError for lines that are not three such values."""
    start: datetime | None = None
    fresh = 0
    for number, line in lines(path):
        cells = _cells(path, number, line)
        if number == 1:
            if cells != _HEADER:
                raise fault(path, number, f"the header must be {','.join(_HEADER)}")
            continue
        try:
            when = datetime.fromisoformat(cells[0])
            prompt, output = int(cells[1]), int(cells[2])
            start = start or when
            arrival_s = (when - start).total_seconds()
        except (ValueError, TypeError, IndexError) as error:
            raise fault(path, number, f"not a time and two numbers of tokens: {error}") from error
        blocks = min(
            max(-(-prompt // block_tokens), 0), 1 << 26
        )  # absurd lengths are refused later
        ids = range(fresh, fresh + blocks)
        fresh += blocks
        yield Row(number, arrival_s, prompt, output, ids)


def _cells(path: Path, number: int, line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode("utf-8").strip()]))
    except (UnicodeDecodeError, csv.Error, StopIteration) as error:
        raise fault(path, number, f"not a line of CSV: {error}") from error
