"""What the gateway asks before it forwards a request, and what it tells afterwards.

`Steer` is the one seam between the gateway (bytes, sockets, protocol) and the decision
(tokens, directory, router).
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import msgspec

from kvatlas.config import PairingProtocol
from kvatlas.core.ladder import Fallback
from kvatlas.core.tenancy import TenantSalt
from kvatlas.service.http_client import origin_of

Half = Literal["", "prefill", "decode"]


class Inbound(msgspec.Struct):
    """A client's request as the gateway understood it. ``body`` is the parsed JSON object.

    ``among``: hosts, or hosts with ports, of the engines that alone may get it; None for all.
    ``whole``: why it must not be split over a pair, whatever it is ("" where it may).
    ``ttft_slo_s``: within what time its client wants the first token; ``deadline_s``: how long
    all of it may take, to the last byte. Both from its arrival; inf where there is none.
    ``tenant``: what its credentials proved, where they were asked for: what the salt says that
    its engine gets, but for what is public of the prompt; ``tenant_class``: as what figures count
    it, "" for nobody's.
    """

    id: str
    path: str
    body: dict[str, object]
    headers: dict[str, str]  # names in lower case
    among: frozenset[str] | None = None
    whole: str = ""
    ttft_slo_s: float = math.inf
    deadline_s: float = math.inf
    tenant: TenantSalt | None = None
    tenant_class: str = ""


class Target(msgspec.Struct, frozen=True):
    """Where to send it: ``url`` is the engine's base URL, ``headers`` are added to the request.

    ``half``: which half of a pair it is asked to be, "" for all of it; ``pairing`` and
    ``bootstrap`` are how the halves meet. ``tier_tokens``: the expected hit by `Tier`; what is not
    in hbm must be loaded. ``ttft_s``: predicted seconds from here to its first token (of a first
    half: of its pair), of them ``wait_s`` in queues and ``load_s`` to load; 0 where that could only
    be guessed.
    """

    worker: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    expected_hit_tokens: int = 0
    half: Half = ""
    pairing: PairingProtocol = "nixl"
    bootstrap: str = ""
    tier_tokens: tuple[int, ...] = ()
    ttft_s: float = 0.0
    wait_s: float = 0.0
    load_s: float = 0.0


def endpoint_of(url: str) -> tuple[str, str]:
    """Host and ``host:port`` of an engine's base URL; an IPv6 address with its port in brackets."""
    origin = origin_of(url)
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    return origin.host, f"{host}:{origin.port}"


class Route(msgspec.Struct):
    """A decision, kept until `Steer.finished`: ``targets`` are tried in order until one connects.

    ``prompt_tokens`` is -1 where the prompt could not be tokenized; ``unkeyed`` then says why
    the route was chosen by load alone ("" when it was priced). ``whole``: why one engine does it
    all where there are halves of pairs ("" where it may be split). ``deadline_s`` as in `Inbound`.
    ``alone_s``: of a pair, the seconds to the first token on one engine instead, 0 where they can
    only be guessed; inf where none can. ``fallbacks``: what it has left so far, in order.
    ``salt``: the cache salt that its engines get, where it is ours to say. ``headers``: what they
    all get besides their own. ``looked_up_s``: when its prompt had been looked up, on
    `time.perf_counter`. ``tenant_class``: as in `Inbound`.
    """

    id: str
    targets: tuple[Target, ...]
    prompt_tokens: int = -1
    unkeyed: str = ""
    whole: str = ""
    deadline_s: float = math.inf
    alone_s: float = math.inf
    fallbacks: list[Fallback] = msgspec.field(default_factory=list)
    salt: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    looked_up_s: float = 0.0
    tenant_class: str = ""


class Outcome(msgspec.Struct):
    """What became of it. Token counts are -1 where the engine did not report them, ``ttft_s`` where
    the answer does not show when its first token came: it was not streamed.

    ``prefilled_by``: the prefill half of a pair, whose state the target took over (what was cached
    is what that half found cached).
    """

    target: Target
    status: int  # of the engine, or 499 when the client left, 502 / 504 when the engine failed
    prompt_tokens: int = -1
    cached_tokens: int = -1
    completion_tokens: int = -1
    ttft_s: float = -1.0
    e2e_s: float = -1.0
    prefilled_by: str = ""


class Health(msgspec.Struct, frozen=True):
    """``ready``: at least one engine can take requests. ``flags`` name what is degraded, in short
    words that do not change; ``details`` explain them, for people."""

    ready: bool
    flags: tuple[str, ...] = ()
    details: dict[str, object] = {}


class Steer(Protocol):
    """Chooses engines. Never raises for a reason of its own: it falls back to load alone."""

    async def choose(self, request: Inbound) -> Route:
        """Raises `RequestError` when no engine can serve the request (wrong model, none left)."""
        ...

    def left(self, route: Route) -> bool:
        """Might there be `more`? Cheap."""
        ...

    def more(self, route: Route) -> tuple[Target, ...]:
        """All targets failed before a byte was seen: whoever else serves the model, if anybody."""
        ...

    def decoders(self, route: Route, prefill: Target) -> tuple[Target, ...]:
        """Halves that may go on with what ``prefill`` began, the best first."""
        ...

    def alone(self, route: Route, failed: Half) -> tuple[Target, ...]:
        """That half failed before a byte was seen: who does all of it, the best first?"""
        ...

    def prefilled(self, route: Route, prefill: Target, cached_tokens: int, ttft_s: float) -> None:
        """The first half is done: that engine is free for others."""
        ...

    def sent(self, route: Route, target: Target) -> None:
        """The request goes to ``target`` now (again after a failed connect: the next target)."""
        ...

    def unreached(self, route: Route, target: Target) -> None:
        """No connection to ``target`` could be made."""
        ...

    def quiet_s(self, target: Target) -> float:
        """Seconds since its engine was last seen to compute for anybody; inf where it never was."""
        ...

    def first_token(self, route: Route, ttft_s: float) -> None:
        """The first body bytes of the answer arrived; ``ttft_s`` as in `Outcome`."""
        ...

    def finished(self, route: Route, outcome: Outcome) -> None:
        """Called exactly once for every route that `choose` returned, whatever happened."""
        ...

    def models(self) -> list[dict[str, object]]:
        """The engines' own /v1/models entries, merged: one per id."""
        ...

    def health(self) -> Health:
        """For /health and /ready. Cheap: called by probes."""
        ...
