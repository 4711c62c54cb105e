"""The engines of the example: valid, by options that exist, and where the values say they are."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from charts import DEPLOY, EXAMPLE, LOADER, RELEASE, ROOT, find, merged, pod, render, valid
from real_engines import require

from kvatlas.service import pair_protocols

ENGINES = ("vllm", "sglang")
ROLES = {"prefill": "gpu-0", "decode": "gpu-1", "combined": "gpu-2"}  # and its node's name
VLLM_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "combined": "kv_both"}


def manifests(engine: str) -> list[dict[str, Any]]:
    text = (EXAMPLE / f"{engine}.yaml").read_text("utf-8")
    return list(yaml.load_all(text, LOADER))


def container(engine: str, role: str) -> dict[str, Any]:
    (only,) = pod(find(manifests(engine), "StatefulSet", role))["containers"]
    assert isinstance(only, dict)
    return only


def option(command: list[str], name: str) -> str:
    """Its value, from `--name=value` or `--name value`; "" where it is not there."""
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word == name:
            return after
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""


@pytest.mark.parametrize("engine", ENGINES)
def test_kubernetes_knows_every_field(engine: str) -> None:
    for document in manifests(engine):
        valid(document)


@pytest.mark.parametrize("engine", ENGINES)
def test_workers_are_where_the_values_say(engine: str) -> None:
    values = merged(EXAMPLE / f"values-{engine}.yaml")
    workers = {worker["name"]: worker for worker in values["workers"]}
    for role, name in ROLES.items():
        worker = workers[name]
        stateful = find(manifests(engine), "StatefulSet", role)
        ports = {p["name"]: p["containerPort"] for p in container(engine, role)["ports"]}
        command = container(engine, role)["command"]
        where = urlsplit(worker["url"])
        assert where.hostname == f"{role}-0.{stateful['spec']['serviceName']}"
        assert where.port == ports["http"] == int(option(command, "--port"))
        assert worker.get("role", "combined") == role
        assert worker.get("engine", "vllm") == engine
        assert pod(stateful)["nodeSelector"] == {"kubernetes.io/hostname": name}
        events = json.loads(option(command, "--kv-events-config"))
        assert events["endpoint"] == f"tcp://*:{ports['events']}"
        assert events["replay_endpoint"] == f"tcp://*:{ports['replay']}"
        assert option(command, "--tensor-parallel-size") == "8"
        assert container(engine, role)["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_vllms_halves_meet_by_nixl() -> None:
    for role, said in VLLM_ROLES.items():
        command = container("vllm", role)["command"]
        transfer = json.loads(option(command, "--kv-transfer-config"))
        assert transfer["kv_role"] == said
        if role != "combined":
            assert transfer["kv_connector"] == "NixlConnector"
            names = {e["name"] for e in container("vllm", role)["env"]}
            assert {"VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"} <= names
    workers = merged(EXAMPLE / "values-vllm.yaml")["workers"]
    assert {w.get("pairing", "nixl") for w in workers} == {"nixl"}


def test_sglangs_halves_meet_at_the_bootstrap_server() -> None:
    workers = {w["name"]: w for w in merged(EXAMPLE / "values-sglang.yaml")["workers"]}
    for role in ("prefill", "decode"):
        command = container("sglang", role)["command"]
        assert option(command, "--disaggregation-mode") == role
        assert workers[ROLES[role]]["pairing"] == "sglang"
    where = urlsplit(workers["gpu-0"]["bootstrap"])
    assert where.hostname == urlsplit(workers["gpu-0"]["url"]).hostname
    told = option(container("sglang", "prefill")["command"], "--disaggregation-bootstrap-port")
    assert where.port == int(told)
    assert "bootstrap_host" in Path(pair_protocols.__file__).read_text("utf-8")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_that_saves_finds_its_agent(engine: str) -> None:
    values = merged(EXAMPLE / f"values-{engine}.yaml", EXAMPLE / "values-h20.yaml")
    agent = pod(find(render(values), "DaemonSet", f"{RELEASE}-agent"))
    listens = option(agent["containers"][0]["args"], "--socket")
    shared = next(v for v in agent["volumes"] if v["name"] == "socket")["hostPath"]["path"]
    spec = pod(find(manifests(engine), "StatefulSet", "combined"))
    command = container(engine, "combined")["command"]
    said = option(command, "--kv-transfer-config") or option(
        command, "--hicache-storage-backend-extra-config"
    )
    told = json.loads(said)
    extra = told.get("kv_connector_extra_config", {})
    tier = extra["secondary_tiers"][0] if engine == "vllm" else told
    assert tier["socket"] == listens
    mounted = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    (volume,) = (v for v in spec["volumes"] if v.get("hostPath", {}).get("path") == shared)
    assert mounted[volume["name"]] == shared == str(Path(listens).parent)
    module = ROOT / "src" / f"{tier['module_path'].replace('.', '/')}.py"
    text = module.read_text("utf-8")
    for name in (told.get("kv_connector"), tier.get("type"), tier.get("class_name")):
        assert name is None or f"class {name}(" in text


@pytest.mark.parametrize("engine", ENGINES)
def test_gateways_are_let_in(engine: str) -> None:
    values = merged(EXAMPLE / f"values-{engine}.yaml")
    gateway = find(render(values), "Deployment", f"{RELEASE}-gateway")
    labels = gateway["spec"]["template"]["metadata"]["labels"]
    policy = find(manifests(engine), "NetworkPolicy", "engines")["spec"]
    gateways, others = policy["ingress"]
    assert gateways["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert {p["port"] for p in gateways["ports"]} == {"http", "events", "replay"}
    assert others["from"] == [{"podSelector": policy["podSelector"]}]


@pytest.mark.parametrize("engine", ENGINES)
def test_versions_are_those_of_the_image(engine: str) -> None:
    told = (DEPLOY / "Dockerfile").read_text("utf-8")
    for role in ("prefill", "decode"):
        assert container(engine, role)["image"] in told
    assert container(engine, "combined")["image"] in told


PARSERS = {
    "vllm": """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
""",
    "sglang": """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
""",
}


@pytest.mark.engine
@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_itself_knows_every_option(engine: str) -> None:
    """By the engine's own parser, in its own environment. It has no GPU, so it is not started."""
    python = require(engine) / "bin" / "python"
    commands = []
    for role in ROLES:
        command = container(engine, role)["command"]
        first = 2 if engine == "vllm" else 3  # `vllm serve`, `python3 -m sglang.launch_server`
        commands.append(command[first:])
    script = PARSERS[engine] + (
        "import json, sys\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    assert parser.parse_args(argv)\n"
        "try:\n"
        "    parser.parse_args([*argv, '--no-such-option'])\n"
        "except SystemExit:\n"
        "    print('all known')\n"
    )
    done = subprocess.run(
        [str(python), "-c", script, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "all known"
