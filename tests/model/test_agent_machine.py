"""The agent among tiers that fail, engines that die and a driver that is late; and what the
directory believes of it. The twin is the driver's own dicts of bytes."""

from __future__ import annotations

from agent_kit import FP, GRID, Driver, chain_layout, content, keys_of, window_layout
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvatlas.core.agent import Agent
from kvatlas.core.agent_values import (
    Ask,
    Cancel,
    Config,
    Copy,
    Detach,
    Effect,
    Evicted,
    Fetch,
    Forget,
    Found,
    Keep,
    Load,
    Lose,
    Pull,
    Push,
    Quota,
    Release,
    Resize,
    Retain,
    Save,
    Told,
)
from kvatlas.core.directory import Directory
from kvatlas.core.forgetting import Floor, payer_of
from kvatlas.core.keys import Keyring
from kvatlas.core.policy.lru import Lru
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.retention import Retention, Terms
from kvatlas.core.units import Part, Unit, name_of

OWN = (Tier.DRAM, Tier.DISK)
PROMPTS = st.integers(0, 4)
LENGTHS = st.integers(1, 6)
WORKERS = st.sampled_from(["a", "b"])
RARE = st.sampled_from([False, False, False, True])  # what wipes out more than it tries
AGENT = Publisher("node")
TAG = "a" * 24
OWNERS = (f"{TAG}.0", f"{TAG}.1")


