"""A small cluster for the page: pairs of stub engines, and nodes whose agents hold more.

The agents speak the real wire, HTTP and events; what they hold is a list here. One of the decode
halves should take over by RDMA, and its node's ports count nothing: that pair is degraded.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).resolve().parents[1] / "engines"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "scenarios"))
from fake_engine import model_config
from harness import FakeWorker, Product, stub_workers

from kvatlas.config import AgentConfig, KeysConfig, WorkerConfig
from kvatlas.config_tenants import TenantsConfig, digest_of
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.connectors.stub_pairs import Handovers
from kvatlas.core.events import UnitsGone, UnitsHeld
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.tenancy import EVERYBODY
from kvatlas.service.agent_announce import Announcer
from kvatlas.service.agent_front import DESCRIPTION, AgentDescription, Served
from kvatlas.service.decision_log import Entry
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.rdma_ports import RdmaPort, RdmaPorts
from kvatlas.workload.models import load_layout
from kvatlas.workload.protocol import Loading
from kvatlas.workload.spec import EngineSpec

#: Of Chromium: nothing in the background speaks to the outside.
ARGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
GRID = 16
OWN_BLOCKS = 400  # of an engine that has an agent
RATE = 20_000.0  # tokens that an engine computes in a second
LOAD_S = {Tier.DRAM: 3e-6, Tier.DISK: 1.2e-5, Tier.OBJECT: 2.5e-5}  # per token
KEY = "kva_key of {}"
PAIRED, TIERED = "deepseek-v4-flash", "qwen3-32b"  # models by the names that clients use


class FakeAgent:
    """What one node keeps of its engines: ``dram_blocks`` in dram, the rest on disk."""

    def __init__(
        self, name: str, workers: tuple[str, ...], dram_blocks: int, store: str = ""
    ) -> None:
        self.name, self.workers, self.store = name, workers, store
        self.ports = RdmaPorts((RdmaPort("mlx5_0", "1", 0, 0),))
        self.held: dict[Tier, OrderedDict[bytes, None]] = {t: OrderedDict() for t in LOAD_S}
        self.product: Product | None = None
        self._dram_blocks = dram_blocks
        self._server = HttpServer(self._answer)

    async def start(self) -> AgentConfig:
        self._announcer = Announcer(self._all)
        await self._server.start()
        url = f"http://127.0.0.1:{self._server.port}"
        return AgentConfig(name=self.name, url=url, workers=self.workers, store=self.store)

    async def close(self) -> None:
        await self._server.close()
        await self._announcer.close()

    def keys(self, worker: str, tokens: list[int], salt: str) -> list[bytes]:
        """By which this node knows the blocks of a prompt: those of its tenant."""
        assert self.product is not None
        assembly, packed = self.product.assembly, array("I", tokens).tobytes()
        sharing = assembly.tenancy.salts.below(salt) or EVERYBODY
        return assembly.dispatcher.keys_below(Publisher(worker), packed, sharing, "")

    def count(self, size_bytes: int) -> None:
        """Its RDMA port received that."""
        (port,) = self.ports.ports
        more = msgspec.structs.replace(port, received_bytes=port.received_bytes + size_bytes)
        self.ports = RdmaPorts((more,))

    def found(self, keys: list[bytes]) -> Iterator[Tier]:
        """The tier of each block from the first on, as long as there is one."""
        for key in keys:
            tier = next((t for t, held in self.held.items() if key in held), None)
            if tier is None:
                return
            yield tier

    def save(self, keys: list[bytes]) -> None:
        """Into dram; what is too much goes to disk, and with a store there as well."""
        dram, disk, store = self.held.values()
        new = [key for key in keys if key not in dram]
        dram.update(dict.fromkeys(new))
        out = [dram.popitem(last=False)[0] for _ in range(len(dram) - self._dram_blocks)]
        disk.update(dict.fromkeys(out))
        words: list[Any] = [UnitsHeld(Tier.DRAM, tuple(new))]
        if out:
            words += [UnitsGone(Tier.DRAM, tuple(out)), UnitsHeld(Tier.DISK, tuple(out))]
        if out and self.store:
            store.update(dict.fromkeys(out))
            words.append(UnitsHeld(Tier.OBJECT, tuple(out)))
        self._announcer.announce(words)

    def _all(self) -> list[Any]:
        return [UnitsHeld(tier, tuple(held)) for tier, held in self.held.items() if held]

    async def _answer(self, request: Request, reply: Reply) -> None:
        if self.product is None:
            reply.send(503, [])
            return
        if request.path != DESCRIPTION:  # limits of tenants
            reply.send_json(200, {})
            return
        assembly = self.product.assembly
        engines = {
            name: Served(member, assembly._keyring.root(member.fingerprint.digest()).hex())
            for name, member in assembly.members.items()
            if name in self.workers
        }
        said = self._announcer
        told = AgentDescription(
            f"life of {self.name}", said.endpoint, said.replay_endpoint, engines, self.ports
        )
        reply.send(200, [], msgspec.json.encode(told))


class TieredWorker(FakeWorker):
    """An engine with a cache of its own, which resumes what its node's agent holds beyond that,
    computes the rest, one prompt after the other, and has it saved."""

    def __init__(self, name: str, agent: FakeAgent) -> None:
        super().__init__(name, type(self).resume, models=(TIERED,))
        self.cache_config = f'block_size="{GRID}",cache_dtype="auto"'
        self.agent = agent
        self.own: OrderedDict[bytes, None] = OrderedDict()  # the ends of prompts go first
        self.turn = asyncio.Lock()

    async def resume(self, request: Request, reply: Reply) -> None:
        body = json.loads(request.body)
        prompt: list[int] = body["prompt"]
        salt = body.get("cache_salt", "")
        keys = self.agent.keys(self.name, prompt, salt)
        async with self.turn:
            most = (len(prompt) - 1) // GRID
            own = next((i for i, key in enumerate(keys) if key not in self.own), len(keys))
            tiers = list(self.agent.found(keys[own:]))
            cached = min(most, own + len(tiers)) * GRID
            load_s = sum(GRID * LOAD_S[tier] for tier in tiers)
            await asyncio.sleep(0.004 + load_s + (len(prompt) - cached) / RATE)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        reply.start(200, [(b"content-type", b"text/event-stream")])
        for event in ({"choices": [{"text": "word "}]}, {"choices": [], "usage": usage}):
            reply.write(b"data: %s\n\n" % json.dumps(event).encode())
        reply.end(b"data: [DONE]\n\n")
        self._keep(keys, prompt, salt)
        self.agent.save(keys)

    def _keep(self, keys: list[bytes], prompt: list[int], salt: str) -> None:
        start = next((i for i, key in enumerate(keys) if key not in self.own), len(keys))
        if start < len(keys):
            stored = {
                "type": "BlockStored",
                "block_hashes": [_hash(key) for key in keys[start:]],
                "parent_block_hash": _hash(keys[start - 1]) if start else None,
                "token_ids": prompt[start * GRID : len(keys) * GRID],
                "block_size": GRID,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "cache_salt": salt or None,
            }
            self.events.publish(stored)
        for key in reversed(keys):
            self.own[key] = None
            self.own.move_to_end(key)
        gone = [self.own.popitem(last=False)[0] for _ in range(len(self.own) - OWN_BLOCKS)]
        if gone:
            hashes = [_hash(key) for key in gone]
            event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
            self.events.publish(event)


def _hash(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


class Scene(msgspec.Struct):
    """The cluster, and what clients do with it. ``skip_s``: by how much its clock was moved on."""

    product: Product
    agents: list[FakeAgent]
    workers: list[TieredWorker]
    skip_s: list[float]
    chance: random.Random
    chats: dict[str, list[tuple[str, list[int]]]]
    tenants: tuple[str, ...]
    asked: int = 0

    async def ask(self, model: str, prompt: list[int], tenant: str = "", id: str = "") -> Any:
        """A completion, streamed."""
        self.asked += 1
        named = {"x-request-id": id or f"chat-{self.asked:04d}"}
        if tenant:
            named["authorization"] = f"Bearer {KEY.format(tenant)}"
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "stream": True}
        return await self.product.post("/v1/completions", body, named)

    async def turn(self, model: str) -> None:
        """A client begins a chat, under one of a few system prompts, or goes on with one."""
        chance, chats = self.chance, self.chats[model]
        if len(chats) > 6 and chance.random() < 0.5:
            tenant, prompt = chats.pop(chance.randrange(len(chats)))
        else:
            tenant = chance.choice(self.tenants) if self.tenants else ""
            system = chance.choices((1, 2, 3), (6, 3, 1))[0]
            prompt = [system * 7 + i for i in range(system * 1024)]
        prompt = prompt + self.fresh(chance.randrange(100, 1500))
        await self.ask(model, prompt, tenant)
        chats.append((tenant, prompt + self.fresh(8)))
        del chats[:-12]

    def telling(self) -> str:
        """The id of a late request whose candidates would take most from different tiers."""
        newest = self.product.assembly.log.newest(200)
        over = [entry for entry in newest if entry.regret_s is not None]

        def tiers(entry: Entry) -> tuple[int, int]:
            found = [plan.tier_tokens for plan in entry.decision.plans]
            kinds = {tier for tokens in found for tier, n in enumerate(tokens) if n}
            return len(kinds), len(set(found))

        return max(over, key=tiers).decision.id

    async def attached(self) -> None:
        """The gateway has heard of the agents' engines."""

        async def told() -> bool:
            nodes = self.product.assembly.agents.nodes.values()
            return all(node.told is not None and node.told.engines for node in nodes)

        await self.product.until(told)

    def fresh(self, count: int) -> list[int]:
        return [self.chance.randrange(1, 50_000) for _ in range(count)]

    async def rounds(self, count: int, most: int = 6, apart_s: float = 5.0) -> None:
        """Clients come together, ``count`` times; the clock moves on in between."""
        for number in range(count):
            swell = 1 + round((most - 1) * (0.5 + 0.5 * ((number * 7) % 40) / 40))
            began = time.monotonic()
            await asyncio.gather(
                *(self.turn(self.chance.choice((PAIRED, TIERED, TIERED))) for _ in range(swell))
            )
            self.skip_s[0] += max(0.0, apart_s - (time.monotonic() - began))


