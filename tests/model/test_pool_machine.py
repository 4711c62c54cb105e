"""The block pool under any order of requests, against what must hold whatever happens."""

from __future__ import annotations

import random
import struct
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from kvatlas.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.core.layout import Group, Layout
from kvatlas.workload.holding import Holding
from kvatlas.workload.pool import Pool

STEP_TOKENS = 40
LAYOUTS = {
    "chain": (Group("kv", "full_attention", 8),),
    "v4": (
        Group("swa", "sliding_window_mla", 8, 16, copies=2),
        Group("global", "mla_attention", 16),
        Group("state", "sliding_window_mla", 2, 4),
        Group("draft", "sliding_window", 4, 12, required=False),
    ),
    "wide": (Group("full", "full_attention", 8), Group("swa", "sliding_window", 8, 50)),
    "windows": (Group("swa", "sliding_window", 8, 20), Group("short", "sliding_window", 4, 6)),
}


def layout(name: str) -> Layout:
    groups = LAYOUTS[name]
    return Layout(name, "", "", max(g.block_tokens for g in groups), (), groups)


def make_text(topic: int, shared: int, own: int, seed: int, salt: str) -> tuple[bytes, str]:
    ids = [topic] * shared + [random.Random(seed).randrange(9) for _ in range(own)]
    return struct.pack(f"<{len(ids)}I", *ids), salt


# Few topics, often cut on a block's end: shared prefixes, repeats and blocks computed twice.
TEXTS = st.builds(
    make_text,
    topic=st.integers(0, 1),
    shared=st.integers(1, 7).map(lambda n: n * 8) | st.integers(1, 56),
    own=st.just(0) | st.integers(0, 20),
    seed=st.integers(0, 2),
    salt=st.sampled_from(["", "", "", "tenant"]),
)


