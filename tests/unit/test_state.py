"""The stub's state: a resume from anything but the right bytes of every group must show."""

from __future__ import annotations

import struct

import msgspec
import pytest

from kvatlas.core.layout import Group, Layout
from kvatlas.workload.engine import Engine
from kvatlas.workload.protocol import (
    Abort,
    Admitted,
    Arrive,
    BlockRef,
    Computed,
    Effect,
    Produced,
)
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.state import Memory

V4 = Layout(
    model="v4",
    engine="vllm",
    kv_dtype="fp8",
    grid_tokens=256,
    components=(),
    groups=(
        Group("swa", "sliding_window_mla", 64, 128, copies=2),
        Group("global", "mla_attention", 256),
        Group("c4-state", "sliding_window_mla", 4, 8),
        Group("c128-state", "sliding_window_mla", 8, 128),
    ),
)
WIDE = Layout(
    model="wide",
    engine="vllm",
    kv_dtype="bf16",
    grid_tokens=32,
    components=(),
    groups=(Group("swa", "sliding_window", 32, 150), Group("full", "full_attention", 32)),
)
SPEC = EngineSpec(
    blocks=20_000, step_tokens=700, prefill_tokens_per_s=1e6, decode_step_s=0.0, time_scale=0
)


def ids(count: int, seed: int = 0) -> bytes:
    return struct.pack(f"<{count}I", *((i * 7919 + seed) % 30000 for i in range(count)))


def engine(layout: Layout = V4, spec: EngineSpec = SPEC) -> tuple[Engine, Memory]:
    memory = Memory(layout)
    return Engine(layout, spec, model=memory), memory


def run(machine: Engine, name: str, tokens: bytes, output: int = 3) -> list[Effect]:
    effects = list(machine.handle(Arrive(name, tokens, output), 0.0))
    while machine.next_deadline() is not None:
        effects += machine.tick(0.0)
    return effects


def answer(effects: list[Effect]) -> list[int]:
    return [e.token for e in effects if isinstance(e, Produced)]


def admitted(effects: list[Effect]) -> Admitted:
    (found,) = (e for e in effects if isinstance(e, Admitted))
    return found


@pytest.mark.parametrize("layout", [V4, WIDE], ids=["v4", "wide-window"])
@pytest.mark.parametrize("size", [257, 600, 1000, 1025, 2049])
def test_cold_and_resumed_answers_are_equal(layout: Layout, size: int) -> None:
    machine, _ = engine(layout)
    cold = run(machine, "a", ids(size))
    warm = run(machine, "b", ids(size))
    assert admitted(cold).cached_tokens == 0
    assert admitted(warm).cached_tokens == (size - 1) // layout.grid_tokens * layout.grid_tokens
    assert answer(cold) == answer(warm)


def test_the_chunk_size_does_not_change_the_answer() -> None:
    answers = set()
    for step_tokens in (64, 300, 4096):
        spec = EngineSpec(
            blocks=20_000,
            step_tokens=step_tokens,
            prefill_tokens_per_s=1e6,
            decode_step_s=0.0,
            time_scale=0,
        )
        answers.add(tuple(answer(run(engine(V4, spec)[0], "a", ids(1500)))))
    assert len(answers) == 1


def test_every_token_counts() -> None:
    base = answer(run(engine()[0], "a", ids(1000)))
    for position in (0, 300, 767, 768, 999):
        changed = bytearray(ids(1000))
        changed[position * 4] ^= 1
        assert answer(run(engine()[0], "a", bytes(changed))) != base


@pytest.mark.parametrize("layout", [V4, WIDE], ids=["v4", "wide-window"])
@pytest.mark.parametrize("how", ["damage", "drop", "swap"])
def test_each_block_of_each_group_alone_changes_the_answer(layout: Layout, how: str) -> None:
    machine, memory = engine(layout)
    cold = answer(run(machine, "cold", ids(1025)))
    other = admitted_blocks(machine, ids(1025, seed=5))
    refs = admitted(run(machine, "probe", ids(1025))).resumed
    groups = {ref.group for ref in refs}
    assert groups == set(range(sum(g.copies for g in layout.groups)))
    for ref in refs:
        before = dict(memory._bytes)
        if how == "swap":
            swap(memory, ref.block_id, next(r.block_id for r in other if r.group == ref.group))
        elif how == "drop":
            del memory._bytes[ref.block_id]
        else:
            memory.damage(ref.block_id)
        resumed = run(machine, f"hurt-{ref.group}-{ref.index}", ids(1025))
        assert admitted(resumed).cached_tokens == 1024
        assert answer(resumed) != cold, f"group {ref.group} block {ref.index} went unnoticed"
        memory._bytes = before
    assert answer(run(machine, "again", ids(1025))) == cold


