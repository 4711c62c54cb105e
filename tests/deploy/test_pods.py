"""Gateway and agent, started and asked as the chart's pods start them and Kubernetes asks them."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from charts import FULL, NODES, RELEASE, SMALL, files, find, pod, render

from kvatlas.connectors.child import Child, free_ports

pytestmark = pytest.mark.flaky(reruns=1)  # real clocks
BIN = Path(sys.executable).parent
WITHIN_S = 30.0
Start = Callable[..., Child]

TLS = {"keys": "keys", "gatewayTls": "gateway-tls", "agentTls": "agent-tls"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Runs a container's command; all ends with the test."""
    running: list[Child] = []

    def begin(name: str, argv: list[str], url: str) -> Child:
        child = Child(name, [str(BIN / "kvatlas"), *argv], log=tmp_path / f"{name}.log", url=url)
        child.start()
        running.append(child)
        return child

    yield begin
    for child in running:
        child.stop()


def probed(probe: dict[str, Any], port: int) -> int:
    """What a kubelet gets: it shows no certificate, and looks at none."""
    asked = probe["httpGet"]
    url = f"{asked['scheme'].lower()}://127.0.0.1:{port}{asked['path']}"
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=5, context=anybody) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def comes(look: Callable[[], bool], child: Child) -> None:
    until = time.monotonic() + WITHIN_S
    while not look():
        child.check()
        assert time.monotonic() < until, child.log_tail()
        time.sleep(0.05)


def certify(folder: Path, part: str) -> None:
    """The files of a Secret, made as the guide says."""
    authority = folder / "ca"
    for argv in (
        ["init", str(authority)],
        ["issue", str(authority), "--part", part, "--name", part, "--host", "127.0.0.1"],
    ):
        command = [str(BIN / "kvatlas"), "certs", *argv]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    for name, made in (
        ("ca.crt", "ca.pem"),
        ("tls.crt", f"{part}-{part}.pem"),
        ("tls.key", f"{part}-{part}.key"),
    ):
        (folder / name).write_bytes((authority / made).read_bytes())


def test_a_gateway_is_probed_and_drains(start: Start, tmp_path: Path) -> None:
    plain = {"tls": {"plain_engines": True, "plain_events": True}}
    documents = render(SMALL | {"secrets": TLS, "config": plain})
    container = pod(find(documents, "Deployment", f"{RELEASE}-gateway"))["containers"][0]
    written = files(documents, "gateway", tmp_path)
    certify(tmp_path, "gateway")
    (port,) = free_ports(1)
    text = (
        written.read_text().replace("port = 8000", f"port = {port}").replace("0.0.0.0", "127.0.0.1")
    )
    written.write_text(text)
    argv = [a.replace("/etc/kvatlas", str(tmp_path)) for a in container["args"]]
    gateway = start("gateway", argv, f"http://127.0.0.1:{port}")
    comes(lambda: probed(container["startupProbe"], port) == 200, gateway)
    assert probed(container["livenessProbe"], port) == 200
    assert probed(container["readinessProbe"], port) == 503  # there is no engine
    os.kill(gateway.pid, signal.SIGTERM)
    assert gateway.wait(WITHIN_S) == 0


def test_an_agent_is_probed_and_its_hook_ends_it(start: Start, tmp_path: Path) -> None:
    agents = {"nodes": NODES, "disk": FULL["agents"]["disk"], "peers": True}
    documents = render(FULL | {"secrets": TLS, "agents": agents})
    container = pod(find(documents, "DaemonSet", f"{RELEASE}-agent"))["containers"][0]
    files(documents, "agent", tmp_path)
    certify(tmp_path, "agent")
    ports = free_ports(4)
    changed = {
        "/etc/kvatlas": str(tmp_path),
        "/run/kvatlas": str(tmp_path),
        "/nvme/kvatlas=500GB": f"{tmp_path}/disk=64MB",
        "0.0.0.0:9470": f"127.0.0.1:{ports[0]}",
        "--events-port=9471": f"--events-port={ports[1]}",
        "0.0.0.0:7400": f"127.0.0.1:{ports[3]}",
        "--dram=34359738368": "--dram=16MB",
    }
    argv = [_changed(argument, changed) for argument in container["args"]]
    agent = start("agent", argv, f"http://127.0.0.1:{ports[0]}")
    comes(lambda: probed(container["startupProbe"], ports[0]) == 200, agent)
    assert probed(container["livenessProbe"], ports[0]) == 200
    assert probed(container["readinessProbe"], ports[0]) == 200
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    path = f"{BIN}:{os.environ['PATH']}"
    done = subprocess.run(
        [_changed(word, changed) for word in hook],
        env={"PATH": path},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"draining": true' in done.stdout
    assert agent.wait(WITHIN_S) == 0


def _changed(text: str, changed: dict[str, str]) -> str:
    for old, new in changed.items():
        text = text.replace(old, new)
    return text
