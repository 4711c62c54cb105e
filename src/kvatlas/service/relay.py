"""One request on its way: to the first target of its route that takes it, and back to its client.

The engine's bytes go to the client as they arrive, in the callback that read them. What may go
wrong is told apart by what the client has seen: nothing yet (the next target, or an error
envelope), or a part of the answer (an error event where one fits, then a broken connection; never
a silent end, never a second try).
"""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial

import msgspec

from kvatlas.errors import EngineError
from kvatlas.service.answer import AnswerReader
from kvatlas.service.body import Usage
from kvatlas.service.first_half import FirstEnd, first_half
from kvatlas.service.http import HOP_BY_HOP, Headers, Request, connection_tokens, envelope, header
from kvatlas.service.http_client import (
    ConnectError,
    HttpClient,
    Lease,
    ResponseError,
    SilenceError,
    origin_of,
)
from kvatlas.service.http_reply import JSON, Reply
from kvatlas.service.isolation import CREDENTIALS
from kvatlas.service.ladder import Ended, Ladder, Silence, within
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.pair_protocols import CONCURRENT, Meeting, Prefilled, engine_id_of, meeting
from kvatlas.service.steer import Outcome, Route, Steer, Target

CLIENT_CLOSED = 499  # nginx's number for a client that left before its answer was complete

#: The body of a 503 that is not shown to anybody.
REFUSAL_BYTES_MAX = 1 << 20

_TRIED_SHOWN = 12  # workers named in an error

# Never passed to the engine: of one connection, re-made by us, or ours. Without Accept-Encoding
# the engine answers in the clear, so that usage can be read.
_NOT_TO_ENGINE = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding"}
_NOT_TO_CLIENT = HOP_BY_HOP | {b"content-length", b"x-request-id"}
#: How headers of our own begin.
OURS = b"x-kvatlas-"


class _Head(msgspec.Struct, frozen=True):
    """Of an answer that has begun at its engine."""

    status: int
    headers: Headers
    lease: Lease


