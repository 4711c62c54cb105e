"""A real engine in a process of its own that a test steers: one line of JSON to it, one from it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from real_engines import HERE

import kvatlas


class Steered:
    """The near end of it; at the other is `steered_child`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    def heard(self) -> dict[str, Any]:
        """Its next line; fails with the end of its log."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, self._log.read_text("utf-8", "replace")[-3000:]
        told: dict[str, Any] = json.loads(line)
        return told

    def say(self, **asked: Any) -> None:
        """A question, without waiting for the answer."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def ask(self, **asked: Any) -> dict[str, Any]:
        """A question and its answer."""
        self.say(**asked)
        return self.heard()


@contextmanager
def steered(
    script: str, venv: Path, job: bytes, scratch: Path, env: Mapping[str, str]
) -> Iterator[Steered]:
    """``script`` of this directory is about to start, with the Python of ``venv``: `Steered.heard`
    waits for it. ``env`` goes on top of ours."""
    asked, log = scratch / "job.json", scratch / "engine.log"
    asked.write_bytes(job)
    ours = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    source = Path(kvatlas.__file__).parents[1]
    with (
        log.open("w") as output,
        subprocess.Popen(
            [str(venv / "bin" / "python"), str(HERE / script), str(asked), str(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=ours | dict(env),
            text=True,
        ) as process,
    ):
        try:
            yield Steered(process, log)
        finally:
            process.kill()
