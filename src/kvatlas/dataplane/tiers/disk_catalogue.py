"""What lies where on a disk, in an SQLite database in WAL mode.

A commit is cheap and may be lost with the power, as a whole and never out of order; a lasting one
is synced, with all before it. That is enough: what a lost row described is not found, what a row
wrongly describes fails its label. The database is read once, at the start.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from kvatlas.errors import ConfigError

_CHECKPOINT_COMMITS = 2000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS units (
    name BLOB PRIMARY KEY, place INTEGER NOT NULL, room INTEGER NOT NULL, label BLOB NOT NULL
) WITHOUT ROWID;
"""
_FORM = 1


class Row(msgspec.Struct, frozen=True, gc=False):
    """``place`` counts over all segments; ``label`` is packed."""

    name: bytes
    place: int
    room: int
    label: bytes


class Catalogue:
    """Not for threads: whoever owns it locks."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        """Opens or makes it; a damaged one is set aside as ``catalogue.damaged``. Places in
        segments of another size mean nothing and are forgotten.

        ``lost``: one of that happened, and all that was held is forgotten. ``found``: all rows,
        the last place first. Raises ConfigError when the disk cannot be written to.
        """
        self.path = directory / "catalogue.db"
        self.lost = False
        self._commits = 0
        self._full = True
        self._segment_bytes = segment_bytes
        try:
            self._db = self._open()
        except sqlite3.OperationalError as error:
            raise ConfigError(f"disk: {self.path} cannot be opened: {error}") from error
        except sqlite3.DatabaseError:
            self._set_aside()
            self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA locking_mode=EXCLUSIVE")  # no file of shared memory
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA wal_autocheckpoint=0")  # done here, so that it is known when
            db.execute("PRAGMA synchronous=FULL")
            if db.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check failed")
            db.executescript(_SCHEMA)
            found = dict(db.execute("SELECT key, value FROM meta"))
            if found.get("form", _FORM) != _FORM:
                raise sqlite3.DatabaseError("another form")
            self.epoch = found.get("epoch", 0) + 1
            if found.get("segment", self._segment_bytes) != self._segment_bytes:
                self.lost = True
                db.execute("DELETE FROM units")
            rows = (("form", _FORM), ("epoch", self.epoch), ("segment", self._segment_bytes))
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            query = "SELECT name, place, room, label FROM units ORDER BY place DESC"
            self.found = [Row(*row) for row in db.execute(query)]
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self) -> None:
        self.lost = True
        self.path.replace(self.path.with_suffix(".damaged"))
        for ending in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                self.path.with_name(self.path.name + ending).unlink()

    def apply(self, put: Sequence[Row], drop: Iterable[bytes], *, lasting: bool) -> None:
        """One transaction. Raises sqlite3.Error, and then nothing of it was done."""
        db = self._db
        if lasting is not self._full:
            db.execute(f"PRAGMA synchronous={'FULL' if lasting else 'NORMAL'}")
            self._full = lasting
        db.execute("BEGIN IMMEDIATE")
        try:
            for name in drop:
                db.execute("DELETE FROM units WHERE name = ?", (name,))
            for row in put:
                value = (row.name, row.place, row.room, row.label)
                db.execute("INSERT OR REPLACE INTO units VALUES (?, ?, ?, ?)", value)
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        self._commits += 1
        if self._commits >= _CHECKPOINT_COMMITS:
            self._commits = 0
            with contextlib.suppress(sqlite3.Error):  # it only grows until the next one
                self.checkpoint()

    def checkpoint(self) -> None:
        """The log goes into the database; both synced. Raises sqlite3.Error."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """What was committed is there for the next time."""
        with contextlib.suppress(sqlite3.Error):
            self.checkpoint()
        self._db.close()
