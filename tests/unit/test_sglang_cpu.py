"""What is said to SGLang, without starting it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvatlas
from kvatlas.connectors.sglang_cpu import SglangEngine, installed, storage
from kvatlas.errors import ConfigError
from kvatlas.validate.exactness_sglang import SglangAnswers
from kvatlas.validate.exactness_vllm import subject


@pytest.mark.parametrize(
    ("package", "found"),
    [("sglang-0.5.23", True), ("sglang-0.5.22", False), ("torch-2.13.0", False)],
)
def test_the_version_counts(tmp_path: Path, package: str, found: bool) -> None:
    (tmp_path / "lib" / "python3.11" / "site-packages" / f"{package}.dist-info").mkdir(parents=True)
    assert installed(tmp_path) is found


def test_an_engine_has_our_backend_and_what_stands_in_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    args = storage(tmp_path / "agent.sock", {"answer_s": 3, "prefetch_threshold": 32})
    engine = SglangEngine(
        tmp_path,
        tmp_path / "model",
        name="s",
        port=30001,
        log=tmp_path / "log",
        model_name="m",
        path=[tmp_path / "shim"],
        page_tokens=32,
        args=args,
    )
    assert engine.env is not None
    source = str(Path(kvatlas.__file__).parents[1])
    assert engine.env["PYTHONPATH"] == f"{tmp_path / 'shim'}:{source}"
    assert engine.env["OMP_NUM_THREADS"] == "1"
    told = dict(zip(engine.argv, engine.argv[1:], strict=False))
    assert (told["--page-size"], told["--port"], told["--host"]) == ("32", "30001", "127.0.0.1")
    extra = json.loads(told["--hicache-storage-backend-extra-config"])
    assert extra["socket"] == str(tmp_path / "agent.sock")
    assert (extra["answer_s"], extra["prefetch_threshold"], extra["interface_v1"]) == (3, 32, 1)


@pytest.mark.parametrize("model", ["swa", "v4"])
def test_what_sglang_does_not_run_on_a_cpu_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whole attention only"):
        SglangAnswers(
            subject(model, tmp_path),
            {600: [5] * 600},
            venv=tmp_path,
            path=[],
            scratch=tmp_path,
            settings={},
        )
