"""`kvatlas plan`: seconds, dollars and break-evens of a cluster, against the time model by hand."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import msgspec
import pytest

from kvatlas.cli.main import main
from kvatlas.cli.output import csv_bytes
from kvatlas.cli.plan import figures
from kvatlas.errors import ConfigError
from kvatlas.report.money import STORAGE, Price, StoragePrice
from kvatlas.sim.cluster import Cluster, ClusterFile, EngineTable, TiersTable, build
from kvatlas.sim.plan import HAND_OFF, Plan, Terms, plan
from kvatlas.sim.plan_engines import Engine, device_price, kinds
from kvatlas.sim.plan_page import tables
from kvatlas.workload.device import device
from kvatlas.workload.step_time import StepTime

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
H200 = ["--model", "deepseek-v4-flash", "--device", "H200", "--devices", "4"]


def cluster_of(*tables: EngineTable, tiers: TiersTable | None = None) -> Cluster:
    one = EngineTable(devices=2, kv_dtype="fp8", expert_precision="fp4")
    return build(ClusterFile(engine=tables or (one,), tiers=tiers), lambda place: place)


def terms_of(**given: object) -> Terms:
    values: dict[str, object] = {
        "contexts": (2048, 8192),
        "batches": (1, 16),
        "prompt_tokens": 8192,
        "output_tokens": 1024,
        "tpot_s": None,
        "ttl_s": 3600.0,
        "storage": STORAGE,
    }
    return msgspec.convert(values | given, Terms)


def planned(cluster: Cluster | None = None, **given: object) -> Plan:
    cluster = cluster or cluster_of()
    engines = [Engine(kind, Price(3.6, "test")) for kind in kinds(cluster)]
    return plan(cluster, engines, terms_of(**given))


def test_dollars_are_seconds_of_all_devices() -> None:
    (member,) = cluster_of().members
    time = StepTime(member.spec, member.layout)
    found = planned()
    short, long = found.prefill
    assert long.engine_s == pytest.approx(time.seconds([(0, 8192)]))
    assert short.engine_s == pytest.approx(time.seconds([(0, 2048)] * 4) / 4)  # four fill a step
    # $3.6 an hour are $0.001 a second, for each of two devices
    assert long.dollars_per_million == pytest.approx(long.engine_s * 0.002 / 8192 * 1e6)
    sixteen = next(r for r in found.decode if (r.context, r.batch) == (8192, 16))
    assert sixteen.step_s == pytest.approx(time.alike(8192, 16))
    assert sixteen.dollars_per_million == pytest.approx(sixteen.step_s * 0.002 / 16 * 1e6)


def test_a_hit_saves_what_its_prefix_costs() -> None:
    (member,) = cluster_of().members
    found = planned()
    hit = found.hits[-1]
    assert (hit.context, hit.position) == (8192, 8192)
    assert hit.load_bytes == member.layout.load_bytes(8192)
    assert hit.gpu_s == pytest.approx(found.prefill[-1].engine_s * 2)
    assert hit.dollars == pytest.approx(hit.gpu_s * 0.001)
    assert hit.sooner_s > 0


def test_a_match_is_resumed_on_the_grid_and_a_short_one_nowhere() -> None:
    found = planned(contexts=(100, 1000))
    assert [hit.position for hit in found.hits] == [0, 768]
    assert found.hits[0].dollars == 0
    assert found.hits[0].load_bytes == 0


def test_the_mix_is_dearer_with_fewer_hits_and_the_cluster_than_its_busy_half() -> None:
    mix = planned().mix
    costs = [row.blended_dollars for row in mix]
    assert costs == sorted(costs, reverse=True)
    assert {row.bound for row in mix} == {"combined"}
    for row in mix:  # engines that do all of it are never idle
        assert row.cluster_dollars == pytest.approx(row.blended_dollars)
        assert row.balanced is None


def test_of_two_halves_the_slower_sets_the_pace() -> None:
    halves = [
        EngineTable(name=role, role=role, count=count, devices=2, kv_dtype="fp8",
                    expert_precision="fp4")
        for role, count in (("prefill", 1), ("decode", 3))
    ]  # fmt: skip
    found = planned(cluster_of(*halves))
    first = found.mix[0]
    assert first.bound == "prefill"
    assert first.cluster_dollars > first.blended_dollars
    assert first.balanced is not None
    assert 0 < first.balanced < 1
    assert first.requests_per_s == pytest.approx(1 / found.prefill[-1].engine_s)
    assert {row.engine for row in found.prefill} == {"prefill"}
    assert {row.engine for row in found.decode} == {"decode"}
    assert HAND_OFF in {row.way for row in found.loads}
    assert HAND_OFF not in {row.tier for row in found.held}


def test_the_longest_step_bounds_the_batch() -> None:
    quick, any_ = planned(tpot_s=0.012).mix[0], planned().mix[0]
    assert quick.step_s <= 0.012
    assert quick.batch < any_.batch
    with pytest.raises(ConfigError, match="no step is quick enough"):
        planned(tpot_s=1e-4)


def test_a_way_pays_from_where_its_load_is_quicker_and_the_break_even_is_between() -> None:
    found = planned(contexts=(2048, 8192))
    for way in found.ways:
        loads = [row for row in found.loads if row.way == way.name]
        assert way.pays_from_tokens is not None
        for row in loads:
            assert (row.position >= way.pays_from_tokens) == (row.load_s < row.computed_s)
            assert row.slowest_bytes_per_s is not None
            assert row.slowest_bytes_per_s < way.bytes_per_s


def test_a_slow_disk_never_pays_and_the_advice_says_so() -> None:
    slow = TiersTable(dram="1TB", disk="8TB", disk_read_bytes_per_s=1e6)
    found = planned(cluster_of(EngineTable(devices=2, kv_dtype="fp8", expert_precision="fp4"),
                               tiers=slow))  # fmt: skip
    assert {way.name: way.pays_from_tokens for way in found.ways}["disk"] is None
    assert [row.reuses for row in found.held if row.tier == "disk"] == [None, None, None]
    assert "do not load over disk" in found.advice
    assert [row.name for row in found.ways] == ["dram", "disk"]  # what [tiers] has, no more
    assert "on in dram, for which one reuse pays within 1 h" in found.advice


def test_where_no_load_is_quicker_than_computing_no_tier_is_advised() -> None:
    tiny = EngineTable(model="smollm2-135m-instruct", devices=8, precision="bf16",
                       context_tokens=8000)  # fmt: skip
    found = planned(cluster_of(tiny), contexts=(512, 4096), prompt_tokens=2000, output_tokens=200)
    assert {way.pays_from_tokens for way in found.ways} == {None}
    assert "no tier below the engines pays for itself; do not load over dram" in found.advice


def test_engines_that_do_all_of_a_request_stand_beside_pairs() -> None:
    """The cluster's rate is that of both; the halves' pace is told."""
    each = {"devices": 2, "kv_dtype": "fp8", "expert_precision": "fp4"}
    halves = [
        EngineTable(name="prefill", role="prefill", **each),
        EngineTable(name="decode", role="decode", **each),
    ]
    pairs, whole = planned(cluster_of(*halves)).mix[0], planned().mix[0]
    both = planned(cluster_of(EngineTable(name="all", **each), *halves)).mix[0]
    assert both.requests_per_s == pytest.approx(
        pairs.requests_per_s + whole.requests_per_s, rel=0.02
    )
    assert both.bound == pairs.bound


def test_holding_is_bytes_times_price_and_a_hit_less_its_load() -> None:
    found = planned(ttl_s=7200.0)
    dram = next(r for r in found.held if (r.tier, r.position) == ("dram", 8192))
    load = next(r for r in found.loads if (r.way, r.position) == ("dram", 8192))
    assert dram.dollars_per_hour == pytest.approx(dram.size_bytes / 1e9 * 2.88 / 730)
    assert dram.ttl_dollars == pytest.approx(2 * dram.dollars_per_hour)
    assert dram.hit_dollars == pytest.approx(found.hits[-1].dollars - load.load_s * 0.002)
    assert dram.longest_s == pytest.approx(dram.hit_dollars / dram.dollars_per_hour * 3600)
    hbm = next(r for r in found.held if (r.tier, r.position) == ("hbm", 8192))
    assert hbm.size_bytes == 2 * dram.size_bytes  # V4's lies in both devices
    memory = device("H200").memory_bytes
    assert hbm.dollars_per_hour == pytest.approx(hbm.size_bytes / memory * 3.6)


def test_room_that_is_paid_for_is_held_forever() -> None:
    free = dict.fromkeys(STORAGE, StoragePrice(0.0, "as the operator says"))
    found = planned(storage=free)
    dram = [row for row in found.held if row.tier == "dram" and row.position]
    assert {row.reuses for row in dram} == {1}
    _, lines = tables(found)["held"]
    assert [line[-1] for line in lines if line[0] == "dram"][1:] == ["forever", "forever"]


def test_the_largest_batch_is_what_the_pool_holds() -> None:
    few = EngineTable(devices=2, kv_dtype="fp8", expert_precision="fp4", blocks=6000)
    (engine,) = [Engine(kind, Price(1.0, "")) for kind in kinds(cluster_of(few))]
    assert 0 < engine.batch_max(131_072) < engine.batch_max(8192) < engine.batch_max(2048)
    with pytest.raises(ConfigError, match="does not fit"):
        planned(cluster_of(few), prompt_tokens=1_000_000)


def test_every_figure_is_a_line_of_csv() -> None:
    found = planned()
    lines = list(csv.DictReader(io.StringIO(csv_bytes(figures(found)).decode())))
    assert {line["table"] for line in lines} == set(tables(found))
    (cost,) = [
        line for line in lines
        if (line["table"], line["of"], line["figure"])
        == ("prefill", "engine 8192", "dollars_per_million")
    ]  # fmt: skip
    assert float(cost["value"]) == found.prefill[-1].dollars_per_million


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v4-flash-h20", "v4-flash-h200"])
def test_the_examples(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"plan.{kind}" for kind in ("json", "csv", "html")]
    argv = ["plan", "--cluster", str(EXAMPLES / f"{name}.toml")]
    for file in files:
        argv += [f"--{file.suffix[1:]}", str(file)]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    result = json.loads(files[0].read_text())
    assert result["plan"]["devices"] == 16
    assert shown.replace("\n", " ").startswith(result["plan"]["advice"][:80])
    assumed = {each["name"] for each in result["assumed"]}
    assert {"--gpu-hour", "--mix", "--ttl-s", "--dram-gb-month", "HBM"} <= assumed
    page = files[2].read_text()
    for each in result["assumed"]:
        assert each["source"]
        assert f"assumed: {each['name']}:" in shown
        assert each["name"] in page
    assert "Assumed, because nobody gave it" in page
    assert page.count("<svg class=plot") == 4
    assert "dollars_per_million" in files[1].read_text()


def test_what_is_given_is_not_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    given = ["--mix", "4096:256", "--ttl-s", "60", "--gpu-hour", "2.5", "--dram-gb-month", "0",
             "--disk-gb-month", "0.01", "--store-gb-month", "0.02", "--precision", "fp8",
             "--expert-precision", "fp4", "--engines", "3", "--context", "512, 4096"]  # fmt: skip
    assert main(["plan", *H200, *given, "--json", str(file)]) == 0
    capsys.readouterr()
    result = json.loads(file.read_text())
    assert {each["name"] for each in result["assumed"]} == {
        *("[tiers]", "[[engine]]", "reached of H200", "HBM")
    }
    assert result["engines"][0]["source"] == "as the operator says"
    assert result["plan"]["dollars_per_hour"] == 30.0
    assert result["terms"]["contexts"] == [512, 4096]


def test_what_stands_where_nobody_gives_it_fits_the_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, told = tmp_path / "cluster.toml", tmp_path / "plan.json"
    cluster.write_text('[[engine]]\nmodel = "llama-3.1-8b"\ncontext_tokens = 16384\n')
    assert main(["plan", "--cluster", str(cluster), "--json", str(told)]) == 0
    assert json.loads(told.read_text())["terms"]["contexts"] == [2048, 8192]
    cluster.write_text('[[engine]]\nmodel = "llama-3.1-8b"\ncontext_tokens = 1024\n')
    capsys.readouterr()
    assert main(["plan", "--cluster", str(cluster)]) == 2
    assert "--mix 8192:1024: the engines take up to 1,024 tokens" in capsys.readouterr().err
    given = ["--mix", "512:64", "--json", str(told)]
    assert main(["plan", "--cluster", str(cluster), *given]) == 0
    assert json.loads(told.read_text())["terms"]["contexts"] == [1024]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--model is missing"),
        (["--model", "llama-3.1-8b"], "--device is missing"),
        (["--model", "llama-3.1-8b", "--device", "H200"], "--devices is missing"),
        (["--model", "nothing-1b", "--device", "H200", "--devices", "1"], "nothing-1b"),
        (["--model", "llama-3.1-8b", "--device", "H9000", "--devices", "1"], "unknown device"),
        (["--model", "llama-3.1-8b", "--device", "B300", "--devices", "1"],
         "no list price: give --gpu-hour"),
        (["--model", "256", "--device", "H200", "--devices", "1"], "plain block size"),
        (["--model", "deepseek-v4-flash", "--device", "L40S", "--devices", "1"], "leave no room"),
        ([*H200[:-1], "0"], "--devices 0: 1 to 4,096"),
        ([*H200, "--engines", "0"], "--engines 0: 1 to 1,024"),
        ([*H200, "--precision", "fp3"], "fp3"),
        ([*H200, "--expert-precision", "x"], "precision 'x' is unknown"),
        ([*H200, "--cluster", "c.toml"], "--model: that is in the cluster's file"),
        (["--cluster", "not-there.toml"], "cannot be read"),
        ([*H200, "--gpu-hour", "0"], "--gpu-hour: 0 dollars per GPU hour"),
        ([*H200, "--gpu-hour", "nan"], "--gpu-hour: nan"),
        ([*H200, "--dram-gb-month", "-1"], "--dram-gb-month: -1 dollars"),
        ([*H200, "--disk-gb-month", "inf"], "--disk-gb-month: inf"),
        ([*H200, "--store-gb-month", "1e9"], "--store-gb-month: 1e+09"),
        ([*H200, "--mix", "8192"], "write PROMPT:OUTPUT"),
        ([*H200, "--mix", "0:5"], "write PROMPT:OUTPUT"),
        ([*H200, "--mix", "8000000:5"], "up to 1,048,576 tokens"),
        ([*H200, "--context", "0"], "--context '0'"),
        ([*H200, "--context", "1,,2"], "--context '1,,2'"),
        ([*H200, "--context", ",".join("123456789abcdefgh")], "--context"),
        ([*H200, "--context", "99999999999999999999"], "--context"),
        ([*H200, "--batch", "many"], "--batch 'many'"),
        ([*H200, "--batch", ",".join(map(str, range(1, 19)))], "--batch: 18 numbers"),
        ([*H200, "--ttl-s", "0"], "--ttl-s 0"),
        ([*H200, "--tpot-s", "nan"], "--tpot-s nan"),
        ([*H200, "--tpot-s", "1e-9"], "no step is quick enough"),
        ([*H200, "--json", "-"], "--json -: give a file"),
        ([*H200, "--html", "no/such/place.html"], "there is no no/such"),
        ([*H200, "--json", "same", "--csv", "same"], "reads or writes that file already"),
        (["--seed-case", "--gpu-hour", "2"], "--gpu-hour: the seed's case has its own inputs"),
        (["--seed-case", "--context", "512"], "--context: the seed's case has its own inputs"),
        (["--seed-case", "--store-gb-month", "0"], "--store-gb-month: the seed's case"),
        (["--seed-case", *H200], "--model: the seed's case has its own inputs"),
    ],
)  # fmt: skip
def test_bad_input(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) == 2
    told = capsys.readouterr().err
    assert told.startswith("kvatlas: ")
    assert said in told
    assert told.count("\n") == 1


def test_a_device_of_ones_own_has_its_own_price() -> None:
    own = msgspec.structs.replace(device("B300"), name="mine", usd_per_hour=5.5)
    price = device_price(own, None)
    assert price.dollars_per_gpu_hour == 5.5
    assert "[[device]]" in price.source
    assert device_price(device("H200"), None).source.startswith("default: list price")
    assert "derived, 0.7 to 1.3" in device_price(device("H20"), None).source


def test_the_guide_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its two examples: the advice, word for word."""
    text = re.sub(r"\s+", " ", (EXAMPLES.parent / "docs/guides/plan.md").read_text("utf-8"))
    for name in ("v4-flash-h20", "v4-flash-h200"):
        assert main(["plan", "--cluster", str(EXAMPLES / f"{name}.toml")]) == 0
        shown = re.sub(r"\s+", " ", capsys.readouterr().out)
        assert shown[: shown.index(" kvatlas 0.")] in text
