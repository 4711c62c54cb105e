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
_POOL_KNOWN = 24  # observations of a pool before its prices count for more than a guess
_DOUBT = 1.5  # times the error that its own estimates would have to fall short of the pool's
_PRIOR_CROWD_S = 0.004  # decode slowed by one more request in flight, over one answer
_PRIOR_BESIDE_S = 0.0001  # prefill slowed by one more request that decodes beside it

_KEPT = 0.98  # of what `Parts` knows, with each observation
_SIGNAL = 0.2  # weight of one error in what is usual, and in the side to which errors lean
_USUAL = (0.02, 0.3)  # relative error: never thought smaller, and before anything is known
_STAY = 0.03  # observations that speak for what was known before, part by part
_FALL = 0.3  # no rate falls below so much of itself at once: none ends at zero


class Line:
    """Exponentially decayed least squares of y = intercept + slope · x, both at least zero.

    One that ``follows`` decays faster while errors lean to one side, as `Parts` do: where nobody
    else looks for changes (`core.ways` does for transfers), and little of an error is chance."""

    def __init__(
        self, intercept: float, slope: float, x_typical: float, *, follows: bool = False
    ) -> None:
        """The prior is two pseudo-observations, at x = 0 and at ``x_typical``."""
        self._follows = follows
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._error2 = self._usual = self._lean = self._off = 0.0
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
        # predictions are wrong, the more of an error is believed, and the faster the old fades.
        believed = _BELIEVED * max(self._usual, 0.25 * expected, 0.001)
        self._usual = _DECAY * self._usual + (1 - _DECAY) * min(abs(error), 4 * believed)
        error = min(believed, max(-believed, error))
        kept = _DECAY
        if self._follows:
            self._lean += _SIGNAL * (error - self._lean)
            self._off += _SIGNAL * (abs(error) - self._off)
            lean = max(0.0, 2 * abs(self._lean) - self._off)  # up to half is chance
            kept *= _remembered(lean, self._off)
        for name in ("_w", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * kept)
        self._add(x, expected + error, 1.0)
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


def _remembered(lean: float, usual: float) -> float:
    """Of what is known beside one more observation: all of it, or the less the more of the
    ``usual`` error goes to one side, half at the least."""
    return 1 - 0.5 * min(1.0, abs(lean) / usual) ** 2 if usual else 1.0


#: One request's prefill: once, operations with weights, those of attention, and the requests that
#: decode in the step that it has to wait for.
Work = tuple[float, float, float, float]


