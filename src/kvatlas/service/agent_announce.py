"""What an agent holds, announced as engines announce their blocks; `service.feed` listens.

Batches are numbered and can be asked for again. Their history is rewritten from time to time as
what it comes to, so it stays in proportion to what is held, and begins with everything: whoever
asks for more than it tells gets all of the present state, and nothing of the past.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import zmq
import zmq.asyncio

from kvatlas.core.events import AllBlocksCleared, Event, UnitsGone, UnitsHeld
from kvatlas.errors import ConfigError
from kvatlas.service.event_socket import EventSocket
from kvatlas.service.wire import encoded_units

Word = AllBlocksCleared | UnitsHeld | UnitsGone

KEYS_PER_EVENT = 1024  # what a listener applies in one go
KEYS_PER_BATCH = 16_384  # what it decodes in one go
HISTORY_BATCHES_MAX = 10_000
HISTORY_BYTES_MIN = 16 << 20  # less is never rewritten for its size


class Announcer:
    """The sockets of one life of an agent. ``announce`` is for its driver."""

    def __init__(
        self, held: Callable[[], Sequence[Event]], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        """``held``: all that is announced and so still. The history is at the port after ``port``;
        0 takes free ones. Raises ConfigError where they cannot be had."""
        self.counts: Counter[str] = Counter()
        self._held = held
        self._context = zmq.asyncio.Context()
        try:
            self._socket = EventSocket(self._context, host, port, port + 1 if port else 0)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            ports = f"ports {port} and {port + 1}" if port else "ports"
            raise ConfigError(f"events: {ports} of {host} cannot be had: {error}") from error
        self._socket.start()
        self._ts = 0.0
        self._batches = 0
        self._bytes = 0
        self._bytes_max = HISTORY_BYTES_MIN

    @property
    def endpoint(self) -> str:
        """Where the events are."""
        return self._socket.endpoint

    @property
    def replay_endpoint(self) -> str:
        """Where they can be asked for again."""
        return self._socket.replay_endpoint

    def announce(self, events: Sequence[Event]) -> None:
        """Send what changed; with it all that is held has been told."""
        for words in _batches(events):
            # Each later than the one before: a listener tells lives apart by it.
            self._ts = max(time.time(), self._ts + 1e-5)
            payload = encoded_units(self._ts, words)
            self._socket.send(payload)
            self._batches += 1
            self._bytes += len(payload)
            self.counts["batches_announced"] += 1
            self.counts["keys_announced"] += sum(map(_keys, words))
        if self._batches > HISTORY_BATCHES_MAX or self._bytes > self._bytes_max:
            self._rewrite()

    def _rewrite(self) -> None:
        """All pieces have the time of the last batch: who had heard one of those whose numbers they
        take sees that they differ, and takes all of them."""
        words = _batches((AllBlocksCleared(), *self._held()))
        payloads = [encoded_units(self._ts, piece) for piece in words]
        self._socket.rewrite(payloads)
        self._batches, self._bytes = len(payloads), sum(map(len, payloads))
        self._bytes_max = max(HISTORY_BYTES_MIN, 2 * self._bytes)
        self.counts["history_rewritten"] += 1

    async def close(self) -> None:
        """Closes the sockets."""
        await self._socket.close()
        self._context.destroy(linger=0)


def _keys(word: Word) -> int:
    return 0 if isinstance(word, AllBlocksCleared) else len(word.bodies) + len(word.points)


def _batches(events: Sequence[Event]) -> Iterator[list[Word]]:
    """The same in batches that are full but for the last: so a rewritten history never needs more
    numbers than were used to tell it."""
    batch: list[Word] = []
    room = KEYS_PER_BATCH
    for event in events:
        if isinstance(event, AllBlocksCleared):
            batch.append(event)
            continue
        assert isinstance(event, UnitsHeld | UnitsGone), "an agent says nothing else"
        for bodies in (True, False):
            keys, at = event.bodies if bodies else event.points, 0
            while at < len(keys):
                part = keys[at : at + min(room, KEYS_PER_EVENT)]
                batch.append(
                    type(event)(event.tier, part) if bodies else type(event)(event.tier, (), part)
                )
                at += len(part)
                room -= len(part)
                if not room:
                    yield batch
                    batch, room = [], KEYS_PER_BATCH
    if batch:
        yield batch
