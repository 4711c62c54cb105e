"""Requests as OpenTelemetry spans: a `Steer` around another one, which notes what it is told."""

from __future__ import annotations

import time

from kvatlas.config_tracing import TracingConfig
from kvatlas.errors import RequestError
from kvatlas.service import logs
from kvatlas.service.spans import Context, Record, Step, context_of
from kvatlas.service.steer import Half, Health, Inbound, Outcome, Route, Steer, Target
from kvatlas.service.tracing_export import Exporter

RUNNING_MAX = 100_000
_MODEL_CHARS = 200
_TOKENS_MAX = 1 << 31


class Traced:
    """Implements `Steer`; what it notes goes to ``exporter``."""

    def __init__(self, steer: Steer, exporter: Exporter, config: TracingConfig) -> None:
        self._steer = steer
        self._exporter = exporter
        self._ratio = config.sample_ratio
        self._running: dict[str, Record] = {}

    async def choose(self, request: Inbound) -> Route:
        """As `Steer.choose`; its engines are told where in the trace they are."""
        began_s = time.perf_counter()
        context = context_of(request.headers, self._ratio)
        logs.TRACE_ID.set(context.trace)
        try:
            route = await self._steer.choose(request)
        except BaseException as error:
            if context.sampled:
                self._not_routed(_record(context, request, began_s), error)
            raise
        route.headers += context.headers
        if context.sampled:
            self._begin(_record(context, request, began_s), route)
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
        record = self._running.get(route.id)
        if record is not None:
            now_s = time.perf_counter()
            record.steps.append(Step("prefilled", now_s, cached_tokens=cached_tokens))

    def sent(self, route: Route, target: Target) -> None:
        self._steer.sent(route, target)
        record = self._running.get(route.id)
        if record is not None:
            to = target.worker, target.half, target.tier_tokens, target.wait_s, target.load_s
            record.steps.append(Step("sent", time.perf_counter(), *to))

    def unreached(self, route: Route, target: Target) -> None:
        self._steer.unreached(route, target)

    def quiet_s(self, target: Target) -> float:
        return self._steer.quiet_s(target)

    def first_token(self, route: Route, ttft_s: float) -> None:
        self._steer.first_token(route, ttft_s)
        record = self._running.get(route.id)
        if record is not None:
            record.steps.append(Step("first_token", time.perf_counter()))

    def finished(self, route: Route, outcome: Outcome) -> None:
        self._steer.finished(route, outcome)
        record = self._running.pop(route.id, None)
        if record is not None:
            record.ended_s = time.perf_counter()
            record.fallbacks = route.fallbacks
            record.status, record.engine = outcome.status, outcome.target.worker
            record.prefilled_by, record.ttft_s = outcome.prefilled_by, outcome.ttft_s
            record.input_tokens = outcome.prompt_tokens
            record.cached_tokens = outcome.cached_tokens
            record.output_tokens = outcome.completion_tokens
            self._exporter.take(record)

    def models(self) -> list[dict[str, object]]:
        return self._steer.models()

    def health(self) -> Health:
        return self._steer.health()

    # -- inside -----------------------------------------------------------------------------------

    def _begin(self, record: Record, route: Route) -> None:
        if len(self._running) >= RUNNING_MAX:
            self._exporter.drop()
            return
        best = route.targets[0]
        record.looked_up_s, record.routed_s = route.looked_up_s, time.perf_counter()
        record.unkeyed, record.prompt_tokens = route.unkeyed, route.prompt_tokens
        record.best, record.expected_hit_tokens = best.worker, best.expected_hit_tokens
        self._running[route.id] = record

    def _not_routed(self, record: Record, error: BaseException) -> None:
        """Refused; else the client left, its deadline ended, or the fault is ours."""
        record.ended_s = record.routed_s = time.perf_counter()
        if isinstance(error, RequestError):
            record.refused, record.status = error.code, error.status
        else:
            record.refused = "internal_error" if isinstance(error, Exception) else "cancelled"
        self._exporter.take(record)


def _record(context: Context, request: Inbound, began_s: float) -> Record:
    body = request.body
    model = body.get("model")
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    return Record(
        context.trace,
        context.id,
        context.parent,
        request.id,
        request.path,
        model[:_MODEL_CHARS] if isinstance(model, str) else "",
        body.get("stream") is True,
        most if isinstance(most, int) and 0 <= most < _TOKENS_MAX else -1,
        request.tenant_class,
        began_s,
    )
