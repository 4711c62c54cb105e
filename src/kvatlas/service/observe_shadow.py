"""One observed request from its body to its line in the recording.

Wherever it was seen (`Seen` comes from the pass-through, a mirror or a log), its prompt becomes
token ids, the ids keyed hashes, and all else is forgotten. Nothing here may fail because of what a
request holds: what cannot be recorded is counted, by reason.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec

from kvatlas.core.keys import Scope
from kvatlas.core.records import Publisher
from kvatlas.core.router import Decision
from kvatlas.errors import RequestError
from kvatlas.service import body as bodies
from kvatlas.service.body import Usage
from kvatlas.service.observe_live import Live, decided
from kvatlas.service.observe_record import Observed, Recording, Row
from kvatlas.service.relay import CLIENT_CLOSED
from kvatlas.service.steer import Inbound
from kvatlas.service.steering import KEYED_PATHS, Rank, scope_of
from kvatlas.service.tokens import Prompt, Tokenizer
from kvatlas.workload.trace import TOKENS_MAX
from kvatlas.workload.trace_tokens import Hashed

log = logging.getLogger(__name__)

PENDING_MAX = 4096  # requests seen and not over, with their bodies
_EVENTS_S = 0.25  # that events may be on their way when an answer is over

Told = Literal["", "answer", "log", "events"]


class Seen(msgspec.Struct, frozen=True):
    """A request as it was seen. ``arrival_s`` since the recording began. ``live``: it is seen as
    it arrives, or ``late_s`` after, so that the engines are now as it meets them."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    arrival_s: float
    live: bool = True
    late_s: float = 0.0


class Ended(msgspec.Struct, frozen=True):
    """What became of it; figures are -1 where nothing told them. ``status``: of the answer; 0 where
    answers are not seen, 499 where none came, -1 where it could not be followed.
    ``output_tokens``: as streamed events count them, where the engine's usage does not.
    ``engine``, and ``told`` by what. ``fault``: what is wrong with it, where no status says it."""

    status: int
    whole: bool = True
    ttft_s: float = -1.0
    e2e_s: float = -1.0
    usage: Usage = Usage()
    output_tokens: int = -1
    engine: str = ""
    told: Told = ""
    fault: str = ""


class Case:
    """One request under way."""

    def __init__(self, seen: Seen, inbound: Inbound, ended: asyncio.Future[Ended]) -> None:
        self.arrival_s = seen.arrival_s
        self.live = seen.live
        self.late_s = seen.late_s  # until it was decided
        self.inbound = inbound
        self.ended = ended
        self.decision: Decision | None = None
        self.engine = ""  # who served it
        self.told: Told = ""  # what says so
        self.at: Publisher | None = None


class _Keyed(msgspec.Struct, frozen=True):
    """All that is kept of a prompt. ``reason``: why there are no ids."""

    ids: tuple[int, ...]
    tokens: int
    scope: str
    reason: str


