"""From what was noted of a request to its spans, by the names of OpenTelemetry's GenAI conventions.

One for the request and, under it, ``route`` (in it ``lookup``), ``prefill`` (in it ``load``),
``transfer`` between the halves of a pair, ``decode``; ``generate`` where an answer came whole.
Pure: the process that sends spans runs it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvatlas.core.records import Tier
from kvatlas.service.spans import Record, Step

INTERNAL, SERVER, CLIENT = 0, 1, 2  # as OpenTelemetry's SDK numbers kinds of spans

_CLIENT_CLOSED = 499
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}

Value = str | bool | int | float | list[str]


class Span(msgspec.Struct, frozen=True):
    """``parent`` 0: none. Times as in `Record`. ``error`` "": it went well."""

    id: int
    parent: int
    name: str
    kind: int
    began_s: float
    ended_s: float
    attributes: dict[str, Value]
    error: str = ""


def spans_of(record: Record, new_id: Callable[[], int]) -> list[Span]:
    """All of them, the request's own last."""
    way = _Way(record, new_id)
    whole = way.route()
    if record.refused:
        way.request(whole, record.refused)
        return way.spans
    for step in record.steps:
        way.take(step)
    way.end()
    way.request(whole, _error(record.status) if record.status >= 500 else "")
    return way.spans


