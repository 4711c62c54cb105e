"""What the figures of metrics and traces need beside the gateway.

``python -m benchmarks.observability_child blind ...``: ``kvatlas serve ...`` that counts nothing.
``... collect``: a collector of spans that takes all and keeps nothing; prints its port.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

import uvloop

from kvatlas.cli import serve
from kvatlas.cli.main import main
from kvatlas.core.ladder import Fallback
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.steer import Inbound, Route, Target


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


class Still:
    """A `Steer` that knows one engine, and does nothing else."""

    target = Target("w0", "http://127.0.0.1:1", (), 1500, tier_tokens=(1500,))

    async def choose(self, request: Inbound) -> Route:
        return Route(request.id, (self.target,), 2000)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_: object) -> None: ...


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
        serve.GatewayMetrics = Blind  # type: ignore[misc]
        sys.exit(main(["serve", *sys.argv[2:]]))
