"""`kvatlas bench` on stub engines, and on endpoints that lack or hide something."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bench_kit import Between, stubs

from kvatlas.errors import ConfigError, EngineError
from kvatlas.report.latency import Slo
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.load import LoadPlan
from kvatlas.validate.bench import side, words
from kvatlas.validate.bench.page import html
from kvatlas.validate.bench.run import Bench, check
from kvatlas.validate.bench.texts import Form
from kvatlas.validate.bench.values import Arm, BenchPlan, Clean, KneePlan, Outcome
from kvatlas.validate.bench.verdicts import findings
from kvatlas.validate.bench.workload import Workload
from kvatlas.workload.presets import FAMILIES

LOAD = LoadPlan("", time_scale=0.0, max_output_tokens=2, slo=Slo(ttft_s=60.0), timeout_s=20.0)
PLAN = BenchPlan(LOAD, rounds=2, requests=12, warm_up=2, ready_s=5.0)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for between tries."""
    monkeypatch.setattr(side, "_POLL_S", 0.001)
    monkeypatch.setattr("kvatlas.validate.bench.run._SETTLE_S", 0.001)


def workload(name: str = "shared-prompt", context: int = 800) -> Workload:
    made = Workload(name, FAMILIES[name], seed=1, output_max=2)
    made.fit(context)
    return made


def bench(arms: list[Arm], plan: BenchPlan = PLAN, **more: Any) -> Bench:
    return Bench(plan, arms, workload(), nonce="n", clock=lambda: 1e9, **more)


def answers(*paths: str, status: int = 404, body: bytes = b"{}") -> Callable[[Request], Any]:
    return lambda request: (status, body) if request.path in paths else None


async def played(bench: Bench) -> Outcome:
    await bench.run()
    return bench.outcome


# -- the sound case -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "chat", "ids"])
async def test_two_arms_in_turn_with_hits_by_the_engines_counters(form: Form) -> None:
    said: list[str] = []
    async with stubs(2) as cluster:
        arms = [Arm(n, a.url) for n, a in zip("ab", cluster.addresses, strict=True)]
        plan = msgspec.structs.replace(PLAN, rounds=3, form=form)
        run = bench(arms, plan, told=said.append)
        found = await played(run)
        numbers = [cluster.engine(i).numbers() for i in range(2)]
    assert [(r.arm, r.number, r.position) for r in found.rounds] == [
        *(("a", 0, 0), ("b", 0, 1)),
        *(("b", 1, 0), ("a", 1, 1)),
        *(("a", 2, 0), ("b", 2, 1)),
    ]
    assert found.sound
    assert (found.left, found.notes) == (
        {},
        ("Hit tokens are those on the engines' devices: they do not tell of any others.",),
    )
    assert {r.clean.how for r in found.rounds} == {"reset"}
    assert {r.clean.detail for r in found.rounds} == {"verified: a cached prompt was computed anew"}
    for first, second in zip(found.rounds[::2], found.rounds[1::2], strict=True):
        assert first.load is not None
        assert second.load is not None
        assert first.hits == second.hits
        assert first.load.hits.prompt_tokens == second.load.hits.prompt_tokens
    for round in found.rounds:
        assert round.load is not None
        assert round.hits.local_tokens == round.load.hits.reported_tokens > 0
        assert round.hits.prompt_tokens == round.load.hits.prompt_tokens
    # What was counted is less than all that the engine saw: warm-ups and questions are not in it.
    counted = sum(r.hits.prompt_tokens or 0 for r in found.rounds if r.arm == "a")
    assert counted < numbers[0].prompt_tokens
    assert len(run.rows) == 3 * 2 * 12
    assert said[2:4] == ["round 1 of 3: a", "round 1 of 3: b"]
    assert found.endpoints["a"].engines == {arms[0].target: "vllm"}
    if form == "text":
        assert found.endpoints["a"].tokens_per_word == 1.0
    page = html(found, findings(found, run.rows), run.rows)
    assert "Bench of shared-prompt: a against b" in page
    assert "not shown" in page  # three rounds


async def test_rounds_of_a_trace_that_leaves_slowly_hold_its_rate() -> None:
    async with stubs() as cluster:
        arms = [Arm("only", cluster.addresses[0].url)]
        plan = msgspec.structs.replace(PLAN, rounds=1, rate=200.0)
        found = await played(bench(arms, plan))
    load = found.rounds[0].load
    assert load is not None
    assert load.latency.duration_s >= 11 / 200
    assert load.plan.time_scale > 0


