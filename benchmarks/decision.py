"""One routing decision on a prompt of 32,768 tokens, beside Dynamo's, in interleaved rounds.

Both know the same 64 workers and 999,424 worker-blocks (`world`) and have four requests in flight
per worker. Ours is all of it: keyed hashes, lookup, resume positions, prices, the choice.
"""

from __future__ import annotations

import array
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import world
from benchmarks.dynamo import Dynamo, dynamo
from kvatlas.core.directory import Directory
from kvatlas.core.events import BlockStored
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher
from kvatlas.core.router import Ask, Decision, Router

ROUNDS = 24  # of 64 prompts each
MATCHES = ("full", "half", "miss")
_FINGERPRINT = b"\1" * 32


class Ours:
    """Directory and router, filled with the world, as `service.steering` uses them."""

    def __init__(self) -> None:
        self._ring = Keyring(b"a secret for the benchmark")
        self._directory = Directory(self._ring)
        self._router = Router()
        self._workers = [Publisher(f"worker-{i}") for i in range(world.WORKERS)]
        for worker in self._workers:
            self._directory.register(worker, plain(world.BLOCK_TOKENS), _FINGERPRINT)
            self._router.add(worker, plain(world.BLOCK_TOKENS), _FINGERPRINT)
        for node in world.nodes():
            event = BlockStored(tuple(node.hashes), node.parent, node.tokens, world.BLOCK_TOKENS)
            for index in node.workers:
                self._directory.apply(self._workers[index], [event])
        assert self._directory.holders == world.HOLDERS
        for number in range(world.IN_FLIGHT):
            ask = self._ask(str(number), world.prompt(number, "miss"))
            plan = self._router.peek(ask, 0.0, [self._workers[number % world.WORKERS]]).plans[0]
            self._router.begin(ask, plan, 0.0)
        self._tokens = [world.prompt(i) for i in range(world.PROMPTS)]
        self._ints = [world.ints(tokens) for tokens in self._tokens]
        self._keys = {
            match: [self._chain(world.prompt(i, match)) for i in range(world.PROMPTS)]
            for match in MATCHES
        }

    def _chain(self, tokens: bytes | memoryview) -> list[bytes]:
        return self._ring.chain(self._ring.root(_FINGERPRINT), tokens, world.BLOCK_TOKENS)

    def _ask(self, name: str, tokens: bytes) -> Ask:
        grid = world.BLOCK_TOKENS * 4
        usable = (len(tokens) - 4) // grid * grid  # one token must always be computed
        keys = self._chain(memoryview(tokens)[:usable])
        resumes = self._directory.peek(keys, _FINGERPRINT)
        return Ask(name, len(tokens) // 4, {_FINGERPRINT: keys}, resumes)

    def decide(self, number: int) -> Decision:
        """Token buffer → plans."""
        return self._router.peek(self._ask("ask", self._tokens[number]), 1.0)

    def decide_ints(self, number: int) -> Decision:
        """List of ints → plans."""
        tokens = array.array("I", self._ints[number]).tobytes()
        return self._router.peek(self._ask("ask", tokens), 1.0)

    def find(self, number: int, match: str) -> dict[str, int]:
        """Keys → blocks by worker number, as text (for the check that both sides agree)."""
        found = self._directory.peek(self._keys[match][number], _FINGERPRINT)
        return {
            r.publisher.worker.removeprefix("worker-"): r.tokens // world.BLOCK_TOKENS
            for r in found
        }

    def lookup(self, match: str) -> Callable[[int], object]:
        """Keys → resume positions of every holder."""
        keys, peek = self._keys[match], self._directory.peek
        return lambda number: peek(keys[number], _FINGERPRINT)

    def chain(self, number: int) -> list[bytes]:
        """Token buffer → keys."""
        return self._chain(self._tokens[number])


def _timed(call: Callable[[int], object]) -> list[int]:
    samples = []
    for number in range(world.PROMPTS):
        began = time.perf_counter_ns()
        call(number)
        samples.append(time.perf_counter_ns() - began)
    return samples


def _check(ours: Ours, peer: Dynamo) -> None:
    """Raises RuntimeError when the two sides do not find the same, or ours picks another worker."""
    for match in MATCHES:
        for number in range(world.PROMPTS):
            here, there = ours.find(number, match), peer.call("found", number, match)
            if here != there:
                raise RuntimeError(f"prompt {number} ({match}): we find {here}, Dynamo {there}")
    for number in range(world.PROMPTS):
        chosen = ours.decide(number).plans[0].publisher.worker
        if chosen != f"worker-{number % world.WORKERS}":
            raise RuntimeError(f"prompt {number}: {chosen} is not the worker that holds it")


def run() -> dict[str, Any]:
    """Measure, print a table, return medians in µs and their ratios (theirs / ours)."""
    pairs: dict[str, tuple[Callable[[int], object], tuple[Any, ...], float]]
    with dynamo() as peer:
        ours = Ours()
        peer.call("fill")
        _check(ours, peer)
        pairs = {
            "decision from a token buffer / hash + select by hash": (
                ours.decide,
                ("hash_select",),
                2.0,
            ),
            "decision from a list of ints / select from tokens": (
                ours.decide_ints,
                ("select",),
                3.0,
            ),
            "keys alone / hash alone": (ours.chain, ("hash_only",), 0.0),
        }
        for match in MATCHES:
            name = f"lookup, {match} match / RadixTree"
            pairs[f"{name}, scores left in Rust"] = ours.lookup(match), ("find", match), 0.0
            pairs[f"{name}, scores read"] = ours.lookup(match), ("scores", match), 1.0
        samples: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in pairs}
        for _ in range(ROUNDS):
            for name, (call, command, _) in pairs.items():
                samples[name][0].extend(_timed(call))
                samples[name][1].extend(peer.call(command[0], *command[1:]))
    figures = {name: _row(*samples[name], floor=floor) for name, (_, _, floor) in pairs.items()}
    _print(figures)
    return figures


def _row(ours: list[int], theirs: list[int], *, floor: float) -> dict[str, float]:
    row: dict[str, float] = {"floor": floor}
    for who, samples in (("ours", ours), ("theirs", theirs)):
        tenths = statistics.quantiles(samples, n=10)
        row[f"{who}_us"] = statistics.median(samples) / 1e3
        row[f"{who}_p10_us"], row[f"{who}_p90_us"] = tenths[0] / 1e3, tenths[-1] / 1e3
    row["ratio"] = row["theirs_us"] / row["ours_us"]
    row["ratio_p10"] = row["theirs_p10_us"] / row["ours_p10_us"]
    return {key: round(value, 2) for key, value in row.items()}


def _print(figures: dict[str, dict[str, float]]) -> None:
    table = Table(title="µs, median (p10 to p90); ratio = Dynamo / kvatlas", title_justify="left")
    for column in ("kvatlas / Dynamo", "kvatlas", "Dynamo", "ratio", "of p10", "floor"):
        table.add_column(column, justify="left" if column.startswith("kvatlas /") else "right")
    for name, row in figures.items():
        cells = [
            f"{row[f'{who}_us']:.0f} ({row[f'{who}_p10_us']:.0f} to {row[f'{who}_p90_us']:.0f})"
            for who in ("ours", "theirs")
        ]
        ratios = f"{row['ratio']:.2f}", f"{row['ratio_p10']:.2f}"
        table.add_row(name, *cells, *ratios, f"{row['floor']:g}" if row["floor"] else "")
    Console(width=125).print(table)
