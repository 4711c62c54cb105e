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
from kvatlas.core.keys import PUBLIC, Scope
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher
from kvatlas.core.router import Decision, Plan
from kvatlas.errors import RequestError
from kvatlas.service.decision_log import DecisionLog, Entry
from kvatlas.service.steer import Health, Inbound, Outcome, Route, Target
from kvatlas.service.tokens import Prompt

log = logging.getLogger(__name__)

SALT_HEADER = "x-kvatlas-cache-salt"
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
    layout counts with the minimal resume point or with the full one."""

    publisher: Publisher
    url: str
    models: dict[str, str]
    layout: Layout
    fingerprint: bytes
    headers: tuple[tuple[str, str], ...] = ()
    entries: tuple[dict[str, object], ...] = ()
    resume_point: str = ""


class Steering:
    """Implements `Steer`. One event loop owns it; nothing here blocks."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        log: DecisionLog,
        tokens: Tokens | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._log = log
        self._tokens = tokens
        self._clock = clock
        self._ranks: dict[Publisher, Rank] = {}
        self._pending: dict[str, Entry] = {}
        self._unreached: dict[Publisher, float] = {}  # when a connection last could not be made
        self.gaps = dispatcher.gaps
        self.errors = dispatcher.errors
        self.health_parts: list[Callable[[], Problems]] = []
        self.health_notes: list[Callable[[], Problems]] = []  # to be known, but no fault
        self.fallbacks: Counter[str] = Counter()
        self._faults: dict[str, str] = {}  # part of ours → why it failed when it was last needed

    @property
    def decisions(self) -> int:
        """How many requests were routed."""
        return self._dispatcher.decisions

    def _tell(self, event: Input) -> None:
        self._dispatcher.handle(event, self._clock())

    # -- engines --------------------------------------------------------------------------------

    def add(self, rank: Rank) -> None:
        """An engine can be asked from now on; again with other facts: the old ones go."""
        self._tell(Join(rank.publisher, rank.layout, rank.fingerprint))
        self._ranks[rank.publisher] = rank

    def remove(self, publisher: Publisher) -> None:
        """The engine is no longer configured; its requests in flight end by themselves."""
        self._unreached.pop(publisher, None)
        if self._ranks.pop(publisher, None) is not None:
            self._tell(Leave(publisher))

    def set_up(self, publisher: Publisher, up: bool) -> None:
        """Health as polled."""
        self._tell(SetUp(publisher, up))

    def set_load(self, publisher: Publisher, requests: int) -> None:
        """Requests running and waiting, as the engine itself reports them."""
        self._tell(SetLoad(publisher, requests))

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
        }
        for part in self.health_parts:
            problems.update(part())
        flags = [f"{problem}:{who}" for problem, whom in problems.items() for who in whom]
        for note in self.health_notes:
            problems.update(note())
        details: dict[str, object] = {p: whom for p, whom in problems.items() if whom}
        return Health(ready=bool(up), flags=tuple(flags), details=details)

    # -- Steer ----------------------------------------------------------------------------------

    async def choose(self, request: Inbound) -> Route:
        """Raises RequestError 404 for an unknown model, 503 when no engine was ever reached."""
        self._serving(request.body.get("model"))  # a wrong name is not worth tokenizing
        prompt = await self._prompt(request)
        ranks = self._serving(request.body.get("model"))  # engines come and go meanwhile
        decision = self._decide(request, ranks, prompt)
        if decision.unkeyed:
            self.fallbacks[decision.unkeyed] += 1
        targets = tuple(_target(ranks[plan.publisher], plan) for plan in decision.plans)
        shares = {str(p): share for p, share in self._dispatcher.shares(decision.id).items()}
        self._pending[decision.id] = self._log.decided(decision, shares)
        return Route(decision.id, targets, decision.prompt_tokens, decision.unkeyed)

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
        return tuple(_target(self._ranks[plan.publisher], plan) for plan in plans)

    def sent(self, route: Route, target: Target) -> None:
        """Count it as in flight on ``target``."""
        entry = self._pending.get(route.id)
        if entry is not None:
            entry.tried.append(target.worker)
            self._tell(Sent(route.id, _publisher(entry, target)))

    def unreached(self, route: Route, target: Target) -> None:
        """Polls take seconds to mark an engine down, and each request until then would try it
        first: it is no candidate before the next good look (`reached`), all ranks of it."""
        entry = self._pending.get(route.id)
        if entry is None:
            return
        worker = _publisher(entry, target).worker
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

    def first_token(self, route: Route, ttft_s: float) -> None:
        """The engine's prefill queue moved on."""
        self._tell(FirstToken(route.id))

    def finished(self, route: Route, outcome: Outcome) -> None:
        """Free the books and learn."""
        entry = self._pending.pop(route.id, None)
        if entry is None:
            return
        ok = 200 <= outcome.status < 300
        publisher = _publisher(entry, outcome.target)
        self._tell(Finished(route.id, publisher, ok, outcome.cached_tokens, outcome.ttft_s))
        self._log.ended(entry, outcome)

    # -- inside ---------------------------------------------------------------------------------

    def _serving(self, model: object) -> dict[Publisher, Rank]:
        if not self._ranks:
            raise RequestError("no engine has been reached yet", status=503, code="no_engine")
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
        if self._dispatcher.router.policy != "price":
            return Prompt(reason=self._dispatcher.router.policy)
        if request.path not in KEYED_PATHS:
            return Prompt(reason="no_prompt")
        if self._tokens is None:
            return Prompt(reason="no_tokenizer")
        try:
            prompt = await self._tokens.prompt(request.path, request.body)
        except Exception as error:  # fail open: a tokenizer must never fail a request
            return Prompt(reason=self._failed("tokenizer", request, error))
        self._faults.pop("tokenizer", None)
        return prompt

    def _failed(self, part: str, request: Inbound, error: Exception) -> str:
        """The reason for which this request is routed by load; flagged until it works again."""
        log.exception("the %s failed on request %s", part, request.id)
        self._faults[part] = f"request {request.id}: {type(error).__name__}: {error}"
        return f"{part}_failed"

    async def looked_up(self, request: Inbound) -> tuple[Prompt, list[tuple[Rank, list[bytes]]]]:
        """For inspection: the prompt, and per engine that serves its model the block keys that
        it would be asked for (none where the prompt cannot be keyed). Raises as `choose`."""
        ranks = self._serving(request.body.get("model"))
        prompt = await self._prompt(request)
        tokens = max((prompt.tokens, *prompt.others), key=len)
        return prompt, [(rank, self._keys(rank, request, tokens)) for rank in ranks.values()]

    def _keys(self, rank: Rank, request: Inbound, tokens: bytes) -> list[bytes]:
        adapter = _adapter(rank, request)
        return self._dispatcher.keys(rank.publisher, tokens, scope_of(request), adapter)

    def _decide(
        self, request: Inbound, ranks: Mapping[Publisher, Rank], prompt: Prompt
    ) -> Decision:
        reason = prompt.reason
        if not reason and not prompt.tokens:
            reason = "empty_prompt"
        if not reason:
            # A batch goes where its longest prompt can be resumed: it is sent as one request.
            tokens = max((prompt.tokens, *prompt.others), key=len)
            among = tuple((p, _adapter(rank, request)) for p, rank in ranks.items())
            try:
                question = Question(request.id, among, tokens, scope_of(request))
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
        )
        decision = self._dispatcher.handle(unkeyed, self._clock())
        assert decision is not None
        return decision


def scope_of(request: Inbound) -> Scope:
    """Who may share this prompt's blocks: the salt in the header wins over the one in the body."""
    salt = request.headers.get(SALT_HEADER) or request.body.get("cache_salt")
    return Scope("tenant", salt) if isinstance(salt, str) and salt else PUBLIC


def _target(rank: Rank, plan: Plan) -> Target:
    return Target(str(rank.publisher), rank.url, rank.headers, plan.resume_tokens)


def _adapter(rank: Rank, request: Inbound) -> str:
    model = request.body.get("model")
    return rank.models.get(model, "") if isinstance(model, str) else ""


def _publisher(entry: Entry, target: Target) -> Publisher:
    plans = entry.decision.plans
    return next(p.publisher for p in plans if str(p.publisher) == target.worker)
