"""Settings and fixtures that all tests share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings

# dev: quick and different every time. ci: the same examples in every run. nightly: far more.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if "CI" in os.environ else "dev")
settings.load_profile(PROFILE)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def shared_file() -> Callable[[str], Path]:
    """Finds large inputs that are not part of the repository; skips the test without them."""

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"../shared/{name} is not beside this repository")
        return path

    return find


REAL_TIME = {"integration", "scenarios"}  # real processes, sockets and clocks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """State machines name a number of examples that suits every day; at night it is ours. What runs
    on real clocks gets a second chance on a machine that stood still, and the summary names it."""
    for item in items:
        if item.path.parent.name in REAL_TIME or item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if PROFILE == "nightly":
        for machine in {getattr(item, "cls", None) for item in items}:
            if hasattr(machine, "settings"):
                machine.settings = settings(
                    machine.settings, max_examples=settings.default.max_examples
                )


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The gateway is tested on the loop that it runs on, the HTTP layer and the feed on both."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {}
    if item.path.name.startswith(("test_http", "test_tls", "test_gateway", "test_feed")):
        loops["uvloop"] = uvloop.new_event_loop
    if item.path.name == "test_gateway_serve.py":  # uvloop cannot close beside a live child
        loops = {"asyncio": asyncio.new_event_loop}
    elif not item.path.name.startswith("test_gateway"):
        loops["asyncio"] = asyncio.new_event_loop
    return loops