class Node(RuleBasedStateMachine):
    @initialize(
        windows=st.booleans(),
        dram=st.sampled_from([250, 700, 2000]),
        disk=st.sampled_from([None, 300, 3000]),
        exclusive=st.booleans(),
        through=st.booleans(),
        hold=st.booleans(),
    )
    def begin(  # noqa: PLR0917
        self,
        windows: bool,
        dram: int,
        disk: int | None,
        exclusive: bool,
        through: bool,
        hold: bool,
    ) -> None:
        self.config = Config(
            hit_share=1.0,
            exclusive=exclusive,
            write_through=(Tier.DISK, Tier.OBJECT) if through else (),
            saves_max=2,
            queue_max=3,
            copies_max=2,
            loads_max=3,
            relays={"another": 5e9} if exclusive else {},
        )
        self.layout = window_layout() if windows else chain_layout()
        self.node = Driver(dram=dram, disk=disk, config=self.config, layout=self.layout, hold=hold)
        self.node.fail = self._verdict
        self.bad: dict[bytes, str] = {}
        self.next_verdict = ""
        self.lost: set[bytes] = set()  # names that a fault took away
        self.below = 0  # epochs of `OWNERS` that were forgotten
        self.clean: set[str] = set()  # tenants that were forgotten and not heard of since
        self.fetches = 0
        self.waiting: set[str] = set()
        self.restart_directory()
        for worker in ("a", "b"):
            self.node.attach(worker)

    def _verdict(self, effect: Effect, unit: Unit) -> str:
        verdict, self.next_verdict = self.next_verdict, ""
        return self.bad.pop(unit.name, "") or verdict

    def restart_directory(self) -> None:
        ring = Keyring(b"a secret for the tests")
        self.directory = Directory(ring)
        engines = tuple(Publisher(worker) for worker in ("a", "b"))
        for engine in engines:
            self.directory.register(engine, self.layout, FP)
        self.directory.settle(AGENT, engines, "store")
        self.node.said.clear()
        self.told = 0

    def keys(self, prompt: int, length: int) -> tuple[bytes, ...]:
        return keys_of(prompt + 1, length, shared=2)

    # -- what happens ---------------------------------------------------------------------------

    @rule(
        prompt=PROMPTS,
        length=LENGTHS,
        points=st.sets(LENGTHS, max_size=3),
        worker=WORKERS,
        tenant=st.sampled_from(["t", "u", *OWNERS]),
    )
    def fill(self, prompt: int, length: int, points: set[int], worker: str, tenant: str) -> None:
        if worker in self.node.engines:
            which = sorted(p for p in points if p <= length)
            self.clean.discard(tenant)
            before = len(self.node.effects)
            self.node.fill(self.keys(prompt, length), *which, worker=worker, tenant=tenant)
            mine = [e for e in self.node.effects[before:] if isinstance(e, Save)]
            assert not (mine and self.refused(tenant))

    @rule(worker=WORKERS)
    def crowd(self, worker: str) -> None:
        """More than fits comes in, while loads go on."""
        for prompt in range(3):
            self.fetch(prompt, 6, 0, worker)
        for prompt in range(5) if worker in self.node.engines else ():
            self.fill(prompt, 6, {3, 6}, worker, "t")
            for op in sorted(self.node.open):
                effect = self.node.open.get(op)
                dead = isinstance(effect, Save) and effect.worker not in self.node.engines
                if effect is not None and not dead and not isinstance(effect, Load):
                    self.node.end(op)

    @rule(prompt=PROMPTS, length=LENGTHS, local=st.integers(0, 5), worker=WORKERS)
    def fetch(self, prompt: int, length: int, local: int, worker: str) -> None:
        keys = self.keys(prompt, length)
        ask = Ask(f"q{self.fetches}", worker, keys, min(local, length) * GRID, length * GRID + 1)
        before = self.node.agent.digest()
        offer = self.node.agent.offer(ask)
        assert self.node.agent.digest() == before
        if offer.tokens <= ask.local_tokens or worker not in self.node.engines:
            assert offer.tokens == ask.local_tokens
            return
        for source in offer.sources:
            held = self.node.tiers[source.tier]
            assert all(unit.name in held for unit in source.units), "offered, and not there"
        self.fetches += 1
        self.waiting.add(ask.request)
        self.node.do(Fetch(ask, offer.tokens))

    @rule(which=st.integers(0, 9), error=st.sampled_from(["", "", "", "broken"]))
    def end(self, which: int, error: str) -> None:
        if self.node.open:
            op = sorted(self.node.open)[which % len(self.node.open)]
            effect = self.node.open[op]
            if isinstance(effect, Save | Load) and effect.worker not in self.node.engines:
                del self.node.open[op]
            else:
                self.node.end(op, error)

    @rule(error=st.sampled_from(["", "", "broken"]))
    def end_all(self, error: str) -> None:
        for op in sorted(self.node.open):
            effect = self.node.open.get(op)
            dead = isinstance(effect, Save | Load) and effect.worker not in self.node.engines
            if effect is not None and not dead:
                self.node.end(op, error)

    @rule(verdict=st.sampled_from(["failed", "damaged"]))
    def next_unit_fails(self, verdict: str) -> None:
        self.next_verdict = verdict

    @rule(which=st.integers(0, 9), verdict=st.sampled_from(["failed", "damaged"]))
    def one_unit_fails(self, which: int, verdict: str) -> None:
        units = [
            unit
            for effect in self.node.open.values()
            for unit in (
                effect.units
                if isinstance(effect, Save)
                else effect.source.units
                if isinstance(effect, Copy)
                else [u for s in effect.sources for u in s.units]
                if isinstance(effect, Load)
                else ()
            )
        ]
        if units:
            self.bad[units[which % len(units)].name] = verdict

    @rule(which=st.integers(0, 50), tier=st.sampled_from(OWN), rare=RARE)
    def rot(self, which: int, tier: Tier, rare: bool) -> None:
        if not rare:
            return
        held = self.node.tiers[tier]
        if held:
            name = sorted(held)[which % len(held)]
            held[name] = b"rotten"

    @rule(seconds=st.sampled_from([0.5, 5.0, 40.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.node.at(self.node.now + seconds)
        # A driver keeps what was given up from writing.
        known = {op.number for op in self.node.agent._node.operations}
        for op in set(self.node.open) - known:
            del self.node.open[op]
        for operation in self.node.agent._node.operations:
            assert operation.until > self.node.now, "past its time, and nobody stopped it"

    @rule(request=st.integers(0, 9), worker=WORKERS)
    def cancel(self, request: int, worker: str) -> None:
        self.node.do(Cancel(worker, f"q{request}"))

    @rule(worker=WORKERS, rare=RARE)
    def engine_dies(self, worker: str, rare: bool) -> None:
        if not rare:
            return
        self._reads_nothing(worker)
        self.node.do(Detach(worker))
        self.node.engines.pop(worker, None)
        self.waiting.clear()  # those of the other one are checked at the end

    def _reads_nothing(self, worker: str) -> None:
        """Its process is gone: what it read or filled is nobody's any more."""
        for op, effect in list(self.node.open.items()):
            if isinstance(effect, Save | Load) and effect.worker == worker:
                del self.node.open[op]

    @rule(worker=WORKERS)
    def engine_starts(self, worker: str) -> None:
        self._reads_nothing(worker)
        self.node.attach(worker)
        self.waiting.clear()  # a new process waits for nothing

    @rule(prompt=PROMPTS, length=LENGTHS, worker=WORKERS)
    def evicted(self, prompt: int, length: int, worker: str) -> None:
        keys = self.keys(prompt, length)
        self.node.do(Evicted(worker, keys[-1:]))
        for part in Part:
            self.node.engines.get(worker, {}).pop(name_of(keys[-1], part), None)

    @rule(tier=st.sampled_from(OWN), rare=RARE)
    def lose(self, tier: Tier, rare: bool) -> None:
        if not rare:
            return
        self.lost |= set(self.node.tiers[tier])
        self.node.tiers[tier].clear()
        self.node.do(Lose(tier))

    @rule(tenant=st.sampled_from(["t", "u"]), size=st.sampled_from([None, 200, 500]), rare=RARE)
    def quota(self, tenant: str, size: int | None, rare: bool) -> None:
        if not rare:
            return
        self.node.do(Quota(tenant, size))

    @rule(
        terms=st.dictionaries(
            st.sampled_from(["t", TAG, ""]),
            st.builds(Terms, st.sampled_from([0.0, 3.0, 40.0]), st.sampled_from(Retention)),
        ),
        rare=RARE,
    )
    def retain(self, terms: dict[str, Terms], rare: bool) -> None:
        if rare:
            self.node.do(Retain(terms))

    @invariant()
    def nothing_is_found_after_its_life(self) -> None:
        now = self.node.agent._node.now
        for ledger in self.node.agent._node.inventory.ledgers.values():
            for entry in ledger.entries():
                assert entry.expires_at > now
                ttl_s = ledger.limits.terms.get(payer_of(entry.tenant), Terms()).ttl_s
                assert not ttl_s or entry.since + ttl_s > now

    @rule(tenant=st.sampled_from(["t", "u"]), rare=RARE)
    def forget(self, tenant: str, rare: bool) -> None:
        if not rare:
            return
        self.node.do(Forget(tenant))
        self.clean.add(tenant)
        for ledger in self.node.agent._node.inventory.ledgers.values():
            assert all(entry.tenant != tenant for entry in ledger.entries())

    def refused(self, owner: str) -> bool:
        """By what was ordered, not by what the agent says of it."""
        return owner in OWNERS and OWNERS.index(owner) < self.below

    @rule(epoch=st.integers(0, 2), rare=RARE)
    def floor(self, epoch: int, rare: bool) -> None:
        if rare:
            self.below = max(self.below, epoch)
            self.node.do(Forget(floors=(Floor(TAG, epoch),)))

    @invariant()
    def nothing_forgotten_is_kept_or_wanted(self) -> None:
        """Whatever came in, ended or was tried again since."""
        agent = self.node.agent
        for ledger in agent._node.inventory.ledgers.values():
            assert not any(self.refused(entry.tenant) for entry in ledger.entries())
        assert not any(self.refused(wish.tenant) for wish in agent._saves.wishes())
        assert not any(self.refused(later.tenant) for later in agent._ends.waiting())
        assert not any(map(self.refused, agent._node.inventory.owners.values()))
        for operation in agent._node.operations:
            assert operation.void or not self.refused(operation.tenant)

    @rule(prompt=PROMPTS, length=LENGTHS, what=st.sampled_from(["pull", "push", "keep"]))
    def ahead(self, prompt: int, length: int, what: str) -> None:
        keys = self.keys(prompt, length)
        match what:
            case "pull":
                self.node.do(Pull("a", keys))
            case "push":
                self.node.do(Push("a", keys))
            case _:
                self.node.do(Keep("somebody", keys, self.node.now + 20.0))

    @rule()
    def release(self) -> None:
        self.node.do(Release("somebody"))

    @rule(size=st.sampled_from([0, 250, 1500]), rare=RARE)
    def resize(self, size: int, rare: bool) -> None:
        if not rare:
            return
        self.node.do(Resize(Tier.DRAM, size))

    @rule()
    def snapshot(self) -> None:
        old = self.node.agent
        policies = {tier: Lru() for tier in OWN}
        self.node.agent = Agent.restore(old.snapshot(), policies, self.config)
        assert self.node.agent.digest() == old.digest()

    @rule(rare=RARE)
    def agent_restarts(self, rare: bool) -> None:
        """Only the disk's catalogue survives; what was under way is fenced."""
        if not rare:
            return
        old = self.node
        ledgers = old.agent._node.inventory.ledgers
        capacity = {t: ledgers[t].limits.capacity_bytes if t in ledgers else None for t in OWN}
        kept = {
            entry.key: (entry, entry.tenant)
            for entry in (ledgers[Tier.DISK].entries() if Tier.DISK in ledgers else ())
        }
        new = Driver(
            dram=capacity[Tier.DRAM],
            disk=capacity[Tier.DISK],
            config=self.config,
            layout=self.layout,
            hold=old.hold,
        )
        new.now, new.fail, new.engines = old.now, old.fail, {}
        disk = {name: data for name, data in old.tiers[Tier.DISK].items() if name in kept}
        new.tiers[Tier.DISK], new.tiers[Tier.OBJECT] = disk, old.tiers[Tier.OBJECT]
        new.records = old.records
        self.node = new
        self.waiting.clear()
        for worker in old.engines:
            new.attach(worker)
        self.directory.reset(AGENT)
        self.told = 0
        for tenant in ("", "t", "u", *OWNERS):
            units = tuple(
                Unit(name[:-1], Part(name[-1]), entry.facts.index, entry.facts.size_bytes)
                for name, (entry, whose) in kept.items()
                if whose == tenant
            )
            sealed = tuple(new.records[Tier.DISK])
            if Tier.DISK in ledgers:
                new.do(Found(Tier.DISK, units, sealed, tenant))
        new.do(Forget(floors=(Floor(TAG, self.below),)))  # as each new life is told

        stored = (
            Unit(n[:-1], Part(n[-1]), int.from_bytes(n[8:16]), 100) for n in old.tiers[Tier.OBJECT]
        )
        usable = (u for u in stored if not u.part or u.key in old.records[Tier.OBJECT])
        # What was never announced (its source was deleted meanwhile) only the agent would know.
        usable = (u for u in usable if u.name in self.directory.shelves.names(AGENT)[Tier.OBJECT])
        new.do(Told(Tier.OBJECT, tuple(usable)))

    @rule(rare=RARE)
    def directory_restarts(self, rare: bool) -> None:
        if not rare:
            return
        self.restart_directory()
        self.node.said.extend(self.node.agent.held())

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "node"):
            return
        agent = self.node.agent
        for tier, ledger in agent._node.inventory.ledgers.items():
            usage = ledger.usage()
            entries = {e.key: e for e in ledger._books.entries.values()}
            assert usage.committed_bytes == sum(e.facts.size_bytes for e in entries.values())
            assert sum(ledger.tenants().values()) == usage.committed_bytes + usage.reserved_bytes
            rooms = {r.key for r in ledger._reservations.values()}
            assert set(self.node.tiers[tier]) <= set(entries) | rooms, "bytes of nobody"
            assert agent._node.inventory.sealed[tier] <= {e.key for e in ledger.entries()}
        for held in self.node.engines.values():
            assert all(data == content(name) for name, data in held.items()), "wrong bytes"

    @invariant()
    def what_is_read_stays(self) -> None:
        if not hasattr(self, "node"):
            return
        for effect in self.node.open.values():
            for source in effect.sources if isinstance(effect, Load) else ():
                held = self.node.tiers[source.tier]
                names = {unit.name for unit in source.units} - self.lost
                assert source.tier not in OWN or names <= set(held), "taken away in mid-read"
        for ledger in self.node.agent._node.inventory.ledgers.values():
            assert not {e.tenant for e in ledger.entries()} & self.clean, "it came back"

    @invariant()
    def directory_never_promises_more(self) -> None:
        if not hasattr(self, "node"):
            return
        events = self.node.said[self.told :]
        self.told = len(self.node.said)
        applied = self.directory.apply(AGENT, events)
        assert not applied.undeclared + applied.refused
        for prompt in range(5):
            keys = self.keys(prompt, 6)
            for resume in self.directory.peek(keys, FP):
                assert resume.tokens == self._deepest(keys), resume

    def _deepest(self, keys: tuple[bytes, ...]) -> int:
        """By what the agent may read: the slow way."""
        inventory, order = self.node.agent._node.inventory, (*OWN, Tier.OBJECT)
        deepest = 0
        for count in range(1, len(keys) + 1):
            if inventory.place(name_of(keys[count - 1], Part.BODY), order) is None:
                break
            point = name_of(keys[count - 1], Part.POINT)
            windows = len(self.layout.groups) > 1
            if not windows or inventory.place(point, order) is not None:
                deepest = count * GRID
        return deepest

    def teardown(self) -> None:
        """Let everything come to its end: nothing may be left over."""
        if not hasattr(self, "node"):
            return
        node = self.node
        node.do(Release("somebody"))
        for _ in range(200):
            for op in sorted(node.open):
                effect = node.open[op]
                if isinstance(effect, Save | Load) and effect.worker not in node.engines:
                    del node.open[op]
                else:
                    node.end(op)
            if not node.agent.busy:
                break
            node.at(node.now + 10.0)
        assert not node.agent.busy
        assert {r for r in self.waiting if r not in node.ready} == set()
        for tier, ledger in node.agent._node.inventory.ledgers.items():
            usage = ledger.usage()
            assert not usage.reserved_bytes + usage.leases + usage.pins + usage.reservations
            assert not usage.leaving_bytes + usage.doomed_bytes
            assert set(node.tiers[tier]) == {e.key for e in ledger.entries()}
            assert usage.committed_bytes <= ledger.limits.capacity_bytes
        assert not any(node.agent._node.paths.reading.values())
        assert not any(node.agent._node.paths.writing.values())


TestAgent = Node.TestCase
TestAgent.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
