"""What an agent says of itself over HTTP: to the gateway, to probes, to Prometheus. And where the
gateway asks for copies (`service.agent_pulls`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from kvatlas.core.compat import Member
from kvatlas.core.events import Event
from kvatlas.errors import ConfigError, RequestError
from kvatlas.service.admin import Safety
from kvatlas.service.agent_announce import Announcer, Listeners
from kvatlas.service.agent_metrics import AgentMetrics
from kvatlas.service.agent_pulls import PULL, Pulls
from kvatlas.service.agent_purge import PURGE, Purges
from kvatlas.service.feed_socket import CURVE_HEADER
from kvatlas.service.http import Limits, Request, envelope
from kvatlas.service.http_reply import JSON, Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.rdma_ports import RdmaPorts
from kvatlas.service.tenant_limits import LIMITS, Limited
from kvatlas.service.trust_metrics import TrustMetrics, trust_problems

DESCRIPTION = "/kvatlas/agent"
METRICS, HEALTH = "/metrics", "/health"
_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_LIMITS = Limits(body_bytes_max=2 << 20, bodies_bytes_max=16 << 20, connections_max=256)


class Served(msgspec.Struct, frozen=True):
    """An engine at its agent. ``root``: where the keys of its public prompts begin, in hex: the
    same for a gateway with the same secret, and for nobody else."""

    member: Member
    root: str


class AgentDescription(msgspec.Struct, frozen=True):
    """What a gateway has to know. ``life`` differs between two starts of the agent; ``rdma``: what
    the node's RDMA ports have moved by now. ``curve_key``: by which its events are encrypted.
    ``draining``: it saves nothing more, and ends soon."""

    life: str
    events: str
    replay: str
    engines: dict[str, Served] = {}
    rdma: RdmaPorts = RdmaPorts()
    curve_key: str = ""
    draining: bool = False


class Front:
    """The agent's HTTP server, and its announcements. Nothing can be changed here but by `pulls`
    and `purges`, whose clients have the secret."""

    def __init__(
        self,
        *,
        held: Callable[[], Sequence[Event]],
        engines: Callable[[], dict[str, Served]],
        status: Callable[[], dict[str, object]],
        problems: Callable[[], dict[str, str]],
        ports: Callable[[], RdmaPorts],
        safety: Safety,
    ) -> None:
        """``held``: as for `Announcer`; ``problems``: what is degraded, and how, for people. With
        TLS gateways prove that they are some, and nobody else hears what is announced."""
        self._guard = safety.guard
        self._trust = trust = safety.trust
        self._listeners: Listeners | None = None
        self._held = held
        self._engines = engines
        self._problems = problems
        self.joined: Callable[[], dict[str, str]] = dict  # what is wrong with it as a member
        self._ports = ports
        self._registry = CollectorRegistry()
        self._registry.register(AgentMetrics(status, ports))
        self._server = HttpServer(self._answer, _LIMITS, trust)
        door = self._server.door
        counts = (lambda: door.counts) if door is not None else Counter[str]
        self._registry.register(TrustMetrics(self._guard, trust, counts, "kvatlas_agent"))
        self._announcer: Announcer | None = None
        self._life = ""
        self._host = ""
        self.pulls: Pulls | None = None  # before they are there, nothing is asked
        self.purges: Purges | None = None
        self.limited: Limited | None = None

    async def start(self, life: str, host: str, port: int, events_port: int) -> None:
        """Before anything is announced. Raises ConfigError where an address cannot be had."""
        self._life = life
        self._host = host
        self._listeners = Listeners() if self._trust is not None else None
        self._announcer = Announcer(self._held, host, events_port, self._listeners)
        try:
            await self._server.start(host, port)
        except OSError as error:
            await self._announcer.close()
            why = error.strerror or error
            raise ConfigError(f"--listen: {host}:{port} cannot be had: {why}") from error

    async def close(self) -> None:
        """Says nothing more."""
        await self._server.close()
        if self._announcer is not None:
            await self._announcer.close()

    @property
    def url(self) -> str:
        """Where its pages are; "" where nobody may see them."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        scheme = "http" if self._trust is None else "https"
        return f"{scheme}://{host}:{self._server.port}" if host else ""

    def announce(self, events: Sequence[Event]) -> None:
        """Tell what changed, where anybody may listen."""
        if self._announcer is not None:
            self._announcer.announce(events)

    def rewrite(self) -> int:
        """Nothing that is not held any more can be asked for again; of how many histories that is
        so: none where nothing was said yet."""
        if self._announcer is None or not self._announcer.counts["batches_announced"]:
            return 0
        self._announcer.rewrite()
        return 1

    @property
    def counts(self) -> Counter[str]:
        """What was announced, and what was purged."""
        purged = self.purges.counts if self.purges is not None else Counter[str]()
        return purged + (self._announcer.counts if self._announcer is not None else Counter())

    async def _answer(self, request: Request, reply: Reply) -> None:
        try:
            await self._answer_known(request, reply)
        except RequestError as error:
            text = envelope(str(error), status=error.status, code=error.code)
            reply.send(error.status, [JSON], text)

    async def _answer_known(self, request: Request, reply: Reply) -> None:
        """Raises RequestError for who may not."""
        self._admit(request)
        pages = {
            METRICS: self._metrics,
            HEALTH: self._health,
            DESCRIPTION: self._description,
        }
        page = pages.get(request.path)
        if request.path == PULL and request.method == "POST" and self.pulls is not None:
            await self.pulls.answer(request, reply)
        elif request.path == LIMITS and request.method == "POST" and self.limited is not None:
            self.limited.answer(request, reply)
        elif request.path == PURGE and request.method == "POST" and self.purges is not None:
            await self.purges.answer(request, reply)
        elif page is None:
            text = f"there is no {request.path!r} here; there is: {', '.join(pages)}"
            reply.send(404, [JSON], envelope(text, status=404, code="not_found"))
        elif request.method not in ("GET", "HEAD"):
            text = f"{request.method} is not allowed on {request.path}"
            reply.send(405, [JSON], envelope(text, status=405, code="method_not_allowed"))
        else:
            page(request, reply)

    def _admit(self, request: Request) -> None:
        """Gateways are there for all but the figures; those who ask for work know the secret."""
        if request.path == METRICS:
            self._guard.admit(request, "metrics")
        elif request.path == DESCRIPTION:
            self._guard.admit(request, "read", parts=("gateway",))
        elif request.path != HEALTH:
            self._guard.admit(request, "change", parts=("gateway",))

    def _metrics(self, _: Request, reply: Reply) -> None:
        reply.send(200, [_TEXT], generate_latest(self._registry))

    def _health(self, request: Request, reply: Reply) -> None:
        """200 while it answers; the flags say what is degraded, to who may read them."""
        found = trust_problems(self._guard, self._trust)
        problems = (self._problems() | self.joined()) | {
            n: "; ".join(w.values()) for n, w in found.items() if w
        }
        body: dict[str, object] = {"status": "degraded" if problems else "ok"}
        if self._guard.may(request, "read"):
            body |= {"flags": sorted(problems), "details": problems}
        reply.send_json(200, body)

    def _description(self, request: Request, reply: Reply) -> None:
        listeners = self._listeners
        if listeners is not None and request.who is not None and request.who.part == "gateway":
            listeners.let_in(request.header(CURVE_HEADER))
        events = self._announcer
        assert events is not None, "not started"
        told = AgentDescription(
            self._life,
            events.endpoint,
            events.replay_endpoint,
            self._engines(),
            self._ports(),
            "" if listeners is None else listeners.curve.public,
            "draining" in self._problems(),
        )
        reply.send(200, [JSON], msgspec.json.encode(told))
