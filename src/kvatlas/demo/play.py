"""Plays chats against an OpenAI-compatible URL and measures what their users would feel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from kvatlas.errors import EngineError
from kvatlas.service.http import Headers
from kvatlas.service.http_client import HttpClient, Lease, origin_of
from kvatlas.workload.chats import Chat

ANSWER_BYTES_MAX = 16 << 20
DEADLINE_S = 120.0  # for one answer, at the usual pace

_HEADERS: Headers = [(b"content-type", b"application/json")]


class Answer(msgspec.Struct, frozen=True):
    """One request as its client saw it; times in seconds from the moment it was sent.

    ``headers`` have lower-case names. Token counts are the engine's own ``usage``.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    e2e_s: float
    headers: dict[str, str]


async def play(
    url: str,
    model: str,
    chats: Sequence[Chat],
    *,
    output_tokens: int,
    pace: float = 1.0,
    tick: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """All answers, in order of completion. ``pace`` multiplies every pause of the chats, and how
    long an answer may take.

    Every turn carries the whole conversation, as OpenAI clients do. Raises EngineError at the
    first request that fails; the others are then given up.
    """
    client = HttpClient()
    answers: list[Answer] = []

    async def one(chat: Chat) -> None:
        await asyncio.sleep(chat.start_s * pace)
        messages = [{"role": "system", "content": chat.system}]
        for turn in chat.turns:
            await asyncio.sleep(turn.think_s * pace)
            messages.append({"role": "user", "content": turn.text})
            answer = await ask(
                client,
                url,
                model,
                messages,
                output_tokens=output_tokens,
                deadline_s=DEADLINE_S * pace,
            )
            messages.append({"role": "assistant", "content": answer.text})
            answers.append(answer)
            tick()

    try:
        async with asyncio.TaskGroup() as group:
            for chat in chats:
                group.create_task(one(chat))
    except* EngineError as failed:
        raise _first(failed) from None
    finally:
        await client.close()
    return answers


async def ask(
    client: HttpClient,
    url: str,
    model: str,
    messages: Sequence[dict[str, str]],
    *,
    output_tokens: int,
    deadline_s: float = DEADLINE_S,
) -> Answer:
    """One streamed, greedy chat completion. Raises EngineError for anything but a whole answer."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    loop = asyncio.get_running_loop()
    stream = _Stream(loop.time)
    sent_s = loop.time()
    try:
        async with asyncio.timeout(deadline_s):
            await client.exchange(
                "POST",
                origin_of(url),
                "/v1/chat/completions",
                _HEADERS,
                body=msgspec.json.encode(body),
                sink=stream,
            )
    except TimeoutError:
        raise EngineError(f"{url}: no whole answer within {deadline_s:.0f} s") from None
    return stream.finish(url, sent_s, loop.time())


def _first(group: BaseExceptionGroup[EngineError]) -> EngineError:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, EngineError)
    return found


class _Stream:
    """Reads server-sent events; the first one with text sets the time to the first token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._status = 0
        self._headers: dict[str, str] = {}
        self._raw = bytearray()
        self._read = 0  # bytes of _raw whose events were read
        self._text: list[str] = []
        self._first_s = 0.0
        self._usage: _Usage | None = None

    def on_head(self, status: int, headers: Headers, lease: Lease) -> None:
        self._status = status
        self._headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in headers}

    def on_data(self, data: bytes) -> None:
        self._raw += data
        if len(self._raw) > ANSWER_BYTES_MAX:
            raise EngineError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        while (end := self._raw.find(b"\n\n", self._read)) >= 0:
            line = bytes(self._raw[self._read : end])
            self._read = end + 2
            if line.startswith(b"data: {"):
                self._event(line[6:])

    def finish(self, url: str, sent_s: float, now_s: float) -> Answer:
        if self._status != 200 or self._usage is None:
            end = bytes(self._raw[-500:])
            raise EngineError(f"{url}: status {self._status}, no whole answer: {end!r}")
        details = self._usage.prompt_tokens_details
        return Answer(
            text="".join(self._text),
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            ttft_s=(self._first_s or now_s) - sent_s,
            e2e_s=now_s - sent_s,
            headers=self._headers,
        )

    def _event(self, data: bytes) -> None:
        try:
            event = msgspec.json.decode(data, type=_Event)
        except msgspec.MsgspecError as error:
            raise EngineError(f"a stream event cannot be read ({error}): {data[:200]!r}") from error
        self._usage = event.usage or self._usage
        for choice in event.choices:
            if choice.delta.content:
                self._first_s = self._first_s or self._clock()
                self._text.append(choice.delta.content)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
