"""What the gateway's tests share: scripted engines, a gateway before them, a client of bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from round_robin import RoundRobin

from kvatlas.config import GatewayConfig
from kvatlas.service.gateway import Gateway
from kvatlas.service.http import Limits
from kvatlas.service.pages import Page
from kvatlas.service.steer import Inbound, Outcome, Route, Target

WAIT_S = 20.0  # for real I/O on a busy machine; nothing waits that long when it works


class Got(msgspec.Struct):
    """A request as an engine received it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found


Behave = Callable[["Engine", Got, asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """A scripted engine: ``behave`` answers each request; its client's leaving cancels it."""

    def __init__(self, behave: Behave) -> None:
        self.behave = behave
        self.got: list[Got] = []
        self.left = 0  # requests whose client left before ``behave`` was done
        self.connections = 0
        self.url = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            await finish(writer)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                got = await _read_request(reader)
                self.got.append(got)
                await self._serve(got, reader, writer)
        self._writers.discard(writer)
        await finish(writer)

    async def _serve(
        self, got: Got, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        answer = asyncio.ensure_future(self.behave(self, got, writer))
        leaving = asyncio.ensure_future(_eof(reader))
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            self.left += 1
        for task in (answer, leaving):
            task.cancel()
        for result in await asyncio.gather(answer, leaving, return_exceptions=True):
            if isinstance(result, ConnectionError) or "closed" in str(result):
                self.left += 1  # it noticed when it wrote
            elif isinstance(result, Exception):
                raise result


async def _eof(reader: asyncio.StreamReader) -> None:
    """Waits for the client's leaving without taking bytes of a next request."""
    while not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.002)


async def _read_request(reader: asyncio.StreamReader) -> Got:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    headers: dict[str, str] = {}
    for line in filter(None, lines[1:]):
        name, value = line.lower().split(": ", 1)[0], line.split(": ", 1)[1]
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Got(method, target, headers, body)


async def finish(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def whole(body: bytes, status: int = 200, *, extra: str = "") -> bytes:
    """A whole JSON answer."""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
STREAM_END = b"0\r\n\r\n"


def completion(prompt: int = 10, cached: int | None = 4, output: int = 3) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": details,
    }
    return json.dumps({"id": "c", "choices": [{"text": "é"}], "usage": usage}).encode()


async def answer_plainly(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
    """Streams three events and [DONE] where asked to, else a completion."""
    if got.body[:1] != b"{" or not got.json().get("stream"):
        writer.write(whole(completion()))
        return
    writer.write(STREAM_HEAD)
    for text in ("a", "b", "c"):
        event = json.dumps({"choices": [{"delta": {"content": text}}]})
        writer.write(chunk(f"data: {event}\n\n".encode()))
    if b"include_usage" in got.body:
        usage = json.loads(completion())["usage"]
        event = json.dumps({"choices": [], "usage": usage})
        writer.write(chunk(f"data: {event}\n\n".encode()))
    writer.write(chunk(b"data: [DONE]\n\n") + STREAM_END)


class Watched(RoundRobin):
    """Engines in turn; remembers what it was asked and told."""

    def __init__(self, urls: dict[str, str]) -> None:
        super().__init__(urls)
        self.asked: list[Inbound] = []
        self.routes: list[Route] = []
        self.firsts: list[float] = []
        self.not_reached: list[str] = []
        self.outcomes: list[Outcome] = []
        self.hold: asyncio.Event | None = None  # `choose` waits for it
        self.most: dict[str, int] = {}  # the most requests in flight, per worker

    async def choose(self, request: Inbound) -> Route:
        self.asked.append(request)
        if self.hold is not None:
            await self.hold.wait()
        route = await super().choose(request)
        self.routes.append(route)
        return route

    def sent(self, route: Route, target: Target) -> None:
        super().sent(route, target)
        count = self.in_flight[target.worker]
        self.most[target.worker] = max(count, self.most.get(target.worker, 0))

    def unreached(self, route: Route, target: Target) -> None:
        self.not_reached.append(target.worker)

    def first_token(self, route: Route, ttft_s: float) -> None:
        self.firsts.append(ttft_s)

    def finished(self, route: Route, outcome: Outcome) -> None:
        super().finished(route, outcome)
        self.outcomes.append(outcome)


class Stand(msgspec.Struct):
    """A gateway, its engines, and what is to be known of them."""

    gateway: Gateway
    engines: list[Engine]
    steer: Watched

    @property
    def port(self) -> int:
        return self.gateway.port

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series of one metric that have these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = self.gateway.metrics.text().decode().splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        found = [line for line in found if all(w in line for w in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    async def settled(self) -> None:
        """Every route that was chosen was finished, and nothing is counted as running."""
        await eventually(lambda: len(self.steer.outcomes) == len(self.steer.routes))
        assert not any(self.steer.in_flight.values())
        assert self.metric("kvatlas_requests_in_flight") == 0


@contextlib.asynccontextmanager
async def stand(
    *behaves: Behave,
    limits: Limits | None = None,
    pages: dict[str, Page] | None = None,
    engines_more: dict[str, str] | None = None,
    **config: float,
) -> AsyncIterator[Stand]:
    """A gateway before one engine per ``behave`` (and ``engines_more``: name → URL, first)."""
    engines = [Engine(behave) for behave in behaves]
    for engine in engines:
        await engine.start()
    urls = dict(engines_more or {})
    urls.update({f"w{index}": engine.url for index, engine in enumerate(engines)})
    steer = Watched(urls)
    settings = msgspec.convert({"port": 0, **config}, GatewayConfig)
    gateway = Gateway(settings, steer, limits=limits, pages=pages)
    await gateway.start()
    try:
        yield Stand(gateway, engines, steer)
    finally:
        await gateway.close()
        for engine in engines:
            await engine.stop()


class Seen(msgspec.Struct):
    """An answer as a client sees it. ``complete``: its framing was."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool = True

    def error(self) -> dict[str, object]:
        found = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return dict(found)


class Client:
    """One connection of a client, with a chunk reader of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Client]:
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        try:
            yield client
        finally:
            await client.leave()

    async def leave(self) -> None:
        await finish(self.writer)

    async def send(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        lines = [f"{method} {target} HTTP/1.1", "host: kvatlas", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        await self.writer.drain()

    async def head(self) -> Seen:
        async with asyncio.timeout(WAIT_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return Seen(int(lines[0].split(" ")[1]), {k.lower(): v for k, v in headers.items()}, b"")

    async def chunk(self) -> bytes:
        """The next chunk; b"" is the end. Raises IncompleteReadError when it never comes."""
        async with asyncio.timeout(WAIT_S):
            size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def rest(self, seen: Seen) -> Seen:
        """Reads the body of ``seen`` to its end, or to the end of the connection."""
        try:
            async with asyncio.timeout(WAIT_S):
                if "content-length" in seen.headers:
                    seen.body += await self.reader.readexactly(int(seen.headers["content-length"]))
                else:
                    assert seen.headers["transfer-encoding"] == "chunked"
                    while data := await self.chunk():
                        seen.body += data
        except (asyncio.IncompleteReadError, ConnectionError):
            seen.complete = False
        return seen


async def ask(
    port: int,
    target: str,
    body: bytes | dict[str, object] = b"",
    *,
    method: str = "",
    headers: dict[str, str] | None = None,
) -> Seen:
    """One request on a connection of its own."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with Client.to(port) as client:
        await client.send(method or ("POST" if raw else "GET"), target, raw, headers)
        return await client.rest(await client.head())


async def eventually(true: Callable[[], bool], within_s: float = WAIT_S) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.002)
