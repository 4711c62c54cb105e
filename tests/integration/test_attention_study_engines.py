"""`kvatlas study attention` on the trained model, as short as it can be: half a minute on one core.

The whole study takes ten; its result is in ``fixtures/validated``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engines import require

from kvatlas.cli.main import main
from kvatlas.connectors.vllm_cpu import MODEL_NAME
from kvatlas.core.policy.attention import AttentionScores
from kvatlas.validate.attention_study import Study

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


def test_the_study_runs_and_hiding_blocks_changes_answers(tmp_path: Path) -> None:
    venv, page = require("vllm"), tmp_path / "page.md"
    model = ROOT / ".demo" / MODEL_NAME
    if not (model / "config.json").is_file():
        pytest.skip(f"there is no {MODEL_NAME} here: the demo makes it")
    page.write_text(
        "\n\n".join(
            f"## Item {n}\n\nThe key of item {n} is {n * 7919 % 1000}; it lies in room {n % 7}."
            for n in range(60)
        )
    )
    out, scores = tmp_path / "study.json", tmp_path / "scores.json"
    options = ["--venv", venv, "--model-dir", model, "--text", page, "--out", out]
    options += ["--scores", scores, "--tokens", 12, "--context-tokens", 512]
    assert main(["study", "attention", *map(str, options)]) == 0
    found = Study.decode(out.read_bytes(), "study.json")
    first, second = found.answers
    assert AttentionScores.decode(scores.read_bytes(), "scores.json").model == MODEL_NAME
    assert [p.context for p in found.pairs] == ["page.md"]
    for told in (first, second):
        assert told.context_tokens == 512
        assert told.sink + told.middle + told.recent == pytest.approx(1.0, abs=1e-4)
        assert sum(told.profile) == pytest.approx(1.0, abs=1e-4)
        assert told.sink > told.even_sink
        assert told.recent > told.even_recent
        losses = {(x.order, x.share): x for x in told.losses}
        assert losses["none", 0.0].agreement == 1.0, "forced in one go, it says what it said alone"
        assert 0 < losses["hindsight", 0.25].kl_nats < losses["hottest", 0.25].kl_nats
        assert losses["before", 0.10].logit_error > 0
