"""Hits by capacity, and how much of a trace engines and tiers hold."""

from __future__ import annotations

import msgspec
import pytest

from kvatlas.errors import TraceError
from kvatlas.sim.cluster import default_cluster, with_tiers
from kvatlas.sim.hit_curve import HitCurve, hit_curve, holds
from kvatlas.sim.tier_plots import flow_plot, hit_plot
from kvatlas.sim.tier_spec import parse_tiers
from kvatlas.workload.families import generate
from kvatlas.workload.presets import FAMILIES
from kvatlas.workload.trace_stats import stats


def test_the_curve_ends_at_what_an_endless_cache_hits() -> None:
    shape = msgspec.structs.replace(FAMILIES["agent"], requests=60, duration_s=10)
    trace = generate(shape, 1, "agent")
    curve = hit_curve(trace, default_cluster(engines=2))
    endless = stats(trace)
    assert endless is not None
    sizes, shares = zip(*curve.points, strict=True)
    assert list(sizes) == sorted(sizes)
    assert list(shares) == sorted(shares)
    assert sizes[-1] == endless.unique_blocks * trace.block_tokens
    assert shares[-1] == pytest.approx(endless.block_hit_rate)
    assert shares[0] < shares[-1]
    part = hit_curve(trace, default_cluster(engines=2), 10)
    assert part.points[-1][0] < sizes[-1]
    with pytest.raises(TraceError, match="agent: no requests"):
        hit_curve(trace, default_cluster(engines=2), 0)


def test_what_places_hold() -> None:
    cluster = default_cluster(engines=4)
    bare = holds(cluster, 8192)
    assert bare["HBM of all"] == pytest.approx(4 * bare["HBM of one engine"])
    (member, *_) = cluster.members
    each = member.layout.load_bytes(8192)
    found = holds(with_tiers(cluster, parse_tiers("dram=1TB,object=100TB"), str), 8192)
    assert found["host memory"] == pytest.approx(4 * 1e12 / each * 8192)  # a node for each engine
    assert found["the store"] == pytest.approx(1e14 / each * 8192)
    assert "disks" not in found
    halves = [
        msgspec.structs.replace(m, role=role)
        for m, role in zip(cluster.members, ("prefill", "decode", "decode", "decode"), strict=True)
    ]
    split = holds(msgspec.structs.replace(cluster, members=tuple(halves)), 8192)
    assert split["HBM of all"] == bare["HBM of one engine"], "a prompt is resumed where it prefills"


def test_what_holds_everything_is_told_and_not_drawn() -> None:
    curve = HitCurve(16, ((100, 0.1), (1000, 0.5)), {"HBM of all": 700.0, "the store": 1e9})
    told = hit_plot(curve)
    assert "room for all of it: the store" in told
    assert ">HBM of all<" in told
    assert ">the store<" not in told


def test_the_flow_goes_down_up_and_across() -> None:
    sizes = {"load dram": 3e9, "hand over": 1e9, "save dram": 2e9, "seal dram": 0}
    told = flow_plot([("Plain", {}), ("Tiers", sizes)])
    places = [
        told.index(f">{text}<") for text in ("down: save to dram", "up: load from dram",
                                              "across: hand over")
    ]  # fmt: skip
    assert places == sorted(places)
    assert "record in" not in told
    assert "Plain" not in told
    assert flow_plot([("Plain", {})]) == ""
