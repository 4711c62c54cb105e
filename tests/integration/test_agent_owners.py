"""Who owns a slot of a node's memory, and until when: engines that stall, die, ask and go away.

Classes F and G of the field reports, at a real `NodeAgent` with engines that have no model.
"""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import pytest
from fake_engine import GRID, FakeEngine, content, hello, tokens_of

from kvatlas.core import agent_values as words
from kvatlas.core.policy.checkpoints import Spacing
from kvatlas.core.records import Tier
from kvatlas.dataplane.extents import whole
from kvatlas.service import agent_copies, agent_socket
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.service.agent_driver import UNANSWERED_MAX
from kvatlas.validate.exactness_tiers import SLOW

BLOCKS = 10
PROMPT = tokens_of(1, BLOCKS * GRID + 1)
LONG_S = 1000.0  # after which the machine has given up whatever it waited for
WAIT_S = 20.0


class Node:
    """Small, in memory alone: 100 blocks fill it."""

    def __init__(self, agent: NodeAgent) -> None:
        self.agent = agent
        self.path = agent.settings.path
        self.free_bytes = agent._dram.free_bytes
        self.blocks = 0

    async def engine(self, told: wire.Hello | None = None) -> FakeEngine:
        return await asyncio.to_thread(FakeEngine, self.path, told)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                await asyncio.sleep(0.002)

    async def end(self, engine: FakeEngine) -> None:
        await asyncio.to_thread(engine.client.close)
        await self.until(lambda: engine not in self.agent._peers and not self.agent._peers)

    def late(self) -> None:
        """Whatever is under way is given up."""
        driver = self.agent.driver
        for _ in range(2):  # asked to stop, then given up
            driver._perform(driver.agent.tick(driver.agent._node.now + LONG_S))

    @property
    def taken_bytes(self) -> int:
        """Of the arena, by whomever."""
        return self.free_bytes - self.agent._dram.free_bytes

    @property
    def pinned(self) -> int:
        return len(self.agent._dram._slots._holds)

    def whole(self) -> None:
        """Nothing is in use, and books and memory say the same."""
        dram = self.agent._dram
        units = {name: unit.slot.size_bytes for name, unit in dram._units.items()}
        assert not self.pinned
        assert not dram._rooms
        assert not self.agent.driver.loads.held
        assert not self.agent._core.busy
        assert self.taken_bytes == sum(map(whole, units.values()))
        usage = self.agent._core.ledger(Tier.DRAM).usage()
        assert usage.committed_bytes == sum(units.values())
        assert usage.in_use_bytes == 0


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.setattr(agent_socket, "GONE_S", 0.01)  # our own process lives on
    settings = Settings(
        tmp_path / "agent.sock",
        8 << 20,
        prefill_tokens_per_s=SLOW,
        secret=b"s" * 32,
        agent=words.Config(queue_s=5.0),
    )
    async with NodeAgent(settings) as agent:
        serving = asyncio.get_running_loop().create_task(agent.serve())
        yield Node(agent)
        serving.cancel()


# -- F: two owners of one place -------------------------------------------------------------------


async def test_a_place_is_nobody_elses_before_its_writer_answers(node: Node) -> None:
    slow, other = await node.engine(), await node.engine(hello(model="other"))
    (order,) = await asyncio.to_thread(slow.orders, "r", PROMPT)
    node.late()
    assert node.agent.status()["counts"]["save_given_up"] == 1  # type: ignore[index]
    for n in range(2, 20):  # more than fits
        await asyncio.to_thread(other.save, f"{n}", tokens_of(n, BLOCKS * GRID + 1))
    held = node.agent._dram._units.values()
    taken = [(u.slot.offset, u.slot.offset + u.slot.size_bytes) for u in held]
    mine = [(p.slot.offset, p.slot.offset + p.slot.size_bytes) for p in order.pieces]
    assert taken
    assert not [1 for a in taken for b in mine if a[0] < b[1] and b[0] < a[1]]
    sums = slow.copy(order)  # now, long after it was given up
    assert await asyncio.to_thread(other.load, "q", tokens_of(19, BLOCKS * GRID + 1)) == (
        BLOCKS * GRID,
        {"dram": BLOCKS * GRID},
    )
    before = node.taken_bytes
    for _ in range(2):  # the second is of nothing any more
        slow.client.saved(order.op, sums)
    await asyncio.to_thread(slow.load, "q", PROMPT)
    assert before - node.taken_bytes == sum(whole(p.slot.size_bytes) for p in order.pieces)
    assert node.agent.status()["counts"]["saved_too_late"] == 2  # type: ignore[index]
    await asyncio.to_thread(other.client.close)
    await node.end(slow)
    node.whole()


