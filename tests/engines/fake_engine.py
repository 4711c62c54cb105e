"""An engine without a model at an agent's socket; run as a script it saves until it is killed."""

from __future__ import annotations

import sys
import time
from array import array
from importlib import resources
from pathlib import Path

import xxhash

from kvatlas.connectors.agent_client import AgentClient
from kvatlas.service import agent_wire as wire

GRID = 32
WAIT_S = 20.0


def hello(
    *,
    block_tokens: int = GRID,
    version: int = wire.VERSION,
    kind: str = "gqa",
    model: str = "tiny",
) -> wire.Hello:
    config = model_config(kind).read_bytes()
    return wire.Hello(version, model, (model,), config, "vllm", "0.32.0", "auto", block_tokens)


def model_config(kind: str = "gqa") -> Path:
    return Path(str(resources.files("kvatlas.validate").joinpath(f"configs/{kind}.json")))


def tokens_of(prompt: int, count: int) -> bytes:
    return array("I", [prompt * 1000 + i for i in range(count)]).tobytes()


def content(name: bytes, size_bytes: int) -> bytes:
    """What a unit's bytes must be."""
    return (xxhash.xxh3_128_digest(name) * (size_bytes // 16 + 1))[:size_bytes]


class FakeEngine:
    def __init__(self, path: Path, told: wire.Hello | None = None) -> None:
        told = told or hello()
        self.client = AgentClient(path, told, answer_s=WAIT_S)
        self.grid = told.block_tokens

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def want(self, request: str, tokens: bytes, local: int = 0) -> wire.Staged:
        """Asks how far, and waits for the answer."""
        assert self.client.want(request, tokens, local, WAIT_S)
        until = time.monotonic() + WAIT_S
        while (staged := self.client.staged(request)) is None:
            assert self.client.waits(request), "nobody answers any more"
            assert time.monotonic() < until, "no answer"
            time.sleep(0.005)
        return staged

    def load(self, request: str, tokens: bytes) -> tuple[int, dict[str, int]]:
        """How far it could resume, from where; all bytes must be right."""
        staged = self.want(request, tokens)
        channel = self.client._channel
        assert channel is not None
        for piece in staged.pieces:
            found = bytes(channel.arena.view(piece.slot))
            assert found == content(piece.name, piece.slot.size_bytes), (
                "wrong bytes were handed out"
            )
        self.client.release(request, used=True)
        self.client.end(request)
        return staged.tokens, dict(staged.tiers)

    def orders(
        self, request: str, tokens: bytes, points: tuple[int, ...] = ()
    ) -> tuple[wire.Order, ...]:
        """A prompt is computed, with all windows at ``points``: what is to be saved of it."""
        self.want(request, tokens)
        blocks = len(tokens) // 4 // self.grid
        return self.client.filled(
            wire.Filled(request, 0, b"", blocks, points, 0, len(tokens) // 4), memoryview(tokens)
        )

    def copy(self, order: wire.Order) -> tuple[tuple[bytes, bytes], ...]:
        channel = self.client._channel
        assert channel is not None
        sums = []
        for piece in order.pieces:
            view = channel.arena.view(piece.slot)
            view[:] = content(piece.name, len(view))
            sums.append((piece.name, xxhash.xxh3_128_intdigest(view).to_bytes(16, "big")))
        return tuple(sums)

    def save(self, request: str, tokens: bytes, points: tuple[int, ...] = ()) -> int:
        """Saves what is wanted of a prompt; how many units that was."""
        count = 0
        for order in self.orders(request, tokens, points):
            sums = self.copy(order)
            self.client.saved(order.op, sums)
            count += len(sums)
        return count


def main(path: str) -> None:
    """Begins to save, says so, and goes on until it is killed."""
    engine = FakeEngine(Path(path))
    (order,) = engine.orders("r", tokens_of(1, 200))
    engine.copy(order)
    print("copying", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
