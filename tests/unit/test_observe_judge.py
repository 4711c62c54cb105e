"""A gain is shown where it can be, and nothing else is: measured, modelled, judged, told."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.cli.main import main
from kvatlas.core.router import Policy
from kvatlas.errors import ConfigError
from kvatlas.report import money
from kvatlas.service.observe_record import About, Decided, Observed, Recorded, Row
from kvatlas.sim.cluster import Cluster, ClusterFile, EngineTable, build
from kvatlas.validate import observe
from kvatlas.validate.observe import Bounds, Line, ObserveReport, judge
from kvatlas.validate.observe_model import PRIORS, at_pace, calibrated, placed, play, trace_of
from kvatlas.validate.observe_report import facts, page

BLOCK = 64
ENGINE = EngineTable(
    name="e", count=3, model="64", blocks=400, prefill_tokens_per_s=10_000.0, decode_step_s=0.01
)
TRUE_PACE = {"compute": 1.6, "memory": 1.3, "step": 1.0, "outside_s": 0.012}


def cluster(count: int = 3) -> Cluster:
    table = msgspec.structs.replace(ENGINE, count=count)
    return build(ClusterFile(engine=(table,)), lambda place: place)


def conversations(requests: int, rate_per_s: float) -> list[Row]:
    """Turns of conversations that grow, taken up at random."""
    draw, rows, at_s = random.Random(4), list[Row](), 0.0
    turns: dict[int, int] = {}
    for _ in range(requests):
        at_s += draw.expovariate(rate_per_s)
        who = draw.randrange(max(1, len(rows) // 6) + 3)
        turns[who] = turn = turns.get(who, 0) + 1
        blocks = 3 + 4 * min(turn, 8)
        ids = tuple(who * 10_000 + i + 1 for i in range(blocks))
        rows.append(Row(at_s * 1000, blocks * BLOCK - 5, 6, ids, Observed()))
    return rows


@cache
def seen(policy: Policy = "round_robin", requests: int = 320) -> Recorded:
    """What an observer would have recorded of a cluster at `TRUE_PACE` under ``policy``."""
    rows, noise = conversations(requests, 10.0), random.Random(5)
    trace = trace_of("truth", rows, BLOCK)
    found = play(at_pace(cluster(), TRUE_PACE), trace, policy=policy)
    measured = []
    for index, row in enumerate(rows):
        one = found[index]
        assert not one.fault
        outside_s = TRUE_PACE["outside_s"] * noise.lognormvariate(0, 0.2)
        watched = Observed(
            ttft_s=one.ttft_s + outside_s,
            e2e_s=one.ended_at - one.arrived_at + outside_s,
            cached_tokens=one.cached_tokens,
            output="usage",
            engine=one.tried[-1],
            told="answer",
        )
        measured.append(msgspec.structs.replace(row, observed=watched))
    return Recorded(About(1, "0", "front", "2026-01-01", BLOCK), tuple(measured), {})


@pytest.fixture
def true_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitting is tested apart, and takes as long as all the rest."""
    monkeypatch.setattr(observe, "calibrated", lambda *_: dict(TRUE_PACE))


def judged(recorded: Recorded, **more: Any) -> ObserveReport:
    return judge("seen", recorded, cluster(), money.DEFAULT, **more)


def changed(recorded: Recorded, change: Callable[[int, Observed], Observed]) -> Recorded:
    rows = [
        msgspec.structs.replace(row, observed=change(index, row.observed))
        for index, row in enumerate(recorded.rows)
    ]
    return msgspec.structs.replace(recorded, rows=tuple(rows))


def with_(**fields: Any) -> Callable[[int, Observed], Observed]:
    return lambda _, observed: msgspec.structs.replace(observed, **fields)


def by_name(report: ObserveReport) -> dict[str, Line]:
    return {line.name: line for line in report.lines}


def reasons(report: ObserveReport) -> set[str]:
    assert not report.shown
    return {line.reason for line in report.lines}


