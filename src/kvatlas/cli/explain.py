"""``kvatlas explain``: why a request went where it went, asked from a running gateway."""

from __future__ import annotations

import argparse
import asyncio
from urllib.parse import quote

from kvatlas.cli.running import GET_TIMEOUT_S, add_url, client
from kvatlas.errors import EngineError

_EPILOG = """\
  kvatlas explain 5f3c…                 the id is in each answer's x-request-id header
  kvatlas explain last --url http://gateway:8000
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "explain",
        description="Ask a running gateway why one request was routed as it was.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("request_id", metavar="REQUEST-ID", help='or "last"')
    add_url(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises EngineError (exit status 2) when the gateway does not answer or does not know it."""
    print(asyncio.run(_ask(args.url.rstrip("/"), args.request_id)), end="")
    return 0


async def _ask(url: str, request_id: str) -> str:
    path = f"{url}/kvatlas/explain/{quote(request_id, safe='')}"
    async with client() as asked:
        answer = await asked.request("GET", path, timeout_s=GET_TIMEOUT_S)
    if answer.status == 404:
        raise EngineError(f"the gateway keeps no decision for {request_id!r} (router.explain_max)")
    if answer.status != 200:
        raise EngineError(f"{url}: status {answer.status}: {answer.said()}")
    return answer.body.decode("utf-8", "replace")
