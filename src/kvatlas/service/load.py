"""Replay of a trace against an OpenAI-compatible URL, and what came of it.

Open loop: a request leaves when the trace says so, whether or not earlier ones were answered.
Closed loop: a session's next turn leaves its think time after the answer before it. Latency counts
from that moment; so where the client's own limit on requests in flight holds one back, the wait is
in its figures and is also reported on its own (``start_lag_s``).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from kvatlas.errors import ConfigError, EngineError
from kvatlas.report.latency import Report, Slo, Summary, Timing, report, summarise
from kvatlas.report.text import one_line
from kvatlas.service.http import Headers
from kvatlas.service.http_client import (
    ConnectError,
    HttpClient,
    Origin,
    ResponseError,
    SilenceError,
    origin_of,
)
from kvatlas.service.load_answer import Answer, cached_tokens, header_tokens, tokens
from kvatlas.workload.trace import VOCAB_SIZE, TraceRequest, tokens_of

EXPECTED_HEADER = "x-kvatlas-expected-hit-tokens"
WORKER_HEADER = "x-kvatlas-worker"
CONNECT_S = 30.0  # as patient as users' clients: a full backlog takes SYNs up seconds later
CLOSED_LOOP_MAX = 10_000  # requests of a closed loop: all of them wait at once
_HEADERS = [(b"content-type", b"application/json")]


class LoadPlan(msgspec.Struct, frozen=True):
    """How to replay. ``time_scale`` multiplies the trace's times: 0.1 is ten times faster.

    ``ignore_eos`` asks for answers as long as the trace's: vLLM's and SGLang's own word, which
    other servers may refuse.
    """

    target: str
    model: str = ""  # "" asks the target for its first one
    time_scale: float = 1.0
    max_output_tokens: int = 32
    max_in_flight: int = 1024
    stream: bool = True
    slo: Slo = Slo()
    timeout_s: float = 600.0
    block_tokens: int = 512
    vocab_size: int = VOCAB_SIZE
    closed_loop: bool = False
    ignore_eos: bool = True


class Prompt(msgspec.Struct, frozen=True):
    """What one request asks: where, and the members of its body that hold the prompt."""

    path: str
    members: dict[str, object]


class Record(msgspec.Struct, frozen=True):
    """One request of a replay. ``due_s``: when it should leave, from the replay's start; it left
    ``lag_s`` later. Without an answer ``timing`` is None and ``error`` names the kind of failure.
    What nobody told is None."""

    index: int
    session: str
    due_s: float
    lag_s: float
    timing: Timing | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    expected_tokens: int | None = None
    worker: str | None = None
    error: str = ""
    detail: str = ""


class Hits(msgspec.Struct, frozen=True):
    """Prompt tokens that were not computed again: as the gateway expected them from its directory
    and as the engines reported them. Each sum comes with the number of answers that told it."""

    prompt_tokens: int
    expected_tokens: int
    expected_answers: int
    reported_tokens: int
    reported_answers: int


class LoadResult(msgspec.Struct, frozen=True):
    """The outcome of one replay."""

    plan: LoadPlan
    latency: Report
    start_lag_s: Summary
    hits: Hits
    errors: dict[str, int]  # by kind
    error_examples: dict[str, str]  # the first text of each kind
    workers: dict[str, int]  # answers by the worker that the gateway named


class _Tally:
    """What a running replay has counted so far."""

    def __init__(self) -> None:
        self.timings: list[Timing] = []
        self.lags: list[float] = []
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.workers: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.expected = [0, 0]
        self.reported = [0, 0]

    def add(self, record: Record) -> None:
        self.lags.append(record.lag_s)
        if record.timing is None:
            self.errors[record.error] += 1
            self.examples.setdefault(record.error, record.detail)
            return
        self.timings.append(record.timing)
        self.prompt_tokens += record.prompt_tokens or 0
        for sums, told in (
            (self.expected, record.expected_tokens),
            (self.reported, record.cached_tokens),
        ):
            if told is not None:
                sums[0] += told
                sums[1] += 1
        if record.worker is not None:
            self.workers[record.worker] += 1

    def hits(self) -> Hits:
        return Hits(self.prompt_tokens, *self.expected, *self.reported)


async def run_load(
    plan: LoadPlan,
    requests: Iterable[TraceRequest],
    *,
    prompt_of: Callable[[TraceRequest], Prompt] | None = None,
    headers: Headers | None = None,
    on_done: Callable[[], None] = lambda: None,
    on_record: Callable[[Record], None] = lambda record: None,
) -> LoadResult:
    """Replays ``requests`` (read lazily, in order of arrival); ``on_done`` after each of them,
    ``on_record`` with what came of it.

    ``prompt_of``: what a request asks; the trace's token ids, unless something else is given.
    ``headers``: sent with every request, beside those of JSON.

    Raises ConfigError for a plan that cannot work and EngineError when the target does not answer
    at all. What goes wrong with single requests is counted, never raised.
    """
    check(plan)
    try:
        origin = origin_of(plan.target)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    client = HttpClient(
        connect_timeout_s=min(plan.timeout_s, CONNECT_S),
        idle_timeout_s=plan.timeout_s,
        idle_max=plan.max_in_flight,
    )
    tally = _Tally()

    def ended(record: Record) -> None:
        tally.add(record)
        on_record(record)
        on_done()

    loop = asyncio.get_running_loop()
    try:
        model = plan.model or await first_model(client, plan.target, headers)
        plan = msgspec.structs.replace(plan, model=model)
        start = loop.time()
        every = [*_HEADERS, *(headers or [])]
        sender = _Sender(
            client, origin, plan, prompt_of or _ids_of(plan), headers=every, start=start
        )
        replay = _closed_loop if plan.closed_loop else _open_loop
        await replay(plan, sender, requests, ended)
        duration_s = loop.time() - start
    finally:
        await client.close()
    return LoadResult(
        plan=plan,
        latency=report(
            tally.timings, failed=tally.errors.total(), duration_s=duration_s, slo=plan.slo
        ),
        start_lag_s=summarise(tally.lags),
        hits=tally.hits(),
        errors=dict(tally.errors.most_common()),
        error_examples=tally.examples,
        workers=dict(sorted(tally.workers.items())),
    )


async def _open_loop(
    plan: LoadPlan,
    sender: _Sender,
    requests: Iterable[TraceRequest],
    ended: Callable[[Record], None],
) -> None:
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(plan.max_in_flight)

    async def one(request: TraceRequest, due: float) -> None:
        try:
            ended(await sender.send(request, due))
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        for request in requests:
            due = sender.start + request.arrival_s * plan.time_scale
            await asyncio.sleep(max(0.0, due - loop.time()))
            await slots.acquire()
            group.create_task(one(request, due))


async def _closed_loop(
    plan: LoadPlan,
    sender: _Sender,
    requests: Iterable[TraceRequest],
    ended: Callable[[Record], None],
) -> None:
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(plan.max_in_flight)

    async def one(request: TraceRequest, before: asyncio.Task[None] | None) -> None:
        due = sender.start + request.arrival_s * plan.time_scale
        if before is not None:
            await asyncio.wait([before])
            due = loop.time() + (request.think_s or 0.0) * plan.time_scale
        await asyncio.sleep(max(0.0, due - loop.time()))
        async with slots:
            ended(await sender.send(request, due))

    chosen = list(itertools.islice(requests, CLOSED_LOOP_MAX + 1))
    if len(chosen) > CLOSED_LOOP_MAX:
        raise ConfigError(f"a closed loop of more than {CLOSED_LOOP_MAX} requests: give fewer")
    latest: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        for request in chosen:
            before = latest.get(request.session) if request.think_s is not None else None
            task = group.create_task(one(request, before))
            if request.session:
                latest[request.session] = task


def check(plan: LoadPlan) -> None:
    """Raises ConfigError for a plan that cannot work, before anything is read or sent."""
    if not 0 <= plan.time_scale < math.inf:
        raise ConfigError(f"time scale {plan.time_scale:g}: 0 (all at once) or more is needed")
    if not 0 < plan.timeout_s < math.inf:
        raise ConfigError(f"timeout {plan.timeout_s:g} s: more than 0 is needed")
    for name, limit_s in (("TTFT", plan.slo.ttft_s), ("TPOT", plan.slo.tpot_s)):
        if limit_s is not None and not 0 < limit_s < math.inf:
            raise ConfigError(f"SLO of {limit_s:g} s on {name}: more than 0 is needed")
    if plan.block_tokens < 1:
        raise ConfigError(f"{plan.block_tokens} tokens per hash id: at least 1 is needed")
    if plan.vocab_size < 2:
        raise ConfigError(f"vocabulary of {plan.vocab_size}: at least 2 ids are needed")
    if plan.max_output_tokens < 1:
        raise ConfigError(f"max output {plan.max_output_tokens}: at least 1 token is needed")
    if plan.max_in_flight < 1:
        raise ConfigError(f"{plan.max_in_flight} requests in flight: at least 1 is needed")
    if not plan.stream and (plan.slo.ttft_s is not None or plan.slo.tpot_s is not None):
        raise ConfigError("an SLO on TTFT or TPOT needs streaming: nobody sees the first token")


async def first_model(client: HttpClient, target: str, headers: Headers | None = None) -> str:
    """The first model that the target lists. Raises EngineError when it lists none."""
    url = target.rstrip("/") + "/v1/models"
    answer = await client.request("GET", url, headers=headers)
    try:
        return msgspec.json.decode(answer.body, type=_Models).data[0].id
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
        raise EngineError(
            f"GET {target}/v1/models answered {answer.status} and no model: give --model"
        ) from error


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Sender:
    """What every request of one replay shares. ``start``: when it began, on the loop's clock."""

    def __init__(
        self,
        client: HttpClient,
        origin: Origin,
        plan: LoadPlan,
        prompt_of: Callable[[TraceRequest], Prompt],
        *,
        headers: Headers,
        start: float,
    ) -> None:
        self._client = client
        self._origin = origin
        self._plan = plan
        self._prompt_of = prompt_of
        self._headers = headers
        self.start = start

    async def send(self, request: TraceRequest, due: float) -> Record:
        """``due``: when it should leave, on the event loop's clock."""
        loop = asyncio.get_running_loop()
        prompt = self._prompt_of(request)
        body = _body(self._plan, request, prompt)
        lag_s = max(0.0, loop.time() - due)
        answer = Answer(loop.time)
        error = detail = ""
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                await self._client.exchange(
                    "POST", self._origin, prompt.path, self._headers, body=body, sink=answer
                )
        except (TimeoutError, SilenceError):
            what = "no end of its answer" if answer.status else "no answer"
            error, detail = "timeout", f"{what} in {self._plan.timeout_s:g} s"
        except ConnectError as fault:
            error, detail = "no connection", str(fault)
        except ResponseError as fault:
            error, detail = "broken off", str(fault)
        else:
            answer.finish()
            error, detail = _fault(answer)
        record = Record(request.index, request.session, due - self.start, lag_s)
        if error:
            detail = one_line(f"request {request.index}: {detail}")[:300]
            return msgspec.structs.replace(record, error=error, detail=detail)
        return _answered(record, answer, _timing(answer, due, loop.time()))


