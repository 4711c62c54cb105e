"""One scenario on stub engines behind the real gateway, all over real sockets, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.config import (
    Config,
    DirectoryConfig,
    GatewayConfig,
    RouterConfig,
    WorkerConfig,
)
from kvatlas.connectors.stub import StubEngine
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.core import sequence
from kvatlas.core.dispatch import Apply, Finished, FirstToken, Question, Sent
from kvatlas.core.events import Event
from kvatlas.core.records import Publisher
from kvatlas.errors import EngineError
from kvatlas.service import recording
from kvatlas.service.assembly import Assembly
from kvatlas.service.engines import Timing
from kvatlas.service.gateway import Gateway
from kvatlas.service.http_client import HttpClient, Origin, origin_of
from kvatlas.service.load_answer import Answer
from kvatlas.sim.arrivals import Arrivals
from kvatlas.sim.prompts import prompt_tokens
from kvatlas.sim.timeline import Timeline, Timer
from kvatlas.validate.parity_loop import QuietLoop
from kvatlas.validate.parity_values import (
    NEVER_S,
    START_S,
    End,
    Request,
    Scenario,
    Side,
    directory_digest,
    text_digest,
)
from kvatlas.workload.trace import TraceRequest

MODEL = "parity"
READY_S = 30.0  # real seconds for gateway and engines to find each other
_FEED = sequence.Limits(settle_s=0.05)  # sockets of one process see each other at once
_HEADERS = [(b"content-type", b"application/json")]
_RECORDING_BYTES_MAX = 1 << 32


class Heard(Answer):
    """An answer whose bytes are kept."""

    __slots__ = ("body",)

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.body = bytearray()

    def on_data(self, data: bytes) -> None:
        self.body += data
        super().on_data(data)

    def text(self) -> str:
        """What all events of the stream say together."""
        pieces = []
        for event in bytes(self.body).split(b"\n\n"):
            if event.startswith(b"data: {"):
                choices = msgspec.json.decode(event[6:]).get("choices")
                pieces += [choice.get("text", "") for choice in choices or ()]
        return "".join(pieces)


class _Arriving(Timeline):
    """What `Arrivals` needs of a timeline, on the loop's own time."""

    def __init__(self, loop: QuietLoop) -> None:
        self._loop = loop
        super().__init__()

    @property
    def now(self) -> float:
        """Seconds on the loop's clock."""
        return self._loop.time()

    @now.setter
    def now(self, value: float) -> None:
        assert value == 0.0, "only the base class sets it, once"

    def at(self, when: float, call: Callable[..., None], *args: Any) -> Timer:
        """As `Timeline.at`, once nothing is on its way."""
        timer = Timer(self, max(when, self.now), call, args)
        self._loop.when_quiet(timer.at, self._due, timer)
        return timer

    def _due(self, timer: Timer) -> None:
        call, timer.call = timer.call, None
        if call is not None:
            call(*timer.args)


