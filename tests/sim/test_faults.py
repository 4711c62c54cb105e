"""Worlds with faults: nothing is violated, a planted bug is, and a seed comes out again."""

from __future__ import annotations

import msgspec
import pytest

from kvatlas.cli.main import main
from kvatlas.sim.canaries import REGISTRY
from kvatlas.sim.faults_run import Report, run_seed, run_seeds


def test_nothing_is_violated() -> None:
    report = Report.of(run_seeds(range(40)))
    assert report.seeds == 40
    assert report.violations == 0, report.failing
    assert report.answered > 1_000
    assert report.promises > 500  # or the worlds are too poor to say anything


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_planted_bug_is_found(name: str) -> None:
    found: dict[str, int] = {}
    for seed in range(40):
        found = run_seed(seed, canary=name).found
        if found.get(name):
            return
    raise AssertionError(f"{name}: not found in 40 seeds")


def test_the_same_seed_plays_again_line_by_line() -> None:
    told: list[list[str]] = [[], []]
    results = [run_seed(3, say=lines.append) for lines in told]
    assert told[0] == told[1]
    assert len(told[0]) > 100
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seeds", "0"],
        ["--seeds", "-3"],
        ["--first-seed", "-1"],
        ["--jobs", "0"],
        ["--canary", "nonsense"],
        ["--seeds", "2", "--verbose"],
    ],
)
def test_bad_input(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "faults", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    if "--canary" in arguments:
        assert all(name in error for name in REGISTRY)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "faults", "--seeds", "2", "--jobs", "1", "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert told["seeds"] == 2
    assert told["violations"] == 0
    assert set(told["classes"]) >= {"wrong-bytes", "resurrected", "leak", "convergence"}
