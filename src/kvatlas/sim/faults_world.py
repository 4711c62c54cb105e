"""A scenario at work: engines with the stub's memory, the production core, what goes wrong.

The injector speaks only through what is public of the simulated actors; it keeps the times at
which each engine could not be expected to serve (`Outages`), which is how `checkers` tell an error
that is explained from one that is not.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvatlas.core.admission import Rules
from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Dispatcher, Tap
from kvatlas.core.keys import Fingerprint, Keyring
from kvatlas.core.layout import Layout
from kvatlas.core.router import Router
from kvatlas.sim.ahead import SimAhead
from kvatlas.sim.engines import GATEWAY, EngineWatcher, SimEngine
from kvatlas.sim.faults import Ask, Fault, Member, Scenario
from kvatlas.sim.faults_loop import Loop
from kvatlas.sim.faults_nodes import Nodes
from kvatlas.sim.gateway import Gateway, GatewaySpec, GatewayWatcher, Inquiry, Outcome
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
from kvatlas.sim.tier_node import SimNode
from kvatlas.sim.timeline import Timeline
from kvatlas.workload.protocol import Model

LATENCY_S = 0.001
_APART_S = 1e-6  # between messages that keep their order: more than a sum of times can be off
_FEED = (Events, Replayed, Subscribed)
_NEW_CONNECTIONS = (Submit, Look, AskReplay, Pulse)


class Watcher(EngineWatcher, GatewayWatcher, Protocol):
    """Whoever watches all of it."""


class Outages:
    """When which engine could not be expected to serve; "" stands for all of them."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[float, float]]] = {}

    def add(self, engine: str, start: float, end: float) -> None:
        """``engine`` was out from ``start`` to ``end``."""
        self._spans.setdefault(engine, []).append((start, end))

    def touched(self, engine: str, start: float, end: float) -> bool:
        """Whether ``engine`` was out at any time between ``start`` and ``end``."""
        spans = (*self._spans.get(engine, ()), *self._spans.get("", ()))
        return any(first <= end and start <= last for first, last in spans)


class _FaultyNetwork(Network):
    """Hands what reaches the gateway to its loop, and shows it to ``saw``."""

    def __init__(self, timeline: Timeline, loop: Loop, saw: Callable[[str, Message], None]) -> None:
        super().__init__(timeline, latency_s=LATENCY_S)
        self._loop = loop
        self._saw = saw

    def attach(self, name: str, receive: Receiver) -> None:
        if name != GATEWAY:
            super().attach(name, receive)
            return

        def take(source: str, message: Message) -> None:
            self._saw(source, message)
            receive(source, message)

        super().attach(name, lambda source, message: self._loop.call(take, source, message))


