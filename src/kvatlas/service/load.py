"""Open-loop replay of a trace against an OpenAI-compatible URL, and what came of it.

Open loop: a request leaves when the trace says so, whether or not earlier ones were answered.
Latency counts from that moment; so where the client's own limit on requests in flight holds one
back, the wait is in its figures and is also reported on its own (``start_lag_s``).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

import msgspec

from kvatlas.errors import ConfigError, EngineError
from kvatlas.report.latency import Report, Slo, Summary, Timing, report, summarise
from kvatlas.service.http_client import (
    ConnectError,
    HttpClient,
    Origin,
    ResponseError,
    SilenceError,
    origin_of,
)
from kvatlas.service.load_answer import Answer
from kvatlas.workload.trace import VOCAB_SIZE, TraceRequest, tokens_of

EXPECTED_HEADER = "x-kvatlas-expected-hit-tokens"
WORKER_HEADER = "x-kvatlas-worker"
_HEADERS = [(b"content-type", b"application/json")]


class LoadPlan(msgspec.Struct, frozen=True):
    """How to replay. ``time_scale`` multiplies the trace's times: 0.1 is ten times faster."""

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

    def fault(self, kind: str, text: str) -> None:
        self.errors[kind] += 1
        self.examples.setdefault(kind, text[:300])

    def answered(self, timing: Timing, answer: Answer) -> None:
        self.timings.append(timing)
        prompt = answer.usage.get("prompt_tokens")
        self.prompt_tokens += prompt if isinstance(prompt, int) else 0
        expected = answer.headers.get(EXPECTED_HEADER, "")
        if expected.isdecimal():
            self.expected[0] += int(expected)
            self.expected[1] += 1
        details = answer.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if isinstance(cached, int):
            self.reported[0] += cached
            self.reported[1] += 1
        worker = answer.headers.get(WORKER_HEADER)
        if worker is not None:
            self.workers[worker] += 1

    def hits(self) -> Hits:
        return Hits(self.prompt_tokens, *self.expected, *self.reported)


async def run_load(
    plan: LoadPlan,
    requests: Iterable[TraceRequest],
    *,
    on_done: Callable[[], None] = lambda: None,
) -> LoadResult:
    """Replays ``requests`` (read lazily, in order of arrival); ``on_done`` after each of them.

    Raises ConfigError for a plan that cannot work and EngineError when the target does not answer
    at all. What goes wrong with single requests is counted, never raised.
    """
    check(plan)
    try:
        origin = origin_of(plan.target)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    client = HttpClient(idle_timeout_s=plan.timeout_s, idle_max=plan.max_in_flight)
    tally = _Tally()
    loop = asyncio.get_running_loop()
    try:
        model = plan.model or await first_model(client, plan.target)
        plan = msgspec.structs.replace(plan, model=model)
        slots = asyncio.Semaphore(plan.max_in_flight)
        sender = _Sender(client, origin, plan, tally)
        start = loop.time()
        async with asyncio.TaskGroup() as group:
            for request in requests:
                due = start + request.arrival_s * plan.time_scale
                await asyncio.sleep(max(0.0, due - loop.time()))
                await slots.acquire()
                task = group.create_task(sender.send(request, due))
                task.add_done_callback(lambda _: slots.release())
                task.add_done_callback(lambda _: on_done())
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


async def first_model(client: HttpClient, target: str) -> str:
    """The first model that the target lists. Raises EngineError when it lists none."""
    answer = await client.request("GET", target.rstrip("/") + "/v1/models")
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
    """What every request of one replay shares."""

    def __init__(self, client: HttpClient, origin: Origin, plan: LoadPlan, tally: _Tally) -> None:
        self._client = client
        self._origin = origin
        self._plan = plan
        self._tally = tally

    async def send(self, request: TraceRequest, due: float) -> None:
        """``due``: when it should leave, on the event loop's clock."""
        loop = asyncio.get_running_loop()
        tally, number = self._tally, f"request {request.index}"
        body = _body(self._plan, request)
        tally.lags.append(max(0.0, loop.time() - due))
        answer = Answer(loop.time)
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                await self._client.exchange(
                    "POST", self._origin, "/v1/completions", _HEADERS, body=body, sink=answer
                )
        except (TimeoutError, SilenceError):
            tally.fault("timeout", f"{number}: no answer in {self._plan.timeout_s:g} s")
        except ConnectError as error:
            tally.fault("no connection", f"{number}: {error}")
        except ResponseError as error:
            tally.fault("broken off", f"{number}: {error}")
        else:
            answer.finish()
            _count(tally, request, answer, due, loop.time())


def _count(tally: _Tally, request: TraceRequest, answer: Answer, due: float, end: float) -> None:
    if answer.status != 200:
        tally.fault(f"http {answer.status}", f"request {request.index}: {answer.error}")
    elif answer.error:
        tally.fault("error in answer", f"request {request.index}: {answer.error}")
    elif not answer.done:
        tally.fault("broken off", f"request {request.index}: the stream ended without [DONE]")
    else:
        tally.answered(_timing(answer, due, end), answer)


def _body(plan: LoadPlan, request: TraceRequest) -> bytes:
    tokens = tokens_of(request, block_tokens=plan.block_tokens, vocab_size=plan.vocab_size)
    body: dict[str, object] = {
        "model": plan.model,
        "prompt": memoryview(tokens).cast("I").tolist(),
        "max_tokens": max(1, min(request.output_tokens, plan.max_output_tokens)),
        "temperature": 0,
        "ignore_eos": True,
    }
    if plan.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body)


def _timing(answer: Answer, due: float, end: float) -> Timing:
    made = answer.usage.get("completion_tokens")
    times = answer.times
    output_tokens = made if isinstance(made, int) else len(times)
    if not times:
        return Timing(None, end - due, output_tokens)
    gaps = tuple(later - earlier for earlier, later in pairwise(times))
    return Timing(times[0] - due, times[-1] - due, output_tokens, gaps)
