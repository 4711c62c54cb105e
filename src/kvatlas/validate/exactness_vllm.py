"""Runs the cases of `kvatlas.validate.exactness` on a real vLLM, in processes of its own.

One process computes the references, finds its own blocks again and saves state; a fresh one loads
it. Both run `kvatlas.connectors.vllm_greedy` with the Python of vLLM's virtual environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.connectors import vllm_greedy
from kvatlas.core.families import mla
from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError, EngineError
from kvatlas.validate.exactness import (
    DECODE_TOKENS,
    LONG_MARGIN_TOKENS,
    Answer,
    Case,
    Finding,
    bad_cases,
    good_cases,
    judge,
    middle_length,
    prompt_lengths,
)
from kvatlas.validate.tiny import TINY, tiny
from kvatlas.workload.models import load_config, load_layout
from kvatlas.workload.proofs import Proof, Runtime

LOGPROBS = 20
POOL_BYTES = 256 << 20
JOB_S = 3600.0
_OTHER = 1  # added to the seed: the prompt whose state is swapped in

_MLA = (
    "vLLM's CPU backend computes wrong numbers from any cached prefix of an MLA model (without AMX"
    " it switches prefix caching off for that reason, and a connector would bring it back in"
    " silence): there is no exactness to validate. Run this on a GPU backend"
)


class Subject(msgspec.Struct, frozen=True):
    """A model to run: its directory, its layout, and whether its weights are to be made up.

    ``top_k_tokens``: the context that V4's indexer lets through whole; 0 without an indexer.
    """

    name: str
    folder: Path
    layout: Layout
    made_up: bool
    top_k_tokens: int = 0


class Report(msgspec.Struct, frozen=True):
    """All that was tried and found; ``fresh``: state was loaded by another process."""

    model: str
    runtime: Runtime
    torch: str
    state: str
    seed: int
    date: str
    fresh: bool
    decode_tokens: int
    findings: list[Finding]

    def ok(self) -> bool:
        """Whether every case went as expected."""
        return bool(self.findings) and all(f.ok for f in self.findings)

    def proof(self) -> Proof | None:
        """What this run shows of the minimal resume point; None where it shows nothing.

        It needs a fresh process, minimal resumes, and faults that were noticed.
        """
        minimal = sum(f.case.way in ("minimal", "again", "second") for f in self.findings)
        noticed = sum(f.case.expected == "different" for f in self.findings)
        if not (self.ok() and self.fresh and minimal and noticed):
            return None
        return Proof(
            runtime=self.runtime.digest(),
            state=self.state,
            about=self.runtime,
            model=self.model,
            seed=self.seed,
            date=self.date,
            same=sum(f.case.expected == "same" for f in self.findings),
            minimal=minimal,
            noticed=noticed,
        )


class _About(msgspec.Struct, frozen=True):
    version: str
    device: str
    torch: str


def subject(model: str, scratch: Path) -> Subject:
    """A tiny model by name, or a directory with a real one. Raises ConfigError and LayoutError."""
    names = [t.name for t in TINY]
    if model in names:
        described = tiny(model)
        folder = scratch / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_bytes(described.config())
        block_tokens = described.block_tokens
    else:
        folder, block_tokens = Path(model), 32  # vLLM's CPU attention takes multiples of 32
    if model == "mla":
        raise ConfigError(_MLA)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{model!r} is neither {', '.join(names)} nor a directory with a config.json"
        )
    config = load_config(str(folder))
    if config.get("model_type") in mla.MODEL_TYPES:
        raise ConfigError(_MLA)
    if config.get("model_type") == "deepseek_v4":
        block_tokens = None
    layout = load_layout(str(folder), engine="vllm", block_tokens=block_tokens)
    top_k = config.get("index_topk")
    return Subject(
        name=model,
        folder=folder,
        layout=layout,
        made_up=model in names,
        top_k_tokens=4 * top_k if isinstance(top_k, int) else 0,
    )


def cases(what: Subject, lengths: Sequence[int] = (), faults: bool = True) -> list[Case]:
    """Everything that is tried on a model; ``lengths`` in place of the usual prompt lengths."""
    long = what.top_k_tokens + LONG_MARGIN_TOKENS if what.top_k_tokens else 0
    found = good_cases(what.layout, lengths or prompt_lengths(what.layout, long))
    if faults:
        found += bad_cases(what.layout, middle_length(what.layout), what.top_k_tokens)
        if long and (not lengths or max(lengths) > long):
            found += bad_cases(what.layout, long + 6, what.top_k_tokens, ["c4_index"])
    return found


def run(
    what: Subject,
    wanted: Sequence[Case],
    *,
    venv: Path,
    engine_path: Iterable[Path],
    seed: int,
    scratch: Path,
    fresh: bool = True,
    told: Callable[[Finding], None] = lambda _: None,
) -> Report:
    """Runs the cases and judges them. ``fresh`` False does it all in one process, for haste.

    Raises `EngineError` with the end of the engine's log where a process fails.
    """
    engine = _Engine(what, venv, list(engine_path), scratch)
    written, read = _runs(what.layout, wanted, seed)
    try:
        if fresh:
            answers = engine.run(written, {})
            answers |= engine.run(read, answers)
        else:
            answers = engine.run([*written, *read], {})
    finally:
        shutil.rmtree(engine.store, ignore_errors=True)
    findings = []
    for case in wanted:
        reference = answers[Case(case.prompt_tokens, 0, "cold").name()]
        findings.append(judge(case, reference, answers[case.name()]))
        told(findings[-1])
    about = engine.about
    assert about is not None
    return Report(
        model=what.name,
        runtime=Runtime("vllm", about.version, about.device),
        torch=about.torch,
        state=what.layout.state_digest(),
        seed=seed,
        date=datetime.now(UTC).date().isoformat(),
        fresh=fresh,
        decode_tokens=DECODE_TOKENS,
        findings=findings,
    )


def text(seed: int, count: int) -> list[int]:
    """Token ids of one prompt: a longer one of the same seed continues it."""
    return [(i * 7919 + seed * 613 + (i * i * seed) % 97) % 3900 + 10 for i in range(count)]


def _runs(
    layout: Layout, wanted: Sequence[Case], seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The engine's runs in their order: those that write state, and those that read it."""
    written: list[dict[str, Any]] = []
    read: list[dict[str, Any]] = []
    for n in sorted({case.prompt_tokens for case in wanted}):
        mine = [case for case in wanted if case.prompt_tokens == n]
        reference = Case(n, 0, "cold").name()

        def go(id: str, params: dict[str, Any], *, n: int = n, **more: Any) -> dict[str, Any]:
            prompt = text(more.pop("seed", seed), n)
            return {"id": id, "prompt": prompt, "params": params, "forget": True, **more}

        positions = sorted({c.position for c in mine if c.position} | {layout.grid_tokens})
        positions = [p for p in positions if p < n]
        save = {"save": [[f"{n}-{p}", p] for p in positions]} if positions else {}
        written.append(go(reference, save, like=""))
        for case in mine:
            if case.way == "local":
                written.append(go(case.name(), {}, like=reference, forget=False))
        if any(case.fault for case in mine):
            swapped = {"save": [[f"other-{n}-{p}", p] for p in positions]}
            written.append(go(f"{n}-other", swapped, like="", seed=seed + _OTHER))
        for case in mine:
            at = case.position
            load: dict[str, Any] = {"load": f"{n}-{at}", "at": at}
            if case.fault:
                load["fault"] = [case.fault.part, case.fault.how, f"other-{n}-{at}"]
            if case.way == "load":
                read.append(go(case.name(), load, like=reference))
            elif case.way == "minimal":
                read.append(go(case.name(), load | {"minimal": True}, like=reference))
            elif case.way == "again":
                read.append(go(case.name(), {}, like=reference, forget=False))
            elif case.way == "second":
                first = layout.grid_tokens
                minimal = {"load": f"{n}-{first}", "at": first, "minimal": True}
                saving = minimal | {"save": [[f"second-{n}-{at}", at]]}
                read.append(go(f"{n}-first-{first}", saving, like=reference))
                second = load | {"load": f"second-{n}-{at}"}
                read.append(go(case.name(), second, like=reference))
    return written, read


