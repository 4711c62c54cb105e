"""Faults of a disk and of clocks, through a real agent: each a recompute with a counted reason.

Nothing is left over after any of them: slots, places on disk, files, shared memory, sockets. Other
faults: `test_agent_process` (kills, flipped bits), `test_agent_shared` (stores, peers),
`test_agent_owners` (fingerprints, engines that stall).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from disk_kit import FaultyFiles, fails
from fake_engine import GRID, FakeEngine, tokens_of

from kvatlas.core import agent_values as words
from kvatlas.core.records import Tier
from kvatlas.core.units import Part
from kvatlas.dataplane import records
from kvatlas.dataplane.extents import whole
from kvatlas.dataplane.records import Label
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.errors import ConfigError
from kvatlas.service import agent_socket
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.validate.exactness_tiers import SLOW

BLOCKS = 10
END = BLOCKS * GRID
PROMPT, OTHER = (tokens_of(n, END + 5) for n in (1, 2))
SEGMENT = "segment-00000.kv"
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_socket, "GONE_S", 0.01)  # our own process lives on
    defaults = DiskStore.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "files", FaultyFiles)


class Node:
    def __init__(self, agent: NodeAgent) -> None:
        self.agent = agent
        assert agent._disk is not None
        self.disk = agent._disk

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.agent.status()["counts"])  # type: ignore[call-overload]

    def fault(self, fault: Callable[[str, int], None]) -> None:
        files = self.disk._files
        assert isinstance(files, FaultyFiles)
        files.fault = fault

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                await asyncio.sleep(0.002)

    async def saved(self, prompt: bytes = PROMPT) -> None:
        """An engine saves it; all that follows from that has ended."""
        with await asyncio.to_thread(FakeEngine, self.agent.settings.path) as engine:
            await asyncio.to_thread(engine.save, "r", prompt)
        await self.calm()

    async def loaded(self, prompt: bytes = PROMPT) -> tuple[int, dict[str, int]]:
        with await asyncio.to_thread(FakeEngine, self.agent.settings.path) as engine:
            found = await asyncio.to_thread(engine.load, "q", prompt)
        await self.calm()
        return found

    async def calm(self) -> None:
        agent = self.agent
        await self.until(
            lambda: (
                not (
                    agent._peers
                    or agent._core.busy
                    or agent._dram._rooms
                    or agent._dram._slots._holds
                )
            )
        )

    def empty_memory(self) -> None:
        self.agent.driver.tell(words.Lose(Tier.DRAM))

    def whole(self) -> None:
        """Nothing is in use, and books, memory and disk say the same."""
        agent, dram, disk = self.agent, self.agent._dram, self.disk
        units = {name: unit.slot.size_bytes for name, unit in dram._units.items()}
        assert agent._core.ledger(Tier.DRAM).usage().committed_bytes == sum(units.values())
        assert agent._arena.size_bytes - dram.free_bytes == sum(map(whole, units.values()))
        assert not agent.driver.loads.held
        assert not agent.driver._savings
        assert not agent.driver._unanswered
        used = sum(held.room for held in disk._held.values())
        assert disk.free_bytes + used + disk.quarantined_bytes == disk.size_bytes
        on_disk = [entry for entry in disk.scan() if entry.name[-1] in tuple(Part)]
        usage = agent._core.ledger(Tier.DISK).usage()
        assert usage.committed_bytes == sum(entry.size_bytes for entry in on_disk)
        assert usage.reserved_bytes == usage.in_use_bytes == 0


def _left() -> Counter[str]:
    """What this process has open: files, sockets, shared memory."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return Counter(found)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Node]:
    before = _left()
    settings = Settings(
        folder / "agent.sock",
        8 << 20,
        folder / "disk",
        32 << 20,
        prefill_tokens_per_s=SLOW,
        secret=b"s" * 32,
    )
    async with NodeAgent(settings) as agent:
        serving = asyncio.get_running_loop().create_task(agent.serve())
        node = Node(agent)
        yield node
        await node.calm()
        await node.until(lambda: not node.disk._writing and not node.disk._reading)
        node.whole()
        serving.cancel()
        arena = agent._arena.path
    assert _left() - before == Counter()
    assert arena is not None
    assert not arena.exists()


