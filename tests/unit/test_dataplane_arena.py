"""The shared memory of a node: made, found, shared, recycled, given back."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from kvatlas.dataplane.arena import (
    SHARED_MEMORY,
    Arena,
    Slot,
    Slots,
    remove_leftovers,
)
from kvatlas.errors import ConfigError, StoreError

MIB = 1 << 20


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena.create(4 * MIB, directory=tmp_path)
    yield made
    made.close()


@pytest.fixture
def slots(arena: Arena) -> Slots:
    return Slots(arena)


def taken(slots: Slots, size_bytes: int) -> Slot:
    slot = slots.take(size_bytes)
    assert slot is not None
    return slot


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that has imported the arena."""
    text = f"import sys, os\nfrom kvatlas.dataplane.arena import *\n{code}"
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# -- shared ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["path", "descriptor"])
def test_another_mapping_sees_the_same_bytes(arena: Arena, slots: Slots, by: str) -> None:
    slot = taken(slots, 5000)
    assert arena.path is not None
    other = Arena.open(arena.path if by == "path" else arena.fileno())
    assert other.copy_in(slot, [memoryview(b"a" * 2000), memoryview(b"b" * 3000)])
    got = bytearray(5000)
    assert arena.copy_out(slot, [memoryview(got)])
    assert got == b"a" * 2000 + b"b" * 3000
    other.close()
    assert arena.path.exists()


def test_an_engine_process_copies_in_place(arena: Arena, slots: Slots) -> None:
    slot = taken(slots, 70_000)
    arena.copy_in(slot, [memoryview(b"x" * 70_000)])
    code = (
        "a = Arena.open(sys.argv[1]); s = Slot(*map(int, sys.argv[2:5]))\n"
        "v = a.view(s); assert bytes(v) == b'x' * len(v); v[:] = b'y' * len(v)\n"
        "heavy = {'torch', 'numpy', 'zmq', 'asyncio', 'sqlite3'} & set(sys.modules)\n"
        "print(a.current(s), sorted(heavy))"
    )
    process = child(code, arena.path, slot.offset, slot.size_bytes, slot.generation)
    out, _ = process.communicate(timeout=30)
    assert out == "True []\n"
    assert bytes(arena.view(slot)) == b"y" * 70_000


def test_a_file_without_a_name_is_shared_by_its_descriptor() -> None:
    arena = Arena.create(MIB, directory=None)
    assert arena.path is None
    slot = taken(Slots(arena), 10)
    other = Arena.open(arena.fileno())
    other.copy_in(slot, [memoryview(b"0123456789")])
    assert bytes(arena.view(slot)) == b"0123456789"
    other.close()
    arena.close()
    arena.close()


# -- recycled -------------------------------------------------------------------------------------


def test_an_old_slot_is_noticed(arena: Arena, slots: Slots) -> None:
    old = taken(slots, 5000)
    slots.give(old)
    assert not arena.current(old)
    new = taken(slots, 5000)
    assert new.offset == old.offset
    assert new.generation != old.generation
    assert not arena.copy_in(old, [memoryview(b"z" * 5000)])
    assert not arena.copy_out(old, [memoryview(bytearray(5000))])
    assert bytes(arena.view(new)) == bytes(5000)


def test_a_slot_that_is_recycled_during_a_copy_is_noticed(arena: Arena, slots: Slots) -> None:
    slot = taken(slots, 10)
    target = memoryview(bytearray(10))

    def parts() -> Iterator[memoryview]:
        yield target[:5]
        slots.give(slot)
        yield target[5:]

    assert not arena.copy_out(slot, parts())


def test_a_held_slot_is_nobody_elses(slots: Slots) -> None:
    everything = slots.free_bytes
    slot = taken(slots, 2 * MIB)
    slots.hold(slot)
    slots.hold(slot)
    slots.give(slot)
    assert not slots.arena.current(slot)
    slots.release(slot)
    assert slots.leaving_bytes == 2 * MIB
    assert slots.take(3 * MIB) is None
    slots.release(slot)
    assert slots.free_bytes == everything
    assert slots.take(3 * MIB) is not None


def test_misuse_is_told_and_changes_nothing(slots: Slots) -> None:
    slot = taken(slots, 5000)
    forged = Slot(slot.offset, 9000, slot.generation)
    with pytest.raises(StoreError, match="not taken"):
        slots.hold(forged)
    with pytest.raises(StoreError, match="given back already"):
        slots.give(forged)
    slots.give(slot)
    with pytest.raises(StoreError, match="given back already"):
        slots.give(slot)
    with pytest.raises(StoreError, match="not held"):
        slots.release(slot)


@pytest.mark.parametrize(
    "slot", [Slot(-4096, 10, 1), Slot(1, 10, 1), Slot(0, 0, 1), Slot(0, 5 * MIB, 1)]
)
def test_slots_outside_the_arena_have_no_view(arena: Arena, slot: Slot) -> None:
    with pytest.raises(StoreError):
        arena.view(slot)