@asynccontextmanager
async def scene(folder: Path, tenants: tuple[str, ...] = (), seed: int = 1) -> AsyncIterator[Scene]:
    """Two nodes with halves of pairs, two with engines that have agents, and one engine alone."""
    layout = load_layout("deepseek-v4-flash", engine="vllm")
    spec = EngineSpec(blocks=4000, prefill_tokens_per_s=RATE, decode_step_s=1e-3)
    skip_s = [0.0]
    async with AsyncExitStack() as stack:
        options = StubOptions(layout, spec, model_name=PAIRED, count=4)
        cluster = await stack.enter_async_context(StubCluster(options))
        agents = [
            FakeAgent("node-a", ("prefill-0", "decode-0"), 4000),
            FakeAgent("node-b", ("prefill-1", "decode-1"), 4000),
            FakeAgent("node-c", ("qwen-0", "qwen-1"), 2400, store="objects"),
            FakeAgent("node-d", ("qwen-2",), 1800, store="objects"),
        ]
        homes = (agents[2], agents[2], agents[3])
        workers = [TieredWorker(f"qwen-{i}", agent) for i, agent in enumerate(homes)]
        spare = FakeWorker("qwen-3", models=(TIERED,))
        spare.cache_config = workers[0].cache_config
        for worker in (*workers, spare):
            await stack.enter_async_context(worker)
        layout_of = {"layout": str(model_config())}
        product = Product(
            [
                *halves(cluster),
                *(worker.config(**layout_of) for worker in workers),
                spare.config(**layout_of, draining=True),
            ],
            agents=[await agent.start() for agent in agents],
            keys=KeysConfig(secret_file=str(written(folder / "secret", "a secret, long enough"))),
            tenants=TenantsConfig(file=str(file_of(folder, tenants))) if tenants else None,
            clock=lambda: time.monotonic() + skip_s[0],
        )
        for agent in agents:
            stack.push_async_callback(agent.close)
        await stack.enter_async_context(product)
        for agent in agents:
            agent.product = product
        for index, agent in ((1, agents[0]), (3, None)):
            weigh(cluster.engine(index).pairs, int(layout.bytes_per_token()), agent)
        await product.settled()
        chats: dict[str, list[tuple[str, list[int]]]] = {PAIRED: [], TIERED: []}
        made = Scene(product, agents, workers, skip_s, random.Random(seed), chats, tenants)
        await made.attached()
        yield made


