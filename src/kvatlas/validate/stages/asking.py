"""Requests that a stage sends, and their answers: the fixed set one by one, and loads."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvatlas.errors import EngineError, KvatlasError
from kvatlas.report.latency import Report
from kvatlas.service.http import Headers
from kvatlas.service.http_client import HttpClient, HttpError, Lease, origin_of
from kvatlas.service.load import EXPECTED_HEADER, WORKER_HEADER, LoadPlan, run_load
from kvatlas.service.load_answer import Answer, cached_tokens, header_tokens, tokens
from kvatlas.validate.stages.facts import Reply, RequestSet
from kvatlas.validate.stages.stagefile import Requests
from kvatlas.validate.stages.values import Missing, excerpt
from kvatlas.workload.trace import TraceRequest, tokens_of

_PREFILLED_HEADER = "x-kvatlas-prefilled-by"
_FALLBACK_HEADER = "x-kvatlas-fallback"
_BLOCK_TOKENS = 128  # of the ids that prompts are made of
_ID_BITS = 62


class Prompts:
    """The fixed request set: prompts without a common beginning, by seed."""

    def __init__(self, wanted: Requests) -> None:
        self.wanted = wanted
        self._requests = [self._request(i, wanted.seed) for i in range(wanted.count)]

    def __len__(self) -> int:
        return len(self._requests)

    def _request(self, index: int, seed: int) -> TraceRequest:
        wanted = self.wanted
        blocks = -(-wanted.prompt_tokens // _BLOCK_TOKENS)
        label = hashlib.sha256(b"kvatlas.stage\0%d\0%d" % (seed, index)).digest()
        first = int.from_bytes(label[:8], "little") >> 2
        return TraceRequest(
            index,
            0.0,
            wanted.prompt_tokens,
            wanted.output_tokens,
            tuple((first + n) % (1 << _ID_BITS) for n in range(blocks)),
        )

    def tokens(self, index: int) -> list[int]:
        """One prompt as token ids."""
        raw = tokens_of(
            self._requests[index], block_tokens=_BLOCK_TOKENS, vocab_size=self.wanted.vocab_size
        )
        return memoryview(raw).cast("I").tolist()

    def described(self) -> RequestSet:
        """Its digest and sizes."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(msgspec.json.encode([self.tokens(index), self.wanted.output_tokens]))
        return RequestSet(
            digest.hexdigest(),
            len(self),
            self.wanted.prompt_tokens,
            self.wanted.output_tokens,
            self.wanted.vocab_size,
        )

    def fresh(self, count: int) -> list[TraceRequest]:
        """Others of the same size that nobody has ever seen."""
        seed = secrets.randbits(_ID_BITS)
        return [self._request(index, seed) for index in range(count)]


