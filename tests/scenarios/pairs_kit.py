"""Halves of pairs for the scenarios: engines that compute nothing and speak the protocols."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from harness import FakeWorker, answer

from kvatlas.config import WorkerConfig
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply


def body_of(request: Request) -> dict[str, Any]:
    return dict(json.loads(request.body))


def params_of(request: Request) -> dict[str, Any]:
    return dict(body_of(request)["kv_transfer_params"])


def bodies(worker: FakeWorker) -> list[dict[str, Any]]:
    """What clients' requests brought it."""
    return [body_of(request) for request in worker.got]


def ids(worker: FakeWorker) -> list[str]:
    return [request.header("x-request-id") for request in worker.got]


async def nixl_prefill(worker: FakeWorker, request: Request, reply: Reply) -> None:
    """As vLLM's NixlConnector: where the state lies, under a name of this request alone."""
    await prefills()(worker, request, reply)


def prefills(*missing: str, finish: str = "length", **said: Any) -> Callable[..., Any]:
    """The same, but for what it says of the state and of how it ended."""

    async def behave(worker: FakeWorker, request: Request, reply: Reply) -> None:
        if worker.gate is not None:
            await worker.gate.wait()
        body = body_of(request)
        if "kv_transfer_params" not in body:  # all of it is asked for
            await answer(worker, request, reply)
            return
        name = f"{worker.name}/{request.header('x-request-id')}"
        prompt = body.get("prompt")
        count = len(prompt) if isinstance(prompt, list) else 10
        usage = {
            "prompt_tokens": count,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": worker.cached_tokens},
        }
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": worker.name,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_num_tokens": count,
        } | said
        params = {key: value for key, value in params.items() if key not in missing}
        choices = [{"text": "x", "finish_reason": finish}]
        reply.send_json(200, {"choices": choices, "usage": usage, "kv_transfer_params": params})

    return behave


def fails(status: int, times: int = 1 << 30) -> Callable[..., Any]:
    """An engine that answers its first requests with an error."""
    left = times

    async def behave(worker: FakeWorker, request: Request, reply: Reply) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            reply.send_json(status, {"error": {"message": f"{worker.name} fails"}})
            return
        await answer(worker, request, reply)

    return behave


async def breaks(worker: FakeWorker, request: Request, reply: Reply) -> None:
    """It dies with the request."""
    reply.abort()


async def hangs(worker: FakeWorker, request: Request, reply: Reply) -> None:
    await asyncio.Event().wait()


def prefill(worker: FakeWorker, **more: Any) -> WorkerConfig:
    return worker.config(role="prefill", **more)


def decode(worker: FakeWorker, **more: Any) -> WorkerConfig:
    return worker.config(role="decode", **more)