class Relay:
    """Carries one request along one route. ``body`` is what the engine gets.

    ``reads_usage``: the endpoint is one whose answers report usage. ``withhold``: the usage event
    of the stream was asked for by us, not by the client. ``credentials``: what engines are shown
    instead of the client's; None: just those.
    """

    def __init__(
        self,
        request: Request,
        reply: Reply,
        route: Route,
        *,
        body: bytes,
        client: HttpClient,
        steer: Steer,
        metrics: GatewayMetrics,
        started_s: float,
        ends_at_s: float,
        reads_usage: bool,
        streams: bool,
        withhold: bool,
        prefill_timeout_s: float,
        credentials: Headers | None = None,
    ) -> None:
        assert route.targets, "a route has at least one target"
        self.status = 0
        self._request = request
        self._reply = reply
        self._route = route
        self._body = body
        self._client = client
        self._steer = steer
        self._metrics = metrics
        self._started_s = started_s
        self._reads_usage = reads_usage
        self._streams = streams
        self._withhold = withhold
        self._prefill_timeout_s = prefill_timeout_s
        self._credentials = credentials
        self._prefilled: Prefilled | None = None  # the first half is done, the second is not
        self._prefilled_by = ""
        self._ends_at_s = ends_at_s
        self._ladder = Ladder(route, steer, metrics, ends_at_s)
        self._target = route.targets[0]
        self._tier_tokens: tuple[int, ...] = ()  # from where the hit was to be taken
        self._sent_s = started_s
        self._silence = Silence()  # of the exchange under way
        self._held: _Head | None = None  # of an answer of which no byte has come yet
        self._deaf = False  # what still comes is for nobody: the try is given up
        self._first: Target | None = None  # of halves that run at once
        self._refused = 0  # a status of an engine while another target is left: not for the client
        self._refused_bytes = 0
        self._ttft_s = -1.0
        self._answer = AnswerReader()
        self._until_eof = False  # the engine's framing does not tell whether all came
        self._complete = False

    async def run(self) -> None:
        """Calls `Steer.finished` exactly once, whatever happens. Cancelled: the client left."""
        try:
            async with within(self._ends_at_s):
                await self._try_targets()
        except TimeoutError:
            self._late()
        except asyncio.CancelledError:
            self.status = CLIENT_CLOSED
            raise
        except Exception:
            self.status = 500
            raise
        finally:
            self._finish()

    async def _try_targets(self) -> None:
        ladder, ended = self._ladder, Ended("refused", 503)
        target = ladder.first()
        while target is not None:
            self._target = target
            if target.half != "decode":
                self._first, self._prefilled, self._prefilled_by = None, None, ""
            self._sent(target)
            told = await self._attempt(target)
            if told is None:
                return
            at = self._target if told.half == "decode" else target
            ended, target = told, ladder.next(at, told)
            if target is not None:
                self._metrics.left(self._target.worker, ended.status)
        self._nobody_left(ended)

    def _nobody_left(self, ended: Ended) -> None:
        tried = ", ".join(self._ladder.tried[-_TRIED_SHOWN:])
        match ended.reason:
            case "connect":  # any other may have gone away meanwhile
                text = f"no engine could be reached (tried {tried}): {ended.error}"
                self._fail(502, text, "engine_unreachable")
            case "timeout":
                self._fail(504, f"no engine answered (tried {tried})", "engine_timeout")
            case _:
                self._fail(503, f"every engine refused it (tried {tried})", "engine_refused")

    def _sent(self, target: Target) -> None:
        self._refused, self._held, self._deaf = 0, None, False
        self._steer.sent(self._route, target)
        self._sent_s = time.perf_counter()
        self._metrics.sent(target.worker, target.expected_hit_tokens)
        if target.half != "decode":
            self._tier_tokens = target.tier_tokens

    async def _attempt(self, target: Target) -> Ended | None:
        """None: the client was answered, one way or another."""
        if target.half == "prefill":
            if target.pairing in CONCURRENT:
                return await self._both_halves(target)
            return await self._first_of_two(target)
        body = self._body
        if target.half == "decode":
            assert self._prefilled is not None, "the first half comes first"
            body = Meeting("nixl").decode(body, self._prefilled.params or {})
        return await self._exchange(target, body, self._ladder.patience_s(target))

    async def _exchange(self, target: Target, body: bytes, silence_s: float) -> Ended | None:
        request = self._request
        # Of a stream it is known when its first byte is due. Any other answer comes when all of it
        # is done: as long as its engine does anything it is waited for.
        quiet_s = None if self._streams else partial(self._steer.quiet_s, target)
        try:
            async with Silence(quiet_s) as self._silence:
                self._silence.limit(silence_s)
                await self._client.exchange(
                    request.method,
                    origin_of(target.url),
                    request.target,
                    self._engine_headers(target),
                    body=body,
                    sink=self,
                    connect_s=self._ladder.patience_s(target),
                )
        except TimeoutError:
            return Ended("timeout", 504, "its first byte did not come", target.half)
        except ConnectError as failure:
            self._steer.unreached(self._route, target)
            return Ended("connect", 502, str(failure), target.half)
        except ResponseError as failure:
            if not self._refused:
                if target.half and not self._reply.started:
                    late = isinstance(failure, SilenceError)
                    reason, status = ("timeout", 504) if late else ("failed", 502)
                    return Ended(reason, status, str(failure), target.half)
                self._break_off(failure)
                return None
        if not self._refused:
            return None
        reason = "refused" if self._refused == 503 else "failed"
        return Ended(reason, self._refused, "", target.half)

    # Pairs

    async def _first_of_two(self, target: Target) -> Ended | None:
        """One half after the other: done, its state waits for the second."""
        body = Meeting("nixl").prefill(self._body, self._request.path)
        return self._first_over(target, await self._ask_first(target, body, hands_on=True))

    async def _ask_first(self, target: Target, body: bytes, *, hands_on: bool) -> FirstEnd:
        return await first_half(
            self._client,
            target.url,
            self._request.target,
            self._engine_headers(target),
            body,
            timeout_s=min(self._prefill_timeout_s, self._ladder.patience_s(target)),
            hands_on=hands_on,
        )

    def _first_over(self, target: Target, end: FirstEnd) -> Ended | None:
        """None: it was the client's own fault, and was told."""
        if end.reason == "connect":
            self._steer.unreached(self._route, target)
        if end.shown is not None:
            self.status, self._prefilled_by = end.status, ""
            headers = self._client_headers(end.shown.headers)
            self._reply.send(end.status, headers, b"".join(end.shown.parts))
            return None
        if not end.reason:
            self._prefilled, self._prefilled_by = end.done, target.worker
            took_s, usage = time.perf_counter() - self._started_s, end.done.usage
            if usage.violation:
                self._metrics.used(target.worker, usage)
            cached_tokens = usage.believed.cached_tokens
            self._ladder.resumed(target, cached_tokens, time.perf_counter() - self._sent_s)
            self._steer.prefilled(self._route, target, cached_tokens, took_s)
        return Ended(end.reason, end.status, end.error, "prefill")

    async def _both_halves(self, target: Target) -> Ended | None:
        """Both at once: whichever fails before the client saw a byte ends the other."""
        engine_id = ""
        if target.pairing == "mooncake":
            try:
                engine_id = await self._engine_id(target)
            except EngineError as error:
                return Ended("bootstrap", 502, str(error), "prefill")
        seconds = self._steer.decoders(self._route, target)
        if not seconds:
            return Ended("down", 503, "", "decode")
        meet, second = meeting(target.pairing, target.bootstrap, engine_id), seconds[0]
        to_first = meet.prefill(self._body, self._request.path)
        first = asyncio.create_task(self._ask_first(target, to_first, hands_on=False))
        self._sent(second)
        self._first, self._target, self._prefilled_by = target, second, target.worker
        to_second = meet.decode(self._body, {})
        other = asyncio.create_task(self._exchange(second, to_second, math.inf))
        status = CLIENT_CLOSED
        try:
            await asyncio.wait({first, other}, return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                end = first.result()
                status = end.status
                if end.reason and not self._reply.started and not other.done():
                    return await self._without_second(target, end, other)
                if not end.reason:
                    self._first_over(target, end)
                    if not other.done():
                        self._hand_off_began(second)
            ended = await other
            if ended is None and not first.done():
                status = 200  # the second half has its state
            return ended
        finally:
            self._metrics.left(target.worker, status)
            for task in (first, other):
                task.cancel()
            await asyncio.gather(first, other, return_exceptions=True)

    def _hand_off_began(self, second: Target) -> None:
        """The first half is done: from now on it is the second that is waited for."""
        self._ladder.rung = "decode"
        if not self._reply.started:
            self._silence.limit(self._ladder.patience_s(second))

    async def _without_second(
        self, target: Target, end: FirstEnd, other: asyncio.Task[Ended | None]
    ) -> Ended | None:
        self._deaf = True
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        return self._first_over(target, end)

    async def _engine_id(self, target: Target) -> str:
        """Mooncake's name of the prefill engine: another one after each of its starts."""
        url = f"{target.bootstrap}/query"
        told = await self._client.get_json(url, timeout_s=self._client.connect_timeout_s)
        return engine_id_of(told, url)

    def _engine_headers(self, target: Target) -> Headers:
        told = (*target.headers, *self._route.headers)
        added = [(name.encode(), value.encode()) for name, value in told]
        added.append((b"x-request-id", self._route.id.encode()))
        replaced = {name.lower() for name, _ in added}
        if self._credentials is not None:
            added += self._credentials
            replaced |= CREDENTIALS
        dropped = connection_tokens(self._request.headers)
        headers = [
            pair
            for pair in self._request.headers
            if pair[0] not in _NOT_TO_ENGINE
            and pair[0] not in replaced
            and pair[0] not in dropped
            and not pair[0].startswith(OURS)
        ]
        return headers + added

    # Sink: what the engine says

    def on_head(self, status: int, headers: Headers, lease: Lease) -> None:
        failed = status == 503 or (status >= 500 and self._target.half == "decode")
        if failed and self._ladder.goes_on():
            self._refused = status
            return
        lease.on_end = self.on_end
        self._held = _Head(status, headers, lease)

    def _open(self) -> bool:
        """The first bytes came, or the end: now the client gets the head, too. Engines send theirs
        before they have begun to compute. False: it came too late, the next rung is taken."""
        if self._deaf or self._silence.expired():
            return False
        head, self._held = self._held, None
        if head is None:
            return self._reply.started
        self._silence.heard()
        self.status = head.status
        length = header(head.headers, b"content-length")
        self._until_eof = not length and not header(head.headers, b"transfer-encoding")
        if self._reads_usage:
            self._answer.head(head.status, head.headers, withhold=self._withhold)
        reply, lease = self._reply, head.lease
        whole = bool(length) and not self._answer.withholds
        told = self._client_headers(head.headers)
        reply.start(head.status, told, int(length) if whole else None)
        reply.on_pause, reply.on_resume = lease.pause, lease.resume
        if reply.paused:  # the client has not read its previous answer yet
            lease.pause()
        return True

    def on_data(self, data: bytes) -> None:
        if self._refused:
            self._refused_bytes += len(data)
            if self._refused_bytes > REFUSAL_BYTES_MAX:
                raise ResponseError("an endless 503", started=True)
            return
        if not self._open():
            return
        if self._ttft_s < 0:
            self._ttft_s = time.perf_counter() - self._started_s
            if self.status == 200:
                self._metrics.first_byte(self._ttft_s)
                self._steer.first_token(self._route, self._answer.first_token_s(self._ttft_s))
        self._reply.write(self._answer.feed(data))

    def _client_headers(self, headers: Headers) -> Headers:
        dropped = connection_tokens(headers)
        kept = []
        for pair in headers:
            name = pair[0].lower()
            if name not in _NOT_TO_CLIENT and name not in dropped and not name.startswith(OURS):
                kept.append(pair)
        return kept + self._route_headers()

    def _route_headers(self) -> Headers:
        headers = route_headers(self._route, self._target)
        if self._prefilled_by:
            headers.append((b"x-kvatlas-prefilled-by", self._prefilled_by.encode()))
        return headers

    def on_end(self) -> None:
        """The engine's answer is complete: pass on what was held back, and read the usage."""
        if not self._open():
            return
        answer = self._answer
        rest = answer.finish()
        if answer.truncated or (self._until_eof and not answer.says_end):
            raise ResponseError("the engine's answer ended in the middle", started=True)
        self._complete = True
        self._reply.end(rest)

    # The end, one way or another

    def _break_off(self, failure: ResponseError) -> None:
        """The engine failed after it had the request."""
        silent = isinstance(failure, SilenceError)
        status = 504 if silent else 502
        code = "engine_timeout" if silent else "engine_failed"
        self._fail(status, f"engine {self._target.worker}: {failure}", code)

    def _late(self) -> None:
        """The deadline ended, and with it all that ran for this request."""
        if not self._complete:
            target = self._target
            if self._ladder.rung == "prefill":
                target, self._prefilled_by = self._first or target, ""
            text, headers = self._ladder.late(target)
            self._fail(504, text, "deadline_exceeded", headers)

    def _fail(self, status: int, text: str, code: str, headers: Headers | None = None) -> None:
        """An error: as the answer, else as an event of it where one fits, and a broken end."""
        self.status = status
        body = envelope(text, status=status, code=code)
        if not self._reply.started:
            self._reply.send(status, [JSON, *(headers or []), *self._route_headers()], body)
            return
        if self._answer.at_boundary:
            self._reply.write(b"data: " + body + b"\n\n")
        self._reply.abort()

    def _finish(self) -> None:
        target, e2e_s = self._target, time.perf_counter() - self._started_s
        worker, ttft_s = target.worker, self._answer.first_token_s(self._ttft_s)
        told = self._answer.usage
        usage = self._answer.believed if self._complete else Usage()
        if self._prefilled_by:
            # All that was handed over counts as cached to the second half: what the first half
            # had is what was reused.
            first = self._prefilled.usage.believed if self._prefilled is not None else Usage()
            usage = msgspec.structs.replace(usage, cached_tokens=first.cached_tokens)
            told = usage if told is not None and not told.violation else told
        elif self.status == 200:
            took_s = self._started_s + ttft_s - self._sent_s if ttft_s >= 0 else 0.0
            self._ladder.resumed(target, usage.cached_tokens, took_s)
        self._steer.finished(
            self._route,
            Outcome(
                target=target,
                status=self.status,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                ttft_s=ttft_s,
                e2e_s=e2e_s,
                prefilled_by=self._prefilled_by,
            ),
        )
        self._metrics.left(worker, self.status)
        if self._complete and self._prefilled_by:
            self._metrics.paired(self._prefilled_by, worker)
        if self._complete and self.status == 200 and self._reads_usage:
            self._metrics.used(worker, told, self._tier_tokens, self._route.tenant_class)


def route_headers(route: Route, target: Target | None) -> Headers:
    """What a client is told of its route (docs: the gateway's headers). ``target``: who answers;
    None: nobody whom we know."""
    headers = [(b"x-request-id", route.id.encode())]
    if target is not None:
        headers.append((b"x-kvatlas-worker", target.worker.encode()))
        headers.append((b"x-kvatlas-expected-hit-tokens", b"%d" % target.expected_hit_tokens))
    if route.fallbacks:
        left = ", ".join(f"{step.rung}: {step.reason}" for step in route.fallbacks)
        headers.append((b"x-kvatlas-fallback", left.encode()))
    return headers
