"""``python -m benchmarks [NAME...]``: run all benchmarks or the named ones, one after the other.

Each prints its table and leaves ``benchmarks/results/NAME.json``: where and when it ran, and its
figures.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import kvatlas
from benchmarks.peers import ROOT

NAMES = (
    "decision",
    "directory",
    "events",
    "tokenize",
    "second_turn",
    "gateway",
    "gateways",
    "scale",
    "hit_rate",
    "engine_model",
    "simulate",
    "router",
    "ahead",
    "dataplane",
    "connector",
    "caches",
    "stores",
    "observe",
    "sealing",
    "tls",
    "warm_start",
    "register",
    "observability",
)
RESULTS = Path(__file__).parent / "results"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _where() -> dict[str, Any]:
    return {
        "commit": _commit(),
        "version": kvatlas.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    """Run what is named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(NAMES)}")
    names = parser.parse_args().names or NAMES
    unknown = set(names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}: {', '.join(NAMES)}")
    RESULTS.mkdir(exist_ok=True)
    for name in names:
        print(f"== {name}", flush=True)
        where = _where()
        figures = importlib.import_module(f"benchmarks.{name}").run()
        # A table of rows lies at the top, for whoever reads it by name.
        result = where | {"name": name} | (figures if "rows" in figures else {"figures": figures})
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
