"""The gateway: OpenAI clients on one side, engines on the other, `Steer` in between.

It understands as much of HTTP and of the bodies as it needs to choose an engine, to report errors
in OpenAI's envelope and to count usage; the bytes themselves it passes on as they are.

Request headers that it knows: ``x-request-id`` (echoed, else generated),
``x-kvatlas-cache-salt`` (takes precedence over the body's ``cache_salt`` and is written there),
``x-slo-ttft-ms`` and ``x-kvatlas-deadline-ms`` (each before the default in the configuration).
Response headers: ``x-request-id``, ``x-kvatlas-worker``, ``x-kvatlas-expected-hit-tokens`` and,
where it had to go down its ladder, ``x-kvatlas-fallback`` with each rung that it left and why.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from urllib.parse import unquote

import kvatlas
from kvatlas.config import DAY_S, GatewayConfig
from kvatlas.config_tls import AdminConfig
from kvatlas.core.ladder import Fallback
from kvatlas.dataplane.tls import Trust
from kvatlas.errors import RequestError
from kvatlas.service import body as bodies
from kvatlas.service import isolation, logs
from kvatlas.service.admin import Guard
from kvatlas.service.http import Headers, Limits, Request, envelope
from kvatlas.service.http_client import HttpClient
from kvatlas.service.http_reply import JSON, Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.ladder import fell, within
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.pages import (
    PROBES,
    Page,
    Question,
    Status,
    Talk,
    Writer,
    barely,
    is_open,
    right_for,
)
from kvatlas.service.relay import CLIENT_CLOSED, Relay
from kvatlas.service.salts import SALT_HEADER
from kvatlas.service.steer import Inbound, Route, Steer
from kvatlas.service.tenants import Tenants
from kvatlas.service.tls import Door, to_engines
from kvatlas.service.trust_metrics import TrustMetrics

log = logging.getLogger(__name__)

#: Endpoints by name. The first two report usage; all of them take a JSON object by POST.
USAGE_PATHS = ("/v1/chat/completions", "/v1/completions")
JSON_PATHS = (*USAGE_PATHS, "/v1/embeddings", "/v1/responses", "/v1/messages")

TTFT_SLO_HEADER = "x-slo-ttft-ms"
DEADLINE_HEADER = "x-kvatlas-deadline-ms"
_NUMBER = re.compile(r"\d{1,18}(\.\d{1,18})?", re.ASCII)
_SHOWN_CHARS = 64  # of a header that comes back in an error
_ID = re.compile(r"[!-~]{1,128}")
_TEXT: tuple[bytes, bytes] = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class Gateway:
    """Serves one address. ``pages`` are further GET paths; one that ends in "/" is a prefix.
    ``questions`` are POST paths that take a JSON object, ``talks`` paths for other gateways."""

    def __init__(
        self,
        config: GatewayConfig,
        steer: Steer,
        *,
        metrics: GatewayMetrics | None = None,
        pages: Mapping[str, Page] | None = None,
        questions: Mapping[str, Question] | None = None,
        talks: Mapping[str, Talk] | None = None,
        limits: Limits | None = None,
        trust: Trust | None = None,
        guard: Guard | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        """``trust``: TLS, to both sides; ``guard``: of ``pages`` and ``questions``, else open;
        ``tenants``: who may use the API, else everybody."""
        self.config = config
        self._trust = trust
        self._guard = guard or Guard(AdminConfig(), closed=False)
        self._tenants = tenants
        self._questions = dict(questions or {})
        self._talks = dict(talks or {})
        self.metrics = metrics or GatewayMetrics()
        self._steer = steer
        self._client = HttpClient(
            connect_timeout_s=config.connect_timeout_s,
            idle_timeout_s=config.engine_idle_timeout_s,
            outgoing=to_engines(trust) if trust is not None else None,
        )
        self._server = HttpServer(
            self._handle,
            limits
            or Limits(body_bytes_max=config.max_body_bytes, connections_max=config.max_connections),
            trust,
        )
        if tenants is not None:
            self._server.known = self._known
        door = self._server.door
        counts = (lambda: door.counts) if door is not None else Counter[str]
        self.metrics.registry.register(TrustMetrics(self._guard, trust, counts))
        self._writing: set[asyncio.Future[None]] = set()
        self._pages: dict[str, Page] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics_page,
            "/version": self._version,
            **(pages or {}),
        }

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def door(self) -> Door | None:
        """Where it listens with TLS."""
        return self._server.door

    async def start(self) -> None:
        """Listens. Raises OSError when the address cannot be had."""
        await self._server.start(self.config.host, self.config.port)

    async def drain(self) -> bool:
        """Fails /ready, refuses new work, lets what runs end; False when it had to be cut off.
        Pages that are written as long as somebody reads them end at once."""
        for task in self._writing:
            task.cancel()
        return await self._server.drain(self.config.drain_timeout_s)

    async def close(self) -> None:
        """Ends everything at once; running requests are cancelled at their engines."""
        await self._server.close()
        await self._client.close()

    async def _handle(self, request: Request, reply: Reply) -> None:
        path = request.path
        if path.startswith("/v1/"):
            await self._answer_api(request, reply, path)
        elif path in self._talks:
            await self._answer_gateway(request, reply, self._talks[path])
        else:
            await self._answer_page(request, reply, path)

    def _known(self, request: Request) -> None:
        """Raises RequestError for a stranger, of whom no long body is held."""
        if request.path.startswith("/v1/") and self._tenants is not None:
            try:
                self._tenants.admit(request.headers)
            except RequestError as error:
                self.metrics.refused(error.code)
                raise
        elif not self._guard.may(request, "read"):
            text = "a body of that size is taken of nobody here who is not known"
            raise RequestError(text, status=401, code="not_known")

    # /v1/*

    async def _answer_api(self, request: Request, reply: Reply, path: str) -> None:
        started_s = time.perf_counter()
        endpoint = path if path in JSON_PATHS else "other"
        request_id = request_id_of(request)
        logs.REQUEST_ID.set(request_id)
        status = CLIENT_CLOSED
        try:
            if self._trust is not None and self._trust.config.clients_ca and not request.proved:
                text = "a client certificate is wanted here (tls.clients_ca)"
                raise RequestError(text, status=401, code="not_known")
            if request.method == "OPTIONS":
                status = 204
                reply.send(status, [(b"allow", b"GET, HEAD, POST, OPTIONS")])
            elif path == "/v1/models" or path.startswith("/v1/models/"):
                endpoint, status = "/v1/models", 200
                if self._tenants is not None:
                    self._tenants.admit(request.headers)
                reply.send_json(200, self._models(request, path))
            else:
                status = await self._relay(request, reply, request_id, started_s)
        except RequestError as error:
            status = error.status
            if status in (401, 403):
                self.metrics.refused(error.code)
            _refuse(reply, error, request_id)
        except Exception:  # ours: the server logs it and answers
            status = 500
            raise
        finally:
            took_s = time.perf_counter() - started_s
            self.metrics.answered(endpoint, status, took_s)
            log.info("%s %s: %d in %.3f s", request.method, endpoint, status, took_s)

    def _models(self, request: Request, path: str) -> object:
        if request.method not in ("GET", "HEAD"):
            raise _not_allowed(request.method, path)
        models = self._steer.models()
        if path == "/v1/models":
            return {"object": "list", "data": models}
        wanted = path.removeprefix("/v1/models/")
        for model in models:
            if model.get("id") == wanted:
                return model
        known = ", ".join(str(model.get("id")) for model in models) or "none"
        text = f"the model {wanted!r} does not exist; models here: {known}"
        raise RequestError(text, status=404, code="model_not_found", param="model")

    async def _relay(
        self, request: Request, reply: Reply, request_id: str, started_s: float
    ) -> int:
        if self._server.draining:
            raise RequestError("the gateway is shutting down", status=503, code="shutting_down")
        path = request.path
        inbound = inbound_of(request, request_id, self.config, self._tenants)
        reads_usage = path in USAGE_PATHS
        ends_at_s = request.arrived_s + inbound.deadline_s
        try:
            async with within(ends_at_s):
                route, body, withhold = await routed(
                    request,
                    inbound,
                    self._steer,
                    self.metrics,
                    started_s=started_s,
                    usage=reads_usage,
                )
        except TimeoutError:
            lost_s = time.perf_counter() - started_s
            self.metrics.fell(Fallback("lookup", "deadline", "error", cost_s=lost_s))
            text = f"the deadline of {inbound.deadline_s:g} s ended before an engine was chosen"
            raise RequestError(
                text, status=504, code="deadline_exceeded", retry_after_s=1
            ) from None
        relay = Relay(
            request,
            reply,
            route,
            body=body,
            client=self._client,
            steer=self._steer,
            metrics=self.metrics,
            started_s=started_s,
            ends_at_s=ends_at_s,
            reads_usage=reads_usage,
            streams=inbound.body.get("stream") is True,
            withhold=withhold,
            prefill_timeout_s=self.config.prefill_timeout_s,
            credentials=self._tenants.for_engines if self._tenants is not None else None,
        )
        await relay.run()
        return relay.status

    # other gateways

    async def _answer_gateway(self, request: Request, reply: Reply, talk: Talk) -> None:
        try:
            if self._trust is not None:  # else their secret is their only proof
                self._guard.admit(request, "change", parts=("gateway",))
            await talk(request, reply)
        except RequestError as error:
            _refuse(reply, error, request_id_of(request))

    # everything else

    async def _answer_page(self, request: Request, reply: Reply, path: str) -> None:
        request_id = request_id_of(request)
        question = self._questions.get(path)
        page, rest = self._page(path)
        allowed = ("POST",) if question is not None else ("GET", "HEAD")
        known = question is not None or page is not None
        try:
            if request.method == "OPTIONS" and (known or path == "*"):
                reply.send(204, [(b"allow", ", ".join((*allowed, "OPTIONS")).encode())])
                return
            if known and request.method not in allowed:
                raise _not_allowed(request.method, path)
            if known and not is_open(path):
                self._guard.admit(request, right_for(path, asks=question is not None))
            if question is not None:
                answer = await question(_asked(request, request_id))
            elif page is not None:
                answer = await page(rest)
            else:
                text = f"there is no {path!r} here; the API is under /v1/"
                raise RequestError(text, status=404, code="not_found")
        except RequestError as error:
            _refuse(reply, error, request_id)
            return
        if path in PROBES and not self._guard.may(request, "read"):
            answer = barely(answer)
        if isinstance(answer, Status):
            reply.send_json(answer.status, answer.body)
        elif callable(answer):
            await self._written(answer, request, reply)
        elif isinstance(answer, bytes | str):
            reply.send(200, [_TEXT], answer.encode() if isinstance(answer, str) else answer)
        else:
            reply.send_json(200, answer)

    async def _written(self, writer: Writer, request: Request, reply: Reply) -> None:
        """Until it is done, or the gateway shuts down."""
        task = asyncio.ensure_future(writer(reply, lambda: self._guard.may(request, "read")))
        self._writing.add(task)
        try:
            await task
        finally:
            self._writing.discard(task)

    def _page(self, path: str) -> tuple[Page | None, str]:
        page = self._pages.get(path)
        if page is not None:
            return page, ""
        for prefix, candidate in self._pages.items():
            if prefix.endswith("/") and path.startswith(prefix):
                return candidate, unquote(path[len(prefix) :])
        return None, ""

    async def _health(self, _: str) -> object:
        """Always 200 while the process answers; the flags say what is degraded."""
        return self._state()

    async def _ready(self, _: str) -> object:
        state = self._state()
        return Status(200 if state["ready"] else 503, state)

    def _state(self) -> dict[str, object]:
        health = self._steer.health()
        flags = list(health.flags)
        details = dict(health.details)
        if self._server.draining:
            flags.append("draining")
        if self.metrics.violations:
            flags.append("usage_violations")
            details["usage_violations"] = {
                "count": self.metrics.violations,
                "last": self.metrics.violation_last,
            }
        return {
            "status": "degraded" if flags else "ok",
            "ready": health.ready and not self._server.draining,
            "flags": flags,
            "details": details,
        }

    async def _metrics_page(self, _: str) -> object:
        return await self.metrics.page.text()

    async def _version(self, _: str) -> object:
        return {"version": kvatlas.__version__}


def request_id_of(request: Request) -> str:
    """The client's own where it can be one, else a fresh one."""
    given = request.header("x-request-id")
    return given if _ID.fullmatch(given) else f"{random.getrandbits(128):032x}"


