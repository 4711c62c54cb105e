"""The real `Steer`: token ids → block keys → directory → router, and what is learnt from the end.

Fails open: whatever keeps a prompt from being keyed becomes a reason, is counted, and the request
is routed by load alone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from kvatlas.core.directory import Directory
from kvatlas.core.keys import PUBLIC, Keyring, Scope
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher, Resume
from kvatlas.core.router import Ask, Plan, Router
from kvatlas.errors import RequestError
from kvatlas.service.decision_log import DecisionLog, Entry
from kvatlas.service.steer import Health, Inbound, Outcome, Route, Target
from kvatlas.service.tokens import Prompt

log = logging.getLogger(__name__)

SALT_HEADER = "x-kvatlas-cache-salt"
KEYED_PATHS = ("/v1/chat/completions", "/v1/completions")
_SHOWN_CHARS = 200  # of a wrong model name that comes back in the error
_GAP_REQUESTS_MIN = 20
_GAP_SHARE_MAX = 0.5
_GAP_DECAY = 0.95
_BELIEF_TOKENS = 4096  # so many promised tokens weigh as much as the belief that all will be kept


# problem → whom it concerns → why, for people
Problems = dict[str, dict[str, str]]


class Tokens(Protocol):
    """Turns a request into token ids exactly as the engine will: `service.tokens.Tokenizer`."""

    async def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt: ...


class Rank(msgspec.Struct, frozen=True):
    """One publisher as requests reach it. ``models``: served name → adapter ("" for the base);
    ``entries`` are the same as the engine's own /v1/models lists them."""

    publisher: Publisher
    url: str
    models: dict[str, str]
    layout: Layout
    fingerprint: bytes
    headers: tuple[tuple[str, str], ...] = ()
    entries: tuple[dict[str, object], ...] = ()


class HitGap:
    """Expected against reported hits of one engine: the alarm for silent failures.

    Both directions count: hits that were promised and did not come, and hits that came unforeseen
    (then our keys are not those of its events, no prefix ever matches, and routing is blind).
    """

    def __init__(self) -> None:
        self.requests = 0
        # In tokens, fading: promised, and reused of these; reused, and foreseen of these.
        self.expected = self.kept = self.reported = self.foreseen = 0.0

    def observe(self, expected: int, reported: int, foreseen: int = 0) -> None:
        """Token counts of one request whose engine reported what it resumed.

        ``foreseen``: expected, and what other requests were computing there when it was sent.
        """
        if expected <= 0 and reported <= 0:
            return
        self.requests += 1
        self.expected = self.expected * _GAP_DECAY + expected
        self.kept = self.kept * _GAP_DECAY + min(reported, expected)
        self.reported = self.reported * _GAP_DECAY + reported
        self.foreseen = self.foreseen * _GAP_DECAY + min(reported, max(expected, foreseen))

    def confidence(self) -> float:
        """Share of the promised tokens that the engine reuses; near 1 until enough were promised.

        It stands in for events that an engine does not send: SGLang 0.5.23 announces its chain,
        and not that a window was dropped, without which nothing can be resumed there.
        """
        return (self.kept + _BELIEF_TOKENS) / (self.expected + _BELIEF_TOKENS)

    @property
    def flag(self) -> str:
        """Why this engine is suspect, "" when it is not."""
        if self.requests < _GAP_REQUESTS_MIN:
            return ""
        if self.kept < _GAP_SHARE_MAX * self.expected:
            share = 100 * self.kept / self.expected
            found = f"the engine reused only {share:.0f} % of the tokens that its events promised"
        elif self.foreseen < _GAP_SHARE_MAX * self.reported:
            share = 100 * self.foreseen / self.reported
            found = f"its events promised only {share:.0f} % of the tokens that the engine reused"
        else:
            return ""
        return f"{found}: compare tokenizer, chat template, block size and salt"


class PredictionError:
    """Predicted against measured time to first token of one engine, as a running mean."""

    def __init__(self) -> None:
        self.requests = 0
        self.error_s = 0.0

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """One answered request."""
        self.requests += 1
        weight = max(1 / self.requests, 1 - _GAP_DECAY)
        self.error_s += weight * (abs(measured_s - predicted_s) - self.error_s)


class _Pending(msgspec.Struct):
    ask: Ask
    plans: dict[str, Plan]
    entry: Entry
    promised: dict[Publisher, int]  # by events alone, where less was counted


