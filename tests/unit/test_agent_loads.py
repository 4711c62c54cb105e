"""Loads of an agent over a store that answers when it is told to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import xxhash

from kvatlas.core import agent_values as words
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.tiers.base import Finish, Piece, Report, let_go
from kvatlas.dataplane.tiers.dram import DramStore
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent_loads import Engine, Loads

PRINT = b"fingerprint"
UNITS = tuple(Unit(b"key-%d" % n, Part.BODY, n, 4096) for n in range(4))


class Node:
    """`Loads` alone, with all that it says kept."""

    def __init__(self) -> None:
        self.arena = Arena.create(16 * 4096, directory=None)
        self.dram = DramStore(self.arena)
        self.reads: list[tuple[Sequence[Piece], Finish]] = []
        self.done: list[tuple[int, Sequence[bytes], str]] = []
        self.ready: list[wire.Staged] = []
        self.answers = True
        self.loads = Loads(
            self.arena,
            self.dram,
            self.read,
            post=lambda then, *given: then(*given),
            done=self.ended,
            ready=lambda _, staged: self.ready.append(staged),
            threads=1,
        )
        self.loads.engines["e"] = Engine(PRINT, 16)

    def read(self, tier: Tier, node: str, pieces: Sequence[Piece], done: Finish) -> bool:
        if self.answers:
            self.reads.append((pieces, done))
        return self.answers

    def ended(
        self,
        op: int,
        failed: Iterable[bytes] = (),
        damaged: Iterable[bytes] = (),
        error: str = "",
        refused: Iterable[bytes] = (),
    ) -> None:
        self.done.append((op, (*failed, *damaged), error))
        self.refused = set(refused)

    def begin(self, op: int, *units: Unit) -> None:
        source = words.Source(Tier.OBJECT, units)
        end = 16 * len(units)
        self.loads.begin(words.Load(op, "e", f"r{op}", 0, end, (source,), 9.0))

    def answer(self, report: Report | None = None) -> None:
        pieces, done = self.reads.pop(0)
        for piece in pieces:
            piece.view[:] = piece.name[-1:] * len(piece.view)
            piece.checksum = xxhash.xxh3_128_intdigest(piece.view)
            let_go(piece, self.dram.counts)
        done(report or Report())


@pytest.fixture
def node() -> Node:
    return Node()


def test_what_several_want_is_read_once_and_kept_until_the_last_lets_go(node: Node) -> None:
    free = node.dram.free_bytes
    node.begin(1, *UNITS[:3])
    node.begin(2, *UNITS)
    assert [len(pieces) for pieces, _ in node.reads] == [3, 1]
    node.answer()
    assert [op for op, *_ in node.done] == [1]
    node.answer()
    assert [op for op, *_ in node.done] == [1, 2]
    node.loads.say_ready("e", "r1", 48)
    node.loads.say_ready("e", "r2", 64)
    first, second = node.ready
    assert [p.slot for p in first.pieces] == [p.slot for p in second.pieces][:3]
    node.begin(3, UNITS[0])  # it is here already
    assert not node.reads
    assert node.done[-1] == (3, (), "")
    node.loads.say_ready("e", "r3", 16)
    for request in ("r1", "r2"):
        node.loads.release("e", request, used=True)
    assert node.dram.free_bytes == free - 4096
    node.loads.release("e", "r3", used=False)
    assert node.dram.free_bytes == free
    assert node.loads.loaded == {"object": 48 + 64, "object_unused": 16}


def test_a_read_that_fails_fails_for_all_who_wait_and_is_tried_anew(node: Node) -> None:
    free = node.dram.free_bytes
    node.begin(1, *UNITS[:2])
    node.begin(2, *UNITS[:1])
    node.answer(Report(failed=(UNITS[0].name,)))
    assert node.done == [(1, (UNITS[0].name,), ""), (2, (UNITS[0].name,), "")]
    for op in (1, 2):
        node.loads.say_ready("e", f"r{op}", 0)
    assert node.dram.free_bytes == free
    node.begin(3, *UNITS[:1])
    assert len(node.reads) == 1


def test_of_a_load_that_is_stopped_others_still_get_theirs(node: Node) -> None:
    free = node.dram.free_bytes
    node.begin(1, *UNITS[:2])
    node.begin(2, *UNITS[:2])
    node.loads.stop(1)
    node.answer()
    assert sorted(node.done) == [(1, (), "stopped"), (2, (), "")]
    node.loads.say_ready("e", "r2", 32)
    assert len(node.ready[-1].pieces) == 2
    node.loads.gone("e")
    assert node.dram.free_bytes == free


def test_what_was_fetched_stays_as_a_unit_without_a_copy(node: Node) -> None:
    node.begin(1, *UNITS[:2])
    assert not node.loads.adopt(UNITS[0])  # it is on its way
    node.answer()
    node.loads.say_ready("e", "r1", 32)
    assert node.loads.adopt(UNITS[0])
    assert not node.loads.adopt(UNITS[0])
    kept = node.dram.pin(UNITS[0].name)
    assert kept is not None
    assert kept.slot == node.ready[-1].pieces[0].slot
    node.dram.unpin(kept.slot)
    node.loads.release("e", "r1", used=True)
    assert [entry.name for entry in node.dram.scan()] == [UNITS[0].name]
    node.dram.delete([UNITS[0].name])
    assert node.dram.free_bytes == 16 * 4096


def test_where_no_store_answers_the_load_fails_at_once(node: Node) -> None:
    node.answers = False
    free = node.dram.free_bytes
    node.begin(1, *UNITS)
    assert node.done == [(1, (), "")]
    assert node.refused == {unit.name for unit in UNITS}  # what the store has is as good as before
    node.loads.say_ready("e", "r1", 0)
    assert node.dram.free_bytes == free


def test_room_that_a_store_may_still_write_to_is_nobody_elses(node: Node) -> None:
    free = node.dram.free_bytes
    node.begin(1, UNITS[0])
    (pieces, done) = node.reads.pop()
    done(Report(failed=(UNITS[0].name,), silent=True))
    node.loads.say_ready("e", "r1", 0)
    assert node.dram.free_bytes == free - 4096
    let_go(pieces[0], node.dram.counts)
    assert node.dram.free_bytes == free
