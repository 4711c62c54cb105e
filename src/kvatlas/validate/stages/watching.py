"""What all parts of a cluster counted over a phase: engines, agents, gateway, store."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvatlas.config import WorkerConfig
from kvatlas.core.transports import Moved
from kvatlas.dataplane.tiers.runs import Refused
from kvatlas.dataplane.tiers.sockets import Address
from kvatlas.dataplane.tiers.valkey import Server
from kvatlas.errors import EngineError, StoreError
from kvatlas.service.agent_front import DESCRIPTION, AgentDescription
from kvatlas.service.http_client import HttpClient
from kvatlas.service.probe import figure, pulse, samples
from kvatlas.validate import counters
from kvatlas.validate.counters import Counters
from kvatlas.validate.stages.facts import AgentSeen, Counted, StoreSample
from kvatlas.validate.stages.stagefile import Agent, Engine, StageFile
from kvatlas.validate.stages.values import Missing, excerpt

_DEADLINE_S = 20.0
_LOOK_S = 0.2
_VALKEY_PORT = 6379
_SHARED = ("object", "peer")


class _Reading(msgspec.Struct, frozen=True):
    counters: Counters | Missing
    moved: Moved | Missing
    life: str


class _AgentReading(msgspec.Struct, frozen=True):
    life: str
    rdma_bytes: int | None
    rdma_why: str
    tiers: dict[str, dict[str, Any]]
    sums: dict[str, dict[str, int]]


class Snapshot(msgspec.Struct, frozen=True):
    """All that was counted by one moment."""

    engines: dict[str, _Reading]
    agents: dict[str, _AgentReading | Missing]


class Watcher:
    """Reads the parts that a stage file names."""

    def __init__(self, client: HttpClient, file: StageFile) -> None:
        self._client = client
        self._file = file

    async def snapshot(self, engines: Sequence[Engine]) -> Snapshot:
        """Of these engines and of all agents. What cannot be read is `Missing` in it."""
        return Snapshot(
            {engine.name: await self._engine(engine) for engine in engines},
            {agent.name: await self._agent(agent) for agent in self._file.agent},
        )

    async def between(
        self, before: Snapshot, engines: Sequence[Engine]
    ) -> tuple[tuple[Counted, ...], tuple[AgentSeen | Missing, ...]]:
        """What was counted since."""
        after = await self.snapshot(engines)
        counted = tuple(
            _counted(name, before.engines[name], now) for name, now in after.engines.items()
        )
        agents = tuple(
            _agent_seen(name, before.agents[name], now) for name, now in after.agents.items()
        )
        return counted, agents

    async def _engine(self, engine: Engine) -> _Reading:
        worker = WorkerConfig(name=engine.name, url=engine.url, engine=engine.engine)
        found: Counters | Missing
        moved: Moved | Missing = Missing(f"{engine.name} counts no transfers")
        try:
            found = await counters.read(self._client, engine.url, _DEADLINE_S)
        except EngineError as error:
            found = Missing(f"{engine.name}: {error}")
        try:
            seen = await pulse(self._client, worker, _DEADLINE_S)
        except EngineError as error:
            return _Reading(found, Missing(f"{engine.name}: {error}"), "")
        if seen.moved:
            rows = [msgspec.structs.astuple(one) for one in seen.moved.values()]
            moved = Moved(*(sum(column) for column in zip(*rows, strict=True)))
        return _Reading(found, moved, seen.started)

    async def _agent(self, agent: Agent) -> _AgentReading | Missing:
        base = agent.url.rstrip("/")
        try:
            told = await self._client.get_json(base + DESCRIPTION, timeout_s=_DEADLINE_S)
            described = msgspec.convert(told, AgentDescription)
            page = await self._client.request("GET", f"{base}/metrics", timeout_s=_DEADLINE_S)
        except (EngineError, msgspec.ValidationError) as error:
            return Missing(f"agent {agent.name}: {excerpt(str(error))}")
        tiers, sums = agent_page(page.body.decode("utf-8", "replace"))
        ports = described.rdma
        return _AgentReading(described.life, ports.received_bytes, ports.error, tiers, sums)

    async def kv_usage(self, engine: Engine) -> float | Missing:
        """How full its pool is now, 0 to 1."""
        found = await counters.read(self._client, engine.url, _DEADLINE_S)
        if found.kv_usage is None:
            return Missing(f"{engine.name} does not tell how full its KV pool is")
        return found.kv_usage

    async def shared_tiers(self) -> dict[str, str | Missing]:
        """Of each agent, what it shares with other nodes."""
        found: dict[str, str | Missing] = {}
        for agent in self._file.agent:
            told = await self._agent(agent)
            if isinstance(told, Missing):
                found[agent.name] = told
            else:
                found[agent.name] = ",".join(t for t in _SHARED if t in told.tiers)
        return found

    async def dram(self, agent: Agent) -> StoreSample | Missing:
        """Host memory of one agent now."""
        told = await self._agent(agent)
        if isinstance(told, Missing):
            return told
        tier = told.tiers.get("dram", {})
        evicted = sum(n for name, n in told.sums["counts"].items() if name.startswith("evicted"))
        return StoreSample(
            int(tier.get("held_bytes", 0)), int(tier.get("capacity_bytes", 0)), evicted
        )

    async def store(self) -> StoreSample | Missing:
        """The store's own figures now, where it is one that we can ask."""
        parts = urlsplit(self._file.store.url)
        if parts.scheme != "valkey" or not parts.hostname:
            return Missing("only a store at valkey://host:port tells its own figures")
        address = Address(parts.hostname, parts.port or _VALKEY_PORT)
        return await asyncio.to_thread(_valkey_sample, address)

    async def transport_seen(self, prefill: str, decode: str) -> str | Missing:
        """As a gateway of ours sees what the pair's state goes over."""
        for gateway in self._file.gateway:
            url = f"{gateway.url.rstrip('/')}/kvatlas/transports"
            try:
                told = await self._client.get_json(url, timeout_s=_DEADLINE_S)
            except EngineError as error:
                return Missing(f"the gateway tells nothing of transports: {excerpt(str(error))}")
            for pair in told.get("pairs", ()) if isinstance(told, dict) else ():
                names = [
                    str(pair.get(half, "")).partition("#")[0] for half in ("prefill", "decode")
                ]
                if names == [prefill, decode]:
                    return str(pair.get("seen") or "unknown")
        return Missing("no gateway tells of this pair")

    # -- to let go, and to wait ------------------------------------------------------------------

    async def forget(self, engine: Engine) -> Missing | None:
        """The engine's own cache lets go; why it could not, else None."""
        path = "/flush_cache" if engine.engine == "sglang" else "/reset_prefix_cache"
        url = engine.url.rstrip("/") + path
        try:
            answer = await self._client.request("POST", url, timeout_s=_DEADLINE_S)
        except EngineError as error:
            return Missing(f"{engine.name} cannot be told to forget: {error}")
        if answer.status != 200:
            mend = "; start vLLM with VLLM_SERVER_DEV_MODE=1, or give the hook forget"
            return Missing(f"{engine.name}: POST {path}: status {answer.status}{mend}")
        return None

    async def settle(self, agents: Sequence[Agent], deadline_s: float) -> Missing | None:
        """Wait until agents have nothing under way: what was computed is saved."""
        until = time.monotonic() + deadline_s
        busy = "nobody was asked"
        while time.monotonic() < until:
            busy = ""
            for agent in agents:
                told = await self._agent(agent)
                if isinstance(told, Missing):
                    return told  # whoever does not answer is not waited for
                if told.sums["busy"].get("", 0):
                    busy = f"agent {agent.name} is busy"
            if not busy:
                return None
            await asyncio.sleep(_LOOK_S)
        return Missing(f"{busy} after {deadline_s:g} s")


