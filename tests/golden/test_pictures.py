"""Pictures in the documentation show today's figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def test_v4_state_is_drawn_from_the_layout() -> None:
    spec = importlib.util.spec_from_file_location("v4_state", PICTURES / "v4_state.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = script.draw()
    assert drawn == (PICTURES / "v4-state.svg").read_text("utf-8"), "run docs/pictures/v4_state.py"
    assert "10.51 MB" in drawn  # rows of the 128-token entries
    assert "18.47 MB in all" in drawn  # 768 × 3,915 + 15,467,904 bytes
