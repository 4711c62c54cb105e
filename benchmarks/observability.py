"""What metrics and traces cost: processor time of requests that are counted, and traced too.

One ``kvatlas serve`` before mock engines, with warm prompts of 2,000 tokens, streamed. Requests
come one after the other, and in turn are counted nowhere, counted, traced at the default ratio, and
all traced, to a collector that takes all: what else runs on the machine slows each alike. The time
is that of the event loop's thread, which is what bounds the gateway's throughput.
"""

from __future__ import annotations

import json
import signal
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gateway import tokenizer_in
from benchmarks.gateway_peers import Stage
from benchmarks.observability_child import ALL, NEITHER, SIDES, SOME
from kvatlas.config_tracing import TracingConfig

SECONDS = 80.0
KEPT = 0.9  # of the requests of a side: the slowest are those that something else ran into
FIRST = 100  # requests that are left out: prompts' tokens are made


def run() -> dict[str, Any]:
    """Microseconds per request, and the share that each side adds; prints them."""
    with tempfile.TemporaryDirectory() as scratch, Stage() as stage:
        tokenizer = tokenizer_in(Path(scratch))
        collector = int(stage.module("benchmarks.observability_child", "collect").line())
        tracing = f'[tracing]\nsample_ratio = 1.0\notlp = "http://127.0.0.1:{collector}"\n'
        argv = ("benchmarks.observability_child", "serve")
        child, port = stage.kvatlas(tokenizer, *argv, more=tracing)
        job = {"port": port, "connections": 1, "seconds": SECONDS}
        stage.load.ask({**job, "stream": True, "prompt": "warm"})
        child.process.send_signal(signal.SIGTERM)
        told = json.loads(child.line())
    sides = {side: _kept(told["seconds"][side][FIRST:]) for side in SIDES}
    figures: dict[str, Any] = {side: _mean(us) for side, us in sides.items()}
    share = TracingConfig().sample_ratio
    traced = share * len(told["seconds"][SOME]) + len(told["seconds"][ALL])
    flushed_us = told["flushed_s"] / traced * 1e6
    figures[SOME]["cpu_us"] += share * flushed_us
    figures[ALL]["cpu_us"] += flushed_us
    figures["handed over"] = {"cpu_us": flushed_us}
    off = figures[NEITHER]
    for side in SIDES[1:]:
        error_us = (figures[side]["error_us"] ** 2 + off["error_us"] ** 2) ** 0.5
        added_us = figures[side]["cpu_us"] - off["cpu_us"]
        figures[side] |= {
            "added_us": added_us,
            "share": added_us / off["cpu_us"],
            "share_error": error_us / off["cpu_us"],
        }
    _print(figures)
    return figures


def _kept(seconds: list[float]) -> list[float]:
    return [one * 1e6 for one in sorted(seconds)[: int(KEPT * len(seconds))]]


def _mean(us: list[float]) -> dict[str, float]:
    error_us = statistics.stdev(us) / len(us) ** 0.5
    return {"requests": len(us), "cpu_us": statistics.fmean(us), "error_us": error_us}


def _print(figures: dict[str, Any]) -> None:
    table = Table("", "requests", "CPU µs per request", "added")
    for side in SIDES:
        row = figures[side]
        added = f"{row['share']:.1%} ± {row['share_error']:.1%}" if "share" in row else ""
        table.add_row(side, str(row["requests"]), f"{row['cpu_us']:.1f}", added)
    console = Console(width=100)
    console.print(table)
    console.print(f"of it handed over to the sender: {figures['handed over']['cpu_us']:.1f} µs")


if __name__ == "__main__":
    run()