class _Way:
    """One request on its way, step by step. ``first``: who does all of it, or the first half;
    ``second``: the other half."""

    def __init__(self, record: Record, new_id: Callable[[], int]) -> None:
        self.spans: list[Span] = []
        self._record = record
        self._new_id = new_id
        self._first: Step | None = None
        self._second: Step | None = None
        self._handed_s = 0.0  # when the second half's turn was
        self._prefilled = False
        self._first_token_s = 0.0

    def _add(
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
        id, under = self._new_id(), parent or self._record.id
        self.spans.append(Span(id, under, name, kind, began_s, ended_s, attributes, error))
        return id

    # -- before an engine -------------------------------------------------------------------------

    def route(self) -> dict[str, Value]:
        """What is told of the request itself so far."""
        record = self._record
        chosen: dict[str, Value] = {"kvatlas.engine": record.best} if record.best else {}
        times = record.began_s, record.routed_s
        route = self._add("route", *times, chosen, kind=INTERNAL, error=record.refused)
        if not record.refused:
            found: dict[str, Value] = {
                "kvatlas.prompt_tokens": record.prompt_tokens,
                "kvatlas.expected_hit_tokens": record.expected_hit_tokens,
            }
            if record.unkeyed:
                found["kvatlas.unkeyed"] = record.unkeyed
            until_s = record.looked_up_s or record.routed_s
            self._add("lookup", record.began_s, until_s, found, parent=route, kind=INTERNAL)
        return _asked(record)

    def request(self, told: dict[str, Value], error: str) -> None:
        """The request's own."""
        record = self._record
        _answered(told, record)
        operation = _OPERATIONS.get(record.path, "request")
        name = f"{operation} {record.model}".strip()
        ids = record.id, record.parent
        self.spans.append(Span(*ids, name, SERVER, record.began_s, record.ended_s, told, error))

    # -- at engines -------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        match step.what:
            case "sent":
                again = self._second if step.half == "decode" else self._first
                if again is not None:
                    self._give_up(step.at_s, self._fault("failed"))
                if step.half == "decode":
                    self._second, self._handed_s = step, step.at_s
                else:
                    self._first, self._second, self._prefilled = step, None, False
            case "prefilled":
                if not self._first_token_s:
                    self._prefilled, self._handed_s = True, step.at_s
                    self._prefill(step.at_s, step.cached_tokens)
            case "first_token":
                self._first_token_s = step.at_s

    def end(self) -> None:
        """The spans of who answered, and of who was to."""
        record, first, second = self._record, self._first, self._second
        if first is None:
            return
        error = _error(record.status) if record.status >= 400 else ""
        if not self._first_token_s:
            self._give_up(record.ended_s, self._fault(error) if error else "")
            return
        told: dict[str, Value] = {"kvatlas.engine": (second or first).worker}
        if record.output_tokens >= 0:
            told["gen_ai.usage.output_tokens"] = record.output_tokens
        if record.ttft_s < 0:  # it came whole: nobody outside sees where its prefill ends
            if second is not None and not self._prefilled:
                self._prefill(record.ended_s, record.cached_tokens)
            began_s = self._handed_s if second is not None else first.at_s
            self._add("generate", began_s, record.ended_s, told, error=error)
            return
        if second is None or not self._prefilled:
            self._prefill(self._first_token_s, record.cached_tokens)
        else:
            self._add("transfer", self._handed_s, self._first_token_s, self._halves())
        self._add("decode", self._first_token_s, record.ended_s, told, error=error)

    def _give_up(self, at_s: float, error: str) -> None:
        """The try under way ended before anything of its answer was seen."""
        first = self._first
        if first is not None and not self._prefilled:
            told: dict[str, Value] = {"kvatlas.engine": first.worker}
            self._add("prefill", first.at_s, at_s, told, error=error)
        elif self._second is not None:
            self._add("transfer", self._handed_s, at_s, self._halves(), error=error)

    def _prefill(self, ended_s: float, cached_tokens: int) -> None:
        """With what was loaded for it. When that was, only the engine knows: it is told as it was
        foreseen."""
        first = self._first
        if first is None:
            return
        told: dict[str, Value] = {"kvatlas.engine": first.worker}
        if cached_tokens >= 0:
            told["gen_ai.usage.cache_read.input_tokens"] = cached_tokens
        prefill = self._add("prefill", first.at_s, ended_s, told)
        tiers = first.tier_tokens
        if first.load_s <= 0 or cached_tokens <= (tiers[0] if tiers else 0):
            return
        loaded: dict[str, Value] = {
            f"kvatlas.load.{Tier(tier).name.lower()}_tokens": tokens
            for tier, tokens in enumerate(tiers)
            if tier and tokens
        }
        loaded["kvatlas.estimated"] = True
        began_s = min(first.at_s + first.wait_s, ended_s)
        until_s = min(began_s + first.load_s, ended_s)
        self._add("load", began_s, until_s, loaded, parent=prefill, kind=INTERNAL)

    def _halves(self) -> dict[str, Value]:
        pair = ("kvatlas.prefill_engine", self._first), ("kvatlas.decode_engine", self._second)
        return {name: step.worker for name, step in pair if step is not None}

    def _fault(self, otherwise: str) -> str:
        """Why the try under way was given up, by the step down that names who was tried."""
        tried = {step.worker for step in (self._first, self._second) if step is not None}
        steps = (step.reason for step in self._record.fallbacks if step.worker in tried)
        return next(steps, otherwise)


def _asked(record: Record) -> dict[str, Value]:
    told: dict[str, Value] = {
        "gen_ai.provider.name": "kvatlas",
        "kvatlas.request_id": record.request_id,
        "http.request.method": "POST",
    }
    operation = _OPERATIONS.get(record.path, "")
    if operation:
        told["gen_ai.operation.name"] = operation
        told["gen_ai.request.stream"] = record.streams
        told["url.path"] = record.path
    if record.model:
        told["gen_ai.request.model"] = record.model
    if record.max_tokens >= 0:
        told["gen_ai.request.max_tokens"] = record.max_tokens
    if record.tenant_class:
        told["kvatlas.tenant_class"] = record.tenant_class
    return told


def _answered(told: dict[str, Value], record: Record) -> None:
    if record.status:
        told["http.response.status_code"] = record.status
    if record.refused or record.status >= 400:
        told["error.type"] = record.refused or _error(record.status)
    for name, worker in (("engine", record.engine), ("prefilled_by", record.prefilled_by)):
        if worker:
            told[f"kvatlas.{name}"] = worker
    for name, tokens in (
        ("input_tokens", record.input_tokens),
        ("cache_read.input_tokens", record.cached_tokens),
        ("output_tokens", record.output_tokens),
    ):
        if tokens >= 0:
            told[f"gen_ai.usage.{name}"] = tokens
    if record.ttft_s >= 0:
        told["gen_ai.response.time_to_first_chunk"] = record.ttft_s
    if record.fallbacks:
        told["kvatlas.fallbacks"] = [f"{step.rung}: {step.reason}" for step in record.fallbacks]


def _error(status: int) -> str:
    return "client_closed" if status == _CLIENT_CLOSED else str(status)
