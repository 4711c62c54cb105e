"""1,000 engines and 100 million block-holders: what each part must carry, from costs measured now.

What one operation costs is measured in this run, on small parts: a directory with half a million
holders of 8 and of 1,000 engines (`scale_fill`), the feed on messages with token ids, ``kvatlas
serve`` in front of mock engines. Each engine's load is that of an engine of eight under Mooncake's
conversation trace. Everything in the second table is computed from these two.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import events, gateways, world
from benchmarks.directory import CHAIN_BLOCKS, made
from benchmarks.gateway import tokenizer_in
from benchmarks.gateway_peers import START_S, Stage, free_port
from benchmarks.peers import ROOT
from kvatlas.config import WorkerConfig
from kvatlas.core.directory import Limits
from kvatlas.core.keys import Keyring
from kvatlas.errors import EngineError
from kvatlas.service.engines import LOOKS_PER_S
from kvatlas.service.feed import Feed, Source
from kvatlas.service.http_client import HttpClient
from kvatlas.service.probe import pulse
from kvatlas.workload.published import PUBLISHED

ENGINES, HOLDERS = 1_000, 100_000_000
SMALL = 500_000  # holders of the directories that are filled to measure
PER_NODE = 8  # engines, and one agent
BLOCK_TOKENS = 256
BUSY = 0.7  # of a core that one process may use before it is full
POLL_S, BEAT_S = 1.0, 10 / 3  # looks at an engine; signs of life of a member to Valkey
_TRACE = PUBLISHED["mooncake-conversation"]
REQUESTS_S = _TRACE["requests"] / 3_537 / 8  # of one engine


class Costs(NamedTuple):
    """Of one operation: µs of processor time, or bytes."""

    request_us: float  # body in to answer out, 2,000 tokens, decision included
    chunk_us: float
    decision_us: float  # look-up and prices, no hashing, 8 candidates
    engine_us: float  # … and for each candidate more
    lookup_us: float  # 128 keys, 1,000 holders of their beginning
    hash_us: float  # per block
    wire_us: float  # per block of an event of 16, both ends of the socket
    wire_bytes: float  # per block
    holder_bytes: float
    feed_files: float  # open files per engine
    idle_us: float  # per second and engine of which nothing is heard
    look_us: float  # at an engine: its health, its page of metrics
    page_bytes: float  # of our own /metrics, per engine


def _filled(engines: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scale_fill", str(SMALL), str(engines)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def _hash_us() -> float:
    ring, tokens = Keyring(b"a secret for the benchmark"), bytes(4 * BLOCK_TOKENS * CHAIN_BLOCKS)

    def once() -> float:
        began = time.process_time()
        ring.chain(b"a parent's key..", tokens, BLOCK_TOKENS)
        return 1e6 * (time.process_time() - began) / CHAIN_BLOCKS

    return statistics.median(once() for _ in range(200))


async def _feed(engines: int = 100) -> tuple[float, float]:
    """Open files and idle processor time (µs per second) per engine that is followed."""
    directory, publishers = made(engines)
    feed, files = Feed(directory), len(os.listdir("/proc/self/fd"))
    for number, publisher in enumerate(publishers):
        feed.add(publisher, Source(f"tcp://127.0.0.1:{20_000 + number}"))
    files = len(os.listdir("/proc/self/fd")) - files
    began = time.process_time()
    await asyncio.sleep(3.0)
    idle_s = (time.process_time() - began) / 3.0
    await feed.close()
    return files / engines + 1, 1e6 * idle_s / engines  # and its connection, once it is there


async def _look_us(looks: int = 100) -> float:
    """One look at an engine that answers with a page that vLLM 0.32 gave."""
    with tempfile.TemporaryDirectory() as folder:
        page = ROOT / "tests" / "fixtures" / "recorded" / "nixl_decode_after.prom"
        shutil.copy(page, Path(folder) / "metrics")
        (Path(folder) / "health").write_text("")
        port, client = free_port(), HttpClient()
        server = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "http.server", str(port), "--directory", folder),
            *("--protocol", "HTTP/1.1"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        worker = WorkerConfig(name="w", url=f"http://127.0.0.1:{port}", engine="vllm", events="")
        try:
            until = time.monotonic() + START_S
            while True:
                try:
                    await pulse(client, worker, 30.0)
                    break
                except EngineError:
                    if time.monotonic() > until:
                        raise
                    await asyncio.sleep(0.2)
            began = time.process_time()
            for _ in range(looks):
                await pulse(client, worker, 30.0)
            return 1e6 * (time.process_time() - began) / looks
        finally:
            await client.close()
            server.kill()
            await server.wait()


async def _page_bytes(port: int, engine: str) -> float:
    """What one engine adds to the page of metrics."""
    client = HttpClient()
    answer = await client.request("GET", f"http://127.0.0.1:{port}/metrics")
    await client.close()
    return float(sum(len(line) + 1 for line in answer.body.splitlines() if engine.encode() in line))


def measure() -> Costs:
    """All of them, one after the other."""
    few, many = _filled(8), _filled(ENGINES)
    blocks = 32_000
    spent_s = [asyncio.run(events.wire_ingest(turn, blocks, 16))[1] for turn in range(3)]
    encode = msgspec.msgpack.encode
    messages, _ = world.messages(1, CHAIN_BLOCKS, 16, CHAIN_BLOCKS, encode)
    files, idle_us = asyncio.run(_feed())
    with tempfile.TemporaryDirectory() as scratch, Stage() as stage:
        both = gateways.two(stage, tokenizer_in(Path(scratch)))
        served = gateways.measure(stage, both, rounds=2)["one"]
        page_bytes = asyncio.run(_page_bytes(both["a"][1], '"w0'))
    return Costs(
        request_us=served["request_us"],
        chunk_us=served["chunk_us"],
        decision_us=few["decision_us"],
        engine_us=(many["decision_us"] - few["decision_us"]) / (ENGINES - 8),
        lookup_us=many["lookup_us"],
        hash_us=_hash_us(),
        wire_us=1e6 * statistics.median(spent_s) / blocks,
        wire_bytes=sum(map(len, messages)) / CHAIN_BLOCKS,
        holder_bytes=many["bytes_per_holder"],
        feed_files=files,
        idle_us=idle_us,
        look_us=asyncio.run(_look_us()),
        page_bytes=page_bytes,
    )


class Load(NamedTuple):
    """What so many engines make, per second, and what it costs."""

    engines: int
    requests: float
    chunks: float
    blocks: float  # new ones; as many leave
    shared: float  # cores for requests and chunks: gateways share them
    each: float  # of a core that every gateway needs: events, polls, sockets
    gateways: float  # inf: none can follow


def looks_s(engines: int) -> float:
    """At all engines, by one gateway."""
    return min(engines / POLL_S, LOOKS_PER_S)


def load(costs: Costs, engines: int) -> Load:
    """At the load of the trace, with all engines as candidates of all requests."""
    requests = engines * REQUESTS_S
    chunks = requests * _TRACE["output_mean"]
    new_tokens = _TRACE["prompt_mean"] * (1 - _TRACE["ideal_hit"]) + _TRACE["output_mean"]
    blocks = requests * new_tokens / BLOCK_TOKENS
    hashing_us = costs.hash_us * _TRACE["prompt_mean"] / BLOCK_TOKENS
    request_us = costs.request_us + costs.engine_us * engines + hashing_us
    shared = (requests * request_us + chunks * costs.chunk_us) / 1e6
    # A block that leaves costs no more than one that comes, an agent no more than an engine.
    polls = (looks_s(engines) + engines / PER_NODE / POLL_S) * costs.look_us
    each = (2 * blocks * costs.wire_us + polls + engines * costs.idle_us) / 1e6
    count = shared / (BUSY - each) if each < BUSY else math.inf
    return Load(engines, requests, chunks, blocks, shared, each, count)


def full_at(fits: Callable[[int], bool]) -> int:
    """The most engines with which something still fits; it stops to at some number."""
    low, high = 0, 1
    while fits(high) and high < 1 << 24:
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def limits(costs: Costs) -> dict[str, int]:
    """Engines at which each part is full, the first first."""
    each = HOLDERS / ENGINES
    found = {
        "one gateway process: a core": full_at(lambda n: load(costs, n).gateways <= 1),
        "blocks_max, its default": int(Limits().holders_max / each),
        "publishers of a directory": Limits().publishers_max,
        "events and polls, in every gateway": full_at(lambda n: load(costs, n).each < BUSY),
        "64 GB for one directory": int(64e9 / costs.holder_bytes / each),
        "20,000 open files": int(20_000 / (costs.feed_files + 1)),  # and a kept connection
        "a decision within 10 ms": int((10_000 - costs.decision_us) / costs.engine_us),
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def carried(costs: Costs, at: Load) -> dict[str, str]:
    """What each part carries."""
    agents = at.engines / PER_NODE
    count = math.ceil(at.gateways) if math.isfinite(at.gateways) else 0
    holders = HOLDERS / ENGINES * at.engines
    decision_us = costs.decision_us + costs.engine_us * at.engines
    decision_us += costs.hash_us * _TRACE["prompt_mean"] / BLOCK_TOKENS
    return {
        "requests/s": f"{at.requests:,.0f}",
        "chunks/s": f"{at.chunks:,.0f}",
        "cores for requests and chunks": f"{at.shared:.2f}",
        "blocks/s that come, and go": f"{at.blocks:,.0f}",
        "wire, MB/s to each gateway": f"{at.blocks * costs.wire_bytes / 1e6:,.1f}",
        "core share of events, polls, sockets, per gateway": f"{at.each:.2f}",
        "gateways": str(count) if count else "none can follow",
        "directory, GB in each gateway": f"{holders * costs.holder_bytes / 1e9:,.1f}",
        "look-ups/s in each": f"{at.requests / count if count else 0:,.0f}",
        "a decision, ms": f"{decision_us / 1e3:.2f}",
        "feed sockets, open files in each": f"{costs.feed_files * at.engines:,.0f}",
        "looks at engines/s from each": f"{looks_s(at.engines):,.0f}",
        "looks at agents/s from each": f"{agents / POLL_S:,.0f}",
        "Valkey, operations/s: a record per request, signs of life": (
            f"{at.requests + (agents + count) / BEAT_S:,.0f}"
        ),
        "page of metrics, MB": f"{costs.page_bytes * at.engines / 1e6:.2f}",
    }


def run() -> dict[str, Any]:
    """Measure, compute, print the tables, return the figures."""
    costs = measure()
    console = Console(width=110)
    table = Table(title="measured", title_justify="left")
    for column in ("of one", ""):
        table.add_column(column, justify="right" if not column else "left")
    for name, value in costs._asdict().items():
        table.add_row(name, f"{value:,.2f}")
    console.print(table)
    sizes = [load(costs, n) for n in (ENGINES // 10, ENGINES, 4 * ENGINES)]
    table = Table(title="carried", title_justify="left")
    for column in ("engines", *(f"{at.engines:,}" for at in sizes)):
        table.add_column(column, justify="left" if column == "engines" else "right")
    rows = [carried(costs, at) for at in sizes]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    console.print(table)
    order = limits(costs)
    table = Table(title="what is full first", title_justify="left")
    for column in ("part", "engines"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, engines in order.items():
        table.add_row(name, f"{engines:,}")
    console.print(table)
    return {
        "measured": costs._asdict(),
        "carried": {str(at.engines): row for at, row in zip(sizes, rows, strict=True)},
        "full_at": order,
    }
