"""State that comes from outside an engine's pool and goes there: tiers, hand-offs, failures.

Two engines over one tier, loads that fail in whole or in part, copies that hold blocks, requests
that leave at any moment. Whatever happens: each answer is that of a cold engine, no findable block
lacks the bytes that its key stands for, and in the end every block is free.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import struct
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.core.layout import Component, Group, Layout, Rule
from kvatlas.workload.engine import Engine
from kvatlas.workload.holding import resumed_blocks, unroll
from kvatlas.workload.prompt_keys import TOKEN_BYTES, PromptKeys, key_step
from kvatlas.workload.protocol import (
    Abort,
    Admitted,
    Arrive,
    BlockRef,
    ClearCache,
    Computed,
    Effect,
    HandedOff,
    HandOff,
    Held,
    Hold,
    Input,
    Loaded,
    Loading,
    Produced,
    Rejected,
    Release,
)
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.state import BLOCK_BYTES, Memory

LONGEST = 120


def _window(group: str, block: int, window: int, least: int | None) -> Component:
    return Component(group, Rule.WINDOW, 1, block, 8, 1.0, window, group, least_blocks=least)


def layout(name: str) -> Layout:
    groups: tuple[Group, ...]
    parts: tuple[Component, ...] = ()
    if name == "chain":
        groups = (Group("kv", "full_attention", 8),)
    elif name == "v4":
        groups = (
            Group("swa", "sliding_window_mla", 8, 16, copies=2),
            Group("global", "mla_attention", 16),
            Group("state", "sliding_window_mla", 2, 8),
        )
        parts = (_window("swa", 8, 16, None), _window("state", 2, 8, 1))
    else:
        groups = (Group("full", "full_attention", 8), Group("swa", "sliding_window", 8, 50))
    return Layout(name, "", "", max(g.block_tokens for g in groups), parts, groups)


class Snapshot(msgspec.Struct, frozen=True):
    """A request's whole state after its first ``tokens`` tokens: what a P/D hand-off moves."""

    tokens: int
    tail: bytes  # token ids since the last grid position
    values: tuple[bytes, ...]  # of the groups, there


