"""A KV-event publisher as vLLM and SGLang have it: PUB, and a ROUTER that replays its last batches.

It can lose, double and delay what it sends, start anew on the same ports, and answer badly.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio

BLOCK = 4  # tokens per block


def block_tokens(names: str) -> list[int]:
    """Token ids of blocks named by single letters."""
    return [ord(name) * 100 + i for name in names for i in range(BLOCK)]


def engine_hash(path: str) -> int:
    """The engine's own hash of the last block of a path of blocks: "AB" is B(A)."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[-8:], "big")


def stored(path: str, count: int = 1, *, medium: str | None = "GPU", **more: Any) -> Any:
    """The last ``count`` blocks of ``path``."""
    ends = range(len(path) - count + 1, len(path) + 1)
    parent = path[: len(path) - count]
    return {
        "type": "BlockStored",
        "block_hashes": [engine_hash(path[:end]) for end in ends],
        "parent_block_hash": engine_hash(parent) if parent else None,
        "token_ids": block_tokens(path[len(path) - count :]),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **more,
    }


def location(path: str, *, medium: str) -> Any:
    """A store without token ids: what some lower tiers announce."""
    return stored(path, medium=medium) | {"token_ids": [], "parent_block_hash": None}


def removed(path: str, *, medium: str | None = "GPU") -> Any:
    return {"type": "BlockRemoved", "block_hashes": [engine_hash(path)], "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


class StubPublisher:
    """Use ``async with``. Time stamps count up by one per batch, over all lives."""

    def __init__(self, *, buffer: int = 100, connect: str = "", replay: bool = True) -> None:
        self.buffer = buffer
        self.silent = False  # leaves replay requests unanswered
        self.requests: list[int] = []
        self.context = zmq.asyncio.Context()
        self.clock = 1000.0
        self._connect = connect
        self._want_replay = replay
        self.endpoint = connect
        self.replay = ""

    async def __aenter__(self) -> StubPublisher:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        self.context.destroy(linger=0)

    async def start(self) -> None:
        self.seq = 0
        self.sent: deque[tuple[int, bytes]] = deque(maxlen=self.buffer)
        self._pub = zmq.Socket(zmq.Context.shadow(self.context.underlying), zmq.XPUB)
        self._pub.set(zmq.LINGER, 0)
        self._pub.set(zmq.XPUB_VERBOSE, 1)
        if self._connect:
            self._pub.connect(self._connect)
        else:
            self.endpoint = await _bind(self._pub, self.endpoint)
        self._router: zmq.asyncio.Socket | None = None
        if self._want_replay:
            self._router = self.context.socket(zmq.ROUTER)
            self._router.set(zmq.LINGER, 0)
            self._router.set(zmq.SNDHWM, 0)
            self.replay = await _bind(self._router, self.replay)
            self._task = asyncio.create_task(self._serve(self._router))

    async def stop(self) -> None:
        self._pub.close(0)
        if self._router is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._router.close(0)

    async def restart(self) -> None:
        """A new life on the same ports: numbers start at 0, nothing is left to replay."""
        await self.stop()
        await self.start()

    async def subscribed(self) -> None:
        """Wait until a subscriber is heard."""
        async with asyncio.timeout(10):
            while not self._pub.poll(0):
                await asyncio.sleep(0.005)
        self._pub.recv()

    def publish(self, *events: Any, lose: bool = False, raw: bytes | None = None) -> int:
        """Number it, keep it for replay and send it (unless it is to be lost on the way)."""
        self.clock += 1.0
        payload = msgspec.msgpack.encode([self.clock, list(events), 0]) if raw is None else raw
        seq = self.seq
        self.seq += 1
        self.sent.append((seq, payload))
        if not lose:
            self.send(seq, payload)
        return seq

    def send(self, seq: int, payload: bytes) -> None:
        self.send_frames([b"kv", seq.to_bytes(8, "big"), payload])

    def send_frames(self, frames: list[bytes]) -> None:
        """A message of any shape."""
        self._pub.send_multipart(frames)

    def again(self, seq: int) -> None:
        """Send an old batch once more, as a slow network might."""
        self.send(seq, dict(self.sent)[seq])

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            client, empty, start = await router.recv_multipart()
            self.requests.append(int.from_bytes(start, "big"))
            if self.silent:
                continue
            for seq, payload in self.sent:
                if seq >= int.from_bytes(start, "big"):
                    frames = [client, empty, b"kv", seq.to_bytes(8, "big"), payload]
                    await router.send_multipart(frames)
            await router.send_multipart([client, empty, b"", b"\xff" * 8, b""])


async def _bind(socket: Any, endpoint: str) -> str:
    if not endpoint:
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    async with asyncio.timeout(10):
        while True:
            try:
                socket.bind(endpoint)
                return endpoint
            except zmq.ZMQError as error:  # the socket before is still being closed
                if error.errno != zmq.EADDRINUSE:
                    raise
                await asyncio.sleep(0.01)