def agent_page(page: str) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, int]]]:
    """An agent's /metrics: what each tier has, and its counts by kind."""
    tiers: dict[str, dict[str, Any]] = {}
    sums: dict[str, dict[str, int]] = {
        "loaded_tokens": {},
        "moved_bytes": {},
        "counts": {},
        "busy": {},
    }
    for name, labels, text in samples(page, _AGENT_NAMES):
        value = figure(text)
        if math.isnan(value):
            continue
        kind = name.removeprefix("kvatlas_agent_").removesuffix("_total")
        if kind.startswith("tier_"):
            field = kind.removeprefix("tier_")
            tiers.setdefault(labels.get("tier", ""), {})[field] = int(value)
        elif kind == "store_events":
            tier = tiers.setdefault(labels.get("tier", ""), {})
            tier.setdefault("counts", {})[labels.get("event", "")] = int(value)
        elif kind == "loaded_tokens":
            sums[kind][labels.get("tier", "")] = int(value)
        elif kind == "moved_bytes":
            sums[kind][f"{labels.get('operation')} {labels.get('tier')}"] = int(value)
        elif kind == "events":
            sums["counts"][labels.get("event", "")] = int(value)
        elif kind == "busy":
            sums["busy"][""] = int(value)
    return {t: v for t, v in tiers.items() if t}, sums


