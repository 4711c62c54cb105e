"""What `kvatlas observe front` adds to the path that it shadows: streamed answers, in pairs.

Each pair is one request direct and the same through the pass-through, one after the other, in an
order by lot; a recording is written meanwhile, with DeepSeek V4's tokenizer. Engine, client,
pass-through and recorder share the machine's cores. What is added is the median of the pairs'
differences; beside it the same of direct requests against each other would be 0.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gateway import tokenizer_in
from benchmarks.gateway_peers import Child, free_port

#: Of each round; streams are those at a time.
SCENES = (
    {"ttft_ms": 0, "gap_ms": 0, "events": 16, "pairs": 500, "streams": 1},
    {"ttft_ms": 50, "gap_ms": 5, "events": 8, "pairs": 120, "streams": 1},
    {"ttft_ms": 50, "gap_ms": 5, "events": 8, "pairs": 600, "streams": 8},
    {"ttft_ms": 200, "gap_ms": 20, "events": 8, "pairs": 300, "streams": 8},
)
ROUNDS = 5


def run() -> dict[str, Any]:
    """Added time to the first and to the last byte; prints a table."""
    children: list[Child] = []

    def started(*command: object, stdin: bool = False) -> Child:
        children.append(Child(sys.executable, "-m", *command, stdin=stdin))
        return children[-1]

    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = Path(scratch)
            tokenizer = tokenizer_in(folder)
            direct = int(started("benchmarks.observe_child", "engine").line())
            port = free_port()
            front = started(
                *("kvatlas", "observe", "front", "--router", f"http://127.0.0.1:{direct}"),
                *("--listen", f"127.0.0.1:{port}", "--record", folder / "seen.jsonl"),
                *("--tokenizer", tokenizer, "--drain-s", "0"),
            )
            front.line()
            client = started("benchmarks.observe_child", "client", stdin=True)
            rows = [_scene(client, scene | {"direct": direct, "through": port}) for scene in SCENES]
            recorded = (folder / "seen.jsonl").read_bytes().count(b"\n")
        finally:
            for child in reversed(children):
                child.stop()
    asked = ROUNDS * sum(int(s["pairs"] + 2 * s["streams"]) for s in SCENES)
    figures = {"rows": rows, "asked_through": asked, "recorded": recorded}
    _print(figures)
    return figures


def _scene(client: Child, job: dict[str, Any]) -> dict[str, Any]:
    """The round in which direct answers had the lowest p99, told by a figure that is not ours; what
    was added in each of them, as a spread."""
    rounds = [client.ask(job) for _ in range(ROUNDS)]
    quiet = min(rounds, key=lambda found: found["first"]["direct_p99_s"])
    row: dict[str, Any] = {k: job[k] for k in ("ttft_ms", "gap_ms", "events", "pairs", "streams")}
    for name in ("first", "last"):
        added = [found[name]["added_p50_s"] for found in rounds]
        row[name] = quiet[name] | {
            "added_p50_rounds_s": [min(added), max(added)],
            "added_share": quiet[name]["added_p50_s"] / quiet[name]["direct_p50_s"],
        }
    return row


def _print(figures: dict[str, Any]) -> None:
    table = Table(title="added by observing (medians of pairs)", title_justify="left")
    for column in ("TTFT", "streams", "to", "direct p50", "added p50", "of rounds", "share"):
        table.add_column(column, justify="right")
    table.add_column("p99 direct → through", justify="right")
    for row in figures["rows"]:
        for name in ("first", "last"):
            found = row[name]
            low, high = found["added_p50_rounds_s"]
            table.add_row(
                f"{row['ttft_ms']} ms",
                str(row["streams"]),
                f"{name} byte",
                f"{found['direct_p50_s'] * 1e3:.2f} ms",
                f"{found['added_p50_s'] * 1e6:.0f} µs",
                f"{low * 1e6:.0f} … {high * 1e6:.0f} µs",
                f"{found['added_share']:.2%}",
                f"{found['direct_p99_s'] * 1e3:.2f} → {found['through_p99_s'] * 1e3:.2f} ms",
            )
    console = Console(width=130)
    console.print(table)
    console.print(f"recorded: {figures['recorded']:,} of {figures['asked_through']:,} requests")


if __name__ == "__main__":
    print(json.dumps(run()))
