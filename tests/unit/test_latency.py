"""The statistics on values that can be checked by hand."""

from __future__ import annotations

import pytest

from kvatlas.report.latency import Report, Slo, Timing, percentile, report, summarise
from kvatlas.report.table import latency_table, seconds, slo_text


def test_percentiles_interpolate_between_the_closest_ranks() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert percentile(values, 0) == 1.0
    assert percentile(values, 50) == 2.5
    assert percentile(values, 75) == 3.25
    assert percentile(values, 100) == 4.0
    assert percentile([7.0], 99) == 7.0
    hundred = [float(i) for i in range(101)]
    assert [percentile(hundred, p) for p in (50, 95, 99)] == [50.0, 95.0, 99.0]


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 100.1)])
def test_percentile_refuses_nonsense(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match=r"percentile of nothing|between 0 and 100"):
        percentile(values, percent)


def test_summary_sorts_by_itself_and_of_nothing_is_empty() -> None:
    summary = summarise(iter([3.0, 1.0, 2.0]))
    assert (summary.count, summary.mean, summary.p50, summary.max) == (3, 2.0, 2.0, 3.0)
    assert summarise([]).count == 0
    assert summarise([]).p99 is None


def test_tpot_is_per_request_and_needs_two_tokens() -> None:
    assert Timing(1.0, 3.0, 5).tpot_s == 0.5
    assert Timing(1.0, 1.0, 1).tpot_s is None
    assert Timing(None, 3.0, 5).tpot_s is None


@pytest.mark.parametrize(
    ("timing", "met"),
    [
        (Timing(1.0, 2.0, 11), True),  # exactly on both limits
        (Timing(1.1, 2.0, 11), False),
        (Timing(1.0, 2.1, 11), False),
        (Timing(0.5, 0.5, 1), True),  # no second token: no TPOT to miss
        (Timing(None, 0.5, 11), False),  # nobody saw the first token
    ],
)
def test_slo(timing: Timing, met: bool) -> None:
    assert Slo(ttft_s=1.0, tpot_s=0.1).met(timing) is met
    assert Slo().met(timing)


def _three_and_a_failure() -> Report:
    timings = [
        Timing(0.1, 1.1, 11, (0.1,) * 10),
        Timing(0.2, 2.2, 11, (0.2,) * 10),
        Timing(3.0, 3.0, 1),
    ]
    return report(timings, failed=1, duration_s=4.0, slo=Slo(ttft_s=1.0, tpot_s=0.15))


def test_report_counts_failures_against_the_goodput() -> None:
    result = _three_and_a_failure()
    assert (result.requests, result.failed) == (4, 1)
    assert result.attained == 0.25
    assert result.goodput_per_s == 0.25
    assert result.requests_per_s == 0.75
    assert result.output_tokens_per_s == 23 / 4
    assert result.ttft_s.p50 == 0.2
    assert result.tpot_s.count == 2
    assert result.itl_s.count == 20
    assert result.itl_s.p99 == 0.2
    assert result.e2e_s.max == 3.0


def test_report_of_nothing_divides_by_nothing() -> None:
    result = report([], failed=0, duration_s=0.0)
    assert (result.attained, result.goodput_per_s, result.ttft_s.p50) == (0.0, 0.0, None)


def test_table_shows_each_latency_in_a_readable_unit() -> None:
    table = latency_table(_three_and_a_failure())
    rows = list(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert [row[0] for row in rows] == ["TTFT", "TPOT", "ITL", "E2E"]
    assert rows[0][1:] == ("200.0 ms", "2.72 s", "2.94 s", "3.00 s")
    assert (seconds(None), seconds(0.00025), seconds(0.5)) == ("–", "250 µs", "500.0 ms")
    assert slo_text(Slo(ttft_s=4.0, tpot_s=0.05)) == "TTFT ≤ 4.00 s and TPOT ≤ 50.0 ms"
    assert slo_text(Slo()) == "none stated"
