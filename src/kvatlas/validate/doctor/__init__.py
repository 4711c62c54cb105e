"""`kvatlas doctor`: gathers the facts of a running cluster, and has `core.checks` judge them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq.asyncio

from kvatlas.config import AgentConfig, Config, WorkerConfig, load, read_secret
from kvatlas.core import checks
from kvatlas.core.check_facts import AgentFacts, Facts
from kvatlas.core.findings import Finding, Status
from kvatlas.core.keys import Keyring
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service.http_client import HttpClient, origin_of
from kvatlas.validate.doctor import canaries
from kvatlas.validate.doctor.engines import Examined, Patience, kind_of
from kvatlas.validate.doctor.front import Front, agent_facts, own_keys
from kvatlas.workload.proofs import load_proofs

ENGINES_MAX = 256
_SAMPLED = "vllm"


class Cluster(msgspec.Struct, frozen=True):
    """What is examined. ``config``: of the operator; without it engines are asked by what they
    tell. ``gateway`` "" for none."""

    workers: tuple[WorkerConfig, ...] = ()
    gateway: str = ""
    agents: tuple[AgentConfig, ...] = ()
    config: Config | None = None
    secret: bytes = b""


class Report(msgspec.Struct, frozen=True):
    """All findings, and how many there are of each status."""

    sound: bool
    counts: dict[Status, int]
    findings: tuple[Finding, ...]


def from_config(path: Path, gateway: str = "") -> Cluster:
    """The cluster of a kvatlas.toml. Raises ConfigError."""
    config = load(path)
    host, port = config.gateway.host, config.gateway.port
    host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if config.tls.on else "http"
    url = gateway or (f"{scheme}://{host}:{port}" if port else "")
    file = config.keys.secret_file
    secret = read_secret(Path(file), "keys.secret_file") if file else b""
    return Cluster(config.worker, url, config.agent, config, secret)


async def from_urls(
    client: HttpClient, gateway: str, engines: Sequence[str], patience: Patience
) -> Cluster:
    """Engines by their URLs; those that a gateway of ours names, where none is given. Raises
    ConfigError for a URL that is none."""
    for url in (gateway, *engines):
        if url:
            _checked(url)
    workers: list[WorkerConfig] = []
    agents: list[AgentConfig] = []
    urls = {origin_of(url).authority: url.rstrip("/") for url in engines}
    if gateway:
        front = Front(client, gateway, patience)
        await front.look()
        rows = {name: row.url.rstrip("/") for name, row in front.facts.workers.items()}
        names = {url: name for name, url in rows.items()}
        urls = {names.get(url, name): url for name, url in urls.items()} if engines else rows
        agents = await _agents_of(client, gateway, set(rows), patience) if rows else []
    kinds = await asyncio.gather(*(kind_of(client, u, patience.answer_s) for u in urls.values()))
    for (name, url), kind in zip(urls.items(), kinds, strict=True):
        engine = "sglang" if kind == "sglang" else _SAMPLED
        workers.append(msgspec.convert({"name": name, "url": url, "engine": engine}, WorkerConfig))
    return Cluster(tuple(workers), gateway.rstrip("/"), tuple(agents))


async def examine(client: HttpClient, cluster: Cluster, patience: Patience | None = None) -> Report:
    """Canaries to every engine and through the gateway; then all checks. Raises ConfigError where
    there are more engines than can be examined."""
    if len(cluster.workers) > ENGINES_MAX:
        raise ConfigError(f"{len(cluster.workers)} engines: at most {ENGINES_MAX} are examined")
    facts = await gathered(client, cluster, patience or Patience())
    findings = tuple(checks.check(facts))
    counts = Counter(finding.status for finding in findings)
    sound = not counts["wrong"] and not counts["not shown"]
    return Report(sound, dict(counts), findings)


async def gathered(client: HttpClient, cluster: Cluster, patience: Patience) -> Facts:
    """The facts. Never raises for what a cluster may do; ConfigError for a file of proofs."""
    context = zmq.asyncio.Context()
    proofs = load_proofs()
    if cluster.config is not None and cluster.config.directory.proofs:
        proofs += load_proofs(Path(cluster.config.directory.proofs))
    engines = [Examined(client, context, worker, patience, proofs) for worker in cluster.workers]
    front = Front(client, cluster.gateway, patience) if cluster.gateway else None
    ring = Keyring(cluster.secret) if cluster.secret else None
    try:
        await asyncio.gather(*(engine.describe() for engine in engines))
        there = [engine for engine in engines if not engine.facts.error]
        await asyncio.gather(*(engine.listen() for engine in there))
        if front is not None:
            await front.look()
        prompts = await _asked(there)
        await asyncio.gather(*(engine.hear(there) for engine in there))
        if front is not None:
            await _through(front, there, prompts, cluster, ring)
        by_name = {engine.facts.name: engine.facts for engine in engines}
        agents: list[AgentFacts] = await asyncio.gather(
            *(agent_facts(client, agent, by_name, ring, patience) for agent in cluster.agents)
        )
    finally:
        for engine in engines:
            await engine.close()
        context.destroy(linger=0)
    return Facts(
        tuple(engine.facts for engine in engines),
        front.facts if front is not None else None,
        tuple(agents),
    )


async def _asked(engines: Sequence[Examined]) -> dict[str, canaries.Prompt]:
    """All canaries of the engines; the prompt of each model whose engines tell token ids."""
    prompts: dict[str, canaries.Prompt] = {}
    models = {engine.facts.model for engine in engines}
    for model in models:
        group = [engine for engine in engines if engine.facts.model == model]
        block = max(engine.block_tokens for engine in group)
        rooms = [e.facts.context_tokens for e in group if e.facts.context_tokens]
        for engine in group:
            try:
                prompt = await canaries.made(engine.target, block, min(rooms, default=0))
                chat = await canaries.made(engine.target, block, min(rooms, default=0))
            except EngineError:
                continue  # what it says is told as it is asked
            prompts[model] = prompt
            asks = (e.ask(prompt, chat.text, number) for number, e in enumerate(group))
            await asyncio.gather(*asks)
            break
        else:
            room = min(rooms, default=0)
            text, other = canaries.loose(block, room), canaries.loose(block, room)
            asks = (e.ask(canaries.Prompt(text), other, n) for n, e in enumerate(group))
            await asyncio.gather(*asks)
    return prompts


async def _through(
    front: Front,
    engines: Sequence[Examined],
    prompts: dict[str, canaries.Prompt],
    cluster: Cluster,
    ring: Keyring | None,
) -> None:
    """Canaries through the gateway, of the model that most engines serve."""
    if cluster.config is not None:
        front.note(configured={worker.name: worker.url for worker in cluster.config.worker})
    counts = Counter(engine.facts.model for engine in engines if engine.facts.model in prompts)
    for model, _ in counts.most_common(1):
        serving = [engine for engine in engines if engine.facts.model == model]
        holders = [
            engine.facts.name
            for engine in serving
            if engine.facts.stream.heard and engine.facts.name in front.facts.workers
        ]
        await front.ask(model, prompts[model], holders)
        if ring is not None:
            ids = canaries.packed(prompts[model].ids)
            made = {e.facts.name: own_keys(ring, e.facts, ids) for e in serving}
            front.note(own_keys={name: keys for name, keys in made.items() if keys is not None})
    if not counts:
        await front.ask_text()
        await front.alarms()


async def _agents_of(
    client: HttpClient, gateway: str, workers: set[str], patience: Patience
) -> list[AgentConfig]:
    try:
        url = f"{gateway.rstrip('/')}/kvatlas/agents"
        rows = await client.get_json(url, timeout_s=patience.answer_s)
        return [
            AgentConfig(name, row["url"], tuple(row["workers"]))
            for name, row in rows.items()
            if workers.issuperset(row["workers"])
        ]
    except (EngineError, KeyError, TypeError, AttributeError):
        return []


def _checked(url: str) -> None:
    parts = urlsplit(url)
    try:
        origin_of(f"{parts.scheme}://{parts.netloc}")
    except ValueError as error:
        raise ConfigError(f"{url}: {error}: write http://HOST:PORT") from error
