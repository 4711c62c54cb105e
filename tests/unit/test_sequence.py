"""`Sequencer`, one rule at a time. The machine test covers their mixture."""

from __future__ import annotations

from kvatlas.core.events import AllBlocksCleared, Batch, BlockStored
from kvatlas.core.sequence import Apply, Effect, Limits, Replay, Reset, Sequencer

LIMITS = Limits(waiting_batches_max=4)


def batch(seq: int, ts: float | None = None) -> Batch:
    return Batch(seq, float(seq + 1) if ts is None else ts, ())


def seqs(effects: list[Effect]) -> list[object]:
    """Applied batches by number, resets as "reset", replays as ("replay", start)."""
    told: list[object] = []
    for effect in effects:
        if isinstance(effect, Apply):
            told.append(effect.batch.seq)
        else:
            told.append("reset" if isinstance(effect, Reset) else ("replay", effect.from_seq))
    return told


def token(effects: list[Effect]) -> int:
    return next(effect.token for effect in effects if isinstance(effect, Replay))


def running(upto: int, *, can_replay: bool = True) -> Sequencer:
    """A sequencer that has applied batches 0 to ``upto``."""
    sequencer = Sequencer(can_replay=can_replay, limits=LIMITS)
    for seq in range(upto + 1):
        assert seqs(sequencer.offer(batch(seq), 0.0)) == [seq]
    return sequencer


def test_a_stream_in_order_is_applied_as_it_comes() -> None:
    assert running(5).next_seq == 6
    assert running(5).next_deadline() is None


def test_a_gap_is_replayed_with_one_known_batch_as_proof() -> None:
    sequencer = running(2)
    effects = sequencer.offer(batch(5), 1.0)
    assert seqs(effects) == [("replay", 2)]
    assert sequencer.offer(batch(6), 1.0) == []
    told: list[object] = []
    for seq in (2, 3, 4, 5):
        told += seqs(sequencer.replayed(token(effects), batch(seq), 1.0))
    told += seqs(sequencer.replay_done(token(effects), 1.0))
    assert told == [3, 4, 5, 6]
    assert seqs(sequencer.offer(batch(7), 1.0)) == [7]
    assert sequencer.counters.resets == 0


def test_a_hole_inside_a_replay_is_asked_for_again() -> None:
    sequencer = running(0)
    first = sequencer.offer(batch(6), 1.0)
    for seq, expected in ((0, []), (1, [1]), (3, []), (4, [])):
        assert seqs(sequencer.replayed(token(first), batch(seq), 1.0)) == expected
    second = sequencer.replay_done(token(first), 1.0)
    assert seqs(second) == [("replay", 1)]
    assert seqs(sequencer.replayed(token(second), batch(1), 1.0)) == []
    assert seqs(sequencer.replayed(token(second), batch(2), 1.0)) == [2]
    third = sequencer.replay_done(token(second), 1.0)
    assert seqs(third) == [3, 4, ("replay", 4)]


def test_first_batch_seen_is_not_the_first_sent() -> None:
    sequencer = Sequencer(can_replay=True, limits=LIMITS)
    effects = sequencer.offer(batch(3), 0.0)
    assert seqs(effects) == [("replay", 0)]
    assert seqs(sequencer.replayed(token(effects), batch(0), 0.0)) == [0]
    without = Sequencer(can_replay=False, limits=LIMITS)
    assert seqs(without.offer(batch(3), 0.0)) == [3]


def test_a_replay_that_starts_too_late_resets() -> None:
    sequencer = running(2)
    effects = sequencer.offer(batch(9), 1.0)
    assert seqs(sequencer.replayed(token(effects), batch(8), 1.0)) == ["reset", 8]
    assert seqs(sequencer.replay_done(token(effects), 1.0)) == [9]


def test_a_replay_that_cannot_prove_its_beginning_resets() -> None:
    sequencer = running(2)
    effects = sequencer.offer(batch(5), 1.0)
    assert seqs(sequencer.replayed(token(effects), batch(3), 1.0)) == ["reset", 3]


def test_another_history_in_the_replay_is_a_restart() -> None:
    sequencer = running(2)
    effects = sequencer.offer(batch(5), 1.0)
    again = sequencer.replayed(token(effects), batch(2, ts=77.0), 1.0)
    assert seqs(again) == ["reset", ("replay", 0)]
    assert sequencer.replayed(token(effects), batch(3), 1.0) == []  # of the answer before
    assert sequencer.epoch == 1