# -- made and removed -----------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for directory in (SHARED_MEMORY, tmp_path, None):
        with pytest.raises(ConfigError, match="does not fit"):
            Arena.create(1 << 50, directory=directory)
    for size_bytes in (0, -1, 4095):
        with pytest.raises(ConfigError, match="too few"):
            Arena.create(size_bytes, directory=tmp_path)
    with pytest.raises(ConfigError, match="no file can be made"):
        Arena.create(MIB, directory=tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "group"
    group.mkdir()
    monkeypatch.setattr("kvatlas.dataplane.arena.CONTAINER", group)
    (group / "memory.current").write_text(f"{90 * MIB}\n")
    (group / "memory.stat").write_text(f"anon 5\nfile {20 * MIB}\nshmem {10 * MIB}\n")
    (group / "memory.max").write_text("max\n")
    Arena.create(24 * MIB, directory=tmp_path).close()
    (group / "memory.max").write_text(f"{100 * MIB}\n")  # 20 MiB are free or can be
    Arena.create(16 * MIB, directory=tmp_path).close()
    with pytest.raises(ConfigError, match=f"memory has {20 * MIB} bytes free"):
        Arena.create(24 * MIB, directory=tmp_path)


def test_all_of_it_is_in_memory_from_the_start(tmp_path: Path) -> None:
    arena = Arena.create(8 * MIB, directory=SHARED_MEMORY)
    assert arena.path is not None
    assert arena.path.stat().st_blocks * 512 >= 8 * MIB
    arena.close()
    assert not arena.path.exists()


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    code = "a = Arena.create(1 << 20, directory=Path(sys.argv[1])); print(a.path, flush=True)"
    process = child(f"{code}; sys.stdin.read()", tmp_path)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    other = tmp_path / "kvatlas-arena-x"
    other.symlink_to(path)
    assert remove_leftovers(tmp_path) == []
    assert path.exists()
    opened = Arena.open(path)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert path.exists()
    mine = Arena.create(MIB, directory=tmp_path)
    assert not path.exists()
    assert remove_leftovers(tmp_path) == []
    assert mine.path is not None
    assert mine.path.exists()
    opened.view(Slot(0, 100, 1))[:] = bytes(100)  # who still maps it is not harmed
    mine.close()
    opened.close()


def test_one_name_is_one_arena(tmp_path: Path) -> None:
    first = Arena.create(MIB, directory=tmp_path, name="node")
    with pytest.raises(ConfigError, match="alive"):
        Arena.create(MIB, directory=tmp_path, name="node")
    first.close()
    Arena.create(MIB, directory=tmp_path, name="node").close()
    assert not list(tmp_path.iterdir())


def test_its_lock_goes_with_its_owner_alone(arena: Arena) -> None:
    assert arena.path is not None
    fd = os.open(arena.path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    Arena.open(arena.path).close()
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    arena.close()
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


@pytest.mark.parametrize("damage", ["empty", "short", "magic", "version", "sizes", "cut"])
def test_files_that_are_no_arena_are_refused(arena: Arena, tmp_path: Path, damage: str) -> None:
    assert arena.path is not None
    data = bytearray(arena.path.read_bytes())
    if damage == "magic":
        data[0] ^= 1
    elif damage == "version":
        data[8] ^= 1
    elif damage == "sizes":
        struct.pack_into("<Q", data, 24, 1 << 62)
    cut = {"empty": 0, "short": 100, "cut": len(data) - 1}.get(damage, len(data))
    path = tmp_path / "file"
    path.write_bytes(data[:cut])
    with pytest.raises(StoreError):
        Arena.open(path)
    with pytest.raises(StoreError):
        Arena.open(tmp_path / "nowhere")


# -- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[0], [1], [300_000], [37_376, 8_448, 1_168], [131_072, 1]])
def test_parts_are_copied_in_order_and_summed_on_the_way(
    arena: Arena, slots: Slots, sizes: list[int]
) -> None:
    parts = [memoryview(os.urandom(size)) for size in sizes]
    joined = b"".join(parts)
    slot = taken(slots, len(joined) + 5)
    assert arena.copy_in(slot, parts) == xxhash.xxh3_128_intdigest(joined)
    assert bytes(arena.view(slot)) == joined + bytes(5)
    back = [memoryview(bytearray(size)) for size in sizes]
    assert arena.copy_out(slot, back) == xxhash.xxh3_128_intdigest(joined)
    assert [bytes(part) for part in back] == [bytes(part) for part in parts]


def test_parts_that_do_not_fit_are_refused(arena: Arena, slots: Slots) -> None:
    slot = taken(slots, 10)
    for copy in (arena.copy_in, arena.copy_out):
        with pytest.raises(StoreError, match="parts of 11 bytes where 10 are"):
            copy(slot, [memoryview(bytearray(11))])
