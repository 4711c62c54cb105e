"""Settings and fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# dev: quick and different every time. ci: the same examples in every run. nightly: far more.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if "CI" in os.environ else "dev")
)

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
