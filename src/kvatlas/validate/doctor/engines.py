"""One engine examined: what it tells, its events, its counters, and its answers to canaries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from email.utils import parsedate_to_datetime

import msgspec
import zmq.asyncio

from kvatlas.config import WorkerConfig
from kvatlas.core.check_facts import Asked, EngineFacts, StreamFacts
from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError, EngineError, LayoutError
from kvatlas.service import identity, probe
from kvatlas.service.http_client import HttpClient
from kvatlas.validate.counters import Counters, read
from kvatlas.validate.doctor import canaries
from kvatlas.validate.doctor.ear import TOKEN_BYTES, Ear
from kvatlas.workload.proofs import Proof, Runtime, settled

_FAILURES_MAX = 2
_OPENING = 1 << 16  # numbers of prompts beside those by which engines are told apart


class Patience(msgspec.Struct, frozen=True):
    """How long things may take: one question, and what is waited for besides (events, replays)."""

    answer_s: float = 15.0
    event_s: float = 5.0


class Examined:
    """One engine. `describe` first, then `listen`, then `ask`; `close` in the end."""

    def __init__(
        self,
        client: HttpClient,
        context: zmq.asyncio.Context,
        worker: WorkerConfig,
        patience: Patience,
        proofs: Sequence[Proof] = (),
    ) -> None:
        """``proofs``: where minimal resume points were shown."""
        self.worker = worker
        self.facts = EngineFacts(worker.name, worker.url, events_wanted=bool(worker.events))
        self.target = canaries.Target(
            client,
            worker.url.rstrip("/"),
            "",
            "sglang" if worker.engine == "sglang" else "vllm",
            patience.answer_s,
        )
        self.ears: list[Ear] = []
        self.own: bytes = b""  # the prompt that it alone is asked
        self._shared: bytes = b""
        self._client = client
        self._context = context
        self._patience = patience
        self._proofs = proofs

    def note(self, **found: object) -> None:
        """More of it is known."""
        self.facts = msgspec.structs.replace(self.facts, **found)

    async def describe(self) -> None:
        """What it tells of itself."""
        worker, timeout_s = self.worker, self._patience.answer_s
        try:
            self.note(clock_ahead_s=await _clock_ahead_s(self._client, worker.url))
            told = await probe.describe(self._client, worker, timeout_s)
        except EngineError as error:
            self.note(error=str(error))
            return
        self.target = msgspec.structs.replace(
            self.target, model=told.models[0], ranks=len(told.sources)
        )
        self.note(
            kind=told.engine if told.engine != "stub" else "vllm",
            version=told.version,
            models=told.models,
            context_tokens=told.context_tokens,
            told_block_tokens=told.block_tokens,
            kv_dtype=told.kv_dtype,
            configured_kv_dtype=worker.kv_dtype,
            tensor_ranks=worker.tensor_parallel or told.tensor_parallel,
            draft=worker.draft or told.draft,
            caching=dict(told.facts).get("enable_prefix_caching", ""),
            stream=StreamFacts(told=bool(told.sources)),
        )
        try:
            layout = _layout(worker, told)
            runtime = Runtime(told.engine, told.version, worker.device)
            layout, _ = settled(layout, runtime, self._proofs)
        except (LayoutError, ConfigError) as error:
            self.note(layout_error=str(error))
            layout = identity.UNKNOWN
        else:
            self.note(layout=layout)
        self.note(fingerprint=identity.fingerprint_of(worker, told, layout))
        self.ears = [Ear(self._context, source) for _, source in told.sources]

    async def listen(self) -> None:
        """Hears its events from now on."""
        await asyncio.gather(*(ear.open(self._patience.event_s) for ear in self.ears))

    @property
    def block_tokens(self) -> int:
        """What a prompt has to be several of."""
        layout = self.facts.layout
        return layout.grid_tokens if layout is not None else self.facts.told_block_tokens

    async def ask(self, shared: canaries.Prompt, chat_text: str, number: int) -> None:
        """All of its canaries. ``shared`` and ``chat_text`` are the same for all engines of its
        model, texts alone where none of them tells token ids; ``number`` is another one for
        each."""
        before = await self._counters()
        try:
            self.note(text_ids=await self.target.text_ids(shared.text))
        except EngineError as error:
            self.note(tokenize_error=str(error))
        try:
            self.note(chat_ids=await self.target.chat_ids(chat_text))
        except EngineError as error:
            self.note(chat_error=str(error))
        target, form, salt = self.target, shared.form, f"kvatlas-doctor-{number}-{time.time_ns()}"
        own = shared.another(number)
        questions: dict[str, Callable[[], Awaitable[Asked]]] = {
            # A subscription takes a moment longer than a connection: this one may go unheard.
            "opening": lambda: target.complete(shared.another(number + _OPENING), tokens=1),
            "fresh": lambda: target.complete(form),
            "again": lambda: target.complete(form),
            "salted": lambda: target.complete(form, salt=salt),
            "salted again": lambda: target.complete(form, salt=salt),
            "text": lambda: target.complete(shared.text),
            "chat": lambda: target.chat(chat_text),
        }
        if self.facts.chat_ids:
            questions["chat ids"] = lambda: target.complete(self.facts.chat_ids)
        questions["own"] = lambda: target.complete(own, tokens=1)
        asked: dict[str, Asked] = {}
        for name, question in questions.items():
            failed = [a.error for a in asked.values() if a.error]
            # Who answers nothing is not waited for as often as there are questions.
            in_vain = len(failed) >= _FAILURES_MAX
            asked[name] = Asked(error=failed[0]) if in_vain else await question()
        if not isinstance(own, str):
            self.own, self._shared = canaries.packed(own), canaries.packed(shared.ids)
        self.note(
            canaries=canaries.told(asked),
            canary_tokens=sum(max(0, a.prompt_tokens) for a in asked.values()),
        )
        after = await self._counters()
        if before is not None and after is not None:
            self._counted(before, after)

    async def hear(self, others: Sequence[Examined]) -> None:
        """What its events told of the canaries, and whether they come again."""
        ears, patience_s = self.ears, self._patience.event_s
        if not ears:
            return
        if not self.own:
            why = (
                ears[0].error
                or "no canary of known token ids could be made, by which they tell of it"
            )
            self.note(stream=StreamFacts(told=True, error=why))
            return
        heard = await asyncio.gather(*(ear.until_stored(self.own, patience_s) for ear in ears))
        ear = next((ear for ear, yes in zip(ears, heard, strict=True) if yes), ears[0])
        foreign = [o.facts.name for o in others if o is not self and o.own and ear.stored(o.own)]
        stored = ear.stored(self.own)
        replay = await ear.replayed(patience_s) if ear.source.replay and ear.batches else None
        if ear.source.replay and not ear.batches:
            replay = "nothing was heard that could be asked for again"
        self.note(
            stream=StreamFacts(
                told=True,
                error=ear.error,
                heard=any(heard),
                on=foreign[0] if foreign and not any(heard) else "",
                blocks=tuple(sorted({event.block_tokens for event in stored})),
                hashes=_hashes(ear, self._shared),
                batches=len(ear.batches),
                gap=ear.gap,
                malformed=ear.malformed,
                replay=replay,
            )
        )

    async def close(self) -> None:
        """Stops listening."""
        for ear in self.ears:
            await ear.close()

    async def _counters(self) -> Counters | None:
        try:
            return await read(self._client, self.worker.url, self._patience.answer_s)
        except EngineError as error:
            self.note(metrics_error=str(error))
            return None

    def _counted(self, before: Counters, after: Counters) -> None:
        try:
            change = after.since(before)
        except EngineError as error:
            self.note(metrics_error=str(error))
            return
        self.note(counted_tokens=change.prompt_tokens, counted_hits=change.hit_tokens)


async def kind_of(client: HttpClient, url: str, timeout_s: float) -> str:
    """ "sglang" where it has SGLang's pages, else "vllm"; an engine that does not answer, too."""
    try:
        info = await client.request("GET", f"{url}/get_model_info", timeout_s=timeout_s)
    except EngineError:
        return "vllm"
    return "sglang" if info.status == 200 else "vllm"


