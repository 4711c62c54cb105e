"""The exactness harness's own judgement: what is tried, what is a difference, what is a proof."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvatlas.cli.exactness import _lengths
from kvatlas.cli.main import main
from kvatlas.core.layout import Layout, drafted
from kvatlas.errors import ConfigError
from kvatlas.validate.exactness import (
    FAULTS,
    Answer,
    Case,
    Fault,
    Report,
    bad_cases,
    difference,
    good_cases,
    judge,
    last_position,
    prompt_lengths,
)
from kvatlas.validate.exactness_vllm import _runs, cases, parts, subject, text
from kvatlas.workload.models import load_layout
from kvatlas.workload.proofs import Runtime, add_proof, load_proofs, minimal_shown, settled

RUNTIME = Runtime("vllm", "0.32.0", "cpu AVX512")


def answer(*tokens: int, change: float = 0.0, cached: int = 512, at: int = 0) -> Answer:
    logprobs = [
        [(t, -1.0 - (change if i == at else 0.0)), (t + 1, -2.0)] for i, t in enumerate(tokens)
    ]
    return Answer("x", list(tokens), logprobs, cached)


def v4(tmp_path: Path) -> Layout:
    return subject("v4", tmp_path).layout


# -- what is tried --------------------------------------------------------------------------------


def test_every_kind_of_position_is_tried(tmp_path: Path) -> None:
    lengths = prompt_lengths(v4(tmp_path), 2304)
    assert {127, 128, 129, 255, 256, 257, 511, 512, 513, 2310} <= set(lengths)
    assert {383, 384, 385} <= set(lengths)  # the edge of the window behind a resume point
    swa = prompt_lengths(subject("swa", tmp_path).layout)
    assert {16, 31, 32, 33, 99, 100, 101, 127, 128, 129, 131, 132, 133} <= set(swa)


@pytest.mark.parametrize(
    ("prompt", "position"), [(1, 0), (255, 0), (256, 0), (257, 256), (512, 256), (513, 512)]
)
def test_the_last_token_is_always_computed(prompt: int, position: int) -> None:
    assert last_position(prompt, 256) == position


def test_a_prompt_below_the_grid_has_nothing_to_load(tmp_path: Path) -> None:
    layout = v4(tmp_path)
    assert {c.way for c in good_cases(layout, [200])} == {"local"}
    ways = [c.way for c in good_cases(layout, [257])]
    assert ways == ["local", "load", "minimal", "again", "resaved"]
    assert "second" in {c.way for c in good_cases(layout, [600])}
    plain = subject("gqa", tmp_path).layout
    assert {c.way for c in good_cases(plain, [600])} == {"local", "load"}


def test_each_part_is_damaged_alone_in_every_way(tmp_path: Path) -> None:
    what = subject("v4", tmp_path)
    found = bad_cases(what.layout, 600, what.top_k_tokens)
    assert len(found) == len(set(found)) == 5 * len(FAULTS)
    assert {c.fault.part for c in found if c.fault and c.expected == "unread"} == {"c128_state"}
    deep = [c for c in cases(what) if c.fault and c.prompt_tokens == 2310]
    index = {("c4_index", "different"), ("c4_index_state", "different")}
    assert {(c.fault.part, c.expected) for c in deep if c.fault} == index
    assert len({c.name() for c in cases(what)}) == len(cases(what))


def test_the_runs_save_before_they_load(tmp_path: Path) -> None:
    what = subject("v4", tmp_path)
    written, read = _runs(what.layout, cases(what, [600]), seed=1)
    saved = {record for run in [*written, *read] for record, _ in run["params"].get("save", ())}
    loaded = {run["params"]["load"] for run in read if "load" in run["params"]}
    swapped = {run["params"]["fault"][2] for run in read if "fault" in run["params"]}
    assert loaded | swapped <= saved
    names = [run["id"] for run in read]
    assert names.index("600-again-0") == names.index("600-minimal-512") + 1
    assert all(run["like"] == "600-cold-0" for run in read)
    assert text(1, 300)[:200] == text(1, 200) != text(2, 200)


def test_parts_are_described_by_kind_window_block_and_page(tmp_path: Path) -> None:
    described = parts(v4(tmp_path))
    marks = [(p["kind"], p["window_tokens"], p["block_tokens"], p["page_bytes"]) for p in described]
    assert len(set(marks)) == len(marks) == 7
    assert {p["name"]: p["least_blocks"] for p in described} == {
        "c4_kv": None,
        "c4_index": None,
        "c128_kv": None,
        "swa": 2,
        "c4_state": 1,
        "c4_index_state": 1,
        "c128_state": 0,
    }


# -- what is a difference -------------------------------------------------------------------------


def test_equal_to_the_last_bit_is_no_difference() -> None:
    assert difference(answer(1, 2, 3), answer(1, 2, 3)) is None


def test_one_bit_of_a_logprob_is_a_difference() -> None:
    found = difference(answer(1, 2, 3), answer(1, 2, change=2**-20, at=1))
    assert found is not None
    assert (found.at, found.token) == (1, False)
    assert found.logprob == pytest.approx(2**-20)


def test_another_token_is_a_difference() -> None:
    found = difference(answer(1, 5), answer(1, 9))
    assert found is not None
    assert (found.at, found.token, found.logprob) == (1, True, None)


def test_an_unfinished_answer_is_an_error_and_not_equal() -> None:
    with pytest.raises(ValueError, match="2 tokens of 3"):
        difference(answer(1, 2, 3), answer(1, 2))


def test_judgement() -> None:
    same, other = answer(1, 2), answer(1, 9)
    load = Case(600, 512, "load")
    assert judge(load, same, same).ok
    assert not judge(load, same, other).ok
    assert not judge(load, same, answer(1, 2, cached=256)).ok  # it resumed somewhere else
    assert judge(Case(600, 512, "local"), same, answer(1, 2, cached=0)).ok
    # What a minimal load left unfilled is nothing to resume from.
    assert judge(Case(600, 0, "again"), same, answer(1, 2, cached=0)).ok
    assert not judge(Case(600, 0, "again"), same, same).ok
    fault = Case(600, 512, "load", Fault("swa", "omit"), "different")
    assert judge(fault, same, other).ok
    assert not judge(fault, same, same).ok  # a fault that nobody noticed
    unread = Case(600, 512, "load", Fault("c128_state", "zero"), "unread")
    assert judge(unread, same, same).ok
    assert not judge(unread, same, other).ok


# -- what is a proof ------------------------------------------------------------------------------


def report(layout: Layout, *, fresh: bool = True, wrong: bool = False) -> Report:
    same, other = answer(1, 2), answer(1, 9)
    findings = [
        judge(Case(600, 512, "load"), same, same),
        judge(Case(600, 512, "minimal"), same, other if wrong else same),
        judge(Case(600, 512, "load", Fault("swa", "omit"), "different"), same, other),
    ]
    return Report("v4", RUNTIME, "2", layout.state_digest(), 1, "2026-01-01", fresh, 132, findings)


def test_a_proof_is_for_one_engine_version_device_and_state(tmp_path: Path) -> None:
    proof = report(v4(tmp_path)).proof()
    assert proof is not None
    assert (proof.same, proof.minimal, proof.noticed) == (2, 1, 1)
    file = tmp_path / "proofs.json"
    add_proof(file, proof)
    add_proof(file, msgspec.structs.replace(proof, seed=2))
    (kept,) = load_proofs(file)
    assert kept.seed == 2
    flash = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8")
    assert minimal_shown(flash, RUNTIME, [kept])
    for other in (
        Runtime("vllm", "0.33.0", RUNTIME.device),
        Runtime("vllm", RUNTIME.version, "cuda sm100"),
        Runtime("sglang", RUNTIME.version, RUNTIME.device),
    ):
        assert not minimal_shown(flash, other, [kept])
    bf16 = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="bf16")
    draft = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8", draft=True)
    plain = load_layout("deepseek-v3", engine="vllm")
    assert not any(minimal_shown(x, RUNTIME, [kept]) for x in (bf16, draft, plain))


def test_only_where_it_was_shown_less_is_loaded(tmp_path: Path) -> None:
    proof = report(v4(tmp_path)).proof()
    assert proof is not None
    flash = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8")
    chain = 1024 * 3915
    shown, why = settled(flash, RUNTIME, [proof])
    assert shown.load_bytes(1024) == chain + 4_090_752
    assert shown.resume_bytes(1024) == chain + 15_467_904  # what other engines may need
    assert shown.minimal_on == proof.runtime
    assert "shown on vllm 0.32.0, cpu AVX512" in why
    assert shown.digest() == flash.digest()  # the same bytes: they may share
    newer = Runtime("vllm", "0.33.0", RUNTIME.device)
    for runtime, reason in (
        (newer, "run kvatlas validate exactness there"),
        (Runtime("vllm", "0.32.0", ""), "is not said"),
    ):
        full, why = settled(shown, runtime, [proof])
        assert (full, full.load_bytes(1024)) == (flash, chain + 15_467_904)
        assert reason in why
    for draft in (drafted(shown), load_layout("deepseek-v4-flash", engine="vllm", draft=True)):
        found, why = settled(draft, RUNTIME, [proof])
        assert not found.minimal_on
        assert found.load_bytes(1024) == found.resume_bytes(1024)
        assert "none does with a draft" in why


def test_no_proof_without_a_fresh_process_or_with_a_wrong_answer(tmp_path: Path) -> None:
    layout = v4(tmp_path)
    assert report(layout, fresh=False).proof() is None
    assert report(layout, wrong=True).proof() is None
    assert not report(layout, wrong=True).ok()


def test_a_file_of_proofs_that_was_edited_is_refused(tmp_path: Path) -> None:
    proof = report(v4(tmp_path)).proof()
    assert proof is not None
    file = tmp_path / "proofs.json"
    moved = msgspec.structs.replace(proof, about=Runtime("vllm", "9.0", "cuda sm100"))
    file.write_bytes(msgspec.json.encode([moved]))
    with pytest.raises(ConfigError, match="run validate exactness there"):
        load_proofs(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match="not a file of proofs"):
        load_proofs(file)
    assert load_proofs(tmp_path / "none") == ()


RESULTS = sorted((Path(__file__).parents[1] / "fixtures" / "validated").glob("exactness-*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_the_committed_results_are_whole_runs_that_went_as_expected(path: Path) -> None:
    found = msgspec.json.decode(path.read_bytes(), type=Report)
    assert found.ok()
    assert found.decode_tokens >= 130
    assert {f.case.fault.how for f in found.findings if f.case.fault} >= {"zero", "flip", "swap"}
    for f in found.findings:
        # judged again by today's rules, as far as a finding alone allows it
        assert f.ok == ((f.difference is not None) == (f.case.expected == "different"))
        assert f.difference is not None or f.decoded == found.decode_tokens


def test_what_we_ship_as_shown_is_what_the_committed_run_showed() -> None:
    shown = [msgspec.json.decode(p.read_bytes(), type=Report).proof() for p in RESULTS]
    assert load_proofs() == tuple(p for p in shown if p is not None)


# -- the command ----------------------------------------------------------------------------------


def test_mla_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    for model in ("mla", str(tmp_path)):
        assert main(["validate", "exactness", "--model", model]) == 2
        assert "wrong numbers from any cached prefix" in capsys.readouterr().err


def test_what_is_no_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["validate", "exactness", "--model", str(tmp_path)]) == 2
    assert "gqa, swa, v4" in capsys.readouterr().err
    assert main(["validate", "exactness", "--out", str(tmp_path / "out")]) == 2
    assert "say --model, one of gqa, swa, v4" in capsys.readouterr().err
    assert main(["validate", "exactness", "--venv", str(tmp_path)]) == 2
    assert "has no vllm" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)  # no tests here
    assert main(["validate", "exactness", "--model", "v4", "--venv", str(tmp_path)]) == 2
    assert "shim" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["", "1", "a,b", "300,70000", "-5"])
def test_positions_are_checked(wrong: str) -> None:
    with pytest.raises(Exception, match=r"numbers|between"):
        _lengths(wrong)
