"""The directory carried on by agents, against the rule read literally over plain sets."""

from __future__ import annotations

import array

from agent_kit import FP, GRID, chain_layout, window_layout
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core.directory import Directory
from kvatlas.core.events import BlockStored, UnitsGone, UnitsHeld
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Publisher, Tier

RING = Keyring(b"a secret for the tests")
BLOCKS = 8
TOKENS = array.array("I", range(BLOCKS * GRID)).tobytes()
KEYS = RING.chain(RING.root(FP), TOKENS, GRID)
ENGINE, AGENT, OTHER = Publisher("a"), Publisher("node"), Publisher("other")
TIERS = (Tier.DRAM, Tier.DISK, Tier.OBJECT)

places = st.sets(st.integers(0, BLOCKS - 1))
words = st.lists(
    st.tuples(
        st.sampled_from([AGENT, OTHER]),
        st.booleans(),
        st.sampled_from(TIERS),
        places,
        places,
    ),
    max_size=12,
)


@given(windows=st.booleans(), local=st.integers(0, BLOCKS), said=words)
def test_neither_more_nor_less(
    windows: bool,
    local: int,
    said: list[tuple[Publisher, bool, Tier, set[int], set[int]]],
) -> None:
    directory = Directory(RING)
    directory.register(ENGINE, window_layout() if windows else chain_layout(), FP)
    directory.settle(AGENT, [ENGINE], "store")
    directory.settle(OTHER, [], "store")
    if local:
        ids = TOKENS[: local * GRID * 4]
        stored = BlockStored(tuple(range(1, local + 1)), None, ids, GRID, group=0, kind="full")
        directory.apply(ENGINE, [stored])
    held: dict[tuple[Publisher | None, Tier], tuple[set[int], set[int]]] = {}
    for agent, gone, tier, bodies, points in said:
        mine = held.setdefault((None if tier is Tier.OBJECT else agent, tier), (set(), set()))
        kind = UnitsGone if gone else UnitsHeld
        keys = (tuple(KEYS[i] for i in sorted(bodies)), tuple(KEYS[i] for i in sorted(points)))
        directory.apply(agent, [kind(tier, *keys)])
        for have, named in zip(mine, (bodies, points), strict=True):
            have.difference_update(named) if gone else have.update(named)
    readable = [held.get((None if t is Tier.OBJECT else AGENT, t), (set(), set())) for t in TIERS]
    start = 0 if windows else local  # with windows the chain alone is no hit
    best = start
    for position in range(start + 1, BLOCKS + 1):
        if not any(position - 1 in bodies for bodies, _ in readable):
            break
        if not windows or any(position - 1 in points for _, points in readable):
            best = position
    found = directory.peek(KEYS, FP)
    assert max((r.tokens for r in found), default=0) == best * GRID
    for resume in found:
        assert sum(resume.tier_tokens) == resume.tokens <= resume.chain_tokens
    positions = directory.positions(ENGINE, KEYS)
    assert positions is not None
    assert positions.deepest() == best * GRID
