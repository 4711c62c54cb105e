"""Prices in seconds, from running estimates of what each engine really does.

Nothing here is a constant for long: each estimate starts from a prior that weighs as much as a
few observations and follows what is measured from then on, with its spread.
"""

from __future__ import annotations

import math

import msgspec

from kvatlas.core.layout import Compute, Layout
from kvatlas.core.records import Tier

_DECAY = 0.97  # an observation weighs half after 23 further ones
_PRIOR_WEIGHT = 4.0
_BELIEVED = 3.0  # times the usual error

# Priors for a first load from each tier, bytes/s; replaced by what is measured.
PRIOR_BYTES_PER_S = {Tier.DRAM: 20e9, Tier.DISK: 3e9, Tier.OBJECT: 2e9, Tier.PEER: 5e9}
PRIOR_LATENCY_S = 0.005
_POOL_KNOWN = 24  # observations of a pool before an engine is compared with it: half of the prior
_FACTOR_PRIOR_S = 2.0  # seconds of agreement with the pool that an engine starts with
_FACTOR_MAX = 8.0  # engines further apart than this do not belong in one pool
_PRIOR_CROWD_S = 0.004  # decode slowed by one more request in flight, over one answer


class Line:
    """Exponentially decayed least squares of y = intercept + slope · x, both at least zero."""

    def __init__(self, intercept: float, slope: float, x_typical: float) -> None:
        """The prior is two pseudo-observations, at x = 0 and at ``x_typical``."""
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._error2 = self._usual = 0.0
        self.count = 0
        self.intercept, self.slope = intercept, slope
        for x in (0.0, x_typical):
            self._add(x, intercept + slope * x, _PRIOR_WEIGHT / 2)

    def _add(self, x: float, y: float, weight: float) -> None:
        self._w += weight
        self._x += weight * x
        self._y += weight * y
        self._xx += weight * x * x
        self._xy += weight * x * y

    def at(self, x: float) -> float:
        """The estimate of y at ``x``."""
        return self.intercept + self.slope * x

    def observe(self, x: float, y: float) -> None:
        """Learn from one measured pair; what is not a finite number ≥ 0 is ignored."""
        if not (math.isfinite(x) and math.isfinite(y) and x >= 0 and y >= 0):
            return
        expected = self.at(x)
        error = y - expected
        self._error2 = _DECAY * self._error2 + (1 - _DECAY) * error * error
        # A hiccup of the machine must not bend the line, but what stays must: the longer
        # predictions are wrong, the more of an error is believed.
        believed = _BELIEVED * max(self._usual, 0.25 * expected, 0.001)
        self._usual = _DECAY * self._usual + (1 - _DECAY) * min(abs(error), 4 * believed)
        y = expected + min(believed, max(-believed, error))
        for name in ("_w", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * _DECAY)
        self._add(x, y, 1.0)
        self.count += 1
        spread_x = self._xx * self._w - self._x * self._x
        slope = (self._xy * self._w - self._x * self._y) / spread_x if spread_x > 1e-12 else 0.0
        slope = max(0.0, slope)
        intercept = (self._y - slope * self._x) / self._w
        if intercept < 0:
            intercept, slope = 0.0, (self._xy / self._xx if self._xx else 0.0)
        self.intercept, self.slope = intercept, slope

    @property
    def spread(self) -> float:
        """Root mean square error of recent predictions, in the unit of y."""
        return math.sqrt(self._error2)


class Price(msgspec.Struct, frozen=True):
    """One plan in seconds. ``ttft_s`` is what the request will see; ``total_s`` decides.

    ``crowd_s``: what the requests in flight there will slow this one down by while it decodes.
    ``charge_s``: engine time taken from everybody else, at the router's rate of exchange. Without
    it a burst on one new prefix would be computed on every idle engine at once.
    """

    wait_s: float
    load_s: float
    recompute_s: float
    crowd_s: float
    charge_s: float

    @property
    def service_s(self) -> float:
        """What the engine spends on this request before its first token."""
        return self.load_s + self.recompute_s

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.wait_s + self.load_s + self.recompute_s

    @property
    def total_s(self) -> float:
        """What plans are compared by."""
        return self.ttft_s + self.crowd_s + self.charge_s


