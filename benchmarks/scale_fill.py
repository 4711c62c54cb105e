"""One directory with as many block-holders as are asked for, in a process of its own.

``python -m benchmarks.scale_fill HOLDERS ENGINES``: engines in groups of 8; what one holds is a
system prompt that all hold, contexts that its group holds, and conversations of its own, each a
prompt of 128 blocks when put together. Keys are handed in. Prints one line of JSON.
"""

from __future__ import annotations

import array
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.directory import resident_bytes
from benchmarks.events import Handed
from kvatlas.core.directory import Directory, Limits
from kvatlas.core.dispatch import Dispatcher, FirstToken, Join, Question, Sent
from kvatlas.core.events import BlockStored
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher
from kvatlas.core.router import Router

BLOCK_TOKENS = 256
GROUP = 8
SYSTEM, CONTEXT, OWN = 16, 48, 64  # blocks
TAILS = 3  # conversations of one engine on one context
PROMPTS = 200
FINGERPRINT = b"\1" * 32


def run_of(source: random.Random, blocks: int, parent: int | None) -> BlockStored:
    """A run of new blocks, with keys where its tokens would be."""
    data = source.randbytes(16 * blocks)
    keys: Any = [data[at : at + 16] for at in range(0, len(data), 16)]
    names = tuple(array.array("Q", source.randbytes(8 * blocks)))
    return BlockStored(names, parent, keys, BLOCK_TOKENS)


class Filled:
    """A dispatcher with ``engines`` engines that hold ``holders`` blocks between them."""

    def __init__(self, holders: int, engines: int) -> None:
        keyring = Handed(b"a secret for the benchmark")
        limits = Limits(2 * holders, 4 * holders // engines + 10_000)
        self.dispatcher = Dispatcher(Directory(keyring, limits), Router(), keyring)
        self.directory = self.dispatcher.directory
        self.engines = [Publisher(f"engine-{i}") for i in range(engines)]
        for engine in self.engines:
            self.dispatcher.handle(Join(engine, plain(BLOCK_TOKENS), FINGERPRINT), 0.0)
        self.prompts: list[list[bytes]] = []  # keys
        before, cpu = resident_bytes(), time.process_time()
        self._fill(holders)
        self.cpu_s = time.process_time() - cpu
        self.bytes_per_holder = (resident_bytes() - before) / self.directory.holders

    def _fill(self, holders: int) -> None:
        source, apply = random.Random(1), self.directory.apply
        system = run_of(source, SYSTEM, None)
        for engine in self.engines:
            apply(engine, [system])
        pairs = self._contexts(holders)
        for number, group in enumerate(pairs):
            context = run_of(source, CONTEXT, system.hashes[-1])
            for engine in group:
                apply(engine, [context])
                for _ in range(TAILS):
                    own = run_of(source, OWN, context.hashes[-1])
                    apply(engine, [own])
            if number % 37 == 0 and len(self.prompts) < 10_000:
                self.prompts.append([*system.tokens, *context.tokens, *own.tokens])  # type: ignore[list-item]

    def _contexts(self, holders: int) -> Iterator[list[Publisher]]:
        """Groups in turn, until there is enough."""
        while True:
            for first in range(0, len(self.engines), GROUP):
                if self.directory.holders >= holders:
                    return
                yield self.engines[first : first + GROUP]

    def lookups_us(self) -> list[float]:
        """Processor time of one look-up of 128 keys, each."""
        source = random.Random(2)
        return [
            spent_us(lambda keys=keys: self.directory.peek(keys, FINGERPRINT))
            for keys in source.choices(self.prompts, k=PROMPTS)
        ]

    def decisions_us(self) -> list[float]:
        """Of one decision without hashing, all engines being candidates, with a request under
        way for each."""
        source = random.Random(3)
        among = tuple((engine, "") for engine in self.engines)
        tokens = bytes(4 * (1 + BLOCK_TOKENS * (SYSTEM + CONTEXT + OWN)))

        def ask(number: int) -> None:
            keys = source.choice(self.prompts)
            self.dispatcher.keys = lambda *_: keys  # type: ignore[method-assign]
            decision = self.dispatcher.handle(Question(str(number), among, tokens), number / 1e3)
            assert decision is not None
            self.dispatcher.handle(Sent(str(number), decision.plans[0].publisher), number / 1e3)
            if number % 2:
                self.dispatcher.handle(FirstToken(str(number), 0.2), number / 1e3)

        first = len(self.engines)
        for number in range(first):
            ask(number)
        return [spent_us(lambda n=n: ask(n)) for n in range(first, first + PROMPTS)]

    def ingest_us(self) -> float:
        """Of one block of new ones, in events of 64."""
        source, turns = random.Random(4), []
        for number in range(1_000):
            turns.append((self.engines[number % len(self.engines)], [run_of(source, OWN, None)]))
        spent = spent_us(lambda: [self.directory.apply(*turn) for turn in turns])
        return spent / (OWN * len(turns))


def spent_us(call: Callable[[], object]) -> float:
    """Processor time of one call."""
    began = time.process_time_ns()
    call()
    return (time.process_time_ns() - began) / 1e3


def main(holders: int, engines: int) -> dict[str, float]:
    """All figures of one size."""
    gc.disable()
    filled = Filled(holders, engines)
    gc.freeze()
    return {
        "holders": filled.directory.holders,
        "engines": engines,
        "resident_bytes": resident_bytes(),
        "bytes_per_holder": filled.bytes_per_holder,
        "fill_cpu_s": filled.cpu_s,
        "lookup_us": statistics.median(filled.lookups_us()),
        "decision_us": statistics.median(filled.decisions_us()),
        "ingest_us": filled.ingest_us(),
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
