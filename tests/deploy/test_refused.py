"""Values that cannot be right are refused before anything is installed, with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from charts import FULL, SMALL, TRIAL, WORKERS, refusal, render


def full(path: str, value: Any) -> dict[str, Any]:
    """All that can be on, but for one value."""
    values = copy.deepcopy(FULL)
    *tables, key = path.split(".")
    table = values
    for name in tables:
        table = table.setdefault(name, {})
    table[key] = value
    return values


def test_what_is_right_is_taken() -> None:
    assert render(FULL)
    assert render(SMALL)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (SMALL | {"gateway": {"replicas": 2}}, "several gateways need a Valkey"),
        (SMALL | {"agents": {"enabled": True}}, "agents need a Valkey"),
        (TRIAL | {"secrets": {}}, "register: its members need secrets.keys"),
        (full("register.trial", True), "register: url of your own, or trial: not both"),
        (TRIAL | {"secrets": {"keys": "k", "register": "p"}}, "there is no register.url"),
        (SMALL | {"secrets": {"tenants": "t"}}, "secrets.tenants needs secrets.keys"),
        (full("secrets.agentTls", ""), "secrets.gatewayTls without secrets.agentTls"),
        (full("secrets.gatewayTls", ""), "secrets.agentTls without secrets.gatewayTls"),
        (full("agents.disk.sizeGB", 0), "agents.disk: path and sizeGB need each other"),
        (full("agents.disk.path", ""), "agents.disk: path and sizeGB need each other"),
        (full("networkPolicy.nodeCIDRs", []), "networkPolicy.nodeCIDRs: gateways reach agents"),
    ],
)
def test_values_that_contradict_each_other(values: dict[str, Any], reason: str) -> None:
    assert reason in refusal(values)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (SMALL | {"workers": []}, "at '/workers': minItems: got 0, want 1"),
        (full("gateway.replica", 2), "additional properties 'replica' not allowed"),
        (full("gateway.replicas", 0), "at '/gateway/replicas': minimum"),
        (full("gateway.port", 80), "at '/gateway/port': minimum"),
        (full("config.router", {"polici": "price"}), "additional properties 'polici' not allowed"),
        (full("config.router", {"policy": "best"}), "at '/config/router/policy': value must be"),
        (full("config.gateway", {"host": "0.0.0.0"}), "additional properties 'host' not allowed"),
        (full("config.tls", {"cert": "a.pem"}), "additional properties 'cert' not allowed"),
        (full("config.keys", {"secret_file": "k"}), "additional properties 'keys' not allowed"),
        (full("config.register", {"url": "x"}), "additional properties 'url' not allowed"),
        (SMALL | {"workers": [WORKERS[0] | {"role": "both"}]}, "at '/workers/0/role'"),
        (SMALL | {"workers": [{"name": "a"}]}, "missing property 'url'"),
        (full("agents.engines", []), "at '/agents/engines': minItems"),
        (full("register.url", "memcached://a:1"), "at '/register/url': 'memcached://a:1' does not"),
        (full("register.url", "valkey://:word@a:1"), "at '/register/url'"),
        (full("agents.runAsUser", 0), "at '/agents/runAsUser': minimum"),
        (full("agents.dramGiB", "32GB"), "at '/agents/dramGiB': got string, want integer"),
        (full("agents.object", "nfs://x"), "at '/agents/object': 'nfs://x' does not match"),
        (full("networkPolicy.nodeCIDRs", ["all"]), "at '/networkPolicy/nodeCIDRs/0'"),
    ],
)
def test_values_that_are_none(values: dict[str, Any], reason: str) -> None:
    assert reason in refusal(values)
