"""One engine's KV events on the gateway's side: what `service.feed` does, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from kvatlas.core import sequence
from kvatlas.core.claims import Applied
from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.records import Place, Publisher
from kvatlas.core.sequence import Sequencer
from kvatlas.sim.messages import AskReplay, Events, Message, Refused, Replayed, Subscribed
from kvatlas.sim.timeline import Timeline, Timer


class Feed:
    """Drives one `Sequencer`; ``send`` carries what it asks its engine."""

    def __init__(
        self,
        timeline: Timeline,
        dispatcher: Dispatcher,
        publisher: Publisher,
        send: Callable[[Message], None],
        *,
        limits: sequence.Limits = sequence.LIMITS,
    ) -> None:
        self._timeline = timeline
        self._dispatcher = dispatcher
        self._publisher = publisher
        self._send = send
        self.sequencer = Sequencer(can_replay=True, limits=limits)
        self.applied = Applied()
        self._believed = True
        self._timer: Timer | None = None

    @property
    def idle(self) -> bool:
        """Nothing is being replayed."""
        return not self.sequencer.replaying

    def receive(self, message: Message) -> None:
        """Take in what the engine says about its events; other messages are not for here."""
        now, sequencer = self._timeline.now, self.sequencer
        match message:
            case Events(batch):
                self._perform(sequencer.offer(batch, now))
            case Subscribed():
                self._perform(sequencer.connected(now))
            case Replayed(token, None):
                self._perform(sequencer.replay_done(token, now))
            case Replayed(token, batch):
                assert batch is not None
                self._perform(sequencer.replayed(token, batch, now))
            case Refused(AskReplay(_, token)):
                self._perform(sequencer.replay_failed(token, now))

    def restarted(self, reason: str) -> None:
        """The engine is known to have started anew."""
        self._perform(self.sequencer.restarted(reason, self._timeline.now))

    def dropped(self, reason: str, *, awake: bool = False) -> None:
        """The same engine lost its cache without a word: it sleeps, or is ``awake`` again."""
        self._perform(self.sequencer.dropped(reason, awake=awake))

    def take_up(self, place: Place) -> None:
        """What a peer has applied up to there counts: its claims are there already, in doubt."""
        self._believe(False)
        self._perform(self.sequencer.take_up(place, self._timeline.now))

    def _perform(self, effects: list[sequence.Effect]) -> None:
        if self.sequencer.behind:
            self._believe(False)
        orphans = False
        for effect in effects:
            match effect:
                case sequence.Apply(batch):
                    applied = self._dispatcher.apply(self._publisher, batch.events)
                    self.applied.add(applied)
                    orphans = orphans or bool(applied.orphans)
                case sequence.Reset():
                    self._dispatcher.reset(self._publisher)
                case sequence.Replay(from_seq, token):
                    self._send(AskReplay(from_seq, token))
        if not self.sequencer.behind:
            self._believe(True)
        if orphans:
            self._perform(self.sequencer.orphaned(self._timeline.now))
        else:
            self._arm()

    def _believe(self, believed: bool) -> None:
        """What a replay told so far was true once: the directory waits until it has caught up."""
        if believed != self._believed:
            self._believed = believed
            self._dispatcher.believe(self._publisher, believed)

    def _arm(self) -> None:
        due = self.sequencer.next_deadline()
        self._timer = self._timeline.rearm(self._timer, due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self.sequencer.tick(self._timeline.now))
