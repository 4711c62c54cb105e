"""What the gateway asks before it forwards a request, and what it tells afterwards.

`Steer` is the one seam between the gateway (bytes, sockets, protocol) and the decision
(tokens, directory, router).
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Inbound(msgspec.Struct):
    """A client's request as the gateway understood it. ``body`` is the parsed JSON object."""

    id: str
    path: str
    body: dict[str, object]
    headers: dict[str, str]  # names in lower case


class Target(msgspec.Struct, frozen=True):
    """Where to send it: ``url`` is the engine's base URL, ``headers`` are added to the request."""

    worker: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    expected_hit_tokens: int = 0


class Route(msgspec.Struct):
    """A decision, kept until `Steer.finished`: ``targets`` are tried in order until one connects.

    ``prompt_tokens`` is -1 where the prompt could not be tokenized; ``fallback`` then says why
    the route was chosen by load alone ("" when it was priced).
    """

    id: str
    targets: tuple[Target, ...]
    prompt_tokens: int = -1
    fallback: str = ""


class Outcome(msgspec.Struct):
    """What became of it. Token counts are -1 where the engine did not report them."""

    target: Target
    status: int  # of the engine, or 499 when the client left, 502 / 504 when the engine failed
    prompt_tokens: int = -1
    cached_tokens: int = -1
    completion_tokens: int = -1
    ttft_s: float = -1.0
    e2e_s: float = -1.0


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

    def sent(self, route: Route, target: Target) -> None:
        """The request goes to ``target`` now (again after a failed connect: the next target)."""
        ...

    def unreached(self, route: Route, target: Target) -> None:
        """No connection to ``target`` could be made."""
        ...

    def first_token(self, route: Route, ttft_s: float) -> None:
        """The first body bytes of the answer arrived."""
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
