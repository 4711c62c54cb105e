"""Short, deterministic requests with a prefix that nobody has sent before, and their answers."""

from __future__ import annotations

import math
import secrets
import struct
from array import array
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from kvatlas.core.check_facts import Asked
from kvatlas.errors import EngineError
from kvatlas.service.assembly import RANK_HEADER
from kvatlas.service.chat_messages import Dialect, Unkeyable
from kvatlas.service.http import Headers
from kvatlas.service.http_client import HttpClient, Origin
from kvatlas.service.load import EXPECTED_HEADER, WORKER_HEADER
from kvatlas.service.load_answer import cached_tokens, header_tokens, tokens
from kvatlas.service.tls import Outgoing
from kvatlas.service.verify import CHAT, COMPLETION, questions_for, to_bytes

ANSWER_TOKENS = 8
_BLOCKS = 4
_TOKENS_MIN, _TOKENS_MAX = 40, 2048
_TRIES = 6
_LOOSE_WORDS = 600
_WORD_TOKENS_MAX = 8  # no tokenizer makes more of one of the words below
_BODY_BYTES_MAX = 4 << 20
_WORDS = (
    *("river", "stone", "garden", "winter", "letter", "music", "paper", "table", "window"),
    *("orange", "copper", "silver", "forest", "meadow", "bridge", "candle", "harbor", "island"),
    *("kitchen", "ladder", "market", "needle", "ocean", "pepper", "quiet", "railway", "summer"),
    *("thunder", "village", "walnut", "yellow", "zebra"),
)


Form = str | tuple[int, ...]
_Part = TypeVar("_Part", str, int)


class Prompt(msgspec.Struct, frozen=True):
    """A text and its token ids, as an engine's own endpoint makes them; () where it tells none."""

    text: str
    ids: tuple[int, ...] = ()

    @property
    def form(self) -> Form:
        """As it is asked: by token ids, where these are known."""
        return self.ids or self.text

    def another(self, number: int) -> Form:
        """Another prompt of the same ids, or words, in an order that comes of ``number``. The
        first id stays, as it often stands for the start of a text."""
        if not self.ids:
            return " ".join(_shuffled(self.text.split(" "), number))
        first, *rest = self.ids
        return (first, *_shuffled(rest, number))


def _shuffled(parts: list[_Part], number: int) -> list[_Part]:
    keyed = (
        (blake2b(b"%d %d" % (number, index), digest_size=8).digest(), part)
        for index, part in enumerate(parts)
    )
    return [part for _, part in sorted(keyed)]


class WithKey(HttpClient):
    """Sends an API key with each request."""

    def __init__(self, key: str, outgoing: Outgoing | None = None) -> None:
        super().__init__(outgoing=outgoing)
        self._authorization = (b"authorization", b"Bearer " + key.encode())

    async def exchange(
        self, method: str, origin: Origin, target: str, headers: Headers, **more: Any
    ) -> None:
        """As of any client, with the key."""
        await super().exchange(method, origin, target, [*headers, self._authorization], **more)


