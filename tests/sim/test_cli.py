"""``kvatlas sim`` as its user meets it."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from sim_kit import BLOCK, chats, cluster_of

from kvatlas.cli.main import main
from kvatlas.cli.sim import show
from kvatlas.demo.vocabulary import write_tokenizer
from kvatlas.sim.report import LinkUse
from kvatlas.sim.world import simulate


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": round(r.arrival_s * 1000),
            "input_length": r.input_tokens,
            "output_length": r.output_tokens,
            "hash_ids": r.hash_ids,
        }
        for r in chats(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_report_for_people_and_one_for_machines(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, lines = tmp_path / "out.json", tmp_path / "requests.jsonl"
    argv = ["sim", "--trace", str(trace), "--engines", "2", "--json", str(out)]
    assert main([*argv, "--export", str(lines), "--slo-ttft-s", "5"]) == 0
    told = capsys.readouterr()
    assert "60 of 60" in told.out
    assert "engine-1" in told.out
    assert "60/60" in told.err
    report = json.loads(out.read_text())
    tokens = report["tokens"]
    assert sum(tokens["hits"].values()) + tokens["recomputed"] == tokens["prompt"]
    assert report["latency"]["ttft_s"]["count"] == 60
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert sorted(int(row["id"]) for row in rows) == list(range(60))
    assert sum(row["cached_tokens"] for row in rows) == sum(tokens["hits"].values())


def test_a_line_per_figure(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, table = tmp_path / "out.json", tmp_path / "out.csv"
    argv = ["sim", "--trace", str(trace), "--engines", "2", "--tiers", "dram=1GB", "--quiet"]
    assert main([*argv, "--json", str(told), "--csv", str(table)]) == 0
    capsys.readouterr()
    report = json.loads(told.read_text())
    lines = list(csv.DictReader(io.StringIO(table.read_text())))
    found = {(row["table"], row["of"], row["figure"]): row["value"] for row in lines}
    assert len(found) == len(lines)
    assert found["run", "", "policy"] == "price"
    assert found["latency", "ttft_s", "p95"] == str(report["latency"]["ttft_s"]["p95"])
    assert found["latency", "slo", "ttft_s"] == "", "none was given"
    assert found["tokens", "hits", "hbm"] == str(report["tokens"]["hits"]["hbm"])
    assert found["engines", "engine-1", "requests"] == str(report["engines"][1]["requests"])
    node, use = next(iter(report["agents"].items()))
    for what, size_bytes in use["moved_bytes"].items():
        assert found["agents", f"{node} moved_bytes", what] == str(size_bytes)
    assert {row["table"] for row in lines} > {"seconds", "links", "pairs"}


def test_people_see_what_the_busiest_links_carried() -> None:
    report = simulate(cluster_of(count=1), chats(3))
    links = {f"node-{i} out": LinkUse(i * 1e9, i, 50e9) for i in range(10)}
    told = io.StringIO()
    show(msgspec.structs.replace(report, links=links), Console(file=told, width=100))
    assert "over node-9 out" in told.getvalue()
    assert "9.0 GB" in told.getvalue()
    assert "over node-0" not in told.getvalue(), "nothing went over it"
    assert "further links" in told.getvalue()


def test_json_alone_on_stdout(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sim", "--trace", str(trace), "--limit", "5", "--json", "-", "--quiet"]
    assert main([*argv, "--policy", "round_robin"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["policy"] == "round_robin"
    assert told.err == ""


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        (["--limit", "0"], "--limit 0"),
        (["--max-output", "-1"], "--max-output -1"),
        (["--time-scale", "nan"], "--time-scale nan"),
        (["--time-scale", "-1"], "--time-scale -1"),
        (["--time-scale", "1e300"], "a --time-scale below"),
        (["--slo-ttft-s", "-1"], "--slo-ttft-s -1"),
        (["--engines", "0"], "--engines 0"),
        (["--cluster", "no.toml"], "cannot be read"),
        (["--export", "-"], "--export -: give a file"),
        (["--cluster", "no.toml", "--engines", "2"], "--engines"),
        (["--json", "/nowhere/x.json"], "cannot be written"),
        (["--export", "/nowhere/x.jsonl"], "cannot be written"),
        (["--block-tokens", "100"], "block size"),
        (["--closed-loop"], "--closed-loop"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    trace: Path, extra: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "--trace", str(trace), "--quiet", *extra]) == 2
    told = capsys.readouterr().err
    assert what in told
    assert told.count("\n") == 1


def test_a_trace_is_read_with_the_options_that_its_format_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": "hello there, how are you today? " * 9}
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"ts": 9 * n, "body": body}) + "\n" for n in range(2)))
    write_tokenizer(tmp_path, [body["prompt"]])
    plain = ["--trace", str(log), "--quiet", "--block-tokens", "8"]
    assert main(["sim", *plain]) == 2
    assert "(--tokenizer)" in capsys.readouterr().err
    assert main(["sim", *plain, "--tokenizer", str(tmp_path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["latency"]["requests"] == 2
    sessions = tmp_path / "sessions.jsonl"
    turn = [0, 0, 640, 3, 1, 0, [[1, 10]]]
    line = {"id": "", "bs": 64, "tool": 0, "sys": 0, "r": [turn]}
    sessions.write_text("".join(json.dumps(line | {"id": str(n)}) + "\n" for n in range(9)))
    spans = []
    for gap_s in ("10", "300"):
        argv = ["sim", "--trace", str(sessions), "--quiet", "--session-gap-s", gap_s]
        assert main([*argv, "--engines", "1", "--json", "-"]) == 0
        spans.append(json.loads(capsys.readouterr().out)["latency"]["duration_s"])
    assert spans[1] > 20 * spans[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--trace", "trace.jsonl"], "--trace"),
        (["--seed", "5"], "--seed"),
        (["--closed-loop"], "--closed-loop"),
        (["--json", "result.json"], "--json"),
        (["--session-gap-s", "5"], "--session-gap-s"),
    ],
)
def test_an_option_before_faults_is_not_ignored(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["sim", *options, "faults", "--seeds", "1"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert f"{named} is no option of faults" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--csv", "--export", "--html"])
def test_a_result_never_goes_over_what_is_read(
    trace: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trace.read_bytes()
    other = tmp_path / "link"
    other.symlink_to(trace)
    assert main(["sim", "--trace", str(trace), option, str(other)]) == 2
    told = capsys.readouterr()
    assert told.err.endswith("the command reads or writes that file already\n")
    assert trace.read_bytes() == before
    both = ["--json", str(tmp_path / "new"), "--export", str(tmp_path / "new")]
    assert main(["sim", "--trace", str(trace), *both]) == 2


def test_a_damaged_trace_is_found_before_anything_runs(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(trace.read_text() + '{"timestamp": 1, "input_length": -5}\n')
    assert main(["sim", "--trace", str(trace), "--quiet"]) == 2
    assert f"{trace}:61: " in capsys.readouterr().err


def test_requests_that_fit_nowhere_are_counted_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, cluster = tmp_path / "t.jsonl", tmp_path / "c.toml"
    huge = {
        "timestamp": 0,
        "input_length": 40 * BLOCK,
        "output_length": 1,
        "hash_ids": list(range(40)),
    }
    small = {"timestamp": 5, "input_length": BLOCK, "output_length": 1, "hash_ids": [0]}
    trace.write_text(json.dumps(huge) + "\n" + json.dumps(small) + "\n")
    cluster.write_text(
        '[[engine]]\nmodel = "512"\nblocks = 20\n'
        "prefill_tokens_per_s = 8000\ndecode_step_s = 0.02\n"
    )
    argv = ["sim", "--trace", str(trace), "--cluster", str(cluster), "--quiet"]
    assert main(argv) == 1
    told = capsys.readouterr().out
    assert "1 of 2" in told
    assert "need more than all 20 blocks of the pool" in told


def test_halves_of_pairs_have_tiers_too(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.toml"
    half = '[[engine]]\nname = "{0}"\nrole = "{0}"\ndevices = 4\n'
    cluster.write_text(half.format("prefill") + half.format("decode"))
    argv = ["sim", "--trace", str(trace), "--cluster", str(cluster), "--quiet"]
    assert main([*argv, "--tiers", "dram=1GB"]) == 0
    assert "moved, save dram" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("argv", [["devices"], ["devices", "--json"]])
def test_a_full_disk_under_the_output_is_one_line(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kvatlas.cli.main", *argv]
        done = subprocess.run(
            command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["kvatlas: [Errno 28] No space left on device"]
