"""NVIDIA Dynamo (`ai-dynamo-runtime` 1.6.1) as a child process that answers commands."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

from benchmarks.peers import ROOT, peer_python

PINS = ("ai-dynamo-runtime==1.6.1", "pyzmq", "msgspec")


class Dynamo:
    """`dynamo_child` at the other end of two pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, name: str, *args: Any) -> Any:
        """What the child's method answers. Raises RuntimeError when the child has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": name, "args": args}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the Dynamo process ended during {name!r}; its error is above")
        return json.loads(line)


@contextlib.contextmanager
def dynamo() -> Iterator[Dynamo]:
    """Start the child; it ends with the block."""
    process = subprocess.Popen(
        [peer_python(*PINS), "-m", "benchmarks.dynamo_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"DYN_LOG": "error"},
    )
    try:
        yield Dynamo(process)
    finally:
        process.kill()
        process.communicate()