@pytest.mark.usefixtures("true_pace")
def test_a_gain_that_is_there_is_shown_with_its_spread() -> None:
    report = judged(seen())
    assert report.shown
    assert report.judged == 160
    lines = by_name(report)
    for name in ("TTFT, mean", "prefill, GPU-seconds", "prefill, dollars"):
        line = lines[name]
        assert line.shown, line
        assert line.error is not None
        assert line.gain is not None
        assert abs(line.error.value) < 0.05
        assert 0.1 < line.gain.low <= line.gain.value <= line.gain.high < 1
    spent, paid = lines["prefill, GPU-seconds"], lines["prefill, dollars"]
    assert spent.saved is not None
    assert paid.saved is not None
    assert paid.saved.value == pytest.approx(spent.saved.value / 3600 * 2.0)
    assert spent.measured == pytest.approx(spent.modelled)


@pytest.mark.usefixtures("true_pace")
def test_where_kvatlas_serves_already_nothing_is_gained() -> None:
    report = judged(seen("price"))
    assert not report.shown
    assert all("may as well be nothing" in reason for reason in reasons(report))


@pytest.mark.usefixtures("true_pace")
def test_a_worse_router_in_kvatlas_place_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = observe.play

    def worse(*args: Any, policy: Policy, **more: Any) -> Any:
        return plain(*args, policy="round_robin" if policy == "price" else policy, **more)

    monkeypatch.setattr(observe, "play", worse)
    report = judged(seen("price"))
    spent = by_name(report)["prefill, GPU-seconds"]
    assert spent.shown
    assert spent.gain is not None
    assert spent.gain.high < 0
    assert "LOSS" in page(report)


@pytest.mark.usefixtures("true_pace")
def test_a_model_that_misses_shows_no_gain() -> None:
    slower = changed(
        seen(), lambda i, o: msgspec.structs.replace(o, ttft_s=o.ttft_s * (2 if i > 160 else 1))
    )
    report = judged(slower)
    for line in report.lines[:3]:
        assert not line.shown
        assert "the model of reality" in line.reason
    # Cached tokens that the model does not make either: then nothing is said of GPU-seconds.
    fewer = judged(changed(seen(), with_(cached_tokens=0)))
    assert "may miss the measured by" in by_name(fewer)["prefill, GPU-seconds"].reason


@pytest.mark.usefixtures("true_pace")
def test_a_gain_within_the_error_of_the_model_is_not_shown() -> None:
    recorded = changed(seen(), lambda _, o: msgspec.structs.replace(o, ttft_s=o.ttft_s * 3))
    report = judged(recorded, bounds=Bounds(error_max=1.0))
    assert "not larger than the model's error" in by_name(report)["TTFT, mean"].reason


@pytest.mark.usefixtures("true_pace")
def test_without_cached_tokens_nothing_is_said_of_gpu_seconds() -> None:
    report = judged(changed(seen(), with_(cached_tokens=-1)))
    lines = by_name(report)
    assert lines["TTFT, mean"].shown
    for name in ("prefill, GPU-seconds", "prefill, dollars"):
        assert "too few answers tell how many tokens were cached" in lines[name].reason


def first(recorded: Recorded, count: int) -> Recorded:
    return msgspec.structs.replace(recorded, rows=recorded.rows[:count])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: first(r, 40), "20 measured requests to judge by, at least 100"),
        (lambda r: first(r, 1), "1 measured requests to judge by"),
        (lambda r: changed(r, with_(ttft_s=-1.0)), "no time to first token was measured"),
        (lambda r: changed(r, with_(whole=False)), "no time to first token was measured"),
        (lambda r: changed(r, with_(engine="")), "is known of 0% of the requests"),
        (
            lambda r: msgspec.structs.replace(r, lost={"copy dropped": 20, "status 429": 900}),
            "20 requests of 340 could not be recorded",
        ),
        (
            lambda r: msgspec.structs.replace(r, lost={"line: no JSON": 9}),
            "9 requests of 329 could not be recorded",
        ),
    ],
)
def test_what_cannot_be_judged_is_not_shown_and_not_modelled(
    change: Callable[[Recorded], Recorded], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "play", None)
    report = judged(change(seen()))
    assert all(said in reason for reason in reasons(report))
    assert "not shown" in page(report)


