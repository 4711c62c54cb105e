"""Resume records into the register: commits at a fixed rate, each answered by Valkey's functions.

A standalone Valkey that appends to a file and syncs it every second (as the embedded one does), in
a process of its own, with records in it already. A commit is due every millisecond, one record of
300 bytes with an owner, a quota and an end; its time counts from when it was due, so that one that
waits for others is not better for it. Every tenth is followed by a bare PING over the same
connections.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from kvatlas.config_register import place_of
from kvatlas.core.register_values import (
    COMMITS_MAX,
    AskUsage,
    Commit,
    Committed,
    Record,
    ToldUsage,
)
from kvatlas.errors import RegisterError
from kvatlas.service.register import ValkeyRegister
from kvatlas.service.register_calls import slot_key
from kvatlas.service.register_embedded import EmbeddedServer
from kvatlas.service.register_servers import Servers, send

RATE_PER_S, SECONDS, PING_EVERY = 1000, 20.0, 10
RECORD_BYTES, KEY_BYTES = 300, 32
FILLED = 200 * COMMITS_MAX
TENANTS = tuple(f"{index:024x}" for index in range(20))
FLOOR_MS = 5.0
NAME, STORE = "bench", "store"
DEADLINE_S = 5.0
DAY_MS = 86_400_000


def run() -> dict[str, Any]:
    """Milliseconds of a commit and of a PING, and their ratio; prints a table."""
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, Any] = uvloop.run(_measured(Path(folder)))
    table = Table("what", "p50 ms", "p99 ms", "max ms")
    for what in ("commit", "ping"):
        of = figures[what]
        table.add_row(what, *(f"{of[name]:.2f}" for name in ("p50_ms", "p99_ms", "max_ms")))
    Console().print(table, f"commit / ping: {figures['commit_by_ping']:.2f} at the median")
    figures["floor"] = {
        "p99_ms": FLOOR_MS,
        "held": figures["commit"]["p99_ms"] < FLOOR_MS and not figures["failed"],
    }
    return figures


async def _measured(folder: Path) -> dict[str, Any]:
    server = EmbeddedServer(folder)
    await server.awake()
    servers = Servers(place_of(f"unix://{server.socket}"), slot_key(NAME))
    register = ValkeyRegister(servers, NAME)
    try:
        generation = (await _usage(register)).generation
        for _ in range(FILLED // COMMITS_MAX):
            await _commit(register, generation, tuple(_record() for _ in range(COMMITS_MAX)))
        commits, pings = await _paced(register, servers, generation)
        assert (await _usage(register)).records >= FILLED + len(commits)
        stats = await (await servers.client()).info("commandstats")
    finally:
        await register.close()
        await server.close()
    commit, ping = _summary(commits), _summary(pings)
    return {
        "rate_per_s": RATE_PER_S,
        "seconds": SECONDS,
        "records_before": FILLED,
        "failed": round(RATE_PER_S * SECONDS) - len(commits),
        "commit": commit,
        "ping": ping,
        "commit_by_ping": commit["p50_ms"] / ping["p50_ms"],
        "server_us_per_call": stats["cmdstat_fcall"]["usec_per_call"],
    }


async def _usage(register: ValkeyRegister) -> ToldUsage:
    said = await register.ask(AskUsage(STORE), DEADLINE_S)
    assert isinstance(said, ToldUsage)
    return said


async def _paced(
    register: ValkeyRegister, servers: Servers, generation: int
) -> tuple[list[float], list[float]]:
    """Seconds of each, from when it was due."""
    commits: list[float] = []
    pings: list[float] = []

    async def commit(due_s: float) -> None:
        try:
            await _commit(register, generation, (_record(),))
        except RegisterError:
            return  # it is missing among those that were measured
        commits.append(time.perf_counter() - due_s)

    async def ping() -> None:
        began_s = time.perf_counter()
        await send(await servers.client(), "PING")
        pings.append(time.perf_counter() - began_s)

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(round(RATE_PER_S * SECONDS)):
            due_s = began_s + number / RATE_PER_S
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(commit(due_s))
            if number % PING_EVERY == 0:
                group.create_task(ping())
    return commits, pings


async def _commit(register: ValkeyRegister, generation: int, records: tuple[Record, ...]) -> None:
    quota = dict.fromkeys(TENANTS, 1 << 40)
    said = await register.ask(Commit(STORE, generation, records, DAY_MS, quota), DEADLINE_S)
    assert isinstance(said, Committed)
    assert not any(said.refused)


def _record() -> Record:
    key = secrets.token_bytes(KEY_BYTES)
    owner = f"{TENANTS[key[0] % len(TENANTS)]}.1.{key[1]:024x}"
    return Record(key, owner, 1 << 20, secrets.token_bytes(RECORD_BYTES))


def _summary(seconds: list[float]) -> dict[str, float]:
    ranked = sorted(seconds)

    def at(share: float) -> float:
        return 1000 * ranked[min(math.ceil(share * len(ranked)), len(ranked)) - 1]

    return {"count": len(ranked), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)}
