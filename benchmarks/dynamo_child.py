"""NVIDIA Dynamo's side of the benchmarks, in a process of its own under ``.venv-peers``.

Reads one JSON command per line and answers with one JSON line; its own log goes to stderr. Needs
`ai-dynamo-runtime`, `pyzmq` and `msgspec`.
"""

from __future__ import annotations

import array
import asyncio
import gc
import itertools
import json
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from dynamo._core import RadixTree, SelectionService, compute_block_hash_for_seq

from benchmarks import world

_MODEL = "benchmark"
_STORE = b'{"event_id":%d,"data":{"stored":{"parent_hash":%s,"blocks":[%s]}},"dp_rank":0}'


def store_event(number: int, parent: int | None, hashes: Sequence[int], local: Sequence[int]):
    """One `KvCacheEvent` as `RadixTree.apply_event` takes it."""
    blocks = b",".join(
        b'{"block_hash":%d,"tokens_hash":%d}' % pair for pair in zip(hashes, local, strict=True)
    )
    return _STORE % (number, b"null" if parent is None else b"%d" % parent, blocks)


def resident_bytes() -> int:
    """Resident memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Publishers:
    """The engines' side of a selection service: one XPUB socket per worker, as vLLM publishes."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._sequences = [0] * world.WORKERS
        self.endpoints: list[str] = []
        for _ in range(world.WORKERS):
            socket = self._context.socket(zmq.XPUB)
            socket.sndhwm = 0
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            self._sockets.append(socket)
            self.endpoints.append(f"tcp://127.0.0.1:{port}")

    def await_subscriber(self, worker: int) -> None:
        """Until the service has subscribed; raises TimeoutError after ten seconds."""
        if not self._sockets[worker].poll(10_000):
            raise TimeoutError(f"the selection service never subscribed to worker {worker}")
        self._sockets[worker].recv()

    def send(self, node: world.Node) -> None:
        """Announce one run of blocks from each worker that holds it."""
        tokens = world.ints(node.tokens)
        event = ["BlockStored", node.hashes, node.parent, tokens, world.BLOCK_TOKENS, None, "GPU"]
        body = msgspec.msgpack.encode([time.time(), [event], 0])
        for worker in node.workers:
            self.send_body(worker, body)

    def send_body(self, worker: int, body: bytes) -> None:
        """One message, under the worker's next number."""
        number = self._sequences[worker].to_bytes(8, "big")
        self._sequences[worker] += 1
        self._sockets[worker].send_multipart([b"", number, body])


