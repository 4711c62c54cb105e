"""The engine's own answer to "which tokens?": to stand in for ours, and to check ours.

vLLM 0.32 and SGLang 0.5.23 both serve ``POST /tokenize`` with ``prompt`` or ``messages`` and
answer ``{"tokens": [...]}``. (vLLM's ``/v1/chat/completions/render`` takes the request as it is,
but only runs with ``--enable-scale-out``.)
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvatlas.service.chat_messages import Dialect, Reason, Unkeyable, flag, template_kwargs
from kvatlas.service.http_client import StatusError


class PostJson(Protocol):
    """POSTs ``obj`` as JSON and gives the JSON answer. Raises on any failure, HTTP errors too."""

    def __call__(self, url: str, obj: object, *, timeout_s: float) -> Awaitable[Any]: ...


_INVALID = (400, 413, 422)  # the request is at fault, not the endpoint

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


class Endpoint:
    """Asks an engine for token ids; remembers some answers; rests after repeated failures.

    ``urls`` gives the base URLs of engines that can be asked now, the preferred one first.
    """

    _IN_FLIGHT_MAX = 64
    _CACHE_BYTES = 16 << 20
    _FAILURES_MAX = 3
    _REST_S = 5.0

    def __init__(
        self,
        post_json: PostJson,
        urls: Callable[[], Sequence[str]],
        *,
        dialect: Dialect = "vllm",
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post_json = post_json
        self.urls = urls
        self.dialect = dialect
        self._timeout_s = timeout_s
        self._clock = clock
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()
        self._answers_bytes = 0
        self._in_flight = 0
        self._failures_in_a_row = 0
        self._rests_until = float("-inf")
        self.calls = 0
        self.failures = 0
        self.failing = False  # the last call was in vain

    async def tokens(
        self, path: str, body: Mapping[str, Any], prompts: Sequence[str], *, url: str = ""
    ) -> list[bytes]:
        """The ids of each prompt, uint32 little endian, within ``timeout_s`` in all.

        ``prompts``: the texts of a completion. ``url`` asks just this engine, and asks again what
        was answered before. Raises `Unkeyable`.
        """
        if self._in_flight >= self._IN_FLIGHT_MAX:
            raise Unkeyable("endpoint_busy")
        questions = questions_for(path, body, prompts, self.dialect)
        deadline_s = self._clock() + self._timeout_s
        self._in_flight += 1
        try:
            return [await self._ask(question, deadline_s, url) for question in questions]
        finally:
            self._in_flight -= 1

    async def _ask(self, question: dict[str, Any], deadline_s: float, url: str) -> bytes:
        try:
            key = hashlib.blake2b(msgspec.json.encode(question), digest_size=16).digest()
        except (TypeError, ValueError, OverflowError) as error:  # a number beyond 64 bits
            raise Unkeyable("malformed", str(error)) from error
        if not url and key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        now = self._clock()
        base = url or next(iter(self.urls()), "")
        if not base or now < self._rests_until or now >= deadline_s:
            raise Unkeyable("endpoint_failed", "no engine to ask now")
        self.calls += 1
        self.failing = False
        try:
            answer = await self._post_json(f"{base}/tokenize", question, timeout_s=deadline_s - now)
            tokens = to_bytes(answer["tokens"])
        except StatusError as error:
            if error.status not in _INVALID:
                self._failed()
            reason: Reason = "engine_refuses" if error.status in _INVALID else "endpoint_failed"
            raise Unkeyable(reason, str(error)) from error
        except Exception as error:  # whatever the HTTP layer raises: the request goes on without
            self._failed()
            detail = f"{base}/tokenize: {type(error).__name__}: {error}"
            raise Unkeyable("endpoint_failed", detail) from error
        self._failures_in_a_row = 0
        self._remember(key, tokens)
        return tokens

    def _failed(self) -> None:
        self.failing = True
        self.failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._FAILURES_MAX:
            self._failures_in_a_row = 0
            self._rests_until = self._clock() + self._REST_S

    def _remember(self, key: bytes, tokens: bytes) -> None:
        if key not in self._answers:
            self._answers[key] = tokens
            self._answers_bytes += len(tokens) + 256  # 256: key and entry
        while self._answers_bytes > self._CACHE_BYTES:
            _, old = self._answers.popitem(last=False)
            self._answers_bytes -= len(old) + 256


def to_bytes(ids: object) -> bytes:
    """A JSON list of token ids as uint32 little endian. Raises ValueError."""
    if not isinstance(ids, list):
        raise ValueError("token ids must be a list of numbers")
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids must be numbers from 0 to 2^32-1: {error}") from error
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


_BIG_ENDIAN = array("I", [1]).tobytes()[0] == 0


def questions_for(
    path: str, body: Mapping[str, Any], prompts: Sequence[str], dialect: Dialect
) -> list[dict[str, Any]]:
    """The bodies of the /tokenize calls that answer for one request. Raises `Unkeyable`."""
    model = {"model": body["model"]} if "model" in body else {}
    if path == COMPLETION:
        special = add_special_tokens(path, body, dialect)
        return [{**model, "prompt": text, "add_special_tokens": special} for text in prompts]
    if dialect == "sglang":
        keys = ("messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message")
        kept = {key: body[key] for key in (*keys, "chat_template_kwargs") if key in body}
        return [model | kept]
    params = template_kwargs(body)
    question: dict[str, Any] = {
        **model,
        "messages": _messages(body.get("messages")),
        "add_generation_prompt": params.pop("add_generation_prompt"),
        "continue_final_message": params.pop("continue_final_message"),
        "add_special_tokens": add_special_tokens(path, body, dialect),
        "chat_template_kwargs": {k: v for k, v in params.items() if v is not None},
    }
    if body.get("tools") is not None:
        question["tools"] = body["tools"]
    return [question]


def add_special_tokens(path: str, body: Mapping[str, Any], dialect: Dialect) -> bool:
    """Whether a start token is put before the text: for plain text it is, before what a template
    rendered it is not. vLLM lets the client choose; SGLang does not. Raises `Unkeyable`."""
    default = path == COMPLETION
    return default if dialect == "sglang" else flag(body, "add_special_tokens", default)


def _messages(messages: object) -> object:
    """vLLM's chat endpoint takes reasoning_content for reasoning; its /tokenize does not."""
    if not isinstance(messages, list):
        return messages
    return [
        {"reasoning": m["reasoning_content"]} | {k: v for k, v in m.items() if v is not None}
        if isinstance(m, dict) and m.get("reasoning_content") is not None
        else m
        for m in messages
    ]