# -- caches ---------------------------------------------------------------------------------------


async def test_without_a_way_to_empty_caches_each_play_has_text_of_its_own() -> None:
    """Else the second round of a trace, and the second arm, would find the first one's state."""
    async with (
        stubs() as cluster,
        Between(cluster.addresses[0].url, answers("/reset_prefix_cache")) as server,
    ):
        found = await played(bench([Arm("a", server.url)]))
        own = [r.load.hits.reported_tokens for r in found.rounds if r.load]
    async with stubs() as cluster:
        clean = await played(bench([Arm("a", cluster.addresses[0].url)]))
    assert {r.clean.how for r in found.rounds} == {"new text"}
    assert all("no way to empty its caches" in r.clean.detail for r in found.rounds)
    assert any("text of its own" in note for note in found.notes)
    usual = [r.load.hits.reported_tokens for r in clean.rounds if r.load]
    for new, emptied in zip(own, usual, strict=True):
        assert new == pytest.approx(emptied, rel=0.1)
    long = [p for p in server.prompts if len(p) > 500]
    assert not set(long[:14]) & set(long[-14:])


async def test_a_reset_that_empties_nothing_is_seen() -> None:
    """A store behind the engine, say: the engine says that all is well."""
    says = answers("/reset_prefix_cache", status=200, body=b'{"success": true}')
    async with stubs() as cluster, Between(cluster.addresses[0].url, says) as server:
        found = await played(bench([Arm("a", server.url)]))
    assert {r.clean.how for r in found.rounds} == {"new text"}
    assert "were still cached after its reset" in found.rounds[0].clean.detail


async def test_a_reset_that_fails_is_tried_again_and_then_said() -> None:
    no = answers("/reset_prefix_cache", status=200, body=b'{"success": false}')
    async with stubs() as cluster, Between(cluster.addresses[0].url, no) as server:
        found = await played(bench([Arm("a", server.url)]))
    assert "its caches were not emptied" in found.rounds[0].clean.detail
    assert server.paths["/reset_prefix_cache"] == 2 * side._RESET_TRIES


async def test_sglangs_way_is_known_too() -> None:
    def flush(request: Request) -> tuple[int, bytes] | None:
        if request.path == "/flush_cache":
            assert cluster.engine(0).reset_cache()
            return 200, b"Cache flushed."
        return (404, b"") if request.path == "/reset_prefix_cache" else None

    async with stubs() as cluster, Between(cluster.addresses[0].url, flush) as server:
        found = await played(bench([Arm("a", server.url)]))
    assert {r.clean.how for r in found.rounds} == {"reset"}


# -- counters -------------------------------------------------------------------------------------


async def test_without_counters_hit_tokens_are_not_shown() -> None:
    async with (
        stubs() as cluster,
        Between(cluster.addresses[0].url, answers("/metrics")) as server,
    ):
        run = bench([Arm("a", server.url)])
        found = await played(run)
    assert "no counters: " in found.endpoints["a"].engines[server.url]
    assert found.rounds[0].hits.hit_tokens is None
    assert "/metrics: status 404" in found.rounds[0].hits.reason
    shown = findings(found, run.rows).estimate("a", "hit tokens")
    assert shown.interval is None
    assert "/metrics: status 404" in shown.reason


async def test_what_others_ask_of_the_engine_is_not_counted_as_ours() -> None:
    async with stubs() as cluster:
        engine = cluster.engine(0)

        def busy(request: Request) -> None:
            engine._counts.prompt_tokens += 100

        async with Between(cluster.addresses[0].url, busy) as server:
            found = await played(bench([Arm("a", server.url)]))
    assert found.rounds[0].hits.hit_tokens is found.rounds[0].hits.local_tokens is None
    assert "others use them too" in found.rounds[0].hits.reason


async def test_engines_that_were_not_named_are_missed() -> None:
    async with stubs(2) as cluster:
        one, other = (a.url for a in cluster.addresses)
        found = await played(bench([Arm("a", one, engines=(other,))]))
    assert "these are not all the engines" in found.rounds[0].hits.reason


