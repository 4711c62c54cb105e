"""One simulated node: its agent, the bytes of its tiers, and what is moved between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvatlas.core import agent_values as words
from kvatlas.core.agent import Agent
from kvatlas.core.events import Batch, Event, UnitsGone, UnitsHeld
from kvatlas.core.keys import salt_scope
from kvatlas.core.ledger import Ledger
from kvatlas.core.ledger_values import Limits
from kvatlas.core.policy.registry import make_policy
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.units import Part, Unit, name_of
from kvatlas.sim.engines import EventLog
from kvatlas.sim.links import Flow, LinkSpec
from kvatlas.sim.messages import (
    AskReplay,
    CallOff,
    Events,
    Message,
    Pull,
    Pulled,
    Pulse,
    Subscribed,
)
from kvatlas.sim.tier_units import AgentUse, Kept
from kvatlas.sim.timeline import Timer

if TYPE_CHECKING:
    from kvatlas.sim.tier_side import TierSide
    from kvatlas.sim.tiers import Tiers


def agent_of(node: str) -> Publisher:
    """The agent of a node of that name."""
    return Publisher(f"agent-{node}")


class SimNode:
    """One node's agent process and its tiers. ``stop`` and ``start`` are those of the agent, which
    takes the dram with it."""

    def __init__(
        self,
        tiers: Tiers,
        name: str,
        engines: Sequence[str],
        link: LinkSpec,
        relays: Mapping[str, float],
    ) -> None:
        self.name = name
        self.engines = tuple(engines)
        self.publisher = agent_of(name)
        self.up = False
        self.life = 0
        self.sides: dict[str, TierSide] = {}
        self._tiers = tiers
        self._calibrated = tiers.spec.calibrated(link, relays)
        spec, fabric = tiers.spec, tiers.fabric
        self._own: dict[Tier, dict[bytes, Kept]] = {}
        self._sealed: set[bytes] = set()  # block keys in the disk's catalogue of records
        for tier, size_bytes in ((Tier.DRAM, spec.dram_bytes), (Tier.DISK, spec.disk_bytes)):
            if size_bytes:
                self._own[tier] = {}
        fabric.add(f"{name} host", spec.host_link)
        fabric.add(f"{name} disk read", spec.disk_read_link)
        fabric.add(f"{name} disk write", spec.disk_write_link)
        fabric.add(f"{name} in", link)
        fabric.add(f"{name} out", link)
        if spec.storage_link is not None:
            fabric.add(self.to_store("in"), spec.storage_link)
            fabric.add(self.to_store("out"), spec.storage_link)
        self.agent = self._new_agent()
        self._log = EventLog()
        self._moves: dict[int, Move] = {}
        self._pulls: dict[str, tuple[str, Pull, int]] = {}  # by whom; what was in dram before
        self._timer: Timer | None = None
        self.found_damaged: dict[int, Kept] = {}  # by identity: read-outs
        self.stuck_until = 0.0  # a fault: what is stopped before is not over before
        self.start()

    # -- the process ----------------------------------------------------------------------------

    def _new_agent(self) -> Agent:
        spec = self._tiers.spec
        sizes = {Tier.DRAM: spec.dram_bytes, Tier.DISK: spec.disk_bytes}
        quotas = {salt_scope(salt).owner: size for salt, size in spec.quotas.items()}
        ledgers = {
            tier: Ledger(
                Limits(sizes[tier], spec.high, spec.low, quotas),
                make_policy(spec.policy, tier),
            )
            for tier in self._own
        }
        return Agent(ledgers, self._calibrated)

    def to_store(self, way: str) -> str:
        """The link between node and store, "in" or "out"."""
        card = f"{self.name} storage" if self._tiers.spec.storage_link is not None else self.name
        return f"{card} {way}"

    def start(self) -> None:
        """A new agent: it knows what the catalogues of its disk and of the store say."""
        if self.up:
            return
        self.up = True
        self.life += 1
        if self.life > 1:
            self.agent = self._new_agent()
            self._log = EventLog()
        self._tiers.network.attach(self.publisher.worker, self._receive)
        self.connect()
        for side in self.sides.values():
            side.attach()
        self._own.get(Tier.DRAM, {}).clear()  # nobody knows any more what lies where
        by_tenant: dict[str, list[Unit]] = {}
        for kept in self._own.get(Tier.DISK, {}).values():
            by_tenant.setdefault(kept.tenant, []).append(kept.unit)
        for tenant, units in by_tenant.items():
            self.tell(words.Found(Tier.DISK, tuple(units), tuple(self._sealed), tenant))
        if self._tiers.store is not None:
            self.tell(words.Told(Tier.OBJECT, self._tiers.store.catalogue()))
        if self._tiers.turned is not None:
            self._tiers.turned(self)

    def connect(self) -> None:
        """Say which life this is, over new connections."""
        for gateway in self._tiers.gateways:
            self.connect_to(gateway)

    def connect_to(self, gateway: str) -> None:
        """The same to one gateway."""
        if self.up:
            self._reply(gateway, Pulse(0, self.life, 0))
            self._reply(gateway, Subscribed())

    @property
    def history(self) -> list[Batch]:
        """What the present agent announced, and would replay."""
        return self._log.history

    @property
    def moving(self) -> int:
        """Operations of the present agent that are on their way."""
        return len(self._moves)

    def stop(self) -> None:
        """The agent dies: whatever it moved is over, and nobody answers for its tiers."""
        if not self.up:
            return
        self.up = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for move in list(self._moves.values()):
            move.break_off()
        self._moves.clear()
        self._pulls.clear()
        self._tiers.network.detach(self.publisher.worker)
        for side in self.sides.values():
            side.agent_gone()
        if self._tiers.turned is not None:
            self._tiers.turned(self)

    def lose(self, tier: Tier) -> None:
        """A fault: a tier is empty, and the agent is told."""
        self._own[tier].clear()
        if tier is Tier.DISK:
            self._sealed.clear()
        self.tell(words.Lose(tier))

    def has(self, tier: Tier) -> bool:
        """Is that a tier of its own?"""
        return tier in self._own

    def held(self, tier: Tier) -> dict[bytes, Kept]:
        """Units in one of its tiers, or in the store, by name (read-outs, faults)."""
        if tier is Tier.OBJECT:
            return self._tiers.store.held if self._tiers.store is not None else {}
        return self._own.get(tier, {})

    def is_sealed(self, tier: Tier, name: bytes) -> bool:
        """Is the record of this point written? Those of dram are the agent's own memory."""
        store = self._tiers.store
        sealed = store.sealed if tier is Tier.OBJECT and store is not None else self._sealed
        return tier is Tier.DRAM or name[:-1] in sealed

    def use(self) -> AgentUse:
        """What its present agent did, for the report."""
        agent = self.agent
        return AgentUse(
            {f"{kind} {tier.name.lower()}": size for (kind, tier), size in agent.moved.items()},
            {t.name.lower(): agent.ledger(t).usage().committed_bytes for t in self._own},
            dict(sorted(agent.counts.items())),
        )

    # -- the machine ----------------------------------------------------------------------------

    def tell(self, event: words.Input) -> None:
        """An input of the agent, where there is one."""
        if self.up:
            self.perform(self.agent.handle(event, self._tiers.timeline.now))

    def perform(self, effects: Sequence[words.Effect]) -> None:
        """Do what the agent orders, in its order; what takes time ends later."""
        for effect in effects:
            match effect:
                case words.Announce(events):
                    self.announce(events)
                    for event in events:
                        if isinstance(event, UnitsHeld | UnitsGone):
                            self._tiers.gossip(self, event)
                case words.Drop(tier, names):
                    held = self.held(tier)
                    for name in names:
                        held.pop(name, None)
                        if tier is Tier.DISK and name[-1] == Part.POINT:
                            self._sealed.discard(name[:-1])
                case words.Ready(worker, request, tokens):
                    side = self.sides.get(worker)
                    if side is not None:
                        side.ready(request, tokens)
                case words.Stop(op):
                    move = self._moves.get(op)
                    if move is not None:
                        move.fenced = True
                        self._tiers.timeline.at(self.stuck_until, move.break_off)
                case words.Save() | words.Load() | words.Copy() | words.Seal():
                    move = self._moves[effect.op] = Move(self._tiers, self, effect)
                    move.start()
                case _:
                    pass
        if self._tiers.acted is not None:
            self._tiers.acted(self, effects)
        for owner in [owner for owner in self._pulls if not self.agent.under_way(owner)]:
            self._pulled(owner)
        self._arm()

    def announce(self, events: tuple[Event, ...]) -> None:
        """Send what the directory has to know; nothing at all: a sign of life."""
        batch = self._log.publish(events, self._tiers.timeline.now)
        if self._tiers.published is not None:
            self._tiers.published(self, batch)
        self._send(Events(batch))

    def done(self, move: Move, event: words.Done) -> None:
        """A move is over: the agent hears of it when the effects at hand are performed."""
        if self._moves.pop(event.op, None) is move:
            self._tiers.timeline.after(0.0, self._tell_alive, event, self.life)

    def _tell_alive(self, event: words.Done, life: int) -> None:
        if life == self.life:
            self.tell(event)

    def put(self, tier: Tier, kept: Kept) -> None:
        """Bytes of a unit arrive in a tier."""
        if tier is not Tier.OBJECT:
            self._own[tier][kept.unit.name] = kept
            return
        tiers = self._tiers
        assert tiers.store is not None
        gone = tiers.store.put(kept)
        for node in tiers.nodes.values() if gone else ():
            told = words.Told(Tier.OBJECT, gone=tuple(gone))
            tiers.timeline.after(tiers.spec.message_s, node.tell, told)

    def sealed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """Records are written, of what is still there."""
        if tier is Tier.DISK:
            held = self._own[tier]
            self._sealed.update(key for key in keys if name_of(key, Part.POINT) in held)
        elif self._tiers.store is not None:
            self._tiers.store.seal(keys)

    def _arm(self) -> None:
        due = self.agent.next_deadline()
        self._timer = self._tiers.timeline.rearm(self._timer, due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.perform(self.agent.tick(self._tiers.timeline.now))

    # -- messages -------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        """To all gateways."""
        for gateway in self._tiers.gateways:
            self._reply(gateway, message)

    def _reply(self, gateway: str, message: Message) -> None:
        self._tiers.network.send(self.publisher.worker, gateway, message)

    def _receive(self, source: str, message: Message) -> None:
        match message:
            case AskReplay():
                for answer in self._log.replay(message):
                    self._reply(source, answer)
            case Pull(id, engine, keys, _, tenant):  # gateways number theirs alike
                owner = f"{source} {id}"
                self._pulls[owner] = source, message, self._in_dram(keys)
                self.tell(words.Pull(engine, keys, tenant, owner))
            case CallOff(id):
                self.tell(words.Release(f"{source} {id}"))
            case _:
                pass

    def _pulled(self, owner: str) -> None:
        """It is over: is all of it there?"""
        source, pull, before = self._pulls.pop(owner)
        _, by_tier = self.agent.depths(pull.engine, pull.keys)
        error = "" if by_tier.get(Tier.DRAM) == pull.tokens else "it did not all arrive"
        moved_bytes = max(0, self._in_dram(pull.keys) - before)
        self._reply(source, Pulled(pull.id, moved_bytes, error))

    def _in_dram(self, keys: tuple[bytes, ...]) -> int:
        return self.agent.held_bytes(keys).get(Tier.DRAM, 0)


class Move:
    """One operation on its way: a flow per source, all of which must arrive."""

    def __init__(
        self,
        tiers: Tiers,
        node: SimNode,
        effect: words.Save | words.Load | words.Copy | words.Seal,
    ) -> None:
        self._tiers = tiers
        self._node = node
        self.effect = effect
        self._flows: list[Flow] = []
        self._left = 0
        self._over = False
        self._relays: dict[SimNode, int] = {}  # who passes something on, in which life
        self.fenced = False  # it may deliver nothing any more
        self._have: dict[bytes, Kept] = {}  # of a save: what the engine could still give
        self._release: Callable[[], None] | None = None

    def start(self) -> None:
        """Put it on its way."""
        effect, name = self.effect, self._node.name
        match effect:
            case words.Save(worker=worker, tier=tier):
                side = self._node.sides.get(worker)
                if side is None:
                    self._end("the engine is gone")
                    return
                path = [f"{name} host", *self._way_to(tier)]
                side.hold(effect, lambda have, release: self._held(have, release, path))
            case words.Load(sources=sources):
                self._flow([(self._way_in(s), s.size_bytes) for s in sources])
            case words.Copy(source=source, target=target):
                path = [*self._way_from(source), *self._way_to(target)]
                self._flow([(path, source.size_bytes)])
            case words.Seal():
                self._tiers.timeline.after(self._tiers.spec.record_s, self._end)

    def _relay(self, source: words.Source) -> SimNode | None:
        """Who reads the store for us, and is there to do it; else we do it ourselves."""
        node = self._tiers.nodes.get(source.node) if source.tier is Tier.OBJECT else None
        return node if node is not None and node.up else None

    def _way_in(self, source: words.Source) -> list[str]:
        """Into an engine: what a relay passes on goes from card to device."""
        way = self._way_from(source)
        return way if self._relay(source) is not None else [*way, f"{self._node.name} host"]

    def _way_from(self, source: words.Source) -> list[str]:
        name = self._node.name
        match source.tier:
            case Tier.DISK:
                return [f"{name} disk read"]
            case Tier.OBJECT if (relay := self._relay(source)) is not None:
                self._relays[relay] = relay.life
                return ["store", relay.to_store("in"), f"{relay.name} out", f"{name} in"]
            case Tier.OBJECT:
                return ["store", self._node.to_store("in")]
            case Tier.PEER:
                return [f"{source.node} out", f"{name} in"]
        return []

    def _way_to(self, tier: Tier) -> list[str]:
        name = self._node.name
        if tier is Tier.DISK:
            return [f"{name} disk write"]
        return [self._node.to_store("out"), "store"] if tier is Tier.OBJECT else []

    def _held(self, have: dict[bytes, Kept], release: Callable[[], None], path: list[str]) -> None:
        """The engine keeps these units' blocks until they are copied."""
        if self._over:
            release()
            return
        assert isinstance(self.effect, words.Save)
        self._have, self._release = have, release
        size = sum(unit.size_bytes for unit in self.effect.units if unit.name in have)
        self._flow([(path, size)])

    def _flow(self, flows: Sequence[tuple[Sequence[str], int]]) -> None:
        self._left = len(flows)
        self._flows = [self._tiers.fabric.start(p, size, self._arrived) for p, size in flows]

    def _arrived(self, whole: bool) -> None:
        if not whole:
            self._end("broken off")
            return
        self._left -= 1
        if not self._left:
            self._end()

    def break_off(self) -> None:
        """Stop it wherever it is."""
        self._end("broken off")

    def _end(self, error: str = "") -> None:
        if self._over:
            return
        self._over = True
        if self.fenced:
            error = error or "stopped"
        if any(not relay.up or relay.life != life for relay, life in self._relays.items()):
            error = error or "a relay is gone"
        for flow in self._flows:
            flow.break_off()
        effect = self.effect
        bad: dict[str, list[bytes]] = {"failed": [], "damaged": []}
        if not error and isinstance(effect, words.Seal):
            names = [name_of(key, Part.POINT) for key in effect.keys]
            bad["failed"] = [name for name in names if name not in self._node.held(effect.tier)]
            self._node.sealed(effect.tier, effect.keys)
        elif not error:
            for unit, kept in self._units():
                verdict = "failed" if kept is None else "" if kept.whole else "damaged"
                if not verdict and self._tiers.verdict is not None:
                    verdict = self._tiers.verdict(self._node.name, effect, unit)
                if verdict:
                    bad[verdict].append(unit.name)
                    if kept is not None and not kept.whole:
                        self._found_damaged(unit, kept)
                elif kept is not None:
                    self._deliver(kept)
        if self._release is not None:
            self._release()
        done = words.Done(effect.op, tuple(bad["failed"]), tuple(bad["damaged"]), error)
        self._node.done(self, done)

    def _found_damaged(self, unit: Unit, kept: Kept) -> None:
        """A store throws out what it finds damaged; of its own tiers the agent decides."""
        self._node.found_damaged[id(kept)] = kept
        store = self._tiers.store
        if store is not None and store.held.get(unit.name) is kept:
            store.discard(unit.name)

    def _units(self) -> list[tuple[Unit, Kept | None]]:
        """What should have arrived, as it is where it came from."""
        effect = self.effect
        if isinstance(effect, words.Save):
            return [(unit, self._have.get(unit.name)) for unit in effect.units]
        assert isinstance(effect, words.Load | words.Copy)
        found: list[tuple[Unit, Kept | None]] = []
        for source in effect.sources if isinstance(effect, words.Load) else (effect.source,):
            node: SimNode | None = self._node
            tier = source.tier
            if tier is Tier.PEER:
                node, tier = self._tiers.nodes.get(source.node), Tier.DRAM
            held = node.held(tier) if node is not None and node.up else {}
            found += [(unit, held.get(unit.name)) for unit in source.units]
            if tier is Tier.OBJECT and self._tiers.store is not None:
                gone = {(self._node.name, u.name) for u in source.units if u.name not in held}
                self._tiers.store.missed |= gone
        return found

    def _deliver(self, kept: Kept) -> None:
        match self.effect:
            case words.Save(tier=tier):
                self._node.put(tier, kept)
            case words.Copy(target=target):
                self._node.put(target, kept)
            case words.Load(worker=worker, request=request):
                side = self._node.sides.get(worker)
                if side is not None:
                    side.write(request, kept)
