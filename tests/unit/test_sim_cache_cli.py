"""``kvatlas trace hit-rate`` and ``compare``: what they print, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvatlas.cli.main import main

PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3, 6], [1, 2, 7], [4, 5], [8]]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for n, ids in enumerate(PROMPTS):
            line = {"timestamp": 1000 * n, "input_length": 512 * len(ids) - 12, "output_length": 5}
            file.write(json.dumps(line | {"hash_ids": ids}) + "\n")
    return path


def told(capsys: Capsys, *args: object) -> dict[str, object]:
    assert main(["trace", *map(str, args), "--json"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def test_one_run_is_one_object(trace: Path, capsys: Capsys) -> None:
    answer = told(capsys, "hit-rate", trace, "--policy", "lru", "--capacity", "100%")
    assert answer["block_hit_rate"] == 7 / 15
    assert answer["token_hit_rate"] == (3 * 512 + 2 * 512 + 1012) / (15 * 512 - 6 * 12)
    expected = {"requests": 6, "blocks": 15, "unique_blocks": 8, "capacity": 8, "evictions": 0}
    assert answer.items() >= expected.items()
    assert answer["full_prefix_hits"] == 1


def test_capacity_as_share_number_tokens_and_tiers(trace: Path, capsys: Capsys) -> None:
    for text, unit, capacity in (
        ("50%", "blocks", 4),
        ("3", "blocks", 3),
        ("50%", "tokens", 2048),
        ("700", "tokens", 700),
        ("1+2+3", "blocks", 6),
        ("0.0001%", "blocks", 1),
    ):
        answer = told(capsys, "hit-rate", trace, "--capacity", text, "--unit", unit)
        assert answer["capacity"] == capacity
        assert answer["unit"] == unit
    assert answer["tiers"] == [1]


def test_several_make_a_table_with_both_oracles(trace: Path, capsys: Capsys) -> None:
    answer = told(capsys, "hit-rate", trace, "--policy", "all", "--capacity", "2,4,100%")
    rows = msgspec.convert(answer["rows"], list[dict[str, object]])
    assert len(rows) == 3 * (8 + 2)
    assert {row["policy"] for row in rows} >= {"lru", "prefix_tree", "optimal", "endless"}
    whole = {row["block_hit_rate"] for row in rows if row["capacity"] in (8, None)}
    assert whole == {7 / 15}
    assert main(["trace", "hit-rate", str(trace), "--policy", "lru,optimal"]) == 0
    assert "optimal" in capsys.readouterr().out


def test_compare_says_what_is_not_known(trace: Path, capsys: Capsys, tmp_path: Path) -> None:
    answer = told(capsys, "compare", trace, "--capacity", "2+2+2")
    rows = msgspec.convert(answer["rows"], list[dict[str, object]])
    by_policy = {(row["policy"], row["strategy"]): row for row in rows}
    attention = by_policy["attention", "2"]
    assert attention["token_hit_rate"] is None
    assert str(attention["note"]).startswith("not known")
    for strategy in (("lru_sink", "1"), ("prefix_tree", "3"), ("prefix_tree", "3 + 4")):
        row = by_policy[strategy]
        assert isinstance(row["token_hit_rate"], float)
        assert 0 <= row["token_hit_rate"] <= 1
        assert isinstance(row["per_use_s"], float)
        assert isinstance(row["objective"], float)
    assert main(["trace", "compare", str(trace)]) == 0
    assert "not known" in capsys.readouterr().out
    scores = tmp_path / "scores.json"
    scores.write_text(
        '{"format": "kvatlas.attention-scores.1", "model": "deepseek-v4-flash",'
        '"statistic": "csa_selection", "trained": true, "source": "made up", "block_tokens": 512}'
    )
    answer = told(capsys, "compare", trace, "--scores", scores)
    rows = msgspec.convert(answer["rows"], list[dict[str, object]])
    assert [row["note"] for row in rows if row["policy"] == "attention"] == [""]


BAD = [
    (["--capacity", "0"], "above 0"),
    (["--capacity=-5%"], "above 0"),
    (["--capacity", "nan"], "above 0"),
    (["--capacity", "1e400"], "above 0"),
    (["--capacity", "2.5"], "whole"),
    (["--capacity", "ten"], "above 0"),
    (["--capacity", "1,,2"], "between the commas"),
    (["--capacity", "1+1+1+1+1"], "more than 4 tiers"),
    (["--policy", "best"], "none of that name"),
    (["--policy", ""], "between the commas"),
    (["--policy", "attention"], "measured scores"),
    (["--scores", "nowhere.json"], "cannot be read"),
    (["--requests", "0"], "at least 1"),
    (["--merge", "0"], "can be made one"),
    (["--devices", "0"], "at least 1"),
    (["--model", "32"], "not known"),
    (["--model", "no-such-model"], "neither a known model"),
]


@pytest.mark.parametrize(("args", "reason"), BAD, ids=[" ".join(args) for args, _ in BAD])
def test_bad_options_end_with_2_and_one_line(
    trace: Path, capsys: Capsys, args: list[str], reason: str
) -> None:
    assert main(["trace", "hit-rate", str(trace), *args]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json\n",
        '{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": [1]}\n',
    ],
)
def test_bad_traces_end_with_2(tmp_path: Path, capsys: Capsys, content: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    for command in ("hit-rate", "compare"):
        assert main(["trace", command, str(path)]) == 2
        assert "bad.jsonl" in capsys.readouterr().err
    assert main(["trace", "compare", str(tmp_path / "none.jsonl")]) == 2


@pytest.mark.parametrize("weights", ["", "1,2", "a,b,c,d", "1,2,3,4", "-1,-1,-1,-1", "nan,0,0,0"])
def test_weights_that_are_none(trace: Path, capsys: Capsys, weights: str) -> None:
    assert main(["trace", "compare", str(trace), f"--weights={weights}"]) == 2
    assert "weights" in capsys.readouterr().err


def test_the_issue_commands_on_the_real_trace(
    shared_file: Callable[[str], Path], capsys: Capsys
) -> None:
    path = shared_file("traces/mooncake_conversation.jsonl.xz")
    answer = told(capsys, "hit-rate", path, "--policy", "lru", "--capacity", "5%")
    assert round(float(str(answer["block_hit_rate"])), 3) == 0.195
