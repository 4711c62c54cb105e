"""Which parts of one linear area are free: an allocator that touches no byte of it.

Best fit over free extents that are joined with their neighbours when given back: units come in
few sizes, so that most rooms are taken again by something of their own size. Everything is counted
in whole grains (a page), what O_DIRECT asks for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from kvatlas.errors import StoreError

GRAIN_BYTES = 4096


def whole(size_bytes: int, grain_bytes: int = GRAIN_BYTES) -> int:
    """Bytes that something of this size takes: whole grains."""
    return -(-size_bytes // grain_bytes) * grain_bytes


class Extents:
    """Not for threads: whoever owns it locks. No more free extents than rooms in use, plus one."""

    def __init__(
        self,
        size_bytes: int,
        used: Iterable[tuple[int, int]] = (),
        *,
        grain_bytes: int = GRAIN_BYTES,
    ) -> None:
        """``used``: (offset, size) of what is taken already, in the order of offsets.

        Raises StoreError when the area is no whole grains, or what is used overlaps or leaves it.
        """
        if size_bytes < 0 or size_bytes % grain_bytes:
            raise StoreError(f"an area of {size_bytes} bytes is not whole grains of {grain_bytes}")
        self.size_bytes = size_bytes
        self.free_bytes = 0
        self._grain = grain_bytes
        self._length: dict[int, int] = {}  # start → length
        self._order: list[int] = []  # starts, sorted
        self._starts: dict[int, dict[int, None]] = {}  # length → starts
        self._lengths: list[int] = []  # those there are, sorted
        at = 0
        for offset, size in used:
            if offset < at or offset % grain_bytes or size <= 0:
                raise StoreError(f"room at {offset} of {size} bytes overlaps what is before it")
            self._put(at, offset - at)
            at = offset + whole(size, grain_bytes)
        if at > size_bytes:
            raise StoreError(f"a room ends at {at}, beyond the area's {size_bytes} bytes")
        self._put(at, size_bytes - at)

    def take(self, size_bytes: int) -> int | None:
        """Offset of a room of at least this size, in whole grains; None: no such room.

        Raises StoreError for a size below 1.
        """
        if size_bytes < 1:
            raise StoreError(f"a room of {size_bytes} bytes cannot be taken")
        need = whole(size_bytes, self._grain)
        index = bisect_left(self._lengths, need)
        if index == len(self._lengths):
            return None
        length = self._lengths[index]
        start = next(reversed(self._starts[length]))
        self._drop(start, length)
        self._put(start + need, length - need)
        return start

    def give(self, offset: int, size_bytes: int) -> None:
        """A room is free again.

        Raises StoreError where a part of it is free already or lies outside.
        """
        size = whole(size_bytes, self._grain)
        end = offset + size
        if offset < 0 or size <= 0 or offset % self._grain or end > self.size_bytes:
            raise StoreError(f"room at {offset} of {size_bytes} bytes is none of this area")
        index = bisect_left(self._order, offset)
        before = self._order[index - 1] if index else None
        after = self._order[index] if index < len(self._order) else None
        if (after is not None and after < end) or (
            before is not None and before + self._length[before] > offset
        ):
            raise StoreError(f"room at {offset} of {size_bytes} bytes is free already")
        start = offset
        if before is not None and before + self._length[before] == offset:
            start = before
            self._drop(before, self._length[before])
        if after == end:
            end += self._length[after]
            self._drop(after, self._length[after])
        self._put(start, end - start)

    def free(self) -> list[tuple[int, int]]:
        """(offset, size) of all free extents, in the order of offsets."""
        return [(start, self._length[start]) for start in self._order]

    @property
    def largest_bytes(self) -> int:
        """Of the largest room that `take` would find."""
        return self._lengths[-1] if self._lengths else 0

    @property
    def scattered(self) -> float:
        """Share of the free bytes that lies outside the largest extent: 0 is one piece."""
        return 1 - self.largest_bytes / self.free_bytes if self.free_bytes else 0.0

    def _put(self, start: int, length: int) -> None:
        if not length:
            return
        self._length[start] = length
        insort(self._order, start)
        starts = self._starts.get(length)
        if starts is None:
            self._starts[length] = starts = {}
            insort(self._lengths, length)
        starts[start] = None
        self.free_bytes += length

    def _drop(self, start: int, length: int) -> None:
        del self._length[start]
        del self._order[bisect_left(self._order, start)]
        starts = self._starts[length]
        del starts[start]
        if not starts:
            del self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self.free_bytes -= length
