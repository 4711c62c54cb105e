"""The shared memory of one node: one file, mapped by its agent and by all engine processes.

The agent creates it, hands out slots (`Slots`), and says their offsets to the engines, which copy
from and to them in place. Each page has a word with the generation of the slot that begins there:
a reader who comes with an old slot, or whose slot is recycled while it copies, notices.

File: one page of head (magic, version, sizes) · the words, 8 bytes per page · slots, from a whole
2 MiB on. The memory is filled and huge where the kernel allows it: first touch of fresh pages
halves the speed of a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from kvatlas.dataplane._copies import Rows, gather, scatter
from kvatlas.dataplane.extents import GRAIN_BYTES, Extents, whole
from kvatlas.errors import ConfigError, StoreError

SHARED_MEMORY = Path("/dev/shm")
CONTAINER = Path("/sys/fs/cgroup")
_PREFIX = "kvatlas-arena-"
_HEAD = struct.Struct("<8sIIQQ")  # magic, version, nothing, where slots begin, their bytes
_MAGIC = b"KVATLAS\0"
_VERSION = 1
_HUGE_BYTES = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; Python has no name for it
_STRIDE_BYTES = 256 << 20  # filled at once: other threads get their turn between
Part = memoryview | tuple[Rows, int]  # bytes in a row, or all pages of a block
_Copy = Callable[[memoryview, list[Part]], int]


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """One unit's place. ``offset`` counts from where slots begin."""

    offset: int
    size_bytes: int
    generation: int


