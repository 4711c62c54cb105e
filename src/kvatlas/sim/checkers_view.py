"""What one gateway sees, hears, decides and promises, judged from outside: one for each life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvatlas.core.dispatch import Apply, Input, Join, Reset, Sent
from kvatlas.core.events import Event
from kvatlas.core.records import Publisher
from kvatlas.core.router import Decision
from kvatlas.sim.checkers import LAG_S, Checkers, own_tokens
from kvatlas.sim.checkers_kept import check_flights, check_waiting
from kvatlas.sim.checkers_truth import Heard, Life, Run
from kvatlas.sim.faults import Ask
from kvatlas.sim.faults_replicas import Replica
from kvatlas.sim.gateway import Inquiry, Outcome
from kvatlas.sim.messages import Answers, Declined, Events, Message, Pulse, Replayed


class View:
    """One life of one gateway. Implements `faults_replicas.View`."""

    def __init__(self, checkers: Checkers, replica: Replica) -> None:
        self._checkers = checkers
        self._replica = replica
        self._name = replica.name
        self._told: dict[str, list[tuple[float, int]]] = {}  # engine → when word of a life came
        self._runs: dict[Publisher, Run] = {}
        self._fingerprints: dict[Publisher, bytes] = {}
        self._heard: dict[int, Heard] = {}  # by identity of the life

    def saw(self, source: str, message: Message) -> None:
        """A message that reaches the gateway."""
        match message:
            case Events(batch):
                life, _ = self._checkers.batches[id(batch.events)]
                self._heard_of(life).reached(batch.seq, self._checkers.clock())
                self._word(source, life.number)
            case Pulse():
                self._word(source, message.life)
            case Declined(id_, _, busy) if busy:
                self._checkers.declined.add((id_, source))
            case Answers():
                self._checkers.compare(source, message)
        if isinstance(message, Events | Replayed):
            check_waiting(self._checkers, self._replica, source)

    def _heard_of(self, life: Life) -> Heard:
        return self._heard.setdefault(id(life), Heard())

    def _word(self, engine: str, life: int) -> None:
        told = self._told.setdefault(engine, [])
        if not told or life > told[-1][1]:
            told.append((self._checkers.clock(), life))

    def decided(self, inquiry: Inquiry, decision: Decision) -> None:
        """See `GatewayWatcher`: every promise that it rests on must be true, or lag no further
        than is stated."""
        plans = [f"{plan.publisher} {plan.resume_tokens}" for plan in decision.plans]
        self._checkers.note(f"{inquiry.id} is routed by {self._name}: {', '.join(plans)}")
        self._checkers.spans[inquiry.id] = [self._checkers.clock()] * 2
        self._checkers.homes[inquiry.id] = self._replica.host, self._name
        ask = self._checkers.asks[inquiry.id]
        for plan in decision.plans:
            if any(plan.tier_tokens[1:]) and not self._checkers.could_read(
                plan.publisher.worker, ask
            ):
                self._checkers.report(
                    "over-promise", f"{ask.id}: {plan.publisher} promises of tiers"
                )
            if own := own_tokens(plan):
                self._judge(ask, plan.publisher, own)

    def waited(self, gaps_s: Sequence[float], count: int) -> None:
        """See `GatewayWatcher`."""

    def ended(self, outcome: Outcome) -> None:
        """See `GatewayWatcher`."""
        self._checkers.note(
            f"{outcome.id} ends on {outcome.tried[-1:]}: {outcome.fault or 'answered'}"
        )
        self._checkers.spans[outcome.id][1] = self._checkers.clock()
        self._checkers.outcomes[outcome.id] = outcome

    # -- the dispatcher ---------------------------------------------------------------------------

    def tap(self, now: float, event: Input, answered: Decision | None) -> None:
        """See `kvatlas.core.dispatch.Tap`."""
        match event:
            case Apply(publisher, events):
                self._applied(publisher, events)
            case Reset(publisher):
                self._checkers.note(f"{self._name}: the claims of {publisher} go")
                self._runs[publisher] = Run()
            case Join(publisher, _, fingerprint):
                if self._fingerprints.get(publisher) != fingerprint:
                    self._fingerprints[publisher] = fingerprint
                    self._runs[publisher] = Run()
            case Sent():
                check_flights(self._checkers, self._replica)

    def runs(self) -> dict[Publisher, Run]:
        """See `faults_replicas.View`."""
        return {publisher: run.copy() for publisher, run in self._runs.items()}

    def took(self, runs: Mapping[Publisher, Run]) -> None:
        """See `faults_replicas.View`."""
        for publisher, run in runs.items():
            self._checkers.note(f"{self._name}: the claims of {publisher} are those of a peer")
            self._runs[publisher] = run
            if run.life is not None:
                heard = self._heard_of(run.life)
                heard.applied = max(heard.applied, run.last)

    def _applied(self, publisher: Publisher, events: tuple[Event, ...]) -> None:
        run = self._runs.setdefault(publisher, Run())
        known = self._checkers.batches.get(id(events))
        if known is None:
            self._checkers.report(
                "resurrected", f"{publisher}: events are applied that nobody published"
            )
            run.held.apply(events)
            return
        life, batch = known
        self._checkers.note(
            f"{self._name}: {publisher}: batch {batch.seq} of life {life.number} is applied"
        )
        if run.life is None:
            run.life = life
        elif life is not run.life:
            self._checkers.report(
                "resurrected",
                f"{publisher}: batch {batch.seq} of life {life.number} is applied on top of "
                f"life {run.life.number}",
            )
            run.life = life
        elif batch.seq != run.last + 1:
            self._checkers.report(
                "resurrected",
                f"{publisher}: batch {batch.seq} is applied after batch {run.last}",
            )
        run.last = batch.seq
        heard = self._heard_of(life)
        heard.applied = max(heard.applied, batch.seq)
        run.held.apply(batch.events)

    def _judge(self, ask: Ask, publisher: Publisher, promised: int) -> None:
        self._checkers.promises += 1
        run = self._runs.get(publisher)
        if run is None or run.life is None:
            self._checkers.report(
                "resurrected", f"{ask.id}: {publisher} promises {promised} of no claims"
            )
            return
        true = run.held.resume(self._checkers.prompt(ask, run.life.layout))
        if promised > true:
            self._checkers.report(
                self._checkers.kind_of(ask, publisher, promised),
                f"{ask.id} of ({ask.scope!r}, {ask.adapter!r}): {publisher} promises {promised} "
                f"tokens, what was applied of its events gives {true}",
            )
        self._judge_age(ask, publisher, run.life, run.last)

    def _judge_age(self, ask: Ask, publisher: Publisher, life: Life, last: int) -> None:
        """What a promise rests on must not be older than is stated."""
        then, heard = self._checkers.clock() - LAG_S, self._heard_of(life)
        newer = [number for at, number in self._told.get(publisher.worker, ()) if at <= then]
        if newer and newer[-1] > life.number:
            self._checkers.report(
                "resurrected",
                f"{ask.id}: {publisher} promises by life {life.number}; that it lives its "
                f"{newer[-1]}. is known for more than {LAG_S:g} s",
            )
        elif last < heard.applied:
            self._checkers.report(
                "resurrected",
                f"{ask.id}: {publisher} promises by batch {last}; batch {heard.applied} was "
                "applied before, and counts no more",
            )
        elif last < (known := heard.known_at(then)):
            self._checkers.report(
                "resurrected",
                f"{ask.id}: {publisher} promises by batch {last}; batch {known} came more than "
                f"{LAG_S:g} s ago",
            )


class Judge(Checkers):
    """The checkers of a world, with a view for each life of a gateway."""

    def view(self, replica: Replica) -> View:
        """See `faults_world.Judge`."""
        return View(self, replica)
