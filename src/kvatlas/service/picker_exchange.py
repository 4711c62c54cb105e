"""One HTTP request on its way through a proxy that asks us: what is picked, and what came of it.

The proxy sends what it sees, message by message; each gets its replies. The same reading of the
request, the same `Steer` and the same figures as for one that the gateway relays itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from kvatlas.config import GatewayConfig
from kvatlas.core.ladder import Fallback
from kvatlas.errors import RequestError
from kvatlas.service import isolation, logs
from kvatlas.service import picker_wire as wire
from kvatlas.service.answer import AnswerReader
from kvatlas.service.body import Usage
from kvatlas.service.gateway import JSON_PATHS, USAGE_PATHS, inbound_of, request_id_of, routed
from kvatlas.service.http import Headers, Limits, Request, header
from kvatlas.service.ladder import fell
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.relay import CLIENT_CLOSED, OURS, route_headers
from kvatlas.service.steer import Outcome, Route, Steer, Target, endpoint_of
from kvatlas.service.tenants import Tenants


class ProtocolError(Exception):
    """The proxy sent what does not fit: its configuration is at fault, or it speaks another
    protocol. The stream ends with the text, and the proxy's own failure mode decides."""


class Exchange:
    """``take`` each message of the stream, and ``close`` at its end, whatever ended it.

    ``reserve`` is asked for each piece of a body before it is kept; it raises where there is no
    room.
    """

    def __init__(
        self,
        config: GatewayConfig,
        steer: Steer,
        metrics: GatewayMetrics,
        limits: Limits,
        reserve: Callable[[int], None],
        *,
        tenants: Tenants | None = None,
    ) -> None:
        self.done = False  # nothing more is expected
        self.body_bytes = 0  # of the request, held here
        self.asked = False  # the request has been answered: picked, or refused
        self.answering = False  # the engine's answer has begun
        self._config = config
        self._steer = steer
        self._metrics = metrics
        self._limits = limits
        self._reserve = reserve
        self._tenants = tenants
        self._picked = False  # the proxy was told where the request goes
        self._started_s = self._sent_s = time.perf_counter()
        self._ends_at_s = math.inf  # of its deadline
        self._ends_first = False  # sooner than the engine's silence
        self._modes = (wire.FULL_DUPLEX, wire.FULL_DUPLEX)
        self._headers: Headers | None = None
        self._body: list[bytes] = []
        self._among: frozenset[str] | None = None
        self._id = ""
        self._endpoint = ""
        self._reads_usage = False
        self._withhold = False
        self._route: Route | None = None
        self._target: Target | None = None
        self._status = CLIENT_CLOSED
        self._ttft_s = -1.0
        self._answer = AnswerReader()
        self._bodiless = False  # the request has no body at all
        self._foreign = False  # answered by nobody whom we picked
        self._ended = self._complete = False

    async def take(self, message: wire.Message) -> list[wire.Reply]:
        """Raises ProtocolError for what makes no sense here."""
        kind = message.WhichOneof("request")
        if self._headers is None and kind != "request_headers":
            raise ProtocolError(f"{kind or 'an empty message'} came before request_headers")
        match kind:
            case "request_headers":
                return await self._request_headers(message)
            case "request_body":
                return await self._request_body(message.request_body)
            case "request_trailers":
                replies = [] if self.asked else await self._pick(end=False)
                return replies if self.done else [*replies, wire.trailers_reply(kind)]
            case "response_headers":
                return self._response_headers(message)
            case "response_body":
                return self._response_body(message.response_body)
            case _:
                rest = self._response_end()
                self.done = True
                return [*self._duplex(rest), wire.trailers_reply("response_trailers")]

    def time_left_s(self, idle_timeout_s: float) -> float:
        """How long the next message may take: a request gets what its size needs, an engine may
        be silent for ``idle_timeout_s``, and nothing lasts beyond the request's deadline."""
        if self.asked:
            left_s = self._ends_at_s - time.perf_counter()
            self._ends_first = left_s <= idle_timeout_s
            return min(idle_timeout_s, max(0.0, left_s))
        limits = self._limits
        allowed_s = limits.body_timeout_s + self.body_bytes / limits.body_bytes_per_s_min
        return self._started_s + allowed_s - time.perf_counter()

    def late(self) -> wire.Reply | None:
        """`time_left_s` is over. None where the client has seen a part of an answer already."""
        if not self.asked:
            text = "the request did not arrive in time"
            return self._refuse(RequestError(text, status=408, code="timeout"))
        self._status, self.done = 504, True
        worker, now = self._target.worker if self._target else "?", time.perf_counter()
        if self._ends_first and self._route is not None:
            step = Fallback("engine", "deadline", "error", worker, now - self._sent_s)
            fell(self._route, self._metrics, step)
        if self.answering:
            return None
        if self._ends_first:
            text = f"the request's deadline ended at engine {worker}"
            return self._refuse(RequestError(text, status=504, code="deadline_exceeded"))
        text = f"engine {worker}: no answer in time"
        return self._refuse(RequestError(text, status=504, code="engine_timeout"))

    def close(self, *, fault: bool = False) -> None:
        """Tells what became of it, once. ``fault``: ours; else who left before the end was the
        client, or the proxy for it."""
        if self._headers is None:
            return
        if not self.done:
            self._status = 500 if fault else CLIENT_CLOSED
        e2e_s = time.perf_counter() - self._started_s
        self._metrics.answered(self._endpoint, self._status, e2e_s)
        route, target = self._route, self._target
        if route is None or target is None:
            return
        self._route = None
        status = 502 if self._foreign else self._status
        learns = self._complete and not self._foreign
        usage = self._answer.believed if learns else Usage()
        outcome = Outcome(
            target=target,
            status=status,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_s=self._answer.first_token_s(self._ttft_s),
            e2e_s=e2e_s,
        )
        self._steer.finished(route, outcome)
        self._metrics.left(target.worker, status)
        if learns and status == 200 and self._reads_usage:
            told = self._answer.usage
            self._metrics.used(target.worker, told, target.tier_tokens, route.tenant_class)

    # -- the request ----------------------------------------------------------------------------

    async def _request_headers(self, message: wire.Message) -> list[wire.Reply]:
        if self._headers is not None:
            raise ProtocolError("request_headers came twice")
        if message.observability_mode:
            raise ProtocolError("observability_mode is on: nothing could be picked")
        self._modes = wire.modes(message)
        self._headers = wire.headers_of(message.request_headers)
        self._among = wire.subset_of(message)
        request = wire.request_of(self._headers, b"")
        self._id = request_id_of(request)
        logs.REQUEST_ID.set(self._id)
        self._endpoint = request.path if request.path in JSON_PATHS else "other"
        if message.request_headers.end_of_stream:
            self._bodiless = True
            return await self._pick(end=True)
        mode = self._modes[0]
        if mode not in (wire.FULL_DUPLEX, wire.BUFFERED):
            raise ProtocolError(
                f"request_body_mode is {wire.mode_name(mode)}: set FULL_DUPLEX_STREAMED or "
                "BUFFERED, for the prompt decides where a request goes"
            )
        length = request.header("content-length")
        if length.isdecimal() and int(length[:20]) > self._limits.body_bytes_max:
            return [self._too_large()]
        return [wire.headers_reply("request_headers")] if mode == wire.BUFFERED else []

    async def _request_body(self, piece: Any) -> list[wire.Reply]:
        if self.asked:
            raise ProtocolError("request_body came after its end")
        self._reserve(len(piece.body))
        self.body_bytes += len(piece.body)
        if self.body_bytes > self._limits.body_bytes_max:
            return [self._too_large()]
        self._body.append(piece.body)
        return await self._pick(end=True) if piece.end_of_stream else []

    def _too_large(self) -> wire.Reply:
        text = f"the request body is over {self._limits.body_bytes_max} bytes"
        return self._refuse(RequestError(text, status=413, code="body_too_large"))

    def turn_away(self, why: str) -> wire.Reply | None:
        """What cannot be done as it should be: where tenants are told apart, a proxy must not send
        it on all the same. None: that is the proxy's to decide, or it is too late."""
        if self._tenants is None or self._picked or self.done:
            return None
        return self._refuse(RequestError(why, status=503, code="not_checked"))

    def _refuse(self, error: RequestError) -> wire.Reply:
        self.asked = self.done = True
        self._body.clear()
        self._status = error.status
        return wire.refusal(error, self._id)

    async def _pick(self, *, end: bool) -> list[wire.Reply]:
        """The request is complete; ``end``: no trailers follow it."""
        self.asked = True
        raw = b"".join(self._body)
        self._body.clear()
        assert self._headers is not None
        request = wire.request_of(self._headers, raw)
        try:
            inbound = inbound_of(request, self._id, self._config, self._tenants)
            self._ends_at_s = self._started_s + inbound.deadline_s
            inbound.among = self._among
            inbound.whole = "proxy"  # it carries a request to one engine
            # A usage event is asked for only where it can be kept from a client that did not ask.
            self._reads_usage = request.path in USAGE_PATHS and self._modes[1] != 0
            route, body, self._withhold = await routed(
                request,
                inbound,
                self._steer,
                self._metrics,
                started_s=self._started_s,
                usage=self._reads_usage,
            )
        except RequestError as error:
            return [self._refuse(error)]
        self._route = route
        self._send_to(route.targets[0])
        replies = self._replies(request, body, route, end=end)
        self._picked = True
        return replies

    def _send_to(self, target: Target) -> None:
        assert self._route is not None
        self._target, self._sent_s = target, time.perf_counter()
        self._steer.sent(self._route, target)
        self._metrics.sent(target.worker, target.expected_hit_tokens)

    def _replies(
        self, request: Request, body: bytes, route: Route, *, end: bool
    ) -> list[wire.Reply]:
        endpoints = ",".join(_addresses(route))
        headers: Headers = [(wire.DESTINATION.encode(), endpoints.encode())]
        told = (*route.targets[0].headers, *route.headers)
        headers += [(n.encode(), v.encode()) for n, v in told]
        if request.header("x-request-id") != route.id:
            headers.append((b"x-request-id", route.id.encode()))
        # Without Accept-Encoding the engine answers in the clear, so that usage can be read.
        dropped = {n for n, _ in request.headers if n.startswith(OURS) or n == b"accept-encoding"}
        if self._tenants is not None:
            headers += self._tenants.for_engines
            dropped |= isolation.CREDENTIALS - {name for name, _ in self._tenants.for_engines}
        removed = sorted(name.decode("latin-1") for name in dropped)
        altered = body is not request.body
        if altered and request.header("content-length"):  # Envoy compares the two
            headers.append((b"content-length", b"%d" % len(body)))
        if self._bodiless:
            common = wire.changed(headers, removed)
            return [wire.picked(wire.headers_reply("request_headers", common), endpoints)]
        if self._modes[0] == wire.BUFFERED:
            common = wire.changed(headers, removed, body if altered else None)
            return [wire.picked(wire.body_reply("request_body", common), endpoints)]
        common = wire.changed(headers, removed)
        first = wire.picked(wire.headers_reply("request_headers", common), endpoints)
        return [first, *wire.body_parts("request_body", body, end=end)]

    # -- the answer -----------------------------------------------------------------------------

    def _response_headers(self, message: wire.Message) -> list[wire.Reply]:
        self.answering = True
        route = self._route
        headers = wire.headers_of(message.response_headers)
        status = header(headers, b":status")
        if route is None or not status.isdigit():  # an answer of the proxy's own
            self._status = int(status) if status.isdigit() else 502
            self.done = self._modes[1] == 0 or message.response_headers.end_of_stream
            return [wire.headers_reply("response_headers")]
        self._status = int(status)
        self._served_by(wire.served_of(message))
        if self._reads_usage:
            self._answer.head(self._status, headers, withhold=self._withhold)
        if message.response_headers.end_of_stream or not self._modes[1]:
            self._response_end()
            self.done = True
        removed = sorted({n.decode("latin-1") for n, _ in headers if n.startswith(OURS)})
        if self._answer.withholds:
            removed.append("content-length")
        told = route_headers(route, self._target if not self._foreign else None)
        common = wire.changed(told, removed)
        return [wire.headers_reply("response_headers", common)]

    def _served_by(self, endpoint: str) -> None:
        """The proxy may have gone down the list of endpoints, or elsewhere."""
        route, target = self._route, self._target
        assert route is not None
        assert target is not None
        if not endpoint or endpoint == endpoint_of(target.url)[1]:
            return
        again = [t for t in route.targets if endpoint_of(t.url)[1] == endpoint]
        cost_s = time.perf_counter() - self._sent_s
        left = Fallback("engine", "proxy", "engine", target.worker, cost_s)
        fell(route, self._metrics, left)
        if not again:  # nobody whom we picked: nothing is to be learnt from it
            self._foreign = True
            return
        self._metrics.left(target.worker, 502)
        self._send_to(again[0])

    def _response_body(self, piece: Any) -> list[wire.Reply]:
        data = piece.body
        if self._ttft_s < 0 and data and self._route is not None and not self._foreign:
            self._ttft_s = time.perf_counter() - self._started_s
            if self._status == 200:
                self._metrics.first_byte(self._ttft_s)
                self._steer.first_token(self._route, self._answer.first_token_s(self._ttft_s))
        out = self._answer.feed(data)
        if piece.end_of_stream:
            out += self._response_end()
            self.done = True
        if self._modes[1] == wire.FULL_DUPLEX:
            return self._duplex(out, end=piece.end_of_stream)
        common = None if out == data else wire.changed([], [], out)
        return [wire.body_reply("response_body", common)]

    def _duplex(self, body: bytes, *, end: bool = False) -> list[wire.Reply]:
        if self._modes[1] != wire.FULL_DUPLEX:
            return []
        return list(wire.body_parts("response_body", body, end=end))

    def _response_end(self) -> bytes:
        """The answer is there: reads its usage; returns what was held back of it."""
        if self._ended:
            return b""
        self._ended = True
        rest = self._answer.finish()
        self._complete = not self._answer.truncated
        if not self._complete:
            self._status = 502
        return rest


def _addresses(route: Route) -> list[str]:
    """Endpoints to try, the best first. A header that names a rank goes to all of them: only
    those are listed that want the same as the first."""
    wanted = route.targets[0].headers
    same = (endpoint_of(t.url)[1] for t in route.targets if t.headers == wanted)
    return list(dict.fromkeys(same))
