"""Calibration: made-up measurements give back what made them, and nothing judged is fitted."""

from __future__ import annotations

import csv
import json
import lzma
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.cli.main import main
from kvatlas.errors import KvatlasError, TraceError
from kvatlas.validate import calibrate
from kvatlas.validate.calibrate import TABLE_PRIORS, calibrate_tables, predict, profile, split
from kvatlas.validate.calibrate_runs import Run, read_run, replay
from kvatlas.validate.calibrate_tables import Row, Table, read_table
from kvatlas.validate.fit import Prior, fit, solve
from kvatlas.workload.device import DEVICES
from kvatlas.workload.profiles import read_profiles

# The solver ------------------------------------------------------------------------------------


def test_it_finds_what_made_the_data_and_leaves_the_rest_at_its_prior() -> None:
    priors = {name: Prior(1.0, 3.0, 1e-3, 1e3) for name in ("a", "b", "unused")}
    found = fit(
        lambda p: [1e3 * (p["a"] * x + p["b"] * x * x - 7 * x - 0.02 * x * x) for x in range(1, 9)],
        priors,
        rounds=60,
    ).parameters
    assert found["a"] == pytest.approx(7, rel=1e-3)
    assert found["b"] == pytest.approx(0.02, rel=1e-2)
    assert found["unused"] == pytest.approx(1.0)


def test_it_stays_inside_the_bounds_and_gives_the_same_twice() -> None:
    def run() -> dict[str, float]:
        return fit(lambda p: [p["a"] - 50.0], {"a": Prior(1.0, 9.0, 0.5, 2.0)}).parameters

    assert run() == run()
    assert run()["a"] == pytest.approx(2.0)


@given(
    st.lists(st.lists(st.floats(-9, 9), min_size=3, max_size=3), min_size=3, max_size=3),
    st.lists(st.floats(-9, 9), min_size=3, max_size=3),
)
def test_linear_equations(matrix: list[list[float]], x: list[float]) -> None:
    for i in range(3):
        matrix[i][i] += 40.0  # dominant, so regular
    right = [sum(a * b for a, b in zip(row, x, strict=True)) for row in matrix]
    assert solve(matrix, right) == pytest.approx(x, abs=1e-9)


@pytest.mark.parametrize("bad", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 2, 3), (5, 1, 2, 3)])
def test_an_impossible_prior_is_refused(bad: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="impossible prior"):
        Prior(*bad)


# Runs ------------------------------------------------------------------------------------------

TRUE = {
    "compute_efficiency": 0.7,
    "memory_efficiency": 0.8,
    "attention_efficiency": 0.6,
    "step_s": 0.0015,
    "request_s": 4e-5,
}
META = {
    "engine_kwargs": {
        "model": "meta-llama/Llama-3.1-8B",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "max_model_len": 32768,
    },
    "kv_cache": {"num_gpu_blocks": 2000, "block_size": 16},
}


def lines(count: int) -> list[dict[str, Any]]:
    return [
        {
            "request_id": f"r{i}",
            "input_toks": 200 + 137 * i % 900,
            "output_toks": 20 + 13 * i % 50,
            "queued_ts": 1000 + 0.05 * i,
            "first_token_ts": 2000.0,
            "last_token_ts": 3000.0,
        }
        for i in range(count)
    ]


def write_run(folder: Path, requests: list[dict[str, Any]], meta: Any = META) -> Path:
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "requests.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))
    return folder


def made_up(folder: Path, count: int, *, slower: float = 1.0) -> Path:
    """A run as the engine model itself would record it with `TRUE`."""
    requests = lines(count)
    run = read_run(write_run(folder / "draft" / folder.name, requests), None)
    found = replay(run, profile(DEVICES[run.device], TRUE, unhidden=calibrate.UNHIDDEN))
    for request, (ttft_s, tpot_s) in zip(requests, found, strict=True):
        request["first_token_ts"] = request["queued_ts"] + ttft_s * slower
        rest = tpot_s * slower * (request["output_toks"] - 1)
        request["last_token_ts"] = request["first_token_ts"] + rest
    return write_run(folder / folder.name, requests)


