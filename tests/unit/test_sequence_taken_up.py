"""A stream that goes on from where a peer had applied it: proved by the engine, or given up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core.events import Batch
from kvatlas.core.records import Place
from kvatlas.core.sequence import Apply, Effect, Limits, Replay, Reset, Sequencer

LIMITS = Limits()


def batch(seq: int, ts: float | None = None) -> Batch:
    return Batch(seq, 100.0 + seq if ts is None else ts, ())


def fed(count: int) -> Sequencer:
    sequencer = Sequencer(can_replay=True)
    for seq in range(count):
        sequencer.offer(batch(seq), 0.0)
    return sequencer


def taken(count: int = 10) -> tuple[Sequencer, Replay]:
    """One that took up ``count`` batches of a peer, and what it asks the engine."""
    place = fed(count).place()
    assert place is not None
    sequencer = Sequencer(can_replay=True)
    assert sequencer.outdone(place) == ""
    assert sequencer.take_up(place, 0.0) == []
    assert sequencer.behind
    [asked] = sequencer.tick(LIMITS.settle_s)
    assert isinstance(asked, Replay)
    return sequencer, asked


def applied(effects: list[Effect]) -> list[int]:
    return [effect.batch.seq for effect in effects if isinstance(effect, Apply)]


def test_the_engine_is_asked_for_the_batch_that_is_known_and_tells_what_follows() -> None:
    sequencer, asked = taken()
    assert asked.from_seq == 9
    assert sequencer.replayed(asked.token, batch(9), 1.0) == []
    assert sequencer.behind, "it has not caught up"
    assert applied(sequencer.replayed(asked.token, batch(10), 1.0)) == [10]
    assert sequencer.replay_done(asked.token, 1.0) == []
    assert not sequencer.behind
    assert sequencer.next_seq == 11


def test_what_came_live_meanwhile_follows() -> None:
    sequencer, asked = taken()
    assert sequencer.offer(batch(10), 0.5) == []
    sequencer.replayed(asked.token, batch(9), 1.0)
    assert applied(sequencer.replay_done(asked.token, 1.0)) == [10]
    assert not sequencer.behind


def test_another_life_is_told_by_the_time_of_the_known_batch() -> None:
    sequencer, asked = taken()
    [reset, _] = sequencer.replayed(asked.token, batch(9, 500.0), 1.0)
    assert isinstance(reset, Reset)
    assert sequencer.next_seq is None


def test_another_life_is_told_by_a_batch_that_comes_live() -> None:
    sequencer, _ = taken()
    effects = sequencer.offer(batch(3, 500.0), 0.5)
    assert isinstance(effects[0], Reset)


def test_a_life_that_has_sent_nothing_is_another_one() -> None:
    sequencer, asked = taken()
    assert isinstance(sequencer.replay_done(asked.token, 1.0)[0], Reset)


def test_a_hole_behind_what_the_peer_had_takes_its_claims() -> None:
    sequencer, asked = taken()
    effects = sequencer.replayed(asked.token, batch(14), 1.0)
    assert isinstance(effects[0], Reset)
    assert applied(effects) == [14]


@pytest.mark.parametrize("live", [0, 2])
def test_an_engine_that_never_answers_leaves_nothing_to_believe(live: int) -> None:
    """Whatever came live meanwhile counts alone."""
    sequencer, _ = taken()
    for seq in range(20, 20 + live):
        sequencer.offer(batch(seq), 0.5)
    effects: list[Effect] = []
    now = 0.0
    while (deadline := sequencer.next_deadline()) is not None and now < 60:
        now = deadline
        effects += sequencer.tick(now)
        assert sequencer.behind or any(isinstance(e, Reset) for e in effects)
    kept = [effect for effect in effects if not isinstance(effect, Replay)]
    assert isinstance(kept[0], Reset)
    assert applied(kept) == list(range(20, 20 + live))


def test_a_peer_is_not_taken_up_where_that_brings_nothing() -> None:
    place = fed(10).place()
    assert place is not None
    assert "as much is known" in fed(10).outdone(place)
    assert "asked for" in Sequencer(can_replay=False).outdone(place)
    later = Sequencer(can_replay=True)
    later.offer(Batch(0, 900.0, ()), 0.0)
    assert "earlier life" in later.outdone(place)


def test_history_only_is_no_place() -> None:
    assert Sequencer(can_replay=True).place() is None
    sequencer, _ = taken()
    assert sequencer.place() is None


@given(
    at=st.integers(1, 12),
    gone_on=st.integers(0, 8),
    buffer=st.integers(1, 12),
    restarted=st.booleans(),
    lost=st.sets(st.integers(0, 20), max_size=4),
)
def test_what_is_applied_is_one_unbroken_run_of_the_engines_own_life(
    at: int, gone_on: int, buffer: int, restarted: bool, lost: set[int]
) -> None:
    """A peer stopped at ``at``; the engine went on, or began anew, and keeps ``buffer`` batches."""
    peer = fed(at).place()
    assert peer is not None
    life = 500.0 if restarted else 100.0
    sent = [batch(s, life + s) for s in range((0 if restarted else at) + gone_on)]
    sequencer = Sequencer(can_replay=True)
    sequencer.take_up(peer, 0.0)
    run: list[Batch] = [batch(s) for s in range(at)]  # what the directory was given by the peer
    asked: Replay | None = None
    now = 0.0

    def perform(effects: list[Effect]) -> None:
        nonlocal asked, run
        for effect in effects:
            if isinstance(effect, Reset):
                run = []
            elif isinstance(effect, Apply):
                run.append(effect.batch)
            else:
                asked = effect

    for turn in range(8):
        now += LIMITS.replay_timeout_s
        perform(sequencer.tick(now))
        if asked is not None:
            replay, asked = asked, None
            for known in sent[-buffer:]:
                if known.seq >= replay.from_seq and (turn > 1 or known.seq not in lost):
                    perform(sequencer.replayed(replay.token, known, now))
            perform(sequencer.replay_done(replay.token, now))
        if not sequencer.behind:
            assert all(b in sent for b in run), "what is believed is of this life"
            assert all(b.seq == a.seq + 1 for a, b in itertools.pairwise(run))
    assert not sequencer.behind
    whole = lost.isdisjoint(range(at - 1, at + gone_on))
    if not restarted and gone_on < buffer and whole:
        assert [b.seq for b in run] == list(range(at + gone_on))


def test_a_place_says_how_far_and_by_what_it_is_known() -> None:
    place = fed(3).place()
    assert place == Place(3, 102.0, 0, 0, True, False)
