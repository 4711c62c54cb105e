"""One request from its block keys to its end: directory, router, and what engines keep of promises.

The service and the simulator drive the same `Dispatcher`, each in its own time. All that reaches
it is an `Input`; with a ``tap`` each one is also handed out as it comes in, and the same inputs
given to `handle` of a fresh dispatcher make the same decisions again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from kvatlas.core import admission
from kvatlas.core.admission import Rules
from kvatlas.core.claims import Applied
from kvatlas.core.directory import Directory
from kvatlas.core.events import Event
from kvatlas.core.keys import PUBLIC, Keyring, Scope
from kvatlas.core.layout import Layout
from kvatlas.core.load_ways import StoreWay
from kvatlas.core.promises import HitGap, PredictionError
from kvatlas.core.records import Publisher, Resume
from kvatlas.core.router import Ask, Decision, Plan, Router
from kvatlas.core.tenancy import Chain, Sharing


class Join(msgspec.Struct, frozen=True, tag=True):
    """A publisher can be asked from now on; again with another fingerprint: the old life goes."""

    publisher: Publisher
    layout: Layout
    fingerprint: bytes


class Leave(msgspec.Struct, frozen=True, tag=True):
    """No longer configured; its requests in flight end by themselves."""

    publisher: Publisher


class Settle(msgspec.Struct, frozen=True, tag=True):
    """The agent of a node carries its engines further from now on; an agent that was known loses
    what it had said. ``store`` names the object tier that it can read, "" for none; ``ways``: over
    whose cards, where there are several, its own among them."""

    agent: Publisher
    engines: tuple[Publisher, ...]
    store: str = ""
    ways: tuple[StoreWay, ...] = ()


class Unsettle(msgspec.Struct, frozen=True, tag=True):
    """No longer configured."""

    agent: Publisher


class SetUp(msgspec.Struct, frozen=True, tag=True):
    """Health as polled."""

    publisher: Publisher
    up: bool


class SetLoad(msgspec.Struct, frozen=True, tag=True):
    """Requests running and waiting, as the engine itself reports them."""

    publisher: Publisher
    requests: int


class Apply(msgspec.Struct, frozen=True, tag=True):
    """KV events of one publisher, in order."""

    publisher: Publisher
    events: tuple[Event, ...]


class Reset(msgspec.Struct, frozen=True, tag=True):
    """A new epoch of a publisher, or doubt that cannot be repaired."""

    publisher: Publisher


class Believe(msgspec.Struct, frozen=True, tag=True):
    """Whether a publisher's claims speak of the present."""

    publisher: Publisher
    believed: bool


class Sweep(msgspec.Struct, frozen=True, tag=True):
    """Time to clear up to ``budget`` keys of lives that ended."""

    budget: int


class Question(msgspec.Struct, frozen=True, tag=True):
    """A request to be routed among publishers, each with the adapter that it would use.

    ``tokens`` are uint32 ids, little endian; ``unkeyed`` says why there are none, and
    ``prompt_tokens`` then how many there would be (-1 where that is not known either).
    ``scope``: that of the salt which the engine hashes into its blocks. ``below``: who shares it
    in the lower tiers of agents, where they know better; None: the same.
    ``ttft_slo_s``: within what time its client wants the first token; ``admitted``: it is part of
    a request that was let in already.
    """

    id: str
    among: tuple[tuple[Publisher, str], ...]
    tokens: bytes = b""
    scope: Scope = PUBLIC
    unkeyed: str = ""
    prompt_tokens: int = -1
    ttft_slo_s: float = math.inf
    admitted: bool = False
    below: Sharing | None = None

    def sharing(self) -> Sharing:
        """Who shares it in lower tiers."""
        return self.below or Sharing(self.scope)


class Again(msgspec.Struct, frozen=True, tag=True):
    """All that were planned for a request failed: who is left of those that it may go to?"""

    id: str


class Sent(msgspec.Struct, frozen=True, tag=True):
    """The request goes to ``publisher`` now."""

    id: str
    publisher: Publisher


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The answer began; ``ttft_s`` after its request came, -1 where the answer does not show it."""

    id: str
    ttft_s: float = -1.0


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The request is over on ``publisher``; figures are -1 where they are not known."""

    id: str
    publisher: Publisher
    ok: bool
    cached_tokens: int = -1
    ttft_s: float = -1.0