class PoolMachine(RuleBasedStateMachine):
    """Requests start, prefill, decode, are preempted and end; texts share prefixes often."""

    requests = Bundle("requests")

    @initialize(
        name=st.sampled_from(sorted(LAYOUTS)),
        spare=st.integers(0, 20),
        retention=st.sampled_from([None, 0, 2]),
    )
    def start(self, name: str, spare: int, retention: int | None) -> None:
        self.layout = layout(name)
        grid = self.layout.grid_tokens
        blocks = Pool(self.layout, 1, step_tokens=STEP_TOKENS).peak_blocks(70) + spare
        self.pool = Pool(
            self.layout,
            blocks,
            retention=retention * grid if retention else retention,
            step_tokens=STEP_TOKENS,
        )
        self.live: list[tuple[Holding, list[int]]] = []
        self.announced: Counter[tuple[int, int]] = Counter()
        self.once_stored: list[set[int]] = [set() for _ in self.pool.slots]

    @rule(target=requests, text=TEXTS)
    def arrive(self, text: tuple[bytes, str]) -> object:
        return self.pool.open(text[0], salt=text[1]), [-1]  # -1: waits

    @rule(text=TEXTS, decodes=st.integers(0, 20))
    def serve(self, text: tuple[bytes, str], decodes: int) -> None:
        """A whole life at once: what fills the pool and turns it over."""
        request = (self.pool.open(text[0], salt=text[1]), [-1])
        for _ in range(decodes + 3):
            self.advance(request)
        self.preempt(request)

    def _admit(self, holding: Holding, at: list[int]) -> None:
        before = self.pool.free
        hit = self.pool.lookup(holding)
        assert hit.tokens < holding.size
        assert hit.tokens % self.layout.grid_tokens == 0
        assert hit.junction == 0 or hit.junction > hit.tokens
        for slot, blocks in zip(self.pool.slots, hit.blocks, strict=True):
            for index, block in blocks:
                key = holding.key((index + 1) * slot.block_tokens)
                assert self.pool.blocks.keys[block] == (slot.index, key)
                assert key in self.once_stored[slot.index], "a hit on what was never announced"
        assert self.pool.free == before, "a lookup changed the pool"
        upto = min(holding.size, hit.tokens + STEP_TOKENS)
        if self.pool.admit(holding, hit, upto):
            at[0] = upto
            self.live.append((holding, at))
        else:
            assert self.pool.free == before, "a refused admission kept blocks"

    @rule(request=requests)
    def advance(self, request: tuple[Holding, list[int]]) -> None:
        holding, at = request
        if self.pool.peak_blocks(holding.size + 1) > self.pool.capacity:
            return
        if at[0] < 0:
            self._admit(holding, at)
            return
        if at[0] == holding.size:
            holding.append(holding.size % 5)
        upto = min(holding.size, at[0] + STEP_TOKENS)
        if self.pool.grow(holding, at[0], upto):
            at[0] = upto
        else:
            assert self.live != [request], "refused though nobody else holds anything"

    @rule(request=requests)
    def preempt(self, request: tuple[Holding, list[int]]) -> None:
        holding, at = request
        if at[0] >= 0:
            self.pool.release(holding)
            self.live = [r for r in self.live if r[0] is not holding]
            at[0] = -1

    @rule(request=consumes(requests))
    def end(self, request: tuple[Holding, list[int]]) -> None:
        self.preempt(request)

    @rule()
    def clear(self) -> None:
        done = self.pool.clear()
        assert done == (not self.live)
        if done:
            assert self.pool.cached == 0

    @invariant()
    def books_balance(self) -> None:
        pool = self.pool
        plain = sum(
            h.total[i] - h.first[i] - len(h.held[i])
            for h, _ in self.live
            for i in range(len(h.total))
        )
        owners = Counter(b for h, _ in self.live for held in h.held for _, b in held)
        assert plain == pool.blocks.plain
        assert all(n >= 0 for n in pool.blocks.refs)
        assert {b: n for b, n in enumerate(pool.blocks.refs) if n} == dict(owners)
        assert pool.free + plain + len(owners) == pool.capacity
        keyed = {b for b, key in enumerate(pool.blocks.keys) if key is not None}
        assert keyed == set(pool.blocks.idle) | set(owners)
        assert keyed.isdisjoint(pool.blocks.spare)
        assert len(pool.blocks.spare) == len(set(pool.blocks.spare))
        assert len(keyed) + len(pool.blocks.spare) == pool.capacity
        for (group, key), ids in self.findable().items():
            assert len(ids) == len(set(ids))
            for block in ids:
                assert pool.blocks.keys[block] == (group, key) or key in pool.blocks.aliases[block]
        assert all(pool.blocks.twins.values())
        for held in (h.held[s.index] for h, _ in self.live for s in pool.slots):
            assert [i for i, _ in held] == sorted({i for i, _ in held})

    def findable(self) -> dict[tuple[int, int], list[int]]:
        """(group, key) → blocks that are equal."""
        blocks = self.pool.blocks
        return {
            (group, key): [first, *blocks.twins.get((group, key), ())]
            for group, found in enumerate(blocks.found)
            for key, first in found.items()
        }

    @invariant()
    def announcements_say_what_is_held(self) -> None:
        for event in self.pool.take_events():
            match event:
                case AllBlocksCleared():
                    self.announced.clear()
                case BlockStored(hashes=hashes, group=int(group)):
                    self.announced.update((group, h) for h in hashes)
                    self.once_stored[group].update(hashes)
                case BlockRemoved(hashes=hashes, group=int(group)):
                    self.announced.subtract((group, h) for h in hashes)
        held = Counter({place: len(ids) for place, ids in self.findable().items()})
        assert self.pool.blocks.twins.keys() <= held.keys()
        assert +self.announced == held
        assert min(self.announced.values(), default=0) >= 0

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for holding, _ in self.live:
            self.pool.release(holding)
        assert self.pool.free == self.pool.capacity
        assert self.pool.blocks.plain == 0
        assert not any(self.pool.blocks.refs)


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestPool = PoolMachine.TestCase
