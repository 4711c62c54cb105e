"""One publisher's event stream put in order: gaps, replays, restarts, late duplicates.

An engine numbers its batches from 0 and keeps the last ones for replay. What arrives may be lost,
doubled, late or of another life of the engine. `Sequencer` decides what of it may be applied.
Its promise: what was applied since the last `Reset` is one unbroken run of one life's batches, so
a claim that came before a hole or a restart never outlives it. Where a hole cannot be filled the
run starts anew: claims are then missing, never wrong.

A replay always asks for one batch that is known already. If that batch comes back with another
time stamp, the engine is not the one that we knew. Pure: ``now`` is any steady clock in seconds.
"""

from __future__ import annotations

import math

from kvatlas.core.events import AllBlocksCleared, Batch
from kvatlas.core.records import Place
from kvatlas.core.sequence_values import (
    LIMITS,
    Apply,
    Counters,
    Effect,
    Limits,
    Replay,
    Reset,
    Running,
)
from kvatlas.core.waiting import WaitingRoom

__all__ = ["LIMITS", "Apply", "Counters", "Effect", "Limits", "Replay", "Reset", "Sequencer"]


class Sequencer:
    """State of one publisher's stream. Every method returns the effects to perform, in order."""

    def __init__(self, *, can_replay: bool, limits: Limits = LIMITS) -> None:
        self.counters = Counters()
        self.epoch = 0  # lives of the engine seen so far, minus one
        self.can_replay = can_replay
        self._limits = limits
        self._next: int | None = None  # next sequence number to apply; None before the first
        self._floor = 0  # nothing before this number may be applied
        self._last_ts = -math.inf  # of the batch applied last
        self._newest: tuple[int, float] | None = None  # (seq, ts) of the newest live batch
        self._dirty = False  # anything applied since the last Reset
        self._run_start = 0  # number of the first batch applied since then
        self._earliest: int | None = None  # of this life, that we heard of: see `_seek_rest`
        self._refused = False  # the last rebuild was
        self._cleared = False  # it said so, since the last `dropped`
        self._behind = False
        self._unproven = False  # a peer applied what counts, and the engine has not confirmed it
        self._waiting = WaitingRoom(limits.waiting_batches_max, limits.waiting_bytes_max)
        self._running: Running | None = None
        self._tokens = 0
        self._no_replay_until = 0.0
        self._rebuild_due: float | None = None
        self._orphan_next = 0.0
        self._orphan_wait = limits.orphan_replay_s

    @property
    def replaying(self) -> bool:
        """Whether live batches wait for a replay to end."""
        return self._running is not None

    @property
    def asked(self) -> int | None:
        """The token of the replay whose answer is awaited now."""
        return self._running.token if self._running is not None and self._running.sent else None

    @property
    def behind(self) -> bool:
        """Whether what was applied so far is history only: a run begun anew, not caught up yet."""
        return self._running is not None and self._behind

    @property
    def next_seq(self) -> int | None:
        """The sequence number expected next; None before the first batch of an epoch."""
        return self._next

    def place(self) -> Place | None:
        """Up to where it is applied, for a peer; None where nothing is, or history only."""
        if self._next is None or self.behind:
            return None
        return Place(
            self._next, self._last_ts, self._floor, self._run_start, self._dirty, self._cleared
        )

    def outdone(self, place: Place) -> str:
        """Why what a peer has applied is worth no more than what is known here; "" where it is."""
        if not self.can_replay:
            return "its history cannot be asked for, so nothing would prove that it is the same"
        newest = self._newest
        if newest and newest[0] < place.next_seq - 1 and newest[1] > place.last_ts:
            return "it is of an earlier life"
        if self._next is not None and not self.behind and self._run_start <= place.run_start:
            return "as much is known here"
        return ""

    def take_up(self, place: Place, now: float) -> list[Effect]:
        """What a peer has applied up to ``place`` counts from now on, instead of all that did. The
        engine is asked for the batch before it: until it has told that, this is `behind`."""
        self._next, self._last_ts = place.next_seq, place.last_ts
        self._floor, self._run_start = place.floor, place.run_start
        self._dirty, self._cleared = place.applied, place.cleared
        if self._newest is None or self._newest[0] < place.next_seq:
            self._newest = (place.next_seq - 1, place.last_ts)
        self._earliest = self._rebuild_due = None
        self._unproven = self._behind = True
        self._schedule(now + self._limits.settle_s)
        return []

    def waiting(self) -> tuple[int, int]:
        """Batches that wait for what is missing before them, and bytes of token ids in them."""
        return len(self._waiting), self._waiting.size_bytes

    # -- what the feed reports ------------------------------------------------------------------

    def connected(self, now: float) -> list[Effect]:
        """The subscription is up (again): anything may have happened in between."""
        if self.can_replay:
            running = self._running or Running(0, 0.0)
            settled = now + self._limits.settle_s
            self._schedule(settled, attempt=running.attempt, rebuild=running.rebuild)
        return []

    def offer(self, batch: Batch, now: float) -> list[Effect]:
        """A live batch arrived."""
        newest = self._newest
        if newest is not None and batch.seq <= newest[0]:
            if batch.ts > newest[1]:
                return self._restart("its sequence numbers went back", now, batch)
            if batch.seq in self._waiting or self._next is None or batch.seq < self._next:
                self.counters.duplicates += 1
                self._hear(batch)
                self._seek_rest()  # it may be late, and of before a run that was begun anew
                return []
        elif newest is not None and batch.ts < newest[1]:
            return self._doubtful(batch, now)
        if newest is None or batch.seq > newest[0]:
            self._newest = (batch.seq, batch.ts)
        self._hear(batch)
        if self._running is not None:
            self._keep(batch)
            return []
        return self._in_order(batch, now)

    def replayed(self, token: int, batch: Batch, now: float) -> list[Effect]:
        """One batch of the answer to `Replay`."""
        running = self._running
        if running is None or running.token != token:
            return []
        self._hear(batch)
        if running.known is not None and batch.seq == running.known[0]:
            if batch.ts != running.known[1]:
                return self._restart("its replay tells another history", now)
            running.known = None
        if not running.proven:
            fresh = self._next is None or running.rebuild
            known = self._next - 1 if self._next is not None and not fresh else self._floor - 1
            if batch.seq < known or (fresh and batch.seq == known):
                return []
            if batch.seq == known and batch.ts != self._last_ts:
                return self._restart("its replay tells another history", now)
            running.proven = True
            self._unproven = False
            if running.rebuild and self._dirty and self._floor < batch.seq >= self._run_start:
                return self._refuse_rebuild(now)
            if batch.seq > known:
                effects = self._reset(f"replayed from batch {batch.seq} on")
                self._next = batch.seq
                self._progress(running, now)
                self._behind = True
                return [*effects, *self._apply(batch)]
        if self._next is None or batch.seq < self._next:
            return []
        if batch.seq > self._next:  # the engine's socket dropped some: ask again at the end
            if self._keep(batch):
                running.deadline = now + self._limits.replay_timeout_s
            return []
        running.attempt = 0
        self._progress(running, now)
        return self._apply(batch)

    def _progress(self, running: Running, now: float) -> None:
        """What brings nothing new does not count: a replay must end some time."""
        running.progress = True
        running.deadline = now + self._limits.replay_timeout_s

    def replay_done(self, token: int, now: float) -> list[Effect]:
        """The engine said that its answer is complete."""
        running = self._running
        if running is None or running.token != token:
            return []
        if not running.proven or running.known is not None:
            if self._next is not None:
                # It would at least have sent the batch that we know: another engine, or life.
                return self._restart("its replay knows nothing of what it had sent", now)
            self._forget_waiting()  # not of this life: it has sent nothing yet
            self._newest = None
        self._running = None
        effects = self._drain()
        if not self._missing():
            self._behind = False
            self._seek_rest()
            return effects
        if running.progress or effects:
            return [*effects, *self._request(now)]
        return [*effects, *self._retry(running, now)]

    def replay_failed(self, token: int, now: float) -> list[Effect]:
        """The request could not be sent, or its connection broke."""
        running = self._running
        if running is None or running.token != token or not running.sent:
            return []
        return self._retry(running, now)

    def orphaned(self, now: float) -> list[Effect]:
        """The directory met a parent that it does not know: history is missing."""
        if not self.can_replay:
            return []
        self._rebuild_due = max(now, self._orphan_next, self._no_replay_until)
        if self._rebuild_due > now or self._running is not None:
            self.counters.orphans_put_off += 1
        return self.tick(now)

    def restarted(self, reason: str, now: float) -> list[Effect]:
        """Somebody else noticed that the engine started anew: a new life, with a new history."""
        return self._restart(reason, now)

    def dropped(self, reason: str, *, awake: bool = False) -> list[Effect]:
        """The same engine lost its cache without a word (it sleeps): its history up to here is
        worth nothing, and must not come back by a replay. ``awake`` again: so is what it had not
        sent before, but nothing that follows its own word that all is gone."""
        if awake and self._cleared:
            return []
        effects = self._reset(reason)
        self._forget_waiting()
        self._rebuild_due = self._earliest = None
        self._cleared = False
        if self._newest is not None:
            self._next = self._floor = self._newest[0] + 1
            self._last_ts = self._newest[1]
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Time passed. Call it at `next_deadline`; earlier or later calls do no harm."""
        running = self._running
        if running is None:
            if self._rebuild_due is None or now < self._rebuild_due:
                return []
            self._rebuild_due = None
            if self._next == self._floor:
                return []  # there is nothing yet that could be rebuilt
            self._orphan_next = now + self._orphan_wait
            self._orphan_wait = min(2 * self._orphan_wait, self._limits.orphan_replay_max_s)
            return self._request(now, rebuild=True)
        if now < running.deadline:
            return []
        if not running.sent:
            return self._request(now, attempt=running.attempt, rebuild=running.rebuild)
        return self._retry(running, now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, or None."""
        return self._running.deadline if self._running else self._rebuild_due

    # -- inside ---------------------------------------------------------------------------------

    def _in_order(self, batch: Batch, now: float) -> list[Effect]:
        if batch.seq == (self._next or 0):
            return self._apply(batch)
        if self._next is not None:
            self.counters.gaps += 1
        if self.can_replay and now >= self._no_replay_until:
            self._keep(batch)
            return self._request(now)
        effects = self._reset(f"batches {self._next} to {batch.seq - 1} are lost")
        self._next = batch.seq
        effects += self._apply(batch)
        self._seek_rest()
        return effects

    def _doubtful(self, batch: Batch, now: float) -> list[Effect]:
        """Newer by number, older by clock: a leftover of an earlier life, or a clock set back.

        Only the engine can tell which: where it can be asked, its word counts, not this batch.
        """
        self.counters.stale += 1
        if self._running is not None:
            return []
        if self.can_replay and now >= self._no_replay_until:
            return self._request(now)
        effects = self._reset("its clock went back")
        self._newest = (batch.seq, batch.ts)
        self._next = batch.seq
        return [*effects, *self._apply(batch)]

    def _restart(self, reason: str, now: float, batch: Batch | None = None) -> list[Effect]:
        """A new life: nothing of the old one counts any more, not even what waits."""
        self.epoch += 1
        self.counters.restarts += 1
        effects = self._reset(reason)
        self._forget_waiting()
        self._next = self._newest = self._earliest = self._rebuild_due = None
        self._refused = False
        self._floor = 0
        self._last_ts = -math.inf
        self._orphan_next, self._orphan_wait = 0.0, self._limits.orphan_replay_s
        if batch is not None:
            self._newest = (batch.seq, batch.ts)
            self._hear(batch)
            return [*effects, *self._in_order(batch, now)]
        if self.can_replay and now >= self._no_replay_until:
            effects += self._request(now)
        return effects

    def _reset(self, reason: str) -> list[Effect]:
        self._unproven = False
        if not self._dirty:
            return []
        self._dirty = False
        self.counters.resets += 1
        return [Reset(reason)]

    def _apply(self, batch: Batch) -> list[Effect]:
        self._next = batch.seq + 1
        self._last_ts = batch.ts
        if self._newest is None or batch.seq > self._newest[0]:
            self._newest = (batch.seq, batch.ts)
        if not self._dirty:
            self._run_start = batch.seq
        self._dirty = True
        self._cleared = self._cleared or AllBlocksCleared in map(type, batch.events)
        self.counters.applied += 1
        return [Apply(batch)]

    # -- replays --------------------------------------------------------------------------------

    def _schedule(self, at: float, *, attempt: int = 0, rebuild: bool = False) -> None:
        self._tokens += 1
        self._running = Running(self._tokens, at, attempt, rebuild=rebuild)

    def _request(self, now: float, *, attempt: int = 0, rebuild: bool = False) -> list[Effect]:
        self._schedule(now + self._limits.replay_timeout_s, attempt=attempt, rebuild=rebuild)
        assert self._running is not None
        self._running.sent = True
        if rebuild and self._next is not None:
            self._running.known = (self._next - 1, self._last_ts)
        self.counters.replays += 1
        start = self._floor if rebuild or self._next is None else max(self._next - 1, 0)
        return [Replay(start, self._running.token)]

    def _retry(self, running: Running, now: float) -> list[Effect]:
        attempt = running.attempt + 1
        rebuild = running.rebuild and not running.proven
        if attempt < self._limits.replay_attempts:
            wait = self._limits.retry_s * 2 ** (attempt - 1)
            self._schedule(now + wait, attempt=attempt, rebuild=rebuild)
            return []
        self._running = None
        self._behind = False
        self.counters.replays_failed += 1
        self._no_replay_until = now + self._limits.give_up_s
        effects = self._unbelieved() if self._unproven else []
        effects += self._drain()
        if self._missing():
            effects += self._skip()
        self._seek_rest()
        return effects

    def _unbelieved(self) -> list[Effect]:
        """The engine cannot be asked whether it is the one that a peer knew."""
        effects = self._reset("nobody could prove what a peer had told of it")
        self._next, self._floor, self._last_ts = None, 0, -math.inf
        waits = self._waiting.all()
        self._newest = (waits[-1].seq, waits[-1].ts) if waits else None
        return effects

    def _refuse_rebuild(self, now: float) -> list[Effect]:
        """The engine's memory begins no earlier than ours: starting anew would bring nothing.
        Whether it is the engine that we knew, and what came since, is asked instead."""
        self.counters.rebuilds_refused += 1
        self._orphan_wait = self._limits.orphan_replay_max_s
        if self._refused:
            self._earliest = None  # it said so twice: this is no loss on the way
        self._refused = not self._refused
        return self._request(now)

    def _hear(self, batch: Batch) -> None:
        if batch.seq >= self._floor and (self._earliest is None or batch.seq < self._earliest):
            self._earliest = batch.seq

    def _seek_rest(self) -> None:
        """The run begins after batches that were heard of: the engine may still be able to tell
        them, so it is asked in time. Orphans alone would not: not every block has children."""
        earliest, able = self._earliest, self.can_replay and self._running is None
        if able and self._dirty and earliest is not None and earliest < self._run_start:
            due = max(self._orphan_next, self._no_replay_until)
            self._rebuild_due = due if self._rebuild_due is None else min(self._rebuild_due, due)

    def _missing(self) -> bool:
        """Is there a batch that we know of and have not applied?"""
        newest = self._newest
        return newest is not None and (self._next is None or self._next <= newest[0])

    def _drain(self) -> list[Effect]:
        """Apply what waits and continues the run; what it covers, or an older life sent, goes."""
        effects: list[Effect] = []
        if self._next is None:
            if 0 not in self._waiting:
                return effects
            self._next = 0
        while (batch := self._waiting.take(self._next)) is not None:
            if batch.ts < self._last_ts:
                self.counters.stale += 1
                break
            effects += self._apply(batch)
        for batch in self._waiting.all():
            if batch.seq < self._next or batch.ts < self._last_ts:
                self._waiting.take(batch.seq)
                self.counters.stale += 1
        newest = self._newest
        if newest is not None and newest[1] < self._last_ts:
            self._newest = (self._next - 1, self._last_ts)
        return effects

    def _skip(self) -> list[Effect]:
        """Nobody can fill the hole: start anew from the last unbroken run that waits; where what
        came last is lost or found no room, after it: what waits is history, and must not count."""
        seqs, newest = [batch.seq for batch in self._waiting.all()], self._newest
        assert newest is not None, "there is a hole before it"
        if not seqs or seqs[-1] < newest[0]:
            effects = self._reset("what it sent lately is lost, and it cannot be asked again")
            self._forget_waiting()
            self._next, self._last_ts = newest[0] + 1, newest[1]
            self._rebuild_due = max(self._orphan_next, self._no_replay_until)
            return effects
        start = seqs[-1]
        while start - 1 in self._waiting:
            start -= 1
        effects = self._reset(f"batches {self._next or 0} to {start - 1} are lost")
        self._next = start
        while (batch := self._waiting.take(self._next)) is not None:
            effects += self._apply(batch)
        self._forget_waiting()
        return effects

    # -- the waiting room -----------------------------------------------------------------------

    def _keep(self, batch: Batch) -> bool:
        """False where it waits already, or there is no room."""
        waits = self._waiting.get(batch.seq)
        if waits is not None:
            if waits.ts >= batch.ts:
                return False
            self._waiting.take(batch.seq)
        if not self._waiting.put(batch):
            self.counters.overflowed += 1
            return False
        return True

    def _forget_waiting(self) -> None:
        """Nothing waits any more, for no replay either."""
        self._waiting.clear()
        self._running = None
        self._behind = False
