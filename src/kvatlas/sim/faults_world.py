"""A scenario at work: engines with the stub's memory, the production core, what goes wrong.

The injector speaks only through what is public of the simulated actors; it keeps the times at
which each engine could not be expected to serve (`Outages`), which is how `checkers` tell an error
that is explained from one that is not.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvatlas.core.keys import Fingerprint, Keyring
from kvatlas.core.layout import Layout
from kvatlas.sim.engines import EngineWatcher, SimEngine
from kvatlas.sim.faults import REGISTER_KINDS, Ask, Fault, Member, Scenario
from kvatlas.sim.faults_cluster import hosts_of
from kvatlas.sim.faults_members import Members
from kvatlas.sim.faults_nodes import Nodes
from kvatlas.sim.faults_replicas import Clients, Replica, View
from kvatlas.sim.faults_wire import FaultyNetwork, Wire
from kvatlas.sim.messages import Submit, Subscribed
from kvatlas.sim.tier_node import SimNode
from kvatlas.sim.timeline import Timeline
from kvatlas.workload.protocol import Model


class Judge(EngineWatcher, Protocol):
    """Whoever watches all of it."""

    def make_model(self, engine: str, layout: Layout, identity: bytes) -> Model:
        """The memory of one life of an engine."""
        ...

    def view(self, replica: Replica) -> View:
        """Who judges a new life of a gateway."""
        ...

    def will_ask(self, ask: Ask) -> None:
        """A request that is going to be sent."""

    def note(self, what: str) -> None:
        """Something happened, in words."""


class Outages:
    """When which engine could not be expected to serve, or a gateway's host to ask it; with both,
    "engine@host": the one by way of the other."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[float, float]]] = {}

    def add(self, who: str, start: float, end: float) -> None:
        """``who`` was out from ``start`` to ``end``."""
        self._spans.setdefault(who, []).append((start, end))

    def touched(self, engine: str, host: str, start: float, end: float) -> bool:
        """Whether ``engine`` was out for that gateway at any time between ``start`` and ``end``."""
        spans = [s for who in (engine, host, f"{engine}@{host}") for s in self._spans.get(who, ())]
        return any(first <= end and start <= last for first, last in spans)


