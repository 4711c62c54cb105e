"""The directory's memory follows what is held: every container has a limit, and churn none."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import islice

import pytest

from kvatlas.core import claims
from kvatlas.core.claims import Applied, Claims
from kvatlas.core.directory import Directory, Limits
from kvatlas.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import Group, Layout, plain
from kvatlas.core.records import Publisher, Tier

RING = Keyring(b"a secret for the tests")
FP = b"\1" * 32
W1, W2 = Publisher("w1"), Publisher("w2")
BLOCK = 4
WINDOWED = Layout(
    "v4", "vllm", "", BLOCK, (), (Group("kv", "mla", BLOCK), Group("swa", "swa", 2, 4))
)


def made(limits: Limits | None = None, layout: Layout | None = None) -> Directory:
    directory = Directory(RING, limits)
    for publisher in (W1, W2):
        directory.register(publisher, layout or plain(BLOCK), FP)
    return directory


def unique(seed: int, blocks: int) -> Iterator[BlockStored]:
    """Endless events of ``blocks`` blocks that nobody has seen before."""
    source = random.Random(seed)
    while True:
        hashes = tuple(source.getrandbits(64) for _ in range(blocks))
        yield BlockStored(hashes, None, source.randbytes(4 * BLOCK * blocks), BLOCK)


def claims_of(directory: Directory, publisher: Publisher = W1) -> Claims:
    return directory._slots[publisher].claims


def table_bytes(directory: Directory) -> int:
    books = [book for tiers in directory._books for book in tiers]
    return sum(map(sys.getsizeof, [*books, claims_of(directory)._names]))


def sizes(directory: Directory) -> list[int]:
    """Entries of everything that could grow."""
    held = claims_of(directory)
    books = [book for tiers in directory._books for book in tiers]
    return [
        directory.holders,
        sum(map(len, books)),
        len(held._names),
        len(held._recent),
        len(held._pending),
        len(directory._retired),
        len(directory._named),
    ]


def churn(directory: Directory, events: Iterator[BlockStored], count: int) -> None:
    live: list[BlockStored] = []
    for number, event in enumerate(islice(events, count)):
        directory.apply(W1, [event])
        live.append(event)
        if len(live) > 20:
            gone = live.pop(number * 7919 % len(live))
            applied = directory.apply(W1, [BlockRemoved(gone.hashes)])
            assert applied.removed == len(gone.hashes)
    for event in live:
        directory.apply(W1, [BlockRemoved(event.hashes)])


def test_churn_leaves_nothing_behind() -> None:
    directory = made()
    events = unique(1, 8)
    churn(directory, events, 800)
    warm = sizes(directory)
    churn(directory, events, 1500)
    assert sizes(directory) == warm
    assert warm[:4] == [0, 0, 0, claims.RECENT_MAX]
    assert table_bytes(directory) < 5000  # it had room for 160 blocks: 24 bytes each, and spare


def test_holders_are_limited_per_publisher_and_in_all() -> None:
    directory = made(Limits(holders_max=30, holders_per_publisher_max=20))
    total = Applied()
    for publisher, event in zip((W1, W1, W2, W2), unique(2, 15), strict=False):
        total.add(directory.apply(publisher, [event]))
    assert (directory.holders_of(W1), directory.holders_of(W2), directory.holders) == (20, 10, 30)
    assert (total.stored, total.refused) == (30, 30)
    directory.reset(W1)
    assert directory.apply(W2, islice(unique(3, 15), 1)).stored == 10
    assert directory.holders == 20


def test_one_block_under_ever_new_hashes_is_limited() -> None:
    directory = made(Limits(holders_per_publisher_max=10))
    tokens = bytes(4 * BLOCK)
    for name in range(1, 50):
        directory.apply(W1, [BlockStored((name,), None, tokens, BLOCK)])
    assert (directory.holders, len(claims_of(directory)._names)) == (1, 10)
    applied = directory.apply(W1, [BlockRemoved(tuple(range(1, 50)))])
    assert (applied.removed, applied.unknown_removals) == (1, 48)
    assert (directory.holders, len(claims_of(directory)._names)) == (0, 0)


def test_claims_that_wait_for_a_name_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "PENDING_MAX", 10)
    directory = made()
    located = BlockStored(tuple(range(1, 31)), None, b"", BLOCK, Tier.DRAM)
    assert directory.apply(W1, [located]).refused == 20
    assert len(claims_of(directory)._pending) == 10


def test_windows_are_limited_named_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "PENDING_MAX", 10)
    directory = made(Limits(holders_per_publisher_max=6), WINDOWED)
    source = random.Random(4)
    refused = 0
    for name in range(1, 101):
        tokens = source.randbytes(4 * BLOCK)
        window = BlockStored((1000 + name, name), None, tokens, 2, Tier.HBM, 1, "swa", 4)
        chain = BlockStored((name,), None, tokens, BLOCK, Tier.HBM, 0, "mla")
        refused += directory.apply(W1, [window, chain] if name > 50 else [window]).refused
    [windows] = claims_of(directory)._windows.values()
    assert refused > 0
    assert len(windows.before) <= 10
    assert len(windows.place) <= 6 * 2
    assert directory.holders <= 6


def test_lives_that_end_faster_than_they_are_swept_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each apply sweeps a little; one batch may claim and drop more than that."""
    monkeypatch.setattr("kvatlas.core.directory._SWEEP_PER_APPLY", 20)
    directory = made()
    events = unique(5, 100)
    for _ in range(60):
        directory.apply(W1, [next(events), AllBlocksCleared()])
        assert directory.holders == 0
        assert len(directory._retired) <= 18
    assert len(directory._named) <= 21
    while directory.sweep(10_000):
        pass
    assert sizes(directory)[:2] == [0, 0]


def test_publishers_are_limited_and_places_are_used_again() -> None:
    directory = made(Limits(publishers_max=2))
    with pytest.raises(ValueError, match="2 ranks"):
        directory.register(Publisher("w3"), plain(BLOCK), FP)
    for number in range(100):
        directory.unregister(Publisher(f"n{number - 1}") if number else W2)
        directory.register(Publisher(f"n{number}"), plain(BLOCK), FP)
    assert len(directory.publishers()) == 2
    assert len(directory._named) == 2
    assert len(directory.pools()) == 1
