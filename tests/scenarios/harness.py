"""The words of the field reports, bound to the product: workers W1, W2…, Ask(prefix), a client.

`Product` is what ``kvatlas serve`` runs, in this process and on a free port. `FakeWorker` is an
engine without a cache: its answers and its KV events are what a test says. Everything else goes
through the public wire: HTTP to the gateway, HTTP and ZMQ between it and the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from stub_publisher import BLOCK, StubPublisher, block_tokens, engine_hash

from kvatlas.config import (
    AgentConfig,
    Config,
    DirectoryConfig,
    GatewayConfig,
    KeysConfig,
    RouterConfig,
    TokenizerConfig,
    WorkerConfig,
)
from kvatlas.config_register import RegisterConfig
from kvatlas.config_tenants import TenantsConfig
from kvatlas.connectors.child import Child
from kvatlas.connectors.stub_cluster import StubCluster
from kvatlas.connectors.stub_text import TextTokenizer
from kvatlas.core import sequence
from kvatlas.core.admission import Rules
from kvatlas.core.ahead_copies import Params as AheadParams
from kvatlas.errors import EngineError
from kvatlas.service.assembly import Assembly
from kvatlas.service.cluster_metrics import ClusterMetrics
from kvatlas.service.engines import Timing
from kvatlas.service.gateway import Gateway
from kvatlas.service.http import Request
from kvatlas.service.http_client import HttpClient
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.register import RegisterPort

WAIT_S = 90.0  # for real I/O on a busy machine; nothing waits that long when it works
CHAT, COMPLETION, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
QUICK = Timing(poll_s=0.1, timeout_s=5.0, retry_max_s=0.2)
FEED = sequence.Limits(settle_s=0.02, retry_s=0.05, orphan_replay_s=0.05)


class Answer(msgspec.Struct, frozen=True):
    """What a client got. ``broken``: the connection ended before the answer did."""

    status: int
    headers: dict[str, str]
    body: bytes
    broken: bool = False

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def worker(self) -> str:
        return self.headers["x-kvatlas-worker"]

    @property
    def expected(self) -> int:
        """Tokens that the route expected to hit."""
        return int(self.headers["x-kvatlas-expected-hit-tokens"])

    @property
    def fallback(self) -> str:
        return self.headers.get("x-kvatlas-fallback", "")

    @property
    def usage(self) -> dict[str, Any]:
        """Of a whole answer, or of the last event of a stream that has one."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return dict(self.json()["usage"])
        events = [e[6:] for e in self.body.decode().split("\n\n") if e.startswith("data: {")]
        return next(dict(u) for e in reversed(events) if (u := json.loads(e).get("usage")))

    @property
    def cached(self) -> int:
        """Tokens that the engine says it resumed."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def text(self) -> str:
        choice = self.json()["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's envelope, all of its members there."""
        found = dict(self.json()["error"])
        assert set(found) == {"message", "type", "param", "code"}, found
        return found


def shared_secret(folder: Path, secret: bytes) -> tuple[Path, KeysConfig]:
    """The file that agents are started with, and what a gateway is told to be one of theirs."""
    file, config = folder / "secret", folder / "kvatlas.toml"
    file.write_bytes(secret)
    config.write_text(
        f'[keys]\nsecret_file = "{file}"\n[[worker]]\nname = "w"\nurl = "http://127.0.0.1:1"\n'
    )
    return config, KeysConfig(secret_file=str(file))


class Held(msgspec.Struct, frozen=True):
    """What the directory believes one worker holds of a prompt, in tokens; all and by tier."""

    tokens: int
    lower: dict[str, int]


