"""Who is tried next, and for how long: one request going down its ladder.

What each rung is, and how long it may take of what is left of the deadline, `core.ladder` says.
Each step down is counted here, with its reason and what it cost.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from kvatlas.core import ladder
from kvatlas.core.ladder import Below, Fallback, Rung
from kvatlas.service.http import Headers
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.steer import Half, Route, Steer, Target

_PLACES = {"prefill": "at the prefill half", "decode": "at the decode half", "engine": "at engine"}


_TICK_S = 0.001


class Ended(msgspec.Struct, frozen=True):
    """A try that did not answer the client. ``reason`` "": a first half that is done."""

    reason: str
    status: int
    error: str = ""
    half: Half = ""


def fell(route: Route, metrics: GatewayMetrics, fallback: Fallback) -> None:
    """One step down: for the metrics, the decision log, and the answer's header."""
    route.fallbacks.append(fallback)
    metrics.fell(fallback)


def for_s(seconds: float) -> asyncio.Timeout:
    """Raises TimeoutError in what runs under it, after so long; inf: never."""
    return asyncio.timeout(None if seconds == math.inf else seconds)


def within(ends_at_s: float) -> asyncio.Timeout:
    """Raises TimeoutError in what runs under it, at that time of `time.perf_counter`."""
    return for_s(ends_at_s - time.perf_counter())


