"""Intervals over rounds: what may be said of a mean, and of a difference between two arms. Pure.

A round is one play of the load with a seed of its own; requests within it depend on each other, so
rounds are what is resampled (bootstrap of the mean, percentile form). With few rounds that form is
too narrow; its tails are widened as Hesterberg (2015, "What teachers should know about the
bootstrap", 4.6.2) derives from Student's t. Rounds of two arms are paired: same number, same seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean

import msgspec

from kvatlas.report.latency import percentile

ROUNDS_MIN = 5  # below it an interval is a guess
CONFIDENCE = 0.95
_RESAMPLES = 10_000
_SEED = 20_150  # of the resampling: the same data give the same interval


class Interval(msgspec.Struct, frozen=True):
    """A mean and what holds the true one with 95 %; no interval (None) below ``ROUNDS_MIN``."""

    mean: float
    low: float | None
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def interval(values: Sequence[float]) -> Interval:
    """Of the mean of one value per round. Raises ValueError without values."""
    if not values:
        raise ValueError("the mean of nothing")
    mean = fmean(values)
    if len(values) < ROUNDS_MIN:
        return Interval(mean, None, None)
    means = sorted([fmean([values[i] for i in draw]) for draw in _draws(len(values))])
    tail = _tail(len(values)) * 100
    return Interval(mean, percentile(means, tail), percentile(means, 100 - tail))


def share_interval(part: int, count: int) -> tuple[float, float]:
    """Of a share, by Wilson's score; ``count`` above 0. Right where cases are independent."""
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    share = part / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    whole = 1 + z * z / count
    return max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)


@lru_cache(maxsize=8)
def _draws(count: int) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(_SEED)
    return tuple(tuple(rng.choices(range(count), k=count)) for _ in range(_RESAMPLES))


def _tail(count: int) -> float:
    """The share to cut off at each end, so that the interval is as wide as Student's would be."""
    return NormalDist().cdf(-math.sqrt(count / (count - 1)) * student(count - 1))


def student(freedom: int) -> float:
    """Student's t at 97.5 %, within 0.3 % from 4 degrees of freedom on.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    z, n = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2), freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
