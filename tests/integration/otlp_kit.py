"""A collector of OpenTelemetry spans in this process: what came, by the protocol's own types."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from gateway_kit import Behave, Engine, Watched, eventually
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvatlas.config import GatewayConfig
from kvatlas.config_tracing import TracingConfig
from kvatlas.service.gateway import Gateway
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.steer import Steer
from kvatlas.service.tracing import Traced
from kvatlas.service.tracing_export import Exporter

Answer = Callable[[Request, Reply], Awaitable[None]]


class Seen(msgspec.Struct, frozen=True):
    """A span as the collector has it. ``parent`` "": none."""

    trace: str
    id: str
    parent: str
    name: str
    kind: int
    seconds: float
    began_ns: int
    attributes: dict[str, Any]
    error: str
    resource: dict[str, Any]


class Collector:
    """Listens; ``answer`` is what it does with a request once it was read."""

    def __init__(self) -> None:
        self.answer: Answer = takes
        self.spans: list[Seen] = []
        self.paths: list[str] = []
        self._server = HttpServer(self._handle)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.close()

    async def _handle(self, request: Request, reply: Reply) -> None:
        self.paths.append(request.path)
        packed = request.header("content-encoding") == "gzip"
        body = zlib.decompress(request.body, 31) if packed else request.body
        told = ExportTraceServiceRequest.FromString(body)
        await self.answer(request, reply)
        if self.answer is takes:
            self.spans += read(told)

    def named(self, name: str) -> Seen:
        """The one span with that name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def children(self, parent: Seen) -> list[Seen]:
        """By when they began."""
        found = [span for span in self.spans if span.parent == parent.id]
        return sorted(found, key=lambda span: span.began_ns)


async def takes(_: Request, reply: Reply) -> None:
    reply.send(200, [(b"content-type", b"application/x-protobuf")])


async def breaks(_: Request, reply: Reply) -> None:
    reply.send(500, [], b"broken")


async def hangs(_: Request, reply: Reply) -> None:
    await asyncio.Event().wait()


def read(told: Any) -> list[Seen]:
    return [
        Seen(
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.name,
            span.kind,
            (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
            span.start_time_unix_nano,
            _plain(span.attributes),
            span.status.message if span.status.code == 2 else "",
            _plain(of.resource.attributes),
        )
        for of in told.resource_spans
        for scope in of.scope_spans
        for span in scope.spans
    ]


def _plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    await collector.start()
    try:
        yield collector
    finally:
        await collector.close()


@contextlib.asynccontextmanager
async def exporting(url: str, **limits: float) -> AsyncIterator[Exporter]:
    """Its process runs until the block ends."""
    exporter = Exporter(TracingConfig(otlp=url), **({"flush_s": 0.02, "timeout_s": 0.3} | limits))
    await exporter.start()
    try:
        yield exporter
    finally:
        await exporter.close()


class Stand(msgspec.Struct):
    """A gateway whose requests are traced, its engines, and where the spans go."""

    gateway: Gateway
    engines: list[Engine]
    steer: Watched
    exporter: Exporter
    collector: Collector

    @property
    def port(self) -> int:
        return self.gateway.port

    async def requests(self, count: int) -> None:
        """So many requests have come to the collector whole."""

        def whole() -> bool:
            return sum(span.kind == 2 for span in self.collector.spans) == count

        await eventually(whole)


@contextlib.asynccontextmanager
async def traced(
    *behaves: Behave, engines_more: dict[str, str] | None = None, ratio: float = 1.0
) -> AsyncIterator[Stand]:
    """As `gateway_kit.stand`, with a collector."""
    engines = [Engine(behave) for behave in behaves]
    for engine in engines:
        await engine.start()
    urls = dict(engines_more or {})
    urls.update({f"w{index}": engine.url for index, engine in enumerate(engines)})
    steer = Watched(urls)
    async with collecting() as collector, exporting(collector.url) as exporter:
        around: Steer = Traced(steer, exporter, TracingConfig(collector.url, ratio))
        gateway = Gateway(GatewayConfig(port=0), around)
        await gateway.start()
        try:
            yield Stand(gateway, engines, steer, exporter, collector)
        finally:
            await gateway.close()
            for engine in engines:
                await engine.stop()
