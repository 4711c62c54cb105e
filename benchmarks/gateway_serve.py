"""The gateway with engines in turn: what its bytes and sockets cost without prompts and prices.

Run as ``python -m benchmarks.gateway_serve URL...``: serves on a free port, prints it as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from kvatlas.config import Config, GatewayConfig, RouterConfig, WorkerConfig
from kvatlas.service.assembly import Assembly
from kvatlas.service.gateway import Gateway


async def main(urls: list[str]) -> None:
    workers = tuple(
        WorkerConfig(name=f"w{i}", url=url, engine="stub", events="", layout="256")
        for i, url in enumerate(urls)
    )
    config = Config(
        worker=workers, gateway=GatewayConfig(port=0), router=RouterConfig(policy="round_robin")
    )
    assembly = Assembly(config)
    await assembly.start()
    gateway = Gateway(config.gateway, assembly.steering)
    await gateway.start()
    print(json.dumps(gateway.port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