async def test_an_engine_that_was_started_anew_is_noticed() -> None:
    pages = iter(["1.0", "1.0", "2.0", "2.0", "3.0", "3.0", *["4.0"] * 99])

    def started(request: Request) -> tuple[int, bytes] | None:
        if request.path != "/metrics":
            return None
        page = f"vllm:prompt_tokens_total 5\nprocess_start_time_seconds {next(pages)}\n"
        return 200, page.encode()

    async with stubs() as cluster, Between(cluster.addresses[0].url, started) as server:
        found = await played(bench([Arm("a", server.url)]))
    assert "started anew" in found.rounds[0].hits.reason


# -- endpoints ------------------------------------------------------------------------------------


async def test_an_endpoint_that_does_not_know_ignore_eos_or_usage() -> None:
    def strict(request: Request) -> tuple[int, bytes] | None:
        if b"ignore_eos" in request.body:
            return 400, b'{"error":{"message":"Unrecognized request argument: ignore_eos"}}'
        if request.path == "/v1/completions":
            return 200, b'{"choices":[{"text":"a"}]}'
        return None

    async with stubs() as cluster, Between(cluster.addresses[0].url, strict) as server:
        found = await played(bench([Arm("a", server.url)]))
    assert found.sound
    assert found.rounds[0].clean == Clean("reset", "not verified: no cached tokens are told")
    said = " ".join(found.notes)
    assert "refuses ignore_eos" in said
    assert "No endpoint tells how many tokens" in said


async def test_nobody_there_is_said_before_anything_is_played() -> None:
    async with stubs(2) as cluster:
        there, gone = (a.url for a in cluster.addresses)
        await cluster.stop(1)
        run = bench([Arm("a", there), Arm("b", gone)])
        with pytest.raises(EngineError, match=gone):
            await run.run()
    assert run.rows == []


@pytest.mark.parametrize("when", ["between plays", "within one"])
async def test_an_arm_that_leaves_is_named_and_the_others_go_on(when: str) -> None:
    async with stubs(2) as cluster:
        asked = 0

        def leaving(request: Request) -> tuple[int, bytes] | None:
            nonlocal asked
            asked += request.path == "/v1/completions"
            # One question, two to warm up, three on the cache, and twelve that count.
            return (502, b"gone") if asked > (18 if when == "between plays" else 12) else None

        async with Between(cluster.addresses[1].url, leaving) as server:
            run = bench([Arm("a", cluster.addresses[0].url), Arm("b", server.url)])
            found = await played(run)
    assert not found.sound
    assert list(found.left) == ["b"]
    assert "before round 2: " in found.left["b"]
    assert [r.number for r in found.rounds if r.arm == "a"] == [0, 1]
    assert [r.number for r in found.rounds if r.arm == "b"] == [0]
    assert any("b left the bench before round 2" in line for line in words.endings(found))
    if when == "within one":
        load = found.rounds[1].load
        assert load is not None
        assert load.errors["http 502"] > 0


# -- commands that make the difference ------------------------------------------------------------


async def test_a_command_makes_the_arm_before_each_play(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = f'echo "$KVATLAS_ARM $KVATLAS_ROUND" >> {log}'
    async with stubs() as cluster:
        url = cluster.addresses[0].url
        arms = [Arm("a", url, before=command), Arm("b", url, before=command)]
        found = await played(bench(arms))
    assert found.sound
    assert log.read_text().split("\n")[:-1] == [*("a start", "b start", "a 1", "b 1", "b 2", "a 2")]


async def test_a_command_that_fails_says_what_it_said() -> None:
    async with stubs() as cluster:
        arms = [Arm("a", cluster.addresses[0].url, before="echo no such server; exit 3")]
        with pytest.raises(EngineError, match="arm a ended with 3: no such server"):
            await bench(arms).run()


async def test_a_command_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "HOOK_S", 0.05)
    async with stubs() as cluster:
        arms = [Arm("a", cluster.addresses[0].url, before="exec sleep 60")]
        with pytest.raises(EngineError, match="did not end in"):
            await bench(arms).run()


async def test_what_a_command_starts_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    async with stubs() as cluster:
        arms = [Arm("a", cluster.addresses[0].url, before=f"sleep 60 & echo $! > {pid}")]
        plan = msgspec.structs.replace(PLAN, rounds=1)
        found = await played(bench(arms, plan))
    assert found.sound
    os.kill(int(pid.read_text()), signal.SIGKILL)


# -- the knee -------------------------------------------------------------------------------------


