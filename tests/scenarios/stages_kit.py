"""Clusters of stub engines that tell all that a stage asks of an engine: for `validate stage`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from harness import Product

from kvatlas.config import WorkerConfig
from kvatlas.connectors.stub import StubEngine
from kvatlas.connectors.stub_api import StubApi
from kvatlas.connectors.stub_bodies import metrics_text
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.connectors.stub_text import WordTokenizer
from kvatlas.service.agent_front import DESCRIPTION
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.validate.stages.result import Result
from kvatlas.validate.stages.run import Order, run_stage
from kvatlas.validate.stages.stagefile import (
    Agent,
    Engine,
    Gateway,
    Limits,
    Requests,
    StageFile,
    check_stage_file,
)
from kvatlas.workload.models import load_layout
from kvatlas.workload.spec import EngineSpec

LAYOUT = "32"
SPEC = EngineSpec(blocks=4000, prefill_tokens_per_s=1e6, decode_step_s=1e-4)
REQUESTS = Requests(
    count=6, prompt_tokens=300, output_tokens=4, concurrency=2, samples_min=6, settle_s=0.3
)
#: Times mean nothing here: the engines take none.
LIMITS = Limits(worse_max=1000.0, tpot_worse_max=1000.0)
INFO: dict[str, Any] = {
    "model_config": {"dtype": "torch.bfloat16", "max_model_len": 1 << 20, "enforce_eager": True},
    "cache_config": {"cache_dtype": "auto"},
    "parallel_config": {"tensor_parallel_size": 1},
    "attention_config": {"hisparse_config": None},
    "speculative_config": None,
    "kv_transfer_config": None,
    "compilation_config": {"cudagraph_mode": "NONE"},
}
DECLARED = {"image": "none: stub engines", "model_digest": "sha256:stub", "transport": "tcp"}


class Telling:
    """A stub engine in vLLM's dress: its configuration, its counts by source, its log."""

    def __init__(self, engine: StubEngine, name: str, folder: Path) -> None:
        self.engine = engine
        self.name = name
        self.info: dict[str, Any] | None = copy.deepcopy(INFO)
        self.counts = True
        self.logged: Callable[[int], bool] = lambda number: True  # of its n-th request
        self._number = 0
        self.log = folder / f"{name}.log"
        self.log.write_text("started\n")
        self._api = StubApi(engine, WordTokenizer())
        self.server = HttpServer(self._handle)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def described(self, role: Any = "combined") -> Engine:
        return Engine(self.name, self.url, role, log=str(self.log))

    async def _handle(self, request: Request, reply: Reply) -> None:
        if request.path == "/server_info" and self.info is not None:
            reply.send_json(200, {"vllm_config": self.info})
        elif request.path == "/metrics":
            text = metrics_text(self.engine, 1.0) + self._sources()
            reply.send(*((200, [], text.encode()) if self.counts else (404, [])))
        else:
            name = request.header("x-request-id")
            self._number += bool(name)
            if name and self.logged(self._number):
                with self.log.open("a") as log:
                    log.write(f"Received request cmpl-{name}-0: params: …\n")
            await self._api.handle(request, reply)

    def _sources(self) -> str:
        n = self.engine.numbers()
        outside = n.handed_over_tokens
        by_source = {
            "local_compute": n.prompt_tokens - n.hit_tokens,
            "local_cache_hit": n.hit_tokens - outside,
            "external_kv_transfer": outside,
        }
        lines = [
            f'vllm:prompt_tokens_by_source_total{{engine="0",source="{source}"}} {float(count)}'
            for source, count in by_source.items()
        ]
        return "\n".join(lines) + "\n"


class StillAgent:
    """An agent that has a little memory, and never does anything. ``tiers``: what it has."""

    def __init__(self, *tiers: str) -> None:
        self._tiers = tiers
        self.server = HttpServer(self._handle)

    async def _handle(self, request: Request, reply: Reply) -> None:
        if request.path == DESCRIPTION:
            reply.send_json(200, {"life": "1", "events": "", "replay": ""})
            return
        lines = ["kvatlas_agent_busy 0.0"]
        for tier in self._tiers:
            lines += [
                f'kvatlas_agent_tier_held_bytes{{tier="{tier}"}} 0.0',
                f'kvatlas_agent_tier_capacity_bytes{{tier="{tier}"}} 100.0',
            ]
        reply.send(200, [], "\n".join(lines).encode() + b"\n")

    def described(self, name: str) -> Agent:
        return Agent(name, f"http://127.0.0.1:{self.server.port}")


class Stubs:
    """Stub engines by name, and a gateway before a pair of them."""

    def __init__(self, cluster: StubCluster, engines: dict[str, Telling], folder: Path) -> None:
        self.cluster = cluster
        self.engines = engines
        self.folder = folder
        self.product: Product | None = None
        self._closing: list[asyncio.Future[None]] = []

    def file(self, *engines: Engine, **more: Any) -> StageFile:
        values: dict[str, Any] = {
            "name": "stubs",
            "engine": engines,
            "requests": REQUESTS,
            "limits": LIMITS,
            "declared": DECLARED,
            "not_applicable": {"a.power": "stubs draw none", "a.hbm": "stubs have none"},
        }
        if self.product is not None:
            values["gateway"] = (Gateway(self.product.url),)
        made = StageFile(**(values | more))
        check_stage_file(made, "stubs.toml")
        return made

    async def stage_a(self, **more: Any) -> Result:
        file = self.file(self.engines["c"].described(), **more)
        return await run_stage(Order("a", self.folder), file)

    async def stage_b(self, **more: Any) -> Result:
        p, d = self.engines["p"], self.engines["d"]
        file = self.file(p.described("prefill"), d.described("decode"), **more)
        return await run_stage(Order("b", self.folder), file, own={"backend_fail": self._fail})

    def _fail(self) -> None:
        """The prefill half refuses connections from now on."""
        self._closing.append(asyncio.ensure_future(self.engines["p"].server.close()))


@asynccontextmanager
async def stubs(folder: Path) -> AsyncIterator[Stubs]:
    """c alone, and p and d behind a gateway."""
    layout = load_layout(LAYOUT, engine="vllm")
    async with AsyncExitStack() as stack:
        options = StubOptions(layout, SPEC, model_name="m", count=3)
        cluster = await stack.enter_async_context(StubCluster(options))
        engines: dict[str, Telling] = {}
        for index, name in enumerate("cpd"):
            made = engines[name] = Telling(cluster.engine(index), name, folder)
            if name != "c":
                assert made.info is not None
                made.info["kv_transfer_config"] = {"kv_connector": "NixlConnector"}
            await made.server.start("127.0.0.1", 0)
            stack.push_async_callback(made.server.close)
        found = Stubs(cluster, engines, folder)
        workers = [
            WorkerConfig(name=name, url=engines[name].url, engine="stub", layout=LAYOUT, role=role)
            for name, role in (("p", "prefill"), ("d", "decode"))
        ]
        found.product = await stack.enter_async_context(Product(workers))
        await found.product.settled()
        yield found


def status(result: Result) -> dict[str, str]:
    return {verdict.point: verdict.status for verdict in result.verdicts}


def why(result: Result, point: str) -> str:
    return next(v.reason for v in result.verdicts if v.point == point)


def replaced(requests: Requests, **more: Any) -> Requests:
    return msgspec.structs.replace(requests, **more)
