"""What metrics and traces cost: ``kvatlas serve`` that counts nothing, that counts, and traces too.

All three stand before the same mock engines with the same warm prompts of 2,000 tokens, streamed,
and take turns round by round. Every request is traced (``sample_ratio`` 1), to a collector that
takes all. CPU is of the gateway's process; the one that encodes and sends spans is told by itself.

After each round, the same calls as one request makes, alone in a loop: others on the machine slow
both, so that the share of the one in the other can be told where rounds differ by far more.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.gateway import tokenizer_in
from benchmarks.gateway_peers import Child, Stage
from benchmarks.observability_child import Blind, Still
from kvatlas.config_tracing import TracingConfig
from kvatlas.service.body import Usage
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.spans import Batch, Record
from kvatlas.service.steer import Inbound, Outcome, Steer
from kvatlas.service.tracing import Traced
from kvatlas.service.tracing_export import BATCH_RECORDS, Exporter

ROUNDS = 60
SECONDS = 0.5
CONNECTIONS = 16
OFF, METRICS, BOTH = "neither", "metrics", "metrics and traces"
ALONE = 2_000  # requests of a turn in the loop


def run() -> dict[str, Any]:
    """Requests/s and CPU per request; the shares of each that are lost, by rounds; prints both."""
    with tempfile.TemporaryDirectory() as scratch, Stage() as stage:
        tokenizer = tokenizer_in(Path(scratch))
        collector = int(stage.module("benchmarks.observability_child", "collect").line())
        tracing = f'[tracing]\notlp = "http://127.0.0.1:{collector}"\n'
        blind = ("benchmarks.observability_child", "blind")
        sides = {
            OFF: stage.kvatlas(tokenizer, *blind, name="off"),
            METRICS: stage.kvatlas(tokenizer, name="metrics"),
            BOTH: stage.kvatlas(tokenizer, more=tracing, name="both"),
        }
        rounds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        alone: dict[str, list[float]] = {METRICS: [], "traces": []}
        still = Still()
        counted = _counted(GatewayMetrics()), _counted(Blind())
        traced = _asked(_traced(still), still), _asked(still, still)
        for turn in range(-2, ROUNDS):
            order = list(sides)
            for side in order[turn % 3 :] + order[: turn % 3]:
                row = _round(stage, *sides[side])
                if turn >= 0:  # those before open connections and make the prompts' tokens
                    rounds[side].append(row)
            alone[METRICS].append(_alone(*counted))
            alone["traces"].append(_alone(*traced))
    figures: dict[str, Any] = {
        side: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for side, rows in rounds.items()
    }
    figures["share"] = {side: _shares(rounds[OFF], rounds[side]) for side in (METRICS, BOTH)}
    alone_us = {name: statistics.median(found) for name, found in alone.items()}
    figures["alone"] = {
        "cpu_us": alone_us,
        "share": sum(alone_us.values()) / figures[OFF]["cpu_us"],
    }
    _print(figures)
    return figures


def _round(stage: Stage, child: Child, port: int) -> dict[str, float]:
    job = {"port": port, "connections": CONNECTIONS, "seconds": SECONDS}
    cpu_s, sender_s = child.cpu_s(), _sender_s(child)
    row = stage.load.ask({**job, "stream": True, "prompt": "warm"})
    sent_s = _sender_s(child) - sender_s
    return {
        "requests_per_s": row["requests_per_s"],
        "cpu_us": (child.cpu_s() - cpu_s - sent_s) / row["requests"] * 1e6,
        "sender_cpu_us": sent_s / row["requests"] * 1e6,
    }


def _sender_s(child: Child) -> float:
    """Processor seconds of the processes that the gateway has started."""
    found = psutil.Process(child.process.pid).children()
    return sum(sum(one.cpu_times()[:2]) for one in found)


def _shares(
    off: list[dict[str, float]], on: list[dict[str, float]]
) -> dict[str, tuple[float, ...]]:
    """Lower quartile, median, upper quartile over rounds: of throughput what is lost, of CPU what
    is added."""
    both = list(zip(off, on, strict=True))
    lost = [1 - y["requests_per_s"] / x["requests_per_s"] for x, y in both]
    added = [y["cpu_us"] / x["cpu_us"] - 1 for x, y in both]
    shares = {"throughput": lost, "cpu": added}
    return {name: tuple(statistics.quantiles(rows, n=4)) for name, rows in shares.items()}


def _alone(one: Callable[[], None], less: Callable[[], None]) -> float:
    """Processor microseconds of one request, less those of the other loop."""
    found = []
    for each in (one, less):
        began_s = time.process_time()
        for _ in range(ALONE):
            each()
        found.append((time.process_time() - began_s) / ALONE * 1e6)
    return found[0] - found[1]


def _counted(metrics: GatewayMetrics) -> Callable[[], None]:
    """All that is counted of one request."""
    usage = Usage(2000, 16, 1500)

    def one() -> None:
        metrics.routed(0.001)
        metrics.sent("w0", 1500)
        metrics.first_byte(0.05)
        metrics.left("w0", 200)
        metrics.used("w0", usage, (1500,))
        metrics.answered("/v1/completions", 200, 0.2)

    return one


class _Piped(Exporter):
    """What it takes goes up to the pipe, and no further."""

    def take(self, record: Record) -> None:
        super().take(record)
        if len(self._waiting) >= BATCH_RECORDS:
            self._encode(Batch(0.0, self._waiting))
            self._waiting = []


def _traced(still: Still) -> Steer:
    config = TracingConfig(otlp="http://127.0.0.1:1")
    return Traced(still, _Piped(config), config)


def _asked(steer: Steer, still: Still) -> Callable[[], None]:
    """All that a `Steer` is told of one request."""
    body = {"model": "mock", "prompt": "x", "max_tokens": 16, "stream": True}
    headers = {"host": "127.0.0.1", "content-type": "application/json"}
    outcome = Outcome(still.target, 200, 2000, 1500, 16, 0.05, 0.2)

    async def ask() -> None:
        route = await steer.choose(Inbound("id", "/v1/completions", body, headers))
        steer.sent(route, still.target)
        steer.first_token(route, 0.05)
        steer.finished(route, outcome)

    def one() -> None:
        try:
            ask().send(None)  # it waits for nothing
        except StopIteration:
            return
        raise AssertionError("it waited")

    return one


def _print(figures: dict[str, Any]) -> None:
    columns = ("", "requests/s", "CPU µs", "throughput lost", "CPU added", "CPU µs of the sender")
    table = Table(*columns)
    for side in (OFF, METRICS, BOTH):
        row, share = figures[side], figures["share"].get(side, {})
        shown = [f"{m:.1%} ({lo:.1%} … {hi:.1%})" for lo, m, hi in share.values()] or ["", ""]
        sender = f"{row['sender_cpu_us']:.0f}" if row["sender_cpu_us"] else ""
        figure = f"{row['requests_per_s']:,.0f}", f"{row['cpu_us']:.0f}"
        table.add_row(side, *figure, *shown, sender)
    console = Console(width=120)
    console.print(table)
    alone = figures["alone"]
    told = ", ".join(f"{name} {cpu_us:.1f}" for name, cpu_us in alone["cpu_us"].items())
    console.print(f"alone in a loop, CPU µs of one request: {told}: {alone['share']:.1%} of it")


if __name__ == "__main__":
    run()
