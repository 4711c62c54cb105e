"""What the chart makes of its values: valid, consistent, and what kvatlas itself takes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml
from charts import (
    CHART,
    DEPLOY,
    EXAMPLE,
    FULL,
    KUBERNETES,
    RELEASE,
    SMALL,
    TRIAL,
    files,
    find,
    helm,
    kubernetes,
    merged,
    pod,
    render,
    valid,
)

from kvatlas import config
from kvatlas.dataplane.arena import Arena
from kvatlas.service import agent as node_agent

ENGINES, DEVICES = ("vllm", "sglang"), ("h20", "h200")
EXAMPLES = {
    f"{engine} on {device}": merged(
        EXAMPLE / f"values-{engine}.yaml", EXAMPLE / f"values-{device}.yaml"
    )
    for engine in ENGINES
    for device in DEVICES
}
CASES: dict[str, dict[str, Any]] = {"small": SMALL, "trial": TRIAL, "full": FULL} | EXAMPLES

#: What of the operator's CRD is used here (monitoring.coreos.com/v1, PodMonitor).
_SELECTOR = {"type": "object", "required": ["name", "key"], "additionalProperties": False}
_SELECTOR |= {"properties": {"name": {"type": "string"}, "key": {"type": "string"}}}
POD_MONITOR = {
    "type": "object",
    "required": ["selector", "podMetricsEndpoints"],
    "additionalProperties": False,
    "properties": {
        "selector": {"type": "object", "required": ["matchLabels"]},
        "podMetricsEndpoints": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "port": {"type": "string"},
                    "path": {"type": "string"},
                    "interval": {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"},
                    "scheme": {"enum": ["http", "https"]},
                    "authorization": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"type": {"type": "string"}, "credentials": _SELECTOR},
                    },
                    "tlsConfig": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "serverName": {"type": "string"},
                            "ca": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {"secret": _SELECTOR},
                            },
                        },
                    },
                },
            },
        },
    },
}


@pytest.mark.parametrize("name", CASES)
def test_helm_finds_nothing_to_say(name: str) -> None:
    said = helm().lint(CHART, CASES[name], strict=True)
    grave = [m for m in said["messages"] if m["severity"] > 1]
    assert not grave
    assert not said["errors"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", CASES)
def test_kubernetes_knows_every_field(name: str, version: str) -> None:
    for document in render(CASES[name]):
        if document["kind"] == "PodMonitor":
            jsonschema.validate(document["spec"], POD_MONITOR)
        else:
            valid(document, version)


def test_an_unknown_field_would_be_seen() -> None:
    document = find(render(SMALL), "Deployment", f"{RELEASE}-gateway")
    pod(document)["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes.ValidationError):
        valid(document)


@pytest.mark.parametrize("name", CASES)
def test_nobody_is_given_a_right_in_kubernetes(name: str) -> None:
    for document in render(CASES[name]):
        assert "rbac" not in document["apiVersion"]
        if "template" in document.get("spec", {}):
            spec = pod(document)
            assert spec["automountServiceAccountToken"] is False
            account = find(render(CASES[name]), "ServiceAccount", spec["serviceAccountName"])
            assert account["automountServiceAccountToken"] is False
            for container in spec["containers"]:
                rights = container["securityContext"]
                assert rights["readOnlyRootFilesystem"]
                assert rights["allowPrivilegeEscalation"] is False
                assert rights["capabilities"] == {"drop": ["ALL"]}
                assert rights.get("runAsNonRoot") or spec["securityContext"]["runAsNonRoot"]


@pytest.mark.parametrize("name", CASES)
def test_selectors_and_ports_meet(name: str) -> None:
    documents = render(CASES[name])
    pods = [d["spec"]["template"] for d in documents if "template" in d.get("spec", {})]
    for document in documents:
        spec = document.get("spec", {})
        wanted = spec.get("podSelector") or spec.get("selector") or {}
        wanted = wanted.get("matchLabels", wanted)
        if not wanted:
            continue
        chosen = [p for p in pods if wanted.items() <= p["metadata"]["labels"].items()]
        assert len(chosen) == 1, document["metadata"]["name"]
        ports = {p["name"]: p for c in chosen[0]["spec"]["containers"] for p in c["ports"]}
        named = [p.get("targetPort") for p in spec.get("ports", [])]
        named += [p["port"] for p in spec.get("podMetricsEndpoints", [])]
        named += [p["port"] for rule in spec.get("ingress", []) for p in rule.get("ports", [])]
        assert set(named) <= set(ports)


# -- kvatlas.toml -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_gateways_file_is_one_that_kvatlas_takes(name: str, tmp_path: Path) -> None:
    values = CASES[name]
    loaded = config.load(files(render(values), "gateway", tmp_path))
    assert [w.name for w in loaded.worker] == [w["name"] for w in values["workers"]]
    assert (loaded.gateway.host, loaded.gateway.port) == ("0.0.0.0", 8000)
    assert loaded.tls.on == ("gatewayTls" in values.get("secrets", {}))


@pytest.mark.parametrize("name", CASES)
def test_more_than_one_gateway_are_one_cluster(name: str, tmp_path: Path) -> None:
    documents = render(CASES[name])
    loaded = config.load(files(documents, "gateway", tmp_path))
    gateway = find(documents, "Deployment", f"{RELEASE}-gateway")
    if gateway["spec"]["replicas"] == 1:
        assert not loaded.register.on
        assert not loaded.gateway.peers
        return
    assert loaded.register.on
    assert loaded.register.name == RELEASE
    (peer,) = map(urlsplit, loaded.gateway.peers)
    peers = find(documents, "Service", str(peer.hostname))
    assert peers["spec"]["clusterIP"] == "None"
    assert peers["spec"]["ports"][0]["port"] == peer.port
    if name == "trial":
        valkey = urlsplit(loaded.register.url)
        there = find(documents, "Service", str(valkey.hostname))
        assert there["spec"]["ports"][0]["port"] == valkey.port


def test_gateways_with_a_register_can_write_their_tenants(tmp_path: Path) -> None:
    for values, writes in ((FULL, True), (SMALL | {"secrets": TRIAL["secrets"]}, False)):
        documents = render(values)
        spec = pod(find(documents, "Deployment", f"{RELEASE}-gateway"))
        text = find(documents, "ConfigMap", f"{RELEASE}-gateway")["data"]["kvatlas.toml"]
        file = re.search(r'file = "(.*)/tenants.toml"', text)
        assert file is not None
        mount = next(m for m in spec["containers"][0]["volumeMounts"] if m["mountPath"] == file[1])
        assert mount.get("readOnly", False) is not writes
        assert bool(spec.get("initContainers")) is writes


def test_values_reach_the_file_as_they_are(tmp_path: Path) -> None:
    worker = {"name": 'a"\\b<', "url": "http://a:1", "draft": True, "tensor_parallel": 8}
    tables = {
        "router": {"prefill_tokens_per_s": 12345.5, "policy": "least_load"},
        "directory": {"blocks_max": 20_000_000_000},
        "admin": {"clients": ["ops:change", "prometheus:metrics"]},
    }
    documents = render(SMALL | {"workers": [worker], "config": tables})
    loaded = config.load(files(documents, "gateway", tmp_path))
    assert {key: getattr(loaded.worker[0], key) for key in worker} == worker
    assert loaded.router.prefill_tokens_per_s == 12345.5
    assert loaded.router.policy == "least_load"
    assert loaded.directory.blocks_max == 20_000_000_000
    assert loaded.admin.clients == ("ops:change", "prometheus:metrics")
    assert loaded.gateway.drain_timeout_s == 120  # of values.yaml


def test_every_setting_can_be_given_and_nothing_else() -> None:
    script = DEPLOY / "helm" / "values_schema.py"
    told = subprocess.run(
        [sys.executable, "-c", "import values_schema; print(values_schema.text(), end='')"],
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert (CHART / "values.schema.json").read_text("utf-8") == told, f"run {script}"


def test_every_default_has_its_place_in_the_schema() -> None:
    """And every key of the chart's own has its default in values.yaml."""
    schema = yaml.safe_load((CHART / "values.schema.json").read_text("utf-8"))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))

    def paths(part: dict[str, Any], at: str = "") -> Iterator[str]:
        for key, value in part.get("properties", {}).items():
            if at + key in ("config", "global"):
                continue
            yield at + key
            yield from paths(value, f"{at}{key}.")

    def given(part: Any, at: str = "") -> Iterator[str]:
        for key, value in part.items() if isinstance(part, dict) else ():
            yield at + key
            yield from given(value, f"{at}{key}.")

    missing = set(paths(schema)) - set(given(defaults))
    assert not missing
    with pytest.raises(jsonschema.ValidationError, match=r"non-empty|too short"):
        jsonschema.validate(defaults, schema)  # engines are yours to name
    jsonschema.validate(defaults | SMALL, schema)


