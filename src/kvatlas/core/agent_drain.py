"""How a node that is going to end brings to disk what only its dram has."""

from __future__ import annotations

from collections import deque

from kvatlas.core.agent_ends import Ends
from kvatlas.core.agent_values import Kind, Source
from kvatlas.core.inventory import name_in, unit_of
from kvatlas.core.node import Node
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit

_COPIES_MAX = 4
_UNITS_MAX = 64  # of one copy


class Drained:
    """Each unit is tried once: bodies first, since no point counts before its bodies."""

    def __init__(self, node: Node, ends: Ends) -> None:
        self._node = node
        self._ends = ends
        self._left: deque[tuple[str, tuple[Unit, ...]]] = deque()  # by tenant
        self._tried: set[bytes] = set()
        self.over = False

    def pump(self) -> None:
        """While the node drains: begin as many copies as there may be."""
        node = self._node
        if not node.draining or self.over:
            return
        running = node.operations.running
        while running[Kind.WRITE] < min(_COPIES_MAX, node.config.copies_max):
            if not self._left and not self._look():
                # What is being saved or copied now may still have to go down.
                self.over = not len(node.operations)
                if self.over:
                    node.counts["drain_lost"] += self._only_in_dram()
                return
            tenant, units = self._left.popleft()
            self._ends.write(Source(Tier.DRAM, units), Tier.DISK, tenant)

    def _look(self) -> bool:
        """What was not tried yet; False: nothing."""
        node = self._node
        dram = node.ledger(Tier.DRAM)
        if dram is None or node.ledger(Tier.DISK) is None:
            return False
        found: dict[tuple[str, Part], list[Unit]] = {}
        for entry in dram.entries():
            name, unit = name_in(entry), unit_of(entry)
            sealed = unit.part is Part.BODY or name in node.inventory.sealed[Tier.DRAM]
            if sealed and name not in self._tried and not node.inventory.held(name, (Tier.DISK,)):
                found.setdefault((entry.tenant, unit.part), []).append(unit)
        for (tenant, _), units in sorted(found.items()):
            units.sort(key=lambda unit: unit.index)
            self._tried.update(unit.name for unit in units)
            for at in range(0, len(units), _UNITS_MAX):
                self._left.append((tenant, tuple(units[at : at + _UNITS_MAX])))
        return bool(self._left)

    def _only_in_dram(self) -> int:
        dram, disk = self._node.ledger(Tier.DRAM), self._node.ledger(Tier.DISK)
        if dram is None:
            return 0
        return sum(disk is None or name_in(e) not in disk for e in dram.entries())
