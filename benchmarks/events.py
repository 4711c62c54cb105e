"""KV events into the directory, with 64 workers and 10 million block-holders in it, beside Dynamo.

Both sides are filled with the same world (`world.outline`): what that takes per block-holder, map
from engine hashes included, is the first figure. Then events with new blocks of 256 tokens, 128,
16 or 1 of them in each, in three forms:

- decoded, with what identifies the blocks handed in: hashes for Dynamo's radix tree, as its API
  takes them, and our keys for us. Nobody hashes;
- decoded, with token ids: both hash them (Dynamo without a key), and its event is made of that;
- as engines send them, over ZMQ, with token ids: our feed, and Dynamo's selection service. Each
  process holds the sending socket too. The directory is a new one for this.

Rates are per second of processor time, all threads, since the machine may be busy with other
things; beside them those of wall time.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from rich.console import Console
from rich.table import Table

from benchmarks import world
from benchmarks.directory import CHAIN_BLOCKS, chains, made, resident_bytes
from benchmarks.dynamo import dynamo
from kvatlas.core.directory import Directory
from kvatlas.core.events import BlockStored
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher
from kvatlas.service.feed import Feed, Source

CONTEXTS = 651  # 10 million block-holders
BLOCKS = {128: 128_000, 16: 64_000, 1: 16_000}  # blocks per event → blocks in a round
WIRE_BLOCKS = {128: 32_000, 16: 32_000, 1: 8_192}
ROUNDS = 5
QUEUE_MAX = 4_000  # messages on their way to our feed: it drops what waits beyond 10,000
FORMS = ("decoded, handed in", "decoded, hashed", "wire bytes")
FLOORS = {"decoded, handed in": {128: 1.0, 1: 3.0}}


class Handed(Keyring):
    """Hands out keys in place of hashing: an event has them where its tokens would be."""

    def chain(
        self, parent: bytes, tokens: Any, block_tokens: int, extras: Sequence[bytes] = ()
    ) -> list[bytes]:
        keys: list[bytes] = tokens
        return keys


def keys_of(hashes: Sequence[int]) -> Any:
    """A key per hash."""
    return [struct.pack("<2Q", name, ~name % 2**64) for name in hashes]


def handed(event: BlockStored) -> BlockStored:
    """The same blocks by keys."""
    return msgspec.structs.replace(event, tokens=keys_of(event.hashes))


class Ours:
    """The filled directory."""

    def __init__(self, contexts: int) -> None:
        self._ring = Keyring(b"a secret for the benchmark")
        self._workers = [Publisher(f"worker-{i}") for i in range(world.WORKERS)]
        self.directory = Directory(Handed(b"a secret for the benchmark"))
        for worker in self._workers:
            self.directory.register(worker, plain(world.BLOCK_TOKENS), b"\1" * 32)
        before = resident_bytes()
        for _, node in world.outline(contexts):
            keys = keys_of(node.hashes)
            event = BlockStored(tuple(node.hashes), node.parent, keys, world.BLOCK_TOKENS)
            for worker in node.workers:
                self.directory.apply(self._workers[worker], [event])
        self.bytes_per_holder = (resident_bytes() - before) / self.directory.holders

    def ingest(self, seed: int, blocks: int, per_event: int) -> list[float]:
        """As `dynamo_child.Peer.tree_ingest`."""
        events = list(
            itertools.islice(chains(seed, world.BLOCK_TOKENS, per_event), blocks // per_event)
        )
        turns = [
            (self._workers[n * per_event // CHAIN_BLOCKS % world.WORKERS], [handed(event)])
            for n, event in enumerate(events)
        ]
        held, apply = self.directory.holders, self.directory.apply
        began, cpu = time.perf_counter(), time.process_time()
        for worker, event in turns:
            apply(worker, event)
        alone_s, alone_cpu_s = time.perf_counter() - began, time.process_time() - cpu
        assert self.directory.holders == held + blocks
        cpu = time.process_time()
        for event in events:
            self._ring.chain(b"a parent's key..", event.tokens, event.block_tokens)
        return [alone_s, alone_cpu_s, time.process_time() - cpu]


async def wire_ingest(seed: int, blocks: int, per_event: int) -> list[float]:
    """As `dynamo_child.Peer.wire_ingest`, by our feed."""
    directory, [publisher] = made(1)
    feed, context = Feed(directory), zmq.Context()
    try:
        socket = context.socket(zmq.XPUB)
        socket.sndhwm = 0
        endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        feed.add(publisher, Source(endpoint))
        while not await asyncio.to_thread(socket.poll, 100):
            pass
        socket.recv()
        encode = msgspec.msgpack.encode
        messages, _ = world.messages(seed, blocks, per_event, CHAIN_BLOCKS, encode)
        [status] = feed.status()
        began, cpu = time.perf_counter(), time.process_time()
        waiting = deque(enumerate(messages))
        while directory.holders < blocks:
            while waiting and waiting[0][0] - status.messages < QUEUE_MAX:
                number, message = waiting.popleft()
                socket.send_multipart([b"", number.to_bytes(8, "big"), message])
            await asyncio.sleep(0.001)
            if time.perf_counter() > began + 120:
                raise TimeoutError(f"{directory.holders} of {blocks} blocks arrived: {status}")
        return [time.perf_counter() - began, time.process_time() - cpu]
    finally:
        await feed.close()
        context.destroy(linger=0)


def measure() -> tuple[dict[str, float], dict[tuple[str, int], list[tuple[float, ...]]]]:
    """Bytes per holder of both, and of each form and size samples of (our CPU seconds, theirs,
    our seconds, theirs) per block, in alternating rounds."""
    samples: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    with dynamo() as peer:
        theirs = peer.call("tree_fill", CONTEXTS)
        ours = Ours(CONTEXTS)
        memory = {
            "holders": ours.directory.holders,
            "ours": round(ours.bytes_per_holder, 1),
            "theirs": round(theirs, 1),
        }
        for turn in range(ROUNDS):
            for size, blocks in BLOCKS.items():
                seed = turn << 10 | size  # else a size would bring blocks of another again
                here = ours.ingest(seed, blocks, size)
                there = peer.call("tree_ingest", seed, blocks, size, CHAIN_BLOCKS)
                row = (here[1], there[1], here[0], there[0])
                _keep(samples, (FORMS[0], size), row, blocks)
                row = (here[1] + here[2], there[1] + there[2], 0.0, 0.0)
                _keep(samples, (FORMS[1], size), row, blocks)
            for size, blocks in WIRE_BLOCKS.items():
                here = asyncio.run(wire_ingest(turn, blocks, size))
                there = peer.call("wire_ingest", turn, blocks, size, CHAIN_BLOCKS)
                row = (here[1], there[1], here[0], there[0])
                _keep(samples, (FORMS[2], size), row, blocks)
    return memory, samples


def _keep(
    samples: dict[tuple[str, int], list[tuple[float, ...]]],
    of: tuple[str, int],
    row: tuple[float, ...],
    blocks: int,
) -> None:
    samples.setdefault(of, []).append(tuple(value / blocks for value in row))


def _rates(rows: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """Medians, in blocks per second; the ratio is that of the median round, with the extremes."""
    ratios = sorted(row[1] / row[0] for row in rows)
    medians = [statistics.median(row[i] for row in rows) for i in range(4)]
    names = ("ours_per_cpu_s", "theirs_per_cpu_s", "ours_per_s", "theirs_per_s")
    rates = {name: round(1 / value) for name, value in zip(names, medians, strict=True) if value}
    return rates | {
        "ratio": round(statistics.median(ratios), 2),
        "ratio_min": round(ratios[0], 2),
        "ratio_max": round(ratios[-1], 2),
    }


def run() -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    memory, samples = measure()
    print(
        f"{memory['holders']:,} block-holders of {world.WORKERS} workers: "
        f"{memory['ours']:.0f} bytes each, Dynamo's {memory['theirs']:.0f}"
    )
    figures: dict[str, Any] = {"memory": memory, "ingest": {}}
    table = Table(title="blocks taken in, median of rounds", title_justify="left")
    for name in ("", "blocks/event", "per CPU s", "Dynamo", "ratio", "floor", "per s", "Dynamo"):
        table.add_column(name, justify="right" if name else "left")
    for (form, size), rows in samples.items():
        rates = _rates(rows) | {"floor": FLOORS.get(form, {}).get(size, 0.0)}
        figures["ingest"].setdefault(form, {})[str(size)] = rates
        cells = [
            f"{rates[name]:,.0f}" if name in rates else ""
            for name in ("ours_per_cpu_s", "theirs_per_cpu_s", "ours_per_s", "theirs_per_s")
        ]
        ratio = f"{rates['ratio']:g} ({rates['ratio_min']:g} to {rates['ratio_max']:g})"
        floor = f"{rates['floor']:g}" if rates["floor"] else ""
        table.add_row(form, str(size), *cells[:2], ratio, floor, *cells[2:])
    Console(width=120).print(table)
    return figures
