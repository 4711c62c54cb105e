"""Real engines for tests: a tiny model, servers on free ports, and questions over plain HTTP."""

from __future__ import annotations

import atexit
import functools
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import install
import pytest

from kvatlas.connectors.child import Child, free_ports
from kvatlas.connectors.sglang_cpu import SglangEngine
from kvatlas.connectors.vllm_cpu import VllmEngine

HERE = Path(__file__).resolve().parent
SGLANG_SHIM = HERE / "sglang_cpu_shim"
MODEL = "tiny"
READY_S = 300.0


def require(engine: str) -> Path:
    """The environment of an engine; skips the test, and says why, where it is not installed."""
    reason = install.missing(engine)
    if reason:
        pytest.skip(reason)
    return install.venv_of(engine)


def require_v4(engine: str = "vllm") -> Path:
    """The same where DeepSeek V4 can run: its kernels need AVX512-BF16 (see ``vllm_v4_shim``)."""
    flags = Path("/proc/cpuinfo").read_text("utf-8") if sys.platform == "linux" else ""
    if "avx512_bf16" not in flags and not ("avx512f" in flags and "cpuid_fault" in flags):
        pytest.skip("vLLM's kernels for DeepSeek V4 need a processor with AVX512-BF16")
    return require(engine)


@functools.cache
def tiny_model() -> Path:
    """A directory with a tiny Qwen3, made once per run by whichever engine's Python is there."""
    venv = next(install.venv_of(e) for e in ("vllm", "sglang") if not install.missing(e))
    directory = Path(tempfile.mkdtemp(prefix="kvatlas-tiny-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    script = str(HERE / "tiny_models.py")
    command = [str(venv / "bin" / "python"), script, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return directory


def vllm_engine(
    run_dir: Path,
    *,
    name: str = "vllm",
    kv_cache_bytes: int = 64 << 20,
    args: Sequence[str] = (),
) -> VllmEngine:
    """A vLLM server with the tiny model, not started yet. Blocks of 32 tokens."""
    return VllmEngine(
        require("vllm"),
        tiny_model(),
        name=name,
        port=free_ports(1)[0],
        log=run_dir / f"{name}.log",
        model_name=MODEL,
        kv_cache_bytes=kv_cache_bytes,
        args=args,
    )


def sglang_engine(
    run_dir: Path,
    *,
    name: str = "sglang",
    pool_tokens: int = 16384,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> SglangEngine:
    """An SGLang server with the tiny model, not started yet. Pages of 16 tokens.

    Its KV events, with replay, are on two TCP ports that `GET /server_info` tells.
    """
    port, events, replay = free_ports(3)
    config = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": "kv",
    }
    return SglangEngine(
        require("sglang"),
        tiny_model(),
        name=name,
        port=port,
        log=run_dir / f"{name}.log",
        model_name=MODEL,
        path=[SGLANG_SHIM],
        pool_tokens=pool_tokens,
        args=("--kv-events-config", json.dumps(config), *args),
        env=env,
    )


def post(url: str, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> Any:
    """One JSON question; asserts that the answer is 200. Text answers come as text."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    assert response.status == 200, (response.status, answer[:500])
    if response.headers.get_content_type() != "application/json":
        return answer.decode()
    return json.loads(answer)


def complete(url: str, prompt: list[int], *, tokens: int = 8, **more: Any) -> Any:
    """A greedy completion of token ids; returns the whole answer."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
    body["return_token_ids"] = True
    return post(url, "/v1/completions", body | more)


def cached_tokens(answer: Any) -> int:
    """What the engine says that it found in its cache."""
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


@contextmanager
def running(engines: Mapping[str, Child]) -> Iterator[None]:
    """All of them, started at once; ended in any case."""
    try:
        for engine in engines.values():
            engine.start()
        for engine in engines.values():
            engine.wait_ready(READY_S)
        yield
    finally:
        for engine in engines.values():
            engine.stop()