class Parts:
    """Seconds as a sum of parts, so much work each, at rates that follow what is measured.

    Least squares in shares of what was predicted: short requests count as much as long ones. What
    is old fades, and the faster the more the errors lean to one side (the tracking signal of Trigg
    and Leach, 1967): a change is believed after a few observations, a hiccup is not.
    """

    def __init__(self, rates: Work) -> None:
        """``rates``: seconds per unit of each kind of work, the prior; all above zero."""
        self._prior = rates
        self._factors: tuple[float, ...] = (1.0,) * len(rates)
        self._rates = rates
        self._squares = ((0.0,) * len(rates),) * len(rates)
        self._sums = (0.0,) * len(rates)
        self._lean = 0.0
        self.usual = _USUAL[1]  # relative error
        self.count = 0

    def copy(self) -> Parts:
        """What is known, as the prior of one who has seen nothing yet."""
        copy = Parts(self._rates)
        copy.usual = self.usual
        return copy

    def at(self, work: Work) -> float:
        """The estimate in seconds."""
        once, linear, attention, beside = self._rates
        return once * work[0] + linear * work[1] + attention * work[2] + beside * work[3]

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from one measurement; what is not a finite number above 0 is ignored."""
        expected = self.at(work)
        if not (math.isfinite(seconds) and seconds > 0 and expected > 0):
            return
        # A hiccup of the machine must not bend the rates; the longer predictions are wrong, the
        # more of an error is believed.
        believed = _BELIEVED * self.usual
        error = min(believed, max(-believed, math.log(seconds / expected)))
        self._lean += _SIGNAL * (error - self._lean)
        self.usual = max(_USUAL[0], self.usual + _SIGNAL * (abs(error) - self.usual))
        kept = _KEPT * _remembered(self._lean, self.usual)
        shares = [rate * units / expected for rate, units in zip(self._prior, work, strict=True)]
        ratio = math.exp(error)
        self._squares = tuple(
            tuple([kept * old + share * other for old, other in zip(row, shares, strict=True)])
            for row, share in zip(self._squares, shares, strict=True)
        )
        self._sums = tuple(
            [kept * old + share * ratio for old, share in zip(self._sums, shares, strict=True)]
        )
        self.count += 1
        # What nothing tells apart stays as it was.
        rows, sums = [list(row) for row in self._squares], list(self._sums)
        before = self._factors
        for index, factor in enumerate(before):
            rows[index][index] += _STAY / factor**2
            sums[index] += _STAY / factor
        found = _solved(rows, sums)
        factors = tuple(max(new, _FALL * old) for new, old in zip(found, before, strict=True))
        once, linear, attention, beside = (
            rate * factor for rate, factor in zip(self._prior, factors, strict=True)
        )
        self._factors, self._rates = factors, (once, linear, attention, beside)


def _solved(rows: list[list[float]], sums: list[float]) -> list[float]:
    """x with rows · x = sums; ``rows`` are symmetric and positive definite, and are used up."""
    for index, row in enumerate(rows):
        for below in range(index + 1, len(rows)):
            share = rows[below][index] / row[index]
            rows[below] = [one - share * other for one, other in zip(rows[below], row, strict=True)]
            sums[below] -= share * sums[index]
    found = [0.0] * len(rows)
    for index in range(len(rows) - 1, -1, -1):
        known = sum(a * b for a, b in zip(rows[index], found, strict=True))
        found[index] = (sums[index] - known) / rows[index][index]
    return found


class Price(msgspec.Struct, frozen=True):
    """One plan in seconds. ``ttft_s`` is what the request will see; ``total_s`` decides.

    ``hand_off_s``: until the second half of a pair has the state; 0 where one engine does it all;
    ``crowd_s``: what the requests in flight there will slow this one down by while it decodes;
    ``charge_s``: engine time taken from everybody else; both at the router's rates of exchange.
    Without the charge a burst on one new prefix would be computed on every idle engine at once.
    """

    wait_s: float
    load_s: float
    recompute_s: float
    crowd_s: float
    charge_s: float
    hand_off_s: float = 0.0

    @property
    def service_s(self) -> float:
        """What the engine spends on this request before its first token."""
        return self.load_s + self.recompute_s

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.wait_s + self.load_s + self.recompute_s + self.hand_off_s

    @property
    def total_s(self) -> float:
        """What plans are compared by."""
        return self.ttft_s + self.crowd_s + self.charge_s


class PoolCost:
    """What time is worth on engines of one fingerprint, as measured over all of them."""

    def __init__(
        self, layout: Layout, prefill_tokens_per_s: float, prefill_flops_per_s: float = 0.0
    ) -> None:
        """The prior, until the first few answers: ``prefill_flops_per_s`` where it is above 0 and
        the model's operations are known, else ``prefill_tokens_per_s``."""
        self._compute = layout.compute or Compute(linear=1.0, attention=0.0)
        self._asked, self._work = (0, 0), (1.0, 0.0, 0.0)
        self._layout = layout
        self.grid_tokens = layout.grid_tokens
        if prefill_flops_per_s and layout.compute is not None:
            rate = 1 / prefill_flops_per_s
        else:
            rate = 2048 / prefill_tokens_per_s / self._compute.prefill_flops(0, 2048)
        self.prefill = Parts((PRIOR_LATENCY_S, rate, rate, _PRIOR_BESIDE_S))
        self.crowd = Line(0.0, _PRIOR_CROWD_S, 8.0)
        self.loads = {
            tier: Line(PRIOR_LATENCY_S, 1 / rate, 100e6, follows=True)
            for tier, rate in PRIOR_BYTES_PER_S.items()
        }

    @property
    def known(self) -> bool:
        """Whether enough was measured for prices to rest on more than the prior."""
        return self.prefill.count >= _POOL_KNOWN

    def work(self, start: int, end: int, beside: int = 0) -> Work:
        """Of computing tokens start…end-1 behind a step in which ``beside`` requests decode:
        operations, or tokens where the model is not known."""
        if (start, end) != self._asked:  # one prompt after another, each for many engines
            linear = self._compute.linear * (end - start)
            attention = self._compute.prefill_flops(start, end) - linear
            self._asked, self._work = (start, end), (1.0, linear, max(0.0, attention))
        return (*self._work, float(beside))

    def recompute_s(self, start: int, end: int, beside: int = 0) -> float:
        """As `EngineCost.recompute_s`, on an engine like all."""
        return self.prefill.at(self.work(start, end, beside))

    def load_bytes(self, tokens: int) -> int:
        """Bytes that a resume moves when ``tokens`` of it lie below hbm."""
        return self._layout.load_bytes(tokens)


class EngineCost:
    """One engine among its equals: the pool's estimates until it proves to be different.

    Until the pool itself is known nobody is: beside a prior that is too slow, whoever is measured
    first would look fast, and get everything.
    """

    def __init__(self, pool: PoolCost) -> None:
        self.pool = pool
        self.grid_tokens = pool.grid_tokens
        self.own: Parts | None = None
        self.usual = _USUAL[1]  # relative error, were it taken for one like all
        self.apart = 0.0  # from 0, like all, to 1, known by its own measurements

    def recompute_s(self, start: int, end: int, beside: int = 0) -> float:
        """Seconds to prefill tokens start…end-1, attention included, behind a step in which
        ``beside`` requests decode."""
        work = self.pool.work(start, end, beside)
        usual_s = self.pool.prefill.at(work)
        if self.own is None:
            return usual_s
        return usual_s + self.apart * (self.own.at(work) - usual_s)

    def load_s(self, tier_tokens: tuple[int, ...]) -> float:
        """Seconds to load what a resume takes from below hbm; ``tier_tokens`` as in `Resume`."""
        total = 0.0
        for tier, tokens in enumerate(tier_tokens):
            if tier != Tier.HBM and tokens:
                total += self.pool.loads[Tier(tier)].at(self.pool.load_bytes(tokens))
        return total

    def observe_prefill(self, work: Work, seconds: float) -> None:
        """What was computed, and its own service time: first token minus when the engine could
        begin it."""
        if self.pool.known:
            self._compare(work, seconds)
        self.pool.prefill.observe(work, seconds)

    def _compare(self, work: Work, seconds: float) -> None:
        """Equal engines differ by chance, and that is no reason to prefer one: an engine is apart
        as far as its own estimates prove better than those of all."""
        own = self.own
        if own is None:
            own = self.own = self.pool.prefill.copy()
            self.usual = own.usual
        if math.isfinite(seconds) and seconds > 0:
            error = abs(math.log(seconds / self.pool.prefill.at(work)))
            self.usual = max(_USUAL[0], self.usual + _SIGNAL * (min(1.0, error) - self.usual))
        own.observe(work, seconds)
        self.apart = max(0.0, 1 - _DOUBT * (own.usual / self.usual) ** 2)

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