class Steering:
    """Implements `Steer`. One event loop owns it; nothing here blocks."""

    def __init__(
        self,
        *,
        directory: Directory,
        router: Router,
        keyring: Keyring,
        log: DecisionLog,
        tokens: Tokens | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._router = router
        self._keyring = keyring
        self._log = log
        self._tokens = tokens
        self._clock = clock
        self._ranks: dict[Publisher, Rank] = {}
        self._pending: dict[str, _Pending] = {}
        self.gaps: dict[Publisher, HitGap] = {}
        self.errors: dict[Publisher, PredictionError] = {}
        self.health_parts: list[Callable[[], Problems]] = []
        self.health_notes: list[Callable[[], Problems]] = []  # to be known, but no fault
        self.fallbacks: Counter[str] = Counter()
        self._faults: dict[str, str] = {}  # part of ours → why it failed when it was last needed
        self.decisions = 0

    # -- engines --------------------------------------------------------------------------------

    def add(self, rank: Rank) -> None:
        """An engine can be asked from now on; again with other facts: the old ones go."""
        known = self._ranks.get(rank.publisher)
        if known is not None and known.fingerprint != rank.fingerprint:
            self.remove(rank.publisher)
        self._directory.register(rank.publisher, rank.layout, rank.fingerprint)
        self._router.add(rank.publisher, rank.layout, rank.fingerprint)
        self._ranks[rank.publisher] = rank
        self.gaps.setdefault(rank.publisher, HitGap())
        self.errors.setdefault(rank.publisher, PredictionError())

    def remove(self, publisher: Publisher) -> None:
        """The engine is no longer configured; its requests in flight end by themselves."""
        if self._ranks.pop(publisher, None) is not None:
            self._directory.unregister(publisher)
            self._router.remove(publisher)
            self.gaps.pop(publisher, None)
            self.errors.pop(publisher, None)

    def set_up(self, publisher: Publisher, up: bool) -> None:
        """Health as polled."""
        self._router.set_up(publisher, up)

    def set_load(self, publisher: Publisher, requests: int) -> None:
        """Requests running and waiting, as the engine itself reports them."""
        self._router.set_load(publisher, requests)

    def in_flight(self) -> dict[Publisher, int]:
        """Requests under way, per engine."""
        return self._router.in_flight()

    def names(self) -> list[str]:
        """Model names that can be asked for, sorted."""
        return sorted({name for rank in self._ranks.values() for name in rank.models})

    def models(self) -> list[dict[str, object]]:
        """The engines' own entries, one per id."""
        merged = {e["id"]: e for rank in self._ranks.values() for e in rank.entries}
        return [merged[name] for name in sorted(merged, key=str)]

    def health(self) -> Health:
        """Ready once an engine can be asked. Each flag is "problem:who"; the details say why."""
        up = self._router.up()
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
        ask = self._ask(request, ranks, prompt)
        ask, promised = self._discounted(ask, ranks)
        decision = self._router.peek(ask, self._clock(), among=ranks)
        if ask.unkeyed:
            self.fallbacks[ask.unkeyed] += 1
        route_id = request.id
        while route_id in self._pending:  # equal ids from two clients must not share books
            route_id = f"{route_id}#{self.decisions}"
        if route_id != request.id:
            ask = msgspec.structs.replace(ask, id=route_id)
            decision = msgspec.structs.replace(decision, id=route_id)
        targets = tuple(_target(ranks[plan.publisher], plan) for plan in decision.plans)
        plans = {str(plan.publisher): plan for plan in decision.plans}
        shares = {str(p): self.gaps[p].confidence() for p in promised}
        entry = self._log.decided(decision, shares)
        self._pending[route_id] = _Pending(ask, plans, entry, promised)
        self.decisions += 1
        return Route(route_id, targets, ask.prompt_tokens, ask.unkeyed)

    def sent(self, route: Route, target: Target) -> None:
        """Count it as in flight on ``target``."""
        pending = self._pending.get(route.id)
        if pending is not None:
            pending.entry.tried.append(target.worker)
            self._router.begin(pending.ask, pending.plans[target.worker], self._clock())

    def first_token(self, route: Route, ttft_s: float) -> None:
        """The engine's prefill queue moved on."""
        self._router.first_token(route.id, self._clock())

    def finished(self, route: Route, outcome: Outcome) -> None:
        """Free the books and learn."""
        pending = self._pending.pop(route.id, None)
        if pending is None:
            return
        ok = 200 <= outcome.status < 300
        self._router.end(route.id, self._clock(), ok=ok, cached_tokens=outcome.cached_tokens)
        plan = pending.plans.get(outcome.target.worker)
        keyed = ok and not pending.ask.unkeyed
        if keyed and plan is not None and plan.publisher in self.gaps:
            cached = outcome.cached_tokens
            # An engine that announces nothing promises nothing: the feed has its own flag.
            if cached >= 0 and self._directory.holders_of(plan.publisher):
                promised = pending.promised.get(plan.publisher, plan.resume_tokens)
                self.gaps[plan.publisher].observe(promised, cached, plan.expected_tokens)
            if outcome.ttft_s >= 0:
                self.errors[plan.publisher].observe(plan.price.ttft_s, outcome.ttft_s)
        self._log.ended(pending.entry, outcome)

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
        if self._router.policy != "price":
            return Prompt(reason=self._router.policy)
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
        """Keys of the prompt's blocks that matter to this engine (`Layout.asked_blocks`)."""
        model, grid = request.body.get("model"), rank.layout.grid_tokens
        adapter = rank.models.get(model, "") if isinstance(model, str) else ""
        root = self._keyring.root(rank.fingerprint, scope_of(request), adapter)
        asked = rank.layout.asked_blocks(len(tokens) // 4)
        return self._keyring.chain(root, memoryview(tokens)[: asked * grid * 4], grid)

    def _ask(self, request: Inbound, ranks: Mapping[Publisher, Rank], prompt: Prompt) -> Ask:
        reason = prompt.reason
        if not reason and not prompt.tokens:
            reason = "empty_prompt"
        if not reason:
            try:
                ask = self._keyed(request, ranks, prompt)
            except Exception as error:  # fail open: nor must the directory
                reason = self._failed("directory", request, error)
            else:
                self._faults.pop("directory", None)
                return ask
        return Ask(request.id, prompt.count, {}, (), reason)

    def _keyed(self, request: Inbound, ranks: Mapping[Publisher, Rank], prompt: Prompt) -> Ask:
        # A batch goes where its longest prompt can be resumed: it is sent as one request.
        tokens = max((prompt.tokens, *prompt.others), key=len)
        count = len(tokens) // 4
        keys: dict[bytes, list[bytes]] = {}
        resumes = []
        for rank in ranks.values():
            if rank.fingerprint in keys:
                continue
            chain = self._keys(rank, request, tokens)
            resumes.extend(self._directory.peek(chain, rank.fingerprint))
            # one token must be computed
            keys[rank.fingerprint] = chain[: (count - 1) // rank.layout.grid_tokens]
        if len(keys) > 1:
            resumes.sort(key=lambda r: (-r.tokens, -r.chain_tokens, r.publisher))
        return Ask(request.id, count, keys, resumes)

    def _discounted(
        self, ask: Ask, ranks: Mapping[Publisher, Rank]
    ) -> tuple[Ask, dict[Publisher, int]]:
        """Promises of engines that do not announce their windows, times what they kept so far.

        Also the tokens that were promised by events alone, per such engine.
        """
        promised = {
            r.publisher: r.tokens
            for r in ask.resumes
            if r.tokens and r.publisher in ranks and not ranks[r.publisher].layout.announced()
        }
        if not promised:
            return ask, promised
        resumes = [self._believed(r) if r.publisher in promised else r for r in ask.resumes]
        resumes.sort(key=lambda r: (-r.tokens, -r.chain_tokens, r.publisher))
        return msgspec.structs.replace(ask, resumes=resumes), promised

    def _believed(self, resume: Resume) -> Resume:
        share = self.gaps[resume.publisher].confidence()
        tiers = tuple(int(tokens * share) for tokens in resume.tier_tokens)
        return msgspec.structs.replace(resume, tokens=sum(tiers), tier_tokens=tiers)


def scope_of(request: Inbound) -> Scope:
    """Who may share this prompt's blocks: the salt in the header wins over the one in the body."""
    salt = request.headers.get(SALT_HEADER) or request.body.get("cache_salt")
    return Scope("tenant", salt) if isinstance(salt, str) and salt else PUBLIC


def _target(rank: Rank, plan: Plan) -> Target:
    return Target(str(rank.publisher), rank.url, rank.headers, plan.resume_tokens)
