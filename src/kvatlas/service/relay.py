"""One request on its way: to the first target of its route that takes it, and back to its client.

The engine's bytes go to the client as they arrive, in the callback that read them. What may go
wrong is told apart by what the client has seen: nothing yet (the next target, or an error
envelope), or a part of the answer (an error event where one fits, then a broken connection; never
a silent end, never a second try).
"""

from __future__ import annotations

import asyncio
import time

from kvatlas.service.body import Usage, parse_answer, usage_of
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
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.sse import EventStream
from kvatlas.service.steer import Outcome, Route, Steer, Target

CLIENT_CLOSED = 499  # nginx's number for a client that left before its answer was complete

#: Whole answers up to this size are read for their usage; longer ones count as not reporting it.
ANSWER_BYTES_MAX = 8 << 20

#: The body of a 503 that is not shown to anybody.
REFUSAL_BYTES_MAX = 1 << 20

_TRIED_SHOWN = 12  # workers named in an error

# Never passed to the engine: of one connection, re-made by us, or ours. Without Accept-Encoding
# the engine answers in the clear, so that usage can be read.
_NOT_TO_ENGINE = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding"}
_NOT_TO_CLIENT = HOP_BY_HOP | {b"content-length", b"x-request-id"}
_OURS = b"x-kvatlas-"


