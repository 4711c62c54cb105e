"""Requests as OpenTelemetry spans: a `Steer` around another one, which sees all that it is told.

One span for the request and, under it, ``route`` (in it ``lookup``), ``prefill`` (in it ``load``),
``transfer`` between the halves of a pair, ``decode``. Names of attributes are those of the
conventions for GenAI where there are any, else our own.
"""

from __future__ import annotations

import time

import msgspec

from kvatlas.config_tracing import TracingConfig
from kvatlas.core.records import Tier
from kvatlas.errors import RequestError
from kvatlas.service import logs
from kvatlas.service.spans import CLIENT, INTERNAL, SERVER, Context, Span, Value, context_of, new_id
from kvatlas.service.steer import Half, Health, Inbound, Outcome, Route, Steer, Target
from kvatlas.service.tracing_export import Exporter

RUNNING_MAX = 100_000
_MODEL_CHARS = 200
_CLIENT_CLOSED = 499
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class _Running(msgspec.Struct):
    """One request that is kept: where it stands, and its spans so far. Times are 0 until they
    are known. ``first``: who does all of it, or the first half; ``second``: the other half."""

    context: Context
    name: str
    began_s: float
    attributes: dict[str, Value]
    spans: list[Span] = []
    first: Target | None = None
    second: Target | None = None
    sent_s: float = 0.0
    prefilled_s: float = 0.0
    second_sent_s: float = 0.0
    first_token_s: float = 0.0
    streamed: bool = True

    def add(
        self,
        name: str,
        began_s: float,
        ended_s: float,
        attributes: dict[str, Value],
        *,
        parent: int = 0,
        kind: int = CLIENT,
        error: str = "",
    ) -> int:
        """The id of the new span; ``parent`` 0: the request's own."""
        id, trace = new_id(), self.context.trace
        under = parent or self.context.id
        self.spans.append(Span(trace, id, under, name, kind, began_s, ended_s, attributes, error))
        return id

    def give_up(self, now_s: float, error: str) -> None:
        """The try under way ended before anything of its answer was seen."""
        first, second = self.first, self.second
        if first is not None and not self.prefilled_s:
            told: dict[str, Value] = {"kvatlas.engine": first.worker}
            self.add("prefill", self.sent_s, now_s, told, error=error)
        elif first is not None and second is not None:
            self.add("transfer", self.second_sent_s, now_s, _halves(first, second), error=error)


