"""The assembled product is tested on the loop that it runs on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

# The stub publisher and the encodings of the feed's own tests are used here too.
sys.path.append(str(Path(__file__).resolve().parents[1] / "integration"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}