def test_an_empty_replay_is_a_restart_and_nothing_waits_on() -> None:
    sequencer = running(2)
    effects = sequencer.offer(batch(5), 1.0)
    again = sequencer.replay_done(token(effects), 1.0)
    assert seqs(again) == ["reset", ("replay", 0)]
    sequencer.offer(batch(6), 1.0)  # still in the pipe, of the life before
    assert sequencer.replay_done(token(again), 1.0) == []
    assert not sequencer.replaying
    assert not sequencer._waiting
    assert seqs(sequencer.offer(batch(0, ts=50.0), 1.0)) == [0]


def test_restart_by_numbers_that_go_back() -> None:
    sequencer = running(4)
    assert seqs(sequencer.offer(batch(0, ts=50.0), 1.0)) == ["reset", 0]
    sequencer = running(4)
    assert seqs(sequencer.offer(batch(2, ts=50.0), 1.0)) == ["reset", ("replay", 0)]
    sequencer = running(4, can_replay=False)
    assert seqs(sequencer.offer(batch(2, ts=50.0), 1.0)) == ["reset", 2]


def test_late_duplicates_are_dropped() -> None:
    sequencer = running(4)
    assert sequencer.offer(batch(2), 1.0) == []
    assert sequencer.offer(batch(4), 1.0) == []
    assert sequencer.counters.duplicates == 2


def test_a_leftover_of_an_earlier_life_is_not_believed() -> None:
    sequencer = running(1)
    effects = sequencer.offer(batch(2, ts=0.5), 1.0)
    assert seqs(effects) == [("replay", 1)]
    assert seqs(sequencer.replayed(token(effects), batch(1), 1.0)) == []
    assert sequencer.replay_done(token(effects), 1.0) == []
    assert seqs(sequencer.offer(batch(2), 1.0)) == [2]


def test_a_clock_set_back_costs_a_replay_and_no_claims() -> None:
    sequencer = running(1)
    effects = sequencer.offer(batch(2, ts=0.5), 1.0)
    sequencer.replayed(token(effects), batch(1), 1.0)
    assert seqs(sequencer.replayed(token(effects), batch(2, ts=0.5), 1.0)) == [2]
    assert sequencer.replay_done(token(effects), 1.0) == []
    assert seqs(sequencer.offer(batch(3, ts=0.6), 1.0)) == [3]
    assert sequencer.counters.resets == 0


def test_what_waits_is_of_one_life_only() -> None:
    sequencer = running(0)
    effects = sequencer.restarted("a new process start time", 1.0)
    assert seqs(effects) == ["reset", ("replay", 0)]
    sequencer.offer(batch(1), 1.0)  # of the life before, still in the pipe
    sequencer.offer(batch(2), 1.0)
    assert seqs(sequencer.replayed(token(effects), batch(0, ts=50.0), 1.0)) == [0]
    assert sequencer.replay_done(token(effects), 1.0) == []
    assert sequencer.next_seq == 1
    assert not sequencer._waiting
    assert seqs(sequencer.offer(batch(1, ts=51.0), 1.0)) == [1]


def test_retries_back_off_then_give_up_and_go_on_with_what_waits() -> None:
    sequencer = running(0)
    assert seqs(sequencer.offer(batch(2), 0.0)) == [("replay", 0)]
    sequencer.offer(batch(3), 0.0)
    now, asked = 0.0, 1
    told: list[object] = []
    while sequencer.replaying:
        now = max(now, sequencer.next_deadline() or 0.0)
        effects = seqs(sequencer.tick(now))
        asked += effects.count(("replay", 0))
        told += [effect for effect in effects if effect != ("replay", 0)]
    assert asked == LIMITS.replay_attempts
    assert told == ["reset", 2, 3]
    assert now == 3 * LIMITS.replay_timeout_s + 3 * LIMITS.retry_s
    # For a while holes are not asked for.
    assert seqs(sequencer.offer(batch(6), now)) == ["reset", 6]
    later = now + LIMITS.give_up_s
    assert seqs(sequencer.offer(batch(9), later)) == [("replay", 6)]


