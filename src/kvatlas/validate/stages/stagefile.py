"""The stage file: where the parts of a cluster are that we did not start, and what its operator
declares. TOML; a fault is told with file and line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvatlas.config import Count, Positive, Seconds, SecondsOrNone, read
from kvatlas.errors import ConfigError
from kvatlas.validate.stages.facts import SETTINGS
from kvatlas.validate.stages.points import RULES
from kvatlas.workload.trace import VOCAB_SIZE

Role = Literal["combined", "prefill", "decode", "stranger"]
#: Commands that do something to the cluster, run by a shell.
HOOKS = (
    "backend_fail",
    "backend_heal",
    "forget",
    "index_stop",
    "index_start",
    "node_stop",
    "node_start",
    "store_stop",
    "store_start",
    "store_partition",
    "store_heal",
    "store_damage",
    "store_full",
    "store_empty",
)
#: Commands that print one number.
READINGS = ("hbm_bytes", "power_w")
_HTTP = re.compile(r"http://[^/\s?#@]+(/[^\s?#]*)?")
Ratio = Annotated[float, msgspec.Meta(ge=1, le=1000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine. ``log``: a file that holds its log; ``stranger``: one that computes differently
    and uses the same store; ``agent``: the name of its node's."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    url: str
    role: Role = "combined"
    engine: Literal["vllm", "sglang", "stub"] = "vllm"
    log: str = ""
    agent: str = ""


class Agent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node's agent. ``url``: its ``--listen`` pages."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    url: str


class Gateway(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What clients talk to: kvatlas's or anybody's."""

    url: str


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shared store. ``url``: ``valkey://host:port`` is asked for its own figures; ``ttl_s``: 0
    where entries have no end; ``fill_prompts``: so many prompts fill it."""

    url: str = ""
    ttl_s: SecondsOrNone = 0.0
    fill_prompts: Count = 0


class Requests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fixed request set, and the load."""

    count: Positive = 40
    prompt_tokens: Positive = 2048
    output_tokens: Positive = 32
    vocab_size: Positive = VOCAB_SIZE
    concurrency: Positive = 8
    samples_min: Positive = 30
    seed: Count = 1
    timeout_s: Seconds = 120.0
    settle_s: Seconds = 30.0
    hook_s: Seconds = 60.0


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Objectives and tolerances. 0 sets none."""

    ttft_p95_s: SecondsOrNone = 0.0
    tpot_p95_s: SecondsOrNone = 0.0
    answer_s: Seconds = 60.0
    tpot_worse_max: Ratio = 1.25
    worse_max: Ratio = 1.1
    same_min: Share = 1.0
    host_bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class StageFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it. ``declared``: settings by name, and ``transport``; ``not_applicable``: points by
    id, with the operator's reason; ``trial``: commands that show a point (0 pass, 1 fail)."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    engine: tuple[Engine, ...] = ()
    model: str = ""
    gateway: tuple[Gateway, ...] = ()
    agent: tuple[Agent, ...] = ()
    store: Store = Store()
    requests: Requests = Requests()
    limits: Limits = Limits()
    declared: dict[str, str] = {}
    not_applicable: dict[str, str] = {}
    hooks: dict[str, str] = {}
    trial: dict[str, str] = {}
    read: dict[str, str] = {}

    def engines(self, *roles: str) -> list[Engine]:
        """Those of these roles, in the file's order."""
        return [e for e in self.engine if e.role in roles]

    @property
    def transport(self) -> str:
        """What a pair's state should go over."""
        return self.declared.get("transport", "rdma")


_TABLES: dict[str, type[msgspec.Struct]] = {
    "": StageFile,
    "engine": Engine,
    "gateway": Gateway,
    "agent": Agent,
    "store": Store,
    "requests": Requests,
    "limits": Limits,
}


def load_stage_file(path: Path) -> StageFile:
    """Raises ConfigError that names the file and what is wrong with it."""
    _, found = read(path, StageFile, _TABLES)
    check_stage_file(found, str(path))
    return found


def check_stage_file(found: StageFile, where: str) -> None:
    """What types alone cannot say. Raises ConfigError."""
    if not found.engine:
        raise ConfigError(f"{where}: no [[engine]]: name at least one")
    parts: list[Engine | Agent] = [*found.engine, *found.agent]
    for part in parts:
        if sum(p.name == part.name for p in parts) > 1:
            raise ConfigError(f"{where}: two parts are named {part.name!r}: names must differ")
        _check_url(part.url, f"{where}: {part.name!r}")
    for gateway in found.gateway:
        _check_url(gateway.url, f"{where}: gateway")
    agents = {agent.name for agent in found.agent}
    for engine in found.engine:
        if engine.agent and engine.agent not in agents:
            raise ConfigError(
                f"{where}: engine {engine.name!r}: there is no agent {engine.agent!r}"
            )
    if found.requests.output_tokens < 2:
        raise ConfigError(f"{where}: requests.output_tokens: at least 2, or there is no TPOT")
    if found.requests.vocab_size < 2:
        raise ConfigError(f"{where}: requests.vocab_size: at least 2, or all prompts are the same")
    if found.transport not in ("rdma", "tcp"):
        raise ConfigError(
            f"{where}: declared.transport: {found.transport!r} is neither rdma nor tcp"
        )
    _check_names(found.declared, (*SETTINGS, "transport"), f"{where}: declared")
    _check_names(found.hooks, HOOKS, f"{where}: hooks")
    _check_names(found.read, READINGS, f"{where}: read")
    points = [rule.point for rules in RULES.values() for rule in rules]
    _check_names(found.trial, [p.id for p in points if p.trial], f"{where}: trial")
    _check_names(
        found.not_applicable, [p.id for p in points if p.declinable], f"{where}: not_applicable"
    )


def _check_url(url: str, whose: str) -> None:
    if not _HTTP.fullmatch(url):
        raise ConfigError(f"{whose}: {url!r} is not of the form http://host:port")


def _check_names(given: Mapping[str, str], known: tuple[str, ...] | list[str], where: str) -> None:
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"{where}: {name!r} is not possible there; there is: {', '.join(known)}"
            )
        if not value.strip():
            raise ConfigError(f"{where}: {name!r} is empty: say why, or what")
