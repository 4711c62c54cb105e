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
_SEGMENT_BYTES_MAX = 1 << 48
_EPOCHS = 1 << 31  # starts of an agent; generations begin with their number
_FOREIGN = """
DELETE FROM units WHERE typeof(name) <> 'blob' OR typeof(label) <> 'blob'
    OR typeof(place) <> 'integer' OR typeof(room) <> 'integer'
"""  # SQLite keeps a value of any type in any column
_BEYOND = "DELETE FROM units WHERE place + room > ?"


class Row(msgspec.Struct, frozen=True, gc=False):
    """``place`` counts over all segments; ``label`` is packed."""

    name: bytes
    place: int
    room: int
    label: bytes


class Catalogue:
    """Not for threads: whoever owns it locks."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        """Opens or makes it; a damaged one is set aside as ``catalogue.damaged``: then all that was
        held is ``lost``.

        Where segments had another size, only places in the first one still mean what they did, as
        far as it reaches now. ``found``: all rows, the last place first, but for ``unusable`` ones
        (beyond that, or with values of other types), which are gone. Raises ConfigError when the
        disk cannot be written to.
        """
        self.path = directory / "catalogue.db"
        self.lost = False
        self.unusable = 0
        self._commits = 0
        self._full = True
        self._segment_bytes = segment_bytes
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            unusable = isinstance(error, sqlite3.OperationalError)
            if unusable and error.sqlite_errorcode != sqlite3.SQLITE_ERROR:  # it has other columns
                raise ConfigError(f"disk: {self.path} cannot be opened: {error}") from error
            self._set_aside()
            self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA locking_mode=EXCLUSIVE")  # no file of shared memory
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA wal_autocheckpoint=0")  # done here, so that it is known when
            db.execute("PRAGMA synchronous=FULL")
            db.execute("PRAGMA secure_delete=ON")  # labels say whose a unit was
            if db.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check failed")
            db.executescript(_SCHEMA)
            found = dict(db.execute("SELECT key, value FROM meta"))
            if found.get("form", _FORM) != _FORM:
                raise sqlite3.DatabaseError("another form")
            epoch = found.get("epoch", 0)
            if not isinstance(epoch, int) or not 0 <= epoch < _EPOCHS:
                raise sqlite3.DatabaseError("no count of starts")
            self.epoch = epoch + 1
            had = found.get("segment", self._segment_bytes)
            if not isinstance(had, int) or not 0 < had <= _SEGMENT_BYTES_MAX:
                raise sqlite3.DatabaseError("no size of segments")
            self.unusable = db.execute(_FOREIGN).rowcount
            if had != self._segment_bytes:
                self.unusable += db.execute(_BEYOND, (min(had, self._segment_bytes),)).rowcount
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
        aside = self.path.with_suffix(".damaged")
        try:
            self.path.replace(aside)
        except OSError as error:
            raise ConfigError(
                f"disk: {self.path} is damaged and cannot be moved to {aside}: {error}"
            ) from error
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