_AGENT_NAMES = tuple(
    f"kvatlas_agent_{name}"
    for name in (
        "tier_capacity_bytes",
        "tier_held_bytes",
        "tier_units",
        "tier_transport_info",
        "store_events_total",
        "loaded_tokens_total",
        "moved_bytes_total",
        "events_total",
        "busy",
    )
)


def _counted(name: str, before: _Reading, after: _Reading) -> Counted:
    found: Counters | Missing = after.counters
    if isinstance(before.counters, Missing):
        found = before.counters
    elif isinstance(found, Counters):
        try:
            found = found.since(before.counters)
        except EngineError as error:
            found = Missing(f"{name}: {error}")
    moved: Moved | Missing = after.moved
    if isinstance(before.moved, Missing):
        moved = before.moved
    elif isinstance(moved, Moved):
        if before.life != after.life:
            moved = Missing(f"{name} was started anew in between")
        else:
            was, now = msgspec.structs.astuple(before.moved), msgspec.structs.astuple(moved)
            moved = Moved(*(b - a for a, b in zip(was, now, strict=True)))
    return Counted(name, found, moved)


def _agent_seen(
    name: str, before: _AgentReading | Missing, after: _AgentReading | Missing
) -> AgentSeen | Missing:
    if isinstance(after, Missing):
        return after
    if isinstance(before, Missing):
        return before
    anew = before.life != after.life
    was: Mapping[str, dict[str, int]] = {} if anew else before.sums
    more = {
        kind: {k: n - was.get(kind, {}).get(k, 0) for k, n in counts.items()}
        for kind, counts in after.sums.items()
    }
    rdma = None
    if before.rdma_bytes is not None and after.rdma_bytes is not None:
        rdma = after.rdma_bytes - before.rdma_bytes
    tiers = {tier: dict(found) for tier, found in after.tiers.items()}
    for tier, found in tiers.items():
        old = {} if anew else before.tiers.get(tier, {}).get("counts", {})
        found["counts"] = {k: n - old.get(k, 0) for k, n in found.get("counts", {}).items()}
    return AgentSeen(
        name,
        tiers,
        more["loaded_tokens"],
        more["moved_bytes"],
        more["counts"],
        rdma,
        after.rdma_why,
    )


def _valkey_sample(address: Address) -> StoreSample | Missing:
    try:
        server = Server.connect(address, time.monotonic() + _DEADLINE_S)
        with contextlib.closing(server):
            told = _info(server.ask(b"INFO", b"memory")) | _info(server.ask(b"INFO", b"stats"))
    except (OSError, ValueError, Refused, StoreError) as error:
        return Missing(f"the store does not tell its figures: {error}")
    return StoreSample(
        told.get("used_memory", 0), told.get("maxmemory", 0), told.get("evicted_keys", 0)
    )


def _info(answer: list[bytes | int | None]) -> dict[str, int]:
    text = answer[0].decode() if answer and isinstance(answer[0], bytes) else ""
    rows = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    return {name: int(value) for name, value in rows if value.strip().isdecimal()}
