"""The tiers below the engines, in virtual time: what agents order is moved over links, or fails.

One `SimNode` per node runs the production `Agent` and owns the bytes of its tiers; a `TierSide`
connects one life of one engine to it. Where engines compute with `workload.state.Memory`, the
blocks' own bytes are moved, so that wrong or partial state shows as a wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvatlas.core import agent_values as words
from kvatlas.core.events import Batch, UnitsGone, UnitsHeld
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit, name_of
from kvatlas.sim.engines import GATEWAY, SimEngine
from kvatlas.sim.links import Fabric, LinkSpec
from kvatlas.sim.network import Network
from kvatlas.sim.tier_node import SimNode
from kvatlas.sim.tier_side import TierSide
from kvatlas.sim.tier_spec import TierSpec
from kvatlas.sim.tier_units import AgentUse, Kept
from kvatlas.sim.timeline import Timeline

Verdict = Callable[[str, words.Effect, Unit], str]  # (node, what, unit) → "", "failed", "damaged"


class Store:
    """The object tier: one for all. What does not fit pushes out what was written first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.held: OrderedDict[bytes, Kept] = OrderedDict()
        self.sealed: set[bytes] = set()  # block keys of points whose record is written
        self.missed: set[tuple[str, bytes]] = set()  # (node, name): it asked, and it was not there

    def put(self, kept: Kept) -> list[bytes]:
        """Write one; returns the names of what had to go."""
        unit = kept.unit
        self.missed = {each for each in self.missed if each[1] != unit.name}
        if unit.name in self.held:
            self.held[unit.name] = kept
            return []
        self.held[unit.name] = kept
        self.used_bytes += unit.size_bytes
        gone = []
        while self.used_bytes > self.capacity_bytes:
            gone.append(next(iter(self.held)))
            self.discard(gone[-1])
        return gone

    def discard(self, name: bytes) -> None:
        """One goes."""
        old = self.held.pop(name, None)
        if old is not None:
            self.used_bytes -= old.unit.size_bytes
            if old.unit.part is Part.POINT:
                self.sealed.discard(old.unit.key)

    def seal(self, keys: Sequence[bytes]) -> None:
        """Records of points are written; of what had to go meanwhile there is none."""
        self.sealed.update(key for key in keys if name_of(key, Part.POINT) in self.held)

    def clear(self) -> None:
        """It lost everything (its index, after a restart)."""
        self.held.clear()
        self.sealed.clear()
        self.used_bytes = 0

    def catalogue(self) -> tuple[Unit, ...]:
        """All that can be used."""
        units = (kept.unit for kept in self.held.values())
        return tuple(u for u in units if u.part is Part.BODY or u.key in self.sealed)


class Tiers:
    """All nodes of a cluster that have tiers, and the store that they share."""

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        fabric: Fabric,
        spec: TierSpec,
        *,
        keyring: Keyring,
        fingerprint: Callable[[SimEngine], bytes],
        gateways: Sequence[str] = (GATEWAY,),
    ) -> None:
        self.timeline = timeline
        self.network = network
        self.gateways = gateways  # who listens to agents, now
        self.fabric = fabric
        self.spec = spec
        self.keyring = keyring
        self.fingerprint = fingerprint
        self.verdict: Verdict | None = None  # faults
        self.published: Callable[[SimNode, Batch], None] | None = None  # who wants to know
        self.acted: Callable[[SimNode, Sequence[words.Effect]], None] | None = None  # the same
        self.turned: Callable[[SimNode], None] | None = None  # an agent began or ended
        self.store = Store(spec.object_bytes) if spec.object_bytes else None
        self.nodes: dict[str, SimNode] = {}
        self._node_of: dict[str, str] = {}
        if self.store is not None:
            fabric.add("store", spec.store_link)

    def add_node(
        self,
        name: str,
        engines: Sequence[str],
        link: LinkSpec,
        relays: Mapping[str, float] | None = None,
    ) -> SimNode:
        """A node with these engines, before they are made; ``link`` is its network card.
        ``relays``: nodes that read the store for it too, and how fast."""
        node = self.nodes[name] = SimNode(self, name, engines, link, relays or {})
        self._node_of |= dict.fromkeys(engines, name)
        return node

    def side(self, engine: SimEngine) -> TierSide:
        """What a new life of an engine has outside of its pool."""
        return TierSide(self, self.nodes[self._node_of[engine.name]], engine)

    def use(self) -> dict[str, AgentUse]:
        """What each node's agent did."""
        return {name: node.use() for name, node in self.nodes.items()}

    def lose_store(self) -> None:
        """The store forgets all, and says so to everybody who is up."""
        if self.store is not None:
            self.store.clear()
        for node in self.nodes.values():
            node.tell(words.Lose(Tier.OBJECT))

    def gossip(self, source: SimNode, event: UnitsHeld | UnitsGone) -> None:
        """What one node announces of a tier that others can read reaches them, a message later."""
        peers = self.spec.peers and event.tier is Tier.DRAM
        if not peers and event.tier is not Tier.OBJECT:
            return
        names = [name_of(key, Part.BODY) for key in event.bodies]
        names += [name_of(key, Part.POINT) for key in event.points]
        tier = Tier.PEER if peers else Tier.OBJECT
        node = source.name if peers else ""
        if isinstance(event, UnitsGone):
            told = words.Told(tier, gone=tuple(names), node=node)
        else:
            held = source.held(event.tier)
            told = words.Told(tier, tuple(held[n].unit for n in names if n in held), node=node)
        for other in self.nodes.values():
            if other is not source:
                self.timeline.after(self.spec.message_s, other.tell, told)
