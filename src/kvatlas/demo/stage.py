"""Puts kvatlas in front of running engines and plays the same chats under two policies."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvatlas.connectors.child import Child, free_ports
from kvatlas.demo.play import ask, play
from kvatlas.demo.table import Run, summarize
from kvatlas.errors import EngineError
from kvatlas.service.http_client import HttpClient
from kvatlas.workload.chats import Chat

BASELINE = "round_robin"
OURS = "price"
REQUEST_ID_HEADER = "x-request-id"

_ROUNDS = 3
_LATE_S = 10.0  # engines, gateway and clients share a few cores: late is not gone


class Engines(msgspec.Struct, frozen=True):
    """Running engines of one model: ``urls`` by worker name. ``tokenizer`` is the model's
    directory, or "" where kvatlas is to use the engine's own tokenize endpoint."""

    kind: str  # vllm or stub
    model: str
    urls: dict[str, str]
    layout: str = "auto"
    tokenizer: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """Both runs, and what ``explain`` says of one request of the second."""

    before: Run
    after: Run
    explained: str


class Played(msgspec.Struct, frozen=True):
    """One policy's run: totals, ``explain`` of the request that was served most from a cache, and
    the URL of the gateway (which may have ended)."""

    totals: Run
    explained: str
    url: str


class Stage:
    """The gateway's side of a demo. Every child that it starts is appended to ``children`` before
    it runs, so that the caller can end them all, whatever happens."""

    def __init__(self, engines: Engines, directory: Path, children: list[Child]) -> None:
        self.engines = engines
        self._directory = directory
        self._children = children
        self._prefill_tokens_per_s = 8000.0

    async def measure(self) -> float:
        """Tokens per second that a cold prompt is computed at while every engine does the same.

        The gateways that are started afterwards begin with this figure: the best of a few rounds,
        since other work on the machine only ever slows one down. Raises EngineError.
        """
        await self.empty_caches()  # the first request of an engine is slower: not that one
        client = HttpClient()
        try:
            rounds = [await self._round(client, number) for number in range(_ROUNDS)]
        finally:
            await client.close()
        self._prefill_tokens_per_s = max(rounds)
        return self._prefill_tokens_per_s

    async def _round(self, client: HttpClient, number: int) -> float:
        """All engines at once, each with the same prompt that none has seen; the slowest counts."""
        words = " ".join(f"{(word + 1) * (7919 + number) % 1000}" for word in range(400))
        cold = [{"role": "user", "content": words}]
        answers = await asyncio.gather(
            *(
                ask(client, url, self.engines.model, cold, output_tokens=1)
                for url in self.engines.urls.values()
            )
        )
        return min(a.prompt_tokens / a.ttft_s for a in answers)

    def serve(self, policy: str) -> Child:
        """Starts ``kvatlas serve`` with ``policy``; blocks until it is ready."""
        port = free_ports(1)[0]
        config = self._directory / f"{policy}.toml"
        config.write_text(self._config(policy, port), "utf-8")
        gateway = Child(
            f"kvatlas ({policy})",
            [sys.executable, "-m", "kvatlas", "serve", "--config", str(config)],
            log=self._directory / f"kvatlas-{policy}.log",
            url=f"http://127.0.0.1:{port}",
            health="/ready",
        )
        self._children.append(gateway)
        gateway.start()
        gateway.wait_ready(deadline_s=60.0)
        return gateway

    async def run(
        self,
        policy: str,
        chats: Sequence[Chat],
        *,
        output_tokens: int,
        pace: float = 1.0,
        tick: Callable[[], None] = lambda: None,
        keep: bool = False,
    ) -> Played:
        """The chats on empty caches under one policy; its gateway is ended unless ``keep``."""
        await self.empty_caches()
        gateway = self.serve(policy)
        started = time.monotonic()
        answers = await play(
            gateway.url,
            self.engines.model,
            chats,
            output_tokens=output_tokens,
            pace=pace,
            tick=tick,
        )
        wall_s = time.monotonic() - started
        best = max(answers, key=lambda a: a.cached_tokens)
        explained = await _explain(gateway.url, best.headers.get(REQUEST_ID_HEADER, ""))
        if not keep:
            gateway.stop()
        return Played(summarize(policy, answers, wall_s), explained, gateway.url)

    async def empty_caches(self) -> None:
        """Drops every engine's prefix cache, then sends it a word: vLLM announces that its cache
        is gone only with its next step. Raises EngineError when an engine refuses."""
        client = HttpClient()
        try:
            for name, url in self.engines.urls.items():
                answer = await client.request("POST", url + "/reset_prefix_cache", timeout_s=30.0)
                if answer.status != 200:
                    raise EngineError(f"{name}: cache reset refused with status {answer.status}")
                hello = [{"role": "user", "content": "Hello"}]
                await ask(client, url, self.engines.model, hello, output_tokens=1)
        finally:
            await client.close()

    def _config(self, policy: str, port: int) -> str:
        lines = [
            "[gateway]",
            f"port = {port}",
            f"health_timeout_s = {_LATE_S:g}",
            "[router]",
            f'policy = "{policy}"',
            f"prefill_tokens_per_s = {self._prefill_tokens_per_s:.1f}",
            "[tokenizer]",
            f"path = {_quoted(self.engines.tokenizer)}",
        ]
        for name, url in self.engines.urls.items():
            lines += [
                "[[worker]]",
                f'name = "{name}"',
                f'url = "{url}"',
                f'engine = "{self.engines.kind}"',
                f"layout = {_quoted(self.engines.layout)}",
            ]
        return "\n".join(lines) + "\n"


async def _explain(url: str, request_id: str) -> str:
    client = HttpClient()
    try:
        answer = await client.request("GET", f"{url}/kvatlas/explain/{request_id}")
    finally:
        await client.close()
    if answer.status != 200:
        raise EngineError(f"{url}: explain {request_id}: status {answer.status}")
    return answer.body.decode("utf-8", "replace").rstrip()


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()  # a JSON string is a TOML basic string