def test_a_run_gives_back_what_it_was_made_with(tmp_path: Path) -> None:
    run = read_run(made_up(tmp_path / "RTX-4090", 24), None)
    report = calibrate.calibrate_runs([run], fit_requests=14, seed=1)
    rest, fitted = report.judged
    assert (rest.part, rest.requests, fitted.requests) == ("rest", 10, 14)
    for errors in (rest, fitted):
        assert abs(errors.ttft_mean.value) < 0.05
        assert abs(errors.tpot_mean.value) < 0.02
        assert errors.ttft_mean.low <= errors.ttft_mean.value <= errors.ttft_mean.high
    assert report == calibrate.calibrate_runs([run], fit_requests=14, seed=1)


def test_only_the_first_requests_of_the_first_run_are_fitted(tmp_path: Path) -> None:
    """The rest is made 30 % slower: the parameters do not move, and the error says it."""
    run = read_run(made_up(tmp_path / "RTX-4090", 24), None)
    slow = tuple(
        msgspec.structs.replace(r, ttft_s=r.ttft_s * 1.3, tpot_s=r.tpot_s * 1.3)
        for r in run.requests[14:]
    )
    late = msgspec.structs.replace(run, requests=run.requests[:14] + slow)
    one, two = (calibrate.fit_run(r, 14)[0] for r in (run, late))
    assert one == two
    rest = calibrate.judge_run(late, two, 14, "", 1)[0]
    assert rest.tpot_mean.value == pytest.approx(1 / 1.3 - 1, abs=0.02)


def test_another_device_is_scaled_by_its_sheet_and_by_its_matrix_product() -> None:
    moved = calibrate.by_matmul(TRUE, "RTX-4090", "RTX-PRO-6000")
    assert moved is not None
    reached = moved["compute_efficiency"] * 500 / (0.7 * 165.2)
    assert reached == pytest.approx(417.34 / 164.81)
    assert calibrate.by_matmul(TRUE, "RTX-4090", "H200") is None
    assert {k: v for k, v in moved.items() if k != "compute_efficiency"} == {
        k: v for k, v in TRUE.items() if k != "compute_efficiency"
    }


def test_prompts_are_taken_from_their_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "RTX-4090", lines(2))
    prompts = tmp_path / "p.jsonl.xz"
    with lzma.open(prompts, "wt") as file:
        for told in lines(2):
            ids = list(range(told["input_toks"]))
            keep = {k: told[k] for k in ("input_toks", "output_toks")}
            file.write(json.dumps({**keep, "input_tok_ids": ids}) + "\n")
    run = read_run(folder, prompts)
    assert run.requests[0].tokens[:8] == bytes([0, 0, 0, 0, 1, 0, 0, 0])
    assert run.requests[0].tokens[:800] == run.requests[1].tokens[:800]  # a shared prefix
    apart = read_run(folder, None)
    assert apart.requests[0].tokens[:64] != apart.requests[1].tokens[:64]
    assert (run.device, run.blocks, run.max_running) == ("RTX-4090", 2000, 16)


