"""The gateway in virtual time: one `Dispatcher`, one feed per engine, requests and their retries.

It does what `service.steering`, `service.relay`, `service.engines` and `service.feed` do over real
sockets, and knows only what messages tell it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import sub

import msgspec

from kvatlas.core import sequence
from kvatlas.core.dispatch import (
    Again,
    Dispatcher,
    Finished,
    FirstToken,
    Join,
    Question,
    Sent,
    SetLoad,
    Settle,
    SetUp,
    Sweep,
)
from kvatlas.core.keys import salt_scope
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher
from kvatlas.core.router import BLIND
from kvatlas.sim.engines import GATEWAY
from kvatlas.sim.feed import Feed
from kvatlas.sim.flights import Flight, GatewayWatcher, Inquiry, Outcome, Stage
from kvatlas.sim.messages import (
    Accepted,
    Answers,
    Cancel,
    Declined,
    Events,
    Look,
    Lost,
    Message,
    Pulled,
    Pulse,
    Ready,
    Refused,
    Replayed,
    Source,
    Submit,
    Subscribed,
)
from kvatlas.sim.network import Network
from kvatlas.sim.pair_prices import PairPrices
from kvatlas.sim.timeline import Timeline, Timer
from kvatlas.sim.worker import Worker

__all__ = ["Gateway", "GatewaySpec", "GatewayWatcher", "Inquiry", "Outcome"]

_SWEEP_KEYS = 50_000  # per look, as `service.assembly`


class GatewaySpec(msgspec.Struct, frozen=True):
    """How patient it is: the defaults of `config.GatewayConfig` and `service.engines.Timing`."""

    connect_timeout_s: float = 2.0
    engine_idle_timeout_s: float = 600.0
    ttft_slo_s: float = math.inf
    poll_s: float = 1.0
    poll_timeout_s: float = 2.0
    down_after: int = 3
    up_after: int = 2


class Gateway:
    """One gateway process, attached to the network under its ``name``."""

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        dispatcher: Dispatcher,
        *,
        spec: GatewaySpec | None = None,
        watchers: Sequence[GatewayWatcher] = (),
        feed_limits: sequence.Limits = sequence.LIMITS,
        name: str = GATEWAY,
    ) -> None:
        self.name = name
        self.dispatcher = dispatcher
        self.spec = spec or GatewaySpec()
        self.pulled: Callable[[Pulled], None] = lambda message: None  # told to who asked for it
        self._feed_limits = feed_limits
        self._timeline = timeline
        self._network = network
        self._watchers = watchers
        self._workers: dict[str, Worker] = {}
        self._agents: dict[str, Feed] = {}
        self._agent_lives: dict[str, int] = {}
        self._among: tuple[tuple[Publisher, str], ...] = ()
        self._pairs = PairPrices(dispatcher)
        self._flights: dict[str, Flight] = {}
        self._looks = 0
        self._poll: Timer | None = None
        network.attach(name, self._receive)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    def flights(self) -> tuple[Flight, ...]:
        """Them, as they are (read-outs)."""
        return tuple(self._flights.values())

    def feed(self, engine: str) -> Feed:
        """The event stream of one engine or agent (read-outs). Raises KeyError for others."""
        return self._agents[engine] if engine in self._agents else self._workers[engine].feed

    def add_engine(
        self, publisher: Publisher, layout: Layout, fingerprint: bytes, *, role: str = "combined"
    ) -> None:
        """Make an engine known, before it starts. Those with role "decode" are no candidates of
        the router: they go on with what one with role "prefill" began."""
        worker = Worker(publisher, self._new_feed(publisher), role)
        worker.fingerprint = fingerprint
        self._workers[publisher.worker] = worker
        self._pairs.add(publisher, layout, role)
        if role != "decode":
            self._among = (*self._among, (publisher, ""))
        self.dispatcher.handle(Join(publisher, layout, fingerprint), self._timeline.now)

    def add_agent(self, settled: Settle) -> None:
        """Listen to the agent of a node, whose tiers carry its engines further."""
        self._agents[settled.agent.worker] = self._new_feed(settled.agent)
        self.dispatcher.handle(settled, self._timeline.now)

    def _new_feed(self, publisher: Publisher) -> Feed:
        return Feed(
            self._timeline,
            self.dispatcher,
            publisher,
            lambda message: self._network.send(self.name, publisher.worker, message),
            limits=self._feed_limits,
        )

    def start(self) -> None:
        """Begin to look after the engines."""
        self._poll = self._timeline.after(self.spec.poll_s, self._look)

    def stop(self) -> None:
        """Look no more: nothing else keeps virtual time from coming to its end."""
        if self._poll is not None:
            self._poll.cancel()

    # -- requests -------------------------------------------------------------------------------

    def ask(self, inquiry: Inquiry, on_end: Callable[[Outcome], None]) -> None:
        """A client's request arrives; ``on_end`` is told how it went. Ids must differ."""
        now = self._timeline.now
        if inquiry.id in self._flights:
            raise ValueError(f"request id {inquiry.id!r} is in use")
        scope, slo_s = salt_scope(inquiry.scope), self.spec.ttft_slo_s
        if self.dispatcher.router.params.policy not in BLIND:
            among = self._among
            if inquiry.adapter:
                among = tuple((publisher, inquiry.adapter) for publisher, _ in among)
            question = Question(inquiry.id, among, inquiry.tokens, scope, ttft_slo_s=slo_s)
        else:  # the service does not tokenize where nobody looks at the prompt either
            policy = self.dispatcher.router.params.policy
            question = Question(inquiry.id, self._among, unkeyed=policy)
        decision = self.dispatcher.handle(question, now)
        assert decision is not None
        decision = self._pairs.priced(decision, now)
        for watcher in self._watchers:
            watcher.decided(inquiry, decision)
        flight = self._flights[inquiry.id] = Flight(inquiry, now, on_end)
        if decision.refusal is not None:
            self._end(flight, decision.refusal.reason)
            return
        flight.targets = [plan.publisher.worker for plan in decision.plans]
        flight.expected = {p.publisher.worker: p.resume_tokens for p in decision.plans}
        self._try_next(flight, "no engine is up")

    def leave(self, id: str) -> None:
        """The client went away."""
        flight = self._flights.get(id)
        if flight is not None:
            if flight.target:
                self._network.send(self.name, flight.target, Cancel(id))
            self._leave_source(flight)
            self._end(flight, "the client left")

    def _try_next(self, flight: Flight, why: str) -> None:
        """Send it to the next target; nothing is tried twice after a byte was seen."""
        inquiry, now = flight.inquiry, self._timeline.now
        if flight.target:
            self._workers[flight.target].flights.discard(inquiry.id)
        if not flight.targets and flight.stage is not Stage.DECODE and not flight.fallback:
            flight.targets = self._more(inquiry.id)
        if not flight.targets:
            self._fall_back(flight, why)
            return
        name = flight.target = flight.targets.pop(0)
        worker = self._workers[name]
        if flight.stage is not Stage.DECODE:
            paired = worker.role == "prefill" and not flight.fallback
            flight.stage = Stage.PREFILL if paired else Stage.COMBINED
        flight.life = 0
        flight.tried.append(name)
        flight.heard_at = flight.sent_at = now
        worker.flights.add(inquiry.id)
        if flight.stage is not Stage.DECODE:
            self.dispatcher.handle(Sent(inquiry.id, worker.publisher), now)
        self._network.send(self.name, name, flight.submit())
        self._wait(flight, self.spec.connect_timeout_s)

    def _more(self, id: str) -> list[str]:
        """Whoever has no plan yet, if anybody: as `service.steering`."""
        if not self.dispatcher.left(id):
            return []
        decision = self.dispatcher.handle(Again(id), self._timeline.now)
        return [plan.publisher.worker for plan in decision.plans] if decision is not None else []

    def _fall_back(self, flight: Flight, why: str) -> None:
        """Nobody is left of those that were asked. A pair that failed before anything was seen
        falls back to one engine that does it all; each is asked once more at most."""
        if flight.stage is Stage.COMBINED or flight.fallback or flight.made:
            self._end(flight, why)
            return
        flight.fallback = f"{flight.stage.value}: {why}"
        flight.stage, flight.source = Stage.COMBINED, None
        self._leave_source(flight)
        flight.targets = self._by_load("decode", "combined", "prefill")
        self._try_next(flight, why)

    def _leave_source(self, flight: Flight) -> None:
        """What the prefill side keeps for it is not wanted any more."""
        if flight.prefilled_by:
            self._network.send(self.name, flight.prefilled_by, Cancel(flight.inquiry.id))
            flight.prefilled_by = ""

    def _by_load(self, *roles: str) -> list[str]:
        """Engines that look well, role by role, those with the fewest requests first."""
        return [
            name
            for role in roles
            for name, worker in sorted(
                self._workers.items(), key=lambda item: (len(item[1].flights), item[0])
            )
            if worker.role == role and worker.up and not worker.asleep and worker.reached
        ]

    def _prefilled(self, source: str, ready: Ready) -> None:
        """The prefill half is done: its engine is free for others, the decode half begins."""
        flight = self._mine(ready.id, source)
        if flight is None or flight.stage is not Stage.PREFILL:
            return
        now, worker = self._timeline.now, self._workers[source]
        ttft_s = now - flight.arrived_at
        self.dispatcher.handle(FirstToken(ready.id), now)
        done = Finished(ready.id, worker.publisher, True, ready.cached_tokens, ttft_s)
        self.dispatcher.handle(done, now)
        flight.stage, flight.prefilled_by = Stage.DECODE, source
        flight.source = Source(source, ready.life, ready.tokens)
        flight.targets = self._by_load("decode")
        self._try_next(flight, "no decode engine is up")

    def _handed_over(self, flight: Flight) -> None:
        if flight.stage is Stage.DECODE and flight.source is not None:
            decode, tokens = self._workers[flight.target].publisher, flight.source.tokens
            now = self._timeline.now
            seconds = now - flight.sent_at
            self._pairs.arrived(flight.source.engine, decode, tokens, seconds, now)

    def _wait(self, flight: Flight, limit_s: float) -> None:
        if flight.timer is not None:
            flight.timer.cancel()
        flight.timer = self._timeline.after(limit_s, self._silent, flight)

    def _silent(self, flight: Flight) -> None:
        """A timer ran out: perhaps something was heard meanwhile."""
        flight.timer = None
        if not flight.life:
            self._network.send(self.name, flight.target, Cancel(flight.inquiry.id))
            self._unreached(flight)
            return
        left = flight.heard_at + self.spec.engine_idle_timeout_s - self._timeline.now
        if left > 0:
            flight.timer = self._timeline.after(left, self._silent, flight)
            return
        self._network.send(self.name, flight.target, Cancel(flight.inquiry.id))
        self._broke_off(flight, "the engine fell silent")

    def _unreached(self, flight: Flight) -> None:
        """Polls take seconds to mark an engine down, and each request until then would try it
        first: it is no candidate before the next good look."""
        worker = self._workers[flight.target]
        worker.reached = False
        self._set_up(worker, worker.up)
        self._try_next(flight, "no connection")

    def _broke_off(self, flight: Flight, why: str) -> None:
        """An engine failed that had accepted it: half a pair may be replaced, nothing else."""
        if flight.stage is Stage.COMBINED:
            self._end(flight, why)
        else:
            flight.targets = []
            self._try_next(flight, why)

    def _end(self, flight: Flight, fault: str, cached_tokens: int = -1) -> None:
        now, inquiry = self._timeline.now, flight.inquiry
        del self._flights[inquiry.id]
        if flight.timer is not None:
            flight.timer.cancel()
        ttft_s = flight.first_at - flight.arrived_at if flight.first_at >= 0 else -1.0
        if flight.target:
            worker = self._workers[flight.target]
            worker.flights.discard(inquiry.id)
            publisher = worker.publisher
        else:
            publisher = next(iter(self._workers.values())).publisher
        self.dispatcher.handle(
            Finished(inquiry.id, publisher, not fault, cached_tokens, ttft_s), now
        )
        outcome = Outcome(
            id=inquiry.id,
            arrived_at=flight.arrived_at,
            ended_at=now,
            prompt_tokens=len(inquiry.tokens) // 4,
            output_tokens=flight.made,
            cached_tokens=cached_tokens,
            expected_tokens=flight.expected.get(flight.prefilled_by or flight.target, 0),
            ttft_s=ttft_s,
            tried=tuple(flight.tried),
            fault=fault,
            prefilled_by=flight.prefilled_by,
            fallback=flight.fallback,
        )
        for watcher in self._watchers:
            watcher.ended(outcome)
        flight.on_end(outcome)

    # -- what engines say -------------------------------------------------------------------------

    def _receive(self, source: str, message: Message) -> None:
        if source in self._agents:
            self._agent_says(source, message)
            return
        worker = self._workers[source]
        match message:
            case Answers():
                self._answers(source, message)
            case Accepted(id, life):
                flight = self._mine(id, source)
                if flight is not None and not flight.life:
                    flight.life = life
                    flight.heard_at = self._timeline.now
                    self._wait(flight, self.spec.engine_idle_timeout_s)
            case Declined(id, reason, busy):
                flight = self._mine(id, source)
                if flight is not None and not flight.made:
                    if busy:
                        self._try_next(flight, reason)
                    else:
                        self._end(flight, reason)
            case Ready():
                self._prefilled(source, message)
            case Lost(life):
                self._lost(worker, source, life)
            case Refused(Submit(id)):
                flight = self._mine(id, source)
                if flight is not None and not flight.life:
                    self._unreached(flight)
            case Pulse():
                self._pulse(worker, message)
            case Events() | Subscribed() | Replayed() | Refused():
                worker.feed.receive(message)

    def _agent_says(self, source: str, message: Message) -> None:
        feed = self._agents[source]
        if isinstance(message, Pulled):
            self.pulled(message)
        elif not isinstance(message, Pulse):
            feed.receive(message)
        elif message.life > self._agent_lives.get(source, 0):
            if source in self._agent_lives:
                feed.restarted("its process started anew")
            self._agent_lives[source] = message.life

    def _mine(self, id: str, source: str) -> Flight | None:
        """The flight that ``source`` may speak of: not one that moved on meanwhile."""
        flight = self._flights.get(id)
        return flight if flight is not None and flight.target == source else None

    def _answers(self, source: str, message: Answers) -> None:
        """Tokens arrive. Requests of one batch share their times, and so the gaps between them."""
        now = self._timeline.now
        together: dict[int, tuple[tuple[float, ...], int]] = {}  # by identity: equal is not enough
        shift_s = now - message.sent_at + message.lag_s
        alone, over = list[float](), list[Flight]()  # ends are told after all first tokens
        for produced in message.produced:
            flight = self._mine(produced.id, source)
            if flight is None or flight.stage is Stage.PREFILL:
                continue  # the prefill half makes one token, which the decode half makes again
            times = produced.times_s
            if not flight.made:
                flight.first_at = now
                self._handed_over(flight)
                self.dispatcher.handle(FirstToken(produced.id, now - flight.arrived_at), now)
            elif times:
                alone.append(times[0] + shift_s - flight.heard_at)
                together[id(times)] = times, together.get(id(times), (times, 0))[1] + 1
            else:
                alone.append(now - flight.heard_at)
            flight.heard_at = times[-1] + shift_s if times else now
            flight.made += produced.count
            if produced.finished and produced.id in message.ended:
                over.append(flight)
        for flight in over:
            self._end(flight, "", message.ended[flight.inquiry.id].cached_tokens)
        for watcher in self._watchers:
            watcher.waited(alone, 1)
            for times, count in together.values():
                watcher.waited(list(map(sub, times[1:], times)), count)

    def _lost(self, worker: Worker, source: str, life: int) -> None:
        """Connections broke: those that were never accepted may be tried elsewhere."""
        for id in sorted(worker.flights):
            flight = self._mine(id, source)
            if flight is not None and flight.life in (0, life):
                if flight.life:
                    self._broke_off(flight, "the engine broke off")
                else:
                    self._unreached(flight)

    # -- health -----------------------------------------------------------------------------------

    def _look(self) -> None:
        self._poll = self._timeline.after(self.spec.poll_s, self._look)
        self._looks += 1
        self.dispatcher.handle(Sweep(_SWEEP_KEYS), self._timeline.now)
        behind = max(1, round(self.spec.poll_timeout_s / self.spec.poll_s))
        for name, worker in self._workers.items():
            if worker.answered:
                worker.answered = False
                worker.failures = 0
            else:
                worker.failures += 1
                worker.successes = 0
                if worker.up and worker.failures >= self.spec.down_after + behind - 1:
                    self._set_up(worker, False)
            self._network.send(self.name, name, Look(self._looks))

    def _pulse(self, worker: Worker, pulse: Pulse) -> None:
        if pulse.number + round(self.spec.poll_timeout_s / self.spec.poll_s) < self._looks:
            return  # too late to count
        worker.answered = True
        worker.successes += 1
        if pulse.life > worker.life:
            if worker.life:
                worker.feed.restarted("its process started anew")
            worker.life = pulse.life
        elif pulse.asleep != worker.asleep:
            # An idle engine sends no events: what it dropped is known by this alone.
            reason = "it sleeps" if pulse.asleep else "it slept"
            worker.feed.dropped(reason, awake=not pulse.asleep)
        if pulse.layout is not None and pulse.fingerprint != worker.fingerprint:
            worker.fingerprint = pulse.fingerprint
            join = Join(worker.publisher, pulse.layout, pulse.fingerprint)
            self.dispatcher.handle(join, self._timeline.now)
            self._set_up(worker, worker.up)
            worker.feed.restarted("it serves something else")
        if pulse.asleep != worker.asleep:
            worker.asleep = pulse.asleep
            self._set_up(worker, worker.up)
        if not worker.reached:
            worker.reached = True
            self._set_up(worker, worker.up)
        if not worker.up and worker.successes >= self.spec.up_after:
            self._set_up(worker, True)
        self.dispatcher.handle(SetLoad(worker.publisher, pulse.requests), self._timeline.now)

    def _set_up(self, worker: Worker, up: bool) -> None:
        worker.up = up
        routed = up and not worker.asleep and worker.reached
        self.dispatcher.handle(SetUp(worker.publisher, routed), self._timeline.now)