def served(scenario: Scenario) -> Side:
    """Play it. Raises ConfigError for a cluster that cannot be served, EngineError where something
    hangs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gateway.kvr"
        with asyncio.Runner(loop_factory=QuietLoop) as runner:
            run = Served(scenario, path)
            runner.run(run.play())
        return run.side(path)


class Served:
    """One run of it. What a client sends, and what the gateway is told, may be changed."""

    def __init__(self, scenario: Scenario, path: Path) -> None:
        self._scenario = scenario
        self._path = path
        self.answers: dict[str, Heard] = {}
        self._in_flight = 0
        self._ended = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._engines: dict[str, StubEngine] = {}
        self._ends: dict[str, End] = {}

    # -- the stage ------------------------------------------------------------------------------

    async def play(self) -> None:
        """Everything from the first socket to the last."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, QuietLoop)
        async with contextlib.AsyncExitStack() as stack:
            workers = [w for made in await self._start_engines(stack) for w in made]
            config = self.config(workers)
            timing = Timing(poll_s=NEVER_S, timeout_s=READY_S, describe_every_s=NEVER_S)
            assembly = Assembly(config, timing=timing, feed_limits=_FEED, clock=loop.time)
            stack.push_async_callback(assembly.close)
            await assembly.start()
            tenants = assembly.tenancy.tenants
            gateway = Gateway(config.gateway, assembly.steering, tenants=tenants)
            await gateway.start()
            stack.push_async_callback(gateway.close)
            client = HttpClient(idle_max=4096)
            stack.push_async_callback(client.close)
            stack.callback(loop.go_real)
            await self._settled(assembly)
            loop.go_virtual(START_S / 2, lambda: self._travelling(assembly))
            await self._requests(loop, client, origin_of(f"http://127.0.0.1:{gateway.port}"))
            for name, engine in self._engines.items():
                state = engine.describe()
                self._ends[name] = End(
                    engine=str(state["digest"]),
                    preemptions=int(str(state["preemptions"])),
                    holders=assembly.directory.holders_of(Publisher(name)),
                )

    def config(self, workers: list[WorkerConfig]) -> Config:
        """The gateway's."""
        cluster = self._scenario.cluster
        router, directory = cluster.router, cluster.directory
        return Config(
            worker=tuple(workers),
            gateway=GatewayConfig(port=0),
            router=RouterConfig(
                policy=router.policy,
                prefill_tokens_per_s=router.prefill_tokens_per_s,
                recording=str(self._path),
                recording_max_bytes=_RECORDING_BYTES_MAX,
            ),
            directory=DirectoryConfig(
                blocks_max=directory.blocks_max,
                blocks_per_publisher_max=directory.blocks_per_publisher_max,
            ),
        )

    async def _start_engines(
        self, stack: contextlib.AsyncExitStack
    ) -> Sequence[Sequence[WorkerConfig]]:
        found = []
        for kind in self._scenario.kinds():
            options = StubOptions(kind.layout, kind.spec, model_name=MODEL, count=len(kind.names))
            stubs = await stack.enter_async_context(StubCluster(options))
            for index, name in enumerate(kind.names):
                self._engines[name] = stubs.engine(index)
            found.append(
                [
                    WorkerConfig(
                        name=name,
                        url=address.url,
                        engine="stub",
                        layout=kind.model,
                        kv_dtype=kind.kv_dtype,
                    )
                    for name, address in zip(kind.names, stubs.addresses, strict=True)
                ]
            )
        return found

    async def _settled(self, assembly: Assembly) -> None:
        names = [Publisher(name) for name in self._engines]
        try:
            async with asyncio.timeout(READY_S):
                await self._idle(assembly, names)
                await asyncio.sleep(1.2 * _FEED.settle_s)  # then the first replay is asked for
                await self._idle(assembly, names)
        except TimeoutError:
            raise EngineError(f"the stub engines' events did not stand in {READY_S:g} s") from None

    @staticmethod
    async def _idle(assembly: Assembly, names: Sequence[Publisher]) -> None:
        while not all(map(assembly.feed.idle, names)):  # noqa: ASYNC110 - sockets tell nobody
            await asyncio.sleep(0.01)

    def _travelling(self, assembly: Assembly) -> str:
        """What was sent and has not arrived: requests, tokens, KV events."""
        held = made = 0
        for engine in self._engines.values():
            numbers = engine.numbers()
            held += numbers.running + numbers.waiting
            made += numbers.output_tokens
        if held != self._in_flight:
            return f"{self._in_flight} requests under way, {held} at engines"
        heard = sum(len(answer.times) for answer in self.answers.values())
        if heard != made:
            return f"{made} tokens made, {heard} received"
        booked = sum(assembly.steering.in_flight().values())
        if booked != held:
            return f"{held} requests at engines, {booked} in the router's books"
        for status in assembly.feed.status():
            publisher = self._engines[status.publisher.worker].publisher
            assert publisher is not None
            if status.stream.applied != publisher.next_seq:
                return (
                    f"{status.publisher}: {publisher.next_seq} batches of KV events published, "
                    f"{status.stream.applied} applied"
                )
            if not assembly.feed.idle(status.publisher):
                return f"{status.publisher}: its KV events are being applied"
        return ""

    # -- the requests ---------------------------------------------------------------------------

    async def _requests(self, loop: QuietLoop, client: HttpClient, origin: Origin) -> None:
        done = loop.create_future()
        scenario = self._scenario
        total = len(scenario.requests)

        def ask(request: TraceRequest, told: Callable[[], None]) -> None:
            task = loop.create_task(self._ask(client, origin, request))
            self._tasks.add(task)
            self._in_flight += 1

            def over(_: asyncio.Task[None]) -> None:
                self._tasks.discard(task)
                self._in_flight -= 1
                self._ended += 1
                told()
                if self._ended == total:
                    done.set_result(None)

            task.add_done_callback(over)

        arrivals = Arrivals(
            _Arriving(loop), iter(scenario.requests), ask, closed_loop=scenario.closed_loop
        )
        arrivals.start()
        for change in scenario.changes:
            loop.when_quiet(change.at_s, self._engines[change.engine].set_pace, change.pace)
        await done
        last = loop.create_future()
        loop.when_quiet(loop.time(), last.set_result, None)
        await last

    def more(self, request: TraceRequest) -> dict[str, object]:
        """Further fields of a request's body."""
        return {"cache_salt": request.scope} if request.scope else {}

    def headers(self, request: TraceRequest) -> list[tuple[bytes, bytes]]:
        """Further headers."""
        return []

    async def _ask(self, client: HttpClient, origin: Origin, request: TraceRequest) -> None:
        tokens = prompt_tokens(request, self._scenario.block_tokens)
        body: dict[str, object] = {
            "model": MODEL,
            "prompt": memoryview(tokens).cast("I").tolist(),
            "max_tokens": max(1, request.output_tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= self.more(request)
        name = str(request.index)
        answer = self.answers[name] = Heard(asyncio.get_running_loop().time)
        headers = [*_HEADERS, *self.headers(request), (b"x-request-id", name.encode())]
        data = msgspec.json.encode(body)
        try:
            await client.exchange(
                "POST", origin, "/v1/completions", headers, body=data, sink=answer
            )
        except EngineError as error:
            answer.error = str(error)
        answer.finish()

    # -- what it comes to -------------------------------------------------------------------------

    def side(self, path: Path) -> Side:
        """Out of the recording and the answers."""
        requests: dict[str, Request] = {}
        events: dict[str, list[Event]] = {name: [] for name in self._engines}
        for frame in recording.read(path)[1]:
            match frame.event:
                case Question(id):
                    assert frame.answer is not None
                    answer = self.answers[id]
                    request = Request(id, frame.answer, answer=text_digest(answer.text()))
                    request.fault = answer.error or ("" if answer.done else "broken off")
                    requests[id] = request
                case Sent(id, publisher):
                    requests[id].tried.append(publisher.worker)
                case FirstToken(id):
                    requests[id].ttft_s = frame.at - requests[id].decision.at
                case Finished(id, _, _, cached_tokens):
                    requests[id].ended_at = frame.at
                    requests[id].cached_tokens = cached_tokens
                case Apply(publisher, batch):
                    events[publisher.worker] += batch
        return Side(
            requests,
            {name: tuple(each) for name, each in events.items()},
            self._ends,
            directory_digest(self._scenario, events),
        )