class Peer:
    """The selection service and the radix tree, filled with the same world."""

    def __init__(self) -> None:
        self.tree = RadixTree()
        self.service = SelectionService()
        self.tokens: list[list[int]] = []
        self.signed: list[list[int]] = []
        self.hashes: dict[str, list[list[int]]] = {}

    async def fill(self) -> None:
        """Fill both; returns when the service answers for the last run of every worker."""
        publishers = Publishers()
        for worker, endpoint in enumerate(publishers.endpoints):
            await self.service.upsert_worker(_worker(worker, endpoint))
            await asyncio.to_thread(publishers.await_subscriber, worker)
        for number, node in enumerate(world.nodes()):
            local = self.hash(world.ints(node.tokens))
            event = store_event(number, node.parent, node.hashes, local)
            for worker in node.workers:
                self.tree.apply_event(worker, event)
            publishers.send(node)
            await asyncio.sleep(0)
        self._prepare()
        for number, tokens in enumerate(self.tokens):
            await self._await_overlap(number, tokens)
        await self._reserve()

    async def _reserve(self) -> None:
        for number in range(world.IN_FLIGHT):
            tokens = world.ints(world.prompt(number, "miss"))
            await self.service.create_reservation(
                {
                    "model_name": _MODEL,
                    "selection_id": str(number),
                    "worker_id": number % world.WORKERS,
                    "dp_rank": 0,
                    "token_ids": tokens,
                }
            )

    def _prepare(self) -> None:
        self.tokens = [world.ints(world.prompt(i)) for i in range(world.PROMPTS)]
        # Its JSON form wants signed hashes and a chained hash beside each. Both are had for nothing
        # here: the conversion is made beforehand, and the block hashes stand in for the chain.
        self.signed = [
            array.array("q", array.array("Q", self.hash(t)).tobytes()).tolist() for t in self.tokens
        ]
        for match in ("full", "half", "miss"):
            self.hashes[match] = [
                self.hash(world.ints(world.prompt(i, match))) for i in range(world.PROMPTS)
            ]

    async def _await_overlap(self, worker: int, tokens: list[int]) -> None:
        """Raises TimeoutError when the service has not taken in all events after two minutes."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            answer = await self.service.select({"model_name": _MODEL, "token_ids": tokens})
            matched = answer["overlap"]["longest_matched"]  # tokens
            if answer["worker_id"] == worker and matched == world.PROMPT_TOKENS:
                return
            await asyncio.sleep(0.05)
        raise TimeoutError(f"the selection service answers {answer} for a prompt of {worker}")

    def hash(self, tokens: list[int]) -> list[int]:
        """Dynamo's block hashes of a prompt."""
        return compute_block_hash_for_seq(tokens, world.BLOCK_TOKENS)

    async def hash_select(self, number: int) -> None:
        """Token ids → hashes → a worker."""
        self.hash(self.tokens[number])
        await self.select_by_hash(number)

    async def select_by_hash(self, number: int) -> None:
        """Known hashes → a worker."""
        await self.service.select(
            {
                "model_name": _MODEL,
                "block_hashes": self.signed[number],
                "sequence_hashes": self.signed[number],
                "isl_tokens": world.PROMPT_TOKENS,
            }
        )

    async def hash_only(self, number: int) -> None:
        """Token ids → hashes."""
        self.hash(self.tokens[number])

    async def select(self, number: int) -> None:
        """Token ids → a worker, all inside the service."""
        await self.service.select({"model_name": _MODEL, "token_ids": self.tokens[number]})

    async def find(self, number: int, match: str) -> None:
        """A lookup whose answer is left in Rust."""
        self.tree.find_matches(self.hashes[match][number])

    async def scores(self, number: int, match: str) -> None:
        """A lookup with its answer as a dict."""
        _ = self.tree.find_matches(self.hashes[match][number]).scores

    def found(self, number: int, match: str) -> dict[str, int]:
        """Matching blocks by worker number, to check that both sides know the same."""
        scores = self.tree.find_matches(self.hashes[match][number]).scores
        return {str(worker): blocks for (worker, _), blocks in scores.items()}

    def tree_memory(self, workers: int, holders: int, chain: int) -> float:
        """Bytes per block-holder of a fresh radix tree in which ``workers`` hold every block."""
        tree = RadixTree()
        before, done = resident_bytes(), 0
        events = _tree_events(1, chain, chain)
        while done < holders:
            event = next(events)
            for worker in range(workers):
                tree.apply_event(worker, event)
                done += chain
        tree.find_matches([1])  # the tree works in a thread of its own: wait for it
        return (resident_bytes() - before) / done

    def tree_fill(self, contexts: int) -> float:
        """Fill the tree with the world of so many contexts; bytes per block-holder."""
        before, done = resident_bytes(), 0
        for number, (_, node) in enumerate(world.outline(contexts)):
            event = store_event(number, node.parent, node.hashes, node.hashes)
            for worker in node.workers:
                self.tree.apply_event(worker, event)
                done += len(node.hashes)
        self.tree.find_matches([1])  # the tree works in a thread of its own: wait for it
        return (resident_bytes() - before) / done

    def tree_ingest(self, seed: int, blocks: int, per_event: int, chain: int) -> list[float]:
        """Seconds, and processor seconds, in which the tree takes so many blocks in; and processor
        seconds for hashing so many blocks of 256 tokens and making their events."""
        events = list(itertools.islice(_tree_events(seed, chain, per_event), blocks // per_event))
        began, cpu = time.perf_counter(), time.process_time()
        for number, event in enumerate(events):
            self.tree.apply_event(number * per_event // chain % world.WORKERS, event)
        self.tree.find_matches([1])
        alone_s, alone_cpu_s = time.perf_counter() - began, time.process_time() - cpu
        tokens = world.ints(world.random_tokens(seed, per_event * world.BLOCK_TOKENS))
        hashes = list(range(per_event))
        cpu = time.process_time()
        for number in range(len(events) // 8):  # hashing is steady: an eighth tells the rest
            store_event(number, None, hashes, self.hash(tokens))
        return [alone_s, alone_cpu_s, 8 * (time.process_time() - cpu)]

    async def wire_ingest(self, seed: int, blocks: int, per_event: int, chain: int) -> list[float]:
        """Seconds, and processor seconds of both ends, from the first message sent until a new
        selection service answers for the last chain of ``blocks`` in messages with token ids."""
        service, publishers = SelectionService(), Publishers()
        await service.upsert_worker(_worker(0, publishers.endpoints[0]))
        await asyncio.to_thread(publishers.await_subscriber, 0)
        messages, last = world.messages(seed, blocks, per_event, chain, msgspec.msgpack.encode)
        request = {"model_name": _MODEL, "token_ids": last}
        began, cpu = time.perf_counter(), time.process_time()
        for message in messages:
            publishers.send_body(0, message)
        while time.perf_counter() < began + 120:
            await asyncio.sleep(0.05)
            answer = await service.select(request)
            if answer["overlap"]["longest_matched"] == len(last):
                return [time.perf_counter() - began, time.process_time() - cpu]
        raise TimeoutError(f"the selection service answers {answer} after {blocks} blocks")


def _worker(number: int, events: str) -> dict[str, Any]:
    """A worker as the selection service registers it."""
    return {
        "worker_id": number,
        "model_name": _MODEL,
        "endpoint": f"http://127.0.0.1:{10_000 + number}",
        "block_size": world.BLOCK_TOKENS,
        "kv_events_endpoint": events,
        "data_parallel_start_rank": 0,
        "data_parallel_size": 1,
        "total_kv_blocks": 2 * world.HOLDERS // world.WORKERS,
        "max_num_batched_tokens": 8192,
    }


def _tree_events(seed: int, chain: int, per_event: int) -> Iterator[bytes]:
    source = random.Random(seed)
    for number in itertools.count():
        if number % (chain // per_event) == 0:
            parent = None
        hashes = [source.getrandbits(64) for _ in range(per_event)]
        yield store_event(number, parent, hashes, [source.getrandbits(64) for _ in hashes])
        parent = hashes[-1]


async def _timed(call: Callable[..., Awaitable[None]], args: Sequence[Any]) -> list[int]:
    samples = []
    for number in range(world.PROMPTS):
        began = time.perf_counter_ns()
        await call(number, *args)
        samples.append(time.perf_counter_ns() - began)
    return samples


async def _serve() -> None:
    peer = Peer()
    for line in sys.stdin:
        command = json.loads(line)
        call, args = getattr(peer, command["call"]), command["args"]
        if command["call"] in ("fill", "wire_ingest"):
            answer: Any = await call(*args)
        elif command["call"] in ("found", "tree_memory", "tree_fill", "tree_ingest"):
            answer = call(*args)
        else:
            answer = await _timed(call, args)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
