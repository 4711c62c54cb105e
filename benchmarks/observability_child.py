"""What the figures of metrics and traces need beside the load client.

``python -m benchmarks.observability_child serve ...``: ``kvatlas serve ...``, but requests in
turn are counted nowhere, counted, traced as by default, and all traced. At its end it prints what
each took. ``... collect``: a collector of spans that takes all and keeps nothing; prints its port.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import uvloop

from kvatlas.cli import serve
from kvatlas.cli.main import main
from kvatlas.config_tracing import TracingConfig
from kvatlas.core.ladder import Fallback
from kvatlas.service.gateway import Gateway
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.tracing import Traced
from kvatlas.service.tracing_export import Exporter

NEITHER, METRICS, SOME, ALL = SIDES = ("neither", "metrics", "some traces too", "all traces too")


class Blind(GatewayMetrics):
    """Does nothing on the hot path."""

    def answered(self, endpoint: str, status: int, e2e_s: float) -> None: ...

    def routed(self, route_s: float) -> None: ...

    def fell(self, fallback: Fallback) -> None: ...

    def of_tenant(self, tenant_class: str, result: str) -> None: ...

    def sent(self, worker: str, expected_hit_tokens: int) -> None: ...

    def left(self, worker: str, status: int) -> None: ...

    def first_byte(self, ttft_s: float) -> None: ...

    def used(self, *_: object) -> None: ...


class Turns:
    """Processor seconds of the event loop's thread from one request's start to the next one's."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        self.flushed_s = 0.0  # what goes to the exporter's process comes at any time
        self._began_s = self._flushed_before_s = 0.0
        self._side = ""
        self._left: list[str] = []

    def next(self) -> str:
        """Whose turn it is: each once in four, in an order that no cycle of prompts has."""
        now_s = time.thread_time()
        if self._side:
            took_s = now_s - self._began_s - (self.flushed_s - self._flushed_before_s)
            self.seconds[self._side].append(took_s)
        self._left = self._left or random.sample(SIDES, len(SIDES))
        self._side = self._left.pop()
        self._flushed_before_s, self._began_s = self.flushed_s, time.thread_time()
        return self._side


TURNS = Turns()


class InTurn(Gateway):
    """One request at a time, each the next side's."""

    def __init__(self, config: Any, steer: Any, **more: Any) -> None:
        super().__init__(config, steer, **more)
        assert isinstance(steer, Traced)
        plain, counts, exporter = steer._steer, self.metrics, steer._exporter
        some = Traced(plain, exporter, TracingConfig())
        both = (Blind(), plain), (counts, plain), (counts, some), (counts, steer)
        self._sides: dict[str, tuple[GatewayMetrics, Any]] = dict(zip(SIDES, both, strict=True))

    async def _handle(self, request: Request, reply: Reply) -> None:
        if request.path.startswith("/v1/"):
            self.metrics, self._steer = self._sides[TURNS.next()]
        await super()._handle(request, reply)


class Timed(Exporter):
    """Its own share is told by itself."""

    def _write(self) -> None:
        began_s = time.thread_time()
        super()._write()
        TURNS.flushed_s += time.thread_time() - began_s


async def _collect() -> None:
    async def take(_: Request, reply: Reply) -> None:
        reply.send(200, [(b"content-type", b"application/x-protobuf")])

    server = HttpServer(take)
    await server.start()
    print(json.dumps(server.port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "collect":
        uvloop.run(_collect())
    else:
        serve.Gateway, serve.Exporter = InTurn, Timed  # type: ignore[misc]
        status = main(sys.argv[1:])
        print(json.dumps({"seconds": TURNS.seconds, "flushed_s": TURNS.flushed_s}), flush=True)
        sys.exit(status)
