"""The stub engine's HTTP interface: OpenAI's, vLLM 0.32's own paths, and /stub/ for tests.

Streamed chunks follow vLLM 0.32 field by field (`entrypoints/openai/*/serving.py`); whole answers
leave out fields that are null there and that no client asks for. Nothing here knows a socket.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qs

import msgspec

from kvatlas.connectors.stub import Generation, StubEngine
from kvatlas.connectors.stub_bodies import ChatForm, TextForm, metrics_text
from kvatlas.connectors.stub_text import TextTokenizer, ids_of
from kvatlas.errors import RequestError
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.workload.pace import Pace

ENGINE_VERSION = "0.32.0"
EMBEDDING_SIZE = 16
_TRANSFER = "kv_transfer_params"
DEFAULT_OUTPUT_TOKENS = 16  # OpenAI's and vLLM's for /v1/completions

_encode = msgspec.json.encode


class Question(msgspec.Struct, frozen=True):
    """A generation request that was checked: what both completion paths have in common."""

    chat: bool
    tokens: bytes
    output_tokens: int
    stream: bool
    include_usage: bool
    salt: str
    adapter: str
    model: str
    transfer: dict[str, object] | None = None


class StubApi:
    """Handlers of one engine. `handle` never raises: its faults are error envelopes."""

    def __init__(self, engine: StubEngine, tokenizer: TextTokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._started = time.time()
        self._routes: dict[tuple[str, str], Callable[[Request, Reply], Awaitable[None]]] = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completion,
            ("POST", "/v1/embeddings"): self._embeddings,
            ("GET", "/v1/models"): self._models,
            ("POST", "/tokenize"): self._tokenize,
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/kv_event_sources"): self._event_sources,
            ("POST", "/reset_prefix_cache"): self._reset,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._wake_up,
            ("GET", "/is_sleeping"): self._is_sleeping,
            ("GET", "/stub/state"): self._stub_state,
            ("POST", "/stub/fault"): self._stub_fault,
            ("POST", "/stub/pace"): self._stub_pace,
            ("POST", "/stub/damage"): self._stub_damage,
            ("POST", "/stub/events"): self._stub_events,
        }
        self._paths = {path for _, path in self._routes}

    async def handle(self, request: Request, reply: Reply) -> None:
        """Answers one request: the handler of an `HttpServer`."""
        handler = self._routes.get((request.method, request.path))
        try:
            if handler is None:
                known = request.path in self._paths
                text, status = ("Method Not Allowed", 405) if known else ("Not Found", 404)
                reply.send_json(status, {"detail": text})
                return
            await handler(request, reply)
        except RequestError as problem:
            if reply.started:
                reply.end(b"data: " + _encode(_error(problem)) + b"\n\ndata: [DONE]\n\n")
            else:
                reply.send_json(problem.status, _error(problem))

    # --- generation ---------------------------------------------------------------------------

    async def _chat(self, request: Request, reply: Reply) -> None:
        body = parse_object(request.body)
        self._adapter(body.get("model"))
        tokens = self._tokenizer.encode_chat(body)
        await self._answer(request, reply, self._question(body, tokens, chat=True))

    async def _completion(self, request: Request, reply: Reply) -> None:
        body = parse_object(request.body)
        self._adapter(body.get("model"))
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            special = body.get("add_special_tokens") is not False
            tokens = self._tokenizer.encode(prompt, special=special)
        elif isinstance(prompt, list) and all(isinstance(item, int) for item in prompt[:1]):
            tokens = ids_of(prompt)
        else:
            raise RequestError(
                "prompt: one text or one list of token ids is needed", param="prompt"
            )
        await self._answer(request, reply, self._question(body, tokens, chat=False))

    def _question(self, body: Mapping[str, object], tokens: bytes, *, chat: bool) -> Question:
        if body.get("n") not in (None, 1):
            raise RequestError("n: this engine answers with one choice", param="n")
        if not tokens:
            raise RequestError("the prompt is empty")
        prompt_tokens = len(tokens) // 4
        room = self._engine.max_model_tokens - prompt_tokens
        wanted = body.get("max_completion_tokens") if chat else None
        wanted = body.get("max_tokens") if wanted is None else wanted
        if wanted is None:
            wanted = max(1, room) if chat else DEFAULT_OUTPUT_TOKENS
            wanted = min(wanted, self._engine.natural_output_tokens)
        if not isinstance(wanted, int) or wanted < 1:
            raise RequestError(
                "max_tokens: a whole number of at least 1 is needed", param="max_tokens"
            )
        if wanted > room:
            raise RequestError(
                f"This model's maximum context length is {self._engine.max_model_tokens} tokens. "
                f"However, you requested {wanted} output tokens and your prompt contains "
                f"{prompt_tokens} input tokens."
            )
        options = body.get("stream_options")
        usage = isinstance(options, dict) and options.get("include_usage") is True
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise RequestError(
                "cache_salt: a text of at least one character is needed", param="cache_salt"
            )
        transfer = body.get("kv_transfer_params")
        if transfer is not None and not isinstance(transfer, dict):
            raise RequestError("kv_transfer_params: an object is needed", param=_TRANSFER)
        return Question(
            transfer=transfer,
            chat=chat,
            tokens=tokens,
            output_tokens=wanted,
            stream=body.get("stream") is True,
            include_usage=usage,
            salt=salt or "",
            adapter=self._adapter(body.get("model")),
            model=str(body.get("model") or self._engine.model_name),
        )

    def _adapter(self, model: object) -> str:
        """The adapter that ``model`` names, "" for the base model (named or not at all)."""
        if not model or model == self._engine.model_name:
            return ""
        if model in self._engine.adapters:
            return str(model)
        raise RequestError(f"The model `{model}` does not exist.", status=404, param="model")

    async def _answer(self, request: Request, reply: Reply, question: Question) -> None:
        faults = self._engine.faults
        if faults.delay_s:
            await asyncio.sleep(faults.delay_s)
        if faults.fail_next > 0:
            faults.fail_next -= 1
            raise RequestError("the stub was told to fail this request", status=faults.fail_status)
        generation = self._engine.generate(
            question.tokens,
            question.output_tokens,
            salt=question.salt,
            adapter=question.adapter,
            transfer=question.transfer,
        )
        prefix = "chatcmpl-" if question.chat else "cmpl-"
        answer_id = prefix + (request.header("x-request-id") or uuid.uuid4().hex)
        form = (ChatForm if question.chat else TextForm)(answer_id, question.model)
        try:
            if question.stream:
                await self._stream(reply, form, generation, include_usage=question.include_usage)
            else:
                text = "".join([piece async for pieces in generation for piece in pieces])
                reply.send_json(200, form.whole(text, generation))
        finally:
            generation.close()

    async def _stream(
        self, reply: Reply, form: TextForm, generation: Generation, *, include_usage: bool
    ) -> None:
        """Server-sent events, one per token, in vLLM's order."""
        cut_after, self._engine.faults.cut_after_tokens = (
            self._engine.faults.cut_after_tokens,
            None,
        )
        reply.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        opening = form.opening()
        async for pieces in generation:
            if cut_after is not None and generation.made_tokens > cut_after:
                reply.abort()
                return
            chunks = [form.piece(piece) for piece in pieces]
            if generation.made_tokens == generation.output_tokens:
                chunks[-1] = form.piece(pieces[-1], last=True)
            reply.write(opening + b"".join(chunks))
            opening = b""
        tail = form.closing(generation) if include_usage else b""
        reply.end(tail + b"data: [DONE]\n\n")

    # --- the rest of OpenAI's interface --------------------------------------------------------

    async def _embeddings(self, request: Request, reply: Reply) -> None:
        body = parse_object(request.body)
        model = body.get("model") or self._engine.model_name
        self._adapter(model)
        given = body.get("input")
        single = isinstance(given, str) or (
            isinstance(given, list) and given and isinstance(given[0], int)
        )
        inputs = [given] if single else given
        if not isinstance(inputs, list) or not inputs:
            raise RequestError(
                "input: a text, a list of token ids, or a list of these is needed", param="input"
            )
        data, total = [], 0
        for index, item in enumerate(inputs):
            if not isinstance(item, str | list):
                raise RequestError("input: a text or a list of token ids is needed", param="input")
            tokens = (
                self._tokenizer.encode(item, special=True)
                if isinstance(item, str)
                else ids_of(item)
            )
            total += len(tokens) // 4
            data.append({"index": index, "object": "embedding", "embedding": _embedding(tokens)})
        usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
        reply.send_json(200, {"object": "list", "data": data, "model": model, "usage": usage})

    async def _models(self, request: Request, reply: Reply) -> None:
        base = self._engine.model_name
        cards = [self._card(base, None), *(self._card(a, base) for a in self._engine.adapters)]
        reply.send_json(200, {"object": "list", "data": cards})

    def _card(self, name: str, parent: str | None) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": self._engine.max_model_tokens if parent is None else None,
            "permission": [],
        }

    async def _tokenize(self, request: Request, reply: Reply) -> None:
        body = parse_object(request.body)
        prompt, messages = body.get("prompt"), body.get("messages")
        if isinstance(messages, list):
            tokens = self._tokenizer.encode_chat(body)
        elif isinstance(prompt, str):
            special = body.get("add_special_tokens") is not False
            tokens = self._tokenizer.encode(prompt, special=special)
        else:
            raise RequestError("prompt or messages is needed")
        ids = memoryview(tokens).cast("I").tolist()
        limit = self._engine.max_model_tokens
        reply.send_json(
            200, {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None}
        )

    # --- vLLM's own paths ----------------------------------------------------------------------

    async def _health(self, request: Request, reply: Reply) -> None:
        reply.send(self._engine.faults.health_status, [])

    async def _version(self, request: Request, reply: Reply) -> None:
        reply.send_json(200, {"version": ENGINE_VERSION})

    async def _metrics(self, request: Request, reply: Reply) -> None:
        text = metrics_text(self._engine, self._started)
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        reply.send(200, [(b"content-type", kind)], text.encode())

    async def _event_sources(self, request: Request, reply: Reply) -> None:
        publisher = self._engine.publisher
        reply.send_json(200, {} if publisher is None else {"0": publisher.source()})

    async def _reset(self, request: Request, reply: Reply) -> None:
        reply.send_json(200, {"success": self._engine.reset_cache()})

    async def _sleep(self, request: Request, reply: Reply) -> None:
        try:
            level = int(parse_qs(request.query).get("level", ["1"])[0])
        except ValueError as problem:
            raise RequestError("level: 0, 1 or 2 is needed", param="level") from problem
        self._engine.sleep()
        reply.send_json(200, {"status": "sleeping", "level": level})

    async def _wake_up(self, request: Request, reply: Reply) -> None:
        self._engine.wake_up()
        reply.send_json(200, {"status": "awake", "tags": None})

    async def _is_sleeping(self, request: Request, reply: Reply) -> None:
        reply.send_json(200, {"is_sleeping": self._engine.sleeping})

    # --- /stub/: what tests do to an engine ----------------------------------------------------

    async def _stub_state(self, request: Request, reply: Reply) -> None:
        reply.send_json(200, self._engine.describe())

    async def _stub_fault(self, request: Request, reply: Reply) -> None:
        """``{"fail_next": 2, "fail_status": 500, "delay_s": 0.1, "cut_after_tokens": 3,
        "health_status": 503, "frozen": "engine"}``: only the named ones change."""
        self._engine.faults = self._engine.faults.changed(parse_object(request.body))
        reply.send_json(200, {"ok": True})

    async def _stub_pace(self, request: Request, reply: Reply) -> None:
        """``{"compute": 2, "memory": 0.5}``: from the next step on these parts of a step take so
        much longer than now."""
        try:
            pace = msgspec.convert(parse_object(request.body), Pace)
        except msgspec.ValidationError as error:
            raise RequestError(f"pace: {error}") from error
        self._engine.set_pace(pace)
        reply.send_json(200, {"ok": True})

    async def _stub_damage(self, request: Request, reply: Reply) -> None:
        """``{"group": 0}``: flip a byte of every cached block of that group."""
        group = parse_object(request.body).get("group")
        if not isinstance(group, int):
            raise RequestError("group: the index of a group is needed", param="group")
        reply.send_json(200, {"damaged_blocks": self._engine.damage(group)})

    async def _stub_events(self, request: Request, reply: Reply) -> None:
        """``{"skip": 2, "payloads": ["93cb…"]}``: lose two sequence numbers for good, then publish
        these bytes as they are, whether or not they mean anything."""
        publisher = self._engine.publisher
        body = parse_object(request.body)
        skip, payloads = body.get("skip", 0), body.get("payloads", [])
        if publisher is None:
            raise RequestError("this engine publishes no KV events", status=404)
        if not isinstance(skip, int) or not isinstance(payloads, list):
            raise RequestError("skip: a number, and payloads: a list, are needed")
        data = [_unhex(item) for item in payloads]
        publisher.skip(skip)
        for payload in data:
            publisher.send(payload)
        reply.send_json(200, {"next_seq": publisher.next_seq})


def _unhex(text: object) -> bytes:
    """Raises RequestError for anything but text of hexadecimal digits."""
    try:
        return bytes.fromhex(text) if isinstance(text, str) else bytes.fromhex("no text")
    except ValueError as problem:
        raise RequestError("payloads: a list of hexadecimal texts is needed") from problem


def parse_object(body: bytes) -> dict[str, object]:
    """Raises RequestError unless ``body`` is one JSON object."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise RequestError(f"the body is not valid JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


_ERROR_TYPES = {404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


def _error(problem: RequestError) -> dict[str, object]:
    """OpenAI's envelope in vLLM's dress: the code is the status."""
    kind = _ERROR_TYPES.get(problem.status, "BadRequestError")
    fault = {"message": str(problem), "type": kind, "param": problem.param, "code": problem.status}
    return {"error": fault}


def _embedding(tokens: bytes) -> list[float]:
    digest = hashlib.shake_128(tokens).digest(EMBEDDING_SIZE)
    norm = sum((byte - 127.5) ** 2 for byte in digest) ** 0.5
    return [(byte - 127.5) / norm for byte in digest]
