"""The dispatcher: what reached it once decides the same again."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest

from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import (
    Apply,
    Believe,
    Dispatcher,
    Finished,
    FirstToken,
    Input,
    Join,
    Leave,
    Question,
    Reset,
    Sent,
    SetLoad,
    Settle,
    SetUp,
    Sweep,
    Unsettle,
)
from kvatlas.core.events import BlockStored, UnitsGone, UnitsHeld
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.router import Decision, Router

BLOCK = 16
FP = b"\1" * 32
ENGINES = [Publisher("a"), Publisher("b"), Publisher("b", 1)]
AGENT = Publisher("node")
AMONG = tuple((engine, "") for engine in ENGINES)


def fresh(record: list[tuple[float, Input]] | None = None) -> Dispatcher:
    ring = Keyring(b"a secret for the tests")

    def tap(now: float, event: Input, answer: Decision | None) -> None:
        if record is not None:
            record.append((now, event))

    return Dispatcher(Directory(ring), Router(), ring, tap=tap)


def live(dispatcher: Dispatcher, seed: int) -> list[Decision]:
    """A little of everything, by chance."""
    rng = random.Random(seed)
    for engine in ENGINES:
        dispatcher.handle(Join(engine, plain(BLOCK), FP), 0.0)
    dispatcher.handle(Settle(AGENT, tuple(ENGINES), "store"), 0.0)
    prompts = [array("I", range(n, n + 200)).tobytes() for n in range(4)]
    decisions: list[Decision] = []
    for step in range(200):
        now = step * 0.05
        engine = rng.choice(ENGINES)
        match rng.randrange(10):
            case 0 | 1:
                ids, blocks = rng.choice(prompts), rng.randrange(1, 12)
                hashes = tuple(rng.randrange(1 << 40) for _ in range(blocks))
                stored = BlockStored(hashes, None, ids[: blocks * BLOCK * 4], BLOCK)
                dispatcher.apply(engine, iter([stored]))
            case 9:
                keys = tuple(dispatcher.keys(engine, rng.choice(prompts)))[: rng.randrange(12)]
                tier = rng.choice([Tier.DRAM, Tier.DISK, Tier.OBJECT])
                kind = rng.choice([UnitsHeld, UnitsHeld, UnitsGone])
                dispatcher.apply(AGENT, [kind(tier, keys)])
            case 2:
                dispatcher.handle(SetLoad(engine, rng.randrange(5)), now)
            case 3:
                dispatcher.handle(SetUp(engine, rng.random() < 0.8), now)
            case 4 if rng.random() < 0.2:
                dispatcher.reset(engine)
                dispatcher.believe(engine, True)
                dispatcher.handle(Sweep(100), now)
            case _:
                question = Question(f"r{step % 50}", AMONG, rng.choice(prompts))
                decision = dispatcher.handle(question, now)
                assert decision is not None
                decisions.append(decision)
                plan = decision.plans[0]
                dispatcher.handle(Sent(decision.id, plan.publisher), now)
                dispatcher.handle(FirstToken(decision.id), now + 0.01)
                if rng.random() < 0.8:
                    done = Finished(decision.id, plan.publisher, True, plan.resume_tokens, 0.01)
                    dispatcher.handle(done, now + 0.02)
    dispatcher.handle(Leave(ENGINES[0]), 99.0)
    dispatcher.handle(Unsettle(AGENT), 99.0)
    return decisions


@pytest.mark.parametrize("seed", range(5))
def test_the_same_inputs_decide_the_same_again(seed: int) -> None:
    record: list[tuple[float, Input]] = []
    first = fresh(record)
    decisions = live(first, seed)
    assert len(decisions) > 50
    kept = msgspec.msgpack.encode(record)  # as a recording on disk would hold it
    again = fresh()
    answers = [
        again.handle(event, now)
        for now, event in msgspec.msgpack.decode(kept, type=list[tuple[float, Input]])
    ]
    assert [a for a in answers if a is not None] == decisions
    assert again.directory.digest() == first.directory.digest()


def test_every_kind_of_input_is_recorded() -> None:
    record: list[tuple[float, Input]] = []
    live(fresh(record), 1)
    assert {type(event) for _, event in record} == {
        *(Apply, Believe, Finished, FirstToken, Join, Leave, Question, Reset),
        *(Sent, SetLoad, Settle, SetUp, Sweep, Unsettle),
    }


def test_an_id_in_use_gets_books_of_its_own() -> None:
    dispatcher = fresh()
    dispatcher.handle(Join(ENGINES[0], plain(BLOCK), FP), 0.0)
    ids = array("I", range(40)).tobytes()
    names = []
    for _ in range(3):
        decision = dispatcher.handle(Question("r", AMONG[:1], ids), 0.0)
        assert decision is not None
        names.append(decision.id)
        dispatcher.handle(Sent(decision.id, ENGINES[0]), 0.0)
    assert len(set(names)) == 3
    assert dispatcher.router.in_flight() == {ENGINES[0]: 3}
