"""Many stub engines in one process, each on ports of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import msgspec
import zmq.asyncio

from kvatlas.connectors.stub import StubEngine
from kvatlas.connectors.stub_api import StubApi
from kvatlas.connectors.stub_text import TextTokenizer, WordTokenizer
from kvatlas.connectors.stub_wire import EventFormat, EventPublisher
from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError
from kvatlas.service.http_server import HttpServer
from kvatlas.workload.engine import EngineSpec


class StubOptions(msgspec.Struct, frozen=True):
    """``port`` and ``events_port`` are the first of a run of ports (two per engine for events);
    0 takes free ones. ``events`` False gives an engine without a KV-event socket."""

    layout: Layout
    spec: EngineSpec
    model_name: str = "stub"
    count: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    events_port: int = 0
    events: bool = True
    event_format: EventFormat = "vllm"
    topic: str = ""
    adapters: tuple[str, ...] = ()
    natural_output_tokens: int = 64


class Address(msgspec.Struct, frozen=True):
    """Where one engine listens. ``events`` and ``replay`` are "" without a KV-event socket."""

    name: str
    url: str
    events: str
    replay: str


class StubCluster:
    """``async with StubCluster(options) as cluster`` runs the engines until the block ends."""

    def __init__(
        self, options: StubOptions, make_tokenizer: Callable[[], TextTokenizer] = WordTokenizer
    ) -> None:
        """Raises ConfigError when the spec does not fit the layout or there is no engine to run."""
        if options.count < 1:
            raise ConfigError(f"{options.count} engines: at least 1 is needed")
        for first, each in ((options.port, 1), (options.events_port, 2)):
            if not 0 <= first <= 65_536 - each * options.count:
                raise ConfigError(f"port {first}: no room for {options.count} engines above it")
        options.spec.check(options.layout)
        self.options = options
        self._tokenizer = make_tokenizer()
        self._context = zmq.asyncio.Context()
        self._servers: list[HttpServer] = []
        self.engines: list[StubEngine] = []
        self.addresses: list[Address] = []

    async def __aenter__(self) -> Self:
        """Raises ConfigError when a port is taken."""
        try:
            for index in range(self.options.count):
                await self._start(index)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for server in self._servers:
            await server.close()
        for engine in self.engines:
            engine.close()
            if engine.publisher is not None:
                await engine.publisher.close()
        self._servers.clear()
        self.engines.clear()
        self._context.destroy(linger=0)

    async def _start(self, index: int) -> None:
        options = self.options
        publisher = self._publisher(index) if options.events else None
        engine = StubEngine(
            options.layout,
            options.spec,
            self._tokenizer,
            publisher,
            model_name=options.model_name,
            adapters=options.adapters,
            natural_output_tokens=options.natural_output_tokens,
        )
        self.engines.append(engine)
        server = HttpServer(StubApi(engine, self._tokenizer).handle)
        port = options.port + index if options.port else 0
        try:
            await server.start(options.host, port)
        except OSError as error:
            raise ConfigError(f"{options.host}:{port} cannot be listened on: {error}") from error
        self._servers.append(server)
        self.addresses.append(
            Address(
                name=f"stub-{index}",
                url=f"http://{options.host}:{server.port}",
                events=publisher.endpoint if publisher else "",
                replay=publisher.replay_endpoint if publisher else "",
            )
        )

    def _publisher(self, index: int) -> EventPublisher:
        options = self.options
        port = options.events_port + 2 * index if options.events_port else 0
        try:
            publisher = EventPublisher(
                self._context, options.host, port, form=options.event_format, topic=options.topic
            )
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{options.host}: ports {port} and {port + 1} for KV events: {error}"
            ) from error
        publisher.start()
        return publisher
