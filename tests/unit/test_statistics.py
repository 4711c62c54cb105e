"""Intervals over rounds: they hold the mean as often as they say."""

from __future__ import annotations

import random

import pytest

from kvatlas.report.statistics import ROUNDS_MIN, interval, share_interval, student


def test_fewer_rounds_than_five_have_no_interval() -> None:
    few = interval([1.0] * (ROUNDS_MIN - 1))
    assert (few.mean, few.low, few.high, few.excludes_zero) == (1.0, None, None, False)
    assert interval([1.0] * ROUNDS_MIN).excludes_zero
    with pytest.raises(ValueError, match="nothing"):
        interval([])


@pytest.mark.parametrize("rounds", [5, 10])
def test_equal_arms_are_called_different_as_often_as_is_said(rounds: int) -> None:
    """One in twenty; a bare bootstrap of five rounds would do so one in six times."""
    rng = random.Random(7)
    plays = 120
    found = [interval([rng.gauss(0, 1) for _ in range(rounds)]) for _ in range(plays)]
    assert 1 <= sum(i.excludes_zero for i in found) <= plays / 9


def test_students_t_and_wilsons_share_are_those_of_the_tables() -> None:
    table = {4: 2.7764, 5: 2.5706, 9: 2.2622, 19: 2.0930, 99: 1.9842}
    assert {n: student(n) for n in table} == pytest.approx(table, rel=0.003)
    assert share_interval(95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert share_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