def inbound_of(
    request: Request, request_id: str, config: GatewayConfig, tenants: Tenants | None
) -> Inbound:
    """A request of the API as `Steer` is asked; ``tenants``: whose it must be. Raises RequestError
    for what can be none."""
    caller = tenants.admit(request.headers) if tenants is not None else None
    path = request.path
    lower = path.lower()
    if "/.." in lower or "%2e" in lower:
        raise RequestError(f"{path!r} is no path of this API", status=404, code="not_found")
    if path in JSON_PATHS and request.method != "POST":
        raise _not_allowed(request.method, path)
    inbound = _asked(request, request_id, path in JSON_PATHS or _is_json(request))
    inbound.ttft_slo_s = _seconds(inbound.headers, TTFT_SLO_HEADER, config.ttft_slo_s)
    inbound.deadline_s = _seconds(inbound.headers, DEADLINE_HEADER, config.deadline_s)
    if tenants is not None and caller is not None:
        tenants.check(request, inbound.body)
        inbound.tenant, inbound.tenant_class = caller.salt, caller.tenant_class
    return inbound


def _seconds(headers: Mapping[str, str], name: str, default_s: float) -> float:
    """What a header in milliseconds says, else the default; inf where neither says anything."""
    given = headers.get(name)
    if given is None:
        return default_s or math.inf
    milliseconds = float(given) if _NUMBER.fullmatch(given) else 0.0
    if not 0 < milliseconds <= DAY_S * 1000:
        text = f"{name}: {given[:_SHOWN_CHARS]!r} is no number of milliseconds above 0, up to a day"
        raise RequestError(text, code="bad_header", param=name)
    return milliseconds / 1000


