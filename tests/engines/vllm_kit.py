"""Questions to vLLM's own code: a script of ``tests/contract``, run by vLLM's Python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

_REPO = Path(__file__).resolve().parents[2]
_PYTHON = _REPO / ".venv-vllm" / "bin" / "python"


def told_by_vllm(script: str, asked: object, count: int) -> list[Any]:
    """The last ``count`` lines of JSON that the script prints when it reads ``asked``."""
    if not _PYTHON.exists():
        pytest.skip("vLLM is not installed: no .venv-vllm beside the sources")
    child = subprocess.run(
        [str(_PYTHON), str(_REPO / "tests" / "contract" / script)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return [json.loads(line) for line in child.stdout.splitlines()[-count:]]
