"""What the fault simulation itself must get right: who reads a block, and how a replay arrives."""

from __future__ import annotations

import random

import pytest

from kvatlas.core.events import Batch
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher
from kvatlas.core.router import Router
from kvatlas.core.units import Part, Unit
from kvatlas.sim.checkers_end import census
from kvatlas.sim.checkers_truth import Witness
from kvatlas.sim.engines import GATEWAY
from kvatlas.sim.faults_nodes import broken
from kvatlas.sim.faults_wire import LATENCY_S, Wire
from kvatlas.sim.messages import Message, Replayed
from kvatlas.sim.network import Network
from kvatlas.sim.tier_units import Kept
from kvatlas.sim.timeline import Timeline
from kvatlas.workload.protocol import Admitted, Arrive, BlockRef, Computed

PREFIX = bytes(range(64))  # 16 tokens: one block
OTHER = bytes(reversed(PREFIX))


class Rig:
    """One engine's witness: `fill` computes one block, `resume` begins with one."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.witness = Witness("e0", plain(16), self._report)

    def _report(self, kind: str, what: str) -> None:
        assert what
        self.found.append(kind)

    def fill(self, id: str, tokens: bytes, block_id: int) -> None:
        ref = BlockRef(0, 0, block_id)
        self.witness.resume(Arrive(id, tokens, 9), Admitted(id, 0, ()))
        self.witness.compute(Computed(id, 0, 16, (ref,)), tokens)

    def resume(self, id: str, block_id: int) -> None:
        tokens = PREFIX + b"more"
        ref = BlockRef(0, 0, block_id)
        self.witness.resume(Arrive(id, tokens, 9), Admitted(id, 16, (ref,)))
        self.witness.compute(Computed(id, 16, 17, ()), b"more")


def test_a_block_that_is_still_read_must_not_be_filled() -> None:
    rig = Rig()
    rig.fill("first", PREFIX, 5)
    rig.witness.release("first")
    rig.resume("reader", 5)
    assert not rig.found
    rig.fill("writer", OTHER, 5)
    assert rig.found == ["wrong-bytes"]


def test_who_was_thrown_out_and_came_back_reads_only_what_it_has_now() -> None:
    """Found by seed 1022 at df42d43: a preempted request counted as the reader of the blocks
    that it had before it was thrown out."""
    rig = Rig()
    for block_id in (5, 6):
        rig.fill(f"first{block_id}", PREFIX, block_id)
        rig.witness.release(f"first{block_id}")
    rig.resume("reader", 5)
    rig.witness.release("reader")
    rig.resume("reader", 6)
    rig.fill("writer", OTHER, 5)
    assert not rig.found
    rig.fill("another", OTHER, 6)
    assert rig.found == ["wrong-bytes"]


@pytest.mark.parametrize("seed", range(5))
def test_the_end_of_a_replay_is_heard_after_the_rest(seed: int) -> None:
    """Found by seed 1024 at df42d43: of two replays one after the other the second began with
    a batch that came after its end."""
    timeline = Timeline()
    network = Network(timeline, latency_s=LATENCY_S)
    heard: list[Replayed] = []

    def hear(source: str, message: Message) -> None:
        assert source == "e0"
        assert isinstance(message, Replayed)
        heard.append(message)

    network.attach(GATEWAY, hear)
    wire = Wire(timeline, network, random.Random(seed))
    wire.chance("reorder", "e0", 60.0, 0.9)
    for token in (1, 2, 3):
        for seq in (0, 1, 2, None):
            batch = None if seq is None else Batch(seq, 1.0 + seq, ())
            network.send("e0", GATEWAY, Replayed(token, batch))
        until = timeline.now + 0.1
        while (due := timeline.next_at()) is not None and due <= until:
            timeline.step()
        timeline.now = until
    while timeline.next_at() is not None:
        timeline.step()
    for token in (1, 2, 3):
        told = [m.batch.seq if m.batch else "end" for m in heard if m.token == token]
        assert told[-1] == "end"
        assert sorted(told[:-1], key=str) == [0, 1, 2]


def test_what_is_damaged_twice_is_not_whole_again() -> None:
    """Found by seeds 313, 562 and 639: the same bit turned over twice."""
    kept = Kept.of(Unit(b"key", Part.BODY, 0, 1), (b"1",), "")
    draw = random.Random(1)
    for _ in range(100):
        kept = broken(draw, kept)
        assert not kept.whole


def test_memory_is_counted_by_what_can_grow() -> None:
    """Found by seed 328: pools that had measured something counted for more than new ones."""
    router = Router()
    before = census(router)
    for number in range(3):
        router.add(Publisher(f"e{number}"), plain(16), bytes([number]))
    grown = census(router)
    assert grown > before
    for pool in router._pools.values():
        pool.work(1, len(router._pools) + 16)
    assert census(router) == grown
