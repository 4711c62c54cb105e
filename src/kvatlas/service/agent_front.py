"""What an agent says of itself over HTTP: to the gateway, to probes, to Prometheus. And where the
gateway asks for copies (`service.agent_pulls`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from kvatlas.core.compat import Member
from kvatlas.core.events import Event
from kvatlas.errors import ConfigError
from kvatlas.service.agent_announce import Announcer
from kvatlas.service.agent_metrics import AgentMetrics
from kvatlas.service.agent_pulls import PULL, Pulls
from kvatlas.service.http import Limits, Request, envelope
from kvatlas.service.http_reply import JSON, Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.rdma_ports import RdmaPorts

DESCRIPTION = "/kvatlas/agent"
_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_LIMITS = Limits(body_bytes_max=2 << 20, bodies_bytes_max=16 << 20, connections_max=256)


class Served(msgspec.Struct, frozen=True):
    """An engine at its agent. ``root``: where the keys of its public prompts begin, in hex: the
    same for a gateway with the same secret, and for nobody else."""

    member: Member
    root: str


class AgentDescription(msgspec.Struct, frozen=True):
    """What a gateway has to know. ``life`` differs between two starts of the agent; ``rdma``: what
    the node's RDMA ports have moved by now."""

    life: str
    events: str
    replay: str
    engines: dict[str, Served] = {}
    rdma: RdmaPorts = RdmaPorts()


class Front:
    """The agent's HTTP server, and its announcements. Nothing can be changed here but by `pulls`,
    whose clients have the secret."""

    def __init__(
        self,
        *,
        held: Callable[[], Sequence[Event]],
        engines: Callable[[], dict[str, Served]],
        status: Callable[[], dict[str, object]],
        problems: Callable[[], dict[str, str]],
        ports: Callable[[], RdmaPorts],
    ) -> None:
        """``held``: as for `Announcer`; ``problems``: what is degraded, and how, for people."""
        self._held = held
        self._engines = engines
        self._problems = problems
        self._ports = ports
        self._registry = CollectorRegistry()
        self._registry.register(AgentMetrics(status, ports))
        self._server = HttpServer(self._answer, _LIMITS)
        self._announcer: Announcer | None = None
        self._life = ""
        self._host = ""
        self.pulls: Pulls | None = None  # before it is there, nothing is asked

    async def start(self, life: str, host: str, port: int, events_port: int) -> None:
        """Before anything is announced. Raises ConfigError where an address cannot be had."""
        self._life = life
        self._host = host
        self._announcer = Announcer(self._held, host, events_port)
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
        return f"http://{host}:{self._server.port}" if host else ""

    def announce(self, events: Sequence[Event]) -> None:
        """Tell what changed, where anybody may listen."""
        if self._announcer is not None:
            self._announcer.announce(events)

    @property
    def counts(self) -> Counter[str]:
        """What was announced."""
        return self._announcer.counts if self._announcer is not None else Counter()

    async def _answer(self, request: Request, reply: Reply) -> None:
        pages = {
            "/metrics": self._metrics,
            "/health": self._health,
            DESCRIPTION: self._description,
        }
        page = pages.get(request.path)
        if request.path == PULL and request.method == "POST" and self.pulls is not None:
            await self.pulls.answer(request, reply)
        elif page is None:
            text = f"there is no {request.path!r} here; there is: {', '.join(pages)}"
            reply.send(404, [JSON], envelope(text, status=404, code="not_found"))
        elif request.method not in ("GET", "HEAD"):
            text = f"{request.method} is not allowed on {request.path}"
            reply.send(405, [JSON], envelope(text, status=405, code="method_not_allowed"))
        else:
            page(reply)

    def _metrics(self, reply: Reply) -> None:
        reply.send(200, [_TEXT], generate_latest(self._registry))

    def _health(self, reply: Reply) -> None:
        """200 while it answers; the flags say what is degraded."""
        problems = self._problems()
        body = {
            "status": "degraded" if problems else "ok",
            "flags": sorted(problems),
            "details": problems,
        }
        reply.send_json(200, body)

    def _description(self, reply: Reply) -> None:
        events = self._announcer
        assert events is not None, "not started"
        told = AgentDescription(
            self._life,
            events.endpoint,
            events.replay_endpoint,
            self._engines(),
            self._ports(),
        )
        reply.send(200, [JSON], msgspec.json.encode(told))
