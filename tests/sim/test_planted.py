"""Planted bugs: each changes what it says, leaves nothing behind, and the worlds find it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvatlas.cli.main import main
from kvatlas.core.directory import Directory
from kvatlas.errors import ConfigError
from kvatlas.sim import (
    planted_books,
    planted_feed,
    planted_register,
    planted_routes,
    planted_tiers,
)
from kvatlas.sim.canaries import REGISTRY
from kvatlas.sim.checkers import CLASSES
from kvatlas.sim.faults_run import run_seed
from kvatlas.sim.planted import BELOW, BUGS, planted
from kvatlas.sim.planted_bug import Bug
from kvatlas.sim.planted_score import score

MODULES = (planted_feed, planted_books, planted_routes, planted_tiers, planted_register)


def test_names_are_unique_and_classes_known() -> None:
    assert len(BUGS) == sum(len(module.BUGS) for module in MODULES) >= 30
    assert not set(BUGS) & set(REGISTRY)
    assert {bug.kind for bug in BUGS.values()} <= {*CLASSES, "ledger-sums"}
    assert BELOW == {bug.name for bug in planted_tiers.BUGS} < set(BUGS)


@pytest.mark.parametrize("name", sorted(BUGS))
def test_the_symbol_exists_and_changes(name: str) -> None:
    bug = BUGS[name]
    owner, attribute = bug.place()
    before = getattr(owner, attribute)
    with planted(name):
        during = getattr(owner, attribute)
        assert during.__code__.co_filename == f"<planted {name}>"
        code, old = during.__code__, before.__code__
        told = (code.co_code, code.co_consts, code.co_names)
        assert told != (old.co_code, old.co_consts, old.co_names)
    assert getattr(owner, attribute) is before


def test_a_bug_that_no_longer_fits_the_code_says_so() -> None:
    gone = Bug("x", "leak", "core.directory:Directory.nothing", "", "a", "b")
    with (
        pytest.raises(ConfigError, match="there is no core"),
        gone(),
    ):
        pass
    other = Bug("x", "leak", "core.directory:Directory.clear", "", "no such line", "b")
    with pytest.raises(ConfigError, match="0 times, not once: adapt the bug"), other():
        pass
    twice = Bug("x", "leak", "core.directory:Directory.clear", "", "slot.bit", "b")
    with pytest.raises(ConfigError, match="not once"), twice():
        pass
    assert Directory.clear.__code__.co_filename.endswith("directory.py")


@pytest.mark.parametrize(
    "name",
    [
        *("gap-unnoticed", "restart-keeps-claims", "replay-applied-twice"),
        *("leases-of-ended-reads", "wrong-tier-let-go"),
    ],
)
def test_some_are_found_at_once(name: str) -> None:
    found = score(name, range(5))
    assert found.seeds
    assert BUGS[name].kind in found.classes
    assert not run_seed(found.seeds - 1).found  # it was the bug that was found


def test_what_is_not_found_is_told() -> None:
    assert score("quota-not-returned", range(1)).seeds == 0  # no tiers in that world


def test_the_page_has_every_bug() -> None:
    page = Path(__file__).parents[2] / "docs" / "fault-simulation.md"
    listed = re.findall(r"(?m)^\| ([\w-]+) \| [^|]+ \| `[\w.:]+` \|", page.read_text("utf-8"))
    assert listed == list(BUGS)


def test_the_command_takes_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sim", "faults", "--seeds", "1", "--canary", "gap-unnoticed", "--json"]
    assert main(arguments) == 1
    told = msgspec.json.decode(capsys.readouterr().out)
    assert told["canary"] == "gap-unnoticed"
    assert told["classes"]["resurrected"] > 0


@pytest.mark.parametrize("name", ["all-of-them", "", "gap_unnoticed"])
def test_an_unknown_name_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "faults", "--seeds", "1", "--canary", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1