def _asked(request: Request, request_id: str, parse: bool = True) -> Inbound:
    body = bodies.parse(request.body) if parse else {}
    headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in request.headers}
    return Inbound(id=request_id, path=request.path, body=body, headers=headers)


def _is_json(request: Request) -> bool:
    kind = request.header("content-type").lower()
    return request.method == "POST" and kind.startswith("application/json")


async def routed(
    request: Request,
    inbound: Inbound,
    steer: Steer,
    metrics: GatewayMetrics,
    *,
    started_s: float,
    usage: bool,
) -> tuple[Route, bytes, bool]:
    """Chooses and counts: the route, what the engine gets, and whether the usage event is to be
    kept from the client. ``usage``: its answer is read for it. Raises RequestError as
    `Steer.choose`."""
    if (
        inbound.tenant is None
        and inbound.headers.get(SALT_HEADER)
        and request.body
        and not inbound.body
    ):
        text = f"{SALT_HEADER} needs a JSON body to be written into"
        raise RequestError(text, code="salt_without_json", param="cache_salt")
    if bodies.asks_for_report(inbound.body):
        metrics.unreportable()
    if bodies.pairs_itself(inbound.body):
        metrics.pairing_dropped()
    try:
        route = await steer.choose(inbound)
    except RequestError as error:
        metrics.refused(error.code)
        metrics.of_tenant(inbound.tenant_class, error.code)
        raise
    metrics.of_tenant(inbound.tenant_class, "routed")
    route.deadline_s, route.tenant_class = inbound.deadline_s, inbound.tenant_class
    route_s = time.perf_counter() - started_s
    metrics.routed(route_s)
    if route.unkeyed:
        fell(route, metrics, Fallback("lookup", route.unkeyed, "by_load", cost_s=route_s))
    if route.whole:
        fell(route, metrics, Fallback("pair", route.whole, "engine"))
    body, withhold = _engine_body(request, inbound, route, usage)
    return route, body, withhold