async def test_a_writer_that_never_answers_gives_its_places_back_with_its_end(node: Node) -> None:
    mute = await node.engine()
    for n in range(UNANSWERED_MAX + 3):
        await asyncio.to_thread(mute.orders, f"{n}", tokens_of(n + 1, GRID + 1))
        node.late()
    counts = node.agent.driver.counts
    assert counts["save_unanswered"] == 3
    assert node.taken_bytes == UNANSWERED_MAX * whole(1 << 16)
    await node.end(mute)
    assert node.taken_bytes == 0
    node.whole()


@pytest.mark.parametrize("stage", ["asked", "staged", "ordered", "copied", "saved"])
async def test_engines_that_go_away_without_a_word_leave_nothing(node: Node, stage: str) -> None:
    first = await node.engine()
    await asyncio.to_thread(first.save, "r", PROMPT)
    await node.end(first)
    before = node.taken_bytes

    def visit(n: int) -> None:
        engine = FakeEngine(node.path)
        if stage == "asked":
            engine.client._send(wire.Want("q", PROMPT, 0, WAIT_S))
        elif stage == "staged":
            engine.want("q", PROMPT)
        else:
            orders = engine.orders("q", tokens_of(2, BLOCKS * GRID + 1))
            for order in orders if stage != "ordered" else ():
                sums = engine.copy(order)
                if stage == "saved":
                    engine.client.saved(order.op, sums[: n % BLOCKS])
        assert engine.client._channel is not None
        engine.client._channel.close()  # without a word

    for n in range(20):
        await asyncio.to_thread(visit, n)
    await node.until(lambda: not node.agent._peers and not node.agent._core.busy)
    if stage != "saved":
        assert node.taken_bytes == before
    node.whole()


DIFFERENT = {
    "block_tokens": 16,
    "weights_digest": "after an update",
    "engine": "sglang",
    "engine_version": "0.33.0",
    "hash_algorithm": "sha256",
    "kv_dtype": "fp8",
    "ranks": 2,
    "config": b"layers",
}


@pytest.mark.parametrize("what", [*DIFFERENT, "equal"])
async def test_state_of_one_kind_is_never_given_to_another(tmp_path: Path, what: str) -> None:
    told = hello()
    changed: object = DIFFERENT.get(what)
    if what == "config":
        config = msgspec.json.decode(told.config)
        changed = msgspec.json.encode(config | {"num_hidden_layers": 1})
    other = msgspec.structs.replace(told, **{what: changed} if changed else {})
    settings = Settings(
        tmp_path / "a",
        8 << 20,
        tmp_path / "disk",
        32 << 20,
        prefill_tokens_per_s=SLOW,
        secret=b"s" * 32,
    )
    async with NodeAgent(settings) as agent:
        serving = asyncio.get_running_loop().create_task(agent.serve())
        first = await asyncio.to_thread(FakeEngine, settings.path, told)
        await asyncio.to_thread(first.save, "r", PROMPT)
        await asyncio.to_thread(first.client.close)
        while agent._core.busy or agent._peers:
            await asyncio.sleep(0.002)
        serving.cancel()
    async with NodeAgent(settings) as agent:  # only the disk is left
        serving = asyncio.get_running_loop().create_task(agent.serve())
        second = await asyncio.to_thread(FakeEngine, settings.path, other)
        tokens, tiers = await asyncio.to_thread(second.load, "q", PROMPT)
        await asyncio.to_thread(second.client.close)
        serving.cancel()
    assert (tokens, tiers) == ((0, {}) if changed else (BLOCKS * GRID, {"disk": BLOCKS * GRID}))


@pytest.mark.parametrize("what", ["secret", "tenant", "adapter", "nothing"])
async def test_a_disk_gives_nothing_to_who_makes_other_keys(tmp_path: Path, what: str) -> None:
    settings = Settings(
        tmp_path / "a",
        8 << 20,
        tmp_path / "disk",
        32 << 20,
        prefill_tokens_per_s=SLOW,
        secret=b"s" * 32,
    )
    async with NodeAgent(settings) as agent:
        serving = asyncio.get_running_loop().create_task(agent.serve())
        first = await asyncio.to_thread(FakeEngine, settings.path)
        await asyncio.to_thread(first.save, "r", PROMPT)
        await asyncio.to_thread(first.client.close)
        while agent._core.busy or agent._peers:
            await asyncio.sleep(0.002)
        serving.cancel()
    other = msgspec.structs.replace(settings, secret=b"t" * 32 if what == "secret" else b"s" * 32)
    async with NodeAgent(other) as agent:
        assert agent.counts["found"] == BLOCKS
        serving = asyncio.get_running_loop().create_task(agent.serve())
        second = await asyncio.to_thread(FakeEngine, settings.path)
        scope, adapter = "t" if what == "tenant" else "", "a" if what == "adapter" else ""
        ask = partial(second.client.want, scope=scope, adapter=adapter)
        await asyncio.to_thread(ask, "q", PROMPT, 0, WAIT_S)
        while (staged := await asyncio.to_thread(second.client.staged, "q")) is None:
            pass
        assert staged.tokens == (BLOCKS * GRID if what == "nothing" else 0)
        second.client.release("q", used=False)
        assert await asyncio.to_thread(second.save, "s", tokens_of(2, BLOCKS * GRID)) == BLOCKS
        await asyncio.to_thread(second.client.close)
        serving.cancel()