class Product:
    """``kvatlas serve`` in front of ``workers``, for ``async with``. `restart` forgets all."""

    def __init__(
        self,
        workers: Iterable[WorkerConfig],
        *,
        gateway: GatewayConfig | None = None,
        router: RouterConfig | None = None,
        directory: DirectoryConfig | None = None,
        tokenizer: TokenizerConfig | None = None,
        admission: Rules | None = None,
        keys: KeysConfig | None = None,
        agents: Iterable[AgentConfig] = (),
        ahead: AheadParams | None = None,
        tenants: TenantsConfig | None = None,
        register: RegisterConfig | None = None,
        port: RegisterPort | None = None,
        timing: Timing = QUICK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``port``: in place of the one that ``register`` names."""
        self.clock = clock
        self.register_port = port
        self.config = Config(
            worker=tuple(workers),
            agent=tuple(agents),
            gateway=gateway or GatewayConfig(port=0),
            router=router or RouterConfig(),
            directory=directory or DirectoryConfig(),
            tokenizer=tokenizer or TokenizerConfig(),
            admission=admission or Rules(),
            keys=keys or KeysConfig(),
            ahead=ahead or AheadParams(),
            tenants=tenants or TenantsConfig(),
            register=register or RegisterConfig(),
        )
        self.timing = timing
        self.port = 0
        self._asks = itertools.count()

    async def __aenter__(self) -> Self:
        self.client = HttpClient(idle_max=1024)
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.client.close()

    async def start(self) -> None:
        self.assembly = Assembly(
            self.config,
            timing=self.timing,
            feed_limits=FEED,
            clock=self.clock,
            register=self.register_port,
        )
        await self.assembly.start()
        port = self.port or self.config.gateway.port
        settings = msgspec.structs.replace(self.config.gateway, port=port)
        metrics = GatewayMetrics()
        metrics.registry.register(ClusterMetrics(self.assembly))
        self.gateway = Gateway(
            settings,
            self.assembly.steering,
            metrics=metrics,
            pages=self.assembly.pages(),
            questions=self.assembly.questions(),
            talks=self.assembly.talks(),
            tenants=self.assembly.tenancy.tenants,
        )
        await self.gateway.start()
        self.port = self.gateway.port

    async def stop(self) -> None:
        await self.gateway.close()
        await self.assembly.close()

    @contextlib.asynccontextmanager
    async def only_as_client(self, port: int) -> AsyncIterator[Self]:
        """Of a gateway that runs elsewhere."""
        self.client, self.port = HttpClient(), port
        try:
            yield self
        finally:
            await self.client.close()

    async def restart(self) -> None:
        """The same configuration and port, and nothing remembered."""
        await self.stop()
        await self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # -- a client -------------------------------------------------------------------------------

    async def send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request; a broken answer is an `Answer` too, with status 0."""
        pairs = {"content-type": "application/json"} | dict(headers or {})
        raw = [(name.encode(), value.encode()) for name, value in pairs.items()]
        try:
            got = await self.client.request(
                method, self.url + path, headers=raw, body=body, timeout_s=WAIT_S
            )
        except EngineError as error:
            return Answer(0, {}, str(error).encode(), broken=True)
        named = {n.decode("latin-1").lower(): v.decode("latin-1") for n, v in got.headers}
        return Answer(got.status, named, got.body)

    async def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send("POST", path, raw, headers)

    async def get(self, path: str) -> Answer:
        return await self.send("GET", path, b"")

    async def complete(self, prompt: object, model: str = "m", **more: object) -> Answer:
        body = {"model": model, "prompt": prompt, "max_tokens": 4} | more
        return await self.post(COMPLETION, body)

    async def chat(self, messages: Sequence[object], model: str = "m", **more: object) -> Answer:
        body = {"model": model, "messages": messages, "max_tokens": 4} | more
        return await self.post(CHAT, body)

    # -- what it says of itself -----------------------------------------------------------------

    async def ask(
        self, prefix: Sequence[int], model: str = "m", headers: Mapping[str, str] | None = None
    ) -> dict[str, Held]:
        """Ask(prefix): what the directory believes of each worker that holds any of it.

        A completion of no tokens: every engine refuses it, so it leaves no trace anywhere. One
        token is added, because an engine always computes the last one.
        """
        refused = await self._refused(prefix, model, headers)
        name = refused.headers["x-request-id"]
        text = (await self.get(f"/kvatlas/explain/{name}")).body.decode()
        return {found["worker"]: held for found in _PLAN.finditer(text) if (held := _held(found))}

    async def chosen(self, prefix: Sequence[int], model: str = "m") -> str:
        """Who gets such a request; it learns nothing from it either."""
        return (await self._refused(prefix, model, None)).worker

    async def _refused(
        self, prefix: Sequence[int], model: str, headers: Mapping[str, str] | None
    ) -> Answer:
        body = {"model": model, "prompt": [*prefix, 0], "max_tokens": 0}
        more = {"x-request-id": f"ask-{next(self._asks)}"} | dict(headers or {})
        answer = await self.post(COMPLETION, body, more)
        assert answer.status == 400, answer
        return answer

    async def blocks(self, path: str, **more: Any) -> dict[str, int]:
        """Ask for blocks named by letters, in blocks."""
        found = await self.ask(block_tokens(path), **more)
        return {worker: held.tokens // BLOCK for worker, held in found.items()}

    async def answers(self, path: str, expected: dict[str, int], **more: Any) -> None:
        """Events travel for a moment: wait until Ask gives ``expected``."""
        await self.until_equal(lambda: self.blocks(path, **more), expected)

    async def until_equal(self, ask: Callable[[], Awaitable[Any]], expected: object) -> None:
        found: object = None
        try:
            async with asyncio.timeout(WAIT_S):
                while (found := await ask()) != expected:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{found} is not {expected}") from None

    async def until(self, met: Callable[[], Awaitable[bool]]) -> None:
        await self.until_equal(met, True)

    async def workers(self) -> dict[str, dict[str, Any]]:
        return {row["worker"]: row for row in (await self.get("/kvatlas/workers")).json()}

    async def feed(self, worker: str, what: str) -> Any:
        row = (await self.workers())[worker]
        return (row["feed"] or {}).get(what)

    async def directory(self) -> dict[str, Any]:
        return dict((await self.get("/kvatlas/directory")).json())

    async def flags(self) -> set[str]:
        return set((await self.get("/health")).json()["flags"])

    async def in_flight(self) -> dict[str, int]:
        """Those that are not 0."""
        rows = (await self.workers()).values()
        return {row["worker"]: row["in_flight"] for row in rows if row["in_flight"]}

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the series of one metric that have these labels."""
        text = (await self.get("/metrics")).body.decode()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in text.splitlines() if re.split(r"[{ ]", line)[0] == name]
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines if all(w in x for w in wanted))

    async def settled(self) -> None:
        """Every worker is up, and every stream of events that there is has caught up."""

        async def so() -> bool:
            rows = (await self.workers()).values()
            return all(
                r["up"]
                and (r["feed"] is None or (r["feed"]["connected"] and not r["feed"]["behind"]))
                for r in rows
            )

        await self.until(so)


_PLAN = re.compile(
    r"^[→ ] (?P<worker>\S+) +[\d.]+ s = .* resumes at (?P<at>\d+)"
    r"(?: \((?P<coming>\d+) of it being computed there now\))?(?: \((?P<tiers>[^)]*)\))?, ",
    re.MULTILINE,
)


def _held(plan: re.Match[str]) -> Held | None:
    tokens = int(plan["at"]) - int(plan["coming"] or 0)
    split = re.findall(r"(\d+) from (\w+)", plan["tiers"] or "")
    lower = {tier: int(count) for count, tier in split}
    return Held(tokens, lower) if tokens else None


# -- workers --------------------------------------------------------------------------------------

Behave = Callable[["FakeWorker", Request, Reply], Awaitable[None]]


class FakeWorker:
    """W1, W2…: speaks like vLLM, computes nothing, and publishes what a test says on ``events``.

    ``behave`` answers the requests of clients. Load, sleep and start time are what the test sets.
    """

    def __init__(
        self,
        name: str,
        behave: Behave | None = None,
        *,
        models: Sequence[str] = ("m",),
        adapters: Sequence[str] = (),
        events: StubPublisher | None = None,
        publishes: bool = True,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        self.name = name
        self.behave = behave or answer
        self.models, self.adapters = list(models), list(adapters)
        self.events = events or StubPublisher()
        self.tokenizer = tokenizer
        self.publishes = publishes
        self.got: list[Request] = []
        self.version = "0.32.0"
        self.running = 0  # as its metrics say
        self.asleep = False
        self.draft = False  # its metrics tell of one
        self.cache_config = ""  # labels by which its metrics tell of its cache
        self.healthy = True
        self.started = 1000.0
        self.gate: asyncio.Event | None = None  # answers wait for it
        self.cached_tokens = 0
        self.metrics: list[str] = []  # further lines of its metrics
        self.busy = self.most = 0  # requests that it holds now, and the most it ever held
        self._server: HttpServer | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        await self.events.__aenter__()
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        await self.events.__aexit__()

    async def listen(self) -> None:
        self._server = HttpServer(self._handle)
        await self._server.start("127.0.0.1", self._port)
        self._port = self._server.port

    async def close(self) -> None:
        """Its HTTP side dies; `listen` brings it back on the same port."""
        if self._server is not None:
            await self._server.close()
        self._server = None

    def config(self, **more: Any) -> WorkerConfig:
        values = {"name": self.name, "url": f"http://127.0.0.1:{self._port}", "layout": str(BLOCK)}
        return WorkerConfig(**values | more)

    async def heard(self) -> None:
        """Wait until the product subscribed."""
        await self.events.subscribed()

    async def _handle(self, request: Request, reply: Reply) -> None:
        if request.method == "GET":
            self._tell(request.path, reply)
            return
        if request.path == "/tokenize":
            self._tokenize(json.loads(request.body), reply)
            return
        if request.body[:1] == b"{" and json.loads(request.body).get("max_tokens") == 0:
            reply.send_json(400, {"error": {"message": "max_tokens must be at least 1"}})
            return
        self.got.append(request)
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            await self.behave(self, request, reply)
        finally:
            self.busy -= 1

    def _tell(self, path: str, reply: Reply) -> None:
        if path == "/health":
            reply.send(200 if self.healthy else 503, [])
        elif path == "/v1/models":
            cards: list[dict[str, object]] = [{"id": model} for model in self.models]
            cards += [{"id": name, "parent": self.models[0]} for name in self.adapters]
            reply.send_json(200, {"object": "list", "data": cards})
        elif path == "/version":
            reply.send_json(200, {"version": self.version})
        elif path == "/kv_event_sources":
            source = {"endpoint": self.events.endpoint, "replay_endpoint": self.events.replay}
            reply.send_json(200, {"0": source} if self.publishes else {})
        elif path == "/metrics":
            lines = [
                f'vllm:num_requests_running{{engine="0"}} {self.running}',
                'vllm:num_requests_waiting{engine="0"} 0',
                'vllm:generation_tokens_total{engine="0"} 0',
                f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {int(not self.asleep)}',
                f'vllm:engine_sleep_state{{engine="0",sleep_state="slept"}} {int(self.asleep)}',
                f"process_start_time_seconds {self.started}",
            ]
            lines += ['vllm:spec_decode_num_drafts_total{engine="0"} 0.0'] if self.draft else []
            if self.cache_config:
                lines.append(f"vllm:cache_config_info{{{self.cache_config}}} 1.0")
            reply.send(200, [], "\n".join(lines + self.metrics).encode())
        else:
            reply.send(404, [])

    def _tokenize(self, body: dict[str, Any], reply: Reply) -> None:
        if self.tokenizer is None:
            reply.send(404, [])
            return
        if "messages" in body:
            ids = self.tokenizer.encode_chat(body)
        else:
            ids = self.tokenizer.encode(body["prompt"], special=body["add_special_tokens"])
        reply.send_json(200, {"tokens": memoryview(ids).cast("I").tolist()})


async def answer(worker: FakeWorker, request: Request, reply: Reply) -> None:
    """Once the gate is open: three events and usage where a stream is asked for, else an object."""
    if worker.gate is not None:
        await worker.gate.wait()
    try:
        body = json.loads(request.body)
    except ValueError:
        body = {}
    prompt = body.get("prompt")
    count = len(prompt) if isinstance(prompt, list) else max(10, worker.cached_tokens + 1)
    usage = {
        "prompt_tokens": count,
        "completion_tokens": 3,
        "total_tokens": count + 3,
        "prompt_tokens_details": {"cached_tokens": worker.cached_tokens},
    }
    if not body.get("stream"):
        whole = {"choices": [{"text": worker.name, "message": {"content": worker.name}}]}
        reply.send_json(200, whole | {"usage": usage})
        return
    reply.start(200, [(b"content-type", b"text/event-stream")])
    for piece in ("a", "b", "c"):
        reply.write(b"data: %s\n\n" % json.dumps({"choices": [{"text": piece}]}).encode())
    if (body.get("stream_options") or {}).get("include_usage"):
        reply.write(b"data: %s\n\n" % json.dumps({"choices": [], "usage": usage}).encode())
    reply.end(b"data: [DONE]\n\n")


def stub_workers(cluster: StubCluster, layout: str, **more: Any) -> list[WorkerConfig]:
    """The engines of a cluster, as a configuration names them."""
    return [
        WorkerConfig(name=a.name, url=a.url, engine="stub", layout=layout, **more)
        for a in cluster.addresses
    ]


async def crowd(
    workers: Sequence[FakeWorker], requests: Sequence[Awaitable[Answer]]
) -> list[Answer]:
    """All requests at once: nobody is answered before the workers hold every one of them."""
    gate = asyncio.Event()
    for worker in workers:
        worker.gate, worker.most = gate, worker.busy
    running = asyncio.gather(*requests)
    async with asyncio.timeout(WAIT_S):
        while sum(worker.busy for worker in workers) < len(requests) and not running.done():
            await asyncio.sleep(0.01)
    gate.set()
    return list(await running)


def announce(events: StubPublisher, ids: bytes, name: str) -> None:
    """All full blocks of a prompt (ids as uint32), as one store; ``name`` makes their hashes."""
    tokens = memoryview(ids).cast("I").tolist()
    count = len(tokens) // BLOCK
    event = {
        "type": "BlockStored",
        "block_hashes": [engine_hash(f"{name}{i}") for i in range(count)],
        "parent_block_hash": None,
        "token_ids": tokens[: count * BLOCK],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    events.publish(event)


def process(
    directory: Path,
    *command: str,
    url: str,
    health: str = "/health",
    seed: str | None = None,
) -> Child:
    """``kvatlas`` with these arguments, started, with a PYTHONHASHSEED of its own."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if seed is not None:
        env["PYTHONHASHSEED"] = seed
    argv = [sys.executable, "-m", "kvatlas", *command]
    log = directory / f"{command[0]}-{url.rpartition(':')[2]}.log"
    child = Child(command[0], argv, log=log, url=url, health=health, env=env)
    child.start()
    return child


def shares(answers: Iterable[Answer]) -> Counter[str]:
    """Answers by worker."""
    return Counter(a.worker for a in answers)


def fresh_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids that no other seed begins with."""
    return [(seed * 7919 + 31 * i) % 50_000 + 1 for i in range(count)]
