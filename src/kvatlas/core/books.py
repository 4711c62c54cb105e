"""The sums of one tier: each byte in exactly one place, whatever happens to its entry."""

from __future__ import annotations

from collections.abc import Collection

from kvatlas.core.forgetting import payer_of
from kvatlas.core.ledger_values import Entry
from kvatlas.core.policy.base import Key, MayGo


class Books:
    """Entries by key, and their bytes by state and by tenant.

    ``committed`` counts all entries. Of those, ``doomed`` were deleted while in use, ``leaving``
    were chosen for eviction, ``in_use`` are pinned or leased and neither of both; what remains
    may be chosen. An entry's state changes here only.
    """

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}
        self.reserved = self.committed = self.leaving = self.doomed = self.in_use = 0
        self.tenants: dict[str, int] = {}  # bytes reserved and committed
        self.coming: dict[str, int] = {}  # bytes of a tenant that are leaving or doomed

    def movable(self) -> int:
        """Bytes that an eviction could choose now."""
        return self.committed - self.in_use - self.leaving - self.doomed

    def may_go(self, whose: Collection[str] | None) -> MayGo | None:
        """What of some tenants (None: of all) is not in use; None: everything."""
        if whose is None and not self.in_use:
            return None

        def may_go(key: Key) -> bool:
            entry = self.entries[key]
            idle = not entry.pins and not entry.leases
            return idle and (whose is None or payer_of(entry.tenant) in whose)

        return may_go

    def reserve(self, tenant: str, size_bytes: int) -> None:
        """Room that is given (or taken back, where negative)."""
        self.reserved += size_bytes
        _add(self.tenants, payer_of(tenant), size_bytes)

    def put(self, entry: Entry) -> None:
        """A new entry."""
        self.entries[entry.key] = entry
        self.committed += entry.facts.size_bytes
        _add(self.tenants, payer_of(entry.tenant), entry.facts.size_bytes)
        self._tally(entry, 1)

    def remove(self, entry: Entry) -> None:
        """It is gone."""
        self._tally(entry, -1)
        del self.entries[entry.key]
        self.committed -= entry.facts.size_bytes
        _add(self.tenants, payer_of(entry.tenant), -entry.facts.size_bytes)

    def change(
        self,
        entry: Entry,
        *,
        pins: int = 0,
        leases: int = 0,
        leaving: bool | None = None,
        doomed: bool = False,
    ) -> Entry | None:
        """Another state; returns the entry where that lets it go."""
        self._tally(entry, -1)
        entry.pins += pins
        entry.leases += leases
        entry.doomed = entry.doomed or doomed
        if leaving is not None:
            entry.leaving = leaving
        self._tally(entry, 1)
        if not entry.doomed or entry.pins or entry.leases or entry.leaving:
            return None
        self.remove(entry)
        return entry

    def _tally(self, entry: Entry, sign: int) -> None:
        """Adds an entry to, or takes it from, the one sum that its state belongs to."""
        size_bytes = sign * entry.facts.size_bytes
        if entry.doomed or entry.leaving:
            if entry.doomed:
                self.doomed += size_bytes
            else:
                self.leaving += size_bytes
            _add(self.coming, payer_of(entry.tenant), size_bytes)
        elif entry.pins or entry.leases:
            self.in_use += size_bytes


def _add(sums: dict[str, int], name: str, size_bytes: int) -> None:
    """What comes to nothing is not remembered."""
    total = sums.get(name, 0) + size_bytes
    if total:
        sums[name] = total
    else:
        sums.pop(name, None)
