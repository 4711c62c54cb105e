"""What agents hold, as the directory believes it: carried on from each engine's own hit."""

from __future__ import annotations

import array

import pytest
from agent_kit import FP, GRID, chain_layout, window_layout

from kvatlas.core.directory import Directory, Limits
from kvatlas.core.events import AllBlocksCleared, BlockStored, UnitsGone, UnitsHeld
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import Layout, drafted
from kvatlas.core.records import Publisher, Tier

RING = Keyring(b"a secret for the tests")
A, B, AGENT, OTHER = Publisher("a"), Publisher("b"), Publisher("node"), Publisher("far")
TOKENS = array.array("I", range(10 * GRID)).tobytes()
KEYS = RING.chain(RING.root(FP), TOKENS, GRID)


def directory_of(layout: Layout, *, store: str = "") -> Directory:
    made = Directory(RING, Limits(holders_per_publisher_max=100))
    for engine in (A, B):
        made.register(engine, layout, FP)
    made.settle(AGENT, (A,), store)
    made.settle(OTHER, (B,), store)
    return made


def in_hbm(directory: Directory, engine: Publisher, blocks: int) -> None:
    stored = BlockStored(tuple(range(1, blocks + 1)), None, TOKENS[: blocks * GRID * 4], GRID)
    assert directory.apply(engine, [stored]).stored == blocks


def tokens(directory: Directory) -> dict[str, tuple[int, ...]]:
    """Per engine: tokens in all, then by tier as far as there are any."""
    return {
        r.publisher.worker: (r.tokens, *(t for t in r.tier_tokens if t))
        for r in directory.peek(KEYS, FP)
    }


def test_a_chain_goes_on_where_the_engine_ends() -> None:
    directory = directory_of(chain_layout())
    in_hbm(directory, A, 2)
    directory.apply(
        AGENT, [UnitsHeld(Tier.DRAM, tuple(KEYS[2:4])), UnitsHeld(Tier.DISK, tuple(KEYS[3:6]))]
    )
    assert tokens(directory) == {"a": (6 * GRID, 2 * GRID, 2 * GRID, 2 * GRID)}
    places = directory.positions(A, KEYS)
    assert places is not None
    assert places.deepest() == 6 * GRID
    directory.apply(AGENT, [UnitsGone(Tier.DRAM, (KEYS[2],))])
    assert tokens(directory) == {"a": (2 * GRID, 2 * GRID)}
    # An agent speaks for its own engines alone.
    assert directory.positions(B, KEYS).deepest() == 0  # type: ignore[union-attr]


def test_windows_count_at_points_alone() -> None:
    directory = directory_of(window_layout())
    held = UnitsHeld(Tier.DRAM, tuple(KEYS[:5]))
    directory.apply(AGENT, [held])
    assert tokens(directory) == {}
    directory.apply(AGENT, [UnitsHeld(Tier.DISK, points=(KEYS[3], KEYS[6]))])
    assert tokens(directory) == {"a": (4 * GRID, 4 * GRID)}
    (resume,) = directory.peek(KEYS, FP)
    assert resume.chain_tokens == 5 * GRID


def test_an_engine_that_looks_ahead_is_promised_a_block_less() -> None:
    directory = directory_of(drafted(chain_layout()))
    directory.apply(AGENT, [UnitsHeld(Tier.DRAM, tuple(KEYS))])
    assert tokens(directory)["a"][0] == 9 * GRID


def test_a_restart_a_doubt_and_the_end() -> None:
    directory = directory_of(chain_layout(), store="s3")
    near, far = UnitsHeld(Tier.DRAM, (KEYS[0],)), UnitsHeld(Tier.OBJECT, (KEYS[1],))
    directory.apply(AGENT, [near, far])
    directory.apply(OTHER, [near])
    both = {"a": (2 * GRID, GRID, GRID), "b": (2 * GRID, GRID, GRID)}
    assert tokens(directory) == both
    directory.believe(AGENT, False)
    assert set(tokens(directory)) == {"b"}
    directory.believe(AGENT, True)
    assert tokens(directory) == both
    directory.reset(AGENT)  # what lies in the store is not the agent's own
    assert tokens(directory) == {"b": (2 * GRID, GRID, GRID)}
    directory.apply(AGENT, [near, AllBlocksCleared()])
    assert set(tokens(directory)) == {"b"}
    directory.apply(AGENT, [UnitsGone(Tier.OBJECT, (KEYS[1],))])
    assert tokens(directory) == {"b": (GRID, GRID)}
    directory.shelves.remove(OTHER)
    assert tokens(directory) == {}


def test_what_cannot_be_believed_is_counted() -> None:
    directory = directory_of(chain_layout())
    odd = [UnitsHeld(Tier.OBJECT, (KEYS[0],)), UnitsHeld(Tier.HBM, (KEYS[0],))]
    assert directory.apply(AGENT, odd).undeclared == 2
    stored = BlockStored((1,), None, TOKENS[: GRID * 4], GRID)
    assert directory.apply(AGENT, [stored]).undeclared == 1
    assert directory.apply(AGENT, [UnitsGone(Tier.DRAM, (KEYS[0],))]).unknown_removals == 1
    assert directory.apply(Publisher("nobody"), [odd[0]]).unregistered == 1
    many = tuple(i.to_bytes(16, "big") for i in range(150))
    applied = directory.apply(AGENT, [UnitsHeld(Tier.DRAM, many)])
    assert (applied.stored, applied.refused) == (100, 50)
    with pytest.raises(ValueError, match="a name of its own"):
        directory.settle(A, ())


def test_reading_changes_nothing_and_the_digest_tells() -> None:
    directory = directory_of(chain_layout())
    before = directory.digest()
    directory.apply(AGENT, [UnitsHeld(Tier.DRAM, (KEYS[0],))])
    after = directory.digest()
    assert before != after
    tokens(directory)
    directory.positions(A, KEYS)
    assert directory.digest() == after
