"""A request's body → the token ids that the engine will see.

In process where the model's tokenizer is at hand and agrees with the engine; else the engine's own
endpoint; else none, with the reason, and the request is routed by load alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvatlas.config import TokenizerConfig
from kvatlas.service.chat_messages import ENDPOINT_KNOWS, Dialect, Unkeyable
from kvatlas.service.chat_template import ChatTemplate
from kvatlas.service.encoder import Encoder
from kvatlas.service.verify import (
    CHAT,
    COMPLETION,
    GOLDEN,
    Endpoint,
    add_special_tokens,
    difference,
    to_bytes,
)

_LOG = logging.getLogger(__name__)

Mode = Literal["local", "endpoint", "none"]
_BATCH_MAX = 1024
_QUICK_PIECES = 1000  # messages and parts that a template renders in a few milliseconds


class Prompt(msgspec.Struct, frozen=True):
    """The ids of a request's prompt, uint32 little endian, or the ``reason`` why they are unknown.

    ``others``: the further prompts of a batch. ``source``: who made the ids; "given": the client.
    """

    tokens: bytes = b""
    reason: str = ""
    source: Literal["local", "endpoint", "given", "none"] = "none"
    others: tuple[bytes, ...] = ()

    @property
    def count(self) -> int:
        """Tokens of the (first) prompt; -1 where unknown."""
        return -1 if self.reason else len(self.tokens) // 4


class TokenizerState(msgspec.Struct, frozen=True):
    """For /health and /metrics. ``chat`` and ``completion``: where ids come from at present."""

    encoder: str  # "fastokens", "tokenizers", or "" without a local tokenizer
    note: str  # why not the fast one
    chat: Mode
    completion: Mode
    compared: int  # answers of the engine that were set beside ours
    mismatches: int
    last_mismatch: str  # "" as long as there was none: the visible flag
    unkeyed: dict[str, int]  # requests without ids, by reason
    endpoint_calls: int
    endpoint_failures: int
    endpoint_failing: bool  # the last call was in vain


class Tokenizer:
    """One model's tokenizer. `prompt` never raises; `verify` sets ours beside the engine's."""

    # Demoted when this many of the last samples differ, and more than one in twenty.
    _DEMOTE_AT = 3
    _SAMPLES = 64

    def __init__(
        self,
        encoder: Encoder | None,
        template: ChatTemplate | None,
        *,
        endpoint: Endpoint | None = None,
        dialect: Dialect = "vllm",
        verify_every: int = 0,
    ) -> None:
        """``verify_every``: one local answer in so many is checked with the engine; 0: none."""
        self._encoder = encoder
        self._template = template
        self._endpoint = endpoint
        self._dialect: Dialect = dialect
        self._verify_every = verify_every
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._refuted: set[str] = set()  # paths whose local ids differ from the engine's
        self._samples: dict[str, deque[bool]] = {
            path: deque(maxlen=self._SAMPLES) for path in (CHAT, COMPLETION)
        }
        self._sampling: asyncio.Task[None] | None = None
        self._local_answers = 0
        self._compared = 0
        self._mismatches = 0
        self._last_mismatch = ""
        self._unkeyed: Counter[str] = Counter()

    @classmethod
    def load(
        cls, config: TokenizerConfig, *, endpoint: Endpoint | None = None, dialect: Dialect = "vllm"
    ) -> Tokenizer:
        """Takes seconds for a large vocabulary. Raises ConfigError for unusable files."""
        encoder = template = None
        if config.path:
            encoder = Encoder.load(Path(config.path), config.cache_bytes)
            template = ChatTemplate.load(Path(config.path), config.chat_template)
        return cls(
            encoder,
            template,
            endpoint=endpoint,
            dialect=dialect,
            verify_every=config.verify_every,
        )

    async def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
        """The token ids of a parsed request body. Never raises for what a body may hold."""
        try:
            return await self._prompt(path, body)
        except Unkeyable as refusal:
            self._unkeyed[refusal.reason] += 1
            return Prompt(reason=refusal.reason)

    def forget(self) -> None:
        """No text of anybody is kept."""
        if self._encoder is not None:
            self._encoder.forget()

    def state(self) -> TokenizerState:
        """What it does at present, and what it has counted."""
        encoder, endpoint = self._encoder, self._endpoint
        return TokenizerState(
            encoder=encoder.name if encoder else "",
            note=encoder.note if encoder else "",
            chat=self._mode(CHAT),
            completion=self._mode(COMPLETION),
            compared=self._compared,
            mismatches=self._mismatches,
            last_mismatch=self._last_mismatch,
            unkeyed=dict(self._unkeyed),
            endpoint_calls=endpoint.calls if endpoint else 0,
            endpoint_failures=endpoint.failures if endpoint else 0,
            endpoint_failing=endpoint is not None and endpoint.failing,
        )

    async def verify(self, model: str) -> int:
        """Sets our ids for the golden set beside every engine's; returns how many were answered.

        Call it when an engine becomes ready. A path on which no engine agrees with us is left to
        the endpoint until a later call finds one that does.
        """
        if self._encoder is None or self._endpoint is None:
            return 0
        verdicts: dict[str, list[bool]] = {CHAT: [], COMPLETION: []}
        answered = 0
        for url in self._endpoint.urls():
            equal: dict[str, bool] = {}
            for name, path, fields in GOLDEN:
                body = {"model": model, **fields}
                try:
                    ours = await self._local(path, body)
                    engines = await self._endpoint.tokens(path, body, _texts(path, body), url=url)
                except Unkeyable:
                    continue  # one of the two refuses this form: nothing to compare
                answered += 1
                same = self._compare(f"{url}{path} ({name})", ours, engines)
                equal[path] = equal.get(path, True) and same
            for path, same in equal.items():
                verdicts[path].append(same)
        for path, found in verdicts.items():
            if found:
                self._samples[path].clear()
                self._refuted.discard(path)
                if not any(found):
                    self._refuted.add(path)
        return answered

    async def close(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
        self._threads.shutdown(wait=True)

    # --- one request -----------------------------------------------------------------------------

    async def _prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
        if path not in (CHAT, COMPLETION):
            raise Unkeyable("unknown_path", path)
        _check(body)
        given = _given_ids(path, body)
        if given is not None:
            return _answer(given, "given")
        texts = _texts(path, body)
        try:
            if path in self._refuted:
                raise Unkeyable("engine_dialect", "our ids differ from the engine's")
            ids = await self._local(path, body)
        except Unkeyable as refusal:
            if refusal.reason not in ENDPOINT_KNOWS or self._endpoint is None:
                raise
            return _answer(await self._endpoint.tokens(path, body, texts), "endpoint")
        self._local_answers += 1
        self._sample(path, body, ids)
        return _answer(ids, "local")

    async def _local(self, path: str, body: Mapping[str, Any]) -> list[bytes]:
        if self._encoder is None or self._template is None:
            raise Unkeyable("no_tokenizer")
        if path == CHAT:
            texts = [await self._render(self._template, body)]
        else:
            texts = _texts(path, body)
        special = add_special_tokens(path, body, self._dialect)
        return [await self._encode(self._encoder, text, special) for text in texts]

    async def _render(self, template: ChatTemplate, body: Mapping[str, Any]) -> str:
        if _pieces(body.get("messages")) <= _QUICK_PIECES:
            return template.render(body, self._dialect)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, template.render, body, self._dialect)

    async def _encode(self, encoder: Encoder, text: str, special: bool) -> bytes:
        try:
            if encoder.quick(text):
                return encoder.encode(text, special)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, encoder.encode, text, special)
        except UnicodeError as error:  # half of a surrogate pair
            raise Unkeyable("malformed", str(error)) from error
        except Exception as error:  # of the native library: this request goes on without ids
            raise Unkeyable("encode_failed", f"{type(error).__name__}: {error}") from error

    # --- checking --------------------------------------------------------------------------------

    def _mode(self, path: str) -> Mode:
        here = self._encoder is not None and path not in self._refuted
        if here and (path == COMPLETION or (self._template and self._template.usable)):
            return "local"
        return "endpoint" if self._endpoint is not None else "none"

    def _sample(self, path: str, body: Mapping[str, Any], ours: list[bytes]) -> None:
        due = self._verify_every and self._local_answers % self._verify_every == 0
        idle = self._sampling is None or self._sampling.done()
        if due and idle and self._endpoint is not None:
            check = self._check_sample(self._endpoint, path, body, ours)
            self._sampling = asyncio.get_running_loop().create_task(check)

    async def _check_sample(
        self, endpoint: Endpoint, path: str, body: Mapping[str, Any], ours: list[bytes]
    ) -> None:
        urls = endpoint.urls()
        if not urls:
            return
        url = urls[self._compared % len(urls)]  # all in turn
        try:
            engines = await endpoint.tokens(path, body, _texts(path, body), url=url)
        except Unkeyable:
            return  # the engine could not say: counted by the endpoint
        recent = self._samples[path]
        recent.append(not self._compare(f"{url}{path} (sample)", ours, engines))
        if sum(recent) >= self._DEMOTE_AT and sum(recent) * 20 > len(recent):
            self._refuted.add(path)

    def _compare(self, what: str, ours: list[bytes], engines: list[bytes]) -> bool:
        self._compared += 1
        for left, right in zip(ours, engines, strict=True):
            found = difference(left, right)
            if found:
                self._mismatches += 1
                self._last_mismatch = f"{what}: {found}"
                _LOG.warning("token ids differ from the engine's: %s", self._last_mismatch)
                return False
        return True


def _answer(ids: list[bytes], source: Literal["local", "endpoint", "given"]) -> Prompt:
    return Prompt(tokens=ids[0], source=source, others=tuple(ids[1:]))


def _pieces(messages: object) -> int:
    """How many messages and parts of messages there are to render."""
    if not isinstance(messages, list):
        return 0
    count = len(messages)
    if count <= _QUICK_PIECES:
        contents = (m.get("content") for m in messages if isinstance(m, dict))
        count += sum(len(content) for content in contents if isinstance(content, list))
    return count


def _check(body: Mapping[str, Any]) -> None:
    """Raises `Unkeyable` for what no text alone can key."""
    if body.get("prompt_embeds") is not None:
        raise Unkeyable("prompt_embeds")
    if body.get("truncate_prompt_tokens") is not None:
        raise Unkeyable("truncated")
    if body.get("suffix") is not None:
        raise Unkeyable("suffix")


def _given_ids(path: str, body: Mapping[str, Any]) -> list[bytes] | None:
    """The ids of a completion whose prompt is token ids already: one list or a list of lists."""
    prompt = body.get("prompt")
    if path != COMPLETION or not isinstance(prompt, list) or not prompt:
        return None
    if isinstance(prompt[0], str) or (len(prompt) > _BATCH_MAX and isinstance(prompt[0], list)):
        return None
    try:
        return [to_bytes(ids) for ids in (prompt if isinstance(prompt[0], list) else [prompt])]
    except ValueError as error:
        raise Unkeyable("malformed", str(error)) from error


def _texts(path: str, body: Mapping[str, Any]) -> list[str]:
    """The texts of a completion's prompt; none for a chat. Raises `Unkeyable`."""
    if path == CHAT:
        return []
    prompt = body.get("prompt")
    texts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(texts, list) or not 0 < len(texts) <= _BATCH_MAX:
        raise Unkeyable("malformed", f"prompt must be text, ids or 1 to {_BATCH_MAX} of them")
    if not all(isinstance(text, str) for text in texts):
        raise Unkeyable("malformed", "prompt must be text or token ids")
    return texts
