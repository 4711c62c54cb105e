"""What commands do with results: JSON, files, tables of a width, progress."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvatlas.errors import ConfigError


def json_bytes(value: object) -> bytes:
    """``value`` as indented JSON, a line break behind it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def print_json(value: object) -> None:
    """``value`` as indented JSON on stdout."""
    print(json_bytes(value).decode(), end="")


def write_file(option: str, path: Path, data: bytes) -> None:
    """The file that ``option`` asked for. Raises ConfigError where it cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error}") from error


def table_console(width: int) -> Console:
    """A console for wide tables: as wide as the terminal, ``width`` columns in a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def status(text: str = "") -> None:
    """A line on the terminal that the next one replaces; none where stderr goes to a file."""
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr up to ``total``; what it gives is called for each that is done."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=quiet,
        refresh_per_second=4,
    )
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
