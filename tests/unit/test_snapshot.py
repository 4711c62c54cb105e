"""Whose snapshot is refused, and why; what one takes in pieces; and what is left out of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from snapshot_kit import (
    AGENTS,
    ENGINES,
    FP,
    GRID,
    LAYOUTS,
    NONCE,
    PLACE,
    PROMPTS,
    RING,
    believed,
    frames,
    replica,
    stored,
    taken_up,
)

from kvatlas.core.directory import Limits
from kvatlas.core.dispatch import Dispatcher, Join, Leave, Unsettle
from kvatlas.core.events import UnitsHeld
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Place, Publisher, Tier
from kvatlas.core.snapshot import Restore, engine_pieces
from kvatlas.core.snapshot_frames import FRAME_BYTES_MAX, Reader, Writer, encoded
from kvatlas.core.snapshot_values import (
    FORMAT,
    Agent,
    Closing,
    Engine,
    Masks,
    Names,
    Opening,
    Pending,
    Piece,
    Placed,
    PoolPrices,
    Recent,
    Shelved,
)
from kvatlas.errors import SnapshotError

PLAIN = LAYOUTS["plain"]
WINDOWS = LAYOUTS["windows"]
KEY = b"k" * 16


def anything(publisher: Publisher, place: Place) -> str:
    return ""


def fed(layout: str = "plain") -> Dispatcher:
    """One that was told of two prompts by one engine, and of two units by an agent."""
    dispatcher = replica(LAYOUTS[layout])
    groups = range(len(LAYOUTS[layout].groups))
    for prompt in (0, 1):
        for group in groups:
            event = stored((LAYOUTS[layout], group), prompt, (0, 80), 20, Tier.HBM)
            assert event is not None
            dispatcher.apply(ENGINES[0], [event])
    dispatcher.apply(AGENTS[0], [UnitsHeld(Tier.DRAM, (KEY,)), UnitsHeld(Tier.OBJECT, (KEY,))])
    return dispatcher


def hold(dispatcher: Dispatcher) -> dict[str, int]:
    """Tokens that each engine could resume of the first prompt."""
    keys = RING.chain(RING.root(FP), b"".join(t.to_bytes(4, "little") for t in PROMPTS[0]), GRID)
    return {str(r.publisher): r.tokens for r in dispatcher.directory.peek(keys, FP) if r.tokens}


def test_what_is_taken_up_is_in_no_answer_before_it_is_believed() -> None:
    new = replica(PLAIN)
    taken = taken_up(Restore(new, anything), b"".join(frames(fed())))
    assert set(taken.places) == {*ENGINES, *AGENTS}
    assert taken.stores == ("s3",)
    assert hold(new) == {}
    assert new.directory.lends(AGENTS[0], [KEY], FP) == 0
    new.believe(ENGINES[0], True)
    assert hold(new) == {"w1": 80}
    new.believe(AGENTS[0], True)
    assert new.directory.lends(AGENTS[0], [KEY], FP) == 1


def test_nothing_counts_before_the_last_piece() -> None:
    new = replica(PLAIN)
    before = new.directory.digest()
    restore = Restore(new, anything)
    reader = Reader(RING, NONCE)
    for frame in list(frames(fed()))[:-1]:
        reader.feed(frame)
        for piece in reader.pieces():
            restore.take(piece)
    assert new.directory.digest() == before
    with pytest.raises(SnapshotError, match="ends before its end"):
        restore.commit()


def test_another_secret_is_told() -> None:
    other = Keyring(b"another secret for the tests")
    with pytest.raises(SnapshotError, match="another secret"):
        taken_up(Restore(replica(PLAIN), anything), b"".join(frames(fed(), other)))


def test_a_snapshot_that_somebody_else_had_asked_for_is_none() -> None:
    told = b"".join(frames(fed(), nonce=b"m" * 16))
    with pytest.raises(SnapshotError, match="changed on its way"):
        taken_up(Restore(replica(PLAIN), anything), told)


def test_another_format_is_told() -> None:
    with pytest.raises(SnapshotError, match=f"format {FORMAT + 1}"):
        Restore(replica(PLAIN), anything).take(Opening(FORMAT + 1))


def test_a_piece_of_no_sensible_size_is_not_waited_for() -> None:
    reader = Reader(RING, NONCE)
    reader.feed((FRAME_BYTES_MAX + 1).to_bytes(4, "big"))
    with pytest.raises(SnapshotError, match="at most"):
        list(reader.pieces())


def test_what_is_no_piece_is_told() -> None:
    class Strange(Piece, frozen=True, tag="strange"):
        pass

    reader = Reader(RING, NONCE)
    reader.feed(Writer(RING, NONCE).frame(encoded(Strange())))
    with pytest.raises(SnapshotError, match="does not know"):
        list(reader.pieces())


ENGINE = Engine(ENGINES[0], FP, 1, PLACE)
NAMES = Names((5).to_bytes(8, "little"), KEY, [(0, Tier.HBM, b"")])


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([ENGINE, ENGINE], "twice"),
        ([Agent(AGENTS[0], PLACE), Agent(AGENTS[0], PLACE)], "twice"),
        ([msgspec.structs.replace(ENGINE, lanes=3)], "other groups"),
        ([ENGINE, Masks(0, Tier.HBM, [])], "windows"),
        ([ENGINE, Names(b"", KEY, [])], "contradicts"),
        ([ENGINE, Names(bytes(8), KEY[:15], [])], "contradicts"),
        ([ENGINE, Names(bytes(8), bytes(16), [])], "contradicts"),
        ([ENGINE, msgspec.structs.replace(NAMES, held=[(1, Tier.HBM, b"")])], "contradicts"),
        ([ENGINE, msgspec.structs.replace(NAMES, held=[(0, Tier.HBM, b"\1\1")])], "contradicts"),
        ([ENGINE, Pending([(1, 5, 1)])], "contradicts"),
        ([ENGINE, Recent([(i, KEY) for i in range(4097)])], "more of an engine"),
        ([ENGINE, Pending([(0, i, 1) for i in range(65_537)])], "more of an engine"),
        ([Agent(AGENTS[0], PLACE), Shelved(Tier.OBJECT, 0, KEY)], "no agent has"),
        ([Agent(AGENTS[0], PLACE), Shelved(Tier.DRAM, 0, KEY[:15])], "half a key"),
        ([Opening(FORMAT)], "out of order"),
        ([Closing(7)], "missing"),
        ([Closing(1), ENGINE], "out of order"),
    ],
)
def test_what_contradicts_itself_is_refused(pieces: list[Piece], why: str) -> None:
    new = replica(PLAIN)
    before = new.directory.digest()
    restore = Restore(new, anything)
    restore.take(Opening(FORMAT))
    for piece in pieces[:-1]:
        restore.take(piece)
    with pytest.raises(SnapshotError, match=why):
        restore.take(pieces[-1])
    restore.give_up()
    assert (new.directory.digest(), new.directory.holders) == (before, 0)


@pytest.mark.parametrize("piece", [Masks(0, Tier.HBM, [(KEY, 99)]), Placed(0, [(5, KEY, 9)])])
def test_units_that_a_window_does_not_have_are_refused(piece: Piece) -> None:
    restore = Restore(replica(WINDOWS), anything)
    restore.take(Opening(FORMAT))
    restore.take(Engine(ENGINES[0], FP, 3, PLACE))
    with pytest.raises(SnapshotError, match="contradicts"):
        restore.take(piece)


def test_figures_that_are_none_are_no_prices() -> None:
    from kvatlas.core.snapshot_prices import prices_of

    price = next(p for p in prices_of(replica(PLAIN)) if isinstance(p, PoolPrices))
    bad = msgspec.structs.replace(price.crowd, slope=float("nan"))
    restore = Restore(replica(PLAIN), anything)
    restore.take(Opening(FORMAT))
    with pytest.raises(SnapshotError, match="figures"):
        restore.take(msgspec.structs.replace(price, crowd=bad))


@pytest.mark.parametrize(
    "limits",
    [
        Limits(holders_max=6),
        Limits(holders_per_publisher_max=6),
    ],
)
def test_more_than_this_directory_takes_is_refused_and_leaves_no_trace(limits: Limits) -> None:
    new = replica(PLAIN, limits)
    restore = Restore(new, anything)
    with pytest.raises(SnapshotError, match="more"):
        taken_up(restore, b"".join(frames(fed())))
    restore.give_up()
    assert new.directory.holders == 0
    event = stored((PLAIN, 0), 0, (0, 80), 20, Tier.HBM)
    assert event is not None
    assert new.apply(ENGINES[0], [event]).stored == 5, "there is room as before"


def test_more_on_a_shelf_than_there_may_be_is_refused() -> None:
    restore = Restore(replica(PLAIN, Limits(holders_per_publisher_max=1)), anything)
    restore.take(Opening(FORMAT))
    restore.take(Agent(AGENTS[0], PLACE))
    with pytest.raises(SnapshotError, match="one shelf"):
        restore.take(Shelved(Tier.DRAM, 0, KEY + b"l" * 16))


def _unknown(dispatcher: Dispatcher) -> None:
    dispatcher.handle(Leave(ENGINES[0]), 0.0)
    dispatcher.handle(Unsettle(AGENTS[0]), 0.0)


def _other(dispatcher: Dispatcher) -> None:
    dispatcher.handle(Join(ENGINES[0], PLAIN, b"\2" * 32), 0.0)


@pytest.mark.parametrize(
    ("change", "why"), [(_unknown, "not known here"), (_other, "another fingerprint")]
)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_engine_that_is_not_the_same_here_is_left_out(
    change: Callable[[Dispatcher], None], why: str, when: str
) -> None:
    new = replica(PLAIN)
    if when == "before":
        change(new)
    restore = Restore(new, anything)
    told = list(frames(fed()))
    reader = Reader(RING, NONCE)
    for number, frame in enumerate(told):
        if when == "meanwhile" and number == len(told) - 1:
            change(new)
        reader.feed(frame)
        for piece in reader.pieces():
            restore.take(piece)
    taken = restore.commit()
    assert ENGINES[0] in taken.left_out
    assert why in taken.left_out[ENGINES[0]] or when == "meanwhile"
    assert ENGINES[1] in taken.places
    assert new.directory.holders == 0


def test_a_place_that_is_worth_nothing_here_is_left_out() -> None:
    new = replica(PLAIN)
    restore = Restore(new, lambda publisher, place: "as much is known here")
    taken = taken_up(restore, b"".join(frames(fed())))
    assert not taken.places
    assert set(taken.left_out.values()) == {"as much is known here"}
    assert not taken.stores, "what left the store since is behind us"
    believed(new)
    assert hold(new) == {}


def test_a_store_is_left_out_where_one_of_its_users_is() -> None:
    new = replica(PLAIN)
    restore = Restore(new, lambda publisher, place: "known" if publisher == AGENTS[1] else "")
    assert taken_up(restore, b"".join(frames(fed()))).stores == ()


def test_a_life_that_ends_while_it_is_written_is_told() -> None:
    dispatcher = fed()
    pieces = engine_pieces(dispatcher.directory, ENGINES[0], PLACE)
    next(pieces)
    dispatcher.reset(ENGINES[0])
    with pytest.raises(SnapshotError, match="began anew"):
        list(pieces)


def test_prices_that_were_measured_here_stay() -> None:
    old, new = fed(), replica(PLAIN)
    for dispatcher, seconds in ((old, 1.0), (new, 9.0)):
        cost = dispatcher.router.cost(ENGINES[0])
        assert cost is not None
        for _ in range(30):
            cost.observe_prefill(cost.pool.work(0, 1000), seconds)
    cost = new.router.cost(ENGINES[0])
    assert cost is not None
    before = cost.recompute_s(0, 1000)
    taken_up(Restore(new, anything), b"".join(frames(old)))
    assert cost.recompute_s(0, 1000) == before
    fresh = replica(PLAIN)
    taken_up(Restore(fresh, anything), b"".join(frames(old)))
    priced, told = fresh.router.cost(ENGINES[0]), old.router.cost(ENGINES[0])
    assert priced is not None
    assert told is not None
    assert priced.recompute_s(0, 1000) == told.recompute_s(0, 1000)
