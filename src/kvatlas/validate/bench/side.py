"""One arm's live side: is it there, what does it count, and is it free of what came before?"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Sequence

import msgspec

from kvatlas.errors import EngineError
from kvatlas.report.latency import Slo
from kvatlas.service.http import Headers
from kvatlas.service.http_client import HttpClient
from kvatlas.service.load import LoadPlan, Record, run_load
from kvatlas.validate import counters
from kvatlas.validate.bench.texts import Prompts
from kvatlas.validate.bench.values import Arm, BenchPlan, Clean, Endpoint, EngineHits
from kvatlas.validate.counters import Counters
from kvatlas.workload.trace import TraceRequest

ANSWER_S = 10.0  # for what is no generation
HOOK_S = 1800.0  # for a command that makes a configuration be there
_POLL_S = 0.5
_RESET_TRIES = 20
_BLOCK, _BLOCKS = 64, 12  # of the prompts that ask: longer than the largest block of an engine
_TAIL = 400  # characters of a command's output that an error shows


class Side:
    """``nonce`` makes texts that no run before has sent."""

    def __init__(
        self, arm: Arm, plan: BenchPlan, client: HttpClient, *, headers: Headers, nonce: str
    ) -> None:
        self.arm = arm
        self._plan = plan
        self._client = client
        self._headers = headers
        self._nonce = nonce
        self._asked = 0
        self.context_tokens: int | None = None
        self.model = plan.load.model
        self.ignore_eos = True

    def load(self, **changes: object) -> LoadPlan:
        """The plan of a play of this arm."""
        own = {"target": self.arm.target, "model": self.model, "ignore_eos": self.ignore_eos}
        return msgspec.structs.replace(self._plan.load, **{**own, **changes})

    async def there(self, when: str) -> None:
        """Run the arm's command, if any, and wait for its endpoint. ``when``: the round, as the
        command is told. Raises EngineError."""
        if self.arm.before:
            await _command(self.arm, when)
        patience_s = self._plan.ready_s if self.arm.before else 0.0
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        while True:
            try:
                model, self.context_tokens = await self._models(self.arm.target)
            except EngineError:
                if loop.time() >= until:
                    raise
                await asyncio.sleep(_POLL_S)
            else:
                self.model = self._plan.load.model or model
                return

    async def endpoint(self) -> Endpoint:
        """Ask what must be known before the first play. Raises EngineError where it does not
        answer a short prompt."""
        words = 200
        record = await self._ask(self.arm.target, self.model, words, 1)
        if record.error == "http 400":  # a server that does not know the word
            self.ignore_eos = False
            record = await self._ask(self.arm.target, self.model, words, 1)
        if record.error:
            raise EngineError(f"{self.arm.target}: {record.error}: {record.detail}")
        told: dict[str, str] = {}
        for url in self.arm.counted:
            try:
                told[url] = (await counters.read(self._client, url, ANSWER_S)).engine
            except EngineError as error:
                told[url] = f"no counters: {error}"
        per_word = record.prompt_tokens / words if record.prompt_tokens else None
        return Endpoint(self.model, self.context_tokens, per_word, self.ignore_eos, told)

    async def clean(self) -> Clean:
        """Empty every engine's caches, and see that a prompt that was cached is no more."""
        unsure = ""
        for url in self.arm.counted:
            try:
                seen = await self._seen_after_reset(url)
            except EngineError as error:
                return Clean("new text", str(error))
            if seen is None:
                unsure = "not verified: no cached tokens are told"
            elif seen:
                after = f"{url}: {seen} tokens of a prompt were still cached after its reset"
                return Clean("new text", after)
        return Clean("reset", unsure or "verified: a cached prompt was computed anew")

    async def counts(self) -> dict[str, Counters | str]:
        """A reading of each engine, or why there is none."""
        found: dict[str, Counters | str] = {}
        for url in self.arm.counted:
            try:
                found[url] = await counters.read(self._client, url, ANSWER_S)
            except EngineError as error:
                found[url] = str(error)
        return found

    async def _seen_after_reset(self, url: str) -> int | None:
        """Cached tokens of a prompt that was sent before the reset and again after it; None where
        that cannot be told. Raises EngineError where there is no reset."""
        model = self.model
        if url != self.arm.target:
            model, _ = await self._models(url)
        self._asked += 1
        first = [await self._ask(url, model, 0, self._asked) for _ in range(2)]
        await _reset(self._client, url, self._headers)
        again = await self._ask(url, model, 0, self._asked)
        if again.error or not first[1].cached_tokens:
            return None
        return again.cached_tokens

    async def _ask(self, url: str, model: str, words: int, number: int) -> Record:
        """One short prompt: of so many words, or (0) of several blocks of any engine."""
        count = 1 if words else _BLOCKS
        if self.context_tokens is not None and not words:
            count = max(1, min(count, self.context_tokens // (2 * _BLOCK)))
        size = words or _BLOCK
        request = TraceRequest(0, 0.0, count * size, 1, tuple(range(count)))
        prompts = Prompts(
            [request],
            form=self._plan.form,
            block_tokens=size,
            tokens_per_word=1.0,
            vocab_size=self._plan.load.vocab_size,
            tag=f"{self._nonce}-ask-{number}",
        )
        plan = self.load(target=url, model=model, stream=False, slo=Slo())
        records: list[Record] = []
        await run_load(
            plan, [request], prompt_of=prompts, headers=self._headers, on_record=records.append
        )
        return records[0]

    async def _models(self, url: str) -> tuple[str, int | None]:
        page = f"{url.rstrip('/')}/v1/models"
        answer = await self._client.request("GET", page, headers=self._headers, timeout_s=ANSWER_S)
        try:
            found = msgspec.json.decode(answer.body, type=_Models).data[0]
        except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
            raise EngineError(f"{page}: status {answer.status}, and no model") from error
        return found.id, found.max_model_len


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def _command(arm: Arm, when: str) -> None:
    """Raises EngineError where it fails or does not end. What it leaves running stays."""
    env = {**os.environ, "KVATLAS_ARM": arm.name, "KVATLAS_ROUND": when}
    with tempfile.TemporaryFile() as output:  # no pipe: a server that it starts would hold it open
        process = await asyncio.create_subprocess_shell(
            arm.before,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(HOOK_S):
                status = await process.wait()
        except BaseException as end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            if isinstance(end, TimeoutError):
                raise EngineError(
                    f"the command of arm {arm.name} did not end in {HOOK_S:g} s"
                ) from None
            raise
        if status:
            output.seek(0)
            said = output.read().decode("utf-8", "replace").strip()[-_TAIL:]
            raise EngineError(f"the command of arm {arm.name} ended with {status}: {said}")


async def _reset(client: HttpClient, url: str, headers: Headers) -> None:
    """Empty the engine's caches, those beyond its device included where it can. Raises
    EngineError where it offers no way, or does not do it."""
    base, said = url.rstrip("/"), ""
    for path in ("/reset_prefix_cache?reset_external=true", "/flush_cache"):
        for _ in range(_RESET_TRIES):
            answer = await client.request(
                "POST", f"{base}{path}", headers=headers, timeout_s=ANSWER_S
            )
            if answer.status in (404, 405):
                break
            said = answer.body[:200].decode("utf-8", "replace").strip()
            if answer.status == 200 and b'"success":false' not in answer.body.replace(b" ", b""):
                return
            await asyncio.sleep(_POLL_S)  # blocks may still be held by what just ended
    if said:
        raise EngineError(f"{url}: its caches were not emptied: {said}")
    raise EngineError(
        f"{url}: no way to empty its caches: vLLM has /reset_prefix_cache with "
        "VLLM_SERVER_DEV_MODE=1, SGLang has /flush_cache"
    )


def hits_between(
    before: dict[str, Counters | str],
    after: dict[str, Counters | str],
    *,
    told: int | None,
    whole: bool,
) -> EngineHits:
    """What was counted between two readings of all engines. ``told``: prompt tokens by the
    answers themselves, None where they do not tell; ``whole``: every request was answered."""
    changes: list[Counters] = []
    for url, then in before.items():
        now = after.get(url, "not read")
        if isinstance(then, str) or isinstance(now, str):
            return EngineHits(reason=then if isinstance(then, str) else str(now))
        try:
            changes.append(now.since(then))
        except EngineError as error:
            return EngineHits(reason=f"{url}: {error}")
    prompt = _sum([c.prompt_tokens for c in changes])
    reason = _mismatch(prompt, told, whole=whole)
    if reason:
        return EngineHits(prompt, reason=reason)
    local = _sum([c.local_hit_tokens for c in changes])
    external = _sum([c.external_hit_tokens for c in changes])
    hits = _sum([c.hit_tokens for c in changes])
    if hits is None:
        return EngineHits(
            prompt, local, external, reason="" if local is not None else "no hits are counted"
        )
    return EngineHits(prompt, local, external, hits)


def _mismatch(prompt: int | None, told: int | None, *, whole: bool) -> str:
    """Why the engines' figures are not those of this play; "" where they may be."""
    if prompt is None or told is None:
        return ""
    if prompt > told * 1.01 and whole:
        return (
            f"the engines counted {prompt:,} prompt tokens, {told:,} were sent: others use them "
            "too, or they are halves of pairs that both count (name the prefill engines only)"
        )
    if prompt < told * 0.99:
        return (
            f"the engines counted {prompt:,} prompt tokens, {told:,} were answered: these are not "
            "all the engines behind the target (--engine)"
        )
    return ""


def _sum(values: Sequence[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None