def test_a_failed_send_counts_as_an_attempt() -> None:
    sequencer = running(0)
    effects = sequencer.offer(batch(2), 0.0)
    assert sequencer.replay_failed(token(effects), 0.0) == []
    assert sequencer.next_deadline() == LIMITS.retry_s


def test_a_replay_that_brings_nothing_new_ends() -> None:
    sequencer = running(2)
    asked = token(sequencer.offer(batch(5), 0.0))
    assert sequencer.asked == asked
    for second in range(1, 5):
        assert sequencer.replayed(asked, batch(2), float(second)) == []
        assert sequencer.replayed(asked, batch(5), float(second)) == []  # waits already
        assert sequencer.next_deadline() == LIMITS.replay_timeout_s
    assert sequencer.tick(LIMITS.replay_timeout_s) == []
    assert sequencer.asked is None  # what it still says is for nobody


def test_the_waiting_room_is_limited_and_nothing_is_lost_by_it() -> None:
    sequencer = running(0)
    effects = sequencer.offer(batch(2), 0.0)
    for seq in range(3, 12):
        sequencer.offer(batch(seq), 0.0)
    assert sequencer.counters.overflowed == 6
    told: list[object] = []
    for seq in range(6):
        told += seqs(sequencer.replayed(token(effects), batch(seq), 0.0))
    second = sequencer.replay_done(token(effects), 0.0)
    assert told + seqs(second) == [1, 2, 3, 4, 5, ("replay", 5)]


def test_what_waits_does_not_count_where_newer_batches_found_no_room() -> None:
    """The room filled with the beginning of a history of which the end was applied before."""
    sequencer = running(0)
    effects = sequencer.offer(batch(10), 0.0)
    for seq in (11, 12, 13, 60):
        assert sequencer.offer(batch(seq), 0.0) == []
    assert sequencer.counters.overflowed == 1
    now = 0.0
    told = seqs(sequencer.replay_failed(token(effects), now))
    while (due := sequencer.next_deadline()) is not None and not sequencer.counters.replays_failed:
        told += seqs(sequencer.tick(now := due))
    assert [each for each in told if not isinstance(each, tuple)] == ["reset"]
    assert not sequencer.replaying
    assert sequencer.offer(batch(12), now) == []  # a late one of old
    assert seqs(sequencer.offer(batch(61), now)) == [61]
    due = sequencer.next_deadline()
    assert due is not None
    assert seqs(sequencer.tick(due)) == [("replay", 0)]  # the rest is asked for in time


def test_the_waiting_room_is_limited_in_bytes() -> None:
    event = BlockStored((1,), None, b"\0" * 400, 100)
    sequencer = Sequencer(can_replay=True, limits=Limits(waiting_bytes_max=1000))
    for seq in range(1, 6):
        sequencer.offer(Batch(seq, float(seq), (event,)), 0.0)
    assert sequencer.counters.overflowed == 3


def test_orphans_ask_for_everything_but_not_too_often() -> None:
    sequencer = running(3)
    effects = sequencer.orphaned(100.0)
    assert seqs(effects) == [("replay", 0)]
    told = seqs(sequencer.replayed(token(effects), batch(0), 100.0))
    for seq in (1, 2, 3):
        told += seqs(sequencer.replayed(token(effects), batch(seq), 100.0))
    assert told + seqs(sequencer.replay_done(token(effects), 100.0)) == ["reset", 0, 1, 2, 3]
    assert sequencer.orphaned(101.0) == []
    assert sequencer.next_deadline() == 100.0 + LIMITS.orphan_replay_s  # put off, not forgotten
    again = sequencer.tick(100.0 + LIMITS.orphan_replay_s)
    assert seqs(again) == [("replay", 0)]
    for seq in range(4):
        sequencer.replayed(token(again), batch(seq), 130.0)
    sequencer.replay_done(token(again), 130.0)
    sequencer.orphaned(131.0)
    assert sequencer.next_deadline() == 130.0 + 2 * LIMITS.orphan_replay_s
    assert running(0, can_replay=False).orphaned(0.0) == []


