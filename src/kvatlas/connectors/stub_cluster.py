"""Many stub engines in one process, each on ports of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

import msgspec
import zmq.asyncio

from kvatlas.connectors.stub import StubEngine
from kvatlas.connectors.stub_api import StubApi
from kvatlas.connectors.stub_pairs import LEASE_S, Exchange
from kvatlas.connectors.stub_text import TextTokenizer, WordTokenizer
from kvatlas.connectors.stub_wire import EventFormat, EventPublisher
from kvatlas.core.layout import Layout
from kvatlas.dataplane.tls import Trust
from kvatlas.errors import ConfigError
from kvatlas.service.http_server import HttpServer
from kvatlas.workload.pace import drawn, paced
from kvatlas.workload.spec import EngineSpec

_RESTART_TRIES = 200  # two seconds


class StubOptions(msgspec.Struct, frozen=True):
    """``port`` and ``events_port`` are the first of a run of ports (two per engine for events);
    0 takes free ones. ``events`` False gives an engine without a KV-event socket. ``spread`` above
    1: each engine has a pace of its own, by ``seed`` and its name (`pace.drawn`). ``lease_s``: how
    long half of a pair keeps what nobody takes over."""

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
    spread: float = 1.0
    seed: int = 0
    lease_s: float = LEASE_S
    trust: Trust | None = None  # HTTP over TLS; events have none, as those of real engines


class Address(msgspec.Struct, frozen=True):
    """Where one engine listens. ``events`` and ``replay`` are "" without a KV-event socket."""

    name: str
    url: str
    events: str
    replay: str


class _Ports(msgspec.Struct, frozen=True):
    """0 takes a free one."""

    http: int
    events: int
    replay: int


class _Running:
    """One engine with its sockets. `start` and `stop` may follow each other any number of times;
    the ports stay those of the first start."""

    def __init__(
        self,
        options: StubOptions,
        index: int,
        context: zmq.asyncio.Context,
        tokenizer: TextTokenizer,
        exchange: Exchange,
    ) -> None:
        self._options = options
        self._exchange = exchange
        self._context = context
        self._tokenizer = tokenizer
        first = options.events_port and options.events_port + 2 * index
        self._ports = _Ports(
            http=options.port and options.port + index, events=first, replay=first and first + 1
        )
        self._server: HttpServer | None = None
        self.engine: StubEngine | None = None
        self.address = Address(f"stub-{index}", "", "", "")

    async def start(self) -> None:
        """Raises ConfigError when a port is taken."""
        options, ports = self._options, self._ports
        publisher = await self._publisher() if options.events else None
        self.engine = StubEngine(
            options.layout,
            paced(options.spec, drawn(options.seed, self.address.name, options.spread)),
            self._tokenizer,
            publisher,
            model_name=options.model_name,
            adapters=options.adapters,
            natural_output_tokens=options.natural_output_tokens,
            exchange=self._exchange,
        )
        handle = StubApi(self.engine, self._tokenizer).handle
        self._server = HttpServer(handle, trust=options.trust)
        try:
            await self._server.start(options.host, ports.http)
        except OSError as error:
            await self.stop()
            raise ConfigError(f"{options.host}:{ports.http}: {error}") from error
        events = publisher.endpoint if publisher else ""
        replay = publisher.replay_endpoint if publisher else ""
        self._ports = _Ports(self._server.port, _port_of(events), _port_of(replay))
        scheme = "http" if options.trust is None else "https"
        url = f"{scheme}://{options.host}:{self._server.port}"
        self.address = Address(self.address.name, url, events, replay)

    async def stop(self) -> None:
        """As if the process died: connections break, nothing is said on the event socket."""
        if self._server is not None:
            await self._server.close()
        if self.engine is not None:
            self.engine.close()
            if self.engine.publisher is not None:
                await self.engine.publisher.close()
        self._server = self.engine = None

    async def _publisher(self) -> EventPublisher:
        options, ports = self._options, self._ports
        # ZMQ gives a closed socket's port back in its own thread, a moment later.
        patience = _RESTART_TRIES if self.address.url else 1
        for left in reversed(range(patience)):
            try:
                publisher = EventPublisher(
                    self._context,
                    options.host,
                    ports.events,
                    ports.replay,
                    form=options.event_format,
                    topic=options.topic,
                )
                break
            except zmq.ZMQError as error:
                if not left:
                    where = f"{options.host}: ports {ports.events} and {ports.replay} for KV events"
                    raise ConfigError(f"{where}: {error}") from error
                await asyncio.sleep(0.01)
        publisher.start()
        return publisher


def _port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2] or 0)


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
        if options.natural_output_tokens < 1:
            raise ConfigError(f"answers of {options.natural_output_tokens} tokens: give 1 or more")
        options.spec.check(options.layout)
        drawn(options.seed, "", options.spread)  # raises where it cannot be
        tokenizer = make_tokenizer()  # may raise: before there is anything to close
        self._context = zmq.asyncio.Context()
        exchange = Exchange(options.lease_s)
        self._running = [
            _Running(options, index, self._context, tokenizer, exchange)
            for index in range(options.count)
        ]

    @property
    def addresses(self) -> list[Address]:
        return [running.address for running in self._running]

    def engine(self, index: int) -> StubEngine:
        """Raises KeyError for one that is stopped."""
        engine = self._running[index].engine
        if engine is None:
            raise KeyError(f"engine {index} is stopped")
        return engine

    async def __aenter__(self) -> Self:
        """Raises ConfigError when a port is taken."""
        try:
            for running in self._running:
                await running.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def stop(self, index: int) -> None:
        """One engine dies: its ports refuse and its state is gone. `start` brings it back."""
        await self._running[index].stop()

    async def start(self, index: int) -> None:
        """A fresh engine on the ports of the stopped one: empty cache, sequence numbers from 0."""
        await self._running[index].start()

    async def close(self) -> None:
        for running in self._running:
            await running.stop()
        self._context.destroy(linger=0)
