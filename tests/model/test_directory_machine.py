"""The directory against a dumb twin that keeps plain sets and reads the rules literally."""

from __future__ import annotations

import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvatlas.core.directory import Directory
from kvatlas.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import Group, Layout
from kvatlas.core.records import Publisher, Tier

RING = Keyring(b"a secret for the tests")
FP = b"\1" * 32
GRID = 8
LAYOUT = Layout(
    model="hybrid",
    engine="",  # one that stores a block once: how vLLM's twins are counted has tests of its own
    kv_dtype="",
    grid_tokens=GRID,
    components=(),
    groups=(
        Group("kv", "full", GRID),
        Group("near", "window", 2, 4),  # two small blocks at the end of a grid block
        Group("wide", "window", GRID, 17),  # the last two grid blocks
    ),
)
PUBLISHERS = [Publisher("w1"), Publisher("w2")]
TIERS = [Tier.HBM, Tier.DRAM]
PROMPTS = ((0, 0, 0), (0, 0, 1), (1, 0, 0))


def path_tokens(path: tuple[int, ...]) -> bytes:
    """A path names a prompt: one small number per grid block."""
    return array.array("I", [i for n in path for i in range(n * 100, n * 100 + GRID)]).tobytes()


def block_hash(path: tuple[int, ...], back: int = 0) -> int:
    """The engine's hash of the block that ends ``back`` tokens before the end of ``path``."""
    value = 1
    for n in path:
        value = value * 7 + n + 1
    return value * 16 + back


paths = st.sampled_from(sorted({p[: i + 1] for p in PROMPTS for i in range(len(p))}))
publishers = st.sampled_from(PUBLISHERS)
tiers = st.sampled_from(TIERS)


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(RING)
        for publisher in PUBLISHERS:
            self.directory.register(publisher, LAYOUT, FP)
        # (publisher, group, tier, path, unit counted from the end of the block)
        self.held: set[tuple[Publisher, str, Tier, tuple[int, ...], int]] = set()

    @rule(publisher=publishers, path=paths, tier=tiers)
    def store_chain(self, publisher: Publisher, path: tuple[int, ...], tier: Tier) -> None:
        hashes = tuple(block_hash(path[: i + 1]) for i in range(len(path)))
        event = BlockStored(hashes, None, path_tokens(path), GRID, tier, 0, "full")
        assert self.directory.apply(publisher, [event]).stored >= len(path)
        for i in range(len(path)):
            self.held.add((publisher, "kv", tier, path[: i + 1], 0))

    @rule(publisher=publishers, path=paths, tier=tiers)
    def store_windows(self, publisher: Publisher, path: tuple[int, ...], tier: Tier) -> None:
        """The chain is named first, so that the twin needs no memory of waiting claims."""
        self.store_chain(publisher, path, tier)
        data = path_tokens(path)
        near = (block_hash(path, 2), block_hash(path))
        self.directory.apply(publisher, [BlockStored(near, None, data, 2, tier, 1, "window", 4)])
        self.held |= {(publisher, "near", tier, path, unit) for unit in (0, 1)}
        wide = tuple(block_hash(path[: i + 1]) for i in range(max(0, len(path) - 2), len(path)))
        self.directory.apply(
            publisher, [BlockStored(wide, None, data, GRID, tier, 2, "window", 17)]
        )
        for i in range(max(0, len(path) - 2), len(path)):
            self.held.add((publisher, "wide", tier, path[: i + 1], 0))

    @rule(data=st.data(), never_held=st.booleans())
    def remove(self, data: st.DataObject, never_held: bool) -> None:
        """Something that is held, or (the same, on the other publisher) perhaps is not."""
        if not self.held:
            return
        publisher, name, tier, path, unit = data.draw(st.sampled_from(sorted(self.held)))
        if never_held:
            publisher = PUBLISHERS[1 - PUBLISHERS.index(publisher)]
        group = ("kv", "near", "wide").index(name)
        if not any(h[0] == publisher and h[1] == name for h in self.held):
            return  # the engine's index of this group was never announced
        removed = BlockRemoved((block_hash(path, 2 * unit),), tier, group)
        self.directory.apply(publisher, [removed])
        self.held.discard((publisher, name, tier, path, unit))

    @rule(
        publisher=publishers,
        how=st.sampled_from(["clear", "restart", "leave"]),
        dice=st.integers(0, 3),
    )
    def lose_everything(self, publisher: Publisher, how: str, dice: int) -> None:
        if dice:
            return  # rare, so that there is something to lose
        if how == "clear":
            self.directory.apply(publisher, [AllBlocksCleared()])
        elif how == "restart":
            self.directory.reset(publisher)
        else:
            self.directory.unregister(publisher)
            self.directory.register(publisher, LAYOUT, FP)
        self.held = {h for h in self.held if h[0] != publisher}

    def _has(self, publisher: Publisher, group: str, path: tuple[int, ...], tier: Tier) -> bool:
        units = (0, 1) if group == "near" else (0,)
        return all((publisher, group, tier, path, unit) in self.held for unit in units)

    def _resumable(self, publisher: Publisher, prompt: tuple[int, ...]) -> int:
        """The rules, literally: local hit first, then the lower tier goes on from there."""

        def chain(start: int, tier: Tier) -> int:
            end = start
            while end < len(prompt) and self._has(publisher, "kv", prompt[: end + 1], tier):
                end += 1
            return end

        def windows(position: int, tier: Tier) -> bool:
            wide = range(max(1, position - 1), position + 1)
            return self._has(publisher, "near", prompt[:position], tier) and all(
                self._has(publisher, "wide", prompt[:i], tier) for i in wide
            )

        near = chain(0, Tier.HBM)
        local = next((p for p in range(near, 0, -1) if windows(p, Tier.HBM)), 0)
        if local == near:
            far = chain(near, Tier.DRAM)
            return next((p for p in range(far, near, -1) if windows(p, Tier.DRAM)), local)
        return local

    @invariant()
    def every_resume_position_is_right(self) -> None:
        for prompt in PROMPTS:
            keys = RING.chain(RING.root(FP), path_tokens(prompt), GRID)
            found = {r.publisher: r for r in self.directory.peek(keys, FP)}
            for publisher in PUBLISHERS:
                expected = self._resumable(publisher, prompt)
                resume = found.get(publisher)
                assert (resume.tokens if resume else 0) == expected * GRID
                if resume:
                    assert resume.tokens == sum(resume.tier_tokens)
                    assert resume.chain_tokens >= resume.tokens

    @invariant()
    def the_count_of_holders_is_exact(self) -> None:
        whole = {
            (p, group, tier, path)
            for p, group, tier, path, _ in self.held
            if self._has(p, group, path, tier)
        }
        assert self.directory.holders == len(whole)
        assert self.directory.holders == sum(map(self.directory.holders_of, PUBLISHERS))


DirectoryMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestDirectoryMachine = DirectoryMachine.TestCase