def test_a_rebuild_that_meets_another_history_is_a_restart() -> None:
    sequencer = running(2)
    effects = sequencer.orphaned(1.0)
    told = seqs(sequencer.replayed(token(effects), batch(0), 1.0))
    told += seqs(sequencer.replayed(token(effects), batch(1), 1.0))
    assert told == ["reset", 0, 1]
    assert seqs(sequencer.replayed(token(effects), batch(2, ts=50.0), 1.0)) == [
        "reset",
        ("replay", 0),
    ]
    sequencer = running(2)
    effects = sequencer.orphaned(1.0)
    sequencer.replayed(token(effects), batch(0), 1.0)
    # The engine that we knew would have sent 1 and 2 as well.
    assert seqs(sequencer.replay_done(token(effects), 1.0)) == ["reset", ("replay", 0)]


def test_a_rebuild_from_less_than_is_known_is_refused() -> None:
    sequencer = running(3)
    effects = sequencer.orphaned(100.0)
    sequencer.offer(batch(4), 100.0)
    instead = sequencer.replayed(token(effects), batch(2), 100.0)
    assert seqs(instead) == [("replay", 3)]
    assert sequencer.replayed(token(effects), batch(3), 100.0) == []
    assert sequencer.replayed(token(instead), batch(3), 100.0) == []
    assert seqs(sequencer.replay_done(token(instead), 100.0)) == [4]
    assert sequencer.counters.rebuilds_refused == 1
    assert seqs(sequencer.offer(batch(5), 100.0)) == [5]
    # A run that began later gains by it: its beginning may be what is missing.
    late = Sequencer(can_replay=True, limits=LIMITS)
    late.connected(0.0)
    late.tick(50.0)
    while (deadline := late.next_deadline()) is not None:
        late.tick(deadline)
    assert seqs(late.offer(batch(7), 50.0)) == [7]
    effects = late.orphaned(100.0)
    assert seqs(late.replayed(token(effects), batch(2), 100.0)) == ["reset", 2]


def test_a_connect_asks_after_it_has_settled() -> None:
    sequencer = Sequencer(can_replay=True, limits=LIMITS)
    assert sequencer.connected(10.0) == []
    assert sequencer.next_deadline() == 10.0 + LIMITS.settle_s
    assert sequencer.offer(batch(4), 10.0) == []
    assert seqs(sequencer.tick(10.0 + LIMITS.settle_s)) == [("replay", 0)]
    silent = Sequencer(can_replay=False, limits=LIMITS)
    assert silent.connected(10.0) == []
    assert silent.next_deadline() is None


def test_restarted_from_outside_forgets_and_asks() -> None:
    sequencer = running(3)
    assert seqs(sequencer.restarted("asleep", 1.0)) == ["reset", ("replay", 0)]
    silent = running(3, can_replay=False)
    assert seqs(silent.restarted("asleep", 1.0)) == ["reset"]
    assert seqs(silent.offer(batch(0, ts=0.1), 1.0)) == [0]  # any clock will do in a new life
    assert silent.restarted("again", 1.0) == [Reset("again")]


def test_a_dropped_cache_stays_away() -> None:
    sequencer = running(3)
    assert sequencer.dropped("asleep") == [Reset("asleep")]
    assert seqs(sequencer.offer(batch(4), 1.0)) == [4]
    effects = sequencer.orphaned(1.0)
    assert seqs(effects) == [("replay", 4)]
    assert sequencer.replayed(token(effects), batch(3), 1.0) == []  # asked for 4, got more
    assert seqs(sequencer.replayed(token(effects), batch(4), 1.0)) == ["reset", 4]
    gap = running(3)
    gap.dropped("asleep")
    assert gap.orphaned(1.0) == []  # nothing to rebuild from yet
    effects = gap.offer(batch(6), 1.0)
    assert seqs(effects) == [("replay", 3)]
    assert gap.replayed(token(effects), batch(3), 1.0) == []
    assert seqs(gap.replayed(token(effects), batch(4), 1.0)) == [4]


def test_what_a_hole_cost_is_asked_for_once_the_engine_can_be_asked_again() -> None:
    """Three replays in vain drop what came before the hole. That no orphan complains about it
    must not keep it away for good (found by the fault simulation: a partition of 17 s)."""
    sequencer = running(1)
    sequencer.offer(batch(3), 0.0)
    told: list[object] = []
    while sequencer.replaying:
        now = sequencer.next_deadline()
        assert now is not None
        told = seqs(sequencer.tick(now))
    assert told == ["reset", 3]
    due = sequencer.next_deadline()
    assert due is not None
    effects = sequencer.tick(due)
    assert seqs(effects) == [("replay", 0)]
    told = []
    for seq in range(4):
        told += seqs(sequencer.replayed(token(effects), batch(seq), due))
    assert told == ["reset", 0, 1, 2, 3]
    assert sequencer.replay_done(token(effects), due) == []
    assert sequencer.next_deadline() is None