def _layout(worker: WorkerConfig, told: probe.Description) -> Layout:
    draft = worker.draft or told.draft
    configured = identity.configured_layout(worker, draft)
    return configured if configured is not None else identity.told_layout(worker, told, draft)


def _hashes(ear: Ear, ids: bytes) -> dict[str, int]:
    """The engine's own hash of the prompt's first block, by group, where its first is listed."""
    found: dict[str, int] = {}
    for event in ear.stored(ids):
        whole = len(event.hashes) * event.block_tokens * TOKEN_BYTES == len(event.tokens)
        if event.salt or event.parent is not None or not whole:
            continue
        name = f"group {event.group or 0}, blocks of {event.block_tokens}"
        found.setdefault(name, event.hashes[0])
    return found


async def _clock_ahead_s(client: HttpClient, url: str) -> float | None:
    """By the date of an answer, which has whole seconds. Raises EngineError for none."""
    sent_s = time.time()
    answer = await client.request("GET", f"{url.rstrip('/')}/health", timeout_s=5.0)
    middle_s = (sent_s + time.time()) / 2
    for name, value in answer.headers:
        if name.lower() == b"date":
            try:
                return parsedate_to_datetime(value.decode("latin-1")).timestamp() + 0.5 - middle_s
            except ValueError:
                return None
    return None
