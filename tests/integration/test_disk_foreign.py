"""Catalogues and folders that nobody of ours wrote: a store opens right or empty, or says why."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from disk_kit import opened, piece_of, right, run, whole

from kvatlas.dataplane.tiers import disk_files
from kvatlas.dataplane.tiers.base import Report
from kvatlas.dataplane.tiers.disk_files import Files
from kvatlas.errors import ConfigError

NAMES = [b"unit %d" % n for n in range(6)]
ONE = "name = CAST('unit 2' AS BLOB)"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    store = opened(tmp_path / "disk")
    run(store.write, *map(piece_of, NAMES))
    store.close()
    return tmp_path / "disk"


def change(disk: Path, *statements: str) -> None:
    with sqlite3.connect(disk / "catalogue.db") as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def check(disk: Path, left: int, count: str) -> None:
    store = opened(disk)
    assert sum(right(store, name) for name in NAMES) == left
    assert store.counts.all()[count] == 1
    assert run(store.write, *map(piece_of, NAMES)) == Report()
    whole(store)
    store.close()


@pytest.mark.parametrize("value", ["'text'", "x'00'", "1.5"])
@pytest.mark.parametrize("column", ["name", "place", "room", "label"])
def test_rows_with_values_of_another_type_are_left_out(disk: Path, column: str, value: str) -> None:
    change(disk, f"UPDATE units SET {column} = {value} WHERE {ONE}")
    check(disk, len(NAMES) - 1, "found_unusable")


@pytest.mark.parametrize("value", ["'text'", "NULL", "1.5", "-1", "9223372036854775807"])
@pytest.mark.parametrize("key", ["form", "epoch", "segment"])
def test_a_head_that_nobody_wrote_is_an_empty_store(disk: Path, key: str, value: str) -> None:
    change(disk, f"UPDATE meta SET value = {value} WHERE key = '{key}'")
    check(disk, 0, "catalogue_lost")


@pytest.mark.parametrize(
    "other",
    ["CREATE TABLE units (a, b)", "CREATE VIEW units AS SELECT 1 name, 2 place, 3 room, 4 label"],
)
def test_a_catalogue_of_something_else_is_set_aside(disk: Path, other: str) -> None:
    change(disk, "DROP TABLE units", other)
    check(disk, 0, "catalogue_lost")
    assert (disk / "catalogue.damaged").is_file()


def _blocked(disk: Path) -> None:
    (disk / "catalogue.db").write_bytes(b"no database" * 500)
    (disk / "catalogue.damaged").mkdir()


def _folder(disk: Path) -> None:
    (disk / "catalogue.db").unlink()
    (disk / "catalogue.db").mkdir()


@pytest.mark.parametrize("act", [_blocked, _folder])
def test_what_cannot_be_set_aside_is_told(disk: Path, act: Callable[[Path], None]) -> None:
    act(disk)
    with pytest.raises(ConfigError, match=r"catalogue\.db"):
        opened(disk)
    Files(disk).close()  # nothing of it is held


def test_files_that_are_no_segments_are_left_alone(disk: Path) -> None:
    other = disk / "segment-²²².kv"
    other.write_bytes(b"mine")
    store = opened(disk)
    assert all(right(store, name) for name in NAMES)
    store.close()
    assert other.read_bytes() == b"mine"


def test_only_segments_that_will_be_used_count_as_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "segment-00000.kv").write_bytes(bytes(8192))
    (tmp_path / "segment-00005.kv").write_bytes(bytes(8192))  # of a larger store before this one
    files = Files(tmp_path)
    monkeypatch.setattr(
        disk_files.os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096)
    )
    files.look_for_room(1, 8192)
    with pytest.raises(ConfigError, match="8192 bytes more are wanted, 4096 are free"):
        files.look_for_room(2, 8192)
    files.close()
