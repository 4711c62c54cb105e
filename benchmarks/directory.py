"""The directory's memory, and its steadiness under churn. How fast it takes events in: `events`.

Every measurement runs in a process of its own; blocks are one chain of 256-token blocks after the
other, 128 blocks each, with random engine hashes.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.dynamo import dynamo
from benchmarks.peers import ROOT
from kvatlas.core.directory import Directory
from kvatlas.core.events import BlockRemoved, BlockStored
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher

BLOCK_TOKENS = 256
CHAIN_BLOCKS = 128
MEMORY_BLOCKS = 1_000_000  # block-holders
CHURN_BLOCKS = 10_000_000
LIVE_BLOCKS = 100_000
CHURN_BLOCK_TOKENS = 16  # tokens do not matter to memory, and hashing them costs most of the time
_FINGERPRINT = b"\1" * 32


def resident_bytes() -> int:
    """Resident memory of this process, with what is garbage gone."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def made(workers: int, block_tokens: int = BLOCK_TOKENS) -> tuple[Directory, list[Publisher]]:
    """An empty directory and its publishers."""
    directory = Directory(Keyring(b"a secret for the benchmark"))
    publishers = [Publisher(f"worker-{i}") for i in range(workers)]
    for publisher in publishers:
        directory.register(publisher, plain(block_tokens), _FINGERPRINT)
    return directory, publishers


def chains(seed: int, block_tokens: int, per_event: int = CHAIN_BLOCKS) -> Iterator[BlockStored]:
    """Endless events, ``per_event`` blocks each, that make chains of 128 unique blocks."""
    source = random.Random(seed)
    while True:
        parent = None
        for _ in range(CHAIN_BLOCKS // per_event):
            hashes = tuple(source.getrandbits(64) for _ in range(per_event))
            tokens = source.randbytes(4 * per_event * block_tokens)
            yield BlockStored(hashes, parent, tokens, block_tokens)
            parent = hashes[-1]


def memory(workers: int) -> dict[str, float]:
    """Bytes per block-holder when every block is held by ``workers`` publishers."""
    directory, publishers = made(workers)
    before = resident_bytes()
    events = chains(1, BLOCK_TOKENS)
    while directory.holders < MEMORY_BLOCKS:
        event = next(events)
        for publisher in publishers:
            directory.apply(publisher, [event])
    return {"bytes_per_holder": (resident_bytes() - before) / directory.holders}


def churn() -> dict[str, float]:
    """Store and remove 10 million unique blocks with 100,000 live; memory after the first million
    and at the end."""
    directory, [publisher] = made(1, CHURN_BLOCK_TOKENS)
    live: list[BlockStored] = []
    warm = 0
    for number, event in enumerate(chains(2, CHURN_BLOCK_TOKENS)):
        directory.apply(publisher, [event])
        live.append(event)
        if len(live) > LIVE_BLOCKS // CHAIN_BLOCKS:
            gone = live.pop(number * 7919 % len(live))  # in no order that an array would like
            directory.apply(publisher, [BlockRemoved(gone.hashes)])
        if number == CHURN_BLOCKS // 10 // CHAIN_BLOCKS:
            warm = resident_bytes()
        if number == CHURN_BLOCKS // CHAIN_BLOCKS:
            break
    end = resident_bytes()
    return {
        "blocks": float(CHURN_BLOCKS),
        "live": float(directory.holders),
        "warm_mb": warm / 1e6,
        "end_mb": end / 1e6,
        "growth_percent": 100 * (end - warm) / warm,
    }


def _alone(function: str, *args: int) -> dict[str, float]:
    """One measurement in a fresh process."""
    code = (
        "import json, sys; from benchmarks import directory as d;"
        "print(json.dumps(getattr(d, sys.argv[1])(*map(int, sys.argv[2:]))))"
    )
    command = [sys.executable, "-c", code, function, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def _peer_memory(workers: int) -> float:
    with dynamo() as peer:
        return float(peer.call("tree_memory", workers, MEMORY_BLOCKS, CHAIN_BLOCKS))


def run() -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    table = Table(title="bytes per block-holder (resident)", title_justify="left")
    for column in ("content", "kvatlas", "Dynamo RadixTree"):
        table.add_column(column, justify="left" if column == "content" else "right")
    figures: dict[str, Any] = {"memory": {}}
    for workers, name in ((1, "unique blocks"), (8, "shared by 8 workers")):
        ours, theirs = _alone("memory", workers)["bytes_per_holder"], _peer_memory(workers)
        figures["memory"][name] = {"ours_bytes": round(ours, 1), "theirs_bytes": round(theirs, 1)}
        table.add_row(name, f"{ours:.0f}", f"{theirs:.0f}")
    Console(width=100).print(table)

    figures["churn"] = _alone("churn")
    row = figures["churn"]
    print(
        f"churn: {row['blocks']:,.0f} unique blocks stored and removed, {row['live']:,.0f} live: "
        f"{row['warm_mb']:.1f} → {row['end_mb']:.1f} MB ({row['growth_percent']:+.1f} %)"
    )
    return figures
