"""What really carried values: pieces, bytes and seconds by transport, and why it was another one
than the best."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator

import msgspec


class Way(msgspec.Struct):
    """Of one transport. ``seconds`` of all reads by it, several at once counted each."""

    pieces: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    failures: int = 0


class Moved:
    """For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: dict[str, Way] = {}
        self._instead: Counter[str] = Counter()

    def arrived(self, transport: str, size_bytes: int) -> None:
        """One value, and it is right."""
        with self._lock:
            way = self._ways.setdefault(transport, Way())
            way.pieces += 1
            way.size_bytes += size_bytes

    @contextlib.contextmanager
    def timed(self, transport: str) -> Iterator[None]:
        """A read; what is raised makes it a failure."""
        started = time.monotonic()
        failed = True
        try:
            yield
            failed = False
        finally:
            with self._lock:
                way = self._ways.setdefault(transport, Way())
                way.seconds += time.monotonic() - started
                way.failures += failed

    def failed(self, transport: str) -> None:
        """A read by it did not come to its end."""
        with self._lock:
            self._ways.setdefault(transport, Way()).failures += 1

    def instead(self, why: str) -> None:
        """A read went, or goes on, over another transport than the best."""
        with self._lock:
            self._instead[why] += 1

    def status(self) -> dict[str, object]:
        """By transport, and reasons."""
        with self._lock:
            ways = {name: msgspec.to_builtins(way) for name, way in sorted(self._ways.items())}
            return {"moved": ways, "instead": dict(sorted(self._instead.items()))}