class Silence:
    """Raises TimeoutError in the exchange that runs under it, where its answer does not begin.
    ``quiet_s`` tells for how long its engine was not seen to do anything; None: that is no matter.
    """

    def __init__(self, quiet_s: Callable[[], float] | None = None) -> None:
        self._quiet_s = quiet_s
        self._scope = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Silence:
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        await self._scope.__aexit__(kind, error, trace)

    def limit(self, silence_s: float) -> None:
        """From now on it may be silent for so long."""
        self._stop()
        if silence_s < math.inf:
            self._later(silence_s, silence_s, asyncio.get_running_loop().time())

    def heard(self) -> None:
        """It begins."""
        self._stop()
        self._scope.reschedule(None)

    def expired(self) -> bool:
        """Whether that comes too late."""
        return self._scope.expired()

    def _later(self, seconds: float, silence_s: float, since_s: float) -> None:
        # A connection that cannot be made in the same time is told first: it says more.
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds + _TICK_S, self._look, silence_s, since_s)

    def _look(self, silence_s: float, since_s: float) -> None:
        now = asyncio.get_running_loop().time()
        quiet_s = now - since_s
        if self._quiet_s is not None:
            quiet_s = min(quiet_s, self._quiet_s())
        if quiet_s < silence_s:
            self._later(silence_s - quiet_s, silence_s, since_s)
        else:
            self._scope.reschedule(now)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Ladder:
    """``ends_at_s``: the end of the deadline on `time.perf_counter`, inf where there is none."""

    def __init__(
        self, route: Route, steer: Steer, metrics: GatewayMetrics, ends_at_s: float
    ) -> None:
        self.tried: list[str] = []
        self.rung: Rung = "engine"  # where it stands
        self._route = route
        self._steer = steer
        self._metrics = metrics
        self._ends_at_s = ends_at_s
        self._targets = list(route.targets)
        self._may_ask_alone = any(target.half for target in route.targets)
        self._since_s = self._pair_since_s = time.perf_counter()

    def left_s(self) -> float:
        """What is left of the deadline, at least 0; inf without one."""
        return max(0.0, self._ends_at_s - time.perf_counter())

    def goes_on(self) -> bool:
        """Might there be somebody to try after the one who is tried?"""
        return bool(self._targets) or self._may_ask_alone or self._steer.left(self._route)

    def first(self) -> Target | None:
        """Whom to try first: the best plan that can be done in time."""
        return self._chosen(self._targets)

    def next(self, target: Target, ended: Ended) -> Target | None:
        """Whom to try after a try that ended so; None where nobody is left.

        Half of a pair that failed after it had the request is not replaced by another: it is not
        known what it began.
        """
        half, targets = ended.half, self._targets
        if not ended.reason:
            targets = list(self._steer.decoders(self._route, target))
            if targets:
                return self._chosen(targets)
            half, ended = "decode", Ended("down", 503, "", "decode")
            targets = self._alone(half)
        else:
            if half and ended.reason not in ("connect", "refused"):
                targets = []
            if not targets and self._steer.left(self._route):
                targets = list(self._steer.more(self._route))
            targets = targets or self._alone(half)
        cost_s = self._lost_s(whole=not _keeps_state(half, targets))
        chosen = self._chosen(targets)
        worker = "" if ended.reason == "down" else target.worker
        self._fell(half or "engine", ended.reason, _below(chosen), worker, cost_s)
        return chosen

    def patience_s(self, target: Target) -> float:
        """How long ``target`` may be silent before the rung below is taken."""
        left_s = self.left_s()
        if left_s == math.inf:
            return math.inf
        below = [] if target.half else [other.ttft_s for other in self._targets]
        if self._may_ask_alone:
            below.append(self._route.alone_s)
        return ladder.patience_s(left_s, target.ttft_s, below)

    def late(self, target: Target) -> tuple[str, Headers]:
        """The deadline ended: where it was, for people, and when to come again, where that may
        help: it should have been in time, or would be once the queue is shorter."""
        cost_s = self._lost_s(whole=True)
        self._fell(self.rung, "deadline", "error", target.worker, cost_s)
        deadline_s = self._route.deadline_s
        text = f"the deadline of {deadline_s:g} s ended {_PLACES[self.rung]} {target.worker}"
        if target.ttft_s - target.wait_s > deadline_s:
            return text, []
        after_s = max(1, math.ceil(target.ttft_s - deadline_s))
        return text, [(b"retry-after", b"%d" % after_s)]

    def resumed(self, target: Target, cached_tokens: int, took_s: float) -> None:
        """``target`` answered, its first token after ``took_s`` (0 where it is not known): did
        state come from below hbm? Where that was not foreseen it is not known what it cost."""
        remote_tokens = sum(target.tier_tokens[1:])
        to = ladder.loaded(target.expected_hit_tokens, remote_tokens, cached_tokens)
        if to is not None:
            cost_s = max(0.0, took_s - target.ttft_s) if target.ttft_s else 0.0
            self._fell("remote", "not_loaded", to, target.worker, cost_s)

    # -- inside ---------------------------------------------------------------------------------

    def _lost_s(self, *, whole: bool) -> float:
        """What went into the rung that is left; ``whole``: of a pair, what the first half did is
        lost, too. No second is counted twice."""
        now = time.perf_counter()
        cost_s = now - (self._pair_since_s if whole else self._since_s)
        self._pair_since_s += cost_s
        return cost_s

    def _alone(self, half: Half) -> list[Target]:
        """All that was planned failed before anything was seen, a pair among it: one engine does
        it all. Those that can are asked in turn, once."""
        if not self._may_ask_alone:
            return []
        self._may_ask_alone = False
        return list(self._steer.alone(self._route, half))

    def _chosen(self, targets: list[Target]) -> Target | None:
        """The first that can be done in time; those before it are passed over."""
        left_s = self.left_s()
        at = ladder.first_in_time([target.ttft_s for target in targets], left_s)
        passed = targets[:at]
        pairs_only = bool(targets) and all(target.half == "prefill" for target in targets)
        if pairs_only and targets[at].ttft_s > left_s >= self._route.alone_s:
            alone = self._alone("")
            passed, targets, at = (targets, alone, 0) if alone else (passed, targets, at)
        chosen = targets[at] if targets else None
        for target in passed:
            rung: Rung = "pair" if target.half == "prefill" else target.half or "engine"
            self._fell(rung, "late", _below(chosen), target.worker, 0.0)
        self._targets = targets[at + 1 :]
        if chosen is not None:
            self.tried.append(chosen.worker)
            self.rung = chosen.half or "engine"
            self._since_s = time.perf_counter()
            if chosen.half != "decode":
                self._pair_since_s = self._since_s
        return chosen

    def _fell(self, rung: Rung, reason: str, to: Below, worker: str, cost_s: float) -> None:
        fell(self._route, self._metrics, Fallback(rung, reason, to, worker, cost_s))


def _keeps_state(half: Half, targets: list[Target]) -> bool:
    """Another second half takes over the same state: what the first half did is not lost."""
    return half == "decode" and bool(targets) and targets[0].half == "decode"


def _below(target: Target | None) -> Below:
    if target is None:
        return "error"
    return "pair" if target.half else "engine"
