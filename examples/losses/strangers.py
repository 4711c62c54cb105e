"""Who must not be a member is refused with the reason, and serves by itself: another cluster under
the name, a clock that is minutes apart, a second process of one name, another format of the
register.

    python examples/losses/strangers.py
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from stage import SECRET, Cluster, Losses, free_ports, until

from kvatlas.config_register import RegisterConfig
from kvatlas.connectors.child import Child
from kvatlas.core.keys import Keyring
from kvatlas.core.register_values import FORMAT, Join, Member
from kvatlas.service.membership import identity_of
from kvatlas.service.register import open_register

APART_S = 180.0
_LATE_CLOCK = f"""\
import sys, time
real = time.time
time.time = lambda: real() + {APART_S}
from kvatlas.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def main() -> int:
    losses = Losses("strangers")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), gateways=1) as cluster:
        ports = free_ports(4)
        (cluster.folder / "other secret").write_text("0e7a" * 16)
        other = f'[keys]\nsecret_file = "{cluster.folder / "other secret"}"\n'
        asyncio.run(newer(cluster.register_port, "newer"))
        cases = {
            "another cluster, with another secret": cluster.gateway(ports[0], other),
            f"{APART_S:.0f} s ahead of that of the register": clock(cluster, ports[1]),
            f"kept in format {FORMAT + 1}": cluster.gateway(ports[2], name="newer"),
        }
        for port, (why, gateway) in zip(ports, cases.items(), strict=False):
            gateway.start()
            try:
                gateway.wait_ready(60.0)
                until(lambda port=port: told(port)["standing"] == "refused")
                problem = told(port)["problem"]
                losses.check(why in problem, f"refused: {problem}")
                losses.check(serves(port), "     and it serves by itself")
            finally:
                gateway.stop()
        losses.check(not cluster.members(0)["others"], "the member that there is met nobody")
        taken = f"http://127.0.0.1:{cluster.gateway_ports[0]}"
        second = cluster.gateway(ports[3], advertise=taken)
        second.start()
        try:
            until(lambda: cluster.members(0)["standing"] == "refused")
            problem = cluster.members(0)["problem"]
            losses.check("another process is" in problem, f"of two at one address one: {problem}")
            losses.check(serves(cluster.gateway_ports[0]), "     and it serves by itself")
        finally:
            second.stop()
        return losses.end([])


def clock(cluster: Cluster, port: int) -> Child:
    """A gateway whose clock is ahead."""
    plain = cluster.gateway(port)
    config = cluster.folder / f"gateway-{port}.toml"
    argv = [sys.executable, "-c", _LATE_CLOCK, "serve", "--config", str(config)]
    return Child("serve", argv, log=plain.log, url=plain.url, health="/ready")


async def newer(port: int, name: str) -> None:
    """A member of a later version was there first."""
    config = RegisterConfig(url=f"valkey://127.0.0.1:{port}", name=name)
    register = open_register(config)
    identity = identity_of(Keyring(SECRET.encode()), name)
    member = Member("later", "gateway", "1", "http://later", "99.0")
    try:
        join = Join(member, identity, 600_000, round(time.time() * 1000), format=FORMAT + 1)
        await register.ask(join, 5.0)
    finally:
        await register.close()


def told(port: int) -> dict[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/kvatlas/members", timeout=60) as answer:
        return dict(json.load(answer))


def serves(port: int) -> bool:
    body = b'{"model": "stub", "prompt": [1, 2, 3], "max_tokens": 2}'
    url = f"http://127.0.0.1:{port}/v1/completions"
    asked = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return bool(answer.status == 200)


if __name__ == "__main__":
    sys.exit(main())
