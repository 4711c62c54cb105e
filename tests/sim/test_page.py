"""A simulated run as a page: the report's figures, and the cluster drawn."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from sim_kit import chats, cluster_of

from kvatlas.cli.main import main
from kvatlas.sim.cluster import default_cluster, with_tiers
from kvatlas.sim.hit_curve import hit_curve
from kvatlas.sim.page import page
from kvatlas.sim.picture import ENGINES_MAX, NODES_MAX, picture
from kvatlas.sim.tier_spec import parse_tiers
from kvatlas.sim.world import simulate
from kvatlas.workload.families import generate
from kvatlas.workload.presets import FAMILIES


def test_the_page_tells_where_all_tokens_came_from(tmp_path: Path) -> None:
    cluster = with_tiers(default_cluster(engines=2), parse_tiers("dram=10GB"), str)
    shape = msgspec.structs.replace(FAMILIES["agent"], requests=20, duration_s=5)
    report = simulate(cluster, generate(shape, 1, str(tmp_path / "agent.jsonl")))
    curve = hit_curve(generate(shape, 1, "agent"), cluster)
    told = page(cluster, report, [0.1, 0.2], "1.2", curve)
    assert f"{report.tokens.prompt:,}" in told
    assert f"{report.tokens.recomputed:,}" in told
    assert f"{report.tokens.hits['hbm']:,}" in told
    assert "down: save to dram" in told
    assert "Hits by capacity" in told
    assert "dram 0 of 10 GB" in told
    assert "20 requests" in told
    assert "agent.jsonl" in told
    assert str(tmp_path) not in told, "where a file lies is nobody's business"


def test_faults_are_on_the_page() -> None:
    cluster = cluster_of(count=1)
    report = simulate(cluster, chats(3))
    assert "Nothing." in page(cluster, report, [], "1.2")
    latency = msgspec.structs.replace(report.latency, failed=2)
    broken = msgspec.structs.replace(report, faults={"engine died <b>": 2}, latency=latency)
    told = page(cluster, broken, [], "1.2")
    assert "engine died &lt;b&gt;" in told
    assert "2 failed" in told


def test_what_is_not_drawn_of_a_large_cluster_is_said() -> None:
    cluster = default_cluster(engines=NODES_MAX + 3)
    report = simulate(cluster, chats(2))
    told = picture(cluster, report.engines)
    assert told.count("-node") == NODES_MAX
    assert "3 more nodes are not drawn" in told
    one = msgspec.structs.replace(
        cluster,
        members=tuple(msgspec.structs.replace(m, node="node") for m in cluster.members),
    )
    many = f"{NODES_MAX + 3 - ENGINES_MAX} more engines"
    assert many in picture(one, report.engines)


def test_a_cluster_is_drawn_without_a_run() -> None:
    cluster = with_tiers(default_cluster(engines=2), parse_tiers("dram=10GB,object=1TB"), str)
    told = picture(cluster, title="<what is there>")
    assert "&lt;what is there&gt;" in told
    assert "dram 10 GB" in told
    assert "store for all nodes: 1 TB" in told
    assert ">combined<" in told
    assert "Filled" not in told
    assert "busy" not in told


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "out.html"
    trace.write_text('{"timestamp":0,"input_length":512,"output_length":2,"hash_ids":[1]}\n')
    assert main(["sim", "--trace", str(trace), "--quiet", "--html", str(out)]) == 0
    assert "Simulated: t.jsonl" in out.read_text()
    capsys.readouterr()
    assert main(["sim", "--trace", str(trace), "--quiet", "--html", str(trace)]) == 2
    assert "reads or writes that file already" in capsys.readouterr().err