def halves(cluster: StubCluster) -> list[WorkerConfig]:
    names = ("prefill-0", "decode-0", "prefill-1", "decode-1")
    return [
        msgspec.structs.replace(worker, name=name, role=name.partition("-")[0], transport="rdma")
        for worker, name in zip(stub_workers(cluster, PAIRED), names, strict=True)
    ]


def weigh(side: Handovers, token_bytes: int, agent: FakeAgent | None) -> None:
    """Stubs hand over a few bytes for each block: count as many as an engine would have, and at the
    ports of the node that they came through; None: no port saw any of them."""
    fetch = side.fetch

    def counted(loading: Loading, took_s: float = 0.0) -> int:
        end = fetch(loading, took_s)
        size_bytes = (end - loading.start) * token_bytes
        was = side.moved
        side.moved = msgspec.structs.replace(was, size_bytes=was.size_bytes + size_bytes)
        if agent is not None:
            agent.count(size_bytes)
        return end

    side.fetch = counted  # type: ignore[method-assign]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def file_of(folder: Path, tenants: tuple[str, ...]) -> Path:
    """The first of them has limits."""
    limits = 'ttl_s = 3600\nretention = "keep"\nquota_bytes = { dram = 64_000_000_000 }\n'
    tables = [
        f'[[tenant]]\nname = {json.dumps(name)}\nkeys = ["{digest_of(KEY.format(name))}"]\n'
        f"{limits if not i else ''}"
        for i, name in enumerate(tenants)
    ]
    return written(folder / "tenants.toml", "\n".join(tables))
