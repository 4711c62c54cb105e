"""The gateway without a decision behind it: what its bytes and sockets alone cost.

Run as ``python -m benchmarks.gateway_serve URL...``: serves on a free port, prints it as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys

import uvloop

from kvatlas.config import GatewayConfig
from kvatlas.service.gateway import Gateway
from kvatlas.service.steer import Health, Inbound, Outcome, Route, Target


class RoundRobin:
    """A `Steer` that takes the engines in turn."""

    def __init__(self, urls: list[str]) -> None:
        targets = [Target(worker=f"w{index}", url=url) for index, url in enumerate(urls)]
        self._turn = itertools.cycle(targets)

    async def choose(self, request: Inbound) -> Route:
        return Route(id=request.id, targets=(next(self._turn),))

    def sent(self, route: Route, target: Target) -> None:
        pass

    def first_token(self, route: Route, ttft_s: float) -> None:
        pass

    def finished(self, route: Route, outcome: Outcome) -> None:
        pass

    def models(self) -> list[dict[str, object]]:
        return [{"id": "mock", "object": "model"}]

    def health(self) -> Health:
        return Health(ready=True)


async def main(urls: list[str]) -> None:
    gateway = Gateway(GatewayConfig(port=0), RoundRobin(urls))
    await gateway.start()
    print(json.dumps(gateway.port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
