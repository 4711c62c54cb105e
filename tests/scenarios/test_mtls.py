"""The example of a cluster whose parts know each other by certificates, run as people run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_shows_what_passes_and_what_is_refused() -> None:
    argv = [sys.executable, ROOT / "examples" / "mtls.py"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok   ") == 10
    assert done.stdout.endswith("all as it should be\n")
