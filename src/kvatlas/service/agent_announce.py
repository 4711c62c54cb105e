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
from zmq.auth.asyncio import AsyncioAuthenticator

from kvatlas.core.events import AllBlocksCleared, Event, UnitsGone, UnitsHeld
from kvatlas.errors import ConfigError
from kvatlas.service.event_socket import ZAP_DOMAIN, EventSocket
from kvatlas.service.feed_socket import CURVE_KEY_CHARS, new_curve
from kvatlas.service.wire import encoded_units

Word = AllBlocksCleared | UnitsHeld | UnitsGone

LISTENERS_MAX = 64
LISTENS_S = 300.0  # after it told its key last
KEYS_PER_EVENT = 1024  # what a listener applies in one go
KEYS_PER_BATCH = 16_384  # what it decodes in one go
HISTORY_BATCHES_MAX = 10_000
HISTORY_BYTES_MIN = 16 << 20  # less is never rewritten for its size


class Listeners:
    """Who may listen: whoever told his key over TLS lately. What is said to others is nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError where libzmq cannot encrypt."""
        self.curve = new_curve()
        self._clock = clock
        self._until: dict[bytes, float] = {}
        self._authenticator: AsyncioAuthenticator | None = None

    def let_in(self, key: str) -> bool:
        """One more, for a while; False for what is no key."""
        if len(key) != CURVE_KEY_CHARS or not key.isascii():
            return False
        now = self._clock()
        self._until = {known: until for known, until in self._until.items() if until > now}
        if len(self._until) < LISTENERS_MAX or key.encode() in self._until:
            self._until[key.encode()] = now + LISTENS_S
        return True

    def start(self, context: zmq.asyncio.Context) -> None:
        """Ask here for each connection of ``context``'s sockets (needs a running event loop)."""
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, self)
        self._authenticator.start()

    def stop(self) -> None:
        """Before the context ends."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._authenticator = None

    def callback(self, domain: str, key: bytes) -> bool:
        """Of pyzmq's authenticator; ``key`` in Z85."""
        return self._until.get(key, 0.0) > self._clock()


class Announcer:
    """The sockets of one life of an agent. ``announce`` is for its driver."""

    def __init__(
        self,
        held: Callable[[], Sequence[Event]],
        host: str = "127.0.0.1",
        port: int = 0,
        listeners: Listeners | None = None,
    ) -> None:
        """``held``: all that is announced and so still. The history is at the port after ``port``;
        0 takes free ones. With ``listeners`` nobody else hears anything. Raises ConfigError where
        they cannot be had."""
        self.counts: Counter[str] = Counter()
        self._held = held
        self._context = zmq.asyncio.Context()
        self._listeners = listeners
        curve = listeners.curve if listeners is not None else None
        try:
            if listeners is not None:
                listeners.start(self._context)
            self._socket = EventSocket(
                self._context, host, port, port + 1 if port else 0, curve=curve
            )
        except zmq.ZMQError as error:
            self._stop_listening()
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
            self.rewrite()

    def rewrite(self) -> None:
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
        self._stop_listening()
        self._context.destroy(linger=0)

    def _stop_listening(self) -> None:
        if self._listeners is not None:
            self._listeners.stop()


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