def test_where_nothing_is_modelled_the_measured_stands() -> None:
    recorded = changed(seen(), with_(engine="", told=""))
    report = judged(recorded)
    times = sorted(row.observed.ttft_s for row in recorded.rows[160:])
    lines = by_name(report)
    assert lines["TTFT, mean"].measured == pytest.approx(sum(times) / 160)
    assert lines["TTFT, median"].measured == pytest.approx((times[79] + times[80]) / 2)
    assert lines["TTFT, mean"].modelled is None
    assert lines["prefill, GPU-seconds"].measured is None
    assert report.routing == ""
    assert dict(facts(report))["routing"].endswith("reality is not modelled")
    few = judged(first(changed(seen(), with_(ttft_s=-1.0)), 40))
    assert {line.measured for line in few.lines} == {None}


@pytest.mark.usefixtures("true_pace")
def test_one_engine_served_whatever_was_served() -> None:
    unknown = changed(seen(), with_(engine="", told=""))
    report = judge("seen", unknown, cluster(1), money.DEFAULT)
    assert report.routing == "who served what"
    assert all(line.modelled is not None for line in report.lines)


@pytest.mark.usefixtures("true_pace")
def test_a_rule_stands_in_for_what_nothing_tells() -> None:
    unknown = changed(seen(), with_(engine="", told=""))
    report = judged(unknown, rule="round_robin")
    assert report.routing == "the rule round_robin, as the operator says"
    assert by_name(report)["prefill, GPU-seconds"].shown
    wrong = judged(unknown, rule="price")  # it did not choose like that, and the model tells
    assert not by_name(wrong)["prefill, GPU-seconds"].shown


@pytest.mark.usefixtures("true_pace")
def test_a_model_whose_requests_fail_shows_nothing() -> None:
    table = msgspec.structs.replace(ENGINE, context_tokens=600)
    small = build(ClusterFile(engine=(table,)), lambda place: place)
    report = judge("seen", seen(), small, money.DEFAULT)
    assert all("requests fail" in reason for reason in reasons(report))


def test_the_engines_pace_is_found() -> None:
    recorded = seen(requests=160)
    trace = trace_of("seen", recorded.rows, BLOCK)
    engines, share = placed(recorded.rows, cluster())
    assert share == 1.0

    def run(at: Cluster, limit: int) -> Any:
        return play(at, trace, policy="least_load", engines=engines, limit=limit)

    found = calibrated(cluster(), trace, recorded.rows[:100], 10, run)
    assert set(found) == set(PRIORS)
    for name in ("compute", "memory"):
        assert found[name] == pytest.approx(TRUE_PACE[name], rel=0.1)
    assert found["outside_s"] == pytest.approx(TRUE_PACE["outside_s"], rel=0.5)


def test_requests_go_where_they_went() -> None:
    rows = seen().rows[:60]
    draw = random.Random(1)
    engines = {str(i): draw.choice(["e-0", "e-1", "e-2"]) for i in range(50)}
    found = play(cluster(), trace_of("x", rows, BLOCK), policy="least_load", engines=engines)
    assert {str(i): found[i].tried[0] for i in range(50)} == engines
    assert len(found) == 60


def test_more_engines_than_get_a_plan_at_once_are_found_too() -> None:
    rows = seen().rows[:30]
    engines = {str(i): f"e-{i % 20}" for i in range(30)}
    found = play(cluster(20), trace_of("x", rows, BLOCK), policy="least_load", engines=engines)
    assert {str(i): found[i].tried[0] for i in range(30)} == engines