class Arena:
    """The mapped memory. Copies may run in several threads and processes at once."""

    def __init__(self, fd: int, *, path: Path | None = None, owned: bool = False) -> None:
        """Maps ``fd``, which it closes at the end; use `create` or `open`.

        Raises StoreError where this is no arena, or there is no memory for it.
        """
        self.path = path
        self._fd = fd
        self._owned = owned
        total = os.fstat(fd).st_size
        try:
            if total < GRAIN_BYTES:
                raise StoreError(f"{path or 'this file'} is no arena: {total} bytes")
            self._map = mmap.mmap(fd, total)
            _fill(self._map)
            magic, version, _, begin, size = _HEAD.unpack_from(self._map)
            if magic != _MAGIC or version != _VERSION or begin + size != total:
                raise StoreError(f"{path or 'this file'} is no arena of this version")
        except (OSError, ValueError) as error:
            os.close(fd)
            raise StoreError(f"{path or 'the arena'} cannot be mapped: {error}") from error
        except StoreError:
            os.close(fd)
            raise
        self.size_bytes: int = size
        self._whole = memoryview(self._map)
        self._words = self._whole[GRAIN_BYTES : GRAIN_BYTES + size // GRAIN_BYTES * 8].cast("Q")
        self._slots = self._whole[begin:]
        self.address = address_of(self._slots)  # in this process

    # -- making and finding ---------------------------------------------------------------------

    @classmethod
    def create(
        cls, size_bytes: int, *, directory: Path | None = SHARED_MEMORY, name: str = ""
    ) -> Arena:
        """A new arena with room for ``size_bytes`` of slots, all of it in memory now.

        ``directory`` None: a file without a name, for others by its descriptor alone. Leftovers
        of killed agents in ``directory`` go first. Raises ConfigError when there is no such room.
        """
        if size_bytes < GRAIN_BYTES:
            raise ConfigError(f"dram: {size_bytes} bytes are too few: at least {GRAIN_BYTES}")
        size = whole(size_bytes)
        words = size // GRAIN_BYTES * 8
        begin = whole(GRAIN_BYTES + words, _HUGE_BYTES)
        if directory is not None:
            remove_leftovers(directory)
        fd = _unnamed(directory)
        path = None if directory is None else directory / f"{_PREFIX}{name or secrets.token_hex(8)}"
        try:
            _check_room(begin + size, directory)
            os.ftruncate(fd, begin + size)
            os.pwrite(fd, _HEAD.pack(_MAGIC, _VERSION, 0, begin, size), 0)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        try:
            made = cls(fd, path=path, owned=True)
        except StoreError as error:
            raise ConfigError(f"dram: no arena of {size_bytes} bytes: {error}") from error
        try:
            if path is not None:
                # It gets its name only now that it is locked: unlocked, anybody may remove it.
                # With a directory given Python follows the link, as linkat(2) wants it here.
                os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        except OSError as error:
            made.path = None  # it is not ours to remove
            made.close()
            if isinstance(error, FileExistsError):
                raise ConfigError(f"dram: {path} belongs to an agent that is alive") from error
            raise ConfigError(f"dram: {path} cannot be made: {error}") from error
        return made

    @classmethod
    def open(cls, source: int | str | Path) -> Arena:
        """Somebody else's, by its path or its descriptor (which stays the caller's).

        Raises StoreError where this is no arena.
        """
        if isinstance(source, int):
            return cls(os.dup(source))
        try:
            return cls(os.open(source, os.O_RDWR | os.O_CLOEXEC), path=Path(source))
        except OSError as error:
            raise StoreError(f"{source} cannot be opened: {error}") from error

    def fileno(self) -> int:
        """To hand over by a socket."""
        return self._fd

    def close(self) -> None:
        """The file goes with its owner; memory, when the last view and mapping of it is gone."""
        if self._fd < 0:
            return
        if self._owned and self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self._fd)
        self._fd = -1
        for view in (self._words, self._slots, self._whole):
            view.release()
        with contextlib.suppress(BufferError):  # somebody still has a view
            self._map.close()

    # -- slots ----------------------------------------------------------------------------------

    @property
    def memory(self) -> memoryview:
        """All bytes that slots lie in."""
        return self._slots

    def offset_of(self, view: memoryview) -> int | None:
        """Where a view lies, from where slots begin; None: elsewhere, or it is only to be read."""
        if view.readonly:
            return None
        at = address_of(view) - self.address
        return at if 0 <= at <= self.size_bytes - view.nbytes else None

    def view(self, slot: Slot) -> memoryview:
        """Its bytes, writable. Raises StoreError where it lies outside."""
        end = slot.offset + slot.size_bytes
        if slot.offset < 0 or slot.offset % GRAIN_BYTES or slot.size_bytes < 1:
            raise StoreError(f"{slot} is no slot")
        if end > self.size_bytes:
            raise StoreError(f"{slot} lies beyond the arena's {self.size_bytes} bytes")
        return self._slots[slot.offset : end]

    def current(self, slot: Slot) -> bool:
        """Whether these bytes are still this slot's."""
        return self._words[slot.offset // GRAIN_BYTES] == slot.generation

    def mark(self, offset: int, generation: int) -> None:
        """For the owner: whose the page is; 0 nobody's."""
        self._words[offset // GRAIN_BYTES] = generation

    def copy_in(self, slot: Slot, parts: Iterable[Part], at: int = 0) -> int:
        """Write parts one after the other, from byte ``at`` on. The checksum of what was written;
        0 where the slot is not current (any more)."""
        return self._copied(gather, slot, parts, at)

    def copy_out(self, slot: Slot, parts: Iterable[Part], at: int = 0) -> int:
        """Read into parts one after the other. The checksum of what they got; 0: it must not be
        used."""
        return self._copied(scatter, slot, parts, at)

    def _copied(self, copy: _Copy, slot: Slot, parts: Iterable[Part], at: int) -> int:
        if not self.current(slot):
            return 0
        try:
            checksum = copy(self.view(slot)[at:], list(parts))
        except ValueError as error:
            raise StoreError(f"{slot}: {error}") from error
        return checksum if self.current(slot) else 0


def address_of(view: memoryview) -> int:
    """In this process, of bytes that can be written to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Slots:
    """Who has which part of an arena. Not for threads: whoever owns it locks.

    A slot is given back at once, or, while somebody still touches it (`hold`), when the last one
    lets go.
    """

    def __init__(self, arena: Arena) -> None:
        """``arena`` must be the caller's own, with nothing in it."""
        self.arena = arena
        self._extents = Extents(arena.size_bytes)
        self._taken: dict[int, Slot] = {}
        self._holds: dict[int, int] = {}
        self._leaving: dict[int, Slot] = {}
        self._to_wipe: set[int] = set()
        self._generation = 0

    def take(self, size_bytes: int) -> Slot | None:
        """A place for one unit; None: there is none of this size."""
        offset = self._extents.take(size_bytes)
        if offset is None:
            return None
        self._generation += 1
        slot = Slot(offset, size_bytes, self._generation)
        self._taken[slot.generation] = slot
        self.arena.mark(offset, slot.generation)
        return slot

    def give(self, slot: Slot, *, wipe: bool = False) -> None:
        """Nobody finds it from now on. ``wipe``: its bytes go, too, once nobody touches them.
        Raises StoreError when it is not taken (any more)."""
        if self._taken.get(slot.generation) != slot:
            raise StoreError(f"{slot} was given back already, or never taken")
        del self._taken[slot.generation]
        self.arena.mark(slot.offset, 0)
        if wipe:
            self._to_wipe.add(slot.generation)
        if slot.generation in self._holds:
            self._leaving[slot.generation] = slot
        else:
            self._free(slot)

    def hold(self, slot: Slot) -> None:
        """Somebody reads or writes it. Raises StoreError when it is not taken (any more)."""
        if self._taken.get(slot.generation) != slot:
            raise StoreError(f"{slot} is not taken (any more)")
        self._holds[slot.generation] = self._holds.get(slot.generation, 0) + 1

    def release(self, slot: Slot) -> None:
        """End of a `hold`. Raises StoreError when there is none."""
        holds = self._holds.get(slot.generation, 0)
        if not holds:
            raise StoreError(f"{slot} is not held")
        if holds > 1:
            self._holds[slot.generation] = holds - 1
            return
        del self._holds[slot.generation]
        if self._leaving.pop(slot.generation, None) is not None:
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        if slot.generation in self._to_wipe:
            self._to_wipe.discard(slot.generation)
            self.arena.view(slot)[:] = bytes(slot.size_bytes)
        self._extents.give(slot.offset, slot.size_bytes)

    @property
    def to_wipe(self) -> int:
        """Slots given back that are wiped once nobody touches them."""
        return len(self._to_wipe)

    @property
    def free_bytes(self) -> int:
        """That can be taken, if not in one piece."""
        return self._extents.free_bytes

    @property
    def leaving_bytes(self) -> int:
        """Given back, and still held by somebody."""
        return sum(whole(slot.size_bytes) for slot in self._leaving.values())


def remove_leftovers(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove arenas whose owner is dead; says which. An owner's lock ends with its process."""
    removed = []
    for path in sorted(directory.glob(f"{_PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or somebody else's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path)
        except OSError:
            pass
        finally:
            os.close(fd)
    return removed


def _unnamed(directory: Path | None) -> int:
    try:
        if directory is None:
            return os.memfd_create("kvatlas-arena", os.MFD_CLOEXEC)
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"dram: no file can be made in {directory}: {error}") from error


def _check_room(total: int, directory: Path | None) -> None:
    rooms = [("memory", _available_bytes())]
    if directory is not None:
        found = os.statvfs(directory)
        rooms.append((str(directory), found.f_bavail * found.f_frsize))
    for where, room in rooms:
        if total > room:
            raise ConfigError(
                f"dram: an arena of {total} bytes does not fit: {where} has {room} bytes free."
                " Ask for less, or give it more"
            )


def _available_bytes() -> int:
    """Of the machine, or of the container that this runs in: shared memory counts there too."""
    rooms = [_machine_bytes()]
    group = CONTAINER
    with contextlib.suppress(OSError, ValueError, KeyError):  # no group, or "max": no limit
        limit = int((group / "memory.max").read_text("ascii"))
        used = int((group / "memory.current").read_text("ascii"))
        lines = (group / "memory.stat").read_text("ascii").splitlines()
        stat = {name: int(count) for name, _, count in (line.partition(" ") for line in lines)}
        rooms.append(limit - used + stat["file"] - stat["shmem"])  # the page cache gives way
    return min(rooms)


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _fill(memory: mmap.mmap) -> None:
    """Every page in memory and mapped here, huge where that is allowed."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, len(memory), _STRIDE_BYTES):
        length = min(_STRIDE_BYTES, len(memory) - start)
        try:
            memory.madvise(_POPULATE_WRITE, start, length)
        except OSError as error:
            if error.errno != 22:  # EINVAL: an old kernel; else there is no room
                raise
            for at in range(start, start + length, GRAIN_BYTES):
                memory[at] = memory[at]
