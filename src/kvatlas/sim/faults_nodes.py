"""The nodes of a scenario that has tiers: built, broken, healed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core.dispatch import Settle
from kvatlas.core.events import UnitsGone
from kvatlas.core.inventory import OWN
from kvatlas.core.keys import Keyring, salt_scope
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.units import Unit
from kvatlas.sim.engines import SimEngine
from kvatlas.sim.faults import Fault, TierPlan
from kvatlas.sim.links import Fabric
from kvatlas.sim.network import Network
from kvatlas.sim.tier_node import SimNode
from kvatlas.sim.tier_units import Kept
from kvatlas.sim.tiers import Tiers
from kvatlas.sim.timeline import Timeline

_KEPT_S = 600.0  # a keeper that forgets to let go: beyond the end of these worlds


class Nodes:
    """All of them. ``counts``: per node, damaged units that agents counted whose lives are over."""

    def __init__(
        self,
        plan: TierPlan,
        seed: int,
        *,
        timeline: Timeline,
        network: Network,
        gateways: Sequence[str],
        keyring: Keyring,
        fingerprint: Callable[[SimEngine], bytes],
    ) -> None:
        self.plan = plan
        self.counts: Counter[str] = Counter()
        self.forgetful = False  # the store lost all, at some time, without a word
        self._timeline = timeline
        self._fabric = Fabric(timeline)
        self._draw = random.Random(f"kvatlas.nodes/{seed}")
        self._bad_disk: dict[str, tuple[float, float]] = {}  # node → until when, how likely
        self._slow: dict[str, float] = {}  # link → until when
        self.keeps: Counter[str] = Counter()  # per node: how much must not leave it now
        self.watch: Callable[[SimNode, Sequence[words.Effect]], None] | None = None
        self._striking: dict[str, list[tuple[float, Callable[[], None]]]] = {}  # by node
        self._small: dict[tuple[str, Tier], float] = {}
        self.tiers = Tiers(
            timeline,
            network,
            self._fabric,
            plan.spec,
            keyring=keyring,
            fingerprint=fingerprint,
            gateways=gateways,
        )
        self.tiers.verdict = self._verdict
        self.tiers.acted = self._acted
        store = "store" if plan.spec.object_bytes else ""
        self.settled: list[Settle] = []  # for each gateway: whose tiers carry whom
        for node in plan.nodes:
            made = self.tiers.add_node(node.name, node.engines, plan.card)
            engines = tuple(Publisher(name) for name in node.engines)
            self.settled.append(Settle(made.publisher, engines, store))

    def __iter__(self) -> Iterator[SimNode]:
        return iter(self.tiers.nodes.values())

    @property
    def flows(self) -> int:
        """Copies on their way."""
        return self._fabric.flows

    def of(self, target: str) -> SimNode:
        """The node that a fault is about: by its name, or one of its engines'."""
        return self.by_name(target) or next(node for node in self if target in node.engines)

    def by_name(self, name: str) -> SimNode | None:
        """A node, by its own name or its agent's."""
        return self.tiers.nodes.get(name.removeprefix("agent-"))

    def _verdict(self, node: str, effect: words.Effect, unit: Unit) -> str:
        """What a disk with errors does to a unit that is read from it or written to it."""
        until, share = self._bad_disk.get(node, (0.0, 0.0))
        if self._timeline.now >= until or self._draw.random() >= share:
            return ""
        match effect:
            case words.Save(tier=tier):
                return "failed" if tier is Tier.DISK else ""
            case words.Copy(source=source, target=target):
                return "failed" if Tier.DISK in (source.tier, target) else ""
            case words.Load(sources=sources):
                disk = any(s.tier is Tier.DISK and unit in s.units for s in sources)
                return "failed" if disk else ""
        return ""

    # -- faults ---------------------------------------------------------------------------------

    def inject(self, fault: Fault, node: SimNode) -> bool:
        """Let it happen to a node, where it can."""
        until = self._timeline.now + fault.duration_s
        match fault.kind:
            case "disk_error":
                self._bad_disk[node.name] = until, fault.amount
            case "damaged":
                return self._damage(node, fault.amount)
            case "slow_store":
                self._slow_down(node, fault)
            case "lost_store":
                return self._lose(node)
            case "forgetful_store":
                return self._forget_store()
            case "store_silent":
                self._stand_still(fault.duration_s)
            case "node_restart":
                if not node.up:
                    return False
                self.stop(node)
                if fault.amount == 2.0 and node.has(Tier.DISK):
                    node.lose(Tier.DISK)
                self._timeline.after(fault.duration_s, node.start)
            case "keep":
                return self._keep(fault, node)
            case "forget":
                salt = "red" if fault.amount < 0.5 else "blue"
                node.tell(words.Forget(salt_scope(salt).owner))
            case "resize":
                return self._resize(node, fault)
        return True

    def when_busy(self, node: SimNode, delay_s: float, call: Callable[[], None]) -> None:
        """``call`` so long after the next operation that begins on a node."""
        self._striking.setdefault(node.name, []).append((delay_s, call))

    def _acted(self, node: SimNode, effects: Sequence[words.Effect]) -> None:
        """An agent did something: what was to strike then does, and the checkers look."""
        if any(isinstance(effect, words.Save | words.Load | words.Copy) for effect in effects):
            for delay_s, call in self._striking.pop(node.name, ()):
                self._timeline.after(delay_s, call)
        if self.watch is not None:
            self.watch(node, effects)

    def _keep(self, fault: Fault, node: SimNode) -> bool:
        """A few blocks that it holds may not leave for a while."""
        keys = sorted({name[:-1] for tier in OWN for name in node.held(tier)})
        if not keys or not node.up:
            return False
        some = tuple(self._draw.sample(keys, max(1, int(fault.amount * min(len(keys), 16)))))
        owner = f"keeper {self._timeline.now}"
        self.keeps[node.name] += 1
        node.tell(words.Keep(owner, some, self._timeline.now + _KEPT_S))
        self._timeline.after(fault.duration_s, self._let_go, node, owner)
        return True

    def _let_go(self, node: SimNode, owner: str) -> None:
        self.keeps[node.name] -= 1
        node.tell(words.Release(owner))

    def stop(self, node: SimNode) -> None:
        """Its agent ends."""
        self.counts[node.name] += node.agent.counts["damaged"]
        node.stop()

    def _damage(self, node: SimNode, share: float) -> bool:
        """Turn over bytes of that share of the units in one place, at least of one."""
        places = [tier for tier in (*OWN, Tier.OBJECT) if node.held(tier)]
        if not places:
            return False
        held = node.held(self._draw.choice(places))
        for name in self._draw.sample(sorted(held), max(1, int(share * len(held)))):
            held[name] = broken(self._draw, held[name])
        return True

    def _slow_down(self, node: SimNode, fault: Fault) -> None:
        own, host = [f"{node.name} disk read", f"{node.name} disk write"], [f"{node.name} host"]
        links = self._draw.choice((own, host, ["store"] if self.tiers.store is not None else own))
        until = self._timeline.now + fault.duration_s
        if not fault.amount:  # what stands still cannot be broken off either
            node.stuck_until = max(node.stuck_until, until)
        for link in links:
            self._fabric.set_speed(link, fault.amount)
            self._slow[link] = max(until, self._slow.get(link, 0.0))
            self._timeline.at(self._slow[link], self._speed_up, link)

    def _stand_still(self, seconds: float) -> None:
        """The store answers nobody; what was asked of it cannot be broken off either."""
        until = self._timeline.now + seconds
        for node in self:
            node.stuck_until = max(node.stuck_until, until)
        self._fabric.set_speed("store", 0.0)
        self._slow["store"] = max(until, self._slow.get("store", 0.0))
        self._timeline.at(self._slow["store"], self._speed_up, "store")

    def _forget_store(self) -> bool:
        """The store has nothing any more, and nobody is told."""
        store = self.tiers.store
        if store is None or not store.held:
            return False
        store.clear()
        self.forgetful = True
        return True

    def _speed_up(self, link: str) -> None:
        if self._timeline.now >= self._slow[link]:
            self._fabric.set_speed(link, 1.0)

    def _lose(self, node: SimNode) -> bool:
        tiers = [tier for tier in OWN if node.held(tier)]
        if self.tiers.store is not None and self.tiers.store.held:
            tiers.append(Tier.OBJECT)
        if not tiers or not node.up:
            return False
        tier = self._draw.choice(tiers)
        if tier is Tier.OBJECT:
            self.tiers.lose_store()
        else:
            node.lose(tier)
        return True

    def _resize(self, node: SimNode, fault: Fault) -> bool:
        spec = self.plan.spec
        sizes = {Tier.DRAM: spec.dram_bytes, Tier.DISK: spec.disk_bytes}
        tier = self._draw.choice([tier for tier in OWN if sizes[tier]])
        if not node.up:
            return False
        self._small[node.name, tier] = self._timeline.now + fault.duration_s
        node.tell(words.Resize(tier, int(sizes[tier] * fault.amount)))
        self._timeline.after(fault.duration_s, self._grow, node, tier, sizes[tier])
        return True

    def _grow(self, node: SimNode, tier: Tier, size_bytes: int) -> None:
        if self._timeline.now >= self._small[node.name, tier]:
            node.tell(words.Resize(tier, size_bytes))

    # -- the end --------------------------------------------------------------------------------

    def heal(self) -> None:
        """Every agent is there."""
        for node in self.tiers.nodes.values():
            node.start()

    def breathe(self) -> None:
        """Each agent says something, if only that it is there."""
        for node in self.tiers.nodes.values():
            node.announce((UnitsGone(Tier.DRAM),))

    def lose_all(self) -> None:
        """Nobody holds anything below the engines."""
        for node in self.tiers.nodes.values():
            for tier in OWN:
                if node.has(tier):
                    node.lose(tier)
        self.tiers.lose_store()


def broken(draw: random.Random, kept: Kept) -> Kept:
    """A bit turned over in it; never the one that did before, which would make it whole again."""
    if not kept.whole:
        return kept
    data = list(kept.data)
    at = draw.randrange(len(data))
    block = bytearray(data[at])
    block[draw.randrange(len(block))] ^= 1 << draw.randrange(8)
    data[at] = bytes(block)
    return msgspec.structs.replace(kept, data=tuple(data))