def test_engines_are_mapped_by_name_or_in_order() -> None:
    def rows(names: Sequence[str]) -> list[Row]:
        return [Row(0, 1, 1, (1,), Observed(engine=name)) for name in names]

    assert placed(rows(["e-1", "e-0", ""]), cluster()) == ({"0": "e-1", "1": "e-0"}, 2 / 3)
    assert placed(rows(["c:1", "a:1", "b:1"]), cluster())[0] == {"0": "e-2", "1": "e-0", "2": "e-1"}
    with pytest.raises(ConfigError, match="tells of 2 engines"):
        placed(rows(["a", "b"]), cluster())


def test_pairs_are_not_judged() -> None:
    tables = [
        EngineTable(name=role, role=role, devices=2, expert_precision="fp4")  # type: ignore[arg-type]
        for role in ("prefill", "decode")
    ]
    pairs = build(ClusterFile(engine=tuple(tables)), lambda place: place)
    with pytest.raises(ConfigError, match="over pairs"):
        judge("seen", seen(), pairs, money.DEFAULT)


def test_the_real_state_is_told_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "play", None)

    def decide(index: int, observed: Observed) -> Observed:
        engine = observed.engine if index % 2 else "e-9"
        decided = Decided(engine, 100, 0.1, observed.cached_tokens + 50, 20, observed.ttft_s * 1.5)
        return msgspec.structs.replace(observed, decided=decided)

    live = judged(changed(first(seen(), 40), decide)).live
    assert live.shown
    assert (live.decisions, live.told, live.same_engine) == (40, 40, 20)
    assert live.missed_tokens == 40 * 50
    assert live.error_p50 == pytest.approx(0.5)
    unknown = judged(changed(changed(first(seen(), 40), decide), with_(engine=""))).live
    assert unknown.reason == "it is known of 0 of 40 decided requests who served them"
    few = judged(changed(first(seen(), 10), decide)).live
    assert few.reason == "10 decisions, at least 30 are needed"
    assert few.error_p50 is None


def test_money_has_a_price_and_a_source() -> None:
    assert money.price(None).dollars_per_gpu_hour == 2.0
    assert "arXiv" in money.price(None).source
    assert money.price(3.6).dollars(1000) == pytest.approx(1.0)
    for wrong in (0, -1, float("nan"), float("inf"), 1e9):
        with pytest.raises(ConfigError, match="dollars per GPU hour"):
            money.price(wrong)
    assert [money.dollars_text(d) for d in (0.01234, 12.3, 4e6)] == [
        "$0.0123",
        "$12.30",
        "$4,000,000.00",
    ]


def write(path: Path, recorded: Recorded) -> None:
    rows = list(recorded.rows)
    told = msgspec.structs.replace(rows[0].observed, about=recorded.about)
    rows[0] = msgspec.structs.replace(rows[0], observed=told)
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows) + b"\n")


@pytest.mark.usefixtures("true_pace")
def test_the_command_reports_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "seen.jsonl", seen())
    (tmp_path / "cluster.toml").write_text(
        '[[engine]]\nname = "e"\ncount = 3\nmodel = "64"\nblocks = 400\n'
        "prefill_tokens_per_s = 10000\ndecode_step_s = 0.01\n"
    )
    command = ["observe", "report", str(tmp_path / "seen.jsonl")]
    command += ["--cluster", str(tmp_path / "cluster.toml"), "--gpu-hour", "4"]
    html, out = tmp_path / "gain.html", tmp_path / "gain.json"
    assert main([*command, "--html", str(html), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "$4 per GPU hour (as the operator says)" in printed
    assert "not shown: no engine was listened to" in printed
    told = json.loads(out.read_bytes())
    assert told["price"]["dollars_per_gpu_hour"] == 4
    assert {line["name"] for line in told["lines"] if line["shown"]} >= {"TTFT, mean"}
    assert "What kvatlas would have saved" in html.read_text()
    write(tmp_path / "seen.jsonl", first(seen(), 40))
    assert main(command) == 1
    assert "20 measured requests to judge by" in capsys.readouterr().out.replace("\n", " ")
    assert main([*command, "--error-max", "0"]) == 2
    assert main([*command, "--html", str(tmp_path / "seen.jsonl")]) == 2