def difference(ours: bytes, engines: bytes) -> str:
    """Where two id arrays part, in words; "" when they are equal."""
    if ours == engines:
        return ""
    left, right = memoryview(ours).cast("I"), memoryview(engines).cast("I")
    same = next(
        (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )
    here = left[same] if same < len(left) else "the end"
    there = right[same] if same < len(right) else "the end"
    return (
        f"first difference at token {same}: here {here}, engine {there} "
        f"({len(left)} tokens here, {len(right)} there)"
    )


_TEXT = (
    "The 3rd of May, 2024: it's 12345.678 °C; don't\tpanic…\n\n"
    "  def f(x):\n    return x**2  # π≈3\n"
    "你好，世界。これはテスト。 Привет! 👩‍👩‍👧 naïve e\u0301 <b>&amp;</b>\r\n"
)
_USER = {"role": "user", "content": _TEXT}
_SYSTEM = {"role": "system", "content": "You are terse."}
_ASSISTANT = {"role": "assistant", "content": "Once upon a time, there"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Köln", "Oslo"]}},
            "required": ["city"],
        },
    },
}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'},
        }
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": 21.50}'}

# What every model family must agree on with its engine. A template may refuse some of them.
GOLDEN: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("plain text", COMPLETION, {"prompt": _TEXT}),
    ("plain text, no start token", COMPLETION, {"prompt": _TEXT, "add_special_tokens": False}),
    ("chat", CHAT, {"messages": [_USER]}),
    ("system", CHAT, {"messages": [_SYSTEM, _USER]}),
    ("turns", CHAT, {"messages": [_SYSTEM, _USER, _ASSISTANT, _USER]}),
    ("tools", CHAT, {"messages": [_USER], "tools": [_TOOL]}),
    ("tool result", CHAT, {"messages": [_USER, _CALL, _RESULT], "tools": [_TOOL]}),
    ("last from assistant", CHAT, {"messages": [_USER, _ASSISTANT]}),
    (
        "continued",
        CHAT,
        {
            "messages": [_USER, _ASSISTANT],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    ("no generation prompt", CHAT, {"messages": [_USER], "add_generation_prompt": False}),
    (
        "thinking on",
        CHAT,
        {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
    ),
    (
        "thinking off",
        CHAT,
        {
            "messages": [_USER],
            "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
        },
    ),
    ("parts", CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": _TEXT}]}]}),
)
