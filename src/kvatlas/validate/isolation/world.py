"""Many tenants on the production core: one world, operation by operation, by seed.

Each operation is drawn: requests on whole engines and on pairs, moves that end or fail, copies
ahead, clients that leave, processes that end, quotas, new epochs, purges, forgeries. The core is
the product's: keys, salts, directory, shelves, router, dispatcher, copies ahead, agents and their
ledgers. Engines are the engine model over real block pools; media are dictionaries.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable

import msgspec

from kvatlas.core import agent_values as words
from kvatlas.core import tenancy
from kvatlas.core.ahead import Ahead
from kvatlas.core.ahead_copies import Copied, Copy, Params, Recall
from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import (
    Dispatcher,
    Finished,
    FirstToken,
    Input,
    Join,
    Question,
    Reset,
    Sent,
    Settle,
)
from kvatlas.core.events import Event
from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Fingerprint, Keyring, salt_scope
from kvatlas.core.layout import Layout
from kvatlas.core.policy.registry import POLICIES
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.router import Decision, Router
from kvatlas.core.units import Sizes
from kvatlas.service.pair_protocols import Meeting
from kvatlas.sim.tiers import Store
from kvatlas.validate.isolation.audit import audit, judge_promise
from kvatlas.validate.isolation.cast import Cast, Tenant
from kvatlas.validate.isolation.engine import CachingEngine
from kvatlas.validate.isolation.marks import Judge, Prompt
from kvatlas.validate.isolation.node import TIERS, Node, Spec
from kvatlas.workload.models import load_layout

_PATH = "/v1/completions"
_FAST = 1e12  # bytes per second: loads always pay
_UNITS = (12, 40, 150)  # that fit into a tier


class Flight(msgspec.Struct):
    """A request under way; of a pair ``second`` decodes, and does so once it is ``halfway``."""

    prompt: Prompt
    first: CachingEngine
    second: CachingEngine | None = None
    halfway: bool = False

    def body(self) -> bytes:
        """As a gateway has it that has put the salt in."""
        return msgspec.json.encode({"prompt": [1], "cache_salt": self.prompt.salt})


class World:
    """One seed. ``counts``: how often each kind of operation took effect."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(f"kvatlas.isolation.1/{seed}")
        self.judge = Judge()
        self.counts: Counter[str] = Counter()
        self._now = 0.0
        self._told_core = 0
        self.ring = Keyring(hashlib.sha256(b"kvatlas.isolation\0%d" % seed).digest())
        self.prompts: dict[str, Prompt] = {}
        self.flights: dict[str, Flight] = {}
        self.purged: dict[int, int] = {}  # tenant → the operation of its last purge
        self.cast = Cast(draw, self.ring, 16)
        self.dispatcher = Dispatcher(Directory(self.ring), Router(), self.ring)
        self.ahead = Ahead(
            Params(replicate=True, push=True, bandwidth_share=1.0, bytes_per_s=_FAST),
            self.dispatcher,
        )
        self.dispatcher.listen(self._heard)
        self._pulls: dict[str, tuple[Node, Copy]] = {}
        self.nodes: list[Node] = []
        self.engines: list[CachingEngine] = []
        self._build()

    @property
    def operations(self) -> int:
        """Requests, copies that ended, and all else that was done."""
        return self.counts.total()

    @property
    def inputs(self) -> int:
        """What dispatcher and agents were told."""
        return self._told_core + sum(node.told for node in self.nodes)

    # -- the stage ------------------------------------------------------------------------------

    def _build(self) -> None:
        draw = self.draw
        full = load_layout("llama-3.1-70b", engine="vllm")
        windows = load_layout("gpt-oss-120b", engine="vllm")
        mix = draw.choice(
            ((full, full, full, full), (windows,) * 4, (full, windows, full, windows))
        )
        unit = max(Sizes(x).body_bytes + Sizes(x).point_bytes(100) for x in mix)
        self.store = Store(unit * draw.choice(_UNITS)) if draw.random() < 0.7 else None
        spec = self._spec(unit)
        self.quotas: dict[str, float] = dict(spec.quotas)
        for number in range(2):
            node = Node(
                f"n{number}",
                spec,
                self.store,
                now=lambda: self._now,
                label=self.label,
                say=self._said,
                ended=self._ended,
            )
            self.nodes.append(node)
        for node in self.nodes:
            node.others = [other for other in self.nodes if other is not node]
        for number, layout in enumerate(mix):
            self._add_engine(f"e{number}", layout, self.nodes[number // 2])
        for node in self.nodes:
            engines = tuple(engine.publisher for engine in node.engines.values())
            self._told(Settle(node.publisher, engines, "store" if self.store else ""))

    def _spec(self, unit: int) -> Spec:
        draw = self.draw
        dram, disk = (unit * draw.choice(_UNITS) for _ in range(2))
        dram, disk = draw.choice(((dram, disk), (dram, disk), (dram, 0), (0, disk)))
        through = [Tier.DISK] if dram and disk and draw.random() < 0.5 else []
        through += [Tier.OBJECT] if self.store is not None else []
        quotas = {
            t.tag: unit * draw.choice(_UNITS) for t in self.cast.tenants if draw.random() < 0.3
        }
        rates = dict.fromkeys((*TIERS, Tier.PEER), _FAST)
        config = words.Config(
            hit_share=1.0,
            queue_max=draw.choice((1, 4)),
            promote_after=draw.choice((0, 1, 2)),
            exclusive=draw.random() < 0.3,
            write_through=tuple(through),
            reads=rates,
            writes=rates,
        )
        policy = draw.choice([name for name in POLICIES if name != "attention"])
        return Spec(dram, disk, policy, quotas, config, peers=bool(dram) and draw.random() < 0.6)

    def _add_engine(self, name: str, layout: Layout, node: Node) -> None:
        print_ = Fingerprint(
            model=layout.model,
            weights_digest=layout.model,
            engine=layout.engine,
            layout_digest=layout.digest(),
            block_tokens=layout.grid_tokens,
        ).digest()
        engine = CachingEngine(
            name,
            layout,
            print_,
            self.draw.choice((40, 80, 300)),
            node=node,
            prompts=self.prompts,
            judge=self.judge,
            told=self._said,
            over=self._over,
            keys=self.keys,
        )
        self.engines.append(engine)
        self._told(Join(engine.publisher, layout, print_))

    # -- what the product says of a salt ----------------------------------------------------------

    def label(self, salt: str) -> str:
        """Under whose name a node's agent keeps the state of a prompt with this salt."""
        return tenancy.sharing_of(self.ring, salt).scope.owner

    def keys(self, engine: CachingEngine, prompt: Prompt, salt: str) -> tuple[bytes, ...]:
        """Block keys of a prompt as an agent makes them."""
        grid = engine.layout.grid_tokens
        sharing = tenancy.sharing_of(self.ring, salt).of(self.ring, prompt.tokens)
        chain = tenancy.Chain(self.ring, engine.fingerprint, grid, sharing, prompt.adapter)
        whole = len(prompt.tokens) // (4 * grid) * 4 * grid
        return tuple(chain.extend(memoryview(prompt.tokens)[:whole]))

    def _ended(self, kind: str) -> None:
        self.counts[kind] += 1

    def _said(self, publisher: Publisher, events: tuple[Event, ...]) -> None:
        self._told_core += 1
        self.dispatcher.apply(publisher, events)

    def _told(self, event: Input) -> Decision | None:
        self._told_core += 1
        return self.dispatcher.handle(event, self._now)

    # -- time -----------------------------------------------------------------------------------

    def step(self) -> None:
        """One operation."""
        self.judge.at += 1
        self._now += self.draw.choice((0.001, 0.01, 0.1))
        self._do(self.draw.choices(_KINDS, _WEIGHTS)[0])
        for engine in self.engines:
            engine.run(self._now)
        for node in self.nodes:
            node.run()
            for _ in range((len(node.moves) + 2) // 4):
                node.finish(self.draw)
        self._look_at_pulls()
        if not self.judge.at % 512:
            audit(self)

    def _do(self, kind: Callable[[World], None]) -> None:
        kind(self)
        if kind not in (World._move, World._fail):  # what ends then counts by itself
            self.counts[kind.__name__.lstrip("_")] += 1

    def finish(self) -> None:
        """Let everything end, and look once more."""
        while any(node.moves for node in self.nodes) or self.flights:
            for node in self.nodes:
                for _ in range(len(node.moves)):
                    node.finish(self.draw)
            self._now += 1.0
            for engine in self.engines:
                engine.run(self._now)
            for node in self.nodes:
                node.run()
        audit(self)

    # -- requests -------------------------------------------------------------------------------

    def _ask(self) -> None:
        """A request on whatever engine the router chooses, or on another one."""
        self._request(self.cast.prompt())

    def _crowd(self) -> None:
        """Many of one tenant at once with one beginning: what copies ahead are for."""
        if self.cast.asked:
            first = self.draw.choice(self.cast.asked)
            tenant = self.cast.tenants[first.tenant]
            self.counts["ask"] += 6
            for _ in range(6):
                tokens = first.tokens + self.draw.randbytes(64)
                self._request(self.cast.of(tenant, first.session, tokens, first.adapter))

    def _forge(self) -> None:
        """A salt without the secret: where a gateway lets clients' salts through."""
        prompt = self.cast.forgery()
        if prompt is None:
            return
        if self.cast.believed(prompt):
            self.judge.report("forged", f"{prompt.salt!r} is believed")
        self._request(prompt)

    def _request(self, prompt: Prompt) -> None:
        draw = self.draw
        self.prompts[prompt.id] = prompt
        question = self._question(prompt)
        decision = self._told(question)
        assert decision is not None
        for plan in decision.plans:
            judge_promise(self, prompt, plan)
        if not decision.plans:
            self._told(Finished(prompt.id, self.engines[0].publisher, ok=False))
            return
        chosen = decision.plans[0] if draw.random() < 0.7 else draw.choice(decision.plans)
        engine = next(e for e in self.engines if e.publisher == chosen.publisher)
        alike = [e for e in self.engines if e.fingerprint == engine.fingerprint and e is not engine]
        flight = self.flights[prompt.id] = Flight(prompt, engine)
        self._told(Sent(prompt.id, engine.publisher))
        if alike and draw.random() < 0.15:  # prefill here, decode there
            self.counts["pair"] += 1
            flight.second = draw.choice(alike)
            body = Meeting("nixl").prefill(flight.body(), _PATH)
            engine.ask(prompt, _salt_in(body), hand_off=True)
        else:
            engine.ask(prompt, prompt.salt)

    def _question(self, prompt: Prompt) -> Question:
        among = tuple((e.publisher, prompt.adapter) for e in self.engines)
        sharing = tenancy.sharing_of(self.ring, prompt.salt)
        below = sharing if sharing.tenant else None
        return Question(prompt.id, among, prompt.tokens, salt_scope(prompt.salt), below=below)

    def _over(self, id: str, engine: CachingEngine, ok: bool) -> None:
        """A request, or the first half of one, ended."""
        flight = self.flights.get(id)
        if flight is None:
            return
        second = flight.second
        if ok and second is not None and engine is flight.first and not flight.halfway:
            flight.halfway = True
            body = Meeting("nixl").decode(flight.body(), {"remote_host": "x"})
            second.ask(flight.prompt, _salt_in(body), source=engine)
            return
        del self.flights[id]
        for other in (flight.first, second):
            if other is not None and other is not engine:
                other.drop(id)
        if ok:
            self._told(FirstToken(id, 0.1))
        self._told(Finished(id, flight.first.publisher, ok=ok))

    # -- what else happens ------------------------------------------------------------------------

    def _move(self) -> None:
        """Some of what is on its way arrives."""
        for node in self.nodes:
            node.finish(self.draw)

    def _fail(self) -> None:
        """An operation on its way fails."""
        self.draw.choice(self.nodes).finish(self.draw, failing=True)

    def _leave(self) -> None:
        """A client leaves."""
        if self.flights:
            self._abort(self.draw.choice(list(self.flights)))

    def _abort(self, id: str) -> None:
        flight = self.flights[id]
        second = flight.second
        (second if second is not None and flight.halfway else flight.first).abort(id)

    def _copy_ahead(self) -> None:
        """Somebody brings a prompt up, or writes it down, before it is asked for."""
        if not self.cast.asked:
            return
        prompt = self.draw.choice(self.cast.asked)
        engine = self.draw.choice(self.engines)
        keys, tenant = self.keys(engine, prompt, prompt.salt), self.label(prompt.salt)
        if not keys:
            return
        if self.draw.random() < 0.5:
            engine.node.tell(words.Pull(engine.name, keys, tenant))
        elif self.store is not None:
            engine.node.tell(words.Push(engine.name, keys, tenant=tenant))

    def _heard(self, now: float, event: Input, answer: Decision | None) -> None:
        for effect in self.ahead.handle(event, now, answer):
            self._order(effect)

    def _order(self, effect: Copy | Recall) -> None:
        node = next(n for n in self.nodes if n.publisher == effect.agent)
        match effect:
            case Copy(id, engine=engine, keys=keys, scope=scope):
                self.counts["ordered ahead"] += 1
                node.tell(words.Pull(engine.worker, keys, scope.owner, id))
                self._pulls[id] = node, effect
            case Recall(id):
                node.tell(words.Release(id))

    def _look_at_pulls(self) -> None:
        for effect in self.ahead.tick(self._now):
            self._order(effect)
        for id, (node, copy) in list(self._pulls.items()):
            if not node.agent.under_way(id):
                del self._pulls[id]
                for effect in self.ahead.handle(Copied(id, copy.size_bytes), self._now):
                    self._order(effect)

    def _restart_engine(self) -> None:
        """An engine's process ends, and a new one starts."""
        engine = self.draw.choice(self.engines)
        for id in engine.stop():
            self._over(id, engine, ok=False)
        engine.start()
        self._told(Reset(engine.publisher))

    def _restart_agent(self) -> None:
        """The same of an agent."""
        node = self.draw.choice(self.nodes)
        self._told(Reset(node.publisher))
        node.restart()

    def _lose(self) -> None:
        """A tier is empty."""
        node = self.draw.choice(self.nodes)
        tier = self.draw.choice(list(node.own))
        node.own[tier].clear()
        node.tell(words.Lose(tier))

    def _quota(self) -> None:
        """Another quota for a tenant, or none."""
        tenant = self.draw.choice(self.cast.tenants)
        size = self.draw.choice((None, 0, 50_000_000, 500_000_000))
        had, most = self.quotas.get(tenant.tag, math.inf), math.inf if size is None else size
        self.quotas[tenant.tag] = max(had, most)  # what is there when it falls may stay
        for node in self.nodes:
            node.tell(words.Quota(tenant.tag, size))

    def _rotate(self) -> None:
        """A tenant's epoch ends."""
        self.cast.rotate(self.draw.choice(self.cast.tenants))

    def _purge(self) -> None:
        """All of a tenant goes, while its requests and others' are under way."""
        tenant = self.draw.choice(self._moving() or self.cast.tenants)
        self._end_all(tenant)
        self.cast.rotate(tenant)
        self.purged[tenant.number] = self.judge.at
        forget = words.Forget(floors=(Floor(tenant.tag, before=tenant.epoch),))
        names: set[bytes] = set()
        for node in self.nodes:
            names |= node.agent.stored(forget)
            node.tell(forget)
        if self.store is None:
            return
        names |= {n for n, kept in self.store.held.items() if forget.floors[0].covers(kept.tenant)}
        for name in names:
            self.store.discard(name)
        for node in self.nodes:
            node.tell(words.Told(Tier.OBJECT, gone=tuple(names)))

    def _moving(self) -> list[Tenant]:
        """Whose state is on its way to a tier now."""
        saves = (move for node in self.nodes for move in node.moves.values())
        tags = {kept.tenant.partition(".")[0] for save in saves for kept in save.have.values()}
        return [tenant for tenant in self.cast.tenants if tenant.tag in tags]

    def _end_all(self, tenant: Tenant) -> None:
        theirs = [i for i, f in self.flights.items() if f.prompt.tenant == tenant.number]
        for id in theirs:
            self._abort(id)


def _salt_in(raw: bytes) -> str:
    return str(msgspec.json.decode(raw).get("cache_salt", ""))


_MIX: dict[Callable[[World], None], float] = {
    World._ask: 60.0,
    World._move: 25.0,
    World._copy_ahead: 4.0,
    World._forge: 4.0,
    World._crowd: 0.5,
    World._fail: 2.0,
    World._leave: 2.0,
    World._rotate: 1.0,
    World._purge: 0.5,
    World._quota: 0.3,
    World._restart_engine: 0.2,
    World._restart_agent: 0.2,
    World._lose: 0.1,
}
_KINDS, _WEIGHTS = list(_MIX), list(_MIX.values())
