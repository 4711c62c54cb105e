"""Where observed requests come from: a pass-through's copies, a proxy's mirror, a router's log.

`Observer` puts together what all of them need. Behind a pass-through it runs in a process of its
own, started by `beside`: whatever happens there, the path is not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import uvloop

from kvatlas import __version__
from kvatlas.config import Config, TokenizerConfig
from kvatlas.errors import KvatlasError
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.observe_copies import Frames
from kvatlas.service.observe_exchanges import Exchange, Watcher
from kvatlas.service.observe_live import Live
from kvatlas.service.observe_record import FORMAT, MAX_BYTES, About, Mode, Recording
from kvatlas.service.observe_shadow import Case, Ended, Seen, Shadow
from kvatlas.service.relay import CLIENT_CLOSED
from kvatlas.service.tokens import Tokenizer
from kvatlas.workload.trace_tokens import Hashed

TTFT = "from the last byte of the request to the first byte of a streamed answer's body"
_READY = b"+"
_READ_BYTES = 1 << 18
_NICENESS = 10
_FAILED = 500
_BROKEN = "an error, or no answer, in a stream"
_SETTLE_S = 10.0


class Settings(msgspec.Struct, frozen=True):
    """What is recorded where. ``config``: engines to listen to, None for none. ``served_by``: the
    answer's header that names the engine, "" for none. ``secret`` keys the hashes; "" a fresh one
    that nobody keeps. ``started_s``: when the recording began, on `time.monotonic`."""

    record: str
    mode: Mode
    block_tokens: int = 64
    tokenizer: str = ""
    config: Config | None = None
    served_by: str = ""
    secret: bytes = b""
    max_bytes: int = MAX_BYTES
    started_s: float = 0.0
    ttft: str = ""


class Summary(msgspec.Struct, frozen=True):
    """What became of it."""

    rows: int
    lost: dict[str, int]
    error: str = ""


class Observer:
    """A recording, and the shadow that writes it; for ``async with``."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError for files, tokenizers and engines that cannot be used."""
        config = settings.config
        tokens = config.tokenizer if config is not None else TokenizerConfig()
        if settings.tokenizer:
            tokens = msgspec.structs.replace(tokens, path=settings.tokenizer)
        self.settings = settings
        self.live: Live | None = None
        if config is not None:
            self.live = Live(msgspec.structs.replace(config, tokenizer=tokens))
            tokenizer = self.live.assembly.tokenizer
            assert tokenizer is not None
        else:
            tokenizer = Tokenizer.load(tokens)
        self._tokenizer = tokenizer
        now = datetime.datetime.now(datetime.UTC)
        about = About(
            format=FORMAT,
            version=__version__,
            mode=settings.mode,
            started=now.isoformat(timespec="seconds"),
            block_tokens=settings.block_tokens,
            ttft=settings.ttft,
            engines=self.live.engines if self.live is not None else (),
        )
        self.recording = Recording(Path(settings.record), about, settings.max_bytes)
        hashed = Hashed(settings.block_tokens, settings.secret or secrets.token_bytes(32))
        self.shadow = Shadow(
            self.recording, tokenizer, hashed, settings.block_tokens, live=self.live
        )

    async def __aenter__(self) -> Observer:
        if self.live is not None:
            await self.live.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shadow.close()
        if self.live is not None:
            await self.live.close()
        else:
            await self._tokenizer.close()
        self.recording.close()

    def summary(self) -> Summary:
        """So far."""
        lost = {reason: count for reason, count in self.shadow.lost.items() if count}
        return Summary(self.recording.rows, lost, self.recording.error)


# Behind a pass-through -------------------------------------------------------------------------


class Exchanges:
    """A `Listener`: each exchange becomes a case of the shadow's."""

    def __init__(self, shadow: Shadow, settings: Settings) -> None:
        self._shadow = shadow
        self._header = settings.served_by.lower()
        self._started_s = settings.started_s

    def asked(self, exchange: Exchange) -> None:
        arrival_s = max(0.0, exchange.asked_s - self._started_s)
        seen = Seen(
            exchange.method,
            exchange.path,
            exchange.headers,
            exchange.body,
            arrival_s,
            late_s=max(0.0, time.monotonic() - exchange.asked_s),
        )
        exchange.state = self._shadow.begin(seen)

    def answering(self, exchange: Exchange) -> None:
        case = exchange.state
        if isinstance(case, Case) and exchange.status == 200 and exchange.streamed:
            engine = exchange.told.get(self._header, "")
            self._shadow.first(case, engine, exchange.first_s - exchange.asked_s)

    def over(self, exchange: Exchange) -> None:
        case = exchange.state
        if not isinstance(case, Case):
            return
        engine = exchange.told.get(self._header, "")
        first_s = exchange.answer.first_token_s(exchange.first_s)
        ended = Ended(
            # It left, or was broken off, before an answer; or the answer is none.
            status=_FAILED if exchange.failed else exchange.status or CLIENT_CLOSED,
            fault=_BROKEN if exchange.failed else "",
            whole=exchange.whole,
            ttft_s=first_s - exchange.asked_s if first_s >= 0 else -1.0,
            e2e_s=exchange.ended_s - exchange.asked_s,
            usage=exchange.usage,
            output_tokens=exchange.events,
            engine=engine,
            told="answer" if engine else "",
        )
        self._shadow.end(case, ended)


