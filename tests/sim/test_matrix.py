"""The matrix: the same requests on differently arranged devices, and what is made of that."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvatlas.cli import output
from kvatlas.cli.main import main
from kvatlas.core.ahead_copies import Params as AheadParams
from kvatlas.core.records import Tier
from kvatlas.errors import ConfigError
from kvatlas.report.latency import Slo
from kvatlas.report.money import STORAGE
from kvatlas.sim.arrangements import ARRANGEMENTS, DEFAULT, Name, arranged, unpaired
from kvatlas.sim.cluster import default_cluster, load_cluster, with_tiers
from kvatlas.sim.matrix import Cell, Setup, Workload, cells, family, offered, run
from kvatlas.sim.matrix_money import Prices
from kvatlas.sim.matrix_table import advise, difference, rows
from kvatlas.sim.tier_spec import parse_tiers
from kvatlas.workload.presets import FAMILIES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def setup_of(engines: int = 3, prefill: int = 1) -> Setup:
    tiers = parse_tiers("dram=1TB,object=100TB")
    cluster = with_tiers(default_cluster(engines=engines), tiers, str)
    prices = Prices((7.2,) * engines, STORAGE)
    return Setup(cluster, Slo(0.2, 0.05), prices, prefill)


def workload_of(setup: Setup, *, requests: int = 40, seeds: int = 2, load: float = 1.0) -> Workload:
    shape = msgspec.structs.replace(FAMILIES["agent"], requests=requests)
    return family("agent", shape, setup, load, seeds)


@pytest.fixture(scope="module")
def played() -> list[Cell]:
    setup = setup_of()
    return run(setup, [workload_of(setup)], list(ARRANGEMENTS), processes=1)


def test_every_arrangement_gets_the_same_requests(played: list[Cell]) -> None:
    assert len(played) == len(ARRANGEMENTS) * 2
    for seed in (0, 1):
        of = [cell for cell in played if cell.seed == seed]
        assert len({(cell.prompt_tokens, cell.output_tokens) for cell in of}) == 1
    assert len({cell.prompt_tokens for cell in played}) == 2, "both seeds are the same workload"


def test_tokens_by_source_add_up_to_all_of_them(played: list[Cell]) -> None:
    for cell in played:
        told = sum(cell.hit_tokens.values()) + cell.recomputed + cell.unserved
        assert told == cell.prompt_tokens
    for row in rows(played):
        assert sum(row.token_share.values()) == pytest.approx(1.0)


def test_what_is_arranged_is_what_moves(played: list[Cell]) -> None:
    for cell in played:
        arrangement = ARRANGEMENTS[cell.arrangement]
        assert ("hand over" in cell.moved_bytes) == arrangement.pairs
        assert any("dram" in name for name in cell.moved_bytes) == bool(arrangement.tiers)
        assert any("object" in name for name in cell.moved_bytes) == (arrangement.tiers == "store")
        assert cell.prefill_engines == (1 if arrangement.pairs else 0)
        if arrangement.tiers:
            assert cell.paths["host"].moved_bytes > 0
            assert cell.paths["host"].links == 3
            assert cell.paths["host"].busy_s > 0


def test_what_a_run_costs(played: list[Cell]) -> None:
    for cell in played:
        figures = cell.figures
        served = cell.prompt_tokens - cell.unserved + cell.output_tokens
        hours = (figures["duration_s"] or 0.0) / 3600
        room = sum(
            STORAGE[tier].dollars(size, hours * 3600) for tier, size in cell.held_bytes.items()
        )
        whole = (3 * 7.2 * hours + room) / served * 1e6  # three engines at $7.2 an hour
        assert figures["dollars_per_million"] == pytest.approx(whole)
        assert 0 < (figures["busy_dollars_per_million"] or 0.0) < whole
        assert (figures["good_dollars_per_million"] or 0.0) >= whole * (1 - 1e-9)
        assert (figures["gpu_s_saved_per_hit"] or 0.0) > 0
        tiers = ARRANGEMENTS[cell.arrangement].tiers
        assert ("dram" in cell.held_bytes) == bool(tiers)
        assert ("object" in cell.held_bytes) == (tiers == "store")


def test_equal_runs_give_equal_cells(played: list[Cell]) -> None:
    setup = setup_of()
    again = run(setup, [workload_of(setup)], ["combined", "pd-store"], processes=1)
    assert again == [cell for cell in played if cell.arrangement in ("combined", "pd-store")]


def test_a_split_is_tried_out_where_none_is_given() -> None:
    setup = setup_of(engines=4, prefill=0)
    workload = workload_of(setup, seeds=1)
    told: list[None] = []
    names: list[Name] = ["combined", "pd"]
    found = run(setup, [workload], names, processes=1, on_cell=lambda: told.append(None))
    assert len(told) == cells(setup, [workload], names) == 2 + 3
    assert {c.arrangement: c.prefill_engines in (1, 2, 3) for c in found} == {
        "combined": False,
        "pd": True,
    }


def test_load_is_what_a_seed_really_asks_for() -> None:
    setup = setup_of()
    shape = msgspec.structs.replace(FAMILIES["random"], requests=300)
    single = family("random", shape, setup, 0.5, 1)
    assert single.load == pytest.approx(0.5, rel=0.2), "requests of their own come as fast as asked"
    few = workload_of(setup, load=0.5)
    assert few.load is not None
    assert 0 < few.load < 0.5, "a few sessions take long, however fast they start"
    assert offered(setup, single.make(3), 1, 1.0) is None


def test_halves_and_tiers_are_put_where_they_belong() -> None:
    setup = setup_of(engines=4)
    made = arranged(setup.cluster, "pd-store", 1)
    assert [m.role for m in made.members] == ["prefill", "decode", "decode", "decode"]
    assert made.tiers is not None
    assert made.tiers.object_bytes == 10**14
    assert made.tiers.agent.write_through == (Tier.OBJECT,)
    assert made.tiers.disk_bytes == 0
    disks = with_tiers(setup.cluster, parse_tiers("dram=1TB,disk=10TB,object=1TB"), str)
    dram = arranged(disks, "pd-dram", 1).tiers
    assert dram is not None
    assert (dram.disk_bytes, dram.object_bytes, dram.agent.write_through) == (10**13, 0, ())
    plain = arranged(setup.cluster, "combined-round-robin", 0)
    assert plain.tiers is None
    assert plain.router.policy == "round_robin"
    with pytest.raises(ConfigError, match="splits the engines itself"):
        msgspec.structs.replace(setup, cluster=made)
    with pytest.raises(ConfigError, match="give both sizes"):
        msgspec.structs.replace(setup, cluster=plain)
    with pytest.raises(ConfigError, match="each half"):
        setup_of(engines=2, prefill=2)


def test_a_cluster_of_pairs_says_how_many_prefill() -> None:
    cluster, prefill = unpaired(load_cluster(EXAMPLES / "v4-flash-h20.toml"))
    assert prefill == 6
    assert [m.name for m in cluster.members][5:7] == ["prefill-5", "decode-0"]
    assert {m.role for m in cluster.members} == {"combined"}
    assert unpaired(cluster) == (cluster, 0)
    mixed = list(cluster.members)
    mixed[0] = msgspec.structs.replace(mixed[0], role="prefill")
    with pytest.raises(ConfigError, match="give all of them a role, or none"):
        unpaired(msgspec.structs.replace(cluster, members=tuple(mixed)))


def test_ways_to_the_store_are_there_where_the_store_is() -> None:
    """What reads the store for others, and copies ahead of need, have no place elsewhere."""
    given = load_cluster(EXAMPLES / "dualpath.toml")
    ahead = AheadParams(replicate=True)
    cluster, prefill = unpaired(msgspec.structs.replace(given, ahead=ahead))
    found = {name: arranged(cluster, name, prefill) for name in ARRANGEMENTS}
    paths = {name: made.tiers.load_path for name, made in found.items() if made.tiers}
    cards = {name for name, made in found.items() if made.tiers and made.tiers.storage_link}
    assert {name for name, path in paths.items() if path == "dual"} == {"pd-store"}
    assert cards == {"pd-store", "combined-store"}
    assert {name for name, made in found.items() if made.ahead.on} == set(paths)


def cell_of(name: Name, seed: int, attained: float, ttft_s: float) -> Cell:
    figures: dict[str, float | None] = {"attained": attained, "ttft_p95_s": ttft_s}
    figures["dollars_per_million"] = 0.25
    return Cell("w", name, seed, 0, figures, {"hbm": 1}, 1, 0, 2, 1, {}, {}, {}, {}, (), {}, ())


def test_the_least_that_cannot_be_told_from_the_best_is_advised() -> None:
    seeds = range(6)
    found = [cell_of("combined-round-robin", s, 0.5 + s * 0.01, 2.0) for s in seeds]
    found += [cell_of("combined", s, 0.9 + s * 0.001, 1.0) for s in seeds]
    found += [cell_of("pd", s, 0.9 + s * 0.001 + (0.003 if s % 2 else -0.003), 1.0) for s in seeds]
    advice = advise(found, "w", ["combined-round-robin", "combined", "pd"])
    assert advice.take == "combined"
    assert "no sure gain here: P/D" in advice.sentence
    assert "$0.2500 per million tokens (6 seeds)" in advice.sentence
    gain = difference(found, "w", "combined", "combined-round-robin", "attained", more=True)
    assert gain is not None
    assert gain.better
    same = difference(found, "w", "pd", "combined", "attained", more=True)
    assert same is not None
    assert same.better is None


def test_equally_often_met_but_slower_is_not_advised() -> None:
    found = [cell_of("combined-round-robin", s, 1.0, 2.0 + s * 0.01) for s in range(6)]
    found += [cell_of("combined", s, 1.0, 1.0 + s * 0.01) for s in range(6)]
    assert advise(found, "w", ["combined-round-robin", "combined"]).take == "combined"


def test_one_run_says_that_it_is_one() -> None:
    found = [cell_of("combined-round-robin", 0, 0.9, 1.0), cell_of("combined", 0, 0.901, 1.01)]
    advice = advise(found, "w", ["combined-round-robin", "combined"])
    assert advice.take == "combined-round-robin", "a thousandth of one run is no difference"
    assert "one run" in advice.sentence


def test_the_command_writes_page_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps(
                {"timestamp": i * 100, "input_length": 1024, "output_length": 4, "hash_ids": [0, i]}
            )
            + "\n"
            for i in range(1, 30)
        )
    )
    page, table, told = (tmp_path / f"m.{end}" for end in ("html", "csv", "json"))
    argv = ["matrix", "--trace", str(trace), "--families", "none", "--engines", "2", "--quiet"]
    argv += ["--processes", "1", "--html", str(page), "--csv", str(table), "--json", str(told)]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "take " in shown
    assert "assumed: --slo-ttft-s: 2 s (default)" in shown
    result = json.loads(told.read_text())
    assert [row["arrangement"] for row in result["rows"]] == list(DEFAULT)
    assert {cell["prompt_tokens"] for cell in result["cells"]} == {29 * 1024}
    lines = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [line["arrangement"] for line in lines] == list(DEFAULT)
    shown = page.read_text()
    assert "What to take" in shown
    assert "One run of each: no interval." in shown
    assert "Cost by reuse" not in shown, "there is one workload"
    assert shown.count("2 nodes") == len(DEFAULT), "each arrangement is drawn"
    assert str(tmp_path) not in shown


def test_one_file_serves_sim_plan_and_matrix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, told, page = tmp_path / "cluster.toml", tmp_path / "m.json", tmp_path / "m.html"
    text = (EXAMPLES / "v4-flash-h200.toml").read_text()
    cluster.write_text(text.replace("count = 4", "count = 1"))
    argv = ["matrix", "--cluster", str(cluster), "--families", "agent,random", "--quiet"]
    argv += ["--requests", "8", "--seeds", "2", "--processes", "1", "--json", str(told)]
    assert main([*argv, "--html", str(page)]) == 0
    assert main(["plan", "--cluster", str(cluster)]) == 0
    capsys.readouterr()
    result = json.loads(told.read_text())
    names = {each["name"] for each in result["assumed"]}
    assert "--disk-gb-month" in names, "the file has disks"
    assert names.isdisjoint({"--dram", "--store", "--cluster"})
    assert {cell["prefill_engines"] for cell in result["cells"]} == {0, 1}
    shown = page.read_text()
    assert "of 15,000 GB" in shown
    assert "Means over 2 seeds: a percentile is the mean of what it is in each run" in shown
    assert "Cost by reuse" in shown
    by_reuse = shown[shown.index("Cost by reuse") : shown.index("<h2>agent")]
    assert by_reuse.count("<circle") == 2 * len(DEFAULT), "two workloads"
    assert by_reuse.count("<title>Combined, round robin: 100 %") == 2
    assert "P/D, host DRAM, seed 0" in shown
    assert main([*argv, "--dram", "1GB", "--arrangements", "pd-dram", "--html", str(page)]) == 0
    assert " of 1 GB" in page.read_text()
    capsys.readouterr()
    assert main([*argv, "--prefill", "1"]) == 2
    assert "--prefill: which engines prefill is in" in capsys.readouterr().err
    cluster.write_text(cluster.read_text() + "[[engine]]\ndevices = 8\n")
    assert main(argv) == 2
    assert "give all of them a role, or none" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, told = tmp_path / "m.html", tmp_path / "m.json"

    def full(option: str, path: Path, data: bytes) -> None:
        if path == told:
            raise ConfigError(f"{option} {path}: no space left")
        path.write_bytes(data)

    monkeypatch.setattr(output, "write_file", full)
    argv = ["matrix", "--families", "agent", "--engines", "2", "--prefill", "1", "--quiet"]
    argv += ["--requests", "4", "--seeds", "1", "--processes", "1"]
    assert main([*argv, "--json", str(told), "--html", str(page)]) == 2
    said = capsys.readouterr()
    assert "take " in said.out
    assert "no space left" in said.err
    assert "What to take" in page.read_text()


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _works(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()  # ended, and nobody asked how
    except OSError:
        return False


def _until(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc here")
def test_a_killed_command_leaves_no_process() -> None:
    argv = [sys.executable, "-m", "kvatlas", "matrix", "--families", "agent", "--engines", "2"]
    argv += ["--requests", "10000", "--processes", "2", "--quiet"]
    started = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until(lambda: len(_children(started.pid)) >= 3)  # two that work, and one that tidies up
        left = _children(started.pid)
    finally:
        started.kill()
        started.wait()
    _until(lambda: not any(map(_works, left)))


def test_a_price_that_no_list_has_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, told = tmp_path / "cluster.toml", tmp_path / "m.json"
    cluster.write_text('[[engine]]\ncount = 2\ndevice = "B300"\ndevices = 2\n')
    argv = ["matrix", "--cluster", str(cluster), "--families", "agent", "--requests", "4"]
    argv += ["--seeds", "1", "--arrangements", "combined", "--processes", "1", "--quiet"]
    assert main(argv) == 2
    assert "'B300' has no list price: give --gpu-hour" in capsys.readouterr().err
    assert main([*argv, "--gpu-hour", "6", "--json", str(told)]) == 0
    assert "assumed: --gpu-hour" not in capsys.readouterr().out
    assert {"--dram-gb-month", "--store-gb-month"} <= {
        each["name"] for each in json.loads(told.read_text())["assumed"]
    }


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--families", "none"], "nothing to play"),
        (["--families", "nobody"], "use random"),
        (["--arrangements", "pd,best"], "unknown: best"),
        (["--slo-ttft-s", "0"], "seconds above 0"),
        (["--load", "nan"], "a number above 0"),
        (["--seeds", "0"], "1 to 100"),
        (["--dram", "much"], "--dram"),
        (["--disk", "0"], "--disk"),
        (["--engines", "1"], "two engines"),
        (["--prefill", "8"], "each half"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--gpu-hour", "0"], "--gpu-hour: 0 dollars"),
        (["--store-gb-month", "nan"], "--store-gb-month: nan"),
    ],
)
def test_bad_input_is_named(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["matrix", "--requests", "10", "--seeds", "1", "--processes", "1", "--quiet"]
    assert main([*argv, *more]) == 2
    assert said in capsys.readouterr().err
