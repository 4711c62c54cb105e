"""A directory that was fed all along, and one that took up its snapshot and was fed the rest."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_kit import (
    ENGINES,
    FP,
    LAYOUTS,
    PROMPTS,
    believed,
    frames,
    histories,
    replica,
    taken_up,
)

from kvatlas.core.dispatch import Dispatcher, Finished, FirstToken, Question, Sent
from kvatlas.core.layout import Layout
from kvatlas.core.router import EXPECTED_GRACE_S
from kvatlas.core.snapshot import Restore
from kvatlas.errors import SnapshotError


def serve(dispatcher: Dispatcher, times: list[int], now: float) -> float:
    """Requests of a hundred milliseconds and more, so that prices are measured."""
    for number, tenths in enumerate(times):
        for engine in ENGINES:
            among = tuple((e, "") for e in ENGINES if e == engine)
            asked = Question(f"{now}-{number}", among, array("I", PROMPTS[0]).tobytes())
            dispatcher.handle(asked, now)
            dispatcher.handle(Sent(asked.id, engine), now)
            now += tenths / 10
            dispatcher.handle(FirstToken(asked.id, tenths / 10), now)
            now += 0.01
            dispatcher.handle(Finished(asked.id, engine, True, 0, tenths / 10), now)
    return now


def taken(old: Dispatcher, layout: Layout) -> Dispatcher:
    new = replica(layout)
    restore = Restore(new, lambda publisher, place: "")
    told = taken_up(restore, b"".join(frames(old)), step=777)
    assert not told.left_out
    assert told.holders == old.directory.holders == new.directory.holders
    believed(new)
    return new


def settle(dispatcher: Dispatcher, now: float) -> None:
    """A gateway's own requests are no state to share: all end, and each engine has had one."""
    for engine in ENGINES:
        asked = Question(f"last-{engine}", ((engine, ""),), array("I", [5] * 40).tobytes())
        dispatcher.handle(asked, now)
        dispatcher.handle(Sent(asked.id, engine), now)
        dispatcher.handle(Finished(asked.id, engine, False), now)


def same(one: Dispatcher, other: Dispatcher, now: float) -> None:
    """The same claims, answers and plans."""
    now += EXPECTED_GRACE_S
    for dispatcher in (one, other):
        settle(dispatcher, now)
    now += 1.0
    assert one.directory.digest() == other.directory.digest()
    assert one.directory.muted() == other.directory.muted()
    for engine in ENGINES:
        assert one.directory.held(engine) == other.directory.held(engine)
    for prompt in PROMPTS:
        tokens = array("I", [*prompt, 1]).tobytes()
        keys = one.keys(ENGINES[0], tokens)
        found = [
            sorted(d.directory.peek(keys, FP), key=lambda r: r.publisher) for d in (one, other)
        ]
        assert found[0] == found[1]
        for engine in ENGINES:
            assert one.directory.positions(engine, keys) == other.directory.positions(engine, keys)
        asked = Question("same", tuple((e, "") for e in ENGINES), tokens)
        plans = [d.handle(asked, now) for d in (one, other)]
        assert plans[0] is not None
        assert plans[0] == plans[1]
        for dispatcher in (one, other):
            dispatcher.handle(Finished("same", ENGINES[0], False), now)


@pytest.mark.parametrize("shape", list(LAYOUTS))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_replica_that_was_told_is_one_that_heard_all(shape: str, data: st.DataObject) -> None:
    layout = LAYOUTS[shape]
    history = data.draw(histories(layout))
    cut = data.draw(st.integers(0, len(history)))
    old = replica(layout)
    for publisher, event in history[:cut]:
        old.apply(publisher, [event])
    now = serve(old, data.draw(st.lists(st.integers(1, 30), max_size=12)), 1.0)
    new = taken(old, layout)
    same(old, new, now)
    for publisher, event in history[cut:]:
        assert old.apply(publisher, [event]) == new.apply(publisher, [event])
    same(old, new, now)
    same(old, taken(new, layout), now)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_is_no_whole_snapshot_changes_nothing(data: st.DataObject) -> None:
    """Cut off, changed in one bit, a frame left out, doubled or moved."""
    layout = LAYOUTS["windows"]
    old, new = replica(layout), replica(layout)
    for publisher, event in data.draw(histories(layout)):
        old.apply(publisher, [event])
    for publisher, event in data.draw(histories(layout)):
        new.apply(publisher, [event])
    before, holders = new.directory.digest(), new.directory.holders
    parts = list(frames(old))
    place = data.draw(st.integers(0, len(parts) - 1))
    how = data.draw(st.sampled_from(["cut", "flip", "drop", "double", "swap"]))
    if how == "cut":
        whole = b"".join(parts)
        sent = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif how == "flip":
        part = bytearray(parts[place])
        part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        sent = b"".join((*parts[:place], part, *parts[place + 1 :]))
    elif how == "drop":
        sent = b"".join((*parts[:place], *parts[place + 1 :]))
    elif how == "double":
        sent = b"".join((*parts[: place + 1], *parts[place:]))
    else:
        other = data.draw(st.integers(0, len(parts) - 1).filter(lambda n: parts[n] != parts[place]))
        parts[place], parts[other] = parts[other], parts[place]
        sent = b"".join(parts)
    restore = Restore(new, lambda publisher, place: "")
    with pytest.raises(SnapshotError):
        taken_up(restore, sent)
    restore.give_up()
    assert new.directory.digest() == before
    assert new.directory.holders == holders
    taken_up(Restore(new, lambda publisher, place: ""), b"".join(frames(old)))
    believed(new)
    for engine in ENGINES:
        assert sorted(new.directory.holdings(engine)) == sorted(old.directory.holdings(engine))
