"""`kvatlas study delta` on the trained model, as short as it can be. The whole study takes minutes;
its result is in ``fixtures/validated``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engines import require

from kvatlas.cli.main import main
from kvatlas.connectors.vllm_cpu import MODEL_NAME
from kvatlas.validate.delta_study import WAYS, Study

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


def test_the_study_runs_and_every_unit_comes_back(tmp_path: Path) -> None:
    venv, page = require("vllm"), tmp_path / "page.md"
    model = ROOT / ".demo" / MODEL_NAME
    if not (model / "config.json").is_file():
        pytest.skip(f"there is no {MODEL_NAME} here: the demo makes it")
    page.write_text((ROOT / "docs" / "understanding" / "v4-state.md").read_text("utf-8"), "utf-8")
    out = tmp_path / "study.json"
    options = ["--venv", venv, "--model-dir", model, "--text", page, "--out", out]
    assert main(["study", "delta", *map(str, options), "--layers=1", "--context-tokens=400"]) == 0
    found = Study.decode(out.read_bytes(), "study.json")
    assert [text.tokens for text in found.texts] == [400]
    assert {c.component for c in found.codings} == {"K before RoPE", "K", "V"}
    assert {c.units for c in found.codings} == {2}
    assert {m.component for m in found.mechanism} == {"c4_kv", "c4_index", "c128_kv"}
    assert {m.ways for m in found.mechanism} == {len(WAYS)}
    alone = {(c.component, c.codec): c.ratio for c in found.codings if c.delta is None}
    assert all(1.05 < ratio < 1.6 for ratio in alone.values()), "neither noise nor zeros"
