"""What commands do with results: JSON, tables of a width, a line that says what is under way."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console


def json_bytes(value: object) -> bytes:
    """``value`` as indented JSON, a line break behind it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def print_json(value: object) -> None:
    """``value`` as indented JSON on stdout."""
    print(json_bytes(value).decode(), end="")


def table_console(width: int) -> Console:
    """A console for wide tables: as wide as the terminal, ``width`` columns in a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def status(text: str = "") -> None:
    """A line on the terminal that the next one replaces; none where stderr goes to a file."""
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