# -- G: what is pinned is let go of ---------------------------------------------------------------


@pytest.mark.parametrize("way", ["end", "end at once", "cancel", "late", "release twice", "again"])
async def test_what_was_looked_up_and_not_fetched_is_not_pinned(node: Node, way: str) -> None:
    """A thousand times between them all; afterwards all of the memory can be filled again."""
    engine = await node.engine()
    await asyncio.to_thread(engine.save, "r", PROMPT)
    client = engine.client

    def look(n: int) -> None:
        name = f"{n}"
        if way in ("end at once", "cancel", "again"):
            client._send(wire.Want(name, PROMPT, 0, WAIT_S))
            if way == "cancel":
                client._send(wire.Cancel(name))
            if way == "again":
                client._send(wire.Want(name, PROMPT, 0, WAIT_S))
        else:
            engine.want(name, PROMPT)
        for _ in range(2 if way == "release twice" else 0):
            client._send(wire.Release(name, False))
        client._send(wire.End(name))

    for n in range(170):
        await asyncio.to_thread(look, n)
        if way == "late":
            node.late()
    engine.client._staged.clear()
    await asyncio.to_thread(engine.load, "last", PROMPT)  # all before it was heard
    await node.until(lambda: not node.agent.driver.loads.held and not node.agent._core.busy)
    node.whole()
    for n in range(2, 30):
        await asyncio.to_thread(engine.save, f"s{n}", tokens_of(n, BLOCKS * GRID + 1))
    assert (await asyncio.to_thread(engine.load, "new", tokens_of(29, BLOCKS * GRID + 1)))[0] > 0
    await node.end(engine)
    node.whole()


async def test_what_is_being_read_is_not_evicted(node: Node) -> None:
    reader, writer = await node.engine(), await node.engine()
    await asyncio.to_thread(writer.save, "r", PROMPT)
    staged = await asyncio.to_thread(reader.want, "q", PROMPT)
    assert staged.tokens == BLOCKS * GRID
    for n in range(2, 40):  # several times what fits
        await asyncio.to_thread(writer.save, f"{n}", tokens_of(n, BLOCKS * GRID + 1))
    channel = reader.client._channel
    assert channel is not None
    for piece in staged.pieces:
        view = channel.arena.view(piece.slot)
        assert bytes(view) == content(piece.name, len(view))
    reader.client.release("q", used=True)
    await asyncio.to_thread(writer.client.close)
    await node.end(reader)
    node.whole()


def writing_through(folder: Path) -> Settings:
    """Of an agent that writes each unit to its disk at once."""
    return Settings(
        folder / "a",
        8 << 20,
        folder / "disk",
        32 << 20,
        prefill_tokens_per_s=SLOW,
        secret=b"s" * 32,
        agent=words.Config(write_through=(Tier.DISK,)),
    )