@pytest.mark.parametrize("group", range(5))
def test_damage_is_still_seen_long_after_it_left_every_window(group: int) -> None:
    cold = answer(run(engine()[0], "cold", ids(4000)))
    sound, _ = engine()
    run(sound, "start", ids(1025))
    assert answer(run(sound, "longer", ids(4000))) == cold
    machine, memory = engine()
    run(machine, "start", ids(1025))
    refs = admitted(run(machine, "probe", ids(1025))).resumed
    memory.damage(next(ref.block_id for ref in refs if ref.group == group))
    longer = run(machine, "longer", ids(4000))
    assert admitted(longer).cached_tokens == 1024
    assert answer(longer) != cold


def test_two_blocks_of_one_window_exchanged_change_the_answer() -> None:
    machine, memory = engine()
    cold = answer(run(machine, "cold", ids(1025)))
    refs = admitted(run(machine, "probe", ids(1025))).resumed
    swa = [r.block_id for r in refs if r.group == 0]
    swap(memory, *swa)
    assert answer(run(machine, "swapped", ids(1025))) != cold


def test_an_adapter_changes_the_answer_and_shares_nothing() -> None:
    machine, _ = engine()
    plain = run(machine, "a", ids(600))
    machine.handle(Arrive("b", ids(600), 3, adapter="lora"), 0.0)
    effects: list[Effect] = []
    while machine.next_deadline() is not None:
        effects += machine.tick(0.0)
    assert admitted(effects).cached_tokens == 0
    assert answer(effects) != answer(plain)


def test_a_request_that_hits_blocks_of_the_same_step_reads_them_after_they_are_written() -> None:
    spec = EngineSpec(blocks=20_000, prefill_tokens_per_s=1e6, decode_step_s=0.0, time_scale=0)
    machine, _ = engine(V4, spec)
    for name in "ab":
        machine.handle(Arrive(name, ids(1000), 2), 0.0)
    effects: list[Effect] = []
    while machine.next_deadline() is not None:
        effects += machine.tick(0.0)
    cached = {e.id: e.cached_tokens for e in effects if isinstance(e, Admitted)}
    assert cached == {"a": 0, "b": 768}
    tokens = {n: [e.token for e in effects if isinstance(e, Produced) and e.id == n] for n in "ab"}
    assert tokens["a"] == tokens["b"]


def test_a_preemption_does_not_change_the_answer() -> None:
    answers = []
    for blocks in (20_000, 70):
        machine, _ = engine(WIDE, msgspec.structs.replace(SPEC, blocks=blocks))
        for n in range(4):
            machine.handle(Arrive(str(n), ids(300, seed=n), 300), 0.0)
        effects: list[Effect] = []
        while machine.next_deadline() is not None:
            effects += machine.tick(0.0)
        tokens = [
            [e.token for e in effects if isinstance(e, Produced) and e.id == str(n)]
            for n in range(4)
        ]
        answers.append((tokens, machine.preemptions > 0))
    assert answers == [(answers[0][0], False), (answers[0][0], True)]


def test_blocks_of_a_request_aborted_in_mid_step_hold_the_right_bytes() -> None:
    cold = answer(run(engine()[0], "cold", ids(600)))
    machine, memory = engine()
    machine.handle(Arrive("gone", ids(600), 3), 0.0)
    machine.tick(0.0)
    machine.handle(Abort("gone"), 0.0)
    warm = run(machine, "warm", ids(600))
    assert memory._sequences == {}
    assert admitted(warm).cached_tokens == 512
    assert answer(warm) == cold


def test_a_window_pieced_together_from_two_requests_is_as_good_as_one() -> None:
    """The first block of a window may come from a text that goes on differently after it."""
    spec = msgspec.structs.replace(SPEC, retention_tokens=None)
    cold = answer(run(engine(V4, spec)[0], "cold", ids(300)))
    machine, _ = engine(V4, spec)
    run(machine, "other", ids(256)[: 200 * 4] + ids(100, seed=3))
    run(machine, "same", ids(256))
    warm = run(machine, "warm", ids(300))
    resumed = admitted(warm)
    assert resumed.cached_tokens == 256
    first, second = [r.block_id for r in resumed.resumed if r.group == 0]
    assert abs(first - second) > 1, "both blocks came from one request"
    assert answer(warm) == cold


def test_memory_is_bounded_by_blocks_and_running_requests() -> None:
    machine, memory = engine(V4, msgspec.structs.replace(SPEC, blocks=500))
    for turn in range(40):
        run(machine, f"r{turn}", ids(900, seed=turn))
    assert len(memory) <= 500
    assert memory._sequences == {}


def test_errors_name_what_is_not_there() -> None:
    memory = Memory(V4)
    with pytest.raises(KeyError):
        memory.damage(3)
    with pytest.raises(KeyError):
        memory.digest("nobody")
    with pytest.raises(KeyError):
        memory.compute(Computed("nobody", 0, 1, ()), ids(1))


def swap(memory: Memory, one: int, other: int) -> None:
    """Exchange the bytes of two blocks."""
    first, second = memory.read(one), memory.read(other)
    memory.write(one, second)
    memory.write(other, first)


def admitted_blocks(machine: Engine, tokens: bytes) -> tuple[BlockRef, ...]:
    run(machine, "other", tokens)
    return admitted(run(machine, "other-probe", tokens)).resumed
