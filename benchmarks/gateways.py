"""One gateway process, and two in front of the same engines: what a request and a chunk cost each.

Both are ``kvatlas serve`` as it is, each with its own subscription to the events of the engines and
a directory of its own. At a fixed rate per gateway, in alternating rounds: the first alone, then
both at once. A chunk's cost is what a stream of 16 costs more than the same answer in one piece.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gateway import tokenizer_in
from benchmarks.gateway_mock import CHUNKS
from benchmarks.gateway_peers import Child, Stage

ROUNDS = 4
RATE = 100.0  # requests a second at each gateway
SECONDS = 4.0  # processor time is counted in hundredths of a second


def _round(stage: Stage, gateways: dict[str, tuple[Child, int]], *, stream: bool) -> list[float]:
    """Processor time of each gateway per request, µs."""
    ports = {name: port for name, (_, port) in gateways.items()}
    before = [child.cpu_s() for child, _ in gateways.values()]
    job = {"ports": ports, "rate": RATE, "seconds": SECONDS, "stream": stream, "prompt": "warm"}
    stage.load.ask(job)
    spent_s = [
        child.cpu_s() - was for (child, _), was in zip(gateways.values(), before, strict=True)
    ]
    return [1e6 * used / int(RATE * SECONDS) for used in spent_s]


def two(stage: Stage, tokenizer: Path) -> dict[str, tuple[Child, int]]:
    """Two of them, by name, with their ports."""
    return {name: stage.kvatlas(tokenizer) for name in ("a", "b")}


def measure(
    stage: Stage, both: dict[str, tuple[Child, int]], rounds: int = ROUNDS
) -> dict[str, dict[str, float]]:
    """µs of processor time per request and per chunk, of one gateway and of the mean of two."""
    alone = {"a": both["a"]}
    spent: dict[tuple[str, bool], list[float]] = {}
    for turn in range(rounds + 1):  # the first round is to become warm
        for stream in (False, True):
            for name, which in (("one", alone), ("two", both)):
                found = _round(stage, which, stream=stream)
                if turn:
                    spent.setdefault((name, stream), []).append(statistics.fmean(found))
    rows = {}
    for name in ("one", "two"):
        whole, stream = (statistics.median(spent[name, kind]) for kind in (False, True))
        rows[name] = {
            "request_us": round(whole, 1),
            "stream_us": round(stream, 1),
            "chunk_us": round((stream - whole) / CHUNKS, 2),
        }
    return rows


def run() -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    with tempfile.TemporaryDirectory() as scratch, Stage() as stage:
        figures = measure(stage, two(stage, tokenizer_in(Path(scratch))))
    table = Table(title="processor time of a gateway, µs", title_justify="left")
    for column in ("gateways", "per request, whole", "per request, 16 chunks", "per chunk"):
        table.add_column(column, justify="left" if column == "gateways" else "right")
    for name, row in figures.items():
        table.add_row(
            name, *(f"{row[key]:,.1f}" for key in ("request_us", "stream_us", "chunk_us"))
        )
    Console(width=100).print(table)
    return figures
