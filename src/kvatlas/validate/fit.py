"""Least squares for a handful of parameters: Levenberg-Marquardt on logarithms, in plain Python.

Every parameter is positive and searched by its logarithm, so that a step is a ratio. Each has a
prior: a value that it is drawn to, and how far (the standard deviation of its logarithm). Where
data say nothing of a parameter it stays at its prior. Deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

_STEP = 0.04  # of the numeric derivative, in logarithms
_LIMIT = 0.7  # of one step: at most a factor of two
_TRIES = 5


class Prior(msgspec.Struct, frozen=True):
    """What is believed of a parameter: ``value``, give or take a factor of e to the ``spread``.
    Kept between ``low`` and ``high``."""

    value: float
    spread: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.value <= self.high < math.inf or not self.spread > 0:
            raise ValueError(f"impossible prior: {self}")


Parameters = Mapping[str, float]
Residuals = Callable[[Parameters], Sequence[float]]


class Fitted(msgspec.Struct, frozen=True):
    """The parameters found, the cost there (squared residuals and priors), and evaluations."""

    parameters: dict[str, float]
    cost: float
    evaluations: int


def fit(
    residuals: Residuals, priors: Mapping[str, Prior], *, rounds: int = 12, step: float = _STEP
) -> Fitted:
    """The parameters with the least sum of squared residuals and squared distances to the priors.

    ``residuals`` returns the same number of values for any parameters; a squared residual of 1
    weighs as much as one standard deviation of a prior.
    """
    return _Search(residuals, priors, step).run(rounds)


class _Search:
    def __init__(self, residuals: Residuals, priors: Mapping[str, Prior], step: float) -> None:
        self._residuals = residuals
        self._names = tuple(priors)
        self._priors = tuple(priors.values())
        self._step = step
        self._evaluations = 0

    def run(self, rounds: int) -> Fitted:
        x = [math.log(p.value) for p in self._priors]
        r = self._at(x)
        cost = self._cost(x, r)
        damping = 1e-2
        for _ in range(rounds):
            matrix, gradient = self._normal(x, r)
            before = cost
            for _ in range(_TRIES):
                y = self._moved(x, solve(_damped(matrix, damping), gradient))
                s = self._at(y)
                if (found := self._cost(y, s)) < cost:
                    x, r, cost, damping = y, s, found, damping / 3
                    break
                damping *= 5
            if before - cost < 1e-4 * before:
                break
        return Fitted(self._named(x), cost, self._evaluations)

    def _named(self, x: Sequence[float]) -> dict[str, float]:
        return {name: math.exp(v) for name, v in zip(self._names, x, strict=True)}

    def _at(self, x: Sequence[float]) -> Sequence[float]:
        self._evaluations += 1
        return self._residuals(self._named(x))

    def _pull(self, x: Sequence[float]) -> list[float]:
        """Distances to the priors, in their standard deviations."""
        return [(v - math.log(p.value)) / p.spread for v, p in zip(x, self._priors, strict=True)]

    def _cost(self, x: Sequence[float], r: Sequence[float]) -> float:
        cost = sum(v * v for v in r) + sum(v * v for v in self._pull(x))
        return cost if math.isfinite(cost) else math.inf

    def _moved(self, x: Sequence[float], change: Sequence[float]) -> list[float]:
        moved = [v - max(-_LIMIT, min(_LIMIT, d)) for v, d in zip(x, change, strict=True)]
        return [
            max(math.log(p.low), min(math.log(p.high), v))
            for v, p in zip(moved, self._priors, strict=True)
        ]

    def _normal(
        self, x: Sequence[float], r: Sequence[float]
    ) -> tuple[list[list[float]], list[float]]:
        """The normal equations: J'J and J'r, the priors included."""
        columns = []
        for j in range(len(x)):
            y = list(x)
            y[j] += self._step
            columns.append([(a - b) / self._step for a, b in zip(self._at(y), r, strict=True)])
        matrix = [[_dot(a, b) for b in columns] for a in columns]
        gradient = [_dot(a, r) for a in columns]
        for j, (pull, prior) in enumerate(zip(self._pull(x), self._priors, strict=True)):
            matrix[j][j] += 1 / prior.spread**2
            gradient[j] += pull / prior.spread
        return matrix, gradient


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _damped(matrix: Sequence[Sequence[float]], damping: float) -> list[list[float]]:
    return [
        [v * (1 + damping) if i == j else v for j, v in enumerate(row)]
        for i, row in enumerate(matrix)
    ]


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x with matrix · x = right, by Gaussian elimination with pivoting. The matrix is regular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (rows[i][size] - sum(rows[i][j] * x[j] for j in range(i + 1, size))) / rows[i][i]
    return x