class FaultWorld:
    """One scenario: build, `run` to a time, ask. ``judge`` watches, and gives engines a memory."""

    def __init__(self, scenario: Scenario, judge: Judge) -> None:
        self.scenario = scenario
        self.judge = judge
        self.timeline = Timeline()
        self.network = FaultyNetwork(self.timeline)
        self.listening: list[str] = []  # gateways that are up
        draw = random.Random(f"kvatlas.wire/{scenario.seed}")
        self.wire = Wire(self.timeline, self.network, draw, self.listening)
        self.wire.applied_of = self._applied
        self.outages = Outages()
        self.injected: Counter[str] = Counter()
        self.clients = Clients(self, judge.will_ask)
        self.keyring = Keyring(hashlib.sha256(b"kvatlas.faults\0%d" % scenario.seed).digest())
        self._identities = {m.name: fingerprint(m.layout, m.identity) for m in scenario.members}
        self.nodes: Nodes | None = None
        self.engines: dict[str, SimEngine] = {}
        self.replicas = [Replica(self, host) for host in hosts_of(scenario)]
        if scenario.tiers is not None:
            self.nodes = Nodes(
                scenario.tiers,
                scenario.seed,
                timeline=self.timeline,
                network=self.network,
                gateways=self.listening,
                keyring=self.keyring,
                fingerprint=lambda engine: self._identities[engine.name],
            )
        for member in scenario.members:
            self._add(member)
        for replica in self.replicas:
            replica.meet()
        self.members: Members | None = None
        if scenario.register is not None:
            self.members = Members(self, scenario.register)

    def _add(self, member: Member) -> None:
        name = member.name
        engine = SimEngine(
            name,
            member.layout,
            member.spec,
            timeline=self.timeline,
            network=self.network,
            watchers=(self.judge,),
            make_model=lambda layout: self.judge.make_model(name, layout, self._identities[name]),
            make_outside=self.nodes.tiers.side if self.nodes is not None else None,
            gateways=self.listening,
        )
        engine.identity = self._identities[name]
        self.engines[name] = engine

    def _applied(self, engine: str, gateway: str) -> int:
        """Number of the last batch that a gateway has applied."""
        replica = next((each for each in self.replicas if each.name == gateway), None)
        if replica is None or not replica.up:
            return -1
        return (replica.gateway.feed(engine).sequencer.next_seq or 0) - 1

    # -- time -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start everything and put the requests and faults on the timeline."""
        for engine in self.engines.values():
            engine.start()
        for replica in self.replicas:
            replica.gateway.start()
        if self.members is not None:
            self.members.begin()
        for ask in self.scenario.asks:
            self.timeline.at(ask.at, self.clients.ask, ask)
        for fault in self.scenario.faults:
            self.timeline.at(fault.at, self.inject, fault)
        self.timeline.at(self.scenario.heal_at, self.heal)

    def run(self, until: float) -> None:
        """Let time pass."""
        timeline = self.timeline
        while (due := timeline.next_at()) is not None and due <= until:
            timeline.step()

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return sum(replica.gateway.in_flight for replica in self.replicas if replica.up)

    # -- faults ---------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Let it happen now, where it can."""
        if fault.strikes_s >= 0.0:
            self._put_off(fault)
            return
        done = self._inject(fault)
        self.injected[fault.kind] += done
        self.judge.note(f"FAULT {fault.text()[12:]}" + ("" if done else ", in vain"))

    def _inject(self, fault: Fault) -> bool:
        if fault.kind in REGISTER_KINDS:
            return self.members is not None and self.members.inject(fault)
        node = self.nodes.by_name(fault.target) if self.nodes is not None else None
        if node is not None:
            return self._to_node(fault, node)
        engine = self.engines.get(fault.target)
        if engine is not None:
            return self._to_engine(fault, engine)
        if fault.kind == "abort":
            for ask in self.scenario.asks:
                self.clients.leave(ask.id)
            return True
        if fault.kind == "burst":  # its requests are in the plan
            return True
        if fault.kind == "split":
            return self._split(fault)
        return self._to_gateway(fault, self._replica(fault.target))

    def _replica(self, host: str) -> Replica:
        """The gateway of that host; "" is the first."""
        return next(each for each in self.replicas if host in ("", each.host))

    def _put_off(self, fault: Fault) -> None:
        """Until something begins on the node that it is about, if it is over before all is healed
        then."""
        assert self.nodes is not None

        def strike() -> None:
            if self.timeline.now + fault.duration_s < self.scenario.heal_at - 0.5:
                self.inject(msgspec.structs.replace(fault, strikes_s=-1.0))

        self.nodes.when_busy(self.nodes.of(fault.target), fault.strikes_s, strike)

    def _to_gateway(self, fault: Fault, replica: Replica) -> bool:
        now = self.timeline.now
        if not replica.up:
            return False
        match fault.kind:
            case "stall":
                replica.loop.stall(fault.duration_s)
                self.outages.add(replica.host, now, now + fault.duration_s)
            case "jump":
                replica.jump(fault.amount)
                self.outages.add(replica.host, now, now)
            case "gateway_crash":
                replica.stop()
                self.clients.lost(replica)
                self.timeline.after(fault.duration_s, replica.start, fault.amount)
        if self.members is not None:
            self.members.disturb(replica.host, fault.duration_s)
        return True

    def _split(self, fault: Fault) -> bool:
        """One gateway and one engine or agent."""
        now, (who, host) = self.timeline.now, fault.target.split("@")
        self.wire.cut(who, fault.duration_s, host)
        self.outages.add(fault.target, now, now + fault.duration_s)
        node = self.nodes.by_name(who) if self.nodes is not None else None
        if node is not None:
            self.timeline.after(fault.duration_s, node.connect)
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
                for gateway in self.listening if engine.up else ():
                    self.network.send(name, gateway, Subscribed())
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
        if self.members is not None:
            self.members.heal()
        for replica in self.replicas:
            replica.start()
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
            self.network.send(self.listening[0], name, submit)


def fingerprint(layout: Layout, identity: bytes) -> bytes:
    """Two engines may share only where layout and weights agree."""
    return Fingerprint(
        model=layout.model,
        weights_digest=identity.decode(),
        engine=layout.engine,
        layout_digest=layout.digest(),
        block_tokens=layout.grid_tokens,
    ).digest()