class _Kept:
    """A `Sink` that times an answer and keeps its bytes."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.body = b""

    def on_head(self, status: int, headers: Headers, lease: Lease) -> None:
        self._answer.on_head(status, headers, lease)

    def on_data(self, data: bytes) -> None:
        self.body += data
        self._answer.on_data(data)


class Asker:
    """Sends prompts of the set to a URL, one after the other. Each run has salts of its own, so
    that nothing that an earlier one left in a cache is found. ``label`` begins all request ids."""

    def __init__(self, client: HttpClient, prompts: Prompts, model: str, label: str = "") -> None:
        self._client = client
        self.prompts = prompts
        self.model = model
        self.label = label or f"stage-{secrets.token_hex(4)}"
        self.sent = 0  # prompts, so far

    def salt(self, name: str) -> str:
        """Of this run alone: under it nobody has asked anything before."""
        return f"{self.label}-{name}"

    async def ask(self, url: str, indices: Iterable[int], salt: str) -> tuple[Reply, ...]:
        """The prompts ``indices`` under one cache salt, in order."""
        return tuple([await self._one(url, i, self.prompts.tokens(i), salt) for i in indices])

    async def ask_long(self, url: str, tokens: int) -> Reply:
        """One prompt of that many tokens that is not of the set."""
        long = Prompts(msgspec.structs.replace(self.prompts.wanted, count=1, prompt_tokens=tokens))
        return await self._one(url, 0, long.tokens(0), "long")

    async def _one(self, url: str, index: int, tokens: list[int], salt: str) -> Reply:
        self.sent += 1
        name = f"{self.label}-{self.sent}"
        wanted = self.prompts.wanted
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": wanted.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_salt": self.salt(salt),
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = [(b"content-type", b"application/json"), (b"x-request-id", name.encode())]
        origin = origin_of(url)
        answer = Answer(time.monotonic)
        kept, began = _Kept(answer), time.monotonic()
        try:
            async with asyncio.timeout(wanted.timeout_s):
                await self._client.exchange(
                    "POST",
                    origin,
                    "/v1/completions",
                    headers,
                    body=msgspec.json.encode(body),
                    sink=kept,
                )
        except TimeoutError:
            error = f"no answer within {wanted.timeout_s:g} s"
            return Reply(index, 0, "", name, seconds=time.monotonic() - began, error=error)
        except HttpError as problem:
            seconds = time.monotonic() - began
            return Reply(index, 0, "", name, seconds=seconds, error=excerpt(str(problem)))
        answer.finish()
        return _reply(index, name, answer, kept.body, began)


def _reply(index: int, name: str, answer: Answer, body: bytes, began: float) -> Reply:
    whole = answer.status == 200 and answer.done and not answer.error
    return Reply(
        index,
        200 if whole else answer.status if answer.status != 200 else 0,
        words_of(body) if whole else "",
        name,
        prompt_tokens=tokens(answer.usage.get("prompt_tokens")) or 0,
        cached_tokens=cached_tokens(answer.usage),
        seconds=time.monotonic() - began,
        ttft_s=answer.times[0] - began if answer.times else None,
        worker=answer.headers.get(WORKER_HEADER, ""),
        prefilled_by=answer.headers.get(_PREFILLED_HEADER, ""),
        fallback=answer.headers.get(_FALLBACK_HEADER, ""),
        expected_tokens=header_tokens(answer.headers.get(EXPECTED_HEADER, "")),
        error="" if whole else excerpt(answer.error or body.decode("utf-8", "replace")),
    )


def words_of(body: bytes) -> str:
    """What a stream of completions says: token ids where it tells them, else the text."""
    ids: list[str] = []
    texts: list[str] = []
    for event in body.split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        try:
            value = msgspec.json.decode(event[6:])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""
        for choice in value.get("choices") or () if isinstance(value, dict) else ():
            texts.append(str(choice.get("text") or ""))
            ids += [str(i) for i in choice.get("token_ids") or ()]
    return " ".join(ids) or "".join(texts)


async def load_of(
    prompts: Prompts, url: str, model: str, requests: Sequence[TraceRequest]
) -> Report | Missing:
    """As many at once as the set's concurrency says: the next leaves when one is answered."""
    wanted = prompts.wanted
    requests = [
        msgspec.structs.replace(
            request,
            session=f"lane-{index % wanted.concurrency}",
            think_s=0.0 if index >= wanted.concurrency else None,
        )
        for index, request in enumerate(requests)
    ]
    plan = LoadPlan(
        url,
        model,
        time_scale=0.0,
        max_output_tokens=wanted.output_tokens,
        max_in_flight=wanted.concurrency,
        closed_loop=True,
        timeout_s=wanted.timeout_s,
        block_tokens=_BLOCK_TOKENS,
        vocab_size=wanted.vocab_size,
    )
    try:
        return (await run_load(plan, requests)).latency
    except KvatlasError as error:
        return Missing(f"the load could not be sent: {error}")


@asynccontextmanager
async def sampled(
    look: Callable[[], Awaitable[Any]], every_s: float = 0.5
) -> AsyncIterator[list[Any]]:
    """What ``look`` sees while something runs, at the beginning and at the end too. What raises
    EngineError is kept as `Missing`."""
    seen: list[Any] = []

    async def once() -> None:
        try:
            seen.append(await look())
        except EngineError as error:
            seen.append(Missing(str(error)))

    async def watch() -> None:
        while True:
            await once()
            await asyncio.sleep(every_s)

    task = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await once()