@pytest.mark.parametrize(
    ("line", "change", "reason"),
    [
        (2, {"queued_ts": 999.0}, ":2: queued_ts is before the line above"),
        (2, {"first_token_ts": 5.0}, ":2: times must go up"),
        (1, {"last_token_ts": 1.0}, ":1: times must go up"),
        (3, {"input_toks": 0}, ":3: at least 1 input"),
        (3, {"output_toks": 1}, ":3: at least 1 input and 2 output"),
        (3, {"request_id": "r0"}, ":3: request_id 'r0' is there twice"),
        (2, {"queued_ts": "soon"}, ":2: Expected `float`"),
        (2, {"last_token_ts": 1e300}, ":2: times lie more than 1e\\+07 s apart"),
        (4, {"queued_ts": 1e300, "first_token_ts": 2e300, "last_token_ts": 3e300}, ":4: times lie"),
        (2, {"input_toks": 1 << 40}, ":2: more than 4194304 tokens"),
        (2, {"queued_ts": None}, ":2: Expected `float`"),
    ],
)
def test_a_bad_request_is_told_with_its_line(
    tmp_path: Path, line: int, change: dict[str, Any], reason: str
) -> None:
    requests = lines(4)
    requests[line - 1] |= change
    folder = write_run(tmp_path / "RTX-4090", requests)
    with pytest.raises(TraceError, match=rf"requests\.jsonl{reason}"):
        read_run(folder, None)


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({}, "meta.json: .*engine_kwargs"),
        ({**META, "engine_kwargs": {**META["engine_kwargs"], "model": "x/y"}}, "'x/y' is not one"),
        ({**META, "engine_kwargs": {**META["engine_kwargs"], "max_num_seqs": 0}}, "max_num_seqs"),
        (
            {**META, "engine_kwargs": {**META["engine_kwargs"], "tensor_parallel_size": 2}},
            "tensor_parallel_size must be 1",
        ),
        ({**META, "kv_cache": {"num_gpu_blocks": 3}}, "cannot run here|need more than all 3"),
    ],
)
def test_a_bad_description_is_told(tmp_path: Path, meta: Any, reason: str) -> None:
    folder = write_run(tmp_path / "RTX-4090", lines(3), meta)
    with pytest.raises(KvatlasError, match=reason):
        replay(read_run(folder, None), DEVICES["RTX-4090"])


def test_a_folder_must_name_a_device_and_hold_a_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "somewhere", lines(3))
    with pytest.raises(KvatlasError, match="no part of the path names a device"):
        read_run(folder, None)
    assert read_run(folder, None, device="rtx4090").device == "RTX-4090"
    with pytest.raises(KvatlasError, match="unknown device 'RTX-1'"):
        read_run(folder, None, device="RTX-1")
    with pytest.raises(TraceError, match=r"meta\.json: cannot be read"):
        read_run(tmp_path / "RTX-4090", None)
    (folder / "requests.jsonl").write_text("")
    with pytest.raises(TraceError, match="no requests"):
        read_run(folder, None, device="RTX-4090")


# Tables ----------------------------------------------------------------------------------------

SILICON = {
    "model_path": "openai/gpt-oss-120b",
    "system": "h200_sxm",
    "backend": "trtllm",
    "precision": "fp4",
    "mode": "agg",
    "isl": "1024",
    "osl": "1024",
    "batch_size": "8",
    "tp_size": "2",
    "attention_dp_size": "1",
    "moe_tp_size": "2",
    "moe_ep_size": "1",
    "silicon_data_source": "x; silicon_concurrency=8; y",
    "silicon_ttft_ms": "100",
    "silicon_tpot_ms": "5",
}
MADE = {
    **{name: prior.value for name, prior in TABLE_PRIORS.items()},
    "memory_efficiency": 0.6,
    "layer_s": 6e-5,
    "crowd": 0.2,
}


def write_table(path: Path, rows: list[dict[str, str]], names: Any = SILICON) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(rows)
    return path


def rows_of(path: Path, *changes: dict[str, str]) -> tuple[Row, ...]:
    return read_table(write_table(path, [{**SILICON, **c} for c in changes])).rows


def made_up_rows(tmp_path: Path) -> list[Row]:
    changes = [
        {
            "model_path": model,
            "isl": str(prompt),
            "osl": str(output),
            "tp_size": gpus,
            "moe_tp_size": gpus,
            "silicon_data_source": f"silicon_concurrency={clients}",
        }
        for model in ("openai/gpt-oss-120b", "meta-llama/Llama-3.1-70B")
        for prompt, output in ((1024, 1024), (8192, 1024), (1024, 8192))
        for gpus in ("2", "4", "8")
        for clients in (4, 16, 64)
    ]
    out = []
    for row in rows_of(tmp_path / "t.csv", *changes):
        ttft_s, tpot_s = predict(row, MADE)
        out.append(msgspec.structs.replace(row, ttft_s=ttft_s, tpot_s=tpot_s))
    return out


