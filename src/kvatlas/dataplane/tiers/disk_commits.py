"""Commits of the catalogue in groups: whoever comes first does it for all that wait."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence

from kvatlas.dataplane.tiers.base import Counts
from kvatlas.dataplane.tiers.disk_catalogue import Catalogue, Row
from kvatlas.dataplane.tiers.disk_files import Files


class _Change:
    def __init__(
        self, row: Row | None, drops: Sequence[bytes], lasting: bool, then: Callable[[], None]
    ) -> None:
        self.row = row
        self.drops = drops
        self.lasting = lasting
        self.then = then
        self.over = False
        self.failed = False


class Commits:
    """For any number of threads."""

    def __init__(self, catalogue: Catalogue, files: Files, counts: Counts) -> None:
        self._catalogue = catalogue
        self._files = files
        self._counts = counts
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._waiting: list[_Change] = []
        self._owed: list[bytes] = []
        self._dirty: set[int] = set()

    def written(self, number: int) -> None:
        """A segment has bytes that were not synced."""
        with self._lock:
            self._dirty.add(number)

    def forget(self, number: int) -> None:
        """A segment is gone."""
        with self._lock:
            self._dirty.discard(number)

    def put(self, row: Row, *, lasting: bool, then: Callable[[], None]) -> bool:
        """A unit was written; ``then`` is called once that is committed, before anything that
        comes later is. ``lasting``: with it all that was written and committed before survives a
        loss of power. False: it could not be committed."""
        return self._do(_Change(row, (), lasting, then))

    def drop(self, names: Sequence[bytes]) -> bool:
        """Units are gone. False: not yet; it is done with the next commit."""
        return self._do(_Change(None, names, False, lambda: None))

    def settle(self) -> None:
        """What was dropped stands in no log of the catalogue any more."""
        with self._turn:
            try:
                self._catalogue.checkpoint()
            except sqlite3.Error:
                self._counts.add("checkpoint_failed")

    def close(self) -> None:
        """Closes the catalogue."""
        with self._turn:
            self._catalogue.close()

    def _do(self, change: _Change) -> bool:
        with self._lock:
            self._waiting.append(change)
        with self._turn:
            if change.over:
                return not change.failed
            with self._lock:
                group, self._waiting = self._waiting, []
                owed, self._owed = self._owed, []
            drops = owed + [name for each in group for name in each.drops]
            failed = not self._apply(group, drops)
            if failed:
                self._counts.add("commit_failed")
                with self._lock:
                    self._owed = drops + self._owed  # before their room is written down again
            for each in group:
                each.over, each.failed = True, failed
                if not failed:
                    each.then()
        return not failed

    def _apply(self, group: Sequence[_Change], drops: Sequence[bytes]) -> bool:
        rows = [each.row for each in group if each.row is not None]
        lasting = any(each.lasting for each in group)
        try:
            if lasting:
                self._sync()
            self._catalogue.apply(rows, drops, lasting=lasting)
        except (OSError, sqlite3.Error):
            return False
        return True

    def _sync(self) -> None:
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        try:
            for number in dirty:
                self._files.sync(number)
        except OSError:
            with self._lock:
                self._dirty |= dirty
            raise