# -- the disk while it runs -----------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
async def test_a_disk_that_takes_nothing_more_in_mid_run(tmp_path: Path, code: int) -> None:
    """Full, read-only or broken: what was there is read, and memory is not touched by it."""
    async with running(tmp_path) as node:
        await node.saved(PROMPT)
        node.fault(fails(code, "write", "sync"))
        await node.saved(OTHER)
        assert node.counts["write_failed"] == 1
        assert await node.loaded(OTHER) == (END, {"dram": END})
        node.empty_memory()
        assert await node.loaded(OTHER) == (0, {})
        assert node.counts["not_offered"] >= 1
        assert await node.loaded(PROMPT) == (END, {"disk": END})
        assert bool(node.disk.quarantined_bytes) == (code == errno.EIO)
        node.fault(fails(0))
        await node.saved(OTHER)
        node.empty_memory()
        assert await node.loaded(OTHER) == (END, {"disk": END})


async def test_a_disk_whose_catalogue_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    async with running(tmp_path) as node:
        with monkeypatch.context() as patch:
            patch.setattr(node.disk._commits._catalogue, "apply", read_only)
            await node.saved()
            assert node.counts["write_failed"] == 1
            assert node.disk.counts.all()["commit_failed"] >= 1
            assert await node.loaded() == (END, {"dram": END})
            node.empty_memory()
            assert await node.loaded() == (0, {})
        await node.saved()
        node.empty_memory()
        assert await node.loaded() == (END, {"disk": END})


def test_a_read_only_disk_at_the_start_is_an_error_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, opened = _left(), os.open

    def read_only(path: Path, flags: int, *more: int, **named: int) -> int:
        if Path(path).is_relative_to(tmp_path):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(ConfigError, match=r"cannot be written to: .*Read-only"):
        NodeAgent(Settings(tmp_path / "a", 8 << 20, tmp_path / "d", 32 << 20, secret=b"s" * 32))
    monkeypatch.undo()
    assert _left() - before == Counter()


@pytest.mark.parametrize("what", ["read", "write"])
async def test_a_disk_that_stalls_holds_nobody_up(tmp_path: Path, what: str) -> None:
    """For longer than anybody waits; its thread hangs in the kernel until it returns."""
    go_on = threading.Event()

    def stall(call: str, _: int) -> None:
        if call == what:
            go_on.wait(WAIT_S)

    async with running(tmp_path) as node:
        if what == "read":
            await node.saved()
            node.empty_memory()
        node.disk._workers._deadline_s = 0.1
        node.fault(stall)
        try:
            with await asyncio.to_thread(FakeEngine, node.agent.settings.path) as engine:
                if what == "write":
                    await asyncio.to_thread(engine.save, "r", PROMPT)
                    await node.until(lambda: node.counts["write_failed"])
                    loaded = await asyncio.to_thread(engine.load, "q", PROMPT)
                    assert loaded == (END, {"dram": END})
                else:
                    assert await asyncio.to_thread(engine.load, "q", PROMPT) == (0, {})
                    assert node.counts["not_read"] == BLOCKS
                assert await asyncio.to_thread(engine.load, "o", OTHER) == (0, {})
        finally:
            go_on.set()
        await node.calm()
        node.fault(fails(0))
        await node.saved()
        assert (await node.loaded())[0] == END