# -- ends and memory ---------------------------------------------------------------------------


def test_nobody_is_killed_before_his_drain_is_over() -> None:
    documents = render(FULL)
    gateway = pod(find(documents, "Deployment", f"{RELEASE}-gateway"))
    leaves_s = gateway["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert gateway["terminationGracePeriodSeconds"] > leaves_s + 90.5
    agent = pod(find(documents, "DaemonSet", f"{RELEASE}-agent"))
    assert agent["terminationGracePeriodSeconds"] > 600


@pytest.mark.parametrize("warm_s", [20.0, 300.5])
def test_a_gateway_may_take_the_time_for_its_warm_start(warm_s: float) -> None:
    documents = render(FULL | {"config": FULL["config"] | {"gateway": {"warm_start_s": warm_s}}})
    probe = pod(find(documents, "Deployment", f"{RELEASE}-gateway"))["containers"][0][
        "startupProbe"
    ]
    assert probe["periodSeconds"] * probe["failureThreshold"] > warm_s + 60


@pytest.mark.parametrize("dram", [1, 32, 1024])
def test_the_agents_memory_fits_into_its_pod(dram: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = FULL | {"agents": FULL["agents"] | {"dramGiB": dram}}
    spec = pod(find(render(asked), "DaemonSet", f"{RELEASE}-agent"))
    container = spec["containers"][0]
    option = next(a for a in container["args"] if a.startswith("--dram="))
    dram_bytes = config.size_bytes(option.partition("=")[2])
    assert dram_bytes == dram << 30
    share, least = node_agent._STAGING_SHARE, node_agent._STAGING_BYTES_MIN
    total: list[int] = []

    def seen(size: int, _: Path | None) -> None:
        total.append(size)
        raise config.ConfigError("seen")

    monkeypatch.setattr("kvatlas.dataplane.arena._check_room", seen)
    with pytest.raises(config.ConfigError, match="seen"):
        Arena.create(dram_bytes + max(least, dram_bytes // share))
    shm = next(v for v in spec["volumes"] if v["name"] == "shm")["emptyDir"]["sizeLimit"]
    memory = container["resources"]["limits"]["memory"]
    assert memory == container["resources"]["requests"]["memory"]
    mib = {word: int(word.removesuffix("Mi")) << 20 for word in (shm, memory)}
    assert total[0] <= mib[shm] < 1.01 * total[0] + (64 << 20)
    assert mib[memory] == mib[shm] + (2048 << 20)
