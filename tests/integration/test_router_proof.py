"""The table of policies × families: what is written down, and that it can be made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "router.json"


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import router

    return router


def test_every_policy_stands_beside_every_family(router: Any) -> None:
    result = json.loads(RESULT.read_text("utf-8"))
    rows = {(row["family"], row["policy"]): row for row in result["rows"]}
    families = {*router.REAL, *router.RATES} - set(result["left_out"])
    assert set(rows) == {(f, p) for f in families for p in ("price", *router.GRID)}
    assert all(row["seeds"] >= 10 for row in rows.values())
    for family in families:
        ours, others = rows[family, "price"], [rows[family, policy] for policy in router.GRID]
        for what in ("ttft_p50_s", "ttft_p95_s"):
            assert ours[what] <= 1.03 * min(other[what] for other in others), (family, what)
        assert ours["hit_tokens"] >= 0.97 * max(other["hit_tokens"] for other in others), family


@pytest.mark.parametrize("family", ["random", "shared-prompt"])
def test_a_small_one_is_made_again(router: Any, family: str) -> None:
    made = [router.measure((family,), (0,), 24, lambda _: None) for _ in range(2)]
    assert made[0] == made[1]
    rows = {row["policy"]: row for row in made[0]["rows"]}
    assert set(rows) == {"price", *router.GRID}
    assert len({row["prompt_tokens"] for row in rows.values()}) == 1  # the same arrivals
    if family == "random":
        assert not any(row["hit_tokens"] for row in rows.values())
    else:
        assert rows["price"]["hit_tokens"] > rows["round_robin"]["hit_tokens"]


def test_a_trace_that_is_not_there_is_left_out(
    router: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(router, "TRACES", tmp_path)
    made = router.measure(("conversation",), (0,), 24, lambda _: None)
    assert made["rows"] == []
    assert "mooncake_conversation" in made["left_out"]["conversation"]