class Relay:
    """Carries one request along one route. ``body`` is what the engine gets.

    ``reads_usage``: the endpoint is one whose answers report usage. ``withhold``: the usage event
    of the stream was asked for by us, not by the client.
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
        reads_usage: bool,
        withhold: bool,
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
        self._withhold = withhold
        self._target = route.targets[0]
        self._more_targets = False
        self._refused = False  # a 503 while another target is left: not for the client
        self._refused_bytes = 0
        self._ttft_s = -1.0
        self._events: EventStream | None = None
        self._answer: list[bytes] | None = None  # of a whole JSON answer
        self._answer_bytes = 0
        self._until_eof = False  # the engine's framing does not tell whether all came
        self._usage: Usage | None = None
        self._complete = False

    async def run(self) -> None:
        """Calls `Steer.finished` exactly once, whatever happens. Cancelled: the client left."""
        try:
            await self._try_targets()
        except asyncio.CancelledError:
            self.status = CLIENT_CLOSED
            raise
        except Exception:
            self.status = 500
            raise
        finally:
            self._finish()

    async def _try_targets(self) -> None:
        targets = list(self._route.targets)
        error: ConnectError | None = None
        index = 0
        while index < len(targets):
            self._target = target = targets[index]
            self._more_targets = index + 1 < len(targets) or self._steer.left(self._route)
            self._refused = False
            if index:
                reason = "connect" if error is not None else "refused"
                self._metrics.left(targets[index - 1].worker, 502 if error is not None else 503)
                self._metrics.retried(targets[index - 1].worker, reason)
            self._steer.sent(self._route, target)
            self._metrics.sent(target.worker, target.expected_hit_tokens)
            error = None
            try:
                await self._exchange(target)
            except ConnectError as failure:
                self._steer.unreached(self._route, target)
                error = failure
            except ResponseError as failure:
                if not self._refused:
                    self._break_off(failure)
                    return
            if error is None and not self._refused:
                return
            index += 1
            if index == len(targets) and self._more_targets:
                targets += self._steer.more(self._route)
        tried = ", ".join(target.worker for target in targets[-_TRIED_SHOWN:])
        if error is None:  # the one that was left went away meanwhile
            self._fail(503, f"every engine refused it (tried {tried})", "engine_refused")
            return
        self._fail(
            502, f"no engine could be reached (tried {tried}): {error}", "engine_unreachable"
        )

    async def _exchange(self, target: Target) -> None:
        request = self._request
        await self._client.exchange(
            request.method,
            origin_of(target.url),
            request.target,
            self._engine_headers(target),
            body=self._body,
            sink=self,
        )

    def _engine_headers(self, target: Target) -> Headers:
        added = [(name.encode(), value.encode()) for name, value in target.headers]
        added.append((b"x-request-id", self._route.id.encode()))
        replaced = {name.lower() for name, _ in added}
        dropped = connection_tokens(self._request.headers)
        headers = [
            pair
            for pair in self._request.headers
            if pair[0] not in _NOT_TO_ENGINE
            and pair[0] not in replaced
            and pair[0] not in dropped
            and not pair[0].startswith(_OURS)
        ]
        return headers + added

    # Sink: what the engine says

    def on_head(self, status: int, headers: Headers, lease: Lease) -> None:
        if status == 503 and self._more_targets:
            self._refused = True
            return
        self.status = status
        length = header(headers, b"content-length")
        self._until_eof = not length and not header(headers, b"transfer-encoding")
        if self._reads_usage and status == 200 and not header(headers, b"content-encoding"):
            kind = header(headers, b"content-type").lower()
            if kind.startswith(b"text/event-stream"):
                self._events = EventStream(withhold=self._withhold)
            elif kind.startswith(b"application/json"):
                self._answer = []
        reply = self._reply
        lease.on_end = self.on_end
        whole = bool(length) and not (self._events is not None and self._withhold)
        reply.start(status, self._client_headers(headers), int(length) if whole else None)
        reply.on_pause, reply.on_resume = lease.pause, lease.resume
        if reply.paused:  # the client has not read its previous answer yet
            lease.pause()

    def on_data(self, data: bytes) -> None:
        if self._refused:
            self._refused_bytes += len(data)
            if self._refused_bytes > REFUSAL_BYTES_MAX:
                raise ResponseError("an endless 503", started=True)
            return
        if self._ttft_s < 0:
            self._ttft_s = time.perf_counter() - self._started_s
            if self.status == 200:
                self._metrics.first_byte(self._ttft_s)
                self._steer.first_token(self._route, self._ttft_s)
        if self._events is not None:
            data = self._events.feed(data)
        elif self._answer is not None:
            self._answer.append(data)
            self._answer_bytes += len(data)
            if self._answer_bytes > ANSWER_BYTES_MAX:
                self._answer = None
        self._reply.write(data)

    def _client_headers(self, headers: Headers) -> Headers:
        dropped = connection_tokens(headers)
        kept = []
        for pair in headers:
            name = pair[0].lower()
            if name not in _NOT_TO_CLIENT and name not in dropped and not name.startswith(_OURS):
                kept.append(pair)
        return kept + route_headers(self._route, self._target)

    def on_end(self) -> None:
        """The engine's answer is complete: pass on what was held back, and read the usage."""
        rest, whole = b"", True
        if self._events is not None:
            rest = self._events.finish()
            whole = not self._events.truncated and (self._events.done or not self._until_eof)
            self._usage = self._events.usage
        elif self._answer is not None:
            answer = parse_answer(b"".join(self._answer))
            whole = answer is not None or not self._until_eof
            self._usage = usage_of(answer) if answer is not None else None
        if not whole:
            raise ResponseError("the engine's answer ended in the middle", started=True)
        self._complete = True
        self._reply.end(rest)

    # The end, one way or another

    def _break_off(self, failure: ResponseError) -> None:
        """The engine failed after it had the request."""
        silent = isinstance(failure, SilenceError)
        status = 504 if silent else 502
        code = "engine_timeout" if silent else "engine_failed"
        if not self._reply.started:
            self._fail(status, f"engine {self._target.worker}: {failure}", code)
            return
        self.status = status
        if self._events is not None and self._events.at_boundary:
            text = f"engine {self._target.worker}: {failure}"
            self._reply.write(b"data: " + envelope(text, status=status, code=code) + b"\n\n")
        self._reply.abort()

    def _fail(self, status: int, text: str, code: str) -> None:
        self.status = status
        headers = [JSON, *route_headers(self._route, self._target)]
        self._reply.send(status, headers, envelope(text, status=status, code=code))

    def _finish(self) -> None:
        worker, e2e_s = self._target.worker, time.perf_counter() - self._started_s
        told = self._usage
        believed = told is not None and not told.violation and self._complete
        usage = told if told is not None and believed else Usage()
        self._steer.finished(
            self._route,
            Outcome(
                target=self._target,
                status=self.status,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                ttft_s=self._ttft_s,
                e2e_s=e2e_s,
            ),
        )
        self._metrics.left(worker, self.status)
        if self._complete and self.status == 200 and self._reads_usage:
            self._metrics.used(worker, told)


def route_headers(route: Route, target: Target) -> Headers:
    """What a client is told of its route (docs: the gateway's headers)."""
    headers = [
        (b"x-request-id", route.id.encode()),
        (b"x-kvatlas-worker", target.worker.encode()),
        (b"x-kvatlas-expected-hit-tokens", b"%d" % target.expected_hit_tokens),
    ]
    if route.fallback:
        headers.append((b"x-kvatlas-fallback", route.fallback.encode()))
    return headers
