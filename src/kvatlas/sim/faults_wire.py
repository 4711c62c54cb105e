"""What becomes of messages between engines or agents and gateways, where something goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvatlas.sim.engines import GATEWAY
from kvatlas.sim.faults_loop import Loop
from kvatlas.sim.messages import (
    AskReplay,
    Events,
    Look,
    Message,
    Pulse,
    Replayed,
    Submit,
    Subscribed,
)
from kvatlas.sim.network import Envelope, Network, Receiver
from kvatlas.sim.timeline import Timeline

LATENCY_S = 0.001
_APART_S = 1e-6  # between messages that keep their order: more than a sum of times can be off
_FEED = (Events, Replayed, Subscribed)
_NEW_CONNECTIONS = (Submit, Look, AskReplay, Pulse)
_Line = tuple[str, str]  # engine or agent, and the name of a gateway's process

Saw = Callable[[str, Message], None]


def host_of(gateway: str) -> str:
    """Where a gateway's process of that name runs: each of its lives has a name of its own."""
    return gateway.partition("~")[0]


class FaultyNetwork(Network):
    """Hands what reaches a gateway to its loop, and shows it to who watches it."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline, latency_s=LATENCY_S)
        self._processes: dict[str, tuple[Loop, Saw]] = {}

    def process(self, name: str, loop: Loop, saw: Saw) -> None:
        """A gateway of that name is going to listen."""
        self._processes[name] = loop, saw

    def attach(self, name: str, receive: Receiver) -> None:
        """As `Network.attach`."""
        if name not in self._processes:
            super().attach(name, receive)
            return
        loop, saw = self._processes[name]

        def take(source: str, message: Message) -> None:
            saw(source, message)
            receive(source, message)

        super().attach(name, lambda source, message: loop.call(take, source, message))


class Wire:
    """What becomes of messages: cut off, held up, lost, doubled, overtaken."""

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        draw: random.Random,
        gateways: Sequence[str] = (GATEWAY,),
    ) -> None:
        self._timeline = timeline
        self._network = network
        self._draw = draw
        self._gateways = gateways  # who listens, now
        self._cut: dict[tuple[str, str], float] = {}  # (engine, gateway's host, or "" for all)
        self._slow: dict[str, float] = {}  # events held up until then
        self._chances: dict[tuple[str, str], tuple[float, float]] = {}  # (kind, engine)
        self._last: dict[tuple[str, ...], float] = {}  # held back until then, in order
        self.applied_of: Callable[[str, str], int] = lambda engine, gateway: -1  # the last one
        self._known: dict[_Line, int] = {}  # that number when the present replay was asked for
        self._answers: dict[_Line, int] = {}  # the replay that an engine answers: its token
        self._latest: dict[_Line, float] = {}  # when the last batch of that replay arrives
        network.interpose(self._pass)

    def cut(self, engine: str, seconds: float, host: str = "") -> None:
        """Nothing passes between it and the gateway of that host, or all; what was said over
        standing connections comes when it is over."""
        until = self._timeline.now + seconds
        self._cut[engine, host] = max(self._cut.get((engine, host), 0.0), until)
        self._timeline.at(until, self._reconnected, engine, host)

    def hold_events(self, engine: str, seconds: float) -> None:
        """Events arrive late, in order."""
        until = self._timeline.now + seconds
        self._slow[engine] = max(self._slow.get(engine, 0.0), until)

    def chance(self, kind: str, engine: str, seconds: float, share: float) -> None:
        """Lose, double or delay that ``share`` of the events."""
        self._chances[kind, engine] = (self._timeline.now + seconds, share)

    def _cut_until(self, line: _Line) -> float:
        engine, gateway = line
        cut = self._cut
        return max(cut.get((engine, ""), 0.0), cut.get((engine, host_of(gateway)), 0.0))

    def _reconnected(self, engine: str, host: str) -> None:
        for gateway in self._gateways:
            there = host in ("", host_of(gateway))
            if there and self._timeline.now >= self._cut_until((engine, gateway)):
                self._network.send(engine, gateway, Subscribed())

    def _pass(self, envelope: Envelope) -> Sequence[Envelope]:
        now = self._timeline.now
        line = envelope.source, envelope.destination
        if envelope.source.startswith(GATEWAY):
            line = envelope.destination, envelope.source
        message = envelope.message
        until = self._cut_until(line) if self._cut else 0.0
        if now < until:
            if isinstance(message, (*_FEED, *_NEW_CONNECTIONS)):
                return ()
            return self._held(envelope, until)
        if isinstance(message, AskReplay):
            self._known[line] = self.applied_of(*line)
        if isinstance(message, _FEED):
            return self._feed(envelope, line)
        return self._held(envelope, 0.0)

    def _held(self, envelope: Envelope, until: float) -> Sequence[Envelope]:
        """Not before ``until``, and never before what was said earlier in this direction."""
        return (self._delayed(envelope, until, (envelope.source, envelope.destination)),)

    def _delayed(self, envelope: Envelope, until: float, line: tuple[str, ...]) -> Envelope:
        now = self._timeline.now
        arrival = max(now + envelope.delay_s, until, self._last.get(line, 0.0) + _APART_S)
        self._last[line] = arrival
        return _after(envelope, max(0.0, arrival - now))

    def _feed(self, envelope: Envelope, line: _Line) -> Sequence[Envelope]:
        """Batches of events are on their own. A replay comes over one connection: what it begins
        with arrives (nothing is queued before it), so does the batch by which the sequencer knows
        the engine again, and its end is not heard before the rest."""
        message, draw, engine = envelope.message, self._draw, line[0]
        replay = message if isinstance(message, Replayed) else None
        order = (*line, "events" if replay is None else "replay")
        first = replay is not None and (
            self._answers.get(line) != replay.token
            or (replay.batch is not None and replay.batch.seq == self._known.get(line))
        )
        if replay is not None and self._answers.get(line) != replay.token:
            self._answers[line] = replay.token
            self._latest[line] = 0.0
        ordered = self._delayed(envelope, self._slow.get(engine, 0.0), order)
        if replay is not None and replay.batch is None:
            late = self._latest[line] + _APART_S - self._timeline.now
            return (_after(ordered, max(ordered.delay_s, late)),)
        if first or isinstance(message, Subscribed):
            self._came(replay, line, ordered)
            return (ordered,)
        if self._happens("loss", engine):
            return ()
        if self._happens("reorder", engine):
            ordered = _after(
                envelope, envelope.delay_s + draw.choice((0.01, 0.3, 3.0)) * draw.random()
            )
        self._came(replay, line, ordered)
        if not self._happens("duplicate", engine):
            return (ordered,)
        return ordered, _after(
            ordered, ordered.delay_s + draw.choice((0.0, 0.2, 20.0)) * draw.random()
        )

    def _came(self, replay: Replayed | None, line: _Line, envelope: Envelope) -> None:
        """When a part of the present replay arrives: its end waits for that."""
        if replay is not None:
            arrival = self._timeline.now + envelope.delay_s
            self._latest[line] = max(self._latest[line], arrival)

    def _happens(self, kind: str, engine: str) -> bool:
        until, share = self._chances.get((kind, engine), (0.0, 0.0))
        return self._timeline.now < until and self._draw.random() < share


def _after(envelope: Envelope, delay_s: float) -> Envelope:
    return Envelope(envelope.source, envelope.destination, envelope.message, delay_s)