class Moving(Memory):
    """State that can leave an engine in mid-request and be gone on with in another."""

    def __init__(self, shape: Layout, *, minimal: bool) -> None:
        super().__init__(shape, minimal=minimal)
        self._adopted: dict[str, Snapshot] = {}

    def resume(self, request: Arrive, admitted: Admitted) -> None:
        super().resume(request, admitted)
        snapshot = self._adopted.pop(request.id, None)
        if snapshot is None or admitted.cached_tokens < snapshot.tokens - 1:
            return
        sequence = self._sequences[request.id]  # everything came
        sequence.position = snapshot.tokens // self._grid * self._grid
        sequence.resumed = ()
        sequence.tail += snapshot.tail
        for lane, value in zip(sequence.lanes, snapshot.values, strict=True):
            lane.value = value

    def compute(self, computed: Computed, tokens: bytes) -> None:
        sequence = self._sequences[computed.id]
        known = sequence.position + len(sequence.tail) // TOKEN_BYTES
        again = known - computed.start  # after a hand-off the last token is computed once more
        super().compute(computed, tokens[again * TOKEN_BYTES :])

    def release(self, id: str) -> None:
        super().release(id)
        self._adopted.pop(id, None)

    def snapshot(self, id: str) -> Snapshot:
        """All of a running request's state."""
        sequence = self._sequences[id]
        self._read(sequence)
        tokens = sequence.position + len(sequence.tail) // TOKEN_BYTES
        values = tuple([lane.value for lane in sequence.lanes])
        return Snapshot(tokens, bytes(sequence.tail), values)

    def adopt(
        self, id: str, snapshot: Snapshot, blocks: tuple[BlockRef, ...]
    ) -> tuple[BlockRef, ...]:
        """Go on from there when the request ``id`` is next resumed at the snapshot's end.

        Of its ``blocks`` here, those of windows are filled from it; what chain blocks hold has to
        be copied (`read`, `write`). Returns the blocks of windows that the other side did not
        have either.
        """
        self._adopted[id] = snapshot
        unfilled = []
        end = snapshot.tokens // self._grid * self._grid
        for number, slot in enumerate(self._slots):
            value = snapshot.values[number]
            for ref in blocks:
                if ref.group == slot.index and slot.need is not None:
                    behind = (end // slot.block_tokens - ref.index) * BLOCK_BYTES
                    start = len(value) - behind
                    if behind <= 0:  # only part of it is there; it is written when it is full
                        continue
                    if start < 0:
                        unfilled.append(ref)
                    else:
                        self.write(ref.block_id, value[start : start + BLOCK_BYTES])
        return tuple(unfilled)


def make_engine(name: str, how: Any, connector: Any, *, roomy: bool = False) -> Engine:
    shape = layout(name)
    retention = how["retention"]
    spec = EngineSpec(
        blocks=5000,
        max_running=4,
        step_tokens=48,
        context_tokens=LONGEST,
        retention_tokens=retention * shape.grid_tokens if retention else retention,
        minimal_loads=how["minimal"],
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
    )
    if not roomy:
        least = Engine(shape, spec).pool.peak_blocks(LONGEST)
        spec = msgspec.structs.replace(spec, blocks=least + how["spare"])
    memory = Moving(shape, minimal=how["minimal"])
    return Engine(shape, spec, model=memory, connector=connector, leap=how["leap"])


@functools.cache
def alone(name: str, minimal: bool, prompt: bytes, output: int) -> list[int]:
    how = {"retention": 0, "minimal": minimal, "spare": 0, "leap": False}
    engine = make_engine(name, how, None, roomy=True)
    engine.handle(Arrive("a", prompt, output), 0.0)
    effects: list[Effect] = []
    while (due := engine.next_deadline()) is not None:
        effects += engine.tick(due)
    return [e.token for e in effects if isinstance(e, Produced)]


class Tier:
    """Blocks by (group, key), and how far a prompt can be resumed from them alone."""

    def __init__(self, shape: Layout, *, minimal: bool, liar: bool) -> None:
        self.blocks: dict[tuple[int, int], bytes] = {}
        self._shape = shape
        self._slots = [(s, resumed_blocks(shape, s, minimal=minimal)) for s in unroll(shape)]
        self._liar = liar  # offers the whole prompt, whatever it has

    def wanted(self, keys: PromptKeys, start: int, end: int) -> list[tuple[int, int, int]]:
        """(group, index, key) of what a resume at ``end`` reads beyond ``start``."""
        found = []
        for slot, read in self._slots:
            count = end // slot.block_tokens
            first = start // slot.block_tokens if read is None else max(0, count - read)
            for index in range(first, count):
                found.append((slot.index, index, keys.key((index + 1) * slot.block_tokens)))
        return found

    def reach(self, tokens: bytes, local: int) -> int:
        keys = PromptKeys(tokens, key_step(self._shape))
        grid = self._shape.grid_tokens
        position = (len(tokens) // 4 - 1) // grid * grid
        while position > local:
            need = self.wanted(keys, local, position)
            if self._liar or all((g, key) in self.blocks for g, _, key in need):
                return position
            position -= grid
        return 0


class Side:
    """One engine with what surrounds it."""

    def __init__(self, world: World, name: str, how: Any) -> None:
        self.world = world
        self.engine = make_engine(name, how, self)
        model = self.engine._model
        assert isinstance(model, Moving)
        self.memory = model
        self.arrived: dict[str, Arrive] = {}
        self.tokens: dict[str, list[int]] = {}
        self.counts: dict[str, int] = {}
        self.transfers: dict[str, tuple[HandOff, Snapshot, Side]] = {}  # by request here
        self.loads = 0

    def external(self, request: Arrive, local_tokens: int) -> int:
        assert request.id in self.arrived
        if request.id in self.transfers:
            return len(request.tokens) // 4
        return self.world.tier.reach(request.tokens, local_tokens)

    def input(self, event: Input) -> None:
        if isinstance(event, Arrive):
            self.arrived[event.id] = event
            self.tokens[event.id] = []
            self.counts[event.id] = 0
        for effect in self.engine.handle(event, self.world.now):
            self._took(effect)

    def tick(self) -> None:
        for effect in self.engine.tick(self.world.now):
            self._took(effect)

    def _took(self, effect: Effect) -> None:
        match effect:
            case Produced():
                self.counts[effect.id] += effect.count
                assert effect.index + effect.count == self.counts[effect.id]
                filler = [-1] * (effect.count - 1)
                self.tokens[effect.id] += [*filler, effect.token]
            case Computed(filled=filled) if filled and self.world.draw(3) == 0:
                self.world.later(0.0, lambda: self.input(Hold(filled)))
            case Held(blocks=blocks) if blocks:
                self.world.later(self.world.pause(), lambda: self._save(blocks))
            case Loading():
                self.loads += 1
                if self.world.draw(4) == 0:  # the client leaves, the transfer goes on
                    self.world.later(0.0, lambda: self.world.leave(self, effect.id))
                self.world.later(self.world.pause(), lambda: self._load(effect))
            case HandOff():
                self.world.handed(self, effect, self.memory.snapshot(effect.id))
            case Rejected():
                raise AssertionError(effect.reason)
            case Admitted():
                assert 0 <= effect.loaded_tokens <= effect.cached_tokens
            case _:
                pass

    def _save(self, blocks: tuple[BlockRef, ...]) -> None:
        for ref in blocks:
            self.world.tier.blocks[ref.group, ref.key] = self.memory.read(ref.block_id)
        self.input(Release(blocks))

    def _load(self, loading: Loading) -> None:
        """Full, partial or failed, as it is drawn; a hand-off moves the other side's state."""
        arrive = self.arrived[loading.id]
        fate = self.world.draw(4)
        end = loading.end if fate else 0
        unfilled: tuple[BlockRef, ...] = ()
        transfer = self.transfers.pop(loading.id, None)
        if transfer is not None:
            end, unfilled = self._hand_over(loading, transfer, end)
        else:
            end = self._fetch(loading, arrive, end)
        self.input(Loaded(loading.id, end, unfilled))

    def _fetch(self, loading: Loading, arrive: Arrive, end: int) -> int:
        tier, keys = self.world.tier, PromptKeys(arrive.tokens, self.engine.pool.key_step)
        at = {(g, i): key for g, i, key in tier.wanted(keys, loading.start, loading.end)}
        slots = self.engine.pool.slots
        for ref in loading.blocks:
            data = tier.blocks.get((ref.group, at[ref.group, ref.index]))
            if data is None:  # lost since: nothing from here on counts
                end = min(end, ref.index * slots[ref.group].block_tokens)
                continue
            self.memory.write(ref.block_id, data)
        return end

    def _hand_over(
        self, loading: Loading, transfer: tuple[HandOff, Snapshot, Side], end: int
    ) -> tuple[int, tuple[BlockRef, ...]]:
        handed, snapshot, source = transfer
        if handed.id not in source.kept:
            return 0, ()  # the lease ran out: those blocks may hold anything
        unfilled: tuple[BlockRef, ...] = ()
        if end:
            there = {(r.group, r.index): r.block_id for r in handed.blocks}
            chains = {s.index for s in self.engine.pool.slots if s.chain}
            for ref in loading.blocks:
                if ref.group in chains and (ref.group, ref.index) in there:
                    data = source.memory.read(there[ref.group, ref.index])
                    self.memory.write(ref.block_id, data)
            unfilled = self.memory.adopt(loading.id, snapshot, loading.blocks)
        source.kept.discard(handed.id)
        source.input(HandedOff(handed.id))
        return end, unfilled

    @functools.cached_property
    def kept(self) -> set[str]:
        """Requests whose state waits here for the other side."""
        return set()


class World:
    """A prefill side, which also serves by itself, a decode side, a tier and a clock."""

    def __init__(self, name: str, how: Any, draws: list[int]) -> None:
        self.how = how
        self.name = name
        self.now = 0.0
        self.tier = Tier(layout(name), minimal=how["minimal"], liar=how["liar"])
        self._draws = itertools.cycle(draws)
        self._todo: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self.sides = (Side(self, name, how), Side(self, name, how))
        self.outputs: dict[str, int] = {}
        self.aborted: set[str] = set()

    def draw(self, below: int) -> int:
        return next(self._draws) % below

    def pause(self) -> float:
        return (0.0, 0.004, 0.03, 0.2)[self.draw(4)]

    def later(self, pause_s: float, call: Any) -> None:
        heapq.heappush(self._todo, (self.now + pause_s, next(self._numbers), call))

    def handed(self, side: Side, effect: HandOff, snapshot: Snapshot) -> None:
        side.kept.add(effect.id)
        other = self.sides[1]
        twin = effect.id + "d"
        arrive = side.arrived[effect.id]
        other.transfers[twin] = (effect, snapshot, side)
        self.outputs[twin] = self.outputs[effect.id]
        asked = Arrive(twin, arrive.tokens, self.outputs[effect.id])
        self.later(self.pause(), lambda: other.input(asked))
        if self.draw(4) == 0:  # the lease is short
            self.later(self.pause(), lambda: self._expire(side, effect.id))
        elif self.draw(5) == 0:
            self.later(2 * self.pause(), lambda: self.leave(other, twin))

    def _expire(self, side: Side, id: str) -> None:
        if id in side.kept:
            side.kept.discard(id)
            side.input(Abort(id))

    def leave(self, side: Side, id: str) -> None:
        if id in self.aborted:
            return
        self.aborted.add(id)
        transfer = side.transfers.pop(id, None)
        loading = id in side.engine._scheduler.fetching
        if transfer is not None and not loading:
            self.later(0.0, lambda: self._expire(transfer[2], transfer[0].id))
        elif transfer is not None:
            side.transfers[id] = transfer  # the transfer goes on
        side.input(Abort(id))

    def run(self) -> None:
        for _ in range(200_000):
            dues = [(s.engine.next_deadline(), n) for n, s in enumerate(self.sides)]
            due, number = min(((d, n) for d, n in dues if d is not None), default=(float("inf"), 0))
            if self._todo and self._todo[0][0] < due:
                self.now, _, call = heapq.heappop(self._todo)
                call()
            elif due < float("inf"):
                self.now = max(self.now, due)
                self.sides[number].tick()
            else:
                return
        raise AssertionError("it never ends")

    def check(self) -> None:
        for side in self.sides:
            engine, pool = side.engine, side.engine.pool
            assert (engine.running, engine.waiting, engine.held) == (0, 0, 0)
            assert not engine._scheduler.fetching
            assert not engine._scheduler.requests
            assert not engine._apart
            assert not engine._holds
            assert pool.free == pool.capacity
            blocks = pool.blocks
            assert (blocks.plain, blocks.named) == (0, 0)
            assert not any(blocks.refs)
            required = {s.index for s in pool.slots if s.group.required}
            for block, entry in enumerate(blocks.keys):
                if entry is not None and entry[0] in required:
                    truth = self.truth.setdefault(entry, side.memory.read(block))
                    assert side.memory.read(block) == truth, "not what the key stands for"
            for id, tokens in side.tokens.items():
                output = 1 if side.arrived[id].hand_off else self.outputs[id]
                expected = alone(self.name, self.how["minimal"], side.arrived[id].tokens, output)
                assert all(t in (-1, e) for t, e in zip(tokens, expected, strict=False))
                assert len(tokens) == output or id in self.aborted

    @functools.cached_property
    def truth(self) -> dict[tuple[int, int], bytes]:
        """What each key stands for: the bytes are the same wherever they are held."""
        return dict(self.tier.blocks)


def prompt(topic: int, shared: int, own: int) -> bytes:
    ids = [topic] * shared + [7 + i for i in range(own)]
    return struct.pack(f"<{len(ids)}I", *ids)


REQUESTS = st.lists(
    st.tuples(
        st.builds(
            prompt,
            topic=st.integers(0, 1),
            shared=st.integers(1, 9).map(lambda n: n * 8) | st.integers(1, 70),
            own=st.just(0) | st.integers(0, 14),
        ),
        st.integers(1, 30),  # output tokens
        st.sampled_from([0.0, 0.0, 0.005, 0.05, 0.3]),  # after the one before
        st.none() | st.none() | st.sampled_from([0.0, 0.01, 0.06, 0.2]),  # aborted after
        st.sampled_from([0, 0, 1, 2]),  # first side, second side, or handed from one to the other
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(["chain", "v4", "v4", "wide"]),
    how=st.fixed_dictionaries(
        {
            "spare": st.sampled_from([0, 1, 4, 12, 60]),
            "retention": st.sampled_from([0, None, 2]),
            "minimal": st.booleans(),
            "leap": st.booleans(),
            "liar": st.sampled_from([False, False, True]),
        }
    ),
    draws=st.lists(st.integers(0, 11), min_size=1, max_size=40),
    requests=REQUESTS,
)
def test_whatever_moves_each_answer_is_that_of_a_cold_engine(
    name: str, how: Any, draws: list[int], requests: list[tuple[Any, ...]]
) -> None:
    world = World(name, how, draws)
    at = 0.0
    for number, (tokens, output, gap, leaves, where) in enumerate(requests):
        at += gap
        id = str(number)
        world.outputs[id] = output
        side = world.sides[where % 2]
        asked = Arrive(id, tokens, 1 if where == 2 else output, hand_off=where == 2)
        world.later(at, functools.partial(side.input, asked))
        if leaves is not None and where != 2:
            world.later(at + leaves, functools.partial(world.leave, side, id))
        if world.draw(9) == 0:
            world.later(at, functools.partial(side.input, ClearCache()))
    world.run()
    world.check()