class Shadow:
    """Owned by one event loop. ``lost``: requests that are in no line, by reason."""

    def __init__(
        self,
        recording: Recording,
        tokens: Tokenizer,
        hashed: Hashed,
        block_tokens: int,
        live: Live | None = None,
    ) -> None:
        self.lost: Counter[str] = Counter()
        self._recording = recording
        self._tokens = tokens
        self._hashed = hashed
        self._block_tokens = block_tokens
        self._live = live
        self._tasks: set[asyncio.Task[None]] = set()
        self._model: object = None  # of the first request
        self._count = 0

    @property
    def pending(self) -> int:
        """Requests seen and not over."""
        return len(self._tasks)

    def begin(self, seen: Seen) -> Case | None:
        """A request that has an answer to come; None where it is not followed."""
        if seen.method != "POST" or seen.path not in KEYED_PATHS:
            if seen.method == "POST" and seen.path.startswith("/v1/"):
                self.lost["other endpoint"] += 1
            return None
        if len(self._tasks) >= PENDING_MAX:
            self.lost["too many at once"] += 1
            return None
        try:
            body = bodies.parse(seen.body)
        except RequestError:
            self.lost["no JSON object"] += 1
            return None
        self._count += 1
        inbound = Inbound(f"observed-{self._count}", seen.path, body, dict(seen.headers))
        loop = asyncio.get_running_loop()
        case = Case(seen, inbound, loop.create_future())
        task = loop.create_task(self._guarded(case))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return case

    def first(self, case: Case, engine: str, ttft_s: float) -> None:
        """Its answer began, on ``engine`` where the answer tells."""
        live = self._live
        if live is None or not engine or case.decision is None or case.ended.done():
            return
        case.at = live.began(case.decision, live.named(engine), ttft_s)

    def end(self, case: Case, ended: Ended) -> None:
        """It is over."""
        if not case.ended.done():
            case.ended.set_result(ended)

    async def settle(self) -> None:
        """All that is over is written."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """What is not over yet is lost."""
        self.lost["the observer ended"] += len(self._tasks)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- one request ------------------------------------------------------------------------------

    async def _guarded(self, case: Case) -> None:
        try:
            await self._follow(case)
        except Exception:
            self.lost["a fault of ours"] += 1
            log.exception("a request could not be recorded")

    async def _follow(self, case: Case) -> None:
        began_s = time.monotonic()
        prompt, ranks = await self._prompt(case.inbound)
        tokens = max((prompt.tokens, *prompt.others), key=len)
        live, scope = self._live, self._scope(case.inbound)
        if live is not None and case.live:
            case.decision = live.decide(case.inbound, tokens, ranks)
            case.late_s += time.monotonic() - began_s
        ids = self._hashed.ids(tokens, scope) if tokens else ()
        count, reason = len(tokens) // 4, prompt.reason
        limit = _limit(case.inbound.body)
        del prompt, tokens
        case.inbound.body.clear()
        ended = await case.ended
        try:
            await self._served(case, ended)
            row = self._row(case, ended, _Keyed(ids, count, scope, reason), limit)
        finally:
            self._forget(case, ended)
        if row is not None:
            self._recording.write(row, self.lost)

    async def _prompt(self, inbound: Inbound) -> tuple[Prompt, list[Rank]]:
        if self._live is not None:
            return await self._live.prompt(inbound)
        return await self._tokens.prompt(inbound.path, inbound.body), []

    def _scope(self, inbound: Inbound) -> str:
        """A hash for whoever may share: the cache salt, and any other model than the first's."""
        model, scope = inbound.body.get("model"), scope_of(inbound)
        if self._model is None:
            self._model = model
        other = model if isinstance(model, str) and model != self._model else ""
        if scope == Scope() and not other:
            return ""
        return self._hashed.name(f"{scope.id}\0{other}")

    def _row(self, case: Case, ended: Ended, keyed: _Keyed, limit: int) -> Row | None:
        """Its line; None, and counted, where it says nothing of a prompt that was computed."""
        usage, ids, count = ended.usage, keyed.ids, keyed.tokens
        if ended.status not in (0, 200, CLIENT_CLOSED):
            if ended.status > 0:  # else it was counted where it was lost
                self.lost[ended.fault or f"status {ended.status}"] += 1
            return None
        if keyed.reason or not ids:
            count = usage.prompt_tokens
            if not 0 < count <= TOKENS_MAX:
                self.lost[keyed.reason or "empty prompt"] += 1
                return None
            start = secrets.randbits(62)
            ids = tuple(range(start, start + -(-count // self._block_tokens)))
        # Decided after its first token, it was decided in a state that it had changed itself.
        in_time = case.decision is not None and not 0 <= ended.ttft_s < case.late_s
        output, source = _output(usage, ended.output_tokens, limit)
        engine, told = case.engine, case.told
        return Row(
            timestamp=round(case.arrival_s * 1000, 3),
            input_length=count,
            output_length=output,
            hash_ids=ids,
            scope=keyed.scope,
            observed=Observed(
                ttft_s=_micro(ended.ttft_s),
                e2e_s=_micro(ended.e2e_s),
                cached_tokens=usage.cached_tokens,
                output=source,
                engine=engine,
                told=told,
                unkeyed=keyed.reason,
                whole=ended.whole and ended.status != CLIENT_CLOSED,
                decided=decided(case.decision, engine) if case.decision and in_time else None,
            ),
        )

    async def _served(self, case: Case, ended: Ended) -> None:
        """Find out who served it, and what says so."""
        live = self._live
        if ended.engine:
            case.engine = live.named(ended.engine) if live is not None else ended.engine
            case.told = ended.told
        elif live is not None and case.decision is not None and ended.status in (0, 200):
            case.engine = live.served_by(case.decision)
            if not case.engine:
                await asyncio.sleep(_EVENTS_S)
                case.engine = live.served_by(case.decision)
            case.told = "events" if case.engine else ""

    def _forget(self, case: Case, ended: Ended) -> None:
        live, decision = self._live, case.decision
        if live is None or decision is None:
            return
        at = case.at if ended.status == 200 and ended.whole else None
        live.over(decision, at, ended.usage.cached_tokens, ended.ttft_s)


def _output(
    usage: Usage, events: int, limit: int
) -> tuple[int, Literal["usage", "events", "limit", "none"]]:
    if 0 <= usage.completion_tokens <= TOKENS_MAX:
        return usage.completion_tokens, "usage"
    if events >= 0:
        return min(events, TOKENS_MAX), "events"
    return (limit, "limit") if limit > 0 else (1, "none")


def _limit(body: Mapping[str, object]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= TOKENS_MAX:
            return value
    return -1


def _micro(seconds: float) -> float:
    return round(seconds, 6) if seconds >= 0 else -1.0
