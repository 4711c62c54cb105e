"""What commands do with files and results: reading and writing, JSON, tables, progress."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import sys
from argparse import Namespace
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvatlas.errors import ConfigError

FILE_BYTES_MAX = 64 << 20


class Assumption(msgspec.Struct, frozen=True):
    """A value that nobody gave, and where it comes from."""

    name: str
    value: str
    source: str

    def text(self) -> str:
        """In one line."""
        return f"{self.name}: {self.value} ({self.source})"


def json_bytes(value: object) -> bytes:
    """``value`` as indented JSON, a line break behind it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def print_json(value: object) -> None:
    """``value`` as indented JSON on stdout."""
    print(json_bytes(value).decode(), end="")


def csv_bytes(lines: Iterable[Sequence[object]]) -> bytes:
    """Lines as CSV; None is an empty cell."""
    out = io.StringIO()
    csv.writer(out).writerows(lines)
    return out.getvalue().encode()


def check_output(option: str, path: Path | None, *others: Path | None) -> None:
    """Before a long run: that its result can be written to ``path``, and that this is none of the
    ``others``, which the command reads or writes. Raises ConfigError."""
    if path is None:
        return
    if str(path) == "-":
        raise ConfigError(f"{option} -: give a file, this is not for stdout")
    if any(other is not None and path.resolve() == other.resolve() for other in others):
        raise ConfigError(f"{option} {path}: the command reads or writes that file already")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: cannot be written: it is a directory")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: cannot be written: there is no {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written: permission denied")


def check_outputs(args: Namespace, names: Sequence[str], *read: Path | None) -> None:
    """The same for each option of ``names`` beside the others; ``read``: what the command reads."""
    for name in names:
        others = [getattr(args, other) for other in names if other != name]
        check_output(f"--{name}", getattr(args, name), *read, *others)


def read_file(path: Path) -> bytes:
    """A file that is kept in memory, without the mark that editors on Windows begin UTF-8 with.
    Raises ConfigError where it cannot be read or is too large."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {FILE_BYTES_MAX} bytes")
    return data.removeprefix(BOM_UTF8)


def write_file(option: str, path: Path, data: bytes) -> None:
    """The file that ``option`` asked for. Raises ConfigError where it cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: cannot be written: {error.strerror or error}"
        ) from error


def write_files(*files: tuple[str, Path | None, Callable[[], bytes]]) -> None:
    """Files by option, path and what makes their content; None was not asked for. What cannot be
    written costs no other file: its ConfigError is raised when all were tried."""
    faults: list[ConfigError] = []
    for option, path, made in files:
        if path is not None:
            try:
                write_file(option, path, made())
            except ConfigError as error:
                faults.append(error)
    if faults:
        raise faults[0]


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
