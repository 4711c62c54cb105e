"""Engines, operators and peers that do everything at once, by seed: nothing wrong, nothing left.

Two nodes that read from each other, small enough that all has to go all the time. Engines ask
twice, end in mid-load, answer twice, in part or never, and vanish; operators pull, push, pin, call
off, resize to nothing and drain meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import xxhash
from fake_engine import GRID, content, hello, tokens_of

from kvatlas.connectors.child import free_ports
from kvatlas.core import agent_values as words
from kvatlas.core.records import Tier
from kvatlas.core.units import Part
from kvatlas.dataplane.extents import whole
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.sockets import Address
from kvatlas.service import agent_copies, agent_socket
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.service.agent_shared import SharedSettings
from kvatlas.validate.exactness_tiers import SLOW

STEPS = 300
WAIT_S = 20.0
HASTY = words.Config(save_s=0.3, load_s=0.3, copy_s=0.5, grace_s=1.0, queue_s=0.3)
DISK_S = 0.2  # its deadline, and how long it may be waited for: less than the grace
SECRET = b"s" * 32


class Engine:
    """As raw as it gets: it sends what it is told, and keeps what comes."""

    def __init__(self, agent: NodeAgent, sock: socket.socket) -> None:
        self.agent = agent
        self.sock = sock
        self.got: list[wire.FromAgent] = []
        self.there = True
        self._frames = wire.Frames()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def attached(cls, agent: NodeAgent, told: wire.Hello) -> Engine:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, str(agent.settings.path))
        made = cls(agent, sock)
        await made.send(told)
        return made

    async def send(self, *messages: wire.FromEngine) -> None:
        try:
            for message in messages:
                await asyncio.get_running_loop().sock_sendall(self.sock, wire.frame(message))
        except OSError:
            self.there = False

    async def _read(self) -> None:
        try:
            while data := await asyncio.get_running_loop().sock_recv(self.sock, 1 << 18):
                self.got += map(wire.from_agent, self._frames.add(data))
        except OSError:
            pass
        self.there = False

    async def close(self) -> None:
        self.there = False
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self.sock.close()


class Storm:
    def __init__(self, seed: int, nodes: list[NodeAgent]) -> None:
        self.draw = random.Random(seed)
        self.nodes = nodes
        self.engines: list[Engine] = []
        self.loaded = 0

    async def blow(self) -> None:
        for step in range(STEPS):
            self.engines = [engine for engine in self.engines if engine.there]
            if not self.engines or self.draw.random() < 0.06:
                told = hello(model=self.draw.choice(["tiny", "other"]))
                self.engines.append(await Engine.attached(self.draw.choice(self.nodes), told))
            await self.act(self.draw.choice(self.engines), step > 0.9 * STEPS)
            await asyncio.sleep(self.draw.choice([0, 0, 0.001, 0.003]))
            for engine in self.engines:
                await self.hear(engine)
        for engine in self.engines:
            await engine.close()

    async def act(self, engine: Engine, last: bool) -> None:
        draw = self.draw
        blocks = draw.choice([3, 8, 12])
        request, tokens = f"{draw.randrange(6)}", tokens_of(draw.randrange(12), blocks * GRID + 1)
        scope = draw.choice(["", "", "tenant"])
        want = wire.Want(request, tokens, draw.choice([0, 0, GRID]), draw.choice([0.05, 1]), scope)
        filled = wire.Filled(request, len(tokens) // 4, b"", blocks, (), 0, len(tokens) // 4)
        errand = wire.Errand(
            draw.choice(["pull", "push", "pin", "where"]),
            name=draw.choice(["", "x", "y"]),
            tokens=tokens,
            tier=draw.choice(["disk", "dram", "object"]),
            hold_s=draw.choice([0.01, 0.2]),
            model=draw.choice(["tiny", "other", ""]),
            scope=scope,
        )
        resize = wire.Resize(draw.choice(["dram", "disk"]), draw.choice([0, 1 << 20, 2 << 20]))
        acts: list[tuple[float, tuple[wire.FromEngine, ...]]] = [
            (5, (want,)),
            (6, (want, filled)),
            (2, (wire.Cancel(request),)),
            (2, (wire.Release(request, draw.random() < 0.5),)),
            (2, (wire.End(request),)),
            (1, (errand,)),
            (0.5, (wire.Recall(draw.choice("xy")),)),
            (0.5, (resize,)),
            (0.1 if last else 0, (wire.Drain(),)),
            (0.8, ()),
        ]
        (messages,) = draw.choices([m for _, m in acts], [share for share, _ in acts])
        await engine.send(*messages)
        if not messages:
            await engine.close()

    async def hear(self, engine: Engine) -> None:
        while engine.got and engine.there:
            match engine.got.pop(0):
                case wire.Orders(_, orders):
                    for order in orders:
                        await self.copy(engine, order)
                case wire.Staged(request, _, pieces):
                    self.right(engine, pieces)
                    if self.draw.random() < 0.7:
                        await engine.send(wire.Release(request, True))

    async def copy(self, engine: Engine, order: wire.Order) -> None:
        if self.draw.random() < 0.1:
            return  # it never answers
        sums = []
        for piece in order.pieces:
            if engine.agent._arena.current(piece.slot) and self.draw.random() < 0.95:
                view = engine.agent._arena.view(piece.slot)
                view[:] = content(piece.name, len(view))
                sums.append((piece.name, xxhash.xxh3_128_intdigest(view).to_bytes(16, "big")))
        for _ in range(self.draw.choice([1, 1, 2])):
            await engine.send(wire.Saved(order.op, tuple(sums)))

    def right(self, engine: Engine, pieces: tuple[wire.Piece, ...]) -> None:
        arena = engine.agent._arena
        for piece in pieces:
            found = bytes(arena.view(piece.slot))
            if arena.current(piece.slot):  # else it was let go of already, in this same storm
                assert found == content(piece.name, len(found)), "wrong bytes were handed out"
                self.loaded += 1


async def calm(agent: NodeAgent) -> None:
    """Everything has ended; what is held in books, in memory and on disk is the same."""
    core, dram, driver = agent._core, agent._dram, agent.driver
    async with asyncio.timeout(WAIT_S):
        while agent._peers or core.busy or dram._rooms or dram._slots._holds:
            await asyncio.sleep(0.005)
    loads = driver.loads
    for left in (loads._stagings, loads._over, loads._held, loads._fetched, loads.engines):
        assert not left
    assert not driver._savings
    assert not driver._unanswered
    units = [unit.slot.size_bytes for unit in dram._units.values()]
    usage = core.ledger(Tier.DRAM).usage()
    assert usage.committed_bytes + usage.leaving_bytes == sum(units)
    assert agent._arena.size_bytes - dram.free_bytes == sum(map(whole, units))
    if agent._disk is None:
        return
    usage = core.ledger(Tier.DISK).usage()
    async with asyncio.timeout(WAIT_S):  # what was handed to it, or comes too late, has an end
        while _on_disk(agent._disk) != usage.committed_bytes + usage.leaving_bytes:
            await asyncio.sleep(0.005)


def _on_disk(disk: DiskStore) -> int:
    return sum(entry.size_bytes for entry in disk.scan() if entry.name[-1] in tuple(Part))


async def storm(folder: Path, seed: int) -> int:
    folder.mkdir()
    places = [Address("127.0.0.1", port) for port in free_ports(2)]
    async with AsyncExitStack() as stack:
        nodes = []
        for n, (mine, other) in enumerate((places, places[::-1])):
            has_disk = (seed + n) % 3 != 0
            settings = Settings(
                folder / f"{n}.sock",
                2 << 20,
                folder / f"disk {n}" if has_disk else None,
                6 << 20 if has_disk else 0,
                secret=SECRET,
                prefill_tokens_per_s=SLOW,
                shared=SharedSettings(peers=(other,), serve=mine, seek_s=0.1),
                agent=msgspec.structs.replace(
                    HASTY, write_through=(Tier.DISK,) if has_disk and seed % 2 else ()
                ),
            )
            nodes.append(await stack.enter_async_context(NodeAgent(settings)))
            if (disk := nodes[-1]._disk) is not None:
                disk._workers._deadline_s = DISK_S
            serving = asyncio.get_running_loop().create_task(nodes[-1].serve())
            stack.callback(serving.cancel)
        made = Storm(seed, nodes)
        await made.blow()
        for node in nodes:
            await calm(node)
    return made.loaded


def troubles(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the loop is told that nobody caught. Our own process lives on when an engine goes."""
    monkeypatch.setattr(agent_socket, "GONE_S", 0.01)
    monkeypatch.setattr(agent_copies, "QUEUE_S", DISK_S)
    found: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: found.append(told))
    return found


async def test_a_few_storms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = troubles(monkeypatch)
    loaded = [await storm(tmp_path / f"{seed}", seed) for seed in range(3)]
    assert not found
    assert sum(loaded) > 100


@pytest.mark.long
async def test_two_hundred_storms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = troubles(monkeypatch)
    for seed in range(3, 203):
        await storm(tmp_path / f"{seed}", seed)
        assert not found, f"seed {seed}"