class Traced:
    """Implements `Steer`; what it keeps goes to ``exporter``."""

    def __init__(self, steer: Steer, exporter: Exporter, config: TracingConfig) -> None:
        self._steer = steer
        self._exporter = exporter
        self._ratio = config.sample_ratio
        self._running: dict[str, _Running] = {}

    async def choose(self, request: Inbound) -> Route:
        """As `Steer.choose`; its engines are told where in the trace they are."""
        began_s = time.perf_counter()
        context = context_of(request.headers, self._ratio)
        logs.TRACE_ID.set(context.trace)
        try:
            route = await self._steer.choose(request)
        except BaseException as error:
            if context.sampled:
                self._not_routed(_running(context, request, began_s), error)
            raise
        route.headers = (*route.headers, *context.headers)
        if context.sampled:
            self._begin(_running(context, request, began_s), route)
        return route

    def left(self, route: Route) -> bool:
        return self._steer.left(route)

    def more(self, route: Route) -> tuple[Target, ...]:
        return self._steer.more(route)

    def decoders(self, route: Route, prefill: Target) -> tuple[Target, ...]:
        return self._steer.decoders(route, prefill)

    def alone(self, route: Route, failed: Half) -> tuple[Target, ...]:
        return self._steer.alone(route, failed)

    def prefilled(self, route: Route, prefill: Target, cached_tokens: int, ttft_s: float) -> None:
        self._steer.prefilled(route, prefill, cached_tokens, ttft_s)
        running = self._running.get(route.id)
        if running is not None and not running.first_token_s:
            now_s = running.prefilled_s = running.second_sent_s = time.perf_counter()
            _prefill(running, prefill, now_s, cached_tokens)

    def sent(self, route: Route, target: Target) -> None:
        self._steer.sent(route, target)
        running = self._running.get(route.id)
        if running is None:
            return
        now_s = time.perf_counter()
        again = running.second is not None if target.half == "decode" else running.sent_s > 0
        if again:
            running.give_up(now_s, _fault(running, route, "failed"))
        if target.half == "decode":
            running.second, running.second_sent_s = target, now_s
        else:
            running.first, running.second, running.sent_s = target, None, now_s
            running.prefilled_s = 0.0

    def unreached(self, route: Route, target: Target) -> None:
        self._steer.unreached(route, target)

    def quiet_s(self, target: Target) -> float:
        return self._steer.quiet_s(target)

    def first_token(self, route: Route, ttft_s: float) -> None:
        self._steer.first_token(route, ttft_s)
        running = self._running.get(route.id)
        if running is not None:
            running.first_token_s, running.streamed = time.perf_counter(), ttft_s >= 0

    def finished(self, route: Route, outcome: Outcome) -> None:
        self._steer.finished(route, outcome)
        running = self._running.pop(route.id, None)
        if running is not None:
            now_s = time.perf_counter()
            _end_legs(running, route, outcome, now_s)
            _tell(running.attributes, route, outcome)
            error = _status(outcome.status) if outcome.status >= 500 else ""
            self._take(running, now_s - max(0.0, outcome.e2e_s), now_s, error)

    def models(self) -> list[dict[str, object]]:
        return self._steer.models()

    def health(self) -> Health:
        return self._steer.health()

    # -- inside -----------------------------------------------------------------------------------

    def _begin(self, running: _Running, route: Route) -> None:
        if len(self._running) >= RUNNING_MAX:
            self._exporter.drop(1)
            return
        now_s = time.perf_counter()
        best = route.targets[0]
        told: dict[str, Value] = {"kvatlas.engine": best.worker}
        whole = running.add("route", running.began_s, now_s, told, kind=INTERNAL)
        found: dict[str, Value] = {
            "kvatlas.prompt_tokens": route.prompt_tokens,
            "kvatlas.expected_hit_tokens": best.expected_hit_tokens,
        }
        if route.unkeyed:
            found["kvatlas.unkeyed"] = route.unkeyed
        looked_up_s = route.looked_up_s or now_s
        running.add("lookup", running.began_s, looked_up_s, found, parent=whole, kind=INTERNAL)
        self._running[route.id] = running

    def _not_routed(self, running: _Running, error: BaseException) -> None:
        now_s = time.perf_counter()
        code = error.code if isinstance(error, RequestError) else "internal_error"
        if isinstance(error, RequestError):
            running.attributes["http.response.status_code"] = error.status
        elif not isinstance(error, Exception):  # the client left, or its deadline ended
            code = "cancelled"
        running.add("route", running.began_s, now_s, {}, kind=INTERNAL, error=code)
        running.attributes["error.type"] = code
        self._take(running, running.began_s, now_s, code)

    def _take(self, running: _Running, began_s: float, ended_s: float, error: str) -> None:
        context = running.context
        told = running.name, SERVER, began_s, ended_s, running.attributes, error
        running.spans.append(Span(context.trace, context.id, context.parent, *told))
        self._exporter.take(running.spans)


def _running(context: Context, request: Inbound, began_s: float) -> _Running:
    body = request.body
    operation = _OPERATIONS.get(request.path, "")
    model = body.get("model")
    model = model[:_MODEL_CHARS] if isinstance(model, str) else ""
    told: dict[str, Value] = {
        "gen_ai.provider.name": "kvatlas",
        "kvatlas.request_id": request.id,
        "http.request.method": "POST",
    }
    if operation:
        told["gen_ai.operation.name"] = operation
        told["gen_ai.request.stream"] = body.get("stream") is True
        told["url.path"] = request.path
    if model:
        told["gen_ai.request.model"] = model
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    if isinstance(most, int) and 0 <= most < 1 << 63:
        told["gen_ai.request.max_tokens"] = most
    if request.tenant_class:
        told["kvatlas.tenant_class"] = request.tenant_class
    return _Running(context, f"{operation or 'request'} {model}".strip(), began_s, told)


