"""A gateway with two tenants in front of an engine: who is nobody is refused, each tenant hits what
it has cached, and nothing that a client sends makes it hit what is another's.

    python examples/tenants.py

Everything runs in this process. Exit status 1 where something is not as it should be.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec

from kvatlas.cli.main import main as kvatlas
from kvatlas.config import load
from kvatlas.config_tenants import digest_of
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import TenantSalt, salt_of, tag_of
from kvatlas.service.assembly import Assembly
from kvatlas.service.gateway import Gateway
from kvatlas.service.http_client import HttpClient
from kvatlas.workload.models import load_layout
from kvatlas.workload.spec import EngineSpec

SECRET = "for gateways and agents alone"
PROMPT = list(range(1, 641))
KEYS = {"red": "key of red", "blue": "key of blue"}


class Client:
    """Asks the gateway, and keeps what was not as it should be."""

    def __init__(self, port: int) -> None:
        self.faults = 0
        self._http = HttpClient()
        self._url = f"http://127.0.0.1:{port}/v1/completions"

    async def ask(self, key: str, **more: object) -> tuple[int, int]:
        """The status, and how many tokens of the prompt the engine had cached."""
        body = msgspec.json.encode({"model": "m", "prompt": PROMPT, "max_tokens": 1} | more)
        headers = [(b"content-type", b"application/json")]
        headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
        answer = await self._http.request(
            "POST", self._url, headers=headers, body=body, timeout_s=30, size_max=1 << 20
        )
        told = msgspec.json.decode(answer.body)
        details = told.get("usage", {}).get("prompt_tokens_details") or {}
        return answer.status, details.get("cached_tokens", 0)

    async def expect(self, what: str, asked: tuple[int, int], status: int, *, hits: bool) -> None:
        right = asked[0] == status and bool(asked[1]) == hits
        print(f"{'ok   ' if right else 'FAULT'} {what}: status {asked[0]}, {asked[1]} tokens hit")
        self.faults += not right

    async def close(self) -> None:
        await self._http.close()


async def show(folder: Path, engine: str) -> int:
    """What holds, line by line; how much does not."""
    (folder / "secret").write_text(SECRET)
    (folder / "tenants.toml").write_text(
        "".join(f'[[tenant]]\nname = "{n}"\nkeys = ["{digest_of(k)}"]\n' for n, k in KEYS.items())
    )
    config = folder / "kvatlas.toml"
    config.write_text(
        f'[keys]\nsecret_file = "{folder / "secret"}"\n'
        f'[tenants]\nfile = "{folder / "tenants.toml"}"\n'
        f'[[worker]]\nname = "w"\nurl = "{engine}"\nengine = "stub"\nlayout = "32"\n'
    )
    assembly = Assembly(load(config))
    await assembly.start()
    settings = msgspec.structs.replace(assembly.config.gateway, port=0)
    gateway = Gateway(settings, assembly.steering, tenants=assembly.tenancy.tenants)
    await gateway.start()
    client = Client(gateway.port)
    red, blue = KEYS["red"], KEYS["blue"]
    ring = Keyring(SECRET.encode())
    stolen = salt_of(ring, TenantSalt(tag_of(ring, "red"), 0))
    try:
        await client.expect("nobody", await client.ask(""), 401, hits=False)
        await client.expect("a forged key", await client.ask(red + "x"), 401, hits=False)
        await client.expect("red, first", await client.ask(red), 200, hits=False)
        await client.expect("red, again", await client.ask(red), 200, hits=True)
        await client.expect("blue, the same prompt", await client.ask(blue), 200, hits=False)
        await client.expect("blue, again", await client.ask(blue), 200, hits=True)
        await client.expect("blue's own", await client.ask(blue, cache_salt="mine"), 200, hits=True)
        kvatlas(["tenant", "set", "blue", "--raise-epoch", "--config", str(config)])
        await assembly.tenancy.refresh()
        asked = await client.ask(blue, cache_salt=stolen)
        await client.expect("blue, new epoch, red's true salt", asked, 200, hits=False)
        await client.expect("red, as before", await client.ask(red), 200, hits=True)
    finally:
        await client.close()
        await gateway.close()
        await assembly.close()
    return client.faults


async def main() -> int:
    spec = EngineSpec(blocks=4000, prefill_tokens_per_s=1e6, decode_step_s=1e-4)
    options = StubOptions(load_layout("32", engine="vllm"), spec, model_name="m")
    with tempfile.TemporaryDirectory() as folder:
        async with StubCluster(options) as cluster:
            faults = await show(Path(folder), cluster.addresses[0].url)
    print("all as it should be" if not faults else f"{faults} of them are wrong")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
