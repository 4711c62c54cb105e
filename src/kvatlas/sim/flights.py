"""One request on its way through the gateway: what is asked, where it stands, how it ended."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvatlas.core.router import Decision
from kvatlas.sim.messages import Source, Submit
from kvatlas.sim.timeline import Timer
from kvatlas.workload.prompt_keys import Origin


class Inquiry(msgspec.Struct, frozen=True):
    """A client's request as it reaches the gateway. ``scope`` "" is public; ``origin`` spares its
    engine the hashing of ``tokens``, all requests of a run having one or none."""

    id: str
    tokens: bytes
    output_tokens: int
    scope: str = ""
    adapter: str = ""
    origin: Origin | None = None


class Outcome(msgspec.Struct, frozen=True):
    """How a request ended. ``fault`` "" means that its answer was complete.

    ``tried`` names the engines in order; ``cached_tokens`` is what the last one reported;
    ``expected_tokens`` what the plan by which it was sent there promised. ``prefilled_by``: the
    prefill half of a pair, whose state the last one took over; ``fallback``: why a pair was given
    up for one engine.
    """

    id: str
    arrived_at: float
    ended_at: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    expected_tokens: int
    ttft_s: float
    tried: tuple[str, ...]
    fault: str = ""
    prefilled_by: str = ""
    fallback: str = ""


class GatewayWatcher(Protocol):
    """Whoever wants to know what the gateway does (reports, checkers)."""

    def decided(self, inquiry: Inquiry, decision: Decision) -> None:
        """A request was routed."""

    def waited(self, gaps_s: Sequence[float], count: int) -> None:
        """Between tokens of their answers, ``count`` requests each waited these gaps."""

    def ended(self, outcome: Outcome) -> None:
        """A request is over; told exactly once for each."""


class Stage(enum.Enum):
    """Which part of a request its present engine does."""

    COMBINED = "combined"
    PREFILL = "prefill"
    DECODE = "decode"


class Flight:
    """One request between its arrival and its end. The gateway's own."""

    __slots__ = (
        *("arrived_at", "expected", "fallback", "first_at", "heard_at", "inquiry", "life", "made"),
        *("on_end", "prefilled_by", "sent_at", "source", "stage", "target", "targets", "timer"),
        "tried",
    )

    def __init__(self, inquiry: Inquiry, now: float, on_end: Callable[[Outcome], None]) -> None:
        self.inquiry = inquiry
        self.on_end = on_end
        self.arrived_at = self.heard_at = self.sent_at = now
        self.first_at = -1.0
        self.stage = Stage.COMBINED
        self.target = ""
        self.targets: list[str] = []  # to be tried next, in order
        self.expected: dict[str, int] = {}  # engine → tokens that its plan promised
        self.tried: list[str] = []
        self.life = 0  # of the engine that accepted it; 0 before
        self.made = 0
        self.source: Source | None = None  # where the decode half finds the state
        self.prefilled_by = ""
        self.fallback = ""
        self.timer: Timer | None = None

    def submit(self) -> Submit:
        """The message for the present stage."""
        inquiry, prefill = self.inquiry, self.stage is Stage.PREFILL
        return Submit(
            id=inquiry.id,
            tokens=inquiry.tokens,
            output_tokens=1 if prefill else inquiry.output_tokens,
            salt=inquiry.scope,
            adapter=inquiry.adapter,
            hand_off=prefill,
            source=self.source if self.stage is Stage.DECODE else None,
            origin=inquiry.origin,
        )