def test_a_table_gives_back_what_it_was_made_with(tmp_path: Path) -> None:
    rows = made_up_rows(tmp_path)
    report = calibrate_tables(rows, [], seed=1, share=0.5, left_out={})
    assert report.judged.rows + report.fitted_rows == len(rows)
    assert report.judged.tpot.value < 0.02
    assert report.judged.ttft.value < 0.05
    assert report == calibrate_tables(rows, [], seed=1, share=0.5, left_out={})
    held = calibrate_tables(rows, [], seed=1, share=0.5, left_out={}, hold_out=True)
    assert held.unseen is not None
    assert held.unseen.tpot.value < 0.1  # the two models were made with the same figures


def test_no_setting_is_on_both_sides(tmp_path: Path) -> None:
    rows = made_up_rows(tmp_path)
    seen = set()
    for seed in range(5):
        fitted, judged = split(rows, seed, 0.5)
        assert not {r.setting() for r in fitted} & {r.setting() for r in judged}
        assert len(fitted) + len(judged) == len(rows)
        seen.add(frozenset(r.line for r in fitted))
    assert len(seen) == 5


def test_what_is_judged_does_not_move_the_parameters(tmp_path: Path) -> None:
    rows = made_up_rows(tmp_path)
    _, judged = split(rows, 1, 0.5)
    settings = {r.setting() for r in judged}
    slow = [
        msgspec.structs.replace(r, tpot_s=2 * r.tpot_s) if r.setting() in settings else r
        for r in rows
    ]
    one, two = (calibrate_tables(r, [], seed=1, share=0.5, left_out={}) for r in (rows, slow))
    assert one.parameters == two.parameters
    assert two.judged.tpot.value == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("fields", "arrangement"),
    [
        (("8", "1", "8", "1"), (8, 1)),
        (("8", "1", "1", "8"), (8, 1)),
        (("16", "1", "4", "4"), (4, 1)),  # the source multiplies: rows repeat those of 4 GPUs
        (("64", "1", "8", "8"), (8, 1)),
        (("4", "1", "2", "2"), (2, 1)),
        (("1", "8", "1", "8"), (1, 8)),
        (("1", "64", "8", "8"), (1, 8)),
        (("1", "16", "4", "4"), (1, 4)),
        (("2", "", "4", "1"), (2, 2)),
        (("1", "", "4", "1"), (1, 4)),
        (("2", "0", "0", "0"), (2, 1)),
        (("4", "", "1", "1"), (4, 1)),
    ],
)
def test_how_gpus_share_the_work(
    tmp_path: Path, fields: tuple[str, ...], arrangement: tuple[int, int]
) -> None:
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    (row,) = rows_of(tmp_path / "t.csv", dict(zip(names, fields, strict=True)))
    assert (row.devices, row.ranks) == arrangement