def _fault(answer: Answer) -> tuple[str, str]:
    """The kind of failure and its text; "" where the answer is whole."""
    if answer.status != 200:
        return f"http {answer.status}", answer.error
    if answer.error:
        return "error in answer", answer.error
    if not answer.done:
        return "broken off", "the stream ended without [DONE]"
    return "", ""


def _answered(record: Record, answer: Answer, timing: Timing) -> Record:
    worker = answer.headers.get(WORKER_HEADER)
    return msgspec.structs.replace(
        record,
        timing=timing,
        prompt_tokens=tokens(answer.usage.get("prompt_tokens")),
        cached_tokens=cached_tokens(answer.usage),
        expected_tokens=header_tokens(answer.headers.get(EXPECTED_HEADER, "")),
        worker=one_line(worker) if worker is not None else None,
    )


def _ids_of(plan: LoadPlan) -> Callable[[TraceRequest], Prompt]:
    """Requests that ask the trace's own token ids."""

    def prompt(request: TraceRequest) -> Prompt:
        ids = tokens_of(request, block_tokens=plan.block_tokens, vocab_size=plan.vocab_size)
        return Prompt("/v1/completions", {"prompt": memoryview(ids).cast("I").tolist()})

    return prompt


def _body(plan: LoadPlan, request: TraceRequest, prompt: Prompt) -> bytes:
    body: dict[str, object] = {
        "model": plan.model,
        **prompt.members,
        "max_tokens": max(1, min(request.output_tokens, plan.max_output_tokens)),
        "temperature": 0,
    }
    if plan.ignore_eos:
        body["ignore_eos"] = True
    if plan.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body)


def _timing(answer: Answer, due: float, end: float) -> Timing:
    made = tokens(answer.usage.get("completion_tokens"))
    times = answer.times
    output_tokens = len(times) if made is None else made
    if not times:
        return Timing(None, end - due, output_tokens)
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(times))
    return Timing(times[0] - due, times[-1] - due, output_tokens, gaps)
