"""The engine feed: KV events of unmodified engines, over ZMQ, into the directory.

One `SUB` socket per publisher, one short-lived `DEALER` per replay. The sockets are read from the
event loop itself, through their file descriptors, in slices of a few milliseconds: no thread, no
task per message, and a long replay or a large batch never holds up a request. What may be applied
is decided by `core.sequence`; what bytes mean by `service.wire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections import deque

import zmq

from kvatlas.core import sequence
from kvatlas.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvatlas.core.records import Place, Publisher
from kvatlas.core.sequence import Apply, Effect, Replay, Reset, Sequencer
from kvatlas.service import wire
from kvatlas.service.feed_socket import FAILED, MONITORED, Curve, attach, tune
from kvatlas.service.feed_values import Claims, FeedStatus, Source

__all__ = ["Claims", "Feed", "FeedStatus", "Source"]

log = logging.getLogger(__name__)

SLICE_S = 0.002
_MESSAGES_PER_TURN = 16
_TOKEN_BYTES_PER_APPLY = 4 * 8192
_HASH_COST = 32  # a block's hash takes as long as hashing so many bytes of tokens
_LIVE_QUEUE_MAX = 10_000  # messages; beyond it ZMQ drops, which shows as a gap
_REPLAY_QUEUE_MAX = 100_000  # an engine sends its whole buffer at once
_REOPEN_S = 5.0
_END = b"\xff" * 8
_SEQ_MAX = 1 << 63  # engines count from 0


class Feed:
    """All publishers' streams. Lives on one event loop; `close` it."""

    def __init__(
        self,
        claims: Claims,
        *,
        limits: sequence.Limits = sequence.LIMITS,
        slice_s: float = SLICE_S,
        curve: Curve | None = None,
    ) -> None:
        """``curve``: by which senders know us."""
        self.curve = curve
        self._claims = claims
        self._limits = limits
        self._slice_s = slice_s
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._streams: dict[Publisher, _Stream] = {}
        self._ready: deque[_Stream] = deque()
        self._pumping = False

    def add(self, publisher: Publisher, source: Source) -> None:
        """Follow a publisher. The same source again changes nothing, another one replaces it:
        that is a new life of the publisher, and its claims go."""
        stream = self._streams.get(publisher)
        if stream is not None:
            if stream.status.source == source:
                return
            self.remove(publisher)
            self._claims.reset(publisher)
        self._streams[publisher] = _Stream(self, publisher, source, self._limits)
        self._streams[publisher].open()

    def _user_of(self, source: Source) -> Publisher | None:
        """Whose events come from there already: they cannot be told apart from another's."""
        for publisher, stream in self._streams.items():
            other = stream.status.source
            if stream.is_open and (other.endpoint, other.topic) == (source.endpoint, source.topic):
                return publisher
        return None

    def remove(self, publisher: Publisher) -> None:
        """Stop following it. Its claims stay until the directory is told otherwise."""
        stream = self._streams.pop(publisher, None)
        if stream is not None:
            stream.close()

    def restarted(self, publisher: Publisher, reason: str) -> None:
        """The engine is known to have started anew: its claims go now, its new history is asked."""
        stream = self._streams.get(publisher)
        if stream is not None:
            stream.restarted(reason)
        else:
            self._claims.reset(publisher)

    def dropped(self, publisher: Publisher, reason: str, *, awake: bool = False) -> None:
        """The engine lives on without its cache: its claims go, as in `Sequencer.dropped`."""
        stream = self._streams.get(publisher)
        if stream is not None:
            stream.dropped(reason, awake)
        else:
            self._claims.reset(publisher)

    def status(self) -> list[FeedStatus]:
        """One record per publisher, sorted by publisher."""
        return [self._streams[p].report() for p in sorted(self._streams)]

    def idle(self, publisher: Publisher) -> bool:
        """Connected, no replay under way and nothing left to apply."""
        stream = self._streams.get(publisher)
        return stream is not None and stream.idle

    # -- for snapshots --------------------------------------------------------------------------

    def hold(self, publisher: Publisher) -> bool:
        """Apply what was read of it, and read no more before `release`. True once nothing is left:
        from then on nothing of it is applied."""
        stream = self._streams.get(publisher)
        return stream is None or stream.hold()

    def release(self, publisher: Publisher) -> None:
        """It goes on."""
        stream = self._streams.get(publisher)
        if stream is not None:
            stream.release()

    def place(self, publisher: Publisher) -> Place | None:
        """As `Sequencer.place`, of what is applied; None for one that is not followed."""
        stream = self._streams.get(publisher)
        return stream.sequencer.place() if stream is not None and stream.settled else None

    def outdone(self, publisher: Publisher, place: Place) -> str:
        """As `Sequencer.outdone`."""
        stream = self._streams.get(publisher)
        return "it is not followed here" if stream is None else stream.sequencer.outdone(place)

    def take_up(self, publisher: Publisher, place: Place) -> None:
        """As `Sequencer.take_up`: its claims are there already, and in doubt."""
        self._streams[publisher].take_up(place)

    async def close(self) -> None:
        """Closes every socket."""
        for publisher in list(self._streams):
            self.remove(publisher)
        self._ready.clear()
        self._context.destroy(linger=0)

    # -- slices ---------------------------------------------------------------------------------

    def _wake(self, stream: _Stream) -> None:
        if not stream.queued:
            stream.queued = True
            self._ready.append(stream)
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Turns for whoever has something, until the slice is used up."""
        until = self._loop.time() + self._slice_s
        while self._ready:
            stream = self._ready.popleft()
            stream.queued = False
            try:
                more = stream.turn()
            except Exception as error:  # ours, and of this stream alone
                stream.broke(error)
            else:
                if more:
                    stream.queued = True
                    self._ready.append(stream)
            if self._loop.time() >= until:
                break
        if self._ready:
            self._loop.call_soon(self._pump)
        else:
            self._pumping = False


class _Stream:
    """One publisher: its sockets, its decoder, its place in the sequence."""

    def __init__(
        self, feed: Feed, publisher: Publisher, source: Source, limits: sequence.Limits
    ) -> None:
        self._feed = feed
        self._loop = feed._loop
        self._publisher = publisher
        self._decoder = wire.Decoder()
        self._limits = limits
        self.sequencer = Sequencer(can_replay=bool(source.replay), limits=limits)
        self._backlog: deque[Event] = deque()
        self._sub: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._token = 0
        self._believed = True
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._reopen: asyncio.TimerHandle | None = None
        self._held = False  # nothing more is read
        self._still = False  # nor applied
        self.queued = False
        self.closed = False
        self.status = FeedStatus(publisher, source)

    # -- sockets --------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the sockets; when that fails it is said in the status and tried again."""
        source = self.status.source
        user = self._feed._user_of(source)
        if user is not None:
            self._not_open(
                f"{source.endpoint}: these are the events of {user} already; "
                "give each engine and rank an event port of its own"
            )
            return
        sub = self._feed._context.socket(zmq.SUB)
        monitor = sub.get_monitor_socket(MONITORED)
        try:
            tune(sub, _LIVE_QUEUE_MAX, self._feed.curve, source.curve_key)
            sub.set(zmq.RECONNECT_IVL, 200)
            sub.set(zmq.RECONNECT_IVL_MAX, 2000)
            sub.subscribe(source.topic.encode())
            monitor = sub.get_monitor_socket(MONITORED)
            self.status.bound = attach(sub, source.endpoint, source.bind)
        except (zmq.ZMQError, ValueError) as error:
            sub.disable_monitor()
            monitor.close(0)
            sub.close(0)
            self._not_open(f"{source.endpoint}: {error}")
            return
        self.status.error = ""
        self._sub, self._monitor = sub, monitor
        for socket in (monitor, sub):
            self._loop.add_reader(int(socket.get(zmq.FD)), self._feed._wake, self)
        self._feed._wake(self)

    @property
    def is_open(self) -> bool:
        return self._sub is not None

    def _not_open(self, error: str) -> None:
        if error != self.status.error:
            log.warning("%s: no KV events: %s", self._publisher, error)
        self.status.error = error
        self._reopen = self._loop.call_later(_REOPEN_S, self.open)

    def broke(self, error: Exception) -> None:
        """A fault of ours in this stream: nothing of it is believed, and it begins anew."""
        log.error("%s: its KV events cannot be followed", self._publisher, exc_info=error)
        self._close_sockets()
        self._begin_anew()
        self._not_open(f"following its events failed ({type(error).__name__}); see the log")

    def _begin_anew(self) -> None:
        self.sequencer = Sequencer(can_replay=self.sequencer.can_replay, limits=self._limits)
        self._feed._claims.reset(self._publisher)

    def close(self) -> None:
        self.closed = True
        self._close_sockets()
        if self._reopen is not None:
            self._reopen.cancel()

    def _close_sockets(self) -> None:
        self.status.connected = False
        self._backlog.clear()
        if self.sequencer.behind:  # it told of the past only, or a peer did: nobody will know more
            self._begin_anew()
        self._believe(True)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timer_at = None
        self._close_dealer()
        if self._sub is not None and self._monitor is not None:
            self._loop.remove_reader(int(self._sub.get(zmq.FD)))
            self._loop.remove_reader(int(self._monitor.get(zmq.FD)))
            self._sub.disable_monitor()
            self._monitor.close(0)
            self._sub.close(0)
            self._sub = self._monitor = None

    def _open_dealer(self, replay: Replay) -> None:
        self._close_dealer()
        source = self.status.source
        dealer = self._feed._context.socket(zmq.DEALER)
        self._token = replay.token
        try:
            tune(dealer, _REPLAY_QUEUE_MAX, self._feed.curve, source.curve_key)
            dealer.connect(source.replay)
            dealer.send_multipart([b"", struct.pack(">Q", replay.from_seq)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            dealer.close(0)
            log.warning("%s: no replay: %s", self._publisher, error)
            self._perform(self.sequencer.replay_failed(replay.token, self._loop.time()))
            return
        self._dealer = dealer
        self._loop.add_reader(int(dealer.get(zmq.FD)), self._feed._wake, self)
        self._feed._wake(self)

    def _close_dealer(self) -> None:
        if self._dealer is not None:
            self._loop.remove_reader(int(self._dealer.get(zmq.FD)))
            self._dealer.close(0)
            self._dealer = None

    # -- one turn -------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Do a little of what waits; returns whether more does."""
        if self.closed or self._still or self._sub is None or self._monitor is None:
            return False
        if self._backlog:
            self._apply()
            return True
        if self._held:
            return False
        while self._monitor is not None and (frames := _receive(self._monitor)) is not None:
            self._on_monitor(frames)
        if self._sub is None:
            return False
        more = False
        for _ in range(_MESSAGES_PER_TURN):
            frames = _receive(self._dealer) if self._dealer is not None else None
            if frames is not None:
                self._on_replay(frames)
            else:
                frames = _receive(self._sub)
                if frames is None:
                    break
                self._on_live(frames)
            if self._backlog and not self.closed:
                self._apply()  # most messages are small: what is left of a large one waits
            if self._backlog or self.closed:
                return not self.closed
        else:
            more = True
        # A ZMQ descriptor only tells of changes: look once more before waiting for the next.
        for socket in (self._monitor, self._sub, self._dealer):
            if socket is not None and int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
                more = True
        return more

    def _on_monitor(self, frames: list[bytes]) -> None:
        event = zmq.Event(struct.unpack("=H", frames[0][:2])[0])
        if event in FAILED:  # ZMQ would not try again
            self._close_sockets()
            self._not_open(f"{self.status.source.endpoint}: its handshake failed: keys of others?")
            return
        self.status.connected = event is zmq.Event.HANDSHAKE_SUCCEEDED
        if self.status.connected:
            self._perform(self.sequencer.connected(self._loop.time()))

    def _on_live(self, frames: list[bytes]) -> None:
        self.status.messages += 1
        if len(frames) < 2 or len(frames[-2]) != 8:
            self.status.malformed += 1
            return
        seq = int.from_bytes(frames[-2], "big")
        if seq >= _SEQ_MAX:
            self.status.malformed += 1
            return
        batch = self._decoder.decode(seq, frames[-1])
        self.status.last_event_s = now = self._loop.time()
        self.status.malformed += batch.malformed
        self.status.unknown += batch.unknown
        self._perform(self.sequencer.offer(batch, now))

    def _on_replay(self, frames: list[bytes]) -> None:
        now = self._loop.time()
        if len(frames) < 2 or len(frames[-2]) != 8:
            self.status.malformed += 1
            return
        if frames[-2] == _END:
            self._close_dealer()
            self._perform(self.sequencer.replay_done(self._token, now))
            return
        seq = int.from_bytes(frames[-2], "big")
        if seq >= _SEQ_MAX:
            self.status.malformed += 1
            return
        batch = self._decoder.decode(seq, frames[-1])
        self._perform(self.sequencer.replayed(self._token, batch, now))

    # -- effects --------------------------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        if self.sequencer.behind:
            self._believe(False)
        for effect in effects:
            if isinstance(effect, Apply):
                self._backlog.extend(effect.batch.events)
            elif isinstance(effect, Reset):
                log.warning("%s: its claims go: %s", self._publisher, effect.reason)
                self._backlog.clear()
                self._feed._claims.reset(self._publisher)
            else:
                self._open_dealer(effect)
        if self._backlog:
            self._feed._wake(self)
        elif not self.sequencer.behind:
            self._believe(True)
        if self.sequencer.asked != self._token:
            self._close_dealer()  # nobody listens any more to what it may still say
        self._arm()

    def _apply(self) -> None:
        """Hand over events up to a bounded amount of hashing."""
        chunk: list[Event] = []
        budget = _TOKEN_BYTES_PER_APPLY
        while self._backlog and budget > 0:
            event = self._backlog.popleft()
            budget -= 64
            if isinstance(event, BlockStored | BlockRemoved):
                budget -= _HASH_COST * len(event.hashes)
            elif not isinstance(event, AllBlocksCleared):
                budget -= _HASH_COST * (len(event.bodies) + len(event.points))
            if isinstance(event, BlockStored):
                budget -= len(event.tokens)
            chunk.append(event)
        applied = self._feed._claims.apply(self._publisher, chunk)
        self.status.events += len(chunk)
        self.status.applied.add(applied)
        effects = self.sequencer.orphaned(self._loop.time()) if applied.orphans else []
        self._perform(effects)

    def _believe(self, believed: bool) -> None:
        """What a replay told so far was true once: the directory waits until it has caught up."""
        if believed != self._believed:
            self._believed = believed
            self._feed._claims.believe(self._publisher, believed)

    @property
    def settled(self) -> bool:
        return not self._backlog

    def hold(self) -> bool:
        self._held = True
        self._still = self._still or self.settled
        return self._still

    def release(self) -> None:
        self._held = self._still = False
        self._feed._wake(self)

    def take_up(self, place: Place) -> None:
        self._backlog.clear()
        self._believe(False)
        self._perform(self.sequencer.take_up(place, self._loop.time()))

    def restarted(self, reason: str) -> None:
        self._perform(self.sequencer.restarted(reason, self._loop.time()))

    def dropped(self, reason: str, awake: bool) -> None:
        self._close_dealer()
        self._perform(self.sequencer.dropped(reason, awake=awake))

    def _arm(self) -> None:
        deadline = self.sequencer.next_deadline()
        if deadline == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = deadline
        if deadline is not None and not self.closed:
            self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        try:
            self._perform(self.sequencer.tick(self._loop.time()))
        except Exception as error:
            self.broke(error)
        self._feed._wake(self)

    # -- reports --------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self.status.connected and not self._backlog and not self.sequencer.replaying

    def report(self) -> FeedStatus:
        status = self.status
        status.epoch = self.sequencer.epoch
        status.replaying = self.sequencer.replaying
        status.stream = self.sequencer.counters
        status.reasons = self._decoder.reasons
        return status


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    with contextlib.suppress(zmq.Again):
        return socket.recv_multipart(zmq.NOBLOCK)
    return None