class Target(msgspec.Struct, frozen=True):
    """Who is asked: an engine, or a router. ``ranks``: of an engine with several data-parallel
    ones the first is asked, so that it is the same one each time."""

    client: HttpClient
    url: str
    model: str
    dialect: Dialect = "vllm"
    deadline_s: float = 10.0
    ranks: int = 1

    async def complete(self, prompt: Form, *, salt: str = "", tokens: int = ANSWER_TOKENS) -> Asked:
        """A completion. Never raises: what went wrong is in the answer."""
        body = {"prompt": prompt, "max_tokens": tokens, "logprobs": 1}
        return await self._ask(COMPLETION, body, salt)

    async def chat(self, text: str, *, salt: str = "") -> Asked:
        """A chat of one message. Never raises."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": ANSWER_TOKENS}
        return await self._ask(CHAT, body, salt)

    async def text_ids(self, text: str) -> tuple[int, ...]:
        """By its tokenize endpoint. Raises EngineError."""
        return await self._tokenize(COMPLETION, {"prompt": text}, [text])

    async def chat_ids(self, text: str) -> tuple[int, ...]:
        """The same of a chat. Raises EngineError."""
        body = {"messages": [{"role": "user", "content": text}]}
        return await self._tokenize(CHAT, body, [])

    async def _tokenize(
        self, path: str, body: Mapping[str, Any], texts: list[str]
    ) -> tuple[int, ...]:
        try:
            question = questions_for(path, {"model": self.model, **body}, texts, self.dialect)[0]
            url = f"{self.url}/tokenize"
            answer = await self.client.post_json(url, question, timeout_s=self.deadline_s)
            return tuple(memoryview(to_bytes(answer["tokens"])).cast("I"))
        except (Unkeyable, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.url}/tokenize: no token ids: {error}") from error

    async def _ask(self, path: str, body: dict[str, Any], salt: str) -> Asked:
        fields = {"model": self.model, "temperature": 0.0, **body}
        if salt:
            fields["cache_salt"] = salt
        headers = [(b"content-type", b"application/json")]
        if self.ranks > 1:
            headers.append((RANK_HEADER.encode(), b"0"))
        try:
            answer = await self.client.request(
                "POST",
                self.url + path,
                headers=headers,
                body=msgspec.json.encode(fields),
                timeout_s=self.deadline_s,
                size_max=_BODY_BYTES_MAX,
            )
            if answer.status != 200:
                said = answer.body[:200].decode("utf-8", "replace")
                return Asked(error=f"{path}: status {answer.status}: {said}")
            told = {n.decode("latin-1").lower(): v.decode("latin-1") for n, v in answer.headers}
            return _asked(answer.json(), told)
        except EngineError as error:
            return Asked(error=str(error))


async def made(target: Target, block_tokens: int, room_tokens: int) -> Prompt:
    """A fresh prompt of a few blocks of this size, where there is room for it. Raises EngineError
    where the engine does not tell token ids."""
    wanted = min(max(_BLOCKS * block_tokens + 2, _TOKENS_MIN), _TOKENS_MAX)
    if room_tokens:
        wanted = min(wanted, room_tokens - 2 * ANSWER_TOKENS)
    words = [secrets.token_hex(4)]
    share = 1.0  # words per token
    for _ in range(_TRIES):
        more = math.ceil(wanted * share) - len(words) + 1
        words = words[: max(1, len(words) + more)]
        words += [secrets.choice(_WORDS) for _ in range(more)]
        text = " ".join(words)
        ids = await target.text_ids(text)
        if wanted <= len(ids) <= wanted + max(32, wanted // 4):
            return Prompt(text, ids)
        share *= (wanted + 8) / max(1, len(ids))
    if wanted <= len(ids) and (not room_tokens or len(ids) < room_tokens - ANSWER_TOKENS):
        return Prompt(text, ids)
    raise EngineError(f"{target.url}: no text of {wanted} tokens could be made")


def loose(block_tokens: int = 0, room_tokens: int = 0) -> str:
    """A fresh text of several blocks, of whatever size where none is known, for engines that tell
    no token ids; shorter where there is known to be little room."""
    count = min(max(_LOOSE_WORDS, _BLOCKS * block_tokens), _TOKENS_MAX)
    if room_tokens:
        most = (room_tokens - 2 * ANSWER_TOKENS) // _WORD_TOKENS_MAX
        count = max(1, min(count, most - 1))
    words = (secrets.choice(_WORDS) for _ in range(count))
    return " ".join((secrets.token_hex(4), *words))


def packed(ids: tuple[int, ...]) -> bytes:
    """uint32, little endian."""
    return struct.pack(f"<{len(ids)}I", *array("I", ids))


def told(canaries: dict[str, Asked]) -> dict[str, Asked]:
    """Engines leave out cached tokens where there are none: once one of them told some, those that
    tell nothing stand for 0."""
    if not any(asked.cached_tokens > 0 for asked in canaries.values()):
        return canaries
    return {
        name: msgspec.structs.replace(asked, cached_tokens=max(0, asked.cached_tokens))
        if not asked.error
        else asked
        for name, asked in canaries.items()
    }


def _asked(answer: Any, headers: Mapping[str, str]) -> Asked:
    if not isinstance(answer, dict):
        return Asked(error="the answer is no JSON object")
    usage, choices = answer.get("usage"), answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return Asked(error="the answer has no choice in it")
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    usage = usage if isinstance(usage, dict) else {}
    words, logprobs = _logprobs(choice.get("logprobs"))
    return Asked(
        prompt_tokens=_known(tokens(usage.get("prompt_tokens"))),
        cached_tokens=_known(cached_tokens(usage)),
        expected_tokens=_known(header_tokens(headers.get(EXPECTED_HEADER, ""))),
        worker=headers.get(WORKER_HEADER, ""),
        prefilled_by=headers.get("x-kvatlas-prefilled-by", ""),
        text=text if isinstance(text, str) else "",
        tokens=words,
        logprobs=logprobs,
    )


def _logprobs(found: Any) -> tuple[tuple[str, ...], tuple[float, ...]]:
    tokens = found.get("tokens") if isinstance(found, dict) else None
    values = found.get("token_logprobs") if isinstance(found, dict) else None
    if not isinstance(tokens, list) or not isinstance(values, list):
        return (), ()
    rows = [
        (str(token), float(value))
        for token, value in zip(tokens, values, strict=False)
        if isinstance(value, int | float) and math.isfinite(value)
    ]
    return tuple(token for token, _ in rows), tuple(value for _, value in rows)


def _known(count: int | None) -> int:
    return -1 if count is None else count
