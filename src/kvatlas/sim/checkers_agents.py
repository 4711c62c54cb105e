"""What must hold below the engines all the time: books that add up, and no word that is not kept.

Judged after each thing that an agent does, from its effects and its ledgers' read-outs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvatlas.core import agent_values as words
from kvatlas.core.events import UnitsGone, UnitsHeld
from kvatlas.core.inventory import OWN
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Sizes, name_of
from kvatlas.sim.checkers import Checkers
from kvatlas.sim.faults_world import FaultWorld
from kvatlas.sim.tier_node import SimNode


class AgentWatch:
    """Follows what each agent announces of its own tiers, and holds it to that."""

    def __init__(self, checkers: Checkers, world: FaultWorld) -> None:
        self._checkers = checkers
        self._nodes = world.nodes
        self._engines = world.engines
        self._said: dict[str, dict[Tier, set[bytes]]] = {}  # what an agent's life says is there
        self._lives: dict[str, int] = {}
        if world.nodes is not None:
            world.nodes.watch = self._acted

    def _acted(self, node: SimNode, effects: Sequence[words.Effect]) -> None:
        """An agent did something."""
        if self._lives.get(node.name) != node.life:
            self._lives[node.name] = node.life
            self._said[node.name] = {tier: set() for tier in OWN}
        said, gone = self._said[node.name], []
        for effect in effects:
            for event in effect.events if isinstance(effect, words.Announce) else ():
                if isinstance(event, UnitsHeld | UnitsGone) and event.tier in said:
                    names = {name_of(key, Part.BODY) for key in event.bodies}
                    names |= {name_of(key, Part.POINT) for key in event.points}
                    if isinstance(event, UnitsHeld):
                        said[event.tier] |= names
                    else:
                        gone.append((event.tier, names))
        for effect in effects:
            if isinstance(effect, words.Load):
                self._loads(node, effect.sources, said)
            elif isinstance(effect, words.Seal):
                self._seals(node, effect, said)
        for tier, names in gone:
            said[tier] -= names
            if node.has(tier) and any(name in node.agent.ledger(tier) for name in names):
                self._report(
                    "resurrected", node, f"{tier.name.lower()}: what it says is gone stays"
                )
        self._sums(node)

    def _loads(
        self, node: SimNode, sources: Iterable[words.Source], said: dict[Tier, set[bytes]]
    ) -> None:
        for source in sources:
            if source.tier in said and not {u.name for u in source.units} <= said[source.tier]:
                where = source.tier.name.lower()
                self._report("resurrected", node, f"loads from {where} what it says is not there")

    def _seals(self, node: SimNode, seal: words.Seal, said: dict[Tier, set[bytes]]) -> None:
        """A point counts when its record is written, not before."""
        assert self._nodes is not None
        spec = self._nodes.plan.spec
        if seal.tier not in OWN or spec.object_bytes or spec.peers:
            return  # there it may count for what lies elsewhere
        # Without windows an engine resumes after any body, and asks for no point.
        asks = [n for n in node.engines if Sizes(self._engines[n].layout).has_points]
        for key in seal.keys:
            elsewhere = any(name_of(key, Part.POINT) in said[tier] for tier in OWN)
            if not elsewhere and any(node.agent.present(n, (key,), 0)[1] for n in asks):
                self._report("wrong-bytes", node, "a point without a record counts already")

    def _sums(self, node: SimNode) -> None:
        assert self._nodes is not None
        idle = not node.agent.busy and not self._nodes.keeps[node.name]
        for tier in OWN:
            if not node.has(tier):
                continue
            ledger = node.agent.ledger(tier)
            usage, leaving, in_use, there = ledger.usage(), 0, 0, 0
            for entry in ledger.entries():
                size_bytes = entry.facts.size_bytes
                there += size_bytes
                if entry.leaving:
                    leaving += size_bytes
                elif entry.pins or entry.leases:
                    in_use += size_bytes
            counted = (usage.leaving_bytes, usage.in_use_bytes, usage.committed_bytes)
            if counted != (leaving, in_use, there + usage.doomed_bytes):
                self._report("bounds", node, f"{tier.name.lower()}: {usage} is not what is there")
            if idle and (usage.leases or usage.pins or usage.reservations or usage.doomed_bytes):
                self._report("leak", node, f"{tier.name.lower()}: {usage} and nothing is under way")

    def _report(self, kind: str, node: SimNode, what: str) -> None:
        self._checkers.report(kind, f"{node.name}: {what}")
