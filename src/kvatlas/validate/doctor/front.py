"""The router in front, and agents beside: their pages, and canaries through them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import kvatlas
from kvatlas.config import AgentConfig
from kvatlas.core.check_facts import (
    AgentFacts,
    EngineFacts,
    GatewayFacts,
    KeyFacts,
    PairRow,
    WorkerRow,
)
from kvatlas.core.keys import Keyring
from kvatlas.errors import EngineError
from kvatlas.service.agent_front import DESCRIPTION, AgentDescription
from kvatlas.service.agents import names_pages
from kvatlas.service.http_client import HttpClient
from kvatlas.service.probe import figure, samples
from kvatlas.validate.doctor import canaries
from kvatlas.validate.doctor.engines import Patience

_LOOK_AGAIN_S = 0.05
_HAND_OVERS_MAX = 20
_THROUGH = 1 << 20  # numbers of prompts that no engine is asked by itself
_IN_VAIN = 0.1
_TIERS = (
    "kvatlas_agent_tier_capacity_bytes",
    "kvatlas_agent_tier_held_bytes",
    "kvatlas_agent_tier_quarantined_bytes",
    "kvatlas_agent_store_events_total",
)
# What a disk's store counts when it is not well (`dataplane.tiers.disk`, `work`).
_FAULTS = (
    "fault",
    "hanging",
    "commit_failed",
    "catalogue_lost",
    "read_io",
    "write_io",
    "read_damaged",
)


class Front:
    """A gateway at ``url``; any OpenAI endpoint will do, less is seen of it then."""

    def __init__(self, client: HttpClient, url: str, patience: Patience) -> None:
        self.url = url.rstrip("/")
        self.facts = GatewayFacts(self.url, own_version=kvatlas.__version__)
        self.models: list[str] = []
        self._client = client
        self._patience = patience
        self._late = False

    def note(self, **found: object) -> None:
        """More of it is known."""
        self.facts = msgspec.structs.replace(self.facts, **found)

    async def look(self) -> None:
        """Its pages."""
        try:
            cards = (await self._get("/v1/models"))["data"]
            self.models = [str(card["id"]) for card in cards]
        except (EngineError, KeyError, TypeError) as error:
            self.note(error=f"{self.url}/v1/models: {error}")
            return
        try:
            workers = await self._workers()
            version = (await self._get("/version"))["version"]
        except (EngineError, KeyError, TypeError, AttributeError):
            return  # none of ours
        self.note(ours=True, version=version, workers=workers)

    async def alarms(self) -> None:
        """Its flags, its engines, and what its pairs did, as they are now."""
        if not self.facts.ours or self.facts.error:
            return
        try:
            health = await self._get("/health")
            transports = await self._get("/kvatlas/transports")
            agents = await self._get("/kvatlas/agents")
            workers = await self._workers()
            flags = [flag.partition(":") for flag in health["flags"]]
            found: dict[str, dict[str, str]] = {}
            for problem, _, who in flags:
                why = health["details"].get(problem)
                text = why.get(who, "") if isinstance(why, dict) and who else why or ""
                found.setdefault(problem, {})[who or "gateway"] = str(text)
            self.note(
                ready=bool(health["ready"]),
                alarms=found,
                workers=workers,
                agents=tuple(name for name, row in agents.items() if row["up"]),
                pairs=msgspec.convert(transports["pairs"], tuple[PairRow, ...]),
                rdma=transports["rdma_ports"],
            )
        except (EngineError, KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
            self.note(error=f"{self.url}: its pages are not those of a gateway: {error}")

    async def ask(self, model: str, prompt: canaries.Prompt, holders: Sequence[str]) -> None:
        """Canaries through it, and its keys of ``prompt``, which ``holders`` announced."""
        if self.facts.error:
            return
        target = canaries.Target(self._client, self.url, model, deadline_s=self._patience.answer_s)
        ids = prompt.another(_THROUGH)
        if self.facts.ours:
            held = await self._until_held(model, prompt.ids, holders)
            self.note(ids=held, text=await self._keys(model, prompt.text))
        await self._twice(target, ids)
        await self.alarms()
        await self._hand_over(target, prompt)

    async def _twice(self, target: canaries.Target, prompt: str | tuple[int, ...]) -> None:
        """The same prompt again, once the gateway can know of the first."""
        fresh = again = await target.complete(prompt)
        if not fresh.error:
            if self.facts.ours and fresh.worker:
                await self._until_held(target.model, prompt, [fresh.worker.partition("#")[0]])
            again = await target.complete(prompt)
        self.note(canaries=canaries.told({"fresh": fresh, "again": again}))

    async def ask_text(self) -> None:
        """The same text twice, where no engine is there to make token ids of it."""
        if self.facts.error or not self.models:
            return
        target = canaries.Target(
            self._client, self.url, self.models[0], deadline_s=self._patience.answer_s
        )
        await self._twice(target, canaries.loose())

    async def _hand_over(self, target: canaries.Target, prompt: canaries.Prompt) -> None:
        """More of them, until it is seen what the pairs go over that should go over RDMA."""
        for number in range(_HAND_OVERS_MAX):
            if not any(p.expected == "rdma" and not p.seen for p in self.facts.pairs):
                return
            await target.complete(prompt.another(_THROUGH + 1 + number))
            await asyncio.sleep(self._patience.event_s / _HAND_OVERS_MAX)
            await self.alarms()

    async def _until_held(self, model: str, ids: Any, holders: Sequence[str]) -> KeyFacts:
        """Events are on their way for a moment; where they did not arrive once, nobody waits as
        long again."""
        found = KeyFacts()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience.event_s * (_IN_VAIN if self._late else 1.0)
        for _ in itertools.count():
            found = await self._keys(model, ids)
            late = loop.time() >= until or found.error or found.unkeyed
            if all(found.resume_tokens.get(name, 0) for name in holders):
                break
            if late:
                self._late = True
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        return found

    async def _keys(self, model: str, prompt: Any) -> KeyFacts:
        body = {"model": model, "prompt": prompt, "keys": True}
        url = f"{self.url}/kvatlas/inspect"
        try:
            told = await self._client.post_json(url, body, timeout_s=self._patience.answer_s)
            workers = told["workers"]
            held: dict[str, int] = {}
            for name, row in workers.items():  # an engine has what any rank of it has
                engine = name.partition("#")[0]
                held[engine] = max(held.get(engine, 0), row.get("resume_tokens", 0))
            return KeyFacts(
                unkeyed=told["unkeyed"],
                prompt_tokens=told["prompt_tokens"],
                keys={
                    name: tuple(row["keys"])
                    for name, row in workers.items()
                    if "keys" in row and not _rank(name)
                },
                resume_tokens=held,
            )
        except (EngineError, KeyError, TypeError, AttributeError) as error:
            return KeyFacts(error=f"{url}: {error}")

    async def _workers(self) -> dict[str, WorkerRow]:
        rows = await self._get("/kvatlas/workers")
        return {row["worker"]: _row(row) for row in rows if not _rank(row["worker"])}

    async def _get(self, path: str) -> Any:
        return await self._client.get_json(self.url + path, timeout_s=self._patience.answer_s)


def own_keys(ring: Keyring, engine: EngineFacts, ids: bytes) -> tuple[str, ...] | None:
    """Keys of a prompt for this engine, as a gateway with this secret must make them."""
    layout, fingerprint = engine.layout, engine.fingerprint
    if layout is None or fingerprint is None or not layout.groups:
        return None
    grid = layout.grid_tokens
    whole = memoryview(ids)[: layout.asked_blocks(len(ids) // 4) * grid * 4]
    return tuple(key.hex() for key in ring.chain(ring.root(fingerprint.digest()), whole, grid))


async def agent_facts(
    client: HttpClient,
    agent: AgentConfig,
    engines: Mapping[str, EngineFacts],
    ring: Keyring | None,
    patience: Patience,
) -> AgentFacts:
    """An agent's pages. ``ring``: the deployment's secret, where it is known."""
    url, timeout_s = agent.url.rstrip("/"), patience.answer_s
    try:
        answer = await client.get_json(url + DESCRIPTION, timeout_s=timeout_s)
        told = msgspec.convert(answer, AgentDescription)
        health = await client.get_json(f"{url}/health", timeout_s=timeout_s)
        alarms = {str(flag): str(health["details"].get(flag, "")) for flag in health["flags"]}
    except (EngineError, msgspec.ValidationError, KeyError, TypeError, AttributeError) as error:
        return AgentFacts(agent.name, url, error=f"{url}: {error}")
    roots = {
        name: "" if names_pages(served.member) else served.root
        for name, served in told.engines.items()
    }
    facts = AgentFacts(agent.name, url, alarms=alarms, roots=roots)
    keyed = [engines[w] for w in agent.workers if w in engines and engines[w].kind != "sglang"]
    if ring is None and keyed:
        why = "the gateway's secret is not known: give --config with keys.secret_file"
        facts = msgspec.structs.replace(facts, no_own_roots=why)
    elif ring is not None:
        own = {
            e.name: ring.root(e.fingerprint.digest()).hex()
            for e in keyed
            if e.fingerprint is not None
        }
        facts = msgspec.structs.replace(facts, own_roots=own)
    try:
        page = await client.request("GET", f"{url}/metrics", timeout_s=timeout_s)
    except EngineError as error:
        return msgspec.structs.replace(facts, metrics_error=str(error))
    tiers, faults = _tiers(page.body.decode("utf-8", "replace"))
    absent = "" if page.status == 200 else f"{url}/metrics: status {page.status}"
    return msgspec.structs.replace(facts, metrics_error=absent, tiers=tiers, faults=faults)


def _tiers(page: str) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    tiers: dict[str, dict[str, float]] = {}
    faults: dict[str, int] = {}
    for name, labels, text in samples(page, _TIERS):
        tier, value = labels.get("tier", ""), figure(text, 1e18)
        if name.startswith("kvatlas_agent_tier_"):
            tiers.setdefault(tier, {})[name.removeprefix("kvatlas_agent_tier_")] = value
        elif tier == "disk" and labels.get("event") in _FAULTS and value > 0:
            faults[labels["event"]] = int(value)
    return tiers, faults


def _rank(name: str) -> str:
    """Of a data-parallel rank other than the first; "" of that."""
    return name.partition("#")[2]


def _row(row: dict[str, Any]) -> WorkerRow:
    feed = row.get("feed")
    trouble = None
    if isinstance(feed, dict):
        trouble = feed.get("error") or ("" if feed.get("connected") else "it is not connected")
    return WorkerRow(
        url=row.get("url", ""),
        up=bool(row.get("up")),
        error=row.get("error", ""),
        fingerprint=row.get("fingerprint", ""),
        feed=trouble,
    )
