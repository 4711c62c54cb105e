"""Worlds with faults: nothing is violated, a planted bug is, and a seed comes out again."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvatlas.cli.main import main
from kvatlas.sim.canaries import REGISTRY
from kvatlas.sim.checkers import CLASSES
from kvatlas.sim.faults import KINDS
from kvatlas.sim.faults_run import Report, run_seed, run_seeds

#: Cheap worlds in which, all together, every kind of fault takes effect.
WORLDS = (13, 21, 30, 33, 38, 44, 47, 56, 70, 148)
#: Where a canary is found that seed 0 does not find.
FOUND_BY = {"bounds": 3, "convergence": 4, "over-promise": 1, "unexplained-error": 9}


def test_nothing_is_violated() -> None:
    report = Report.of(run_seeds(WORLDS))
    assert report.seeds == len(WORLDS)
    assert report.violations == 0, report.failing
    assert all(report.faults.values()), report.faults
    assert report.answered > 500
    assert report.promises > 300  # or the worlds are too poor to say anything


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_planted_bug_is_found(name: str) -> None:
    for seed in (FOUND_BY.get(name, 0), *range(40)):  # worlds change with what they are made of
        if run_seed(seed, canary=name).found.get(name):
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


def _digest(hash_seed: str) -> str:
    script = (
        "import hashlib; from kvatlas.sim.faults_run import run_seed; lines = []; "
        "run_seed(12, say=lines.append); print(hashlib.sha256(repr(lines).encode()).hexdigest())"
    )
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_the_same_seed_plays_the_same_in_another_process() -> None:
    lines: list[str] = []
    run_seed(12, say=lines.append)
    here = hashlib.sha256(repr(lines).encode()).hexdigest()
    assert _digest("4242") == here


def test_the_page_lists_kinds_and_classes() -> None:
    page = Path(__file__).parents[2] / "docs" / "fault-simulation.md"
    listed = re.findall(r"(?m)^\| `([\w-]+)` \|", page.read_text("utf-8"))
    assert listed == [*KINDS, *CLASSES]
    assert set(REGISTRY) >= set(CLASSES)


def test_a_failing_seed_says_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "faults", "--seeds", "1", "--canary", "resurrected"]) == 1
    told = capsys.readouterr().out
    assert "kvatlas sim faults --seed 0 --canary resurrected --verbose" in told
    assert re.search(r"first: \d+\.\d{3} s, resurrected: ", told)
    assert "  |" in told


@pytest.mark.long
def test_two_thousand_worlds() -> None:
    report = Report.of(run_seeds(range(2000), jobs=2))
    assert report.seeds == 2000
    assert report.violations == 0, report.failing
    assert all(report.faults[kind] > 100 for kind in KINDS)