class PoolCost:
    """What time is worth on engines of one fingerprint, as measured over all of them."""

    def __init__(self, layout: Layout, prefill_tokens_per_s: float) -> None:
        """``prefill_tokens_per_s`` is the prior, until the first few answers."""
        self._compute = layout.compute or Compute(linear=1.0, attention=0.0)
        self._asked, self._operations = (0, 0), 0.0
        self._layout = layout
        self.grid_tokens = layout.grid_tokens
        unit = self._compute.prefill_flops(0, 2048)
        self.prefill = Line(PRIOR_LATENCY_S, 2048 / prefill_tokens_per_s / unit, unit)
        self.crowd = Line(0.0, _PRIOR_CROWD_S, 8.0)
        self.loads = {
            tier: Line(PRIOR_LATENCY_S, 1 / rate, 100e6) for tier, rate in PRIOR_BYTES_PER_S.items()
        }

    def prefill_flops(self, start: int, end: int) -> float:
        """Operations to compute tokens start…end-1 (tokens, where the model is not known)."""
        if (start, end) != self._asked:  # one prompt after another, each for many engines
            self._asked = start, end
            self._operations = self._compute.prefill_flops(start, end)
        return self._operations

    def load_bytes(self, tokens: int) -> int:
        """Bytes that a resume moves when ``tokens`` of it lie below hbm."""
        return self._layout.load_bytes(tokens)


class EngineCost:
    """One engine among its equals: the pool's estimates times how much slower it proved to be.

    The factor is drawn toward 1 by a prior of `_FACTOR_PRIOR_S`: otherwise one unlucky
    measurement would keep requests, and so better measurements, away for good. And it stays 1 until
    the pool itself is known: beside a prior that is too slow, whoever is measured first would
    look fast, and get everything.
    """

    def __init__(self, pool: PoolCost) -> None:
        self.pool = pool
        self.grid_tokens = pool.grid_tokens
        self._measured_s = self._predicted_s = _FACTOR_PRIOR_S

    @property
    def factor(self) -> float:
        """Seconds here per second on the pool's average engine."""
        return min(_FACTOR_MAX, max(1 / _FACTOR_MAX, self._measured_s / self._predicted_s))

    def recompute_s(self, start: int, end: int) -> float:
        """Seconds to prefill tokens start…end-1, attention included."""
        return self.pool.prefill.at(self.pool.prefill_flops(start, end)) * self.factor

    def load_s(self, tier_tokens: tuple[int, ...]) -> float:
        """Seconds to load what a resume takes from below hbm; ``tier_tokens`` as in `Resume`."""
        total = 0.0
        for tier, tokens in enumerate(tier_tokens):
            if tier != Tier.HBM and tokens:
                total += self.pool.loads[Tier(tier)].at(self.pool.load_bytes(tokens))
        return total

    def observe_prefill(self, start: int, end: int, seconds: float) -> None:
        """One request's own service time: first token minus when the engine could begin it."""
        flops = self.pool.prefill_flops(start, end)
        predicted = self.pool.prefill.at(flops)
        known = self.pool.prefill.count >= _POOL_KNOWN
        if known and math.isfinite(seconds) and seconds >= 0:
            prior = (1 - _DECAY) * _FACTOR_PRIOR_S
            believed_s = min(seconds, _FACTOR_MAX * predicted)
            self._measured_s = _DECAY * self._measured_s + believed_s + prior
            self._predicted_s = _DECAY * self._predicted_s + predicted + prior
        self.pool.prefill.observe(flops, seconds)

    def observe_load(self, tier: Tier, tokens: int, seconds: float) -> None:
        """One request whose resume came from ``tier`` and took ``seconds`` beyond its prefill."""
        self.pool.loads[tier].observe(self.pool.load_bytes(tokens), max(0.0, seconds))

    def observe_decode(self, in_flight: int, seconds: float) -> None:
        """One answer took ``seconds`` after its first token, among ``in_flight`` others."""
        self.pool.crowd.observe(float(in_flight), seconds)

    def crowd_s(self, in_flight: int) -> float:
        """Seconds that ``in_flight`` requests add to one more; never quite free, so that equal
        plans spread."""
        return max(self.pool.crowd.slope, _PRIOR_CROWD_S / 4) * in_flight