Input = (
    Join
    | Leave
    | Settle
    | Unsettle
    | SetUp
    | SetLoad
    | Apply
    | Reset
    | Believe
    | Sweep
    | Question
    | Again
    | Sent
    | FirstToken
    | Finished
)


#: Called after each input with its time, and with the answer to a question.
Tap = Callable[[float, Input, Decision | None], None]


class _Pending(msgspec.Struct):
    ask: Ask
    among: tuple[tuple[Publisher, str], ...]
    plans: dict[Publisher, Plan]
    promised: dict[Publisher, int]  # by events alone, where less was counted
    sent_to: Publisher | None = None
    timed: bool = False


class Dispatcher:
    """Owned by one thread. ``now`` must not decrease. It is what the engine feed applies to."""

    def __init__(
        self,
        directory: Directory,
        router: Router,
        keyring: Keyring,
        *,
        rules: Rules | None = None,
        tap: Tap | None = None,
    ) -> None:
        self.directory = directory
        self.router = router
        self._rules = rules or Rules()
        self.keyring = keyring
        self._taps: list[Tap] = [] if tap is None else [tap]
        self._now = 0.0
        self._layouts: dict[Publisher, tuple[Layout, bytes]] = {}
        self._quiet: set[Publisher] = set()  # who does not announce all of its windows
        self._pending: dict[str, _Pending] = {}
        self.gaps: dict[Publisher, HitGap] = {}
        self.errors: dict[Publisher, PredictionError] = {}
        self._error = PredictionError()  # of all engines: for one that is new
        self.decisions = 0

    def listen(self, tap: Tap) -> None:
        """One more ``tap``."""
        self._taps.append(tap)

    def handle(self, event: Input, now: float) -> Decision | None:
        """Take one input in; `Question` and `Again` are answered, everything else is noted."""
        self._now = now
        match event:
            case Apply():
                self.apply(event.publisher, event.events)
                return None
            case Reset():
                self.reset(event.publisher)
                return None
            case Believe():
                self.believe(event.publisher, event.believed)
                return None
        answer: Decision | None = None
        match event:
            case Question():
                answer = self._decide(event)
            case Again():
                answer = self._decide_again(event.id)
            case Sent():
                self._sent(event)
            case FirstToken():
                self._first_token(event)
            case Finished():
                self._finished(event)
            case SetUp():
                self.router.set_up(event.publisher, event.up)
            case SetLoad():
                self.router.set_load(event.publisher, event.requests)
            case Join():
                self._join(event)
            case Leave():
                self._leave(event.publisher)
            case Settle(agent, engines, store, ways):
                self.directory.settle(agent, engines, store)
                self.router.ways.settle(agent, engines, ways)
            case Unsettle(agent):
                self.directory.shelves.remove(agent)
                self.router.ways.remove(agent)
            case Sweep():
                self.directory.sweep(event.budget)
        self._note(event, answer)
        return answer

    def _note(self, event: Input, answer: Decision | None = None) -> None:
        for tap in self._taps:
            tap(self._now, event, answer)

    # -- the feed's side ------------------------------------------------------------------------

    def apply(self, publisher: Publisher, events: Iterable[Event]) -> Applied:
        """As `Directory.apply`."""
        events = tuple(events)
        if self._taps:
            self._note(Apply(publisher, events))
        return self.directory.apply(publisher, events)

    def reset(self, publisher: Publisher) -> None:
        """As `Directory.reset`."""
        self._note(Reset(publisher))
        self.directory.reset(publisher)

    def believe(self, publisher: Publisher, believed: bool) -> None:
        """As `Directory.believe`."""
        self._note(Believe(publisher, believed))
        self.directory.believe(publisher, believed)

    # -- publishers -----------------------------------------------------------------------------

    def _join(self, event: Join) -> None:
        publisher, layout, fingerprint = event.publisher, event.layout, event.fingerprint
        known = self._layouts.get(publisher)
        if known is not None and known[1] != fingerprint:
            self._leave(publisher)
        self.directory.register(publisher, layout, fingerprint)
        self.router.add(publisher, layout, fingerprint)
        self._layouts[publisher] = layout, fingerprint
        if not layout.announced():
            self._quiet.add(publisher)
        self.gaps.setdefault(publisher, HitGap())
        self.errors.setdefault(publisher, PredictionError())

    def _leave(self, publisher: Publisher) -> None:
        if self._layouts.pop(publisher, None) is not None:
            self.directory.unregister(publisher)
            self.router.remove(publisher)
            self.gaps.pop(publisher, None)
            self.errors.pop(publisher, None)
            self._quiet.discard(publisher)

    # -- one request ----------------------------------------------------------------------------

    def keys(
        self, publisher: Publisher, tokens: bytes, scope: Scope = PUBLIC, adapter: str = ""
    ) -> list[bytes]:
        """Keys of the prompt's blocks that matter to this engine (`Layout.asked_blocks`).
        ``tokens`` are uint32 ids, little endian. Raises KeyError for one that did not join."""
        layout, fingerprint = self._layouts[publisher]
        root = self.keyring.root(fingerprint, scope, adapter)
        size_bytes = layout.asked_blocks(len(tokens) // 4) * layout.grid_tokens * 4
        return self.keyring.chain(root, memoryview(tokens)[:size_bytes], layout.grid_tokens)

    def keys_below(
        self, publisher: Publisher, tokens: bytes, sharing: Sharing, adapter: str = ""
    ) -> list[bytes]:
        """The same blocks' keys as agents make them."""
        layout, fingerprint = self._layouts[publisher]
        size_bytes = layout.asked_blocks(len(tokens) // 4) * layout.grid_tokens * 4
        chain = Chain(self.keyring, fingerprint, layout.grid_tokens, sharing, adapter)
        return chain.extend(memoryview(tokens)[:size_bytes])

    def _decide(self, event: Question) -> Decision:
        ask, promised = self._discounted(self._ask(event))
        if ask.id in self._pending:  # equal ids from two clients must not share books
            ask = msgspec.structs.replace(ask, id=self._free_id(ask.id))
        among = [publisher for publisher, _ in event.among]
        decision = self.router.peek(ask, self._now, among=among)
        if not event.admitted:
            slo_s, in_flight = event.ttft_slo_s, len(self._pending)
            decision = admission.admitted(decision, slo_s, in_flight, self._rules, self._lateness)
            if decision.refusal is not None:
                return decision
        plans = {plan.publisher: plan for plan in decision.plans}
        self._pending[ask.id] = _Pending(ask, event.among, plans, promised)
        self.decisions += 1
        return decision

    def in_time_first(self, decision: Decision) -> Decision:
        """A decision whose plans have other prices now: those that make its objective first."""
        return admission.in_time_first(decision, self._lateness)

    def _lateness(self, publisher: Publisher) -> float | None:
        own = self.errors[publisher].lateness()
        return self._error.lateness() if own is None else own

    def _decide_again(self, id: str) -> Decision | None:
        pending = self._pending.get(id)
        if pending is None:
            return None
        rest = [publisher for publisher, _ in pending.among if publisher not in pending.plans]
        decision = self.router.peek(pending.ask, self._now, among=rest)
        pending.plans |= {plan.publisher: plan for plan in decision.plans}
        return decision

    def left(self, id: str) -> bool:
        """Might `Again` find somebody for a pending request?"""
        pending = self._pending.get(id)
        return pending is not None and len(pending.plans) < len(pending.among)

    def _free_id(self, id: str) -> str:
        while id in self._pending:
            id = f"{id}#{self.decisions}"
        return id

    def _ask(self, event: Question) -> Ask:
        if event.unkeyed:
            return Ask(event.id, event.prompt_tokens, {}, (), event.unkeyed)
        count = len(event.tokens) // 4
        keys: dict[bytes, list[bytes]] = {}
        below: dict[bytes, list[bytes]] = {}
        resumes: list[Resume] = []
        two = event.below is not None and bool(self.directory.shelves)
        layouts = self._layouts
        for publisher, adapter in event.among:
            layout, fingerprint = layouts[publisher]
            if fingerprint in keys:
                continue
            chain = self.keys(publisher, event.tokens, event.scope, adapter)
            lower = chain
            most = (count - 1) // layout.grid_tokens  # one token must be computed
            if two:
                lower = self.keys_below(publisher, event.tokens, event.sharing(), adapter)
                below[fingerprint] = lower[:most]
            resumes.extend(self.directory.peek(chain, fingerprint, lower))
            keys[fingerprint] = chain[:most]
        if len(keys) > 1:
            resumes.sort(key=_deepest_first)
        return Ask(event.id, count, keys, resumes, below=below)

    def _discounted(self, ask: Ask) -> tuple[Ask, dict[Publisher, int]]:
        """Promises of engines that do not announce their windows, times what they kept so far.

        Also the tokens that were promised by events alone, per such engine.
        """
        quiet = self._quiet
        promised = {
            r.publisher: r.tokens
            for r in (ask.resumes if quiet else ())
            if r.tokens and r.publisher in quiet
        }
        if not promised:
            return ask, promised
        resumes = [self._believed(r) if r.publisher in promised else r for r in ask.resumes]
        resumes.sort(key=_deepest_first)
        return msgspec.structs.replace(ask, resumes=resumes), promised

    def _believed(self, resume: Resume) -> Resume:
        share = self.gaps[resume.publisher].confidence()
        tiers = tuple(int(tokens * share) for tokens in resume.tier_tokens)
        return msgspec.structs.replace(resume, tokens=sum(tiers), tier_tokens=tiers)

    def shares(self, id: str) -> dict[Publisher, float]:
        """Of a pending request: how much was counted of what events alone promised."""
        return {p: self.gaps[p].confidence() for p in self._pending[id].promised}

    def _sent(self, event: Sent) -> None:
        pending = self._pending.get(event.id)
        if pending is not None and event.publisher in pending.plans:
            pending.sent_to = event.publisher
            self.router.begin(pending.ask, pending.plans[event.publisher], self._now)

    def _first_token(self, event: FirstToken) -> None:
        self.router.first_token(event.id, self._now)
        pending = self._pending.get(event.id)
        if pending is not None and pending.sent_to is not None:
            self._timed(pending, pending.sent_to, event.ttft_s)

    def _timed(self, pending: _Pending, publisher: Publisher, ttft_s: float) -> None:
        """Learn what the prediction was worth, as soon as it is known: the last token may come
        minutes later."""
        plan = pending.plans.get(publisher)
        if pending.timed or ttft_s < 0 or pending.ask.unkeyed or plan is None:
            return
        if publisher in self.errors:
            pending.timed = True
            others = (p.price.ttft_s for p in pending.plans.values() if p is not plan)
            self.errors[publisher].observe(plan.price.ttft_s, ttft_s, others)
            self._error.observe(plan.price.ttft_s, ttft_s, ())

    def _finished(self, event: Finished) -> None:
        """Free the books and learn."""
        pending = self._pending.pop(event.id, None)
        if pending is None:
            return
        cached = event.cached_tokens
        self.router.end(event.id, self._now, ok=event.ok, cached_tokens=cached)
        plan = pending.plans.get(event.publisher)
        if not event.ok or pending.ask.unkeyed or plan is None or event.publisher not in self.gaps:
            return
        # An engine that announces nothing promises nothing: the feed has its own flag.
        if cached >= 0 and self.directory.holders_of(event.publisher):
            promised = pending.promised.get(event.publisher, plan.resume_tokens)
            self.gaps[event.publisher].observe(promised, cached, plan.expected_tokens)
        self._timed(pending, event.publisher, event.ttft_s)

    def asked(self, id: str) -> Ask | None:
        """What a pending request was routed by."""
        pending = self._pending.get(id)
        return pending.ask if pending is not None else None

    def facts(self, publisher: Publisher) -> tuple[Layout, bytes] | None:
        """Layout and fingerprint of an engine that joined."""
        return self._layouts.get(publisher)

    def plan(self, id: str, publisher: Publisher) -> Plan | None:
        """The plan by which a pending request would be sent to ``publisher``."""
        pending = self._pending.get(id)
        return pending.plans.get(publisher) if pending is not None else None


def _deepest_first(resume: Resume) -> tuple[int, int, Publisher]:
    return -resume.tokens, -resume.chain_tokens, resume.publisher
