"""Free space, and units in the arena, against twins that are too simple to be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvatlas.dataplane.arena import Arena, Slot
from kvatlas.dataplane.extents import GRAIN_BYTES, Extents, whole
from kvatlas.dataplane.tiers.base import Piece, Report
from kvatlas.dataplane.tiers.dram import DramStore, Unit
from kvatlas.errors import StoreError

GRAINS = 24
SIZES = st.integers(1, 9 * GRAIN_BYTES)


class ExtentsMachine(RuleBasedStateMachine):
    """Against one letter per grain."""

    rooms = Bundle("rooms")

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(GRAINS * GRAIN_BYTES)
        self.grains = ["free"] * GRAINS

    def runs(self) -> list[tuple[int, int]]:
        found, start = [], 0
        for at, grain in enumerate([*self.grains, "end"]):
            if grain != "free":
                if at > start:
                    found.append((start * GRAIN_BYTES, (at - start) * GRAIN_BYTES))
                start = at + 1
        return found

    @rule(target=rooms, size_bytes=SIZES)
    def take(self, size_bytes: int) -> object:
        fitting = [size for _, size in self.runs() if size >= size_bytes]
        offset = self.extents.take(size_bytes)
        if not fitting:
            assert offset is None
            return multiple()
        assert offset is not None
        assert (offset, min(fitting)) in self.runs(), "not at the start of a best fit"
        for grain in range(offset, offset + whole(size_bytes), GRAIN_BYTES):
            self.grains[grain // GRAIN_BYTES] = "used"
        return (offset, size_bytes)

    @rule(room=consumes(rooms))
    def give(self, room: tuple[int, int]) -> None:
        offset, size_bytes = room
        self.extents.give(offset, size_bytes)
        for grain in range(offset, offset + whole(size_bytes), GRAIN_BYTES):
            self.grains[grain // GRAIN_BYTES] = "free"
        with pytest.raises(StoreError):
            self.extents.give(offset, size_bytes)

    @rule()
    def rebuild(self) -> None:
        """As after a restart: from what is used."""
        used = [
            (at * GRAIN_BYTES, GRAIN_BYTES)
            for at, grain in enumerate(self.grains)
            if grain == "used"
        ]
        assert Extents(GRAINS * GRAIN_BYTES, used).free() == self.extents.free()

    @invariant()
    def the_same(self) -> None:
        runs = self.runs()
        assert self.extents.free() == runs
        assert self.extents.free_bytes == sum(size for _, size in runs)
        assert self.extents.largest_bytes == max((size for _, size in runs), default=0)
        assert 0 <= self.extents.scattered < 1
        assert len(runs) <= self.grains.count("used") + 1


NAMES = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])


@contextmanager
def said(store: DramStore, act: str, piece: Piece) -> Iterator[Report]:
    reports: list[Report] = []
    getattr(store, act)([piece], reports.append)
    (report,) = reports
    yield report


class DramMachine(RuleBasedStateMachine):
    """Against a dict of bytes, and a list of who uses which slot."""

    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.create(GRAINS * GRAIN_BYTES, directory=None)
        self.store = DramStore(self.arena)
        self.held: dict[bytes, bytes] = {}
        self.filling: dict[bytes, Slot] = {}
        self.pinned: list[tuple[Slot, bytes]] = []
        self.leaving: set[int] = set()

    def teardown(self) -> None:
        self.store.close()
        self.arena.close()

    @rule(name=NAMES, size_bytes=SIZES, letter=st.integers(0, 255))
    def write(self, name: bytes, size_bytes: int, letter: int) -> None:
        data = bytes([letter]) * size_bytes
        with said(self.store, "write", Piece(name, memoryview(data))) as report:
            if name in self.held:
                assert (not report.damaged) == (self.held[name] == data)
            elif name in self.filling:
                assert report.error == "busy"
            elif report == Report():
                self.held[name] = data
            else:
                assert report.error == "full"

    @rule(name=NAMES, size_bytes=SIZES)
    def reserve(self, name: bytes, size_bytes: int) -> None:
        slot = self.store.reserve(name, size_bytes)
        assert slot is None or (name not in self.held and name not in self.filling)
        if slot is not None:
            self.filling[name] = slot

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), letter=st.integers(0, 255), good=st.booleans())
    def fill(self, data: st.DataObject, letter: int, good: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.filling)))
        slot = self.filling.pop(name)
        if good:
            self.held[name] = bytes([letter]) * slot.size_bytes
            assert self.arena.copy_in(slot, [memoryview(self.held[name])])
            self.store.commit(name, Unit(slot))
        else:
            self.store.abort(name, slot)
        for again in (
            lambda: self.store.commit(name, Unit(slot)),
            lambda: self.store.abort(name, slot),
        ):
            with pytest.raises(StoreError):
                again()

    @rule(name=NAMES)
    def read(self, name: bytes) -> None:
        data = self.held.get(name, b"?")
        target = bytearray(len(data))
        with said(self.store, "read", Piece(name, memoryview(target))) as report:
            assert (report == Report()) == (name in self.held)
        assert name not in self.held or target == data

    @rule(target=pins, name=NAMES)
    def pin(self, name: bytes) -> object:
        unit = self.store.pin(name)
        assert (unit is not None) == (name in self.held)
        if unit is None:
            return multiple()
        self.pinned.append((unit.slot, self.held[name]))
        return unit.slot

    @rule(slot=consumes(pins))
    def unpin(self, slot: Slot) -> None:
        found = next(each for each in self.pinned if each[0] == slot)
        self.pinned.remove(found)
        self.store.unpin(slot)
        if slot not in [each for each, _ in self.pinned]:
            self.leaving.discard(slot.generation)

    @rule(name=NAMES)
    def delete(self, name: bytes) -> None:
        unit = self.store._units.get(name)
        self.store.delete([name, name])
        self.held.pop(name, None)
        if unit is not None and unit.slot in [slot for slot, _ in self.pinned]:
            self.leaving.add(unit.slot.generation)

    @invariant()
    def what_is_pinned_is_untouched(self) -> None:
        for slot, data in self.pinned:
            assert bytes(self.arena.view(slot)) == data
            assert self.arena.current(slot) == (slot.generation not in self.leaving)

    @invariant()
    def nothing_leaks(self) -> None:
        pins = {slot.generation: slot.size_bytes for slot, _ in self.pinned}
        sizes = [len(data) for data in self.held.values()]
        sizes += [slot.size_bytes for slot in self.filling.values()]
        sizes += [size for generation, size in pins.items() if generation in self.leaving]
        used = sum(whole(size) for size in sizes)
        assert self.store.free_bytes == GRAINS * GRAIN_BYTES - used
        assert {entry.name for entry in self.store.scan()} == set(self.held)


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=40)
TestDram = DramMachine.TestCase
TestDram.settings = settings(
    max_examples=40, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize(
    ("size_bytes", "used"),
    [
        (-4096, []),
        (4097, []),
        (8192, [(0, 4096), (0, 4096)]),
        (8192, [(4096, 4097)]),
        (8192, [(1, 4096)]),
        (8192, [(0, 0)]),
        (8192, [(4096, 4096), (0, 4096)]),
    ],
)
def test_areas_that_cannot_be_are_refused(size_bytes: int, used: list[tuple[int, int]]) -> None:
    with pytest.raises(StoreError):
        Extents(size_bytes, used)


@pytest.mark.parametrize("room", [(0, 4096), (-4096, 4096), (8192, 8192), (1, 10), (8192, 0)])
def test_rooms_that_were_not_taken_cannot_be_given(room: tuple[int, int]) -> None:
    extents = Extents(12288)
    assert extents.take(12288) == 0
    extents.give(0, 4096)
    before = extents.free()
    with pytest.raises(StoreError):
        extents.give(*room)
    assert extents.free() == before
    for size_bytes in (0, -1):
        with pytest.raises(StoreError):
            extents.take(size_bytes)
