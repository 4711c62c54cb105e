"""What the tests of snapshots share: engines that announce prompts, and snapshots as bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from kvatlas.core.directory import Directory, Limits
from kvatlas.core.dispatch import Dispatcher, Join, Settle
from kvatlas.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    UnitsGone,
    UnitsHeld,
)
from kvatlas.core.keys import KEY_BYTES, Keyring
from kvatlas.core.layout import Group, Layout, plain
from kvatlas.core.records import Place, Publisher, Tier
from kvatlas.core.router import Router
from kvatlas.core.snapshot import Restore, Taken, engine_pieces, shelf_pieces
from kvatlas.core.snapshot_frames import Reader, Writer, encoded
from kvatlas.core.snapshot_prices import prices_of

RING = Keyring(b"a secret for the tests")
NONCE = b"n" * 16
FP = b"\1" * 32
GRID = 16
PLACE = Place(10, 100.0, 0, 0, True, False)
ENGINES = [Publisher("w1"), Publisher("w2"), Publisher("w2", 1)]
AGENTS = [Publisher("node1"), Publisher("node2")]
SWA = "sliding_window"

LAYOUTS = {
    "plain": plain(GRID),
    "windows": Layout(
        "m",
        "vllm",
        "",
        GRID,
        (),
        (Group(SWA, SWA, 4, 16), Group("kv", "full", GRID), Group("wide", SWA, GRID, 40)),
    ),
    "looks ahead": Layout(
        "m",
        "vllm",
        "",
        GRID,
        (),
        (Group("swa", SWA, 4, 8, copies=2, lookahead=1), Group("kv", "full", GRID)),
    ),
}
# Prompts that part inside a grid block, and after one.
_A = list(range(100, 180))
PROMPTS = (_A, [*_A[:12], *range(500, 568)], [*_A[:32], *range(900, 948)])


def name(tokens: Sequence[int], end: int) -> int:
    """An engine's hash of the block that ends there."""
    return hash(tuple(tokens[:end])) & 0xFFFF_FFFF_FFFF_FFFF


def stored(
    place: tuple[Layout, int], prompt: int, span: tuple[int, int], kept: int, tier: Tier
) -> BlockStored | None:
    """Blocks of one group of a layout over ``span``; of a window the last ``kept`` alone."""
    (layout, group), (start, end) = place, span
    tokens, kind = PROMPTS[prompt], layout.groups[group]
    ends = list(range(start + kind.block_tokens, end + 1, kind.block_tokens))
    if not ends:
        return None
    listed = ends if kind.window_tokens is None else ends[-kept:]
    return BlockStored(
        tuple(name(tokens, e) for e in listed),
        name(tokens, start) if start else None,
        array("I", tokens[start : ends[-1]]).tobytes(),
        kind.block_tokens,
        tier,
        group,
        kind.kind,
        kind.window_tokens,
    )


def histories(layout: Layout) -> st.SearchStrategy[list[tuple[Publisher, Event]]]:
    """What engines and agents may say, in any order, true or not."""
    groups, prompts = st.integers(0, len(layout.groups) - 1), st.integers(0, len(PROMPTS) - 1)
    tiers = st.sampled_from([Tier.HBM, Tier.HBM, Tier.HBM, Tier.DRAM, Tier.OBJECT])
    blocks = st.integers(0, 5).map(lambda n: n * GRID)
    stores = st.builds(
        stored,
        st.tuples(st.just(layout), groups),
        prompts,
        st.tuples(blocks, blocks),
        st.integers(1, 12),
        tiers,
    ).filter(lambda event: event is not None)
    removals = st.builds(
        lambda prompt, end, group, tier: BlockRemoved(
            (name(PROMPTS[prompt], 4 * end),), tier, group
        ),
        prompts,
        st.integers(1, 20),
        groups,
        st.one_of(st.none(), tiers),
    )
    unknown = st.just(BlockStored((7,), 99, bytes(4 * GRID), GRID, group=9, kind="none such"))
    engine = st.one_of(stores, stores, stores, removals, removals)
    rare = st.one_of(st.just(AllBlocksCleared()), unknown)
    events = st.one_of(*([engine] * 12), rare)
    keys = st.lists(st.sampled_from([bytes([i]) * KEY_BYTES for i in range(6)]), max_size=4)
    words = st.builds(
        lambda kind, tier, bodies, points: kind(tier, tuple(bodies), tuple(points)),
        st.sampled_from([UnitsHeld, UnitsHeld, UnitsGone]),
        st.sampled_from([Tier.DRAM, Tier.DISK, Tier.OBJECT]),
        keys,
        keys,
    )
    one = st.one_of(
        st.tuples(st.sampled_from(ENGINES), events),
        st.tuples(st.sampled_from(ENGINES), events),
        st.tuples(st.sampled_from(AGENTS), words),
    )
    return st.lists(one, max_size=60)


def replica(layout: Layout, limits: Limits | None = None, ring: Keyring = RING) -> Dispatcher:
    """One that knows who is there, and nothing of what they hold."""
    dispatcher = Dispatcher(Directory(ring, limits), Router(), ring)
    for engine in ENGINES:
        dispatcher.handle(Join(engine, layout, FP), 0.0)
    for agent, engine in zip(AGENTS, ENGINES, strict=False):
        dispatcher.handle(Settle(agent, (engine,), "s3"), 0.0)
    return dispatcher


def frames(dispatcher: Dispatcher, ring: Keyring = RING, nonce: bytes = NONCE) -> Iterator[bytes]:
    """All of it, one frame after the other."""
    writer = Writer(ring, nonce)
    yield writer.opening()
    directory = dispatcher.directory
    for engine in directory.publishers():
        for piece in engine_pieces(directory, engine, PLACE):
            yield writer.frame(encoded(piece))
    for piece in shelf_pieces(directory.shelves, dict.fromkeys(directory.shelves.agents(), PLACE)):
        yield writer.frame(encoded(piece))
    for price in prices_of(dispatcher):
        yield writer.frame(encoded(price))
    yield writer.closing()


def taken_up(restore: Restore, data: bytes, ring: Keyring = RING, step: int = 1 << 16) -> Taken:
    """Raises SnapshotError where it cannot be."""
    reader = Reader(ring, NONCE)
    for start in range(0, len(data), step):
        reader.feed(data[start : start + step])
        for piece in reader.pieces():
            restore.take(piece)
    return restore.commit()


def believed(dispatcher: Dispatcher) -> None:
    """Their streams went on from their places."""
    for publisher in (*ENGINES, *AGENTS):
        dispatcher.believe(publisher, True)
