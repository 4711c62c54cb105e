"""A pytest plugin (`-p plant_bug`): plants the bug PLANTED_BUG for all of a test run."""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, settings

from kvatlas.sim.planted import BUGS


def pytest_configure(config: pytest.Config) -> None:
    """For good: the process has no other purpose."""
    del config
    bug = BUGS[os.environ["PLANTED_BUG"]]
    owner, name = bug.place()
    setattr(owner, name, bug.changed())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nobody wants the smallest example."""
    for machine in {getattr(item, "cls", None) for item in items}:
        if hasattr(machine, "settings"):
            machine.settings = settings(
                machine.settings, phases=(Phase.generate,), derandomize=True, database=None
            )
