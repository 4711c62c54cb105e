"""Processes that answer: a script of `kvatlas.connectors` run by an engine's own Python.

Both `vllm_greedy` and `transformers_greedy` read a job and write what computes there and one answer
per line.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec

from kvatlas.errors import ConfigError, EngineError
from kvatlas.validate.exactness import Answer
from kvatlas.workload.proofs import Runtime

JOB_S = 7200.0


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format"):
    """What a study on a trained model begins with: what computed it, and when."""

    model: str
    weights: str
    transformers: str
    torch: str
    device: str
    seed: int
    date: str

    @classmethod
    def decode(cls, data: bytes, name: str) -> Self:
        """One that was kept. Raises ConfigError that names the file ``name``."""
        try:
            made = msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{name}: no {cls.__struct_config__.tag}: {error}") from error
        made.check(name)
        return made

    def check(self, name: str) -> None:
        """Raises ConfigError where the figures cannot be printed."""


class _About(msgspec.Struct, frozen=True):
    version: str
    device: str
    torch: str


class Child:
    """Runs ``script`` with the Python of ``venv``, a fresh process per job; files in ``scratch``.

    ``path`` directories go onto its PYTHONPATH.
    """

    def __init__(self, script: str, venv: Path, path: Iterable[Path], scratch: Path) -> None:
        self._command = [str(venv.absolute() / "bin" / "python"), script]
        self._scratch = scratch
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        added = os.pathsep.join(str(p.absolute()) for p in path)
        if added:
            self._env["PYTHONPATH"] = added
        self._about: _About | None = None

    def run(self, job: Mapping[str, Any]) -> dict[str, Answer]:
        """The answers by id. Raises as `lines`."""
        answers = [msgspec.json.decode(line, type=Answer) for line in self.lines(job)]
        return {answer.id: answer for answer in answers}

    def lines(self, job: Mapping[str, Any]) -> list[bytes]:
        """The answers as written. Raises `EngineError` with the end of the log where it fails."""
        asked, results, log = (self._scratch / name for name in ("job.json", "results", "log"))
        results.unlink(missing_ok=True)
        asked.write_bytes(msgspec.json.encode(job))
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    [*self._command, str(asked), str(results)],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=JOB_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise EngineError(f"the engine was not done after {JOB_S:.0f} s") from error
        if done.returncode:
            end = log.read_text("utf-8", "replace")[-3000:]
            raise EngineError(
                f"the engine ended with status {done.returncode}. Its last words:\n{end}"
            )
        first, *lines = results.read_bytes().splitlines()
        self._about = msgspec.json.decode(first, type=_About)
        return lines

    def runtime(self, engine: str) -> Runtime:
        """What computed the last job."""
        assert self._about is not None, "nothing was run"
        return Runtime(engine, self._about.version, self._about.device)

    def measured(
        self, model: str, weights: str, seed: int
    ) -> tuple[str, str, str, str, str, int, str]:
        """The fields of a `Measured`."""
        runtime = self.runtime("transformers")
        return model, weights, runtime.version, self.torch(), runtime.device, seed, today()

    def torch(self) -> str:
        """The version of torch there."""
        assert self._about is not None, "nothing was run"
        return self._about.torch


def today() -> str:
    """The date of a report."""
    return datetime.now(UTC).date().isoformat()
