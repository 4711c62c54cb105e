"""The peers that kvatlas is measured against, in a virtual environment of their own."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-peers"

_CHECK = """
import sys
from importlib.metadata import PackageNotFoundError, version
for pin in sys.argv[1:]:
    name, _, wanted = pin.partition("==")
    try:
        found = version(name)
    except PackageNotFoundError:
        sys.exit(1)
    if wanted and found != wanted:
        sys.exit(1)
"""


def peer_python(*pins: str, alone: Sequence[str] = ()) -> Path:
    """The interpreter of ``.venv-peers`` with all ``pins`` ("name" or "name==version") installed.

    ``alone``: pins that are installed without what they ask for. Made and filled on first use;
    nothing of it is ever imported by kvatlas itself.
    Raises subprocess.CalledProcessError when a pin cannot be installed.
    """
    python = VENV / "bin" / "python"
    if not python.exists():
        venv.create(VENV, with_pip=True)
    for some, options in ((pins, ()), (alone, ("--no-deps",))):
        if subprocess.run([python, "-c", _CHECK, *some], check=False).returncode:
            print(f"installing {', '.join(some)} into {VENV.name} ...", file=sys.stderr)
            subprocess.run([python, "-m", "pip", "install", "-q", *options, *some], check=True)
    return python
