"""Operations under way on one node: what each of them holds, and when it is given up.

An operation that is past its time is first asked to stop; one that is not heard of during the
grace after that is given up: its room and its leases return, and its end, should it ever come,
counts for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from kvatlas.core.agent_values import Kind, Source
from kvatlas.core.deadlines import Deadlines
from kvatlas.core.records import Tier
from kvatlas.core.units import Unit


class Operation(msgspec.Struct):
    """One. ``rooms`` are reservations in the ledger of ``target`` by unit name, ``leases`` those
    on what is read. ``keys``: the prompt that its units are of, where that matters; ``start`` and
    ``end``: tokens, of a load."""

    number: int
    kind: Kind
    since: float
    until: float
    sources: tuple[Source, ...]
    target: Tier | None = None
    worker: str = ""
    request: str = ""
    tenant: str = ""
    owner: str = ""  # who asked for it ahead of time
    keys: tuple[bytes, ...] = ()
    start: int = 0
    end: int = 0
    rooms: dict[bytes, int] = {}
    leases: list[tuple[Tier, int]] = []
    stopping: bool = False
    void: bool = False  # whatever it brings is not wanted any more
    alone: bool = False  # nothing else was read from there when it began

    def units(self) -> Iterator[tuple[Source, Unit]]:
        """All units, with where they come from."""
        return ((source, unit) for source in self.sources for unit in source.units)

    @property
    def size_bytes(self) -> int:
        """Of all units."""
        return sum(source.size_bytes for source in self.sources)


class Operations:
    """All of one node, by number."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._open: dict[int, Operation] = {}
        self._loads: dict[tuple[str, str], int] = {}  # (worker, request) -> number
        self._due: Deadlines[int] = Deadlines(self._counts)
        self.running: Counter[Kind] = Counter()
        self.number = 0
        self.ended = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._open.values())

    def next(self) -> int:
        """A number of its own."""
        self.number += 1
        return self.number

    def open(self, operation: Operation) -> None:
        """It begins."""
        self._open[operation.number] = operation
        self.running[operation.kind] += 1
        self._due.set(operation.until, operation.number)
        if operation.kind is Kind.LOAD:
            self._loads[operation.worker, operation.request] = operation.number

    def end(self, number: int) -> Operation | None:
        """It is over; None: there is none (any more)."""
        operation = self._open.pop(number, None)
        if operation is not None:
            self.ended += 1
            self.running[operation.kind] -= 1
            if operation.kind is Kind.LOAD:
                self._loads.pop((operation.worker, operation.request), None)
        return operation

    def load_of(self, worker: str, request: str) -> Operation | None:
        """The load that a request waits for."""
        number = self._loads.get((worker, request))
        return None if number is None else self._open[number]

    def stop(self, operation: Operation, now: float) -> bool:
        """Ask it to stop; False: it was asked before."""
        if operation.stopping:
            return False
        operation.stopping = True
        operation.until = now + self._grace_s
        self._due.set(operation.until, operation.number)
        return True

    def due(self, now: float) -> Operation | None:
        """One whose time is over; it must be stopped or ended."""
        number = self._due.pop(now)
        return None if number is None else self._open[number]

    def next_deadline(self) -> float | None:
        """When one is due."""
        return self._due.next()

    def _counts(self, at: float, number: int) -> bool:
        operation = self._open.get(number)
        return operation is not None and operation.until == at