async def test_what_a_disk_takes_too_late_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would know of it: its room would be lost until the next start."""
    settings = writing_through(tmp_path)
    async with NodeAgent(settings) as agent:
        serving = asyncio.get_running_loop().create_task(agent.serve())
        monkeypatch.setattr(agent_copies, "QUEUE_S", 0.0)
        with await asyncio.to_thread(FakeEngine, settings.path) as engine:
            assert await asyncio.to_thread(engine.save, "r", PROMPT) == BLOCKS
            assert await asyncio.to_thread(engine.load, "q", PROMPT) == (
                BLOCKS * GRID,
                {"dram": BLOCKS * GRID},
            )
        while agent._core.busy or agent._dram._slots._holds:
            await asyncio.sleep(0.002)
        assert agent._disk is not None
        assert list(agent._disk.scan()) == []
        assert agent._core.ledger(Tier.DISK).usage().committed_bytes == 0
        assert agent._core.counts["write_failed"] == 1
        serving.cancel()


async def test_what_is_written_for_who_gave_up_goes_again(tmp_path: Path) -> None:
    settings = writing_through(tmp_path)
    async with NodeAgent(settings) as agent:
        serving = asyncio.get_running_loop().create_task(agent.serve())
        order, disk, hung = agent.driver.copies._order, agent._disk, threading.Event()
        assert disk is not None
        order.submit(hung.wait)
        with await asyncio.to_thread(FakeEngine, settings.path) as engine:
            await asyncio.to_thread(engine.save, "r", PROMPT)
            await asyncio.to_thread(engine.load, "q", PROMPT)
            Node(agent).late()
            hung.set()
        while not list(disk.scan()):
            await asyncio.sleep(0)
        while list(disk.scan()):
            await asyncio.sleep(0.001)
        assert agent._core.counts["write_given_up"] == 1
        assert disk.free_bytes == disk.size_bytes
        serving.cancel()


# -- what makes no sense --------------------------------------------------------------------------


async def test_an_answer_that_is_too_long_ends_its_connection_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await node.engine()
    await asyncio.to_thread(engine.save, "r", PROMPT)
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 400)  # no ten pieces
    engine.client._send(wire.Want("q", PROMPT[: 4 * (2 * GRID + 1)], 0, WAIT_S))
    await node.until(lambda: node.agent.driver.loads.held == 1)
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 300)
    engine.client._send(wire.AskStatus())
    await node.until(lambda: not node.agent._peers)
    assert node.agent.counts["connections_slow"] == 1
    node.whole()
    await asyncio.to_thread(engine.client.close)


async def test_a_length_that_cannot_be_is_that_of_the_prompt(tmp_path: Path) -> None:
    """Points are looked for up to there, and not for ever."""
    every = words.Config(spacing=Spacing(every_tokens=GRID))
    settings = Settings(
        tmp_path / "agent.sock", 8 << 20, prefill_tokens_per_s=SLOW, secret=b"s" * 32, agent=every
    )
    async with NodeAgent(settings) as agent:
        serving = asyncio.get_running_loop().create_task(agent.serve())
        with await asyncio.to_thread(FakeEngine, settings.path, hello(kind="swa")) as engine:
            for prompt_tokens in (1 << 62, -(1 << 62)):
                await asyncio.to_thread(engine.want, "q", PROMPT)
                filled = wire.Filled("q", 0, b"", BLOCKS, (2, 5), 0, prompt_tokens)
                orders = await asyncio.to_thread(engine.client.filled, filled, memoryview(PROMPT))
                for order in orders:
                    engine.client.saved(order.op, engine.copy(order))
            assert engine.client.counts == {}
        serving.cancel()


async def test_checksums_that_are_none_end_their_connection(node: Node) -> None:
    engine = await node.engine()
    (order,) = await asyncio.to_thread(engine.orders, "r", PROMPT)
    engine.client.saved(order.op, tuple((piece.name, b"\1" * 17) for piece in order.pieces))
    await node.until(lambda: not node.agent._peers)
    assert node.agent.counts["bad_messages"] == 1
    assert node.taken_bytes == 0
    node.whole()
    await asyncio.to_thread(engine.client.close)


async def test_an_engine_with_many_open_files_hears_its_agent(node: Node) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):  # select(2) knows of 1,024
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        engine = await node.engine()
        assert engine.client._channel is not None
        assert engine.client._channel._sock.fileno() > 1024
        assert await asyncio.to_thread(engine.save, "r", PROMPT) == BLOCKS
        await node.end(engine)


# -- many at once ---------------------------------------------------------------------------------


async def test_a_hundred_engines_attach_at_once(node: Node) -> None:
    engines = await asyncio.gather(*(node.engine() for _ in range(100)))
    assert all(engine.client.welcome is not None for engine in engines)
    for engine in engines:
        await asyncio.to_thread(engine.client.close)
    await node.until(lambda: not node.agent._peers)


async def test_without_descriptors_it_waits_and_goes_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    accept, left = loop.sock_accept, [3]

    async def failing(sock: object) -> object:
        if left[0]:
            left[0] -= 1
            raise OSError(24, os.strerror(24))
        return await accept(sock)  # type: ignore[arg-type]

    first = await node.engine()
    monkeypatch.setattr(loop, "sock_accept", failing)
    second = await node.engine()
    third = await node.engine()
    assert third.client.welcome is not None
    assert node.agent.counts["accept_failed"] == 3
    for engine in (first, second, third):
        await asyncio.to_thread(engine.client.close)
