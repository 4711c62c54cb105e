"""What the disk store asks of the operating system: segment files, and one lock on all of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from kvatlas.errors import ConfigError


class Files:
    """Segment files by number. Thin, so that tests can put faults in its place."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError when the directory cannot be written to, or is somebody else's."""
        self.directory = directory
        self.direct = True
        self._fds: dict[int, int] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"disk: {directory} cannot be written to: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"disk: {directory} is in use by another agent") from error

    def path(self, number: int) -> Path:
        """Of a segment."""
        return self.directory / f"segment-{number:05}.kv"

    def there(self) -> list[int]:
        """Numbers of the segments that exist."""
        names = (path.stem.partition("-")[2] for path in self.directory.glob("segment-*.kv"))
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal())

    def look_for_room(self, segments: int, size_bytes: int) -> None:
        """For so many segments, before one of them is made: a disk that is filled up on the way
        stops all who use it. Raises ConfigError when there is none."""
        there = sum(
            min(self.path(n).stat().st_size, size_bytes) for n in self.there() if n < segments
        )
        disk = os.statvfs(self.directory)
        wanted, free = segments * size_bytes - there, disk.f_bavail * disk.f_frsize
        if wanted > free:
            raise ConfigError(
                f"disk: {self.directory} cannot be made that large: {wanted} bytes more are wanted,"
                f" {free} are free. Ask for less, or make room"
            )

    def open(self, number: int, size_bytes: int) -> int:
        """Open a segment, all of its room allocated; says how many of its bytes were there.

        Raises ConfigError when there is no room or no right to.
        """
        path = self.path(number)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            fd = self._open(path, flags)
            before = os.fstat(fd).st_size
            try:
                if before > size_bytes:
                    os.ftruncate(fd, size_bytes)
                os.posix_fallocate(fd, 0, size_bytes)
            except OSError:
                os.close(fd)
                if not before:
                    path.unlink()
                raise
        except OSError as error:
            room = ""
            with contextlib.suppress(OSError):
                free = os.statvfs(self.directory)
                room = f" ({free.f_bavail * free.f_frsize} bytes are free)"
            raise ConfigError(
                f"disk: {path} of {size_bytes} bytes cannot be made: {error}{room}"
            ) from error
        self._fds[number] = fd
        return min(before, size_bytes)

    def _open(self, path: Path, flags: int) -> int:
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False  # this file system cannot; said by the store's transport
        return os.open(path, flags, 0o600)

    def read(self, number: int, views: Sequence[memoryview], offset: int) -> int:
        """Bytes read. Raises OSError."""
        return os.preadv(self._fds[number], views, offset)

    def write(self, number: int, views: Sequence[memoryview], offset: int) -> int:
        """Bytes written. Raises OSError."""
        return os.pwritev(self._fds[number], views, offset)

    def sync(self, number: int) -> None:
        """All that was written to it before survives a loss of power. Raises OSError."""
        os.fdatasync(self._fds[number])

    def remove(self, number: int) -> None:
        """A segment that nobody needs any more."""
        if (fd := self._fds.pop(number, None)) is not None:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            self.path(number).unlink()

    def close(self) -> None:
        """Gives the files and the lock back."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
