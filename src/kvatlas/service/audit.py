"""Who read or changed what, as JSON lines that are only ever added to. Never content.

A change is a line before it is made: where that line cannot be written (a full disk, say) the
change is refused. Reading goes on, and what could not be written is counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kvatlas.config_tls import AuditConfig
from kvatlas.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

REFUSALS_S = 10.0  # between two lines of one address that is refused again and again
ADDRESSES_MAX = 1024
_SHOWN_CHARS = 256
_OTHERS = "others"


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """``who``: a certificate's identity, or the name of a token. ``times``: so often since the last
    line of this kind."""

    at: str
    part: str
    who: str
    what: str
    target: str = ""
    address: str = ""
    outcome: str = ""
    times: int = 1


class Audit:
    """One file of one process. For one thread."""

    def __init__(
        self,
        config: AuditConfig,
        part: str,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError where the file cannot be opened."""
        self.counts: Counter[str] = Counter()
        self.error = ""  # of the last line, where it could not be written
        self._config = config
        self._path = Path(config.file)
        self._part = part
        self._wall = wall
        self._clock = clock
        self._torn = False  # the last line has no end
        self._refusals: dict[str, tuple[float, int]] = {}
        self._fd, self._size_bytes = -1, 0
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"audit.file: {self._path}: {error.strerror}") from error
        self._torn = self._size_bytes > 0 and not self._whole()

    def close(self) -> None:
        """No more lines; again: nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def note(
        self, who: str, what: str, target: str = "", *, address: str = "", outcome: str = "done"
    ) -> bool:
        """One line; False where it could not be written."""
        return self._write(self._line(who, what, target, address, outcome), sync=False)

    def changing(self, who: str, what: str, target: str = "", *, address: str = "") -> None:
        """Before a change is made. Raises RequestError where it cannot be written down."""
        line = self._line(who, what, target, address, "begins")
        if not self._write(line, sync=self._config.sync):
            self.counts["changes_refused"] += 1
            raise RequestError(
                f"the audit log cannot be written ({self.error}), so nothing is changed",
                status=503,
                code="audit_unavailable",
            )

    def refused(self, address: str, what: str, why: str) -> None:
        """Somebody was not let in: a line for the first time, then one per `REFUSALS_S` with how
        many there were."""
        self.counts["refused"] += 1
        now = self._clock()
        if address not in self._refusals and len(self._refusals) >= ADDRESSES_MAX:
            self._refusals = {a: k for a, k in self._refusals.items() if k[0] > now or k[1]}
            if len(self._refusals) >= ADDRESSES_MAX:
                address = _OTHERS
        until, waiting = self._refusals.get(address, (0.0, 0))
        if now < until:
            self._refusals[address] = until, waiting + 1
            return
        self._refusals[address] = now + REFUSALS_S, 0
        line = self._line("", what, "", address, f"refused: {why}")
        self._write(msgspec.structs.replace(line, times=waiting + 1), sync=False)

    def _line(self, who: str, what: str, target: str, address: str, outcome: str) -> Line:
        at = datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="milliseconds")
        who, what, target, outcome = (t[:_SHOWN_CHARS] for t in (who, what, target, outcome))
        return Line(at, self._part, who, what, target, address, outcome)

    def _write(self, line: Line, *, sync: bool) -> bool:
        data = msgspec.json.encode(line) + b"\n"
        if self._torn:
            data = b"\n" + data
        try:
            if self._fd >= 0 and not os.fstat(self._fd).st_nlink:  # nobody would read it
                self.close()
            if self._fd < 0:
                self._open()
            if self._size_bytes and self._size_bytes + len(data) > self._config.file_max_bytes:
                self._rotate()
                data = data.lstrip(b"\n")
            sent = os.write(self._fd, data)
            self._size_bytes += sent
            self._torn = sent < len(data)
            if self._torn:
                raise OSError(0, "written in part: is the disk full?")
            if sync:
                os.fsync(self._fd)
        except OSError as error:
            self.counts["failed"] += 1
            told = error.strerror or str(error)
            if told != self.error:
                log.error("%s: %s", self._path, told)
            self.error = told
            return False
        self.counts["written"] += 1
        self.error = ""
        return True

    def _rotate(self) -> None:
        """The newest of the older ones is ``.1``. Raises OSError; nothing is lost then."""
        os.fsync(self._fd)
        for number in range(self._config.keep, 0, -1):
            before = self._older(number - 1) if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                os.replace(before, self._older(number))
        self.close()
        self._torn = False
        self._open()
        self.counts["rotated"] += 1

    def _older(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        self._size_bytes = os.fstat(self._fd).st_size

    def _whole(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
