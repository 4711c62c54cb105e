"""What an agent announces and a feed hears, over real sockets: gaps, late ones, lost stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from agent_kit import FP, GRID, Driver, chain_layout, keys_of, window_layout
from feed_kit import QUICK

from kvatlas.core.agent_values import Lose, Push
from kvatlas.core.directory import Directory
from kvatlas.core.events import AllBlocksCleared, UnitsGone, UnitsHeld
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Publisher, Tier
from kvatlas.errors import ConfigError
from kvatlas.service import agent_announce, wire
from kvatlas.service.agent_announce import Announcer
from kvatlas.service.feed import Feed, Source

AGENT, ENGINE = Publisher("node"), Publisher("a")


class Stand:
    """An agent whose tiers are dicts, its announcer, and any number of directories that listen."""

    def __init__(self, *, windows: bool = False, disk: int | None = None) -> None:
        self.node = Driver(
            dram=1_000_000, disk=disk, layout=window_layout() if windows else chain_layout()
        )
        self.node.attach("a")
        self.announcer = Announcer(self.node.agent.held)
        self.told = 0
        self.feeds: list[Feed] = []

    def tell(self) -> None:
        """What the agent said since the last time goes out."""
        said, self.told = self.node.said[self.told :], len(self.node.said)
        for event in said:
            self.announcer.announce((event,))

    def listener(self) -> Directory:
        directory = Directory(Keyring(b"a secret for the tests"))
        directory.register(ENGINE, self.node.layout, FP)
        directory.settle(AGENT, (ENGINE,), "store")
        feed = Feed(directory, limits=QUICK)
        source = Source(self.announcer.endpoint, self.announcer.replay_endpoint)
        feed.add(AGENT, source)
        self.feeds.append(feed)
        return directory

    def held(self) -> dict[Tier, set[bytes]]:
        found: dict[Tier, set[bytes]] = {t: set() for t in (Tier.DRAM, Tier.DISK, Tier.OBJECT)}
        for tier, names in self.node.tiers.items():
            if tier in found:
                found[tier] = set(names)
        return found

    async def agrees(self, directory: Directory) -> None:
        async with asyncio.timeout(60):
            while directory.shelves.names(AGENT) != self.held():
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        for feed in self.feeds:
            await feed.close()
        await self.announcer.close()


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    made = Stand(windows=True, disk=1_000_000)
    yield made
    await made.close()


def _resumes(directory: Directory, keys: tuple[bytes, ...]) -> int:
    found = directory.peek((*keys, b"beyond" + bytes(10)), FP)
    return found[0].tokens if found else 0


async def resumes(directory: Directory, keys: tuple[bytes, ...], tokens: int) -> None:
    """In the end: what is sealed is told after what is held."""
    async with asyncio.timeout(60):
        while _resumes(directory, keys) != tokens:
            await asyncio.sleep(0.005)


async def test_points_count_where_they_are_sealed(stand: Stand) -> None:
    directory = stand.listener()
    keys = keys_of(1, 9)
    stand.node.fill(keys, 4, 9)
    stand.tell()
    await stand.agrees(directory)
    await resumes(directory, keys, 9 * GRID)
    await resumes(directory, keys[:8], 4 * GRID)


async def test_a_batch_that_was_lost_is_asked_for_again(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = stand.listener()
    stand.node.fill(keys_of(1, 4), 4)
    stand.tell()
    await stand.agrees(directory)

    class Nowhere:
        def send_multipart(self, _: object) -> None: ...

    socket = stand.announcer._socket
    with monkeypatch.context() as patch:
        patch.setattr(socket, "_pub", Nowhere())
        stand.node.fill(keys_of(2, 4), 4)
        stand.tell()
    stand.node.fill(keys_of(3, 4), 4)
    stand.tell()
    await stand.agrees(directory)
    (status,) = stand.feeds[0].status()
    assert status.stream.gaps == 1
    assert status.stream.resets == 0


async def test_a_rewritten_history_tells_late_and_lagging_listeners_the_same(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hears all of it, one misses the whole rewriting, one comes after it."""
    monkeypatch.setattr(agent_announce, "HISTORY_BATCHES_MAX", 20)
    monkeypatch.setattr(agent_announce, "KEYS_PER_BATCH", 8)
    monkeypatch.setattr(agent_announce, "KEYS_PER_EVENT", 3)
    steady, lagging = stand.listener(), stand.listener()
    stand.node.fill(keys_of(1, 6), 6)
    stand.tell()
    await stand.agrees(steady)
    await stand.agrees(lagging)
    stand.feeds[1].remove(AGENT)
    for prompt in range(2, 40):
        stand.node.fill(keys_of(prompt, 6, shared=2), 3, 6)
        if prompt % 7 == 0:
            stand.node.do(Lose(Tier.DRAM))
        stand.tell()
        await asyncio.sleep(0)
    assert stand.announcer.counts["history_rewritten"] > 2
    await stand.agrees(steady)
    assert stand.feeds[0].status()[0].stream.resets == 0, "who hears all is not disturbed"
    stand.feeds[1].add(AGENT, stand.feeds[0].status()[0].source)
    await stand.agrees(lagging)
    await stand.agrees(stand.listener())
    stand.node.fill(keys_of(99, 6), 6)
    stand.tell()
    await stand.agrees(lagging)


