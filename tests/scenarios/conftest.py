"""The assembled product is tested on the loop that it runs on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

# What other tests share: the stub publisher, chat templates, encodings of events.
TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS), str(TESTS / "integration")]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}
