"""`Sequencer` against a dumb engine and a network that loses, doubles, delays and mixes lives."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvatlas.core.events import Batch
from kvatlas.core.sequence import Apply, Effect, Limits, Replay, Reset, Sequencer

LIMITS = Limits(waiting_batches_max=6)


class Engine:
    """Numbers what it sends from 0 and keeps the last ``buffer`` batches, one list per life."""

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer
        self.clock = 1.0
        self.sent: list[Batch] = []

    def publish(self) -> Batch:
        self.clock += 1.0
        batch = Batch(seq=len(self.sent), ts=self.clock, events=())
        self.sent.append(batch)
        return batch

    def replay(self, start: int) -> list[Batch]:
        return [b for b in self.sent[-self.buffer :] if b.seq >= start]


class Machine(RuleBasedStateMachine):
    """``run`` is what a directory would hold: the batches applied since the last reset."""

    @initialize(buffer=st.integers(1, 12), can_replay=st.booleans())
    def start(self, buffer: int, can_replay: bool) -> None:
        self.engine = Engine(buffer)
        self.can_replay = can_replay
        self.sequencer = Sequencer(can_replay=can_replay, limits=LIMITS)
        self.now = 0.0
        self.run: list[Batch] = []
        self.wire: list[Batch] = []
        self.asked: Replay | None = None
        self.answer: list[Batch] = []
        self.hidden_restart = False
        self.worthless = 0  # batches of this life that came before its cache was dropped

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                self.run.append(effect.batch)
            elif isinstance(effect, Reset):
                assert self.run, "a reset of nothing"
                self.run = []
            else:
                assert self.can_replay
                self.asked = effect
                self.answer = []

    # -- the engine and the network -------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def publish(self, count: int) -> None:
        self.wire += [self.engine.publish() for _ in range(count)]

    @rule(count=st.integers(1, 5))
    def publish_lost(self, count: int) -> None:
        for _ in range(count):
            self.engine.publish()

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, min(2, len(self.wire) - 1)))
        batch = self.wire[index] if keep else self.wire.pop(index)
        self.perform(self.sequencer.offer(batch, self.now))

    @rule()
    def restart(self) -> None:
        self.engine.sent = []
        self.hidden_restart = True
        self.worthless = 0

    @precondition(lambda self: not self.hidden_restart)
    @rule()
    def sleep(self) -> None:
        """The engine forgets; its replay does not. What is under way arrives first."""
        for batch in self.wire:
            self.perform(self.sequencer.offer(batch, self.now))
        self.wire = []
        self.perform(self.sequencer.offer(self.engine.publish(), self.now))
        self.perform(self.sequencer.dropped("asleep"))
        self.worthless = len(self.engine.sent)

    @rule()
    def reconnect(self) -> None:
        self.perform(self.sequencer.connected(self.now))

    @rule(seconds=st.sampled_from([0.05, 0.6, 6.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.sequencer.tick(self.now))

    @rule()
    def orphan(self) -> None:
        self.perform(self.sequencer.orphaned(self.now))

    # -- replays, good and bad ------------------------------------------------------------------

    @precondition(lambda self: self.asked is not None)
    @rule(data=st.data(), ends=st.booleans())
    def answer_badly(self, data: st.DataObject, ends: bool) -> None:
        asked = self.asked
        assert asked is not None
        batches = self.engine.replay(asked.from_seq)
        lost = data.draw(st.sets(st.integers(1, 4), max_size=2))
        for index, batch in enumerate(batches):
            if index not in lost:
                self.perform(self.sequencer.replayed(asked.token, batch, self.now))
        if ends:
            self.perform(self.sequencer.replay_done(asked.token, self.now))

    @precondition(lambda self: self.asked is not None)
    @rule()
    def answer_fails(self) -> None:
        assert self.asked is not None
        self.perform(self.sequencer.replay_failed(self.asked.token, self.now))

    def answer_well(self) -> None:
        asked, self.asked = self.asked, None
        assert asked is not None
        for batch in self.engine.replay(asked.from_seq):
            self.perform(self.sequencer.replayed(asked.token, batch, self.now))
        self.perform(self.sequencer.replay_done(asked.token, self.now))

    @rule()
    def heal(self) -> None:
        """The network works again and the restart is known: everything must come right."""
        self.wire = []
        self.now += LIMITS.give_up_s + LIMITS.replay_timeout_s
        if self.hidden_restart and not self.can_replay:
            self.perform(self.sequencer.restarted("a new process start time", self.now))
        self.hidden_restart = False
        self.perform(self.sequencer.connected(self.now))
        self.settle()
        if self.can_replay:
            self.check()
        self.perform(self.sequencer.offer(self.engine.publish(), self.now))
        self.settle()
        self.check()
        assert self.run

    @precondition(lambda self: len(self.engine.sent) < (self.sequencer.next_seq or 0))
    @rule()
    def speak(self) -> None:
        """A restarted engine's own numbers tell: nobody has to notice anything else."""
        self.wire = []
        self.now += LIMITS.give_up_s + LIMITS.replay_timeout_s
        self.settle()
        self.perform(self.sequencer.offer(self.engine.publish(), self.now))
        self.hidden_restart = False
        self.settle()
        self.check()
        assert self.run

    def check(self) -> None:
        history = self.engine.sent[self.worthless :]
        assert self.run == history[len(history) - len(self.run) :]
        if self.can_replay:
            assert len(self.run) >= min(self.engine.buffer, len(history))

    def settle(self) -> None:
        for _ in range(20):
            if self.asked is not None:
                self.answer_well()
            deadline = self.sequencer.next_deadline()
            if deadline is None:
                return
            self.now = max(self.now, deadline)
            self.perform(self.sequencer.tick(self.now))
        raise AssertionError("it does not come to rest")

    # -- what must always hold ------------------------------------------------------------------

    @invariant()
    def one_unbroken_run(self) -> None:
        for before, after in zip(self.run, self.run[1:], strict=False):
            assert after.seq == before.seq + 1
            assert after.ts > before.ts

    @invariant()
    def one_life(self) -> None:
        if self.run and not self.hidden_restart:
            last = self.run[-1]
            assert self.engine.sent[last.seq] == last
            assert self.run == self.engine.sent[self.run[0].seq : last.seq + 1]
            assert self.run[0].seq >= self.worthless

    @invariant()
    def bounded(self) -> None:
        assert len(self.sequencer._waiting) <= LIMITS.waiting_batches_max


Machine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestSequenceMachine = Machine.TestCase
