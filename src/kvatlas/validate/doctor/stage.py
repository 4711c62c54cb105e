"""A stub cluster to plant misconfigurations in: real HTTP and ZMQ, a real gateway, and
agents that are pages alone."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from email.utils import formatdate
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq.asyncio

from kvatlas.config import (
    AgentConfig,
    Config,
    GatewayConfig,
    KeysConfig,
    RouterConfig,
    WorkerConfig,
)
from kvatlas.connectors.stub import StubEngine
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.connectors.stub_text import TextTokenizer, WordTokenizer
from kvatlas.core import sequence
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import plain
from kvatlas.core.router import Policy
from kvatlas.service.agent_front import DESCRIPTION, AgentDescription, Served
from kvatlas.service.assembly import Assembly
from kvatlas.service.engines import Timing
from kvatlas.service.event_socket import EventSocket
from kvatlas.service.gateway import Gateway
from kvatlas.service.http import Headers, Request
from kvatlas.service.http_client import HttpClient
from kvatlas.service.http_reply import JSON, Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.rdma_ports import RdmaPort, RdmaPorts
from kvatlas.validate.doctor import Cluster
from kvatlas.validate.doctor.engines import Patience
from kvatlas.workload.spec import EngineSpec

BLOCK = 16
SPEC = EngineSpec(blocks=4000, prefill_tokens_per_s=1e6, decode_step_s=0.0, step_overhead_s=0.0)
MODEL = "stub"
SECRET, OTHER_SECRET = b"a secret of the self-test", b"another one of the self-test"
PATIENCE = Patience(answer_s=20.0, event_s=5.0)
_KNOWN_S = 10.0
_TIMING = Timing(poll_s=0.1, timeout_s=2.0, retry_max_s=0.2)
_FEED = sequence.Limits(settle_s=0.02, retry_s=0.05, orphan_replay_s=0.05)


class Lies(msgspec.Struct):
    """What is changed on the way to and from an engine. ``ask``: bodies of JSON requests, with the
    path and whether a gateway sent it; ``tell``: bodies of answers, None for a page that is not
    there."""

    ask: Callable[[str, dict[str, Any], bool], None] | None = None
    tell: Callable[[str, bytes], bytes | None] | None = None
    date_ahead_s: float = 0.0


class Plan(msgspec.Struct):
    """A stub cluster, sound as it stands. ``engines``: one cluster of engines each, that share a
    tokenizer. ``workers`` changes what the gateway is configured with, by engine; ``file`` what
    the doctor reads in its place. ``disturb`` is called once all runs."""

    engines: list[StubOptions] = msgspec.field(
        default_factory=lambda: [StubOptions(plain(BLOCK), SPEC, model_name=MODEL, count=2)]
    )
    tokenizers: tuple[Callable[[], TextTokenizer], ...] = (WordTokenizer, WordTokenizer)
    lies: dict[int, Lies] = {}
    workers: dict[int, dict[str, Any]] = {}
    file: dict[int, dict[str, Any]] = {}
    policy: Policy = "price"
    secret: bytes = SECRET  # the doctor's
    agent_secret: bytes = SECRET
    agent_flags: dict[str, str] = {}
    quarantined_bytes: int = 0
    disturb: Callable[[Stage], Awaitable[None]] | None = None


class Liar:
    """Stands between an engine and everybody else."""

    def __init__(self, url: str, lies: Lies, client: HttpClient) -> None:
        self._url = url
        self._lies = lies
        self._client = client
        self.server = HttpServer(self._handle)

    async def _handle(self, request: Request, reply: Reply) -> None:
        lies, body = self._lies, request.body
        routed = bool(request.header("x-request-id"))
        if lies.ask is not None and body:
            fields = msgspec.json.decode(body)
            lies.ask(request.path, fields, routed)
            body = msgspec.json.encode(fields)
        target = self._url + request.path + (f"?{request.query}" if request.query else "")
        sent: Headers = [(b"content-type", b"application/json")] if body else []
        got = await self._client.request(request.method, target, headers=sent, body=body)
        said: bytes | None = got.body
        if lies.tell is not None and got.status == 200:
            said = lies.tell(request.path, got.body)
        headers = [h for h in got.headers if h[0].lower() == b"content-type"]
        if lies.date_ahead_s:
            date = formatdate(time.time() + lies.date_ahead_s, usegmt=True)
            headers.append((b"date", date.encode()))
        reply.send(404 if said is None else got.status, headers, said or b"")


class Stage:
    """``async with Stage(plan) as stage``: runs until the block ends. ``cluster`` is examined."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stubs: list[StubCluster] = []
        self.agents: list[HttpServer] = []
        self.assembly: Assembly
        self.gateway: Gateway
        self.cluster: Cluster
        self._stack = AsyncExitStack()
        self._client = HttpClient()

    def engine(self, index: int) -> StubEngine:
        """One of them, counted over all clusters."""
        for stub in self.stubs:
            if index < len(stub.addresses):
                return stub.engine(index)
            index -= len(stub.addresses)
        raise IndexError(index)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        plan, stack = self.plan, self._stack
        stack.push_async_callback(self._client.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "secret").write_bytes(SECRET)
        for options, make in zip(plan.engines, plan.tokenizers, strict=False):
            self.stubs.append(await stack.enter_async_context(StubCluster(options, make)))
        urls = [address.url for stub in self.stubs for address in stub.addresses]
        for index, lies in plan.lies.items():
            liar = Liar(urls[index], lies, self._client)
            await liar.server.start("127.0.0.1", 0)
            stack.push_async_callback(liar.server.close)
            urls[index] = f"http://127.0.0.1:{liar.server.port}"
        layouts = [o.layout for o in plan.engines for _ in range(o.count)]
        rows = [
            {"name": f"w{i}", "url": url, "layout": str(layouts[i].grid_tokens)}
            | plan.workers.get(i, {})
            for i, url in enumerate(urls)
        ]
        agents = [await self._agent(index) for index in range(len(rows))]
        config = Config(
            worker=msgspec.convert(rows, tuple[WorkerConfig, ...]),
            agent=tuple(agents),
            gateway=GatewayConfig(port=0),
            keys=KeysConfig(secret_file=str(folder / "secret")),
            router=RouterConfig(policy=plan.policy),
        )
        self.assembly = Assembly(config, timing=_TIMING, feed_limits=_FEED)
        stack.push_async_callback(self.assembly.close)
        await self.assembly.start()
        self.gateway = gateway = Gateway(
            config.gateway,
            self.assembly.steering,
            pages=self.assembly.pages(),
            questions=self.assembly.questions(),
        )
        await gateway.start()
        stack.push_async_callback(gateway.close)
        await self._known()
        if plan.disturb is not None:
            await plan.disturb(self)
        file = [row | plan.file.get(index, {}) for index, row in enumerate(rows)]
        read = msgspec.structs.replace(
            config, worker=msgspec.convert(file, tuple[WorkerConfig, ...])
        )
        url = f"http://127.0.0.1:{gateway.port}"
        self.cluster = Cluster(read.worker, url, tuple(agents), read, plan.secret)

    async def _known(self) -> None:
        """Until the gateway follows all events, and has seen the agents with their engines: it
        looks at these from time to time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _KNOWN_S
        while loop.time() < until and not self._is_known():  # noqa: ASYNC110
            await asyncio.sleep(_TIMING.poll_s / 4)

    def _is_known(self) -> bool:
        feed, nodes = self.assembly.feed, self.assembly.agents.nodes.values()
        follows = all(feed.idle(status.publisher) for status in feed.status())
        return follows and all(node.told and node.told.engines for node in nodes)

    async def _agent(self, index: int) -> AgentConfig:
        """The pages of the agent of one engine's node, which holds nothing."""
        context = zmq.asyncio.Context()
        self._stack.callback(context.destroy, linger=0)
        events = EventSocket(context, "127.0.0.1")
        events.start()
        self._stack.push_async_callback(events.close)

        async def handle(request: Request, reply: Reply) -> None:
            self._agent_page(request, reply, index, events)

        server = HttpServer(handle)
        self.agents.append(server)
        await server.start("127.0.0.1", 0)
        self._stack.push_async_callback(server.close)
        return AgentConfig(f"node{index}", f"http://127.0.0.1:{server.port}", (f"w{index}",))

    def _agent_page(self, request: Request, reply: Reply, index: int, events: EventSocket) -> None:
        plan, ring = self.plan, Keyring(self.plan.agent_secret)
        if request.path == DESCRIPTION:
            engines = {
                name: Served(member, ring.root(member.fingerprint.digest()).hex())
                for name, member in self.assembly.members.items()
                if name == f"w{index}"
            }
            ports = RdmaPorts((RdmaPort("mlx5_0", "1", 1 << 40, 1 << 40),))
            told = AgentDescription("1", events.endpoint, events.replay_endpoint, engines, ports)
            reply.send(200, [JSON], msgspec.json.encode(told))
        elif request.path == "/health":
            flags = plan.agent_flags
            reply.send_json(200, {"status": "", "flags": list(flags), "details": flags})
        else:
            names = ("capacity", "held", "quarantined")
            sizes = (1 << 40, 1 << 30, plan.quarantined_bytes)
            lines = (
                f'kvatlas_agent_tier_{name}_bytes{{tier="disk"}} {float(size)}\n'
                for name, size in zip(names, sizes, strict=True)
            )
            reply.send(200, [], "".join(lines).encode())
