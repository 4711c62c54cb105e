"""Latency of requests as users feel it: percentiles and goodput. Pure arithmetic.

TTFT is the time to the first token, TPOT = (E2E − TTFT) / (output tokens − 1) per request, ITL
the single gaps between tokens, E2E the time to the last one. All in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec


class Timing(msgspec.Struct, frozen=True):
    """One answered request. ``ttft_s`` is None where the answer was not streamed: nobody saw the
    first token; ``gaps_s`` are the times between tokens."""

    ttft_s: float | None
    e2e_s: float
    output_tokens: int
    gaps_s: tuple[float, ...] = ()

    @property
    def tpot_s(self) -> float | None:
        """None where nobody saw a second token after a first."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class Slo(msgspec.Struct, frozen=True):
    """Service-level objectives; None sets no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, timing: Timing) -> bool:
        """A request of a single token has no TPOT to miss; an unseen TTFT misses any limit."""
        if self.ttft_s is not None and (timing.ttft_s is None or timing.ttft_s > self.ttft_s):
            return False
        tpot_s = timing.tpot_s
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


class Summary(msgspec.Struct, frozen=True):
    """The usual figures of one set of values; all None when it is empty."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


class Report(msgspec.Struct, frozen=True):
    """What a set of answered requests amounts to over ``duration_s``.

    ``attained`` is the share of *all* requests, failed ones included, that met every objective;
    ``goodput_per_s`` the same as a rate.
    """

    requests: int
    failed: int
    duration_s: float
    ttft_s: Summary
    tpot_s: Summary
    itl_s: Summary
    e2e_s: Summary
    slo: Slo
    attained: float
    goodput_per_s: float
    requests_per_s: float
    output_tokens_per_s: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks (numpy's default) of an ascending sequence.

    Raises ValueError for an empty sequence or a percentage outside 0…100.
    """
    if not ordered:
        raise ValueError("a percentile of nothing")
    if not 0 <= percent <= 100:
        raise ValueError(f"{percent} is not between 0 and 100")
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarise(values: Iterable[float]) -> Summary:
    """Count, mean and percentiles; every figure but the count is None without values."""
    ordered = sorted(values)
    if not ordered:
        return Summary(0, None, None, None, None, None)
    return Summary(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def report(
    timings: Sequence[Timing], *, failed: int, duration_s: float, slo: Slo | None = None
) -> Report:
    """Sums up ``timings`` of the answered requests; ``failed`` counts those that were not."""
    slo = slo or Slo()
    good = sum(1 for timing in timings if slo.met(timing))
    requests = len(timings) + failed
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Report(
        requests=requests,
        failed=failed,
        duration_s=duration_s,
        ttft_s=summarise(t.ttft_s for t in timings if t.ttft_s is not None),
        tpot_s=summarise(t.tpot_s for t in timings if t.tpot_s is not None),
        itl_s=summarise(gap for timing in timings for gap in timing.gaps_s),
        e2e_s=summarise(timing.e2e_s for timing in timings),
        slo=slo,
        attained=good / requests if requests else 0.0,
        goodput_per_s=good * per_s,
        requests_per_s=len(timings) * per_s,
        output_tokens_per_s=sum(timing.output_tokens for timing in timings) * per_s,
    )
