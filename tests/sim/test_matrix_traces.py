"""The matrix on real traces. They are no part of kvatlas: they lie beside it, or are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvatlas.cli.main import main

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
REQUESTS = 60


@pytest.mark.parametrize(
    "name", ["mooncake_conversation.jsonl.xz", "claude_code_sessions_compact.jsonl.xz"]
)
def test_a_real_trace(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, told, page = TRACES / name, tmp_path / "m.json", tmp_path / "m.html"
    if not trace.exists():
        pytest.skip(f"needs {trace}: a public trace that kvatlas does not ship")
    argv = ["matrix", "--trace", str(trace), "--families", "none", "--requests", str(REQUESTS)]
    argv += ["--engines", "2", "--prefill", "1", "--processes", "1", "--quiet"]
    argv += ["--arrangements", "combined,pd-store", "--json", str(told), "--html", str(page)]
    assert main(argv) == 0
    assert f"{name}: take " in capsys.readouterr().out
    result = json.loads(told.read_text())
    most = max(share for _, share in result["curves"][name]["points"])
    asked = {cell["prompt_tokens"] for cell in result["cells"]}
    assert len(asked) == 1, "all arrangements get the same requests"
    for cell in result["cells"]:
        parts = sum(cell["hit_tokens"].values()) + cell["recomputed"] + cell["unserved"]
        assert parts == cell["prompt_tokens"]
        assert cell["unserved"] == 0
        # An endless cache counts blocks, the last of each prompt as a whole one.
        assert cell["figures"]["hit_share"] <= most + 0.02
        assert cell["figures"]["dollars_per_million"] > 0
        assert len(cell["ttft_s"]) == REQUESTS
    assert "Hits by capacity" in page.read_text()
    assert str(TRACES) not in page.read_text()
