"""Intervals over rounds: what may be said of a mean, and of a difference between two arms. Pure.

A round is one play of the load with a seed of its own; requests within it depend on each other, so
rounds are what is resampled (bootstrap of the mean, percentile form). Of few rounds that form is
too narrow, so an interval also holds all of Student's. Rounds of two arms are paired: same number,
same requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from statistics import NormalDist, fmean, stdev

import msgspec

from kvatlas.report.latency import percentile

ROUNDS_MIN = 5  # below it an interval is a guess
CONFIDENCE = 0.95
_RESAMPLES = 2000
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
    mean, count = fmean(values), len(values)
    if count < ROUNDS_MIN:
        return Interval(mean, None, None)
    means = sorted([sum(draw(values)) / count for draw in _draws(count)])
    off = student(count - 1) * stdev(values) / math.sqrt(count)
    tail = (1 - CONFIDENCE) / 2 * 100
    low = min(percentile(means, tail), mean - off)
    return Interval(mean, low, max(percentile(means, 100 - tail), mean + off))


def share_interval(part: int, count: int) -> tuple[float, float]:
    """Of a share, by Wilson's score; ``count`` above 0. Right where cases are independent."""
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    share = part / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    whole = 1 + z * z / count
    return max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)


@lru_cache(maxsize=8)
def _draws(count: int) -> tuple[Callable[[Sequence[float]], Sequence[float]], ...]:
    """What each resampling takes out of ``count`` values."""
    rng = random.Random(_SEED)
    return tuple(itemgetter(*rng.choices(range(count), k=count)) for _ in range(_RESAMPLES))


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
