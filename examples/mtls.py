"""A gateway, an engine and an agent that know each other by certificates; who is none of them is
refused. Everything runs on this machine, in a folder that is gone afterwards.

    python examples/mtls.py

Ends with status 1 where something that should pass does not, or something passes that should not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvatlas.cli.certs import issue, make_ca
from kvatlas.errors import EngineError
from kvatlas.service.http_client import HttpClient
from kvatlas.service.tls import Outgoing, from_outside

HOST = "127.0.0.1"
PATIENCE_S = 60.0
ASKED = {
    "model": "demo",
    "messages": [{"role": "user", "content": "who are you?"}],
    "max_tokens": 8,
}


class Faults:
    """What did not come as it should."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def show(self, what: str, right: bool, told: object) -> None:
        print(f"{'ok   ' if right else 'WRONG'} {what}: {str(told)[:120]}")
        if not right:
            self.found.append(what)


@contextlib.contextmanager
def part(folder: Path, name: str, *arguments: str) -> Iterator[str]:
    """A part of the cluster as a process of its own; gives its first line."""
    argv = [sys.executable, "-m", "kvatlas", *arguments]
    with (folder / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"{name} does not start: {(folder / f'{name}.log').read_text()}")
        yield line
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()


def write_files(folder: Path) -> None:
    """The authority, a certificate for each part, and what each part is told."""
    make_ca(folder / "ca")
    make_ca(folder / "other-ca")
    for who in ("gateway", "engine", "agent"):
        issue(folder / "ca", who, "demo", [HOST])
    issue(folder / "ca", "client", "ops")
    issue(folder / "other-ca", "client", "ops")
    (folder / "secret").write_bytes(b"0123456789abcdef0123456789abcdef")
    (folder / "agent.toml").write_text(tls_of("agent"))


def tls_of(who: str) -> str:
    return f"""
[keys]
secret_file = "secret"
[tls]
ca = "ca/ca.pem"
cert = "ca/{who}-demo.pem"
key = "ca/{who}-demo.key"
"""


def gateway_file(engine: str, agent: str) -> str:
    return f"""
[[worker]]
name = "engine"
url = "{engine}"
engine = "stub"
[[agent]]
name = "node"
url = "{agent}"
workers = ["engine"]
[gateway]
host = "{HOST}"
port = 0
[admin]
clients = ["ops:read"]
[audit]
file = "audit.jsonl"
{tls_of("gateway")}"""


def known_as(folder: Path, who: str = "", authority: str = "ca") -> Outgoing:
    """A client that believes the cluster's authority, with a certificate or without."""
    own = [str(folder / authority / f"{who}{end}") for end in (".pem", ".key")] if who else []
    return from_outside(str(folder / "ca" / "ca.pem"), *own)


async def asked(url: str, outgoing: Outgoing | None, body: object = None) -> tuple[int, str]:
    """Status and answer; status 0 where there was none."""
    client = HttpClient(outgoing=outgoing)
    data = b"" if body is None else json.dumps(body).encode()
    headers = [(b"content-type", b"application/json")]
    try:
        method = "GET" if body is None else "POST"
        answer = await client.request(method, url, headers=headers, body=data, timeout_s=30)
        return answer.status, answer.body.decode("utf-8", "replace")
    except EngineError as error:
        return 0, str(error)
    finally:
        await client.close()


async def agent_is_up(gateway: str, outgoing: Outgoing) -> tuple[bool, str]:
    until, told = time.monotonic() + PATIENCE_S, ""
    while time.monotonic() < until:
        status, told = await asked(f"{gateway}/kvatlas/agents", outgoing)
        node = json.loads(told)["node"] if status == 200 else {}
        if node.get("up") and not node.get("behind"):
            return True, f"up at {node['url']}"
        await asyncio.sleep(0.1)
    return False, told


async def show(folder: Path, gateway: str, faults: Faults) -> None:
    nobody, ops = known_as(folder), known_as(folder, "client-ops")
    agent, stranger = known_as(folder, "agent-demo"), known_as(folder, "client-ops", "other-ca")

    status, told = await asked(f"{gateway}/v1/chat/completions", nobody, ASKED)
    faults.show(
        "a request passes, over TLS to the gateway and on to the engine", status == 200, told
    )
    up, told = await agent_is_up(gateway, ops)
    faults.show("the gateway hears the agent, encrypted", up, told)

    status, told = await asked(gateway.replace("https", "http") + "/v1/models", None)
    faults.show("plain HTTP is refused", status == 400 and "TLS only" in told, told)
    status, told = await asked(f"{gateway}/kvatlas/directory", agent)
    faults.show("an agent is no operator", status == 403 and "agent/demo" in told, told)
    status, told = await asked(f"{gateway}/kvatlas/directory", nobody)
    faults.show("nor is who has no certificate", status == 401, told)
    status, told = await asked(f"{gateway}/v1/models", stranger)
    faults.show("another authority's certificate is refused", status == 0, told)
    old = ssl.create_default_context(cafile=str(folder / "ca" / "ca.pem"))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    status, told = await asked(
        f"{gateway}/v1/models", Outgoing(lambda: old, lambda der: None, lambda host: False)
    )
    faults.show("TLS 1.2 is refused", status == 0, told)

    status, told = await asked(f"{gateway}/kvatlas/directory", ops)
    faults.show("an operator reads the directory", status == 200, told)
    audit = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    read = any(line["who"] == "kvatlas://client/ops" for line in audit)
    refused = any(line["outcome"].startswith("refused") for line in audit)
    faults.show("the audit log has both, and no content", read and refused, audit[-1])


def show_command(folder: Path, gateway: str, faults: Faults) -> None:
    """A command asks as the operator, by files that the environment names."""
    files = {"CA": "ca/ca.pem", "CERT": "ca/client-ops.pem", "KEY": "ca/client-ops.key"}
    known = os.environ | {f"KVATLAS_{name}": file for name, file in files.items()}
    argv = [sys.executable, "-m", "kvatlas", "explain", "last", "--url", gateway]
    done = subprocess.run(
        argv, cwd=folder, env=known, capture_output=True, text=True, timeout=60, check=False
    )
    told = (done.stdout or done.stderr).strip().partition("\n")[0]
    faults.show("kvatlas explain does, too", done.returncode == 0, told)


def main() -> int:
    faults = Faults()
    with tempfile.TemporaryDirectory(prefix="kvatlas-mtls-") as name:
        folder = Path(name)
        write_files(folder)
        tls = ["ca/ca.pem", "ca/engine-demo.pem", "ca/engine-demo.key"]
        stub = ("stub-engine", "--layout", "16", "--model-name", "demo", "--tls", *tls)
        node = ("agent", "--dram", "16MB", "--listen", f"{HOST}:0", "--config", "agent.toml")
        with part(folder, "engine", *stub) as engine, part(folder, "agent", *node) as agent:
            worker = json.loads(engine)["engines"][0]["url"]
            (folder / "kvatlas.toml").write_text(gateway_file(worker, json.loads(agent)["listens"]))
            with part(folder, "gateway", "serve") as line:
                found = re.search(r"https://\S+", line)
                if found is None:
                    raise SystemExit(f"the gateway does not speak TLS: {line}")
                asyncio.run(show(folder, found[0], faults))
                show_command(folder, found[0], faults)
    print(f"{len(faults.found)} wrong" if faults.found else "all as it should be")
    return 1 if faults.found else 0


if __name__ == "__main__":
    sys.exit(main())