class Wire:
    """What becomes of messages: cut off, held up, lost, doubled, overtaken."""

    def __init__(self, timeline: Timeline, network: Network, draw: random.Random) -> None:
        self._timeline = timeline
        self._network = network
        self._draw = draw
        self._cut: dict[str, float] = {}
        self._slow: dict[str, float] = {}  # events held up until then
        self._chances: dict[tuple[str, str], tuple[float, float]] = {}  # (kind, engine)
        self._last: dict[tuple[str, str], float] = {}  # held back until then, in order
        self.applied_of: Callable[[str], int] = lambda engine: -1  # number of the last one applied
        self._known: dict[str, int] = {}  # that number when the present replay was asked for
        self._answers: dict[str, int] = {}  # the replay that an engine answers: its token
        self._latest: dict[str, float] = {}  # when the last batch of that replay arrives
        network.interpose(self._pass)

    def cut(self, engine: str, seconds: float) -> None:
        """Nothing passes; what was said over standing connections comes when it is over."""
        until = self._timeline.now + seconds
        self._cut[engine] = max(self._cut.get(engine, 0.0), until)
        self._timeline.at(until, self._reconnected, engine)

    def hold_events(self, engine: str, seconds: float) -> None:
        """Events arrive late, in order."""
        until = self._timeline.now + seconds
        self._slow[engine] = max(self._slow.get(engine, 0.0), until)

    def chance(self, kind: str, engine: str, seconds: float, share: float) -> None:
        """Lose, double or delay that ``share`` of the events."""
        self._chances[kind, engine] = (self._timeline.now + seconds, share)

    def is_cut(self, engine: str) -> bool:
        """Is it cut off now?"""
        return self._timeline.now < self._cut.get(engine, 0.0)

    def _reconnected(self, engine: str) -> None:
        if not self.is_cut(engine):
            self._network.send(engine, GATEWAY, Subscribed())

    def _pass(self, envelope: Envelope) -> Sequence[Envelope]:
        now = self._timeline.now
        engine = envelope.destination if envelope.source == GATEWAY else envelope.source
        message = envelope.message
        until = self._cut.get(engine, 0.0)
        if now < until:
            if isinstance(message, (*_FEED, *_NEW_CONNECTIONS)):
                return ()
            return self._held(envelope, until)
        if isinstance(message, AskReplay):
            self._known[engine] = self.applied_of(engine)
        if isinstance(message, _FEED):
            return self._feed(envelope, engine)
        return self._held(envelope, 0.0)

    def _held(self, envelope: Envelope, until: float) -> Sequence[Envelope]:
        """Not before ``until``, and never before what was said earlier in this direction."""
        return (self._delayed(envelope, until, (envelope.source, envelope.destination)),)

    def _delayed(self, envelope: Envelope, until: float, line: tuple[str, str]) -> Envelope:
        now = self._timeline.now
        arrival = max(now + envelope.delay_s, until, self._last.get(line, 0.0) + _APART_S)
        self._last[line] = arrival
        return _after(envelope, max(0.0, arrival - now))

    def _feed(self, envelope: Envelope, engine: str) -> Sequence[Envelope]:
        """Batches of events are on their own. A replay comes over one connection: what it begins
        with arrives (nothing is queued before it), so does the batch by which the sequencer knows
        the engine again, and its end is not heard before the rest."""
        message, draw = envelope.message, self._draw
        replay = message if isinstance(message, Replayed) else None
        line = (engine, "events" if replay is None else "replay")
        first = replay is not None and (
            self._answers.get(engine) != replay.token
            or (replay.batch is not None and replay.batch.seq == self._known.get(engine))
        )
        if replay is not None and self._answers.get(engine) != replay.token:
            self._answers[engine] = replay.token
            self._latest[engine] = 0.0
        ordered = self._delayed(envelope, self._slow.get(engine, 0.0), line)
        if replay is not None and replay.batch is None:
            late = self._latest[engine] + _APART_S - self._timeline.now
            return (_after(ordered, max(ordered.delay_s, late)),)
        if first or isinstance(message, Subscribed):
            self._came(replay, engine, ordered)
            return (ordered,)
        if self._happens("loss", engine):
            return ()
        if self._happens("reorder", engine):
            ordered = _after(
                envelope, envelope.delay_s + draw.choice((0.01, 0.3, 3.0)) * draw.random()
            )
        self._came(replay, engine, ordered)
        if not self._happens("duplicate", engine):
            return (ordered,)
        return ordered, _after(
            ordered, ordered.delay_s + draw.choice((0.0, 0.2, 20.0)) * draw.random()
        )

    def _came(self, replay: Replayed | None, engine: str, envelope: Envelope) -> None:
        """When a part of the present replay arrives: its end waits for that."""
        if replay is not None:
            arrival = self._timeline.now + envelope.delay_s
            self._latest[engine] = max(self._latest[engine], arrival)

    def _happens(self, kind: str, engine: str) -> bool:
        until, share = self._chances.get((kind, engine), (0.0, 0.0))
        return self._timeline.now < until and self._draw.random() < share


def _after(envelope: Envelope, delay_s: float) -> Envelope:
    return Envelope(envelope.source, envelope.destination, envelope.message, delay_s)


