"""One node: the production agent, and the bytes of its tiers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core.agent import Agent
from kvatlas.core.events import Event, UnitsGone, UnitsHeld
from kvatlas.core.inventory import OWN
from kvatlas.core.ledger import Ledger
from kvatlas.core.ledger_values import Limits
from kvatlas.core.policy.registry import make_policy
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.units import Part, Unit, name_of
from kvatlas.sim.tier_units import Kept
from kvatlas.sim.tiers import Store

if TYPE_CHECKING:
    from kvatlas.validate.isolation.engine import CachingEngine

TIERS = (*OWN, Tier.OBJECT)


class Spec(msgspec.Struct, frozen=True):
    """All nodes of a world are alike. Sizes are bytes; 0: no such tier."""

    dram_bytes: int
    disk_bytes: int
    policy: str
    quotas: dict[str, int]
    config: words.Config
    peers: bool


class Moving(msgspec.Struct):
    """An operation on its way."""

    effect: words.Save | words.Load | words.Copy | words.Seal
    have: dict[bytes, Kept]
    fenced: bool = False


class Node:
    """``label``: under which tenant a salt's state is kept, as an agent reads it."""

    def __init__(
        self,
        name: str,
        spec: Spec,
        store: Store | None,
        *,
        now: Callable[[], float],
        label: Callable[[str], str],
        say: Callable[[Publisher, tuple[Event, ...]], None],
        ended: Callable[[str], None],
    ) -> None:
        self.name = name
        self.publisher = Publisher(f"agent-{name}")
        self.spec = spec
        self.store = store
        self.engines: dict[str, CachingEngine] = {}
        self.others: list[Node] = []
        self.now, self.label = now, label
        self.moves: dict[int, Moving] = {}
        self.told = 0  # inputs of its agents
        self.shed: set[bytes] = set()  # what the store let go to make room for what it wrote
        self._say, self._over = say, ended
        self._sizes = {Tier.DRAM: spec.dram_bytes, Tier.DISK: spec.disk_bytes}
        self.own: dict[Tier, dict[bytes, Kept]] = {t: {} for t in OWN if self._sizes[t]}
        self._sealed: set[bytes] = set()  # block keys: records on the disk
        self.agent = self._new_agent()

    def _new_agent(self) -> Agent:
        spec = self.spec
        return Agent(
            {
                tier: Ledger(
                    Limits(self._sizes[tier], 0.95, 0.8, dict(spec.quotas)),
                    make_policy(spec.policy, tier),
                )
                for tier in self.own
            },
            spec.config,
        )

    def restart(self) -> None:
        """A new agent: dram is void, the disk's and the store's catalogues speak."""
        self.moves.clear()
        self.own.get(Tier.DRAM, {}).clear()
        self.agent = self._new_agent()
        for engine in self.engines.values():
            engine.agent_gone()
            engine.attach()
        mine: dict[str, list[Unit]] = {}
        for kept in self.own.get(Tier.DISK, {}).values():
            mine.setdefault(kept.tenant, []).append(kept.unit)
        for tenant, units in mine.items():
            self.tell(words.Found(Tier.DISK, tuple(units), tuple(self._sealed), tenant))
        if self.store is not None:
            self.tell(words.Told(Tier.OBJECT, self.store.catalogue()))
        for other in self.others:
            other.tell(words.Lose(Tier.PEER, self.name))

    def held(self, tier: Tier) -> dict[bytes, Kept]:
        """Units in one of its tiers, or in the store, by name."""
        if tier is Tier.OBJECT:
            return {} if self.store is None else self.store.held
        return self.own.get(tier, {})

    def readable(self, tier: Tier, name: bytes) -> Kept | None:
        """A unit that can be used: of points one whose record is written."""
        kept = self.held(tier).get(name)
        if kept is None or name[-1] == Part.BODY or tier is Tier.DRAM:
            return kept
        sealed = self.store.sealed if tier is Tier.OBJECT and self.store else self._sealed
        return kept if name[:-1] in sealed else None

    # -- the machine ----------------------------------------------------------------------------

    def tell(self, event: words.Input) -> None:
        """An input of the agent."""
        self.told += 1
        self._perform(self.agent.handle(event, self.now()))

    def run(self) -> None:
        """Let it do what is due."""
        due = self.agent.next_deadline()
        if due is not None and due <= self.now():
            self._perform(self.agent.tick(self.now()))

    def _perform(self, effects: Sequence[words.Effect]) -> None:
        for effect in effects:
            match effect:
                case words.Announce(events):
                    self._say(self.publisher, events)
                    for event in events:
                        if isinstance(event, UnitsHeld | UnitsGone):
                            self._gossip(event)
                case words.Drop(tier, names):
                    self._drop(tier, names)
                case words.Ready(worker, request, tokens):
                    if (engine := self.engines.get(worker)) is not None:
                        engine.ready(request, tokens)
                case words.Stop(op):
                    if (moving := self.moves.get(op)) is not None:
                        moving.fenced = True
                case words.Save():
                    engine = self.engines.get(effect.worker)
                    have = engine.copied(effect) if engine is not None else {}
                    self.moves[effect.op] = Moving(effect, have)
                case words.Load() | words.Copy() | words.Seal():
                    self.moves[effect.op] = Moving(effect, {})
                case _:
                    pass

    def _drop(self, tier: Tier, names: Sequence[bytes]) -> None:
        for name in names:
            if tier is Tier.OBJECT:
                if self.store is not None:
                    self.store.discard(name)
                continue
            self.own[tier].pop(name, None)
            if tier is Tier.DISK and name[-1] == Part.POINT:
                self._sealed.discard(name[:-1])

    def _gossip(self, event: UnitsHeld | UnitsGone) -> None:
        """What one node announces of a tier that others can read reaches them."""
        peers = self.spec.peers and event.tier is Tier.DRAM
        if not peers and event.tier is not Tier.OBJECT:
            return
        names = [name_of(key, Part.BODY) for key in event.bodies]
        names += [name_of(key, Part.POINT) for key in event.points]
        tier, node = (Tier.PEER, self.name) if peers else (Tier.OBJECT, "")
        if isinstance(event, UnitsGone):
            told = words.Told(tier, gone=tuple(names), node=node)
        else:
            held = self.own[Tier.DRAM] if peers else self.held(Tier.OBJECT)
            told = words.Told(tier, tuple(held[n].unit for n in names if n in held), node=node)
        for other in self.others:
            other.tell(told)

    # -- moves ----------------------------------------------------------------------------------

    def finish(self, draw: random.Random, *, failing: bool = False) -> None:
        """One of the operations on their way ends."""
        if self.moves:
            op = draw.choice(list(self.moves))
            self._end(self.moves.pop(op), failing=failing)

    def _end(self, moving: Moving, *, failing: bool) -> None:
        effect = moving.effect
        self._over(type(effect).__name__.lower())
        if moving.fenced or failing:
            self.tell(words.Done(effect.op, error="stopped"))
            return
        missing: list[bytes] = []
        if isinstance(effect, words.Seal):
            held = self.held(effect.tier)
            names = [name_of(key, Part.POINT) for key in effect.keys]
            missing = [name for name in names if name not in held]
            keys = [name[:-1] for name in names if name in held]
            if effect.tier is Tier.DISK:
                self._sealed.update(keys)
            elif self.store is not None:
                self.store.seal(keys)
        else:
            for unit, kept, tier in self._units(moving):
                if kept is None:
                    missing.append(unit.name)
                else:
                    self._deliver(effect, kept, tier)
        self.tell(words.Done(effect.op, tuple(missing)))

    def _units(self, moving: Moving) -> list[tuple[Unit, Kept | None, str]]:
        """What should have arrived, as it is where it came from now."""
        effect = moving.effect
        if isinstance(effect, words.Save):
            return [(unit, moving.have.get(unit.name), "") for unit in effect.units]
        assert isinstance(effect, words.Load | words.Copy)
        found: list[tuple[Unit, Kept | None, str]] = []
        for source in effect.sources if isinstance(effect, words.Load) else (effect.source,):
            node: Node | None = self
            tier = source.tier
            if tier is Tier.PEER:
                node = next((o for o in self.others if o.name == source.node), None)
                tier = Tier.DRAM
            held = node.held(tier) if node is not None else {}
            told = source.tier.name.lower()
            found += [(unit, held.get(unit.name), told) for unit in source.units]
        return found

    def _deliver(
        self, effect: words.Save | words.Load | words.Copy, kept: Kept, source: str
    ) -> None:
        match effect:
            case words.Save(tier=tier):
                self._put(tier, kept)
            case words.Copy(target=target):
                self._put(target, kept)
            case words.Load(worker=worker, request=request):
                if (engine := self.engines.get(worker)) is not None:
                    engine.write(request, kept, source)

    def _put(self, tier: Tier, kept: Kept) -> None:
        if tier is not Tier.OBJECT:
            self.own[tier][kept.unit.name] = kept
            return
        assert self.store is not None
        if gone := self.store.put(kept):
            self.shed.update(gone)
            for node in (self, *self.others):
                node.tell(words.Told(Tier.OBJECT, gone=tuple(gone)))

    def leaving(self, tier: Tier) -> set[bytes]:
        """Units that may be there still although they are deleted: somebody reads them."""
        reads: list[words.Source] = []
        for moving in (move for node in (self, *self.others) for move in node.moves.values()):
            match moving.effect:
                case words.Load(sources=sources):
                    reads += sources
                case words.Copy(source=source):
                    reads.append(source)
        return {unit.name for source in reads for unit in source.units}
