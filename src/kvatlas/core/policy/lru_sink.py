"""Tiered LRU with attention sinks exempt: seed document 003's strategy 1, as it is written there.

One queue per tier. In `hbm` the first tokens of a prompt (P0) stay for ever, the last tokens of a
running request (P1) stay while it runs; of the rest what one request alone used (P3) goes before
what several used (P2), each by LRU. `dram` is one LRU of what comes down. The lowest tier goes by
reference count, "the value of reuse".

Two things that the seed leaves open. "For ever" would fill a tier in which every session begins
with its own block, until nothing can come in: beyond ``exempt_share`` of the blocks held the
exemptions lapse, the oldest first. And a request is taken to run until its end of prompt was not
used for ``live_s``; whoever knows better pins its blocks in the ledger.
"""

from __future__ import annotations

from collections import OrderedDict

from kvatlas.core.policy.base import Facts, Heat, Key, MayGo, Policy
from kvatlas.core.policy.lfu import Lfu
from kvatlas.core.policy.lru import Lru
from kvatlas.core.records import Tier


class LruSink:
    """The `hbm` queue. Does not know the tree, but for the window that slides along it."""

    tree = False

    def __init__(self, *, live_s: float = 60.0, exempt_share: float = 0.5) -> None:
        """``live_s``: prefill and a few hundred tokens of answer take less. Raises ValueError on a
        share outside 0…1 or a negative time."""
        if not (0 <= exempt_share <= 1 and live_s >= 0):
            raise ValueError("needs 0 <= exempt_share <= 1 and live_s >= 0")
        self._live_s, self._exempt_share = live_s, exempt_share
        self._queues: dict[Heat, OrderedDict[Key, int]] = {heat: OrderedDict() for heat in Heat}
        self._heat: dict[Key, Heat] = {}
        self._used_at: dict[Key, float] = {}  # of windows
        self._reused: set[Key] = set()  # windows that more than one request used

    def __len__(self) -> int:
        return len(self._heat)

    def added(self, key: Key, facts: Facts, now: float) -> None:
        if facts.parent is not None:
            self._close(facts.parent)  # the window has moved on
        self._put(key, Heat.SINK if facts.heat is Heat.SINK else Heat.WINDOW, facts.size_bytes)
        if facts.heat is not Heat.SINK:
            self._used_at[key] = now
            if facts.uses:
                self._reused.add(key)

    def touched(self, key: Key, now: float) -> None:
        heat = self._heat[key]
        if heat is Heat.COLD:
            self._put(key, Heat.SHARED, self._queues[heat].pop(key))
            return
        self._queues[heat].move_to_end(key)
        if heat is Heat.WINDOW:
            self._used_at[key] = now
            self._reused.add(key)

    def removed(self, key: Key) -> None:
        del self._queues[self._heat.pop(key)][key]
        self._used_at.pop(key, None)
        self._reused.discard(key)

    def evict(self, need_bytes: int, now: float, may_go: MayGo | None = None) -> list[Key]:
        windows = self._queues[Heat.WINDOW]
        while windows and self._used_at[next(iter(windows))] + self._live_s <= now:
            self._close(next(iter(windows)))
        found: list[Key] = []
        for heat in (Heat.COLD, Heat.SHARED):
            if need_bytes > 0:
                need_bytes = self._take(heat, need_bytes, may_go, None, found)
        if need_bytes > 0:
            self._lapse(need_bytes, may_go, found)
        return found

    def _lapse(self, need_bytes: int, may_go: MayGo | None, found: list[Key]) -> None:
        exempt = len(self._queues[Heat.WINDOW]) + len(self._queues[Heat.SINK])
        lapsing = exempt - int(self._exempt_share * (len(self._heat) + len(found)))
        for heat in (Heat.WINDOW, Heat.SINK):
            before = len(found)
            need_bytes = self._take(heat, need_bytes, may_go, lapsing, found)
            lapsing -= len(found) - before

    def _take(
        self,
        heat: Heat,
        need_bytes: int,
        may_go: MayGo | None,
        limit: int | None,
        found: list[Key],
    ) -> int:
        """Takes from one queue, at most ``limit`` blocks; returns what is still needed."""
        took: list[Key] = []
        for key, size_bytes in self._queues[heat].items():
            if need_bytes <= 0 or (limit is not None and len(took) >= limit):
                break
            if may_go is None or may_go(key):
                took.append(key)
                need_bytes -= size_bytes
        for key in took:
            self.removed(key)
        found += took
        return need_bytes

    def _put(self, key: Key, heat: Heat, size_bytes: int) -> None:
        self._queues[heat][key] = size_bytes
        self._heat[key] = heat

    def _close(self, key: Key) -> None:
        """A window that is none any more becomes one of the many."""
        if self._heat.get(key) is not Heat.WINDOW:
            return
        size_bytes = self._queues[Heat.WINDOW].pop(key)
        del self._used_at[key]
        heat = Heat.SHARED if key in self._reused else Heat.COLD
        self._reused.discard(key)
        self._put(key, heat, size_bytes)


def lru_sink(tier: Tier) -> Policy:
    """Strategy 1's queue of one tier: P0 to P3 in `hbm`, LRU in `dram`, reference counts below."""
    if tier is Tier.HBM:
        return LruSink()
    return Lru() if tier is Tier.DRAM else Lfu()
