"""The histogram of gaps between tokens, against the exact figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.report.latency import percentile, summarise
from kvatlas.sim.report import Gaps


@given(
    st.lists(
        st.tuples(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20), st.integers(1, 5)),
        min_size=1,
        max_size=10,
    )
)
def test_ranks_are_exact_to_half_a_percent(runs: list[tuple[list[float], int]]) -> None:
    gaps, values = Gaps(), []
    for gaps_s, count in runs:
        gaps.add_run(gaps_s, count)
        values += gaps_s * count
    values.sort()
    exact = summarise(values)
    told = gaps.summary()
    assert told.count == exact.count
    assert told.mean == pytest.approx(exact.mean)
    assert told.max == exact.max
    for percent in (0, 50, 95, 99, 100):
        rank = (len(values) - 1) * percent // 100
        assert gaps.percentile(percent) <= values[min(rank + 1, len(values) - 1)] * 1.011
        assert gaps.percentile(percent) >= values[rank] / 1.011
    assert percentile(values, 0) <= gaps.percentile(50) * 1.011


def test_nothing_and_zero() -> None:
    gaps = Gaps()
    assert gaps.summary().p50 is None
    with pytest.raises(ValueError, match="nothing"):
        gaps.percentile(50)
    gaps.add_run([], 3)
    gaps.add_run([0.0, 0.0], 2)
    assert (gaps.count, gaps.percentile(99)) == (4, 0.0)
