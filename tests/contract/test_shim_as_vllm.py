"""What the V4 shim does in numpy is what vLLM's own kernel does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from real_engines import HERE, require_v4

CHILD = Path(__file__).with_name("vllm_windows_child.py")
BATCHES = 40


@pytest.mark.engine
def test_windows_are_listed_as_vllm_lists_them() -> None:
    command = [str(require_v4() / "bin" / "python"), str(CHILD), str(BATCHES)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env |= {"PYTHONPATH": str(HERE / "vllm_v4_shim"), "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"agreed": BATCHES}
