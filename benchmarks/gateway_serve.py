"""The gateway without a decision behind it: what its bytes and sockets alone cost.

Run as ``python -m benchmarks.gateway_serve URL...``: serves on a free port, prints it as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from kvatlas.config import GatewayConfig
from kvatlas.service.gateway import Gateway
from kvatlas.service.round_robin import RoundRobin


async def main(urls: list[str]) -> None:
    gateway = Gateway(
        GatewayConfig(port=0), RoundRobin({f"w{i}": url for i, url in enumerate(urls)})
    )
    await gateway.start()
    print(json.dumps(gateway.port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