async def test_who_missed_the_last_batches_takes_pieces_for_nothing_else(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces of a rewritten history stand under numbers that were heard with other contents."""
    monkeypatch.setattr(agent_announce, "HISTORY_BATCHES_MAX", 6)
    monkeypatch.setattr(agent_announce, "KEYS_PER_BATCH", 4)
    directory = stand.listener()
    for prompt in range(1, 4):
        stand.node.fill(keys_of(prompt, 2), 2)
        stand.tell()
    await stand.agrees(directory)

    class Nowhere:
        def send_multipart(self, _: object) -> None: ...

    socket = stand.announcer._socket
    with monkeypatch.context() as patch:
        patch.setattr(socket, "_pub", Nowhere())
        while not stand.announcer.counts["history_rewritten"]:
            stand.node.fill(keys_of(50 + socket.next_seq, 2), 2)
            stand.tell()
    first = next(iter(socket._buffer))[0]
    heard = stand.feeds[0].status()[0].stream.applied - 1
    assert first <= heard < socket.next_seq - 1, "what it heard last is a piece now"
    stand.node.fill(keys_of(99, 2), 2)
    stand.tell()
    await stand.agrees(directory)


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.OBJECT])
async def test_what_a_lost_store_held_is_taken_back(stand: Stand, tier: Tier) -> None:
    directory = stand.listener()
    keys = keys_of(1, 5)
    stand.node.fill(keys, 5)
    if tier is Tier.OBJECT:  # and nowhere else
        stand.node.do(Push("a", keys, Tier.OBJECT))
        stand.node.do(Lose(Tier.DRAM))
    stand.tell()
    await stand.agrees(directory)
    await resumes(directory, keys, 5 * GRID)
    stand.node.tiers[tier].clear()
    stand.node.do(Lose(tier))
    stand.tell()
    await stand.agrees(directory)
    await resumes(directory, keys, 0)


async def test_a_port_that_is_taken_is_told(stand: Stand) -> None:
    port = int(stand.announcer.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"ports {port} and {port + 1} of 127"):
        Announcer(stand.node.agent.held, port=port)


def test_units_come_back_as_they_were_said() -> None:
    said = (
        AllBlocksCleared(),
        UnitsGone(Tier.DISK, keys_of(1, 3)),
        UnitsHeld(Tier.DRAM, keys_of(2, 2), keys_of(3, 1)),
        UnitsHeld(Tier.OBJECT, (), keys_of(3, 1)),
    )
    batch = wire.Decoder().decode(5, wire.encoded_units(12.5, said))
    assert (batch.seq, batch.ts, batch.events, batch.malformed) == (5, 12.5, said, 0)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"type": "UnitsHeld", "tier": "dram", "bodies": b"x" * 17}, "keys are not whole"),
        ({"type": "UnitsHeld", "tier": "hbm", "bodies": b"x" * 16}, "fields of a wrong type"),
        ({"type": "UnitsGone", "tier": "disk", "points": "text"}, "fields of a wrong type"),
        ({"type": "UnitsGone"}, "fields of a wrong type"),
    ],
)
def test_units_that_cannot_be_are_left_out(event: dict[str, object], reason: str) -> None:
    decoder = wire.Decoder()
    good = {"type": "UnitsGone", "tier": "dram", "bodies": b"k" * 16}
    batch = decoder.decode(0, msgspec.msgpack.encode([1.0, [event, good], 0]))
    assert batch.events == (UnitsGone(Tier.DRAM, (b"k" * 16,)),)
    assert decoder.reasons == {reason: 1}
