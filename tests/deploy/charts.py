"""The chart as Helm renders it: Helm's own library, which a package brings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

kubernetes = pytest.importorskip("kubernetes_validate")
# It reads a megabyte of definitions for each document.
kubernetes.utils.schema_contents = functools.cache(kubernetes.utils.schema_contents)

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kvatlas"
EXAMPLE = DEPLOY / "examples" / "deepseek-v4-flash"
RELEASE = "kv"
KUBERNETES = ("1.30", "1.37")  # what Chart.yaml asks for, and the newest that is known here
Document = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast

WORKERS = [{"name": f"vllm-{i}", "url": f"http://vllm-{i}.vllm:8000"} for i in range(2)]
#: Whatever can be switched on.
FULL: dict[str, Any] = {
    "workers": WORKERS,
    "config": {
        "gateway": {"drain_timeout_s": 90.5},
        "admin": {"clients": ["ops:change"]},
        "tls": {"plain_engines": True, "plain_events": True},
        "register": {"beat_s": 2.0},
    },
    "secrets": {
        "keys": "keys",
        "tenants": "tenants",
        "admin": "admin",
        "gatewayTls": "gateway-tls",
        "agentTls": "agent-tls",
        "register": "valkey",
    },
    "register": {"url": "valkeys://valkey.serving:6379"},
    "agents": {
        "enabled": True,
        "engines": ["$(NODE_NAME)-0", "$(NODE_NAME)-1"],
        "disk": {"path": "/nvme/kvatlas", "sizeGB": 500},
        "object": "valkey://10.0.0.9:6379?ttl_s=3600",
        "peers": ["10.0.0.5", "10.0.0.6"],
    },
    "podMonitor": {"enabled": True, "labels": {"team": "serving"}, "token": {"secret": "scrape"}},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {}}],
        "monitors": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "nodeCIDRs": ["10.0.0.0/24"],
    },
}
#: Two gateways and the Valkey of the chart.
TRIAL: dict[str, Any] = {
    "workers": WORKERS,
    "secrets": {"keys": "keys", "tenants": "tenants"},
    "register": {"trial": True},
    "podMonitor": {"enabled": True},
}
#: As little as there can be.
SMALL: dict[str, Any] = {"workers": WORKERS[:1], "gateway": {"replicas": 1}}


def helm() -> Any:
    return pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel here")


@functools.cache
def _chart() -> Any:
    return helm().Chart.load(CHART)


def render(values: Mapping[str, Any]) -> list[Document]:
    """All documents. Raises what Helm says of bad values."""
    texts = _chart().render(dict(values), name=RELEASE, namespace="serving")
    return [
        document
        for path, text in texts.items()
        if path.endswith(".yaml")
        for document in yaml.load_all(text, LOADER)
        if document
    ]


def valid(document: Document, version: str = KUBERNETES[-1]) -> None:
    """Raises ValidationError for what Kubernetes does not know or take."""
    kubernetes.validate(document, version, strict=True)


def refusal(values: Mapping[str, Any]) -> str:
    """What Helm says of values that it does not take."""
    with pytest.raises(helm().HelmError) as caught:
        render(values)
    return str(caught.value)


def find(documents: list[Document], kind: str, name: str) -> Document:
    """The one of that kind and name."""
    found = [d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def pod(document: Document) -> Document:
    """What a workload says of its pods."""
    spec: Document = document["spec"]["template"]["spec"]
    return spec


def files(documents: list[Document], part: str, folder: Path) -> Path:
    """A pod's /etc/kvatlas in ``folder``, its kvatlas.toml changed to name that."""
    workload = {"gateway": "Deployment", "agent": "DaemonSet"}[part]
    spec = pod(find(documents, workload, f"{RELEASE}-{part}"))
    sources = next(v for v in spec["volumes"] if v["name"] == "files")["projected"]["sources"]
    there = {item["path"] for s in sources if "secret" in s for item in s["secret"]["items"]}
    text = find(documents, "ConfigMap", f"{RELEASE}-{part}")["data"]["kvatlas.toml"]
    for init in spec.get("initContainers", []):
        if init["command"][0] == "cp":
            text = text.replace(init["command"][2], init["command"][1])
    named = {word.partition('"')[0] for word in text.split("/etc/kvatlas/")[1:]}
    assert named == there  # neither is without the other
    for name in there:
        (folder / name).write_text("0" * 64)
    written = folder / "kvatlas.toml"
    written.write_text(text.replace("/etc/kvatlas/", f"{folder}/"))
    return written


def merged(*files: Path) -> dict[str, Any]:
    """Values of several files, the last word counts, as `helm -f A -f B`."""
    values: dict[str, Any] = {}
    for file in files:
        _merge(values, yaml.load(file.read_text("utf-8"), LOADER))
    return values


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