class _Engine:
    """Starts processes of `vllm_greedy` and collects what they write."""

    def __init__(self, what: Subject, venv: Path, engine_path: list[Path], scratch: Path) -> None:
        self._what = what
        self._python = venv.absolute() / "bin" / "python"
        self._scratch = scratch
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        if engine_path:
            self._env["PYTHONPATH"] = os.pathsep.join(str(p.absolute()) for p in engine_path)
        memory = Path("/dev/shm")
        self.store = Path(
            tempfile.mkdtemp(prefix="kvatlas-exact-", dir=memory if memory.is_dir() else None)
        )
        self.about: _About | None = None

    def run(self, runs: list[dict[str, Any]], known: dict[str, Answer]) -> dict[str, Answer]:
        job, results, log = (self._scratch / name for name in ("job.json", "results", "vllm.log"))
        results.unlink(missing_ok=True)
        job.write_bytes(msgspec.json.encode(self._job(runs, known)))
        command = [str(self._python), vllm_greedy.__file__, str(job), str(results)]
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=JOB_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise EngineError(f"vLLM was not done after {JOB_S:.0f} s") from error
        if done.returncode:
            end = log.read_text("utf-8", "replace")[-3000:]
            raise EngineError(f"vLLM ended with status {done.returncode}. Its last words:\n{end}")
        first, *lines = results.read_bytes().splitlines()
        self.about = msgspec.json.decode(first, type=_About)
        answers = [msgspec.json.decode(line, type=Answer) for line in lines]
        return {answer.id: answer for answer in answers}

    def _job(self, runs: list[dict[str, Any]], known: dict[str, Answer]) -> dict[str, Any]:
        layout, made_up = self._what.layout, self._what.made_up
        settings: dict[str, Any] = {
            "kv_cache_memory_bytes": POOL_BYTES,
            # Steps of one grid block: a resume cuts the rest of the prompt as the reference does.
            "max_num_batched_tokens": layout.grid_tokens,
            "max_num_seqs": 1,
            "max_model_len": max(len(r["prompt"]) for r in runs) + DECODE_TOKENS,
        }
        if made_up:
            settings["load_format"] = "dummy"
        v4 = layout.tensor_parallel == "replicated"  # vLLM chooses its blocks itself
        if not v4:
            settings["block_size"] = layout.grid_tokens
        return {
            "model": str(self._what.folder.absolute()),
            "settings": settings,
            "seed_weights": made_up and not v4,  # V4's come from the shim
            "store": str(self.store),
            "parts": parts(layout),
            "tokens": DECODE_TOKENS,
            "logprobs": LOGPROBS,
            "reference": known,
            "runs": runs,
        }


def parts(layout: Layout) -> list[dict[str, Any]]:
    """The components as `vllm_probe` recognises them: by kind, window, block and page."""
    groups = {g.name: g for g in layout.groups}
    return [
        {
            "name": c.name,
            "kind": groups[c.group].kind,
            "window_tokens": groups[c.group].window_tokens,
            "block_tokens": c.block_tokens,
            "page_bytes": c.stored_block_bytes // c.layers,
            "blocks": c.window_blocks(),
            "least_blocks": c.window_blocks(minimal=True),
        }
        for c in layout.components
    ]
