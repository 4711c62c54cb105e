"""A running gateway, as commands ask it: over https as `service.tls.ENVIRONMENT` says, and as the
operator whose token is in `TOKEN`."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvatlas.service import logs
from kvatlas.service.admin import TOKEN_HEADER
from kvatlas.service.http_client import HttpClient

GET_TIMEOUT_S = 10.0
TOKEN = "KVATLAS_ADMIN_TOKEN"


def add_url(parser: argparse.ArgumentParser) -> None:
    """Which one."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of the gateway (%(default)s)"
    )


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """How and how much a service logs."""
    formats = "lines on stderr: text, or a JSON object each (%(default)s)"
    parser.add_argument("--log-format", choices=logs.FORMATS, default="text", help=formats)
    levels = "info: a line about each request, too (%(default)s)"
    parser.add_argument("--log-level", choices=logs.LEVELS, default="warning", help=levels)


@asynccontextmanager
async def client() -> AsyncIterator[HttpClient]:
    """To ask it with."""
    token = os.environ.get(TOKEN, "")
    headers = [(TOKEN_HEADER.encode(), token.encode("latin-1", "replace"))] if token else []
    made = HttpClient(headers=headers)
    try:
        yield made
    finally:
        await made.close()


async def page(url: str, path: str) -> Any:
    """One of its JSON pages. Raises EngineError where it does not answer."""
    async with client() as asked:
        return await asked.get_json(url.rstrip("/") + path, timeout_s=GET_TIMEOUT_S)