def test_what_the_model_says_nothing_of_is_counted(tmp_path: Path) -> None:
    changes = [
        {},
        {"model_path": "zhipuai/GLM-5"},
        {"mode": "disagg"},
        {"mode": "disagg", "isl": "2"},
        {"tp_size": "24", "moe_tp_size": "24"},
    ]
    table = read_table(write_table(tmp_path / "t.csv", [{**SILICON, **c} for c in changes]))
    assert len(table.rows) == 1
    assert sum(table.left_out.values()) == 4
    assert any("GLM-5" in reason for reason in table.left_out)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"silicon_ttft_ms": "-1"}, ":2: silicon_ttft_ms is -1"),
        ({"silicon_tpot_ms": "0"}, ":2: silicon_tpot_ms is 0"),
        ({"silicon_tpot_ms": "nan"}, ":2: silicon_tpot_ms is nan"),
        ({"silicon_tpot_ms": "inf"}, ":2: silicon_tpot_ms is inf"),
        ({"silicon_tpot_ms": "fast"}, ":2: could not convert"),
        ({"isl": "0"}, ":2: isl is '0'"),
        ({"osl": "-5"}, ":2: osl is '-5'"),
        ({"osl": "9" * 40}, ":2: osl is"),
        ({"system": "h300"}, ":2: system 'h300' is unknown"),
        ({"tp_size": "two"}, ":2: tp_size is 'two'"),
        ({"tp_size": "-2"}, ":2: tp_size is '-2'"),
        ({"precision": "fp3"}, ":2: precision 'fp3' is unknown"),
        ({"batch_size": "", "silicon_data_source": ""}, ":2: batch_size is ''"),
    ],
)
def test_a_bad_row_is_told_with_its_line(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    path = write_table(tmp_path / "t.csv", [{**SILICON, **change}])
    with pytest.raises(TraceError, match=rf"t\.csv{reason}"):
        read_table(path)


def test_a_damaged_table_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(TraceError, match=r"t\.csv:1: no column "):
        read_table(path)
    write_table(path, [SILICON])
    path.write_text(path.read_text() + "openai/gpt-oss-120b,h200_sxm\n")
    with pytest.raises(TraceError, match=r":3: not 15 fields"):
        read_table(path)
    path.write_bytes(path.read_bytes()[:-40] + b"\xff\xfe\n")
    with pytest.raises(TraceError, match="cannot be read"):
        read_table(path)
    packed = tmp_path / "t.csv.xz"
    packed.write_bytes(lzma.compress(b"x" * 5000)[:-20])
    with pytest.raises(TraceError, match="cannot be read"):
        read_table(packed)
    with pytest.raises(TraceError, match="cannot be read"):
        read_table(tmp_path / "absent.csv")
    path.write_text("")
    with pytest.raises(TraceError, match="no column"):
        read_table(path)


def test_memory_that_is_too_small_makes_requests_wait(tmp_path: Path) -> None:
    one = {"model_path": "meta-llama/Llama-3.1-70B", "tp_size": "1", "moe_tp_size": "1"}
    one["precision"] = "fp8"
    few, many = rows_of(
        tmp_path / "t.csv",
        {**one, "isl": "8192", "silicon_data_source": "silicon_concurrency=4"},
        {**one, "isl": "8192", "silicon_data_source": "silicon_concurrency=512"},
    )
    assert predict(few, MADE)[0] < 5
    assert predict(many, MADE)[0] > 100


# The command -----------------------------------------------------------------------------------


def test_the_command_on_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = made_up(tmp_path / "RTX-4090", 12)
    other = made_up(tmp_path / "RTX-PRO-6000", 12)
    out = tmp_path / "mine.toml"
    command = ["validate", "calibrate", str(first), str(other), "--fit-requests", "8"]
    assert main([*command, "--json", "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fitted_on"] == "RTX-4090"
    how = [(j["device"], j["part"], j["how"]) for j in told["judged"]]
    assert how == [
        ("RTX-4090", "rest", "fitted on its first"),
        ("RTX-4090", "fitted", "fitted on its first"),
        ("RTX-PRO-6000", "all", "RTX-4090, by data sheet"),
        ("RTX-PRO-6000", "all", "RTX-4090, by matrix product"),
        ("RTX-PRO-6000", "rest", "fitted on its first"),
        ("RTX-PRO-6000", "fitted", "fitted on its first"),
    ]
    mine = read_profiles(out)["RTX-4090-fitted"]
    assert mine.step_s == pytest.approx(told["parameters"]["RTX-4090"]["step_s"], rel=1e-3)
    assert mine.unhidden == calibrate.UNHIDDEN
    assert main(["validate", "calibrate", str(first), "--fit-requests", "8"]) == 0
    assert "rest 4" in capsys.readouterr().out


def test_the_command_on_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = made_up_rows(tmp_path)
    monkeypatch.setattr(
        "kvatlas.cli.calibrate.read_table", lambda path: Table(tuple(rows), {"left": 3})
    )
    out = tmp_path / "mine.toml"
    assert main(["validate", "calibrate", str(tmp_path / "t.csv"), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "settings not fitted" in shown
    assert "not judged: 3 rows: left" in shown
    name = "gpt-oss-120b-H200-trtllm-fp4"
    assert read_profiles(out)[name].memory_efficiency == pytest.approx(0.6, rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["absent.csv"], "absent.csv: cannot be read"),
        (["RTX-4090", "absent.csv"], "folders of runs or tables, not both"),
        (["RTX-4090", "--fit-requests", "4"], "--fit-requests 4: 2 to 3 are possible"),
        (["RTX-4090", "--fit-requests", "1"], "--fit-requests 1: 2 to 3"),
        (["RTX-4090", "RTX-4090", "--fit-requests", "2"], "give each device once"),
        (["RTX-4090", "--prompts", "absent.jsonl"], "absent.jsonl: cannot be read"),
        (["t.csv", "--fit-share", "1"], "--fit-share 1: above 0 and below 1"),
        (["t.csv", "--fit-share", "nan"], "--fit-share nan"),
        (["t.csv"], "too few settings"),
    ],
)
def test_a_wish_that_cannot_be_met_ends_with_status_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    write_run(tmp_path / "RTX-4090", lines(4))
    write_table(tmp_path / "t.csv", [SILICON])
    monkeypatch.chdir(tmp_path)
    assert main(["validate", "calibrate", *arguments]) == 2
    assert reason in capsys.readouterr().err


# The floors, on real measurements --------------------------------------------------------------

RUNS = "measured/vllm_requests"
PROMPTS = "traces/sharegpt_llama31_8b_300.jsonl.xz"
#: Found by the fit on the first 100 requests of each (the long test finds them again).
FITTED = {
    "RTX-4090": {
        "compute_efficiency": 0.882,
        "memory_efficiency": 0.902,
        "attention_efficiency": 0.917,
        "step_s": 9.08e-4,
        "request_s": 1.86e-5,
    },
    "RTX-PRO-6000": {
        "compute_efficiency": 0.656,
        "memory_efficiency": 0.904,
        "attention_efficiency": 0.871,
        "step_s": 1.015e-3,
        "request_s": 2.05e-5,
    },
}


@pytest.fixture
def recorded(shared_file: Any) -> list[Run]:
    prompts = shared_file(PROMPTS)
    return [
        read_run(shared_file(f"{RUNS}/{name}/Llama-3.1-8B"), prompts)
        for name in ("RTX4090", "RTXPRO6000")
    ]


def test_the_rest_of_a_run_and_the_other_gpu_are_within_the_floors(recorded: list[Run]) -> None:
    """Mean TTFT within 15 %, mean TPOT within 5 %, whichever GPU was fitted."""
    for run, other in (recorded, recorded[::-1]):
        figures = FITTED[run.device]
        rest, _ = calibrate.judge_run(run, figures, 100, "", 1)
        assert rest.requests == 200
        assert abs(rest.ttft_mean.value) < 0.05
        assert abs(rest.tpot_mean.value) < 0.03
        moved = calibrate.by_matmul(figures, run.device, other.device)
        assert moved is not None
        (whole,) = calibrate.judge_run(other, moved, 0, "", 1)
        assert whole.requests == 300
        assert abs(whole.ttft_mean.value) < 0.15
        assert abs(whole.tpot_mean.value) < 0.05


@pytest.mark.long
def test_the_fit_finds_those_figures_again(recorded: list[Run]) -> None:
    for run in recorded:
        found, _ = calibrate.fit_run(run, 100)
        assert found == pytest.approx(FITTED[run.device], rel=0.05)


def test_published_tables_are_matched_better_than_by_aiconfigurator(shared_file: Any) -> None:
    """Median absolute error on settings that were not fitted, beside its 45 and 13 %."""
    table = read_table(shared_file("measured/silicon_ttft_tpot.csv.xz"))
    cookbook = read_table(shared_file("measured/sglang_deepseek_v4_random_8192_1024.csv"))
    report = calibrate_tables(table.rows, cookbook.rows, seed=1, share=0.5, left_out=table.left_out)
    assert (len(table.rows), sum(table.left_out.values())) == (1088, 683)
    assert report.judged.rows > 500
    assert report.judged.ttft.high < 0.45
    assert report.judged.tpot.high < 0.13
    assert report.parameters[""]["unhidden"] == pytest.approx(calibrate.UNHIDDEN, abs=0.03)
    assert len(report.extra) == 3
