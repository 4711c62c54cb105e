"""``kvatlas transports``: what moves between the halves of pairs, asked from a running gateway."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from rich.console import Console
from rich.table import Table

from kvatlas.cli.output import print_json
from kvatlas.cli.running import add_url, page

_EPILOG = """\
  kvatlas transports                    exit status 1 where a pair is degraded
  kvatlas transports --json --url http://gateway:8000
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "transports",
        description="Ask a running gateway what its pairs hand over, how fast, and over which "
        "transport as far as is known.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 where a pair is degraded. Raises EngineError for a gateway that does not answer."""
    answer = asyncio.run(page(args.url, "/kvatlas/transports"))
    if args.json:
        print_json(answer)
    else:
        _print(answer, Console(highlight=False))
    return int(any(pair["state"] == "degraded" for pair in answer["pairs"]))


def _print(answer: dict[str, Any], console: Console) -> None:
    if not answer["pairs"]:
        console.print("no pair has handed anything over yet")
    else:
        table = Table("pair", "state", "expected", "seen", box=None, pad_edge=False)
        for name in ("MB", "GB/s", "by", "hand-offs", "± s"):
            table.add_column(name, justify="right")
        for pair in answer["pairs"]:
            size = pair["told_bytes"] + pair["split_bytes"]
            table.add_row(
                f"{pair['prefill']} → {pair['decode']}",
                pair["state"],
                pair["expected"],
                pair["seen"] or "unknown",
                f"{size / 1e6:,.1f}" if size else "–",
                f"{pair['bytes_per_s'] / 1e9:.3f}" if pair["bytes_per_s"] else "–",
                pair["rate_from"] or "–",
                f"{pair['hand_offs']:,}",
                f"{pair['hand_off_error_s']:.3f}",
            )
        console.print(table)
    for pair in answer["pairs"]:
        if pair["why"]:
            console.print(f"{pair['prefill']} → {pair['decode']}: {pair['why']}")
    for node, why in answer["rdma_ports"].items():
        if why:
            console.print(f"RDMA ports of {node}: {why}")
