"""Gateway and agent, started and asked as the chart's pods start them and Kubernetes asks them."""

from __future__ import annotations

import json
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
from charts import RELEASE, WORKERS, Document, files, find, pod, render

from kvatlas.connectors.child import Child, free_ports

pytestmark = pytest.mark.flaky(reruns=1)  # real clocks
BIN = Path(sys.executable).parent
KVATLAS = str(BIN / "kvatlas")
WITHIN_S = 30.0
NODE = "vllm-0"  # called as its engine


class Site:
    """The pods of a rendered chart, with TLS, as processes of this machine in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[Child] = []
        self.ports = dict(zip(("gateway", "agent", "events", "replay"), free_ports(4), strict=True))
        values = {
            "workers": WORKERS[:1],
            "config": {
                "tls": {"plain_engines": True, "plain_events": True},
                "admin": {"clients": ["ops:read"]},
            },
            "secrets": {"keys": "keys", "gatewayTls": "gateway-tls", "agentTls": "agent-tls"},
            "register": {"trial": True},
            "agents": {"enabled": True, "disk": {"path": "/nvme/kvatlas", "sizeGB": 500}},
            "networkPolicy": {"nodeCIDRs": ["10.0.0.0/24"]},
        }
        self._documents: list[Document] = render(values)

    def container(self, part: str) -> Document:
        workload = {"gateway": "Deployment", "agent": "DaemonSet"}[part]
        (only,) = pod(find(self._documents, workload, f"{RELEASE}-{part}"))["containers"]
        assert isinstance(only, dict)
        return only

    def start(self, part: str) -> Child:
        """Its container's command, and its start until it is up by the pod's own probe."""
        home = self._folder / part
        home.mkdir()
        written = files(self._documents, part, home)
        certify(self._folder / "ca", part, home)
        written.write_text(self.here(part, written.read_text()))
        argv = [self.here(part, argument) for argument in self.container(part)["args"]]
        child = Child(part, [KVATLAS, *argv], log=home / "log")
        child.start()
        self._children.append(child)
        comes(lambda: self.probed(part, "startupProbe") == 200, child)
        return child

    def stop(self) -> None:
        for child in self._children:
            child.stop()

    def probed(self, part: str, probe: str) -> int:
        """What a kubelet gets: it shows no certificate, and looks at none. 0: nothing."""
        asked = self.container(part)[probe]["httpGet"]
        url = f"{asked['scheme'].lower()}://127.0.0.1:{self.ports[part]}{asked['path']}"
        assert asked["scheme"] == "HTTPS"
        anybody = ssl.create_default_context()
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        try:
            with urllib.request.urlopen(url, timeout=5, context=anybody) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def here(self, part: str, text: str) -> str:
        """With this machine's paths and ports; Kubernetes puts in the node's name and address."""
        folder, ports = self._folder, self.ports
        for old, new in (
            ("/etc/kvatlas", f"{folder}/{part}"),
            ("/run/kvatlas", str(folder)),
            ("/nvme/kvatlas=500GB", f"{folder}/disk=64MB"),
            ("--dram=34359738368", "--dram=16MB"),
            ("0.0.0.0:9470", f"127.0.0.1:{ports['agent']}"),
            ("$(NODE_IP):9470", f"127.0.0.1:{ports['agent']}"),
            ("--events-port=9471", f"--events-port={ports['events']}"),
            ("$(NODE_NAME)", NODE),
            ("port = 8000", f"port = {ports['gateway']}"),
            ('host = "0.0.0.0"', 'host = "127.0.0.1"'),
            (f"{RELEASE}-gateway-each:8000", f"127.0.0.1:{ports['replay']}"),  # nobody is there
            (
                f'url = "valkey://{RELEASE}-valkey:6379"',
                f'url = "embedded"\nfolder = "{folder}/register"',
            ),
        ):
            text = text.replace(old, new)
        return text

    def agents(self) -> dict[str, Any]:
        """As the gateway tells an operator with a certificate."""
        home = self._folder / "ops"
        if not home.exists():
            home.mkdir()
            certify(self._folder / "ca", "client", home, name="ops")
        operator = ssl.create_default_context(cafile=home / "ca.crt")
        operator.load_cert_chain(home / "tls.crt", home / "tls.key")
        url = f"https://127.0.0.1:{self.ports['gateway']}/kvatlas/agents"
        with urllib.request.urlopen(url, timeout=5, context=operator) as answer:
            told = json.load(answer)
        assert isinstance(told, dict)
        return told


def certify(authority: Path, part: str, home: Path, name: str = "") -> None:
    """The files of a Secret, made as the guide says."""
    name = name or part
    commands = [] if authority.exists() else [["init", str(authority)]]
    commands.append(
        ["issue", str(authority), "--part", part, "--name", name, "--host", "127.0.0.1"]
    )
    for argv in commands:
        subprocess.run([KVATLAS, "certs", *argv], check=True, capture_output=True, timeout=60)
    for entry, made in (
        ("ca.crt", "ca.pem"),
        ("tls.crt", f"{part}-{name}.pem"),
        ("tls.key", f"{part}-{name}.key"),
    ):
        (home / entry).write_bytes((authority / made).read_bytes())


def comes(look: Callable[[], bool], child: Child) -> None:
    until = time.monotonic() + WITHIN_S
    while not look():
        child.check()
        assert time.monotonic() < until, child.log_tail()
        time.sleep(0.05)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.stop()


def test_pods_are_probed_find_each_other_and_end_by_their_hooks(site: Site) -> None:
    agent, gateway = site.start("agent"), site.start("gateway")
    assert site.probed("gateway", "livenessProbe") == 200
    assert site.probed("gateway", "readinessProbe") == 503  # there is no engine
    assert site.probed("agent", "livenessProbe") == site.probed("agent", "readinessProbe") == 200
    comes(lambda: site.agents().get(f"agent-{NODE}", {}).get("up", False), gateway)
    assert site.agents()[f"agent-{NODE}"]["workers"] == [NODE]
    hook = site.container("agent")["lifecycle"]["preStop"]["exec"]["command"]
    done = subprocess.run(
        [site.here("agent", word) for word in hook],
        env={"PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"draining": true' in done.stdout
    assert agent.wait(WITHIN_S) == 0
    os.kill(gateway.pid, signal.SIGTERM)
    assert gateway.wait(WITHIN_S) == 0