def _engine_body(
    request: Request, inbound: Inbound, route: Route, usage: bool
) -> tuple[bytes, bool]:
    """What the engine gets, and whether the usage event is to be kept from the client."""
    fields: dict[str, object] = {}
    left_out: tuple[str, ...] = ()
    if bodies.pairs_itself(inbound.body):
        left_out += bodies.PAIRING_FIELDS
    if inbound.tenant is not None:
        left_out += isolation.FIELDS
        fields |= isolation.fields_for(request.path) | {"cache_salt": route.salt}
    chosen = inbound.headers.get(SALT_HEADER) if inbound.tenant is None and request.body else ""
    if chosen and inbound.body.get("cache_salt") != chosen:
        fields["cache_salt"] = chosen
    if bodies.has_extras(inbound.body):
        fields["vllm_xargs"] = bodies.without_extras(request.body)
    withhold = False
    if usage and inbound.body.get("stream") is True:
        options = inbound.body.get("stream_options")
        asked = isinstance(options, dict) and options.get("include_usage") is True
        if not asked and (options is None or isinstance(options, dict)):
            fields["stream_options"] = bodies.with_usage(options, request.body)
            withhold = True
    if left_out:
        return bodies.edited(request.body, fields, left_out), withhold
    if fields:
        return bodies.splice(request.body, inbound.body, fields), withhold
    return request.body, False


def _not_allowed(method: str, path: str) -> RequestError:
    return RequestError(f"{method} is not allowed on {path}", status=405, code="method_not_allowed")


def _refuse(reply: Reply, error: RequestError, request_id: str) -> None:
    headers: Headers = [JSON, (b"x-request-id", request_id.encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after_s:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    body = envelope(str(error), status=error.status, code=error.code, param=error.param)
    reply.send(error.status, headers, body)
