"""Groups whose blocks are smaller than the grid: which grid block their blocks complete."""

from __future__ import annotations

from collections import OrderedDict

from kvatlas.core.records import Tier

SHARED_MAX = 256  # windows that may have one block in common


class Windows:
    """Blocks smaller than the grid, of one windowed lane: which grid block they complete."""

    def __init__(self, units: int) -> None:
        self.full = (1 << units) - 1
        # hash → (hash before it, tiers)
        self.before: OrderedDict[int, tuple[int | None, int]] = OrderedDict()
        self.place: dict[int, tuple[bytes, int]] = {}  # hash → (grid key, unit from the end)
        # Windows of prompts that part inside one grid block have their first blocks in common.
        self.shared: dict[int, tuple[bytes, ...]] = {}  # hash → further grid keys
        self.masks: list[dict[bytes, int]] = [{} for _ in Tier]  # per tier: key → units held

    def holds(self, engine_hash: int, tier: Tier) -> bool:
        """Is this block held, filed or waiting for its window to be complete?"""
        if (waits := self.before.get(engine_hash)) is not None and waits[1] & 1 << tier:
            return True
        place = self.place.get(engine_hash)
        return place is not None and bool(self.masks[tier].get(place[0], 0) & 1 << place[1])

    def file(self, engine_hash: int, key: bytes, unit: int) -> bool:
        """It is a block of the window of ``key``; False where that cannot be."""
        first = self.place.setdefault(engine_hash, (key, unit))
        if first == (key, unit):
            return True
        others = self.shared.get(engine_hash, ())
        if first[1] != unit or len(others) >= SHARED_MAX:
            return False
        if key not in others:
            self.shared[engine_hash] = (*others, key)
        return True

    def drop(self, engine_hash: int, tier: Tier) -> list[tuple[bytes, bool]]:
        """It is gone from ``tier``: the keys whose windows lose it, and which were complete."""
        first, unit = self.place.get(engine_hash, (b"", 0))
        masks, bit = self.masks[tier], 1 << unit
        lost = []
        for key in (first, *self.shared.get(engine_hash, ())):
            mask = masks.get(key, 0)
            if not mask & bit:
                continue
            lost.append((key, mask == self.full))
            if mask == bit:
                del masks[key]
            else:
                masks[key] = mask ^ bit
        others = [each for each in self.masks if each and each is not masks]  # mostly none
        if lost and not any(each.get(key, 0) & bit for each in others for key, _ in lost):
            del self.place[engine_hash]
            self.shared.pop(engine_hash, None)
        return lost

    def forget_waiting(self, engine_hash: int, tier: Tier) -> int:
        """A block that waited is gone from ``tier``: 1, or 0 when it did not wait there."""
        before, tiers = self.before.get(engine_hash, (None, 0))
        if not tiers & 1 << tier:
            return 0
        tiers &= ~(1 << tier)
        if tiers:
            self.before[engine_hash] = (before, tiers)
        else:
            del self.before[engine_hash]
        return 1
