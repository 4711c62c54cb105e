"""A simulated engine process: the engine model in virtual time, its event publisher, its death.

What `connectors.stub` does over sockets in real time. A process can be stopped, started anew and
paused; each start is a new life with an empty cache and sequence numbers from 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvatlas.core.events import Batch, BlockStored, Event
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher, Tier
from kvatlas.sim.messages import (
    Accepted,
    Answers,
    AskReplay,
    Cancel,
    Declined,
    Events,
    Look,
    Lost,
    Message,
    Pulse,
    Replayed,
    Submit,
    Subscribed,
    Usage,
)
from kvatlas.sim.network import Network
from kvatlas.sim.timeline import Timeline, Timer
from kvatlas.workload.engine import Engine
from kvatlas.workload.pace import Pace, paced
from kvatlas.workload.prompt_keys import PromptKeys, TraceKeys
from kvatlas.workload.protocol import (
    Abort,
    Admitted,
    Arrive,
    ClearCache,
    Cleared,
    Connector,
    Effect,
    HandedOff,
    Hold,
    Input,
    Loaded,
    Model,
    Produced,
    Published,
    Rejected,
    Release,
    Retime,
)
from kvatlas.workload.spec import EngineSpec

GATEWAY = "gateway"
REPLAY_BATCHES = 10_000  # vLLM's default buffer
REPLAY_BYTES_MAX = 16 << 20  # of token ids: ours, so that memory does not follow the trace


class EngineWatcher(Protocol):
    """Whoever wants to know what happens inside engines (reports, checkers)."""

    def admitted(
        self, engine: SimEngine, arrive: Arrive, admitted: Admitted, waited_s: float
    ) -> None:
        """A request got its blocks, ``waited_s`` after it came: for the first time, or again
        after a preemption."""

    def published(self, engine: SimEngine, batch: Batch) -> None:
        """A batch of events left the engine, whatever becomes of it."""


class Outside(Connector, Protocol):
    """State outside an engine's pool, for one life of it: tiers, the other half of a pair, or both.

    What it has to tell the engine goes through `SimEngine.input`, later than the call at hand
    where that is one of these. Its `external` is what the engine asks before it computes.
    """

    def submitted(self, submit: Submit) -> None:
        """A request comes, before the engine sees it."""

    def effect(self, effect: Effect) -> None:
        """The engine did something."""

    def receive(self, message: Message) -> None:
        """A message that is not for the engine itself."""

    def forget(self, id: str) -> None:
        """The request was refused or cancelled."""

    def loaded_from(self, id: str) -> dict[Tier, int]:
        """Tokens of a request's load by the tier that they came from; of another engine's: none."""
        ...

    def stopped(self) -> None:
        """This life is over."""


class EventLog:
    """Numbers batches and keeps the last ones for replay, as vLLM's `ZmqEventPublisher`."""

    def __init__(self, first_seq: int = 0) -> None:
        self.next_seq = first_seq
        self._buffer: deque[tuple[Batch, int]] = deque()
        self._bytes = 0

    def publish(self, events: tuple[Event, ...], ts: float) -> Batch:
        """The next batch."""
        batch = Batch(self.next_seq, ts, events)
        self.next_seq += 1
        size = sum([len(event.tokens) for event in events if isinstance(event, BlockStored)])
        self._buffer.append((batch, size))
        self._bytes += size
        while len(self._buffer) > REPLAY_BATCHES or self._bytes > REPLAY_BYTES_MAX:
            self._bytes -= self._buffer.popleft()[1]
        return batch

    @property
    def history(self) -> list[Batch]:
        """What it still has."""
        return [batch for batch, _ in self._buffer]

    def replay(self, ask: AskReplay) -> Iterator[Replayed]:
        """The answer, message by message."""
        for batch, _ in self._buffer:
            if batch.seq >= ask.from_seq:
                yield Replayed(ask.token, batch)
        yield Replayed(ask.token, None)