async def watch(
    reader: asyncio.StreamReader, settings: Settings, ready: Callable[[Observer], None]
) -> Summary:
    """Reads copies to their end; ``ready`` is called before the first."""
    async with Observer(settings) as observer:
        ready(observer)
        watcher = Watcher(Exchanges(observer.shadow, settings))
        watcher.lost = observer.shadow.lost
        frames = Frames()
        while data := await reader.read(_READ_BYTES):
            for piece in frames.feed(data):
                watcher.take(piece)
        watcher.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                await observer.shadow.settle()
    return observer.summary()


class Beside:
    """The process that looks at the copies, as the carrier knows it."""

    def __init__(self, process: BaseProcess, result: socket.socket) -> None:
        self._process = process
        self._result = result
        result.setblocking(False)

    async def ready(self, timeout_s: float) -> bool:
        """Whether it records from now on; else it broke down, or takes longer than that."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().sock_recv(self._result, 1) == _READY
        return False

    async def end(self) -> None:
        """At once: it records nothing yet, or cannot."""
        self._process.kill()
        await self.ended(0.0)

    async def ended(self, timeout_s: float) -> Summary | None:
        """What it made of the copies, once their end was sent; None where it broke down."""
        loop = asyncio.get_running_loop()
        parts: list[bytes] = []
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                while data := await loop.sock_recv(self._result, _READ_BYTES):
                    parts.append(data)
        self._result.close()
        await asyncio.to_thread(self._process.join, 1.0)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        try:
            return msgspec.json.decode(b"".join(parts), type=Summary)
        except msgspec.MsgspecError:
            return None


def beside(settings: Settings) -> tuple[Beside, socket.socket]:
    """Starts that process; the socket is for the copies. Where it cannot work it says so on stderr
    and leaves, and the socket breaks."""
    ours, theirs = socket.socketpair()
    result, telling = socket.socketpair()
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=_main, args=(theirs, telling, settings), name="kvatlas observe", daemon=True
    )
    # It inherits what is blocked: a Ctrl-C waits there until `_main` ignores it, here until then.
    resource_tracker.ensure_running()  # else its start would unblock it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    theirs.close()
    telling.close()
    return Beside(process, result), ours


def _main(copies: socket.socket, telling: socket.socket, settings: Settings) -> None:
    """Ends with the copies: signals are the carrier's business."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)

    async def run() -> Summary:
        reader, writer = await asyncio.open_connection(sock=copies, limit=1 << 22)
        try:
            return await watch(reader, settings, lambda _: telling.sendall(_READY))
        finally:
            writer.close()

    try:
        summary = uvloop.run(run())
    except KvatlasError as error:
        print(f"kvatlas observe: nothing is recorded: {error}", file=sys.stderr)
        sys.exit(1)
    with telling:
        telling.sendall(json.dumps(msgspec.to_builtins(summary)).encode())


# Mirrored requests -----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def mirrored(observer: Observer, host: str, port: int) -> AsyncIterator[HttpServer]:
    """Takes copies that a proxy sends of its requests, and answers each with 200 at once. Such a
    proxy sends no answers: nothing is known of times and of usage. Raises OSError as `start`."""

    async def handle(request: Request, reply: Reply) -> None:
        reply.send(200, [])
        headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in request.headers}
        arrival_s = max(0.0, time.monotonic() - observer.settings.started_s)
        seen = Seen(request.method, request.path, headers, request.body, arrival_s)
        case = observer.shadow.begin(seen)
        if case is not None:
            observer.shadow.end(case, Ended(status=0))

    server = HttpServer(handle)
    await server.start(host, port)
    try:
        yield server
    finally:
        await server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                await observer.shadow.settle()
