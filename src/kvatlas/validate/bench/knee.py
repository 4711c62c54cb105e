"""The knee: the highest rate of arrivals at which an arm still holds its objectives. Pure.

From a first rate up by doubling until a step misses, or down by halving until one holds; then
bisection, in ratios, until the two differ by no more than the tolerance.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

STEPS_MAX = 64
RATE_MIN, RATE_MAX = 1e-3, 1e5  # requests per second

Ending = Literal["found", "out of steps", "holds everywhere", "holds nowhere", "stopped"]


class Step(msgspec.Struct, frozen=True):
    """One play at one rate (requests per second). ``attained``: the share of its requests that met
    every objective, with its 95 % interval; ``held``: that is at least the wanted share."""

    rate: float
    requests: int
    failed: int
    duration_s: float
    attained: float
    low: float
    high: float
    held: bool
    goodput_per_s: float
    ttft_p95_s: float | None = None
    tpot_p95_s: float | None = None


class Knee(msgspec.Struct, frozen=True):
    """What the search found: ``holds`` is the highest rate that held, ``misses`` the lowest that
    did not; None where there was none. ``reason``: why it ended without both close together."""

    arm: str
    ending: Ending
    holds: float | None
    misses: float | None
    steps: tuple[Step, ...]
    reason: str = ""


class Search:
    """Which rate is next. Tell it each step that was played."""

    def __init__(self, first: float, *, tolerance: float, steps_max: int) -> None:
        """``tolerance``: 0.1 ends where the two rates differ by a tenth."""
        self._next: float | None = first
        self._tolerance = tolerance
        self._left = steps_max
        self.holds: float | None = None
        self.misses: float | None = None
        self.ending: Ending = "out of steps"

    def next_rate(self) -> float | None:
        """None: the search is over."""
        return self._next if self._left > 0 else None

    def told(self, rate: float, held: bool) -> None:
        """What came of the step at ``rate``."""
        self._left -= 1
        if held:
            self.holds = max(rate, self.holds or rate)
        else:
            self.misses = min(rate, self.misses or rate)
        if self.misses is None:
            self._go(rate * 2, "holds everywhere")
        elif self.holds is None:
            self._go(rate / 2, "holds nowhere")
        elif self.misses <= self.holds * (1 + self._tolerance):
            self._next, self.ending = None, "found"
        else:
            self._next = math.sqrt(self.holds * self.misses)

    def stop(self) -> None:
        """Nothing more can be learnt: why, whoever calls knows."""
        self._next, self.ending = None, "stopped"

    def _go(self, rate: float, otherwise: Ending) -> None:
        self._next = rate if RATE_MIN <= rate <= RATE_MAX else None
        self.ending = otherwise if self._next is None or self._left <= 0 else "out of steps"