async def test_without_room_in_memory_the_disk_keeps_what_it_has(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await node.saved()
        node.empty_memory()
        dram = node.agent._dram
        taken = []
        while (slot := dram.reserve(b"%d" % len(taken), 1 << 16)) is not None:
            taken.append(slot)
        with await asyncio.to_thread(FakeEngine, node.agent.settings.path) as engine:
            assert await asyncio.to_thread(engine.load, "q", PROMPT) == (0, {})
        assert node.counts["staging_full"] == node.counts["not_taken"] == BLOCKS
        for number, slot in enumerate(taken):
            dram.abort(b"%d" % number, slot)
        assert await node.loaded() == (END, {"disk": END})


# -- the disk behind its back ---------------------------------------------------------------------


async def places(folder: Path) -> dict[int, int]:
    """After a prompt was saved there: where its units lie, and how long they are."""
    async with running(folder) as node:
        await node.saved()
        return {held.place: held.room for held in node.disk._held.values()}


async def test_a_torn_write_is_a_recompute(tmp_path: Path) -> None:
    """Of each unit only the first half reached the medium."""
    there = await places(tmp_path)
    with (tmp_path / "disk" / SEGMENT).open("r+b") as file:
        for place, room in there.items():
            file.seek(place + room // 2)
            file.write(bytes(room - room // 2 - 4096))  # its label is there
    async with running(tmp_path) as node:
        assert await node.loaded() == (0, {})
        assert node.counts["damaged"] == BLOCKS
        await node.saved()
        node.empty_memory()
        assert await node.loaded() == (END, {"disk": END})


@pytest.mark.parametrize("when", ["stopped", "running"])
async def test_of_a_file_that_was_cut_what_is_left_counts(tmp_path: Path, when: str) -> None:
    there = await places(tmp_path)
    ends = sorted(place + room for place, room in there.items())
    if when == "stopped":
        os.truncate(tmp_path / "disk" / SEGMENT, ends[3] + 8192)
    async with running(tmp_path) as node:
        if when == "running":
            os.truncate(tmp_path / "disk" / SEGMENT, ends[3] + 8192)
        assert await node.loaded() == (4 * GRID, {"disk": 4 * GRID})
        if when == "stopped":
            assert node.disk.counts.all()["found_unusable"] == BLOCKS - 4
        else:
            assert node.counts["damaged"] == BLOCKS - 4


async def test_units_of_a_wrong_size_are_a_recompute(tmp_path: Path) -> None:
    """So a catalogue says, which is believed about nothing."""
    await places(tmp_path)
    catalogue = tmp_path / "disk" / "catalogue.db"
    with sqlite3.connect(catalogue) as db:
        for name, label in db.execute("SELECT name, label FROM units").fetchall():
            told = records.unpack(label, Label)
            wrong = msgspec.structs.replace(told, size_bytes=told.size_bytes + 64)
            packed = records.pack(wrong)
            assert len(packed) == len(label)
            db.execute("UPDATE units SET label = ? WHERE name = ?", (packed, name))
    db.close()
    async with running(tmp_path) as node:
        assert node.counts["found"] == BLOCKS
        assert await node.loaded() == (0, {})
        assert node.counts["damaged"] == BLOCKS
        await node.saved()
        assert await node.loaded() == (END, {"dram": END})


# -- clocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_s", [-86400.0, 86400.0])
async def test_a_step_of_the_wall_clock_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    real = time.time
    async with running(tmp_path) as node:
        await node.saved()
        monkeypatch.setattr(time, "time", lambda: real() + step_s)
        assert await node.loaded() == (END, {"dram": END})
        await node.saved(OTHER)
        node.empty_memory()
        assert await node.loaded(OTHER) == (END, {"disk": END})
        assert not {name for name in node.counts if name.endswith(("late", "steps", "given_up"))}


async def test_a_steady_clock_that_goes_back_makes_nothing_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as node:
        await node.saved()
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda: time.monotonic() - 1000.0)
            with await asyncio.to_thread(FakeEngine, node.agent.settings.path) as engine:
                assert await asyncio.to_thread(engine.load, "q", PROMPT) == (END, {"dram": END})
        assert node.counts["clock_steps"] >= 1
        await node.saved(OTHER)
        assert await node.loaded(OTHER) == (END, {"dram": END})


async def test_a_steady_clock_that_leaps_gives_up_what_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was asleep, say."""
    async with running(tmp_path) as node:
        with await asyncio.to_thread(FakeEngine, node.agent.settings.path) as engine:
            (order,) = await asyncio.to_thread(engine.orders, "r", PROMPT)
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 1000.0)
            await node.until(lambda: node.counts["save_late"])
            engine.client.saved(order.op, engine.copy(order))
            assert await asyncio.to_thread(engine.load, "q", PROMPT) == (0, {})
            assert node.counts["saved_too_late"] == 1
        await node.saved()
        assert await node.loaded() == (END, {"dram": END})
