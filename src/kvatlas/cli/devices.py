"""``kvatlas devices``: the accelerators and links that the time model knows, with their figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from kvatlas.cli.output import print_json, table_console
from kvatlas.workload.device import DEVICES, Device
from kvatlas.workload.links import LINKS
from kvatlas.workload.profiles import read_profiles

_EPILOG = """\
examples:
  kvatlas devices
  kvatlas devices --device-file mine.toml       those of your own too (see docs/hardware.md)
  kvatlas devices --json
"""


_WIDTH = 120  # of a table that goes to a file


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``kvatlas devices`` and its options."""
    parser = subparsers.add_parser(
        "devices",
        description="Lists the hardware profiles: what data sheets say and what is reached of it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device-file", type=Path, metavar="FILE", help="[[device]] tables of your own"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    devices = read_profiles(args.device_file) if args.device_file else DEVICES
    if args.json:
        found = {"devices": list(devices.values()), "links": list(LINKS.values())}
        print_json(found)
        return 0
    console = table_console(_WIDTH)
    console.print(device_table(devices))
    console.print(link_table())
    return 0


def device_table(devices: dict[str, Device]) -> Table:
    """One row per device; efficiencies are compute, weights, KV state."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="devices", title_justify="left")
    table.add_column("device", no_wrap=True)
    for name in ("bf16", "fp8", "fp4", "GiB", "TB/s", "scale-up GB/s", "reached", "$/h"):
        table.add_column(name, justify="right", no_wrap=True)
    for d in devices.values():
        rates = [_tflops(d.flops.get(name)) for name in ("bf16", "fp8", "fp4")]
        state = d.memory_efficiency if d.attention_efficiency is None else d.attention_efficiency
        table.add_row(
            d.name,
            *rates,
            f"{d.memory_bytes / 2**30:.0f}",
            f"{d.memory_bytes_per_s / 1e12:.3g}",
            f"{d.link_bytes_per_s / 1e9:.0f}",
            f"{d.compute_efficiency:.2f} {d.memory_efficiency:.2f} {state:.2f}",
            f"{d.usd_per_hour:.2f}" if d.usd_per_hour else "–",
        )
    return table


def _tflops(flops: float | None) -> str:
    return "–" if flops is None else f"{flops / 1e12:.4g}"


def link_table() -> Table:
    """One row per link, bytes per second one way."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="links", title_justify="left")
    table.add_column("link", no_wrap=True)
    for name in ("GB/s", "reached", "µs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("source")
    for link in LINKS.values():
        table.add_row(
            link.name,
            f"{link.nominal_bytes_per_s / 1e9:.4g}",
            f"{link.bytes_per_s / 1e9:.4g}",
            f"{link.latency_s * 1e6:.0f}",
            link.source,
        )
    return table