class SimEngine:
    """One engine and its host's clock. ``clock_offset_s``: how far that clock is off (faults).

    ``make_model`` gives each life what it computes with; ``identity`` is what it tells of itself
    (a fingerprint) where that may change with a restart, b"" where it never does. ``make_outside``
    gives each life what there is outside of its pool. ``gateways``: who listens to its events, now.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        spec: EngineSpec,
        *,
        timeline: Timeline,
        network: Network,
        watchers: Sequence[EngineWatcher] = (),
        role: str = "combined",
        make_model: Callable[[Layout], Model] | None = None,
        make_outside: Callable[[SimEngine], Outside] | None = None,
        gateways: Sequence[str] = (GATEWAY,),
    ) -> None:
        self.name = name
        self.role = role
        self.publisher = Publisher(name)
        self.layout = layout
        self.spec = spec
        self.clock_offset_s = 0.0
        self.identity = b""
        self.asleep = False
        self.life = 0
        self.up = False
        self.past_preemptions = 0  # of lives that ended
        self.requests = 0
        self.output_tokens = 0
        self.busy_s = 0.0
        self._timeline = timeline
        self._network = network
        self._watchers = watchers
        self._make_model = make_model
        self._make_outside = make_outside
        self._gateways = gateways
        self.outside: Outside | None = None
        self._engine = self._new()
        self._events = EventLog()
        self._arrives: dict[str, Arrive] = {}
        self._clients: dict[str, str] = {}  # request → the gateway that sent it
        self._came_at: dict[str, float] = {}
        self._cached: dict[str, int] = {}  # until the request ended
        self._busy_from: float | None = None
        self._timer: Timer | None = None
        self._paused = False
        self._paused_at = 0.0
        self._lag_s = 0.0  # pauses so far: the engine's own time stands still meanwhile
        self._inbox: deque[tuple[str, Message | Input]] = deque()

    # -- the process ----------------------------------------------------------------------------

    @property
    def model(self) -> Engine:
        """The engine model of the present life (read-outs)."""
        return self._engine

    def _new(self) -> Engine:
        model = self._make_model(self.layout) if self._make_model is not None else None
        self.outside = self._make_outside(self) if self._make_outside is not None else None
        return Engine(self.layout, self.spec, model=model, connector=self.outside, leap=True)

    def cached_tokens(self, id: str) -> int:
        """What a request that is under way resumed when it was first admitted; 0 before."""
        return self._cached.get(id, 0)

    def input(self, event: Input) -> None:
        """What is outside of the pool tells the engine something; it waits through a pause."""
        if self._paused:
            self._inbox.append(("", event))
        elif self.up:
            self._handle(event)

    @property
    def history(self) -> list[Batch]:
        """Batches of the present life that it would replay."""
        return self._events.history

    @property
    def next_seq(self) -> int:
        """Number of the batch that it publishes next."""
        return self._events.next_seq

    def change(self, layout: Layout, spec: EngineSpec, identity: bytes) -> None:
        """While it is down: another model, or another configuration, under the same name."""
        assert not self.up
        self.layout, self.spec, self.identity = layout, spec, identity
        self._engine = self._new()

    def set_pace(self, pace: Pace) -> None:
        """Its machine gets faster or slower, for good: it is not told to anybody."""
        self.spec = paced(self.spec, pace)
        self.input(Retime(self.spec))

    def start(self, *, first_seq: int = 0) -> None:
        """A new process: empty cache, batches numbered from ``first_seq`` (vLLM: 0)."""
        if self.up:
            return
        self._events = EventLog(first_seq)
        self.life += 1
        self.up = True
        self._network.attach(self.name, self._receive)
        self._send(Subscribed())

    def stop(self, *, silent: bool = False) -> None:
        """The process ends, with all that it had. ``silent``: the host vanished with it, so that
        nobody is told that connections broke."""
        if not self.up:
            return
        self.up = False
        self.asleep = self._paused = False
        self._inbox.clear()
        self._arrives.clear()
        self._clients.clear()
        self._cached.clear()
        self._came_at.clear()
        self.past_preemptions += self._engine.preemptions
        if self.outside is not None:
            self.outside.stopped()
        self._engine = self._new()
        self._note_busy(False)
        self._lag_s = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._network.detach(self.name)
        if not silent:
            self._send(Lost(self.life))

    def pause(self) -> None:
        """Stand still: what arrives waits, nothing is computed or answered until `resume`."""
        if self.up and not self._paused:
            self._paused, self._paused_at = True, self._timeline.now
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def resume(self) -> None:
        """Go on as if no time had passed inside."""
        if not self._paused:
            return
        self._paused = False
        self._lag_s += self._timeline.now - self._paused_at
        self._read_inbox()
        self._arm()

    def _read_inbox(self) -> None:
        kept, self._inbox = self._inbox, deque()
        for source, message in kept:
            self._receive(source, message)

    def clear_cache(self) -> bool:
        """Drop its prefix cache, as vLLM's /reset_prefix_cache: False while blocks are in use. The
        event goes out with its next step."""
        effects = self._input(ClearCache())
        self._perform(effects)
        self._arm()
        return any(isinstance(effect, Cleared) and effect.done for effect in effects)

    def sleep(self) -> bool:
        """Drop the cache and answer nothing but looks until `wake`; False where it is at work."""
        if not self.up or self._paused or self.asleep or not self.clear_cache():
            return False
        self.asleep = True
        return True

    def wake(self) -> None:
        """Take up what came meanwhile."""
        self.asleep = False
        if not self._paused:
            self._read_inbox()

    @property
    def paused(self) -> bool:
        """Between `pause` and `resume`."""
        return self._paused

    @property
    def preemptions(self) -> int:
        """Requests that lost their blocks to others, in all lives."""
        return self.past_preemptions + self._engine.preemptions

    # -- messages -------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        """To all who listen."""
        for gateway in self._gateways:
            self._network.send(self.name, gateway, message)

    def _reply(self, gateway: str, message: Message) -> None:
        self._network.send(self.name, gateway, message)

    def _receive(self, source: str, message: Message | Input) -> None:
        if self._paused or (self.asleep and not isinstance(message, Look)):
            self._inbox.append((source, message))
            return
        match message:
            case Submit():
                self._submit(source, message)
            case Cancel(id):
                self._clients.pop(id, None)
                if self._arrives.pop(id, None) is not None:
                    self._forget(id)
                    self._handle(Abort(id))
                if self.outside is not None:
                    self.outside.forget(id)
            case AskReplay():
                for answer in self._events.replay(message):
                    self._reply(source, answer)
            case Look(number):
                requests = self._engine.running + self._engine.waiting
                layout = self.layout if self.identity else None
                pulse = Pulse(number, self.life, requests, self.asleep, layout, self.identity)
                self._reply(source, pulse)
            case (
                Loaded()
                | Hold()
                | Release()
                | HandedOff()
                | Abort()
                | ClearCache()
                | Arrive()
                | Retime()
            ):
                self._handle(message)
            case _:
                if self.outside is not None:
                    self.outside.receive(message)

    def _forget(self, id: str) -> int:
        self._came_at.pop(id, None)
        return self._cached.pop(id, 0)

    def _submit(self, source: str, message: Submit) -> None:
        arrive = Arrive(
            message.id,
            message.tokens,
            message.output_tokens,
            message.salt,
            message.adapter,
            message.hand_off,
            self._keys(message),
        )
        if self.outside is not None:
            self.outside.submitted(message)
        effects = self._input(arrive)
        rejected = next((e for e in effects if isinstance(e, Rejected)), None)
        if rejected is None:
            self.requests += 1
            self._arrives[message.id] = arrive
            self._clients[message.id] = source
            self._came_at[message.id] = self._timeline.now
            self._reply(source, Accepted(message.id, self.life))
        else:
            self._reply(source, Declined(message.id, rejected.reason, rejected.busy))
            if self.outside is not None:
                self.outside.forget(message.id)
        self._perform(effects)
        self._arm()

    def _keys(self, message: Submit) -> PromptKeys | None:
        """Where they are cheaper made here than by the engine model."""
        if message.origin is None:
            return None
        step, salt, adapter = self._engine.pool.key_step, message.salt, message.adapter
        return TraceKeys(message.origin, message.tokens, step, salt=salt, adapter=adapter)

    # -- the machine ----------------------------------------------------------------------------

    def _local_now(self) -> float:
        return self._timeline.now - self._lag_s

    def _input(self, event: Input) -> Sequence[Effect]:
        """Steps that are due end before what comes at the same time."""
        now = self._local_now()
        due = self._engine.next_deadline()
        while due is not None and due <= now:
            self._perform(self._engine.tick(due))
            due = self._engine.next_deadline()
        return self._engine.handle(event, now)

    def _handle(self, event: Input) -> None:
        self._perform(self._input(event))
        self._arm()

    def _arm(self) -> None:
        if self._paused or not self.up:
            return
        due = self._engine.next_deadline()
        self._note_busy(due is not None)
        if due is not None:
            due = max(due + self._lag_s, self._timeline.now)
        self._timer = self._timeline.rearm(self._timer, due, self._pump)

    def _note_busy(self, busy: bool) -> None:
        if busy and self._busy_from is None:
            self._busy_from = self._timeline.now
        elif not busy and self._busy_from is not None:
            self.busy_s += self._timeline.now - self._busy_from
            self._busy_from = None

    def _pump(self) -> None:
        self._timer = None
        # The due time comes back from world time with a rounding error.
        now = max(self._local_now(), self._engine.next_deadline() or 0.0)
        self._perform(self._engine.tick(now))
        self._arm()

    def _perform(self, effects: Sequence[Effect]) -> None:
        if self.outside is not None:
            for effect in effects:
                self.outside.effect(effect)
        produced: list[Produced] = []
        ended: dict[str, Usage] = {}
        for effect in effects:
            match effect:
                case Produced():
                    produced.append(effect)
                    self.output_tokens += effect.count
                    if effect.finished and self._arrives.pop(effect.id, None) is not None:
                        ended[effect.id] = Usage(self._forget(effect.id))
                case Published(events):
                    self._publish(events)
                case Admitted():
                    self._admitted(effect)
        if produced:
            self._answer(produced, ended)

    def _answer(self, produced: Sequence[Produced], ended: dict[str, Usage]) -> None:
        """To each gateway what its requests got."""
        by_client: dict[str, list[Produced]] = {}
        for each in produced:
            client = self._clients.get(each.id)
            if client is not None:  # else it was cancelled meanwhile
                by_client.setdefault(client, []).append(each)
            if each.id in ended:
                self._clients.pop(each.id, None)
        for client, theirs in by_client.items():
            over = {each.id: ended[each.id] for each in theirs if each.id in ended}
            self._reply(client, Answers(self._timeline.now, self._lag_s, tuple(theirs), over))

    def _publish(self, events: tuple[Event, ...]) -> None:
        batch = self._events.publish(events, self._timeline.now + self.clock_offset_s)
        for watcher in self._watchers:
            watcher.published(self, batch)
        self._send(Events(batch))

    def _admitted(self, effect: Admitted) -> None:
        arrive = self._arrives.get(effect.id)
        if arrive is None:
            return
        self._cached.setdefault(effect.id, effect.cached_tokens)
        waited_s = self._timeline.now - self._came_at[effect.id]
        for watcher in self._watchers:
            watcher.admitted(self, arrive, effect, waited_s)
