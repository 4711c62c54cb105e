"""``kvatlas sim prices``, and what it counts."""

from __future__ import annotations

import json

import pytest

from kvatlas.cli.main import main
from kvatlas.sim.hidden import WARM_UP, Told, foretold


def runs(errors: list[float], change_at: int) -> list[tuple[list[Told], float]]:
    """One engine whose n-th answer comes at n, off by so much."""
    told = [Told(float(n), "e", 1.0 + error, 1.0) for n, error in enumerate(errors)]
    return [(told, float(change_at))]


def test_errors_are_told_before_and_after_the_change() -> None:
    steady, wrong = [0.08] * 80, [0.5] * 7
    result = foretold("f", runs([9.0] * WARM_UP + steady + wrong + steady, WARM_UP + 80))
    assert result.predictions == 80
    assert result.error_p50 == pytest.approx(0.08)
    assert result.error_p90 == pytest.approx(0.08)
    assert result.after == pytest.approx((0.5, 0.5, 0.29, 0.08, 0.08, 0.08))
    assert result.recovered_after == 5  # the median of the next five: two of them still wrong


def test_who_never_recovers_is_told() -> None:
    result = foretold("f", runs([0.08] * 60 + [0.5] * 60, 60))
    assert result.recovered_after == -1
    assert foretold("f", []).recovered_after == -1


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    line = "sim prices --family multi-turn --seeds 1 --requests 320 --engines 4 --json --quiet"
    assert main(line.split()) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["family"] == "multi-turn"
    assert found["error_p50"] < 0.10
    assert found["after"][0] > found["error_p50"]


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    line = "sim prices --family random --seeds 1 --requests 60 --engines 1 --quiet"
    assert main(line.split()) == 0
    assert "random" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--seeds 0", "--seeds 0"),
        ("--requests 0", "--requests 0"),
        ("--spread 0.5", "--spread 0.5"),
        ("--spread nan", "--spread nan"),
        ("--engines 0", "--engines 0"),
    ],
)
def test_what_cannot_be_is_refused(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"sim prices --seeds 1 {option} --quiet".split()) == 2
    assert said in capsys.readouterr().err