class FaultWorld:
    """One scenario: build, `run` to a time, ask. ``make_model`` gives an engine its memory."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        make_model: Callable[[str, Layout, bytes], Model],
        saw: Callable[[str, Message], None],
        watcher: Watcher,
        note: Callable[[str], None],
        tap: Tap,
    ) -> None:
        self.scenario = scenario
        self.timeline = Timeline()
        self.loop = Loop(self.timeline)
        self.network = _FaultyNetwork(self.timeline, self.loop, saw)
        self.wire = Wire(
            self.timeline, self.network, random.Random(f"kvatlas.wire/{scenario.seed}")
        )
        self.outages = Outages()
        self.injected: Counter[str] = Counter()
        self.left: set[str] = set()  # requests whose clients went away
        self._note = note
        self.ends: Counter[str] = Counter()  # how often each request's client was told
        secret = hashlib.sha256(b"kvatlas.faults\0%d" % scenario.seed).digest()
        self.keyring = Keyring(secret)
        self.dispatcher = Dispatcher(
            Directory(self.keyring, scenario.directory),
            Router(),
            self.keyring,
            rules=Rules(in_flight_max=scenario.in_flight_max),
            tap=tap,
        )
        self.gateway = Gateway(
            self.loop,
            self.network,
            self.dispatcher,
            spec=GatewaySpec(engine_idle_timeout_s=scenario.silence_s),
            watchers=(watcher,),
            feed_limits=scenario.feed,
        )
        self.wire.applied_of = lambda name: (self.gateway.feed(name).sequencer.next_seq or 0) - 1
        self._identities = {m.name: fingerprint(m.layout, m.identity) for m in scenario.members}
        self.nodes: Nodes | None = None
        self.ahead: SimAhead | None = None
        if scenario.tiers is not None and scenario.tiers.ahead.on:
            params = scenario.tiers.ahead
            self.ahead = SimAhead(params, self.dispatcher, self.loop, self.network)
            self.gateway.pulled = self.ahead.pulled
        if scenario.tiers is not None:
            self.nodes = Nodes(
                scenario.tiers,
                scenario.seed,
                timeline=self.timeline,
                network=self.network,
                gateway=self.gateway,
                keyring=self.keyring,
                fingerprint=lambda engine: self._identities[engine.name],
            )
        self.engines: dict[str, SimEngine] = {}
        for member in scenario.members:
            self._add(member, make_model, watcher)

    def _add(
        self, member: Member, make_model: Callable[[str, Layout, bytes], Model], watcher: Watcher
    ) -> None:
        name = member.name
        engine = SimEngine(
            name,
            member.layout,
            member.spec,
            timeline=self.timeline,
            network=self.network,
            watchers=(watcher,),
            make_model=lambda layout: make_model(name, layout, self._identities[name]),
            make_outside=self.nodes.tiers.side if self.nodes is not None else None,
        )
        engine.identity = self._identities[name]
        self.engines[name] = engine
        self.gateway.add_engine(engine.publisher, member.layout, engine.identity)

    # -- time -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start everything and put the requests and faults on the timeline."""
        for engine in self.engines.values():
            engine.start()
        self.gateway.start()
        for ask in self.scenario.asks:
            self.timeline.at(ask.at, self._ask, ask)
        for fault in self.scenario.faults:
            self.timeline.at(fault.at, self.inject, fault)
        self.timeline.at(self.scenario.heal_at, self.heal)

    def run(self, until: float) -> None:
        """Let time pass."""
        timeline = self.timeline
        while (due := timeline.next_at()) is not None and due <= until:
            timeline.step()

    def _ask(self, ask: Ask) -> None:
        self.loop.call(self.ask, ask)

    def ask(self, ask: Ask) -> None:
        """One request, now."""
        inquiry = Inquiry(ask.id, ask.tokens, ask.output_tokens, ask.scope, ask.adapter)
        self.gateway.ask(inquiry, self._told)
        if ask.leave_after_s >= 0:
            self.timeline.after(ask.leave_after_s, self.loop.call, self.leave, ask.id)

    def leave(self, id: str) -> None:
        """The client of this request goes away, if it still waits."""
        self.left.add(id)
        self.gateway.leave(id)

    def _told(self, outcome: Outcome) -> None:
        self.ends[outcome.id] += 1

    # -- faults ---------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Let it happen now, where it can."""
        engine = self.engines.get(fault.target)
        node = self.nodes.by_name(fault.target) if self.nodes is not None else None
        if fault.strikes_s >= 0.0:
            self._put_off(fault)
            return
        if node is not None:
            done = self._to_node(fault, node)
        else:
            done = self._to_world(fault) if engine is None else self._to_engine(fault, engine)
        self.injected[fault.kind] += done
        self._note(f"FAULT {fault.text()[12:]}" + ("" if done else ", in vain"))

    def _put_off(self, fault: Fault) -> None:
        """Until something begins on the node that it is about, if it is over before all is healed
        then."""
        assert self.nodes is not None

        def strike() -> None:
            if self.timeline.now + fault.duration_s < self.scenario.heal_at - 0.5:
                self.inject(msgspec.structs.replace(fault, strikes_s=-1.0))

        self.nodes.when_busy(self.nodes.of(fault.target), fault.strikes_s, strike)

    def _to_world(self, fault: Fault) -> bool:
        now = self.timeline.now
        match fault.kind:
            case "stall":
                self.loop.stall(fault.duration_s)
                self.outages.add("", now, now + fault.duration_s)
            case "jump":
                self.loop.jump(fault.amount)
                self.outages.add("", now, now)
            case "abort":
                for ask in self.scenario.asks:
                    self.loop.call(self.leave, ask.id)
        return True

    def _to_node(self, fault: Fault, node: SimNode) -> bool:
        assert self.nodes is not None
        name = node.publisher.worker
        match fault.kind:
            case "reconnect":
                node.connect()
            case "partition":
                self.wire.cut(name, fault.duration_s)
                self.timeline.after(fault.duration_s, node.connect)
            case "agent_stall":
                self.wire.hold_events(name, fault.duration_s)
            case "loss" | "reorder" | "duplicate" as kind:
                self.wire.chance(kind, name, fault.duration_s, fault.amount)
            case kind:
                done = self.nodes.inject(fault, node)
                if done and kind == "node_restart" and fault.amount:
                    for each in node.engines:
                        self._die(fault, self.engines[each])
                return done
        return True

    def _to_engine(self, fault: Fault, engine: SimEngine) -> bool:
        now, name = self.timeline.now, engine.name
        match fault.kind:
            case "crash" | "vanish" | "renumber" | "swap":
                return self._die(fault, engine)
            case "pause":
                if not engine.up or engine.paused:
                    return False
                engine.pause()
                self.timeline.after(fault.duration_s, engine.resume)
                self.outages.add(name, now, now + fault.duration_s)
            case "sleep":
                if not engine.sleep():
                    return False
                self.timeline.after(fault.duration_s, engine.wake)
                self.outages.add(name, now, now + fault.duration_s)
            case "reset":
                return engine.up and not engine.paused and engine.clear_cache()
            case "clock":
                engine.clock_offset_s += fault.amount
            case "reconnect":
                if engine.up:
                    self.network.send(name, GATEWAY, Subscribed())
            case "partition":
                self.wire.cut(name, fault.duration_s)
                self.outages.add(name, now, now + fault.duration_s)
            case "feed_stall":
                self.wire.hold_events(name, fault.duration_s)
            case kind:
                self.wire.chance(kind, name, fault.duration_s, fault.amount)
        return True

    def _die(self, fault: Fault, engine: SimEngine) -> bool:
        if not engine.up:
            return False
        now = self.timeline.now
        follows = engine.next_seq if fault.kind == "renumber" else 0
        engine.stop(silent=fault.kind == "vanish")
        if fault.kind == "swap":
            member = next(m for m in self.scenario.members if m.name == engine.name)
            layout, spec, identity = member.other
            self._identities[engine.name] = fingerprint(layout, identity)
            engine.change(layout, spec, self._identities[engine.name])
        self.outages.add(engine.name, now, now + fault.duration_s)
        self.timeline.after(fault.duration_s, self._start, engine, follows)
        return True

    def _start(self, engine: SimEngine, first_seq: int) -> None:
        engine.start(first_seq=first_seq)

    def heal(self) -> None:
        """Nothing is wrong any more (faults that last end by themselves before)."""
        for engine in self.engines.values():
            engine.resume()
            if engine.asleep:
                engine.wake()
            engine.start()
        if self.nodes is not None:
            self.nodes.heal()

    def restart_all(self) -> None:
        """New processes everywhere, and empty tiers: nobody holds anything."""
        if self.nodes is not None:
            self.nodes.lose_all()
        for engine in self.engines.values():
            engine.stop()
            engine.start()

    def probe(self, tokens: Callable[[SimEngine], bytes]) -> None:
        """Somebody else uses each engine once: it has something to say then. So do agents."""
        if self.nodes is not None:
            self.nodes.breathe()
        for name, engine in self.engines.items():
            submit = Submit(f"probe.{name}", tokens(engine), 1)
            self.network.send(GATEWAY, name, submit)


def fingerprint(layout: Layout, identity: bytes) -> bytes:
    """Two engines may share only where layout and weights agree."""
    return Fingerprint(
        model=layout.model,
        weights_digest=identity.decode(),
        engine=layout.engine,
        layout_digest=layout.digest(),
        block_tokens=layout.grid_tokens,
    ).digest()
