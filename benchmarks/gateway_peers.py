"""The contenders of the gateway's figures, each a process in front of the same mock engines."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.gateway_events import BLOCK_TOKENS
from benchmarks.gateway_load import Texts
from benchmarks.peers import ROOT, peer_python
from kvatlas.errors import EngineError
from kvatlas.service.http_client import HttpClient, Response

SGLANG_ROUTER = "sglang-router==0.3.2"
SMG = "smg==1.13.0"
START_S = 180.0


class Child:
    """A process that is stopped at the end; `cpu_s` counts its children too."""

    def __init__(self, *command: object, stdin: bool = False, stdout: bool = True) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE if stdout else self.log,
            stderr=self.log,
            cwd=ROOT,
        )

    def line(self) -> str:
        """Its next line on stdout."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        text = self.process.stdout.readline().decode() if ready else ""
        if not text:
            self.fail("no answer")
        return text

    def ask(self, job: dict[str, Any]) -> Any:
        """One job to the load client, and its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def cpu_s(self) -> float:
        process = psutil.Process(self.process.pid)
        times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
        return float(sum(t.user + t.system for t in times))

    def fail(self, what: str) -> None:
        self.log.seek(0)
        said = self.log.read().decode("utf-8", "replace")[-2000:]
        raise SystemExit(f"{self.process.args!r}: {what}\n{said}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            if pipe is not None:
                pipe.close()


class Stage:
    """Two mock engines, the load client, and whoever is put in front. All end with the block."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._scratch = tempfile.TemporaryDirectory()
        self.load = self.module("benchmarks.gateway_load", stdin=True)
        ports = json.loads(self.module("benchmarks.gateway_mock", 2).line())
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.engine_port = int(ports[0])

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in reversed(self._children):
            child.stop()
        self._scratch.cleanup()

    def module(self, name: str, *args: object, stdin: bool = False) -> Child:
        """A module of ours as a process, until the block ends."""
        child = Child(sys.executable, "-m", name, *args, stdin=stdin)
        self._children.append(child)
        return child

    def bytes_only(self) -> tuple[Child, int]:
        """Our gateway with engines in turn: what bytes and sockets alone cost."""
        child = self.module("benchmarks.gateway_serve", *self.urls)
        return child, int(json.loads(child.line()))

    def kvatlas(
        self, tokenizer: Path, *argv: str, more: str = "", name: str = "kvatlas"
    ) -> tuple[Child, int]:
        """``kvatlas serve`` as it is, with engines that announced the warm prompts. ``argv``: what
        is run instead; ``more``: further tables of its file, which is called ``name``."""
        events = json.loads(self.module("benchmarks.gateway_events", tokenizer, 2).line())
        wanted = free_port()
        lines = [f'[gateway]\nport = {wanted}\n[tokenizer]\npath = "{tokenizer}"\n']
        for index, (url, (endpoint, replay)) in enumerate(zip(self.urls, events, strict=True)):
            lines.append(
                f'[[worker]]\nname = "w{index}"\nurl = "{url}"\nlayout = "{BLOCK_TOKENS}"\n'
                f'events = "{endpoint}"\nreplay = "{replay}"\n'
            )
        config = Path(self._scratch.name) / f"{name}.toml"
        config.write_text("".join(lines) + more)
        child = self.module(*(argv or ("kvatlas", "serve")), "--config", config)
        port = int(child.line().split("http://127.0.0.1:")[1].split(" ")[0])
        self._wait(child, lambda: expected_hit_tokens(port) > 0, "warm prompts are not expected")
        return child, port

    def sglang_router(self) -> tuple[Child, int]:
        return self._peer("sglang_router.launch_router")

    def smg(self) -> tuple[Child, int]:
        return self._peer("smg.launch_router")

    def _peer(self, module: str) -> tuple[Child, int]:
        python, port = peer_python(SGLANG_ROUTER, SMG), free_port()
        child = Child(
            *(python, "-m", module, "--worker-urls", *self.urls, "--policy", "round_robin"),
            *("--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port()),
            *("--log-level", "error"),
            stdout=False,
        )
        self._children.append(child)
        self._wait(child, lambda: complete(port, "x") is not None, "it does not answer")
        return child, port

    def _wait(self, child: Child, true: Any, what: str) -> None:
        deadline_s = time.monotonic() + START_S
        while not true():
            if child.process.poll() is not None or time.monotonic() > deadline_s:
                child.fail(what)
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def complete(port: int, prompt: str) -> Response | None:
    """One completion; None where it fails."""

    async def ask() -> Response | None:
        client = HttpClient()
        body = json.dumps({"model": "mock", "prompt": prompt, "max_tokens": 1}).encode()
        headers = [(b"content-type", b"application/json")]
        url = f"http://127.0.0.1:{port}/v1/completions"
        try:
            answer = await client.request("POST", url, headers=headers, body=body)
        except EngineError:
            return None
        finally:
            await client.close()
        return answer if answer.status == 200 else None

    return asyncio.run(ask())


def expected_hit_tokens(port: int) -> int:
    """What the gateway expects to hit of the first warm prompt."""
    answer = complete(port, Texts().prompt(0))
    headers = dict(answer.headers) if answer is not None else {}
    if b"x-kvatlas-fallback" in headers:
        print("fallback:", headers[b"x-kvatlas-fallback"].decode(), file=sys.stderr)
    return int(headers.get(b"x-kvatlas-expected-hit-tokens", 0))