def test_what_the_engine_no_longer_remembers_is_not_asked_for_for_ever() -> None:
    sequencer = running(1)
    sequencer.offer(batch(3), 0.0)
    while sequencer.replaying:
        sequencer.tick(sequencer.next_deadline() or 0.0)
    asked: list[object] = []
    while (due := sequencer.next_deadline()) is not None:
        effects = sequencer.tick(due)
        while effects:
            asked += seqs(effects)
            assert len(asked) < 10
            number = token(effects)
            effects = sequencer.replayed(number, batch(3), due)
            if not effects:
                effects = sequencer.replay_done(number, due)
    # Twice, and each time whether it is still the engine that we knew; what is known stays.
    assert asked == 2 * [("replay", 0), ("replay", 3)]
    assert sequencer.counters.rebuilds_refused == 2
    assert sequencer.counters.resets == 1


def test_what_it_stored_since_it_woke_stays() -> None:
    """A second look at an engine that slept must not cost what it stored since, provided that it
    said itself that its cache was dropped (found by the fault simulation)."""
    sequencer = running(3)
    assert seqs(sequencer.dropped("it sleeps")) == ["reset"]
    cleared = Batch(4, 5.0, (AllBlocksCleared(),))
    assert seqs(sequencer.offer(cleared, 1.0)) == [4]
    assert seqs(sequencer.offer(batch(5), 1.0)) == [5]
    assert sequencer.dropped("it slept", awake=True) == []
    assert seqs(sequencer.dropped("it sleeps")) == ["reset"]
    assert seqs(sequencer.offer(batch(6), 1.0)) == [6]  # perhaps from before it fell asleep
    assert seqs(sequencer.dropped("it slept", awake=True)) == ["reset"]


def begun_late(now: float) -> Sequencer:
    """One that met a new life while it could not be asked, and its batch 0 after its batch 1."""
    sequencer = running(4)
    effects = sequencer.offer(batch(9), now)
    while sequencer.replaying:
        effects = sequencer.tick(sequencer.next_deadline() or now)
    assert seqs(effects) == ["reset", 9]
    assert seqs(sequencer.offer(batch(1, ts=51.0), now)) == ["reset", 1]
    assert sequencer.next_deadline() is None
    assert sequencer.offer(batch(0, ts=50.0), now) == []
    return sequencer


def test_a_first_batch_that_comes_after_the_second_is_asked_for_again() -> None:
    """What it said would stay unknown until an orphan complained (found by the fault simulation:
    a new life whose batches overtook each other)."""
    sequencer = begun_late(0.0)
    due = sequencer.next_deadline()
    assert due is not None
    effects = sequencer.tick(due)
    assert seqs(effects) == [("replay", 0)]
    told = [*seqs(sequencer.replayed(token(effects), batch(0, ts=50.0), due))]
    told += seqs(sequencer.replayed(token(effects), batch(1, ts=51.0), due))
    assert [*told, *seqs(sequencer.replay_done(token(effects), due))] == ["reset", 0, 1]
    assert sequencer.next_deadline() is None


def test_what_a_hole_cost_a_new_life_is_asked_for_again() -> None:
    """The batch by which a new life was noticed counts as heard of."""
    sequencer = begun_late(0.0)
    sequencer.dropped("asleep")  # what is before this is over, late or not
    assert sequencer.offer(batch(0, ts=50.0), 1.0) == []
    assert sequencer.next_deadline() is None
    sequencer = running(4)
    sequencer.offer(batch(9), 0.0)
    while sequencer.replaying:
        sequencer.tick(sequencer.next_deadline() or 0.0)
    assert seqs(sequencer.offer(batch(1, ts=51.0), 0.0)) == ["reset", 1]
    assert seqs(sequencer.offer(batch(3, ts=53.0), 0.0)) == ["reset", 3]
    assert sequencer.next_deadline() is not None


def test_a_late_duplicate_of_what_is_applied_asks_for_nothing() -> None:
    sequencer = running(4)
    for seq in range(5):
        assert sequencer.offer(batch(seq), 1.0) == []
    assert sequencer.next_deadline() is None
