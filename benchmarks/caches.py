"""Our `dram` and `disk` beside other caches' tiers of the same kind, on the same file system.

LMCache 0.5.6 in a process of its own: its cache in memory (L1), and its files, `fs` (buffered; its
pages are dropped before they are read) and `fs_native` with O_DIRECT. vLLM's `fs` tier (O_DIRECT),
where vLLM is installed, likewise. Values of 1 MiB, and of V4 Flash's body filled up to whole pages,
which O_DIRECT wants of the others. All in turns; ratios are medians of those within a round. Ours
sums and verifies every byte, the others none.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.connector import add, answer
from benchmarks.dataplane import DEPTH, MIB, V4_BYTES, bench_directory, finished, memory
from benchmarks.peers import ROOT, peer_python
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.extents import whole
from kvatlas.dataplane.tiers.base import Piece, Store
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.dram import DramStore

LMCACHE = "lmcache==0.5.6"
# What it needs of all that it asks for: the rest is for CUDA, or for stores that are not run here.
NEEDS = (
    *("torch", "numpy==2.2.6", "transformers", "numba", "safetensors", "nvtx"),
    *("aiofile", "aiofiles", "aiohttp", "awscrt", "blake3", "cachetools", "cryptography"),
    *("fastapi", "grpcio", "httpx", "huggingface_hub", "msgspec", "prometheus_client"),
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp"),
    *("opentelemetry-exporter-prometheus", "protobuf", "psutil", "py-cpuinfo", "pyyaml"),
    *("pyzmq", "redis", "sortedcontainers", "uvicorn"),
)
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
SIZES = {"1 MiB": MIB, "V4 body": whole(V4_BYTES)}
COUNT = 128
ROUNDS = 9
Act = Callable[[str], float]


@contextmanager
def child(
    python: Path, script: str, size: int, directory: Path
) -> Iterator[Callable[[str], float]]:
    """Another cache; told "TIER WHAT" it says how many seconds that took."""
    directory.mkdir()
    command = [
        str(python),
        "-P",
        str(ROOT / "benchmarks" / script),
    ]  # -P: our tokenize is no other's
    process = subprocess.Popen(
        [*command, str(size), str(COUNT), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"LMCACHE_LOG_LEVEL": "ERROR"},
    )

    def told(line: str) -> float:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        return float(answer(process))

    try:
        if answer(process).strip() != "ready":
            raise RuntimeError(f"{script}: no O_DIRECT in {directory}")
        yield told
    finally:
        process.kill()
        process.wait()


def store_act(store: Store, pieces: Callable[[], list[Piece]]) -> Act:
    """The same of one of ours."""

    def act(what: str) -> float:
        made = pieces()
        start = time.perf_counter()
        if what == "delete":
            store.delete([piece.name for piece in made])
        else:
            finished(store.write if what == "put" else store.read, made)
        return time.perf_counter() - start

    return act


def measured(size: int) -> dict[tuple[str, str], list[float]]:
    """Bytes per second by cache and direction, round by round."""
    with ExitStack() as stack, bench_directory() as directory:
        lmcache = stack.enter_context(
            child(peer_python(*NEEDS, alone=[LMCACHE]), "lmcache_child.py", size, directory / "l")
        )
        arena = Arena.create((COUNT + 2) * whole(size), directory=None)
        stack.callback(arena.close)
        area = memory(COUNT * whole(size))
        views = [area[n * whole(size) : n * whole(size) + size] for n in range(COUNT)]
        stores: dict[str, Store] = {
            "dram": DramStore(arena),
            "disk": DiskStore(directory / "d", (COUNT + 8) * whole(size + 512), threads=DEPTH),
        }
        for store in stores.values():
            stack.callback(store.close)
        acts: dict[str, Act] = {
            name: store_act(store, lambda: [Piece(b"%d" % n, v) for n, v in enumerate(views)])
            for name, store in stores.items()
        }
        for tier in ("l1", "fs", "fs_native"):
            acts[f"LMCache {tier}"] = lambda what, tier=tier: lmcache(f"{tier} {what}")  # type: ignore[misc]
        if VLLM.exists():
            vllm = stack.enter_context(child(VLLM, "vllm_fs_child.py", size, directory / "v"))
            acts["vLLM fs"] = lambda what: vllm(f"fs {what}")
        rates: dict[tuple[str, str], list[float]] = {}
        names = list(acts)
        for round_ in range(ROUNDS + 1):
            names.append(names.pop(0))  # nobody is always the first
            for what in ("put", "get", "delete"):
                os.sync()  # what was written into the page cache disturbs nobody else
                for name in names:
                    seconds = acts[name](what)
                    if round_ and what != "delete":
                        rates.setdefault((name, what), []).append(COUNT * size / seconds)
    return rates


def run() -> dict[str, Any]:
    """All of it; prints a table."""
    figures: dict[str, Any] = {}
    table = Table("", "", "GB/s", "beside", "GB/s", "ratio", "quartiles")
    for label, size in SIZES.items():
        rates = measured(size)
        for (name, what), theirs in rates.items():
            if name in ("dram", "disk"):
                continue
            ours = "dram" if name == "LMCache l1" else "disk"
            add(figures, table, (f"{ours} {what}", label, name), rates[ours, what], theirs)
    Console().print(table)
    return figures