async def test_a_knee_is_searched_with_empty_caches_at_each_rate() -> None:
    async with stubs() as cluster:
        url = cluster.addresses[0].url
        knee = KneePlan(steps_max=3, step_s=0.1)
        plan = msgspec.structs.replace(PLAN, rounds=1, rate=150.0, knee=knee)
        async with Between(url, lambda request: None) as server:
            found = await played(bench([Arm("a", server.url)], plan))
        resets = server.paths["/reset_prefix_cache"]
    (result,) = found.knees
    assert (result.ending, result.misses, len(result.steps)) == ("holds everywhere", None, 3)
    assert [s.rate for s in result.steps] == [150, 300, 600]
    assert [s.requests for s in result.steps] == [20, 30, 60]
    assert resets == 1 + 3
    assert "the knee is above it" in words.endings(found)[0]


async def test_an_endpoint_that_refuses_beyond_a_load_has_its_knee_found() -> None:
    """It answers 25 requests of a play: nine in ten of up to 27, so of 270 a second for 0.1 s."""
    since_reset = 0

    async def answer(request: Request, reply: Reply) -> None:
        nonlocal since_reset
        if request.path == "/v1/models":
            reply.send_json(200, {"data": [{"id": "m"}]})
        elif request.path == "/reset_prefix_cache":
            since_reset = 0
            reply.send_json(200, {"success": True})
        elif request.path == "/metrics":
            reply.send(404, [])
        elif since_reset > 25:
            reply.send_json(503, {"error": {"message": "busy"}})
        else:
            since_reset += 1
            reply.start(200, [(b"content-type", b"text/event-stream")])
            reply.end(b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n')

    server = HttpServer(answer)
    await server.start()
    try:
        knee = KneePlan(share=0.9, tolerance=0.3, step_s=0.1)
        plan = msgspec.structs.replace(PLAN, rounds=1, rate=75.0, knee=knee, warm_up=1)
        found = await played(bench([Arm("a", f"http://127.0.0.1:{server.port}")], plan))
    finally:
        await server.close()
    (result,) = found.knees
    assert (result.ending, result.reason) == ("found", "")
    assert [(round(s.rate), s.held) for s in result.steps] == [
        *((75, True), (150, True), (300, False)),
        *((212, True), (252, True)),
    ]
    missed = result.steps[2]
    assert (missed.requests, missed.failed) == (30, 5)
    assert missed.low < missed.attained == 25 / 30 < missed.high < 1
    assert "knee of a" in html(found, findings(found, []), [])


async def test_a_client_that_is_late_itself_ends_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvatlas.validate.bench.run._LAG_S", 0.0)
    async with stubs() as cluster:
        load = msgspec.structs.replace(LOAD, max_in_flight=1, slo=Slo(ttft_s=1e-6))
        spec = KneePlan(step_s=0.1)
        plan = msgspec.structs.replace(PLAN, load=load, rounds=1, rate=500.0, knee=spec)
        found = await played(bench([Arm("a", cluster.addresses[0].url)], plan))
    (result,) = found.knees
    assert (result.ending, len(result.steps)) == ("stopped", 1)
    assert "this client itself was" in result.reason


# -- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "arms", "said"),
    [
        ({"rounds": 0}, ["a"], "--rounds 0"),
        ({"rate": 0.0}, ["a"], "--rate 0"),
        ({"rate": 1e9}, ["a"], "--rate"),
        ({"warm_up": -1}, ["a"], "--warm-up -1"),
        ({"knee": KneePlan(share=2)}, ["a"], "--knee-share 2"),
        ({"knee": KneePlan(), "load": msgspec.structs.replace(LOAD, slo=Slo())}, ["a"], "--knee n"),
        ({"load": msgspec.structs.replace(LOAD, max_in_flight=0)}, ["a"], "in flight"),
        ({}, ["a", "a"], "two arms of one name"),
        ({}, ["a", "b"], "--before a=COMMAND"),
        ({}, [], "0 arms"),
    ],
)
def test_benches_that_cannot_be(change: dict[str, Any], arms: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(
            msgspec.structs.replace(PLAN, **change),
            [Arm(name, "http://127.0.0.1:1") for name in arms],
        )
    with pytest.raises(ConfigError, match="arm a: 'ftp://x': only http://"):
        check(PLAN, [Arm("a", "http://127.0.0.1:1", engines=("ftp://x",))])


async def test_a_rate_needs_arrivals_that_differ() -> None:
    async with stubs() as cluster:
        plan = msgspec.structs.replace(PLAN, requests=1, rate=3.0)
        with pytest.raises(ConfigError, match="all come at once"):
            await bench([Arm("a", cluster.addresses[0].url)], plan).run()
