"""The real `Steer`: token ids → block keys → directory → router, and what is learnt from the end.

Fails open: whatever keeps a prompt from being keyed becomes a reason, is counted, and the request
is routed by load alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from kvatlas.config import PairingProtocol, Role
from kvatlas.core.compat import Member
from kvatlas.core.dispatch import (
    Again,
    Dispatcher,
    Finished,
    FirstToken,
    Input,
    Join,
    Leave,
    Question,
    Sent,
    SetLoad,
    SetUp,
)
from kvatlas.core.keys import Scope, salt_scope
from kvatlas.core.ladder import SHARE
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher
from kvatlas.core.router import BLIND, Decision, Plan
from kvatlas.core.tenancy import EVERYBODY
from kvatlas.errors import RequestError
from kvatlas.service.decision_log import DecisionLog, Entry
from kvatlas.service.ladder import for_s
from kvatlas.service.pairing import Pairing
from kvatlas.service.refusals import not_taken, not_whole
from kvatlas.service.salts import KeysOf, Salts, own_salt
from kvatlas.service.steer import Half, Health, Inbound, Outcome, Route, Target, endpoint_of
from kvatlas.service.tokens import Prompt

log = logging.getLogger(__name__)

KEYED_PATHS = ("/v1/chat/completions", "/v1/completions")
_SHOWN_CHARS = 200  # of a wrong model name that comes back in the error


# problem → whom it concerns → why, for people
Problems = dict[str, dict[str, str]]


class Tokens(Protocol):
    """Turns a request into token ids exactly as the engine will: `service.tokens.Tokenizer`."""

    async def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt: ...


class Rank(msgspec.Struct, frozen=True):
    """One publisher as requests reach it. ``models``: served name → adapter ("" for the base);
    ``entries`` are the same as the engine's own /v1/models lists them. ``resume_point``: why the
    layout counts with the minimal resume point or with the full one. ``member`` and what follows:
    of halves of pairs."""

    publisher: Publisher
    url: str
    models: dict[str, str]
    layout: Layout
    fingerprint: bytes
    headers: tuple[tuple[str, str], ...] = ()
    entries: tuple[dict[str, object], ...] = ()
    resume_point: str = ""
    member: Member | None = None
    role: Role = "combined"
    pairing: PairingProtocol = "nixl"
    bootstrap: str = ""


class Steering:
    """Implements `Steer`. One event loop owns it; nothing here blocks."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        log: DecisionLog,
        tokens: Tokens | None,
        salts: Salts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._log = log
        self._tokens = tokens
        self._salts = salts or Salts(dispatcher.keyring)
        self._clock = clock
        self._ranks: dict[Publisher, Rank] = {}
        self._pending: dict[str, Entry] = {}
        self._serves: dict[str, tuple[Publisher, ...]] = {}  # who could, of pending requests
        self._unreached: dict[Publisher, float] = {}  # when a connection last could not be made
        self.gaps = dispatcher.gaps
        self.errors = dispatcher.errors
        self.health_parts: list[Callable[[], Problems]] = []
        self.quiet: Callable[[str], float] = lambda worker: math.inf  # seconds, of an engine
        self.health_notes: list[Callable[[], Problems]] = []  # to be known, but no fault
        self.fallbacks: Counter[str] = Counter()
        self._faults: dict[str, str] = {}  # part of ours → why it failed when it was last needed
        self._pairing = Pairing(dispatcher, self._ranks, clock)
        self.transports = self._pairing.transports
        self.decisions = 0  # requests that were routed
        self.objectives = {"met": 0, "missed": 0}  # of answers that show their first token
        self.draining: frozenset[str] = frozenset()  # workers that get no new requests

    def tell(self, event: Input) -> None:
        """An input of the dispatcher, now."""
        self._dispatcher.handle(event, self._clock())

    # -- engines --------------------------------------------------------------------------------

    def add(self, rank: Rank) -> None:
        """An engine can be asked from now on; again with other facts: the old ones go."""
        self.tell(Join(rank.publisher, rank.layout, rank.fingerprint))
        self._ranks[rank.publisher] = rank
        self._pairing.settle()

    def remove(self, publisher: Publisher) -> None:
        """The engine is no longer configured; its requests in flight end by themselves."""
        self._unreached.pop(publisher, None)
        if self._ranks.pop(publisher, None) is not None:
            self.tell(Leave(publisher))
            self._pairing.settle(gone=publisher)

    def set_up(self, publisher: Publisher, up: bool) -> None:
        """Health as polled."""
        self.tell(SetUp(publisher, up))

    def set_load(self, publisher: Publisher, requests: int) -> None:
        """Requests running and waiting, as the engine itself reports them."""
        self.tell(SetLoad(publisher, requests))

    def in_flight(self) -> dict[Publisher, int]:
        """Requests under way, per engine."""
        return self._dispatcher.router.in_flight()

    def names(self) -> list[str]:
        """Model names that can be asked for, sorted."""
        return sorted({name for rank in self._ranks.values() for name in rank.models})

    def models(self) -> list[dict[str, object]]:
        """The engines' own entries, one per id."""
        merged = {e["id"]: e for rank in self._ranks.values() for e in rank.entries}
        return [merged[name] for name in sorted(merged, key=str)]

    def health(self) -> Health:
        """Ready once an engine can be asked. Each flag is "problem:who"; the details say why."""
        up = self._dispatcher.router.up()
        problems: Problems = {
            "engine_down": {str(p): "see workers" for p in sorted(self._ranks) if p not in up},
            "hit_gap": {str(p): gap.flag for p, gap in sorted(self.gaps.items()) if gap.flag},
            "internal": dict(self._faults),
            "pair_refused": self._pairing.refusals(),
        }
        for part in self.health_parts:
            problems.update(part())
        flags = [f"{problem}:{who}" for problem, whom in problems.items() for who in whom]
        for note in self.health_notes:
            problems.update(note())
        details: dict[str, object] = {p: whom for p, whom in problems.items() if whom}
        ready = any(publisher.worker not in self.draining for publisher in up)
        return Health(ready=ready, flags=tuple(flags), details=details)

    # -- Steer ----------------------------------------------------------------------------------

    async def choose(self, request: Inbound) -> Route:
        """Raises RequestError 404 for an unknown model, 503 when no engine was ever reached, 429
        or 503 when the request is not taken (`core.admission`)."""
        self._serving(request)  # a wrong name is not worth tokenizing
        prompt = await self._prompt(request)
        ranks = self._serving(request)  # engines come and go meanwhile
        among, whole = self._pairing.candidates(request, ranks)
        if not among:
            raise not_whole(whole)
        if request.id in self._pending:  # of another client: both halves go by its id
            request = msgspec.structs.replace(request, id=f"{request.id}#{self.decisions}")
        self.decisions += 1
        salt = self._salts.of(request, prompt)
        decision = self._decide(request, {p: ranks[p] for p in among}, prompt, salt)
        looked_up_s = time.perf_counter()
        if decision.refusal is not None:
            self._log.refused(decision, self._owner(salt))
            raise not_taken(decision, decision.refusal)
        if decision.unkeyed:
            self.fallbacks[decision.unkeyed] += 1
        if not whole:
            decision = self._dispatcher.in_time_first(self._pairing.priced(decision, ranks))
        targets = tuple(self._target(p, whole=bool(whole)) for p in decision.plans)
        shares = {str(p): share for p, share in self._dispatcher.shares(decision.id).items()}
        self._pending[decision.id] = self._log.decided(decision, shares, self._owner(salt))
        self._serves[decision.id] = tuple(ranks)
        route = Route(decision.id, targets, decision.prompt_tokens, decision.unkeyed, whole)
        route.salt = salt if request.tenant is not None else ""
        route.looked_up_s = looked_up_s
        if any(t.half for t in targets) and request.deadline_s < math.inf:
            route.alone_s = self._pairing.alone_s(decision, ranks)
        entry = self._pending[decision.id]
        entry.fallbacks, entry.halves = route.fallbacks, tuple(t.worker for t in targets if t.half)
        return route

    def _owner(self, salt: str) -> str:
        """Whose a request is, by the id of the tenant's scope; "" without a proof."""
        below = self._salts.below(salt)
        return below.scope.owner if below is not None else ""

    def left(self, route: Route) -> bool:
        """Whether somebody else serves the model who has no plan yet."""
        return self._dispatcher.left(route.id)

    def more(self, route: Route) -> tuple[Target, ...]:
        """Those, a few at a time, the best first."""
        entry = self._pending.get(route.id)
        decision = self._dispatcher.handle(Again(route.id), self._clock())
        if entry is None or decision is None:
            return ()
        plans = [plan for plan in decision.plans if plan.publisher in self._ranks]
        entry.decision = msgspec.structs.replace(
            entry.decision, plans=(*entry.decision.plans, *plans)
        )
        return tuple(self._target(plan, whole=bool(route.whole)) for plan in plans)

    def decoders(self, route: Route, prefill: Target) -> tuple[Target, ...]:
        """Decode halves that may pair with it, by price."""
        first, serving = _publisher(prefill), self._still(route)
        if first not in serving:
            return ()
        order = self._pairing.decoders(route.id, first, serving, route.prompt_tokens)
        return tuple(self._priced(plan, "decode") for plan in order)

    def alone(self, route: Route, failed: Half) -> tuple[Target, ...]:
        """Engines that look well, by load: decode halves, combined ones, prefill halves."""
        entry = self._pending.get(route.id)
        if entry is None:
            return ()
        first = entry.decision.plans[0].publisher
        self.tell(Finished(route.id, first, False))  # where it is not over already
        serving = self._still(route)
        order = self._pairing.alone(route.id, serving, route.prompt_tokens, failed)
        return tuple(self._priced(plan, "") for plan in order)

    def prefilled(self, route: Route, prefill: Target, cached_tokens: int, ttft_s: float) -> None:
        """Free its books, and learn from what it took."""
        if route.id in self._pending:
            publisher, now = _publisher(prefill), self._clock()  # one moment: it decodes nothing
            self._dispatcher.handle(FirstToken(route.id), now)
            end = Finished(route.id, publisher, True, cached_tokens, ttft_s)
            self._dispatcher.handle(end, now)

    def sent(self, route: Route, target: Target) -> None:
        """Count it as in flight on ``target``."""
        entry = self._pending.get(route.id)
        if entry is None:
            return
        entry.tried.append(target.worker)
        publisher = _publisher(target)
        if target.half == "prefill" or not self._pairing.sent(route.id, publisher):
            self.tell(Sent(route.id, publisher))

    def unreached(self, route: Route, target: Target) -> None:
        """Polls take seconds to mark an engine down, and each request until then would try it
        first: it is no candidate before the next good look (`reached`), all ranks of it."""
        if route.id not in self._pending:
            return
        worker = _publisher(target).worker
        for publisher in [p for p in self._ranks if p.worker == worker]:
            self._unreached[publisher] = self._clock()
            self.set_up(publisher, False)

    def reached(self, publisher: Publisher, looked_s: float) -> bool:
        """Whether the last good look, at ``looked_s`` on the clock given at the start, is later
        than any connection that could not be made."""
        if looked_s > self._unreached.get(publisher, -math.inf):
            self._unreached.pop(publisher, None)
            return True
        return False

    def quiet_s(self, target: Target) -> float:
        """As whoever looks after the engines saw it."""
        return self.quiet(_publisher(target).worker)

    def first_token(self, route: Route, ttft_s: float) -> None:
        """The engine's prefill queue moved on."""
        if not self._pairing.first_token(route.id):
            self.tell(FirstToken(route.id, ttft_s))

    def finished(self, route: Route, outcome: Outcome) -> None:
        """Free the books and learn."""
        entry = self._pending.pop(route.id, None)
        if entry is None:
            return
        self._serves.pop(route.id, None)
        ok = 200 <= outcome.status < 300
        publisher = _publisher(outcome.target)
        leg = self._pairing.over(route.id, ok=ok, cached_tokens=outcome.cached_tokens)
        if leg is not None:
            entry.hand_off = leg.hand_off
            self.tell(Finished(route.id, publisher, False))  # a first half that never ended
        else:
            ttft_s = outcome.ttft_s
            self.tell(Finished(route.id, publisher, ok, outcome.cached_tokens, ttft_s))
        slo_s = entry.decision.ttft_slo_s
        if slo_s and outcome.ttft_s >= 0:
            self.objectives["met" if outcome.ttft_s <= slo_s else "missed"] += 1
        self._log.ended(entry, outcome)

    # -- inside ---------------------------------------------------------------------------------

    def _still(self, route: Route) -> list[Publisher]:
        """Who serves it, of those that are still configured; where one at least does not drain,
        without those that do."""
        there = [p for p in self._serves.get(route.id, ()) if p in self._ranks]
        return [p for p in there if p.worker not in self.draining] or there

    def _serving(self, request: Inbound) -> dict[Publisher, Rank]:
        if not self._ranks:
            raise RequestError("no engine has been reached yet", status=503, code="no_engine")
        named = self._named(request.body.get("model"))
        ranks = {p: r for p, r in named.items() if p.worker not in self.draining}
        if not ranks:
            text = f"all engines that serve it are draining: {', '.join(map(str, sorted(named)))}"
            raise RequestError(text, status=503, code="no_engine")
        among = request.among
        if among is None:
            return ranks
        ranks = {p: r for p, r in ranks.items() if not among.isdisjoint(endpoint_of(r.url))}
        if not ranks:
            text = "none of the endpoints that this request is limited to serves its model"
            raise RequestError(text, status=503, code="no_engine")
        return ranks

    def _named(self, model: object) -> dict[Publisher, Rank]:
        if model is None:
            return dict(self._ranks)
        name = model if isinstance(model, str) else None
        ranks = {p: r for p, r in self._ranks.items() if name in r.models}
        if not ranks:
            shown, known = repr(model)[:_SHOWN_CHARS], ", ".join(self.names())
            raise RequestError(
                f"the model {shown} does not exist; there is: {known}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return ranks

    async def _prompt(self, request: Inbound) -> Prompt:
        if self._dispatcher.router.params.policy in BLIND:
            return Prompt(reason=self._dispatcher.router.params.policy)
        if request.path not in KEYED_PATHS:
            return Prompt(reason="no_prompt")
        if self._tokens is None:
            return Prompt(reason="no_tokenizer")
        try:
            async with for_s(SHARE * request.deadline_s) as lookup:
                prompt = await self._tokens.prompt(request.path, request.body)
        except Exception as error:  # fail open: a tokenizer must never fail a request
            if lookup.expired():
                return Prompt(reason="late")
            return Prompt(reason=self._failed("tokenizer", request, error))
        self._faults.pop("tokenizer", None)
        return prompt

    def _failed(self, part: str, request: Inbound, error: Exception) -> str:
        """The reason for which this request is routed by load; flagged until it works again."""
        log.exception("the %s failed on request %s", part, request.id)
        self._faults[part] = f"request {request.id}: {type(error).__name__}: {error}"
        return f"{part}_failed"

    async def looked_up(self, request: Inbound) -> tuple[Prompt, list[tuple[Rank, KeysOf]]]:
        """For inspection: the prompt, and per engine that serves its model the block keys that
        it would be asked for (none where the prompt cannot be keyed). Raises as `choose`."""
        ranks = self._serving(request)
        prompt = await self._prompt(request)
        tokens = max((prompt.tokens, *prompt.others), key=len)
        return prompt, [(rank, self._keys(rank, request, tokens)) for rank in ranks.values()]

    async def keys_below(self, request: Inbound) -> list[bytes]:
        """For purges: the keys of all whole blocks of a tenant's prompt that are not public, as
        agents make them for each kind of engine that serves its model. Raises as `choose`."""
        prompt, keys = await self._prompt(request), dict[bytes, None]()
        sharing = self._salts.below(self._salts.of(request, prompt)) or EVERYBODY
        for rank in self._serving(request).values() if sharing.tenant else ():
            public = sharing.public_tokens // rank.layout.grid_tokens
            for tokens in (prompt.tokens, *prompt.others):
                more = tokens + bytes(4)  # of a prompt that goes on every whole block is asked for
                said = rank.publisher, more, sharing, _adapter(rank, request)
                keys |= dict.fromkeys(self._dispatcher.keys_below(*said)[public:])
        return list(keys)

    def _target(self, plan: Plan, *, whole: bool) -> Target:
        first = self._ranks[plan.publisher].role == "prefill" and not whole
        return msgspec.structs.replace(
            self._priced(plan, "prefill" if first else ""),
            expected_hit_tokens=plan.resume_tokens,
            tier_tokens=plan.tier_tokens,
        )

    def _priced(self, plan: Plan, half: Half) -> Target:
        rank, price = self._ranks[plan.publisher], self._dispatcher.router.foreseen(plan)
        return Target(
            str(rank.publisher),
            rank.url,
            rank.headers,
            half=half,
            pairing=rank.pairing,
            bootstrap=rank.bootstrap,
            ttft_s=price.ttft_s if price else 0.0,
            wait_s=price.wait_s if price else 0.0,
            load_s=price.load_s if price else 0.0,
        )

    def _keys(self, rank: Rank, request: Inbound, tokens: bytes) -> KeysOf:
        salt, adapter = own_salt(request), _adapter(rank, request)
        return self._salts.keys(self._dispatcher, rank.publisher, tokens, salt, adapter=adapter)

    def _decide(
        self, request: Inbound, ranks: Mapping[Publisher, Rank], prompt: Prompt, salt: str
    ) -> Decision:
        reason = prompt.reason
        if not reason and not prompt.tokens:
            reason = "empty_prompt"
        if not reason:
            # A batch goes where its longest prompt can be resumed: it is sent as one request.
            tokens = max((prompt.tokens, *prompt.others), key=len)
            among = tuple((p, _adapter(rank, request)) for p, rank in ranks.items())
            try:
                question = Question(
                    request.id,
                    among,
                    tokens,
                    salt_scope(salt),
                    ttft_slo_s=request.ttft_slo_s,
                    below=self._salts.below(salt),
                )
                decision = self._dispatcher.handle(question, self._clock())
            except Exception as error:  # fail open: nor must the directory
                reason = self._failed("directory", request, error)
            else:
                assert decision is not None
                self._faults.pop("directory", None)
                return decision
        unkeyed = Question(
            request.id,
            tuple((publisher, "") for publisher in ranks),
            unkeyed=reason,
            prompt_tokens=prompt.count,
            ttft_slo_s=request.ttft_slo_s,
        )
        decision = self._dispatcher.handle(unkeyed, self._clock())
        assert decision is not None
        return decision


def scope_of(request: Inbound) -> Scope:
    """Who may share this prompt's blocks, by the salt that its client chose."""
    return salt_scope(own_salt(request))


def _adapter(rank: Rank, request: Inbound) -> str:
    model = request.body.get("model")
    return rank.models.get(model, "") if isinstance(model, str) else ""


def _publisher(target: Target) -> Publisher:
    worker, _, rank = target.worker.partition("#")
    return Publisher(worker, int(rank or 0))
