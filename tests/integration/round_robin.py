"""The plainest `Steer`: engines in turn. The baseline that priced routing is compared with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from kvatlas.errors import EngineError, RequestError
from kvatlas.service.http_client import HttpClient
from kvatlas.service.steer import Half, Health, Inbound, Outcome, Route, Target

REASON = "round_robin"


class RoundRobin:
    """Takes the engines in turn; when one cannot be reached, the next ones.

    ``urls``: worker name → base URL. `refresh` asks the engines for their models; until it has
    found some, every model name is passed on.
    """

    def __init__(self, urls: Mapping[str, str]) -> None:
        self.in_flight: Counter[str] = Counter()
        self._targets = [Target(worker=name, url=url) for name, url in urls.items()]
        self._next = 0
        self.rest: tuple[Target, ...] = ()  # targets beyond those of a route
        self._at: dict[int, str] = {}  # id of a running route → the worker that has it
        self._models: dict[str, dict[str, object]] = {}
        self._unreachable: dict[str, str] = {}

    async def refresh(self, client: HttpClient, timeout_s: float = 2.0) -> None:
        """Reads every engine's /v1/models; engines that do not answer are named in `health`."""
        self._unreachable.clear()
        for target in self._targets:
            try:
                answer = await client.get_json(f"{target.url}/v1/models", timeout_s=timeout_s)
                for model in answer["data"]:
                    self._models.setdefault(str(model["id"]), model)
            except (EngineError, KeyError, TypeError) as error:
                self._unreachable[target.worker] = str(error)

    async def choose(self, request: Inbound) -> Route:
        model = request.body.get("model")
        if self._models and isinstance(model, str) and model not in self._models:
            known = ", ".join(sorted(self._models))
            text = f"the model {model!r} does not exist; models here: {known}"
            raise RequestError(text, status=404, code="model_not_found", param="model")
        if not self._targets:
            raise RequestError("no engine is configured", status=503, code="no_engine")
        start = self._next % len(self._targets)
        self._next = start + 1
        turn = (*self._targets[start:], *self._targets[:start])
        return Route(id=request.id, targets=turn, unkeyed=REASON)

    def left(self, route: Route) -> bool:
        return bool(self.rest)

    def more(self, route: Route) -> tuple[Target, ...]:
        rest, self.rest = self.rest, ()
        return rest

    def decoders(self, route: Route, prefill: Target) -> tuple[Target, ...]:
        return ()

    def alone(self, route: Route, failed: Half) -> tuple[Target, ...]:
        return ()

    def prefilled(self, route: Route, prefill: Target, cached_tokens: int, ttft_s: float) -> None:
        """There are no halves."""

    def sent(self, route: Route, target: Target) -> None:
        self._leave(route)
        self._at[id(route)] = target.worker
        self.in_flight[target.worker] += 1

    def unreached(self, route: Route, target: Target) -> None:
        """Another target is tried next."""

    def quiet_s(self, target: Target) -> float:
        return math.inf

    def first_token(self, route: Route, ttft_s: float) -> None:
        pass

    def finished(self, route: Route, outcome: Outcome) -> None:
        self._leave(route)

    def models(self) -> list[dict[str, object]]:
        return list(self._models.values())

    def health(self) -> Health:
        flags = ("engine_unreachable",) if self._unreachable else ()
        ready = len(self._unreachable) < len(self._targets)
        return Health(ready=ready, flags=flags, details={"unreachable": dict(self._unreachable)})

    def _leave(self, route: Route) -> None:
        worker = self._at.pop(id(route), None)
        if worker is not None:
            self.in_flight[worker] -= 1
