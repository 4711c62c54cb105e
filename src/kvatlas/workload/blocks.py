"""The physical blocks of one pool: free, in use, findable, and what is announced of them. Pure.

Blocks without a key are interchangeable, so most are only counted. A block has an id from the
moment it becomes findable, or is to be filled from outside, until it is free without a key.

vLLM's free queue is always blocks without a key first, then those with one in the order in which
they became free: a counter and an ordered map.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from functools import lru_cache

from kvatlas.core.events import AllBlocksCleared, BlockRemoved, Event


@lru_cache(maxsize=16)
def _ids(capacity: int) -> array[int]:
    """The last first. A thousand engines have as many pools of one size: copies are made at once,
    and an array takes a tenth of a list of as many numbers."""
    return array("i", range(capacity - 1, -1, -1))


class Blocks:
    """``capacity`` blocks for ``slots`` groups. What it keeps is open to `Pool`, its only user."""

    __slots__ = (
        *("aliases", "capacity", "events", "found", "idle", "keys", "named", "plain", "publish"),
        *("refs", "spare", "twins", "version"),
    )

    def __init__(self, capacity: int, slots: int, *, publish: bool) -> None:
        self.capacity = capacity
        self.publish = publish
        self.spare = array("i", _ids(capacity))  # ids that nobody knows of
        self.plain = 0  # blocks in use without an id: so many of ``spare`` are not free
        self.named = 0  # blocks in use with an id and without a key
        self.idle: OrderedDict[int, None] = OrderedDict()  # keyed, unused, oldest first
        self.refs = [0] * capacity
        self.keys: list[tuple[int, int] | None] = [None] * capacity  # id -> (slot, key)
        self.aliases: dict[int, list[int]] = {}  # id -> further keys of that block
        self.found: list[dict[int, int]] = [{} for _ in range(slots)]  # key -> id, and
        self.twins: dict[tuple[int, int], list[int]] = {}  # (slot, key) -> ids of further ones
        self.events: list[Event] = []
        self.version = 0  # changes with what a lookup finds and with which of it is in use

    @property
    def unkeyed(self) -> int:
        """Free blocks that nothing has to be evicted from."""
        return len(self.spare) - self.plain

    @property
    def free(self) -> int:
        """Blocks that an allocation could take now, those still findable included."""
        return len(self.spare) - self.plain + len(self.idle)

    @property
    def cached(self) -> int:
        """Blocks that a lookup could find now, in use or not."""
        return self.capacity - len(self.spare) - self.named

    def allocate(self, count: int) -> None:
        """Take ``count`` of the free blocks (there must be so many), evicting where necessary."""
        missing = count - len(self.spare) + self.plain
        if missing > 0:
            self._evict(missing)
        self.plain += count

    def name(self) -> int:
        """Give one of the blocks in use an id."""
        block = self.spare.pop()
        self.plain -= 1
        self.named += 1
        self.refs[block] = 1
        return block

    def add(self, slot: int, keys: tuple[int, ...]) -> list[int]:
        """Make so many of the blocks in use findable. Returns their ids."""
        count = len(keys)
        spare, refs, entries, found = self.spare, self.refs, self.keys, self.found[slot]
        ids = spare[: -count - 1 : -1].tolist()
        del spare[len(spare) - count :]
        self.plain -= count
        for key, block in zip(keys, ids, strict=True):
            refs[block] = 1
            entries[block] = (slot, key)
            if found.setdefault(key, block) != block:
                self._twin(slot, key, block)
        return ids

    def add_named(self, slot: int, key: int, block: int) -> None:
        """Make a block findable that has an id already."""
        self.named -= 1
        self.keys[block] = (slot, key)
        self.find(slot, key, block)

    def find(self, slot: int, key: int, block: int) -> None:
        """A lookup of ``key`` finds this block, or one that is equal."""
        if self.found[slot].setdefault(key, block) != block:
            self._twin(slot, key, block)

    def _twin(self, slot: int, key: int, block: int) -> None:
        self.twins.setdefault((slot, key), []).append(block)

    def hold(self, block: int) -> None:
        """One more user of a block with an id."""
        if not self.refs[block]:
            del self.idle[block]
        self.refs[block] += 1

    def let_go(self, block: int) -> None:
        """One user less. Without a key it is any free block again."""
        self.refs[block] -= 1
        if not self.refs[block]:
            if self.keys[block] is None:
                self.named -= 1
                self.spare.append(block)
            else:
                self.idle[block] = None

    def let_go_all(self, held: list[tuple[int, int]]) -> None:
        """One user less of each (index, block), the last first."""
        refs, keys, idle = self.refs, self.keys, self.idle
        for _, block in reversed(held):
            count = refs[block] = refs[block] - 1
            if not count:
                if keys[block] is None:
                    self.named -= 1
                    self.spare.append(block)
                else:
                    idle[block] = None

    def hold_all(self, taken: list[tuple[int, int]]) -> None:
        """One more user of each (index, block)."""
        refs, idle = self.refs, self.idle
        for _, block in taken:
            if not refs[block]:
                del idle[block]
            refs[block] += 1

    def clear(self) -> bool:
        """Forget every key. As in vLLM refused (False) while any block is in use."""
        if self.free != self.capacity:
            return False
        for found in self.found:
            found.clear()
        self.spare.extend(self.idle)
        for block in self.idle:
            self.keys[block] = None
        self.aliases.clear()
        self.twins.clear()
        self.idle.clear()
        self.version += 1
        if self.publish:
            self.events.append(AllBlocksCleared())
        return True

    def _evict(self, count: int) -> None:
        idle, spare, keys, found = self.idle, self.spare, self.keys, self.found
        self.version += 1
        for _ in range(count):
            block, _ = idle.popitem(last=False)
            entry = keys[block]
            assert entry is not None
            slot, key = entry
            keys[block] = None
            spare.append(block)
            self._drop(found[slot], key, block, slot)
            if block in self.aliases:
                for each in self.aliases.pop(block):
                    self._drop(found[slot], each, block, slot)

    def _drop(self, found: dict[int, int], key: int, block: int, slot: int) -> None:
        twins = self.twins.pop((slot, key), None) if self.twins else None
        if twins is None:
            del found[key]
        else:
            if found[key] == block:
                found[key] = twins.pop(0)
            else:
                twins.remove(block)
            if twins:
                self.twins[slot, key] = twins
        if self.publish:
            self.events.append(BlockRemoved((key,), group=slot))