def _tell(told: dict[str, Value], route: Route, outcome: Outcome) -> None:
    """What is known of a request once it is over."""
    told["http.response.status_code"] = outcome.status
    told["kvatlas.engine"] = outcome.target.worker
    if outcome.status >= 400:
        told["error.type"] = _status(outcome.status)
    if outcome.prefilled_by:
        told["kvatlas.prefilled_by"] = outcome.prefilled_by
    if outcome.prompt_tokens >= 0:
        told["gen_ai.usage.input_tokens"] = outcome.prompt_tokens
    if outcome.cached_tokens >= 0:
        told["gen_ai.usage.cache_read.input_tokens"] = outcome.cached_tokens
    if outcome.completion_tokens >= 0:
        told["gen_ai.usage.output_tokens"] = outcome.completion_tokens
    if outcome.ttft_s >= 0:
        told["gen_ai.response.time_to_first_chunk"] = outcome.ttft_s
    if route.fallbacks:
        told["kvatlas.fallbacks"] = [f"{step.rung}: {step.reason}" for step in route.fallbacks]


def _end_legs(running: _Running, route: Route, outcome: Outcome, now_s: float) -> None:
    """The spans of who answered, and of who was to."""
    first, second, first_token_s = running.first, running.second, running.first_token_s
    if first is None:
        return
    status = outcome.status
    if not first_token_s:
        error = _fault(running, route, _status(status)) if status != 200 else ""
        running.give_up(now_s, error)
        return
    error = _status(status) if status >= 400 else ""
    last = second or first
    told: dict[str, Value] = {"kvatlas.engine": last.worker}
    if outcome.completion_tokens >= 0:
        told["gen_ai.usage.output_tokens"] = outcome.completion_tokens
    if not running.streamed:  # nobody outside sees where its prefill ends
        began_s = running.second_sent_s if second is not None else running.sent_s
        if second is not None and not running.prefilled_s:
            _prefill(running, first, now_s, outcome.cached_tokens)
        running.add("generate", began_s, now_s, told, error=error)
        return
    if second is None or not running.prefilled_s:
        _prefill(running, first, first_token_s, outcome.cached_tokens)
    else:
        running.add("transfer", running.second_sent_s, first_token_s, _halves(first, second))
    running.add("decode", first_token_s, now_s, told, error=error)


def _prefill(running: _Running, target: Target, ended_s: float, cached_tokens: int) -> None:
    """With what was loaded for it. When that was, only the engine knows: it is told as foreseen."""
    told: dict[str, Value] = {"kvatlas.engine": target.worker}
    if cached_tokens >= 0:
        told["gen_ai.usage.cache_read.input_tokens"] = cached_tokens
    whole = running.add("prefill", running.sent_s, ended_s, told)
    tiers = target.tier_tokens
    if target.load_s <= 0 or cached_tokens <= (tiers[0] if tiers else 0):
        return
    loaded: dict[str, Value] = {
        f"kvatlas.load.{tier.name.lower()}_tokens": tiers[tier]
        for tier in Tier
        if tier and tier < len(tiers) and tiers[tier]
    }
    began_s = min(running.sent_s + target.wait_s, ended_s)
    until_s = min(began_s + target.load_s, ended_s)
    loaded["kvatlas.estimated"] = True
    running.add("load", began_s, until_s, loaded, parent=whole, kind=INTERNAL)


def _halves(first: Target, second: Target) -> dict[str, Value]:
    return {"kvatlas.prefill_engine": first.worker, "kvatlas.decode_engine": second.worker}


def _fault(running: _Running, route: Route, otherwise: str) -> str:
    """Why the try under way was given up, by the last step down that names who was tried."""
    tried = {one.worker for one in (running.first, running.second) if one is not None}
    steps = (step.reason for step in reversed(route.fallbacks) if step.worker in tried)
    return next(steps, otherwise)


def _status(status: int) -> str:
    return "client_closed" if status == _CLIENT_CLOSED else str(status)
