"""Fixtures of the tests of the HTTP layer and of token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from http_kit import Serve
from tokens_kit import local, model_dir, other_dir

from kvatlas.service.http import Limits
from kvatlas.service.http_client import (
    HttpClient,
)
from kvatlas.service.http_server import Handler, HttpServer

__all__ = ["local", "model_dir", "other_dir"]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[HttpServer] = []

    async def start(handler: Handler, **limits: float) -> HttpServer:
        server = HttpServer(handler, Limits(**limits))  # type: ignore[arg-type]
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.close()
        assert server.bodies_bytes == 0


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient(connect_timeout_s=1.0)
    yield client
    await client.close()
