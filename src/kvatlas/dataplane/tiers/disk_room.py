"""Where on a disk there is room: one area per segment file, and what was set aside of them."""

from __future__ import annotations

from collections.abc import Iterable

from kvatlas.dataplane.extents import Extents
from kvatlas.errors import StoreError


class Room:
    """Places count over all segments, which are of one size. Not for threads."""

    def __init__(self, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self._areas: dict[int, Extents] = {}
        self._closing: set[int] = set()
        self._broken: dict[int, int] = {}  # bytes set aside, by segment
        self._hint = 0

    def add(self, number: int, used: Iterable[tuple[int, int]] = ()) -> None:
        """A segment; ``used`` as for `Extents`. One that was closing is open again."""
        self._closing.discard(number)
        if number not in self._areas:
            self._areas[number] = Extents(self.segment_bytes, used)

    def close(self, number: int) -> None:
        """Nothing new goes to this segment."""
        if number in self._areas:
            self._closing.add(number)

    def emptied(self) -> list[int]:
        """Closing segments with nothing in them; they are forgotten."""
        gone = []
        for number in self._closing:
            free = self._areas[number].free_bytes
            if free + self._broken.get(number, 0) == self.segment_bytes:
                gone.append(number)
        for number in gone:
            self._closing.discard(number)
            self._broken.pop(number, None)
            del self._areas[number]
        return gone

    def take(self, size_bytes: int) -> int | None:
        """The first segment with room from where the last was found."""
        if size_bytes > self.segment_bytes:
            return None
        for number in (self._hint, *self._areas):
            area = self._areas.get(number)
            if area is None or number in self._closing or area.largest_bytes < size_bytes:
                continue
            if (offset := area.take(size_bytes)) is not None:
                self._hint = number
                return number * self.segment_bytes + offset
        return None

    def give(self, place: int, room: int) -> None:
        """Raises StoreError where this is free already."""
        number, offset = divmod(place, self.segment_bytes)
        area = self._areas.get(number)
        if area is None:
            raise StoreError(f"there is no segment {number}")
        area.give(offset, room)

    def set_aside(self, place: int, room: int) -> None:
        """A place that was taken and is not to be used again, nor by anybody."""
        number = place // self.segment_bytes
        self._broken[number] = self._broken.get(number, 0) + room

    @property
    def broken_bytes(self) -> int:
        """Set aside, in segments that are written to."""
        return sum(room for n, room in self._broken.items() if n not in self._closing)

    @property
    def numbers(self) -> list[int]:
        """Of all segments, those that are closing included."""
        return sorted(self._areas)

    @property
    def size_bytes(self) -> int:
        """Of the segments that are written to."""
        return (len(self._areas) - len(self._closing)) * self.segment_bytes

    @property
    def free_bytes(self) -> int:
        """In them."""
        return sum(a.free_bytes for n, a in self._areas.items() if n not in self._closing)
