"""Copies ahead of need, whatever happens in whatever order: bounded, of one scope, and ended."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvatlas.core.ahead import Ahead
from kvatlas.core.ahead_copies import Copied, Copy, Effect, Params, Recall
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
    Unsettle,
)
from kvatlas.core.events import UnitsGone, UnitsHeld
from kvatlas.core.keys import PUBLIC, Keyring, Scope, salt_scope
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.router import Decision, Router
from kvatlas.core.router import Params as RouterParams
from kvatlas.workload.models import load_layout

LAYOUT = load_layout("qwen3-32b", engine="vllm")
GRID = LAYOUT.grid_tokens
BLOCKS = 200
ENGINES = [Publisher(f"e{i}") for i in range(4)]
AGENTS = [Publisher(f"a{i}") for i in range(3)]
HOMES = {AGENTS[0]: ENGINES[:2], AGENTS[1]: ENGINES[2:3], AGENTS[2]: ENGINES[3:]}
SCOPES = (PUBLIC, salt_scope("t"))


def prompt(prefix: int, turn: int) -> bytes:
    """Each turn goes on from the one before it."""
    count = BLOCKS * GRID + 40 * (turn + 1)
    return b"".join((prefix * 100_000 + i).to_bytes(4, "little") for i in range(count))


PROMPTS = {(p, t): prompt(p, t) for p in range(3) for t in range(4)}


class CopiesAhead(RuleBasedStateMachine):
    @initialize(
        replicate=st.booleans(),
        push=st.booleans(),
        most=st.integers(1, 3),
        share=st.sampled_from((0.1, 1.0)),
        horizon_s=st.sampled_from((1.0, 60.0)),
    )
    def begin(self, replicate: bool, push: bool, most: int, share: float, horizon_s: float) -> None:
        self.params = Params(
            replicate=replicate,
            push=push,
            copies_max=most,
            bandwidth_share=share,
            horizon_s=horizon_s,
        )
        ring = Keyring(b"s" * 32)
        router = Router(RouterParams(prefill_tokens_per_s=100.0))
        self.dispatcher = Dispatcher(Directory(ring), router, ring)
        self.core = Ahead(self.params, self.dispatcher)
        self.now = 0.0
        self.open: dict[str, Copy] = {}
        self.ids = 0
        self.asked: dict[str, list[Publisher]] = {}
        self.sent: dict[str, Publisher] = {}
        self.dispatcher.listen(self.heard)
        for engine in ENGINES:
            self.tell(Join(engine, LAYOUT, b"f" * 32))
        self.chains = {
            (p, scope): self.dispatcher.keys(ENGINES[0], PROMPTS[p, 3], scope)
            for p in range(3)
            for scope in SCOPES
        }
        self.all = tuple(key for chain in self.chains.values() for key in chain)
        for agent in AGENTS:
            self.tell(Settle(agent, tuple(HOMES[agent])))
        self.dispatcher.apply(AGENTS[0], [UnitsHeld(Tier.DRAM, self.all, ())])

    def heard(self, now: float, event: Input, answer: Decision | None) -> None:
        self.take(self.core.handle(event, now, answer))

    def tell(self, event: Input) -> Decision | None:
        return self.dispatcher.handle(event, self.now)

    def take(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Recall):
                assert self.open.pop(effect.id).agent == effect.agent
                continue
            self.ordered(effect)
            self.open[effect.id] = effect

    def ordered(self, order: Copy) -> None:
        """What was just ordered can be had, pays, and is of one prompt in one scope."""
        blocks, scope = len(order.keys), order.scope
        whole = [self.dispatcher.keys(order.engine, p, scope) for p in PROMPTS.values()]
        assert any(list(order.keys) == chain[:blocks] for chain in whole)
        assert order.agent != order.source
        assert self.dispatcher.directory.lends(order.source, order.keys, b"f" * 32) == blocks
        assert order.engine in HOMES[order.agent]
        assert order.expected_s > 0
        assert order.until > self.now
        assert self.params.replicate if order.why == "replicate" else self.params.push

    # -- what happens ---------------------------------------------------------------------------

    @rule(
        prefix=st.integers(0, 2),
        turn=st.integers(0, 3),
        scope=st.sampled_from(SCOPES),
        count=st.integers(1, 5),
        send=st.booleans(),
    )
    def ask(self, prefix: int, turn: int, scope: Scope, count: int, send: bool) -> None:
        for _ in range(count):
            self.ids += 1
            among = tuple((e, "") for e in ENGINES)
            decision = self.tell(Question(f"r{self.ids}", among, PROMPTS[prefix, turn], scope))
            assert decision is not None
            self.asked[decision.id] = [plan.publisher for plan in decision.plans]
            if send:
                self.sent[decision.id] = decision.plans[0].publisher
                self.tell(Sent(decision.id, self.sent[decision.id]))

    @rule(at=st.integers(0, 50), choice=st.integers(0, 3))
    def send(self, at: int, choice: int) -> None:
        for id in list(self.asked)[at : at + 1]:
            plans = self.asked[id]
            self.sent[id] = plans[choice % len(plans)]
            self.tell(Sent(id, self.sent[id]))

    @rule(
        count=st.integers(1, 5),
        ok=st.sampled_from((True, True, False)),
        ttft_s=st.sampled_from((-1.0, 0.1, 30.0)),
    )
    def finish(self, count: int, ok: bool, ttft_s: float) -> None:
        for id in list(self.asked)[:count]:
            publisher = self.sent.pop(id, self.asked.pop(id)[0])
            if ok:
                self.tell(FirstToken(id))
            self.tell(Finished(id, publisher, ok, -1, ttft_s))

    @rule(
        agent=st.sampled_from(AGENTS), prefix=st.integers(0, 2), scope=st.sampled_from(SCOPES),
        gone=st.sampled_from((False, False, True)),
    )  # fmt: skip
    def announce(self, agent: Publisher, prefix: int, scope: Scope, gone: bool) -> None:
        kind = UnitsGone if gone else UnitsHeld
        keys = tuple(self.chains[prefix, scope])
        if agent in self.dispatcher.directory.shelves:
            self.dispatcher.apply(agent, [kind(Tier.DRAM, keys, ())])

    @rule(prefix=st.integers(0, 1), scope=st.sampled_from(SCOPES), turns=st.integers(1, 4))
    def chat(self, prefix: int, scope: Scope, turns: int) -> None:
        """A chat whose home is busy with others each time that it comes back."""
        for turn in range(turns):
            for asked, there, ends in ((prefix, turn, True), (2, turn, False)):
                self.ids += 1
                id, among = f"c{self.ids}", tuple((e, "") for e in ENGINES)
                self.tell(Question(id, among, PROMPTS[asked, there], scope))
                self.tell(Sent(id, ENGINES[0]))
                if ends:
                    self.tell(Finished(id, ENGINES[0], True, -1, 0.1))
                else:
                    self.asked[id] = [ENGINES[0]]

    @rule(at=st.integers(0, 3), error=st.sampled_from(("", "", "", "it is down")))
    def answer(self, at: int, error: str) -> None:
        for id in list(self.open)[at : at + 1]:
            order = self.open.pop(id)
            told = Copied(id, 0 if error else order.size_bytes, error)
            self.take(self.core.handle(told, self.now))

    @rule(agent=st.sampled_from(AGENTS), restart=st.booleans())
    def lose(self, agent: Publisher, restart: bool) -> None:
        """What an agent said is void; it says it again, or is no longer configured."""
        if agent in self.dispatcher.directory.shelves:
            self.tell(Reset(agent) if restart else Unsettle(agent))
        assert not any(order.agent == agent for order in self.open.values())

    @rule(agent=st.sampled_from(AGENTS))
    def settle(self, agent: Publisher) -> None:
        self.tell(Settle(agent, tuple(HOMES[agent])))
        self.dispatcher.apply(agent, [UnitsHeld(Tier.DRAM, self.all, ())])

    @rule(seconds=st.sampled_from((0.01, 0.1, 0.5, 3.0, 400.0)))
    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= end:
            assert due >= self.now
            self.now = due
            self.take(self.core.tick(due))
        self.now = end

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def each_is_in_one_place(self) -> None:
        tallies = self.core.tallies.values()
        assert len(self.open) == self.core.under_way <= self.params.copies_max
        ended = sum(tally.ended.total() for tally in tallies)
        assert sum(tally.ordered for tally in tallies) == ended + self.core.under_way
        arrived = sum(tally.ended["arrived"] for tally in tallies)
        settled = sum(tally.used + tally.unused for tally in tallies)
        assert arrived == settled + self.core.watched

    @invariant()
    def what_is_remembered_is_of_what_was_asked(self) -> None:
        assert self.core.remembered() <= 5 * self.ids + len(ENGINES) + 2 * len(self.open) + 1000

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.wait(1e6)
        assert not self.open
        assert not self.core.watched
        assert self.core.next_deadline() is None


TestCopiesAhead = CopiesAhead.TestCase
