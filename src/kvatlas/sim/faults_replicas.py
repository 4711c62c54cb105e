"""Gateways of a scenario: processes that may end and begin anew, and clients that go to any.

All hear all engines and agents, each over connections of its own. Each life of one has a name of
its own, so that what was on its way to the last one reaches nobody.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvatlas.core.admission import Rules
from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Dispatcher, Input
from kvatlas.core.records import Publisher
from kvatlas.core.router import Decision, Router
from kvatlas.sim.ahead import SimAhead
from kvatlas.sim.checkers_truth import Run
from kvatlas.sim.faults import Ask
from kvatlas.sim.faults_loop import Loop
from kvatlas.sim.faults_warm import snapshot, take
from kvatlas.sim.gateway import Gateway, GatewaySpec, GatewayWatcher, Inquiry, Outcome
from kvatlas.sim.messages import Cancel, Message, Subscribed

if TYPE_CHECKING:
    from kvatlas.sim.faults_members import Members
    from kvatlas.sim.faults_world import FaultWorld

BROKEN_SHARE = 0.3  # of the snapshots
TRIES_MAX = 8  # of one client, each at another process


class View(GatewayWatcher, Protocol):
    """Who judges one life of one gateway."""

    def saw(self, source: str, message: Message) -> None:
        """A message reaches it."""

    def tap(self, now: float, event: Input, answered: Decision | None) -> None:
        """See `kvatlas.core.dispatch.Tap`."""

    def runs(self) -> dict[Publisher, Run]:
        """What was applied so far, by publisher, in copy."""
        ...

    def took(self, runs: Mapping[Publisher, Run]) -> None:
        """What a peer had applied when it told it counts here now."""


class Replica:
    """The host of one gateway, and the process on it."""

    loop: Loop
    dispatcher: Dispatcher
    gateway: Gateway
    ahead: SimAhead | None
    view: View

    def __init__(self, world: FaultWorld, host: str) -> None:
        self.host = host
        self.life = 0
        self.up = False
        self.warm = False  # did the present life begin to take up what a peer knew?
        self._jumped_s = 0.0
        self._draw = random.Random(f"kvatlas.warm/{world.scenario.seed}/{host}")
        self.plan = world.scenario
        self._world = world
        self._make()

    @property
    def name(self) -> str:
        """Of the present process, for whoever sends messages."""
        return self.host if self.life == 1 else f"{self.host}~{self.life}"

    def _make(self) -> None:
        """A new process that knows nobody yet."""
        world, plan = self._world, self.plan
        self.life += 1
        self.up, self.warm = True, False
        self.loop = Loop(world.timeline)
        self.loop.jump(self._jumped_s)
        self.view = view = world.judge.view(self)
        directory = Directory(world.keyring, plan.directory)
        rules = Rules(in_flight_max=plan.in_flight_max)
        ring = world.keyring
        self.dispatcher = Dispatcher(directory, Router(), ring, rules=rules, tap=view.tap)
        world.network.process(self.name, self.loop, view.saw)
        self.gateway = Gateway(
            self.loop,
            world.network,
            self.dispatcher,
            spec=GatewaySpec(engine_idle_timeout_s=plan.silence_s),
            watchers=(view,),
            feed_limits=plan.feed,
            name=self.name,
        )
        self.ahead = None
        if plan.tiers is not None and plan.tiers.ahead.on:
            params = plan.tiers.ahead
            ahead = SimAhead(params, self.dispatcher, self.loop, world.network, self.name)
            self.ahead, self.gateway.pulled = ahead, ahead.pulled
        world.listening.append(self.name)

    def meet(self) -> None:
        """Make agents and engines known to it."""
        world = self._world
        for settled in world.nodes.settled if world.nodes is not None else ():
            self.gateway.add_agent(settled)
        for engine in world.engines.values():
            self.gateway.add_engine(engine.publisher, engine.layout, engine.identity)

    def start(self, warm_s: float = 0.0) -> None:
        """A new process, which knows what engines tell it from now on; and, where ``warm_s`` is
        more than 0, what a peer knows now, so much later."""
        if self.up:
            return
        self._make()
        self.meet()
        world = self._world
        for node in world.nodes or ():
            node.connect_to(self.name)
        for name, engine in world.engines.items():
            if engine.up:
                world.network.send(name, self.name, Subscribed())
        self.gateway.start()
        if world.members is not None:
            self.join(world.members)
        peers = [each for each in world.replicas if each is not self and each.loop.moves]
        if warm_s and peers:
            self._ask(self._draw.choice(peers), warm_s)

    def _ask(self, peer: Replica, warm_s: float) -> None:
        """For all that a peer knows; now and then it breaks off."""
        told, runs = snapshot(peer.gateway, self._world.keyring), peer.view.runs()
        if self._draw.random() < BROKEN_SHARE:
            told = told[: self._draw.randrange(len(told))]
        self.loop.at(self.loop.now + warm_s, self._take, told, runs)

    def _take(self, told: bytes, runs: dict[Publisher, Run]) -> None:
        self.warm = True
        taken = take(self.gateway, self._world.keyring, told)
        if taken is not None:
            self.view.took({publisher: runs[publisher] for publisher in taken.places})

    def join(self, members: Members) -> None:
        """It is one of several from now on, and orders what only one may where it leads."""
        member = members.join(self.host, "gateway", self.loop)
        if self.ahead is not None:
            self.ahead.leads = lambda: member.leads() > 0

    def jump(self, seconds: float) -> None:
        """The steady clock of its host jumps."""
        self._jumped_s += seconds
        self.loop.jump(seconds)

    def stop(self) -> None:
        """The process is killed: its connections break."""
        world = self._world
        self.up = False
        world.listening.remove(self.name)
        world.network.detach(self.name)
        self.loop.end()
        if world.members is not None:
            world.members.gone(self.host)
        for flight in self.gateway.flights():
            if flight.target:
                world.network.send(self.name, flight.target, Cancel(flight.inquiry.id))


class Clients:
    """Whoever asks. One whose gateway dies before the first byte of an answer asks another, as a
    load balancer does; later it is told that the answer broke off."""

    def __init__(self, world: FaultWorld, will_ask: Callable[[Ask], None]) -> None:
        self.ends: Counter[str] = Counter()  # request → how often its client was told the end
        self.left: set[str] = set()  # requests whose clients went away
        self.moved: set[str] = set()  # requests that went on elsewhere, under another id
        self.broken: set[str] = set()  # and that broke off with their gateway
        self.alone: set[str] = set()  # and for which there was no gateway
        self.again: list[Ask] = []  # those that were asked elsewhere
        self._world = world
        self._will_ask = will_ask
        self._draw = random.Random(f"kvatlas.clients/{world.scenario.seed}")
        self._at: dict[str, Replica] = {}  # under way, by id
        self._now: dict[str, Ask] = {}  # what a request is by now, by its first id
        self._tries: Counter[str] = Counter()

    def ask(self, ask: Ask, replica: Replica | None = None) -> None:
        """One request, now, to that gateway or any that is there."""
        there = [each for each in self._world.replicas if each.up]
        if replica is None:
            replica = there[0] if len(there) == 1 else self._draw.choice(there) if there else None
        if replica is None:
            self.alone.add(ask.id)
            self.ends[ask.id] += 1
            return
        self._at[ask.id] = replica
        self._now[_first(ask.id)] = ask
        replica.loop.call(self._put, ask, replica)

    def _put(self, ask: Ask, replica: Replica) -> None:
        inquiry = Inquiry(ask.id, ask.tokens, ask.output_tokens, ask.scope, ask.adapter)
        replica.gateway.ask(inquiry, self._told)
        if ask.leave_after_s >= 0:
            self._world.timeline.after(ask.leave_after_s, self.leave, ask.id)

    def leave(self, id: str) -> None:
        """The client of this request goes away, if it still waits."""
        ask = self._now.get(_first(id))
        if ask is not None and (replica := self._at.get(ask.id)) is not None:
            replica.loop.call(self._leave, ask.id, replica)

    def _leave(self, id: str, replica: Replica) -> None:
        self.left.add(id)
        replica.gateway.leave(id)

    def _told(self, outcome: Outcome) -> None:
        self.ends[outcome.id] += 1
        self._at.pop(outcome.id, None)

    def lost(self, replica: Replica) -> None:
        """A gateway was killed."""
        made = {flight.inquiry.id: flight.made for flight in replica.gateway.flights()}
        for id in [id for id, at in self._at.items() if at is replica]:
            del self._at[id]
            tries = self._tries[_first(id)] = self._tries[_first(id)] + 1
            if made.get(id) or id in self.left or tries > TRIES_MAX:
                self.broken.add(id)
                self.ends[id] += 1
                continue
            self.moved.add(id)
            ask = self._now[_first(id)]
            other = msgspec.structs.replace(ask, id=f"{_first(id)}~{tries}")
            self.again.append(other)
            self._will_ask(other)
            self.ask(other)


def _first(id: str) -> str:
    return id.partition("~")[0]
