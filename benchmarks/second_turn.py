"""The whole path, request body in → engine chosen: the second turn of a 32k-token chat.

Parse the body, token ids, block keys, lookup over 64 engines, prices, choice. Beside it the same
path with the plain way to token ids: render and tokenize everything again. DeepSeek V4's
vocabulary, block 256; one engine holds the first turn.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.tokenize import Again, Text, model_files
from kvatlas.config import TokenizerConfig
from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.events import BlockStored
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher
from kvatlas.core.router import Router
from kvatlas.service.decision_log import DecisionLog
from kvatlas.service.steer import Inbound, Outcome
from kvatlas.service.steering import Rank, Steering, Tokens
from kvatlas.service.tokens import Prompt, Tokenizer
from kvatlas.service.verify import CHAT

ROUNDS = 40
ENGINES = 64
BLOCK = 256
_FINGERPRINT = b"\1" * 32
_MODEL = "m"


class _AgainTokens:
    """Everything again, in the shape that steering asks for."""

    def __init__(self, again: Again) -> None:
        self._again = again

    async def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
        text = self._again.template.render(body)
        ids = self._again.tokenizer.encode(text, add_special_tokens=False).ids
        return Prompt(tokens=array("I", ids).tobytes())


class _Cluster:
    """Steering over 64 engines that publish nothing but what `hold` says."""

    def __init__(self, tokens: Tokens) -> None:
        keyring = Keyring(b"the secret of a benchmark")
        self._tokens = tokens
        self._directory = Directory(keyring)
        self._hashes = 0
        self.steering = Steering(
            dispatcher=Dispatcher(self._directory, Router(), keyring),
            log=DecisionLog(1000),
            tokens=tokens,
        )
        for number in range(ENGINES):
            publisher = Publisher(f"w{number:02d}")
            rank = Rank(publisher, "http://engine", {_MODEL: ""}, plain(BLOCK), _FINGERPRINT)
            self.steering.add(rank)

    async def hold(self, number: int, body: bytes) -> None:
        """Engine ``number`` has computed this request."""
        prompt = await self._tokens.prompt(CHAT, msgspec.json.decode(body))
        blocks = prompt.count // BLOCK
        hashes = tuple(range(self._hashes, self._hashes + blocks))
        self._hashes += blocks
        event = BlockStored(hashes, None, prompt.tokens[: blocks * BLOCK * 4], BLOCK)
        self._directory.apply(Publisher(f"w{number % ENGINES:02d}"), [event])

    async def choose(self, request_id: str, body: bytes) -> tuple[str, int]:
        """The engine and the hit that is expected there."""
        parsed = msgspec.json.decode(body)
        route = await self.steering.choose(Inbound(request_id, CHAT, parsed, {}))
        target = route.targets[0]
        self.steering.finished(route, Outcome(target, 200))
        return target.worker, target.expected_hit_tokens


def run() -> dict[str, Any]:
    """Microseconds (best and median) of both ways and their ratio; prints a table."""
    return asyncio.run(_run())


async def _run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = model_files(Path(scratch))
        tokenizer = Tokenizer.load(TokenizerConfig(path=scratch))
        ways = {
            "kvatlas": _Cluster(tokenizer),
            "everything again": _Cluster(_AgainTokens(Again(directory))),
        }
    text = Text()
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        turns = text.turns()
        first, second = text.body(turns[:-2]), text.body(turns)
        chosen = set()
        for name, cluster in ways.items():
            await cluster.hold(number, first)
            started = time.perf_counter()
            chosen.add(await cluster.choose(str(number), second))
            samples[name].append(time.perf_counter() - started)
        [(worker, hit)] = chosen  # both must agree, and find the holder
        assert worker == f"w{number % ENGINES:02d}", worker
        assert hit > 25_000, hit  # of 32,000 tokens at four bytes each
    await tokenizer.close()
    return _figures(samples, len(second))


def _figures(samples: dict[str, list[float]], body_bytes: int) -> dict[str, Any]:
    rows = {
        name: {
            "best_us": round(min(seconds) * 1e6, 1),
            "p50_us": round(statistics.median(seconds) * 1e6, 1),
        }
        for name, seconds in samples.items()
    }
    ratio = rows["everything again"]["p50_us"] / rows["kvatlas"]["p50_us"]
    table = Table(title=f"body of {body_bytes:,} bytes → engine chosen among {ENGINES} (µs)")
    for column in ("way", "best", "p50"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, row in rows.items():
        table.add_row(name, f"{row['best_us']:,.0f}", f"{row['p50_us']:,.0f}")
    Console().print(table)
    Console().print(f"{ratio:.0f} times faster (medians)")
    return {"body_bytes": body_bytes, "paths": rows, "times_faster": round(ratio, 1)}


if __name__ == "__main__":
    run()
