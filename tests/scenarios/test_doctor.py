"""``kvatlas doctor`` names each misconfiguration and nothing else, and says what it cannot see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.cli import doctor as command
from kvatlas.cli.main import main
from kvatlas.errors import ConfigError
from kvatlas.service.assembly import RANK_HEADER
from kvatlas.service.http import Request
from kvatlas.service.http_client import HttpClient
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.validate.doctor import Cluster, Report, examine, from_config, from_urls, planting
from kvatlas.validate.doctor.canaries import Prompt, Target, loose
from kvatlas.validate.doctor.engines import Patience
from kvatlas.validate.doctor.plants import PLANTS, Plant
from kvatlas.validate.doctor.selftest import self_test
from kvatlas.validate.doctor.stage import Lies, Plan, Stage

QUICK = Patience(answer_s=10.0, event_s=2.0)
# Those whose doctor waits for what never comes; the whole self-test is in the long suite.
SLOW = {
    "caching-off",
    "feed-silent",
    "feed-gaps",
    "replay-dead",
    "block-size",
    "tcp-for-rdma",
    "layout-unknown",
}


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    await client.close()


async def test_each_plant_is_named_and_nothing_else() -> None:
    plants = [plant for plant in PLANTS if plant.name not in SLOW]
    score = await self_test(plants=plants)
    assert score.named == score.planted
    assert score.false_alarms == ()
    assert score.passed
    for name, finding in score.findings.items():
        assert finding.why, name
        assert finding.compared or finding.status == "not shown", name


@pytest.mark.long
async def test_the_whole_self_test() -> None:
    score = await self_test()
    assert len(score.planted) >= 15
    assert (score.named, score.false_alarms) == (score.planted, ())


async def test_a_plant_that_is_none_is_missed_and_a_wrong_word_is_a_false_alarm() -> None:
    nothing = Plant("nothing", "nothing is wrong", "salt", Plan)
    other = next(plant for plant in PLANTS if plant.name == "clock")
    other = msgspec.structs.replace(other, name="other", check="salt")
    score = await self_test(plants=[nothing, other])
    assert score.named == ()
    assert [alarm.partition(" ")[2][:8] for alarm in score.false_alarms] == ["clock w1"]
    assert not score.passed


async def run(*argv: str) -> int:
    return await asyncio.to_thread(main, ["doctor", *argv])


async def test_the_command_on_a_sound_and_on_a_broken_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Stage(Plan()) as stage:
        file = written(tmp_path, stage)
        assert await run("--config", str(file)) == 0
        assert "sound: " in capsys.readouterr().out
        assert await run("--config", str(file), "--all", "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert report["sound"]
        assert set(report["counts"]) == {"ok", "not applicable"}
        assert await run("--gateway", stage.cluster.gateway) == 3  # layouts are only in the file
        out = capsys.readouterr().out
        assert "not shown" in out
        assert out.count("wrong") == 1
        assert "\nnothing wrong, but not all could be seen: " in out
        await stage.stubs[0].stop(1)
        assert await run("--config", str(file), "--json", "--event-s", "1") in (1, 3)
        dead = json.loads(capsys.readouterr().out)["findings"]
        assert ["reach", "w1", "not shown"] in [[f["check"], f["who"], f["status"]] for f in dead]
    broken = next(plant for plant in PLANTS if plant.name == "salt-ignored")
    async with Stage(broken.plan()) as stage:
        assert await run("--config", str(written(tmp_path, stage))) == 1
        out = capsys.readouterr().out
        assert "salt w0: it resumed a prompt that was cached under another salt" in out
        assert "cached under another salt: 64, expected: 0" in out
        assert "→ run a version that knows cache_salt" in out


def written(folder: Path, stage: Stage) -> Path:
    """The stage's configuration as its operator would have it."""
    config = stage.cluster.config
    assert config is not None
    (folder / "secret").write_bytes(stage.plan.secret)
    port = stage.cluster.gateway.rpartition(":")[2]
    lines = [f"[gateway]\nport = {port}\n[keys]\nsecret_file = '{folder / 'secret'}'"]
    for worker in config.worker:
        lines += ["[[worker]]", *(f"{k} = '{getattr(worker, k)}'" for k in ("name", "url"))]
        lines.append(f"layout = '{worker.layout}'")
    for agent in config.agent:
        lines += ["[[agent]]", f"name = '{agent.name}'", f"url = '{agent.url}'"]
        lines.append(f"workers = {list(agent.workers)}")
    path = folder / "kvatlas.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "which cluster?"),
        (["--config", "no.toml"], "no.toml: cannot be read"),
        (["--engine", "ftp://x"], "ftp://x"),
        (["--gateway", "http://x:0"], "http://x:0"),
        (["--engine", "http://x", "--answer-s", "0"], "--answer-s 0: above 0"),
        (["--engine", "http://x", "--event-s", "nan"], "--event-s nan"),
    ],
)
def test_input_at_fault(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *argv]) == 2
    assert told in capsys.readouterr().err


async def test_an_api_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: set[str] = set()

    async def handle(request: Request, reply: Reply) -> None:
        asked.add(request.header("authorization"))
        reply.send(401, [])

    server = HttpServer(handle)
    await server.start("127.0.0.1", 0)
    file = tmp_path / "key"
    argv = ["--engine", f"http://127.0.0.1:{server.port}", "--api-key-file", str(file)]
    try:
        assert await run(*argv) == 2
        assert "cannot be read" in capsys.readouterr().err
        file.write_text("two words\n")
        assert await run(*argv) == 2
        assert "one key, without spaces" in capsys.readouterr().err
        file.write_text("sk-1\n")
        assert await run(*argv) == 3
        assert "status 401" in capsys.readouterr().out
    finally:
        await server.close()
    assert asked == {"Bearer sk-1"}


def test_a_file_and_engines_are_one_too_many(tmp_path: Path) -> None:
    file = tmp_path / "kvatlas.toml"
    file.write_text('[[worker]]\nname = "w"\nurl = "http://127.0.0.1:1"\n')
    assert main(["doctor", "--config", str(file), "--engine", "http://127.0.0.1:1"]) == 2
    assert from_config(file).gateway == "http://127.0.0.1:8000"
    file.write_text('keys.secret_file = "none"\n' + file.read_text())
    with pytest.raises(ConfigError, match=r"keys\.secret_file: none"):
        from_config(file)


async def test_the_self_test_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def few(say: Any, **_: Any) -> Any:
        return await self_test(say, [plant for plant in PLANTS if plant.name == "salt-ignored"])

    monkeypatch.setattr(command, "self_test", few)
    assert await run("--self-test", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["planted"], found["named"], found["false_alarms"]) == (
        ["salt-ignored"],
        ["salt-ignored"],
        [],
    )
    assert await run("--self-test") == 0
    assert "1 of 1 named, 0 false alarms" in capsys.readouterr().out


# -- what cannot be seen --------------------------------------------------------------------------


def status(report: Report, check: str) -> set[str]:
    return {f.status for f in report.findings if f.check == check}


async def test_nobody_there(client: HttpClient) -> None:
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    cluster = await from_urls(client, "http://127.0.0.1:3", urls, QUICK)
    report = await examine(client, cluster, QUICK)
    assert set(report.counts) == {"not shown"}
    assert not report.sound
    assert all(f.why for f in report.findings)


PARTIAL = {
    "no JSON": b"<html>",
    "no object": b"[]",
    "no choice": b'{"choices":[]}',
    "strange types": b'{"choices":[{"text":7,"logprobs":[]}],"usage":{"prompt_tokens":"9",'
    b'"prompt_tokens_details":3}}',
}


@pytest.mark.parametrize("said", PARTIAL.values(), ids=PARTIAL)
async def test_partial_answers(client: HttpClient, said: bytes) -> None:
    lies = Lies(tell=lambda path, body: said if path.startswith("/v1/c") else body)
    async with Stage(Plan(lies={0: lies, 1: lies})) as stage:
        alone = Cluster(stage.cluster.workers)
        report = await examine(client, alone, Patience(10.0, 0.2))
    seen = ("prefix-cache", "right-answer", "salt", "hits-told", "tokenizer")
    assert [status(report, check) for check in seen] == [{"not shown"}] * len(seen)
    assert not report.sound


@pytest.mark.parametrize("path", ["/tokenize", "/version", "/metrics", "/kv_event_sources"])
async def test_pages_that_are_missing_or_no_pages(client: HttpClient, path: str) -> None:
    checks = {"/tokenize": "tokenizer", "/version": "version", "/metrics": "metrics"}
    check = checks.get(path, "events")
    gone = Lies(tell=lambda asked, body: None if asked == path else body)
    odd = Lies(tell=lambda asked, body: b'{"tokens":"x","version":7}' if asked == path else body)
    for lies in (gone, odd):
        async with Stage(Plan(lies={0: lies, 1: lies})) as stage:
            alone = Cluster(stage.cluster.workers)
            report = await examine(client, alone, Patience(10.0, 0.2))
        assert status(report, check) == {"not shown"}
        assert not report.sound


async def test_without_token_ids_texts_show_hits(client: HttpClient) -> None:
    def tell(path: str, body: bytes) -> bytes | None:
        return None if path == "/tokenize" else body

    async with Stage(Plan(lies={0: Lies(tell=tell), 1: Lies(tell=tell)})) as stage:
        report = await examine(client, Cluster(stage.cluster.workers), Patience(10.0, 0.2))
    seen = ("prefix-cache", "hits-told", "right-answer", "salt", "metrics", "weights")
    assert [status(report, check) for check in seen] == [{"ok"}] * len(seen)
    for check in ("tokenizer", "chat-template", "events"):
        assert status(report, check) == {"not shown"}
    assert "wrong" not in report.counts
    plan = planting.caches_nothing()
    for lies in plan.lies.values():
        lies.tell = tell
    async with Stage(plan) as stage:
        report = await examine(client, Cluster(stage.cluster.workers), Patience(10.0, 0.2))
    assert {f.check for f in report.findings if f.status == "wrong"} == {"prefix-cache"}


def test_texts_keep_to_the_room_there_is() -> None:
    for room in (1, 64, 512, 4096):
        assert len(loose(16, room).split()) * 8 <= max(16, room - 16)
    assert len(loose(500).split()) > 2000
    text = Prompt(loose())
    assert text.another(1) != text.another(2) != text.form
    assert sorted(str(text.another(1)).split()) == sorted(text.text.split())


async def test_a_gateway_of_somebody_else(client: HttpClient) -> None:
    async with Stage(Plan()) as stage:
        urls = [worker.url for worker in stage.cluster.workers]

        async def handle(request: Request, reply: Reply) -> None:
            """Sends all to the first engine, and has no pages of its own."""
            if not request.path.startswith("/v1/"):
                reply.send(404, [])
                return
            got = await client.request(
                request.method,
                urls[0] + request.path,
                body=request.body,
                headers=[(b"content-type", b"application/json")],
            )
            reply.send(got.status, [], got.body)

        router = HttpServer(handle)
        await router.start("127.0.0.1", 0)
        try:
            gateway = f"http://127.0.0.1:{router.port}"
            cluster = await from_urls(client, gateway, urls, QUICK)
            report = await examine(client, cluster, QUICK)
        finally:
            await router.close()
    assert status(report, "routed-hit") == {"ok"}
    assert status(report, "keys") == status(report, "alarms") == {"not applicable"}
    assert "wrong" not in report.counts


async def test_engines_that_only_the_gateway_can_reach(client: HttpClient) -> None:
    async with Stage(Plan()) as stage:
        far = [
            msgspec.structs.replace(worker, url=f"http://127.0.0.1:{port}")
            for port, worker in enumerate(stage.cluster.workers, 1)
        ]
        report = await examine(client, Cluster(tuple(far), stage.cluster.gateway), QUICK)
    assert status(report, "reach") == {"not shown"}
    assert status(report, "routed-hit") == {"ok"}
    assert "wrong" not in report.counts


async def test_of_several_ranks_the_first_is_asked_each_time(client: HttpClient) -> None:
    ranks: list[str] = []

    async def handle(request: Request, reply: Reply) -> None:
        ranks.append(request.header(RANK_HEADER))
        reply.send_json(200, {"choices": [{"text": "a"}]})

    server = HttpServer(handle)
    await server.start("127.0.0.1", 0)
    try:
        one = Target(client, f"http://127.0.0.1:{server.port}", "m")
        assert (await one.complete((1, 2))).text == "a"
        await msgspec.structs.replace(one, ranks=2).complete((1, 2))
    finally:
        await server.close()
    assert ranks == ["", "0"]


async def test_pages_of_a_gateway_that_are_none(client: HttpClient) -> None:
    async def handle(request: Request, reply: Reply) -> None:
        reply.send_json(200, {"workers": 1, "version": "1", "flags": "none"})

    server = HttpServer(handle)
    await server.start("127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.port}"
        report = await examine(client, Cluster(gateway=url), QUICK)
    finally:
        await server.close()
    assert {f.check for f in report.findings if f.status == "ok"} <= {"gateway"}
    assert not report.sound


async def test_an_engine_that_takes_requests_and_answers_none(client: HttpClient) -> None:
    async with Stage(Plan()) as stage:
        stage.engine(0).faults.frozen = "engine"
        alone = Cluster(stage.cluster.workers)
        report = await examine(client, alone, Patience(answer_s=0.3, event_s=0.2))
    frozen = {f.check: f for f in report.findings if f.who == "w0"}
    for check in ("prefix-cache", "right-answer", "salt", "tokenizer", "weights", "events"):
        assert frozen[check].status == "not shown", check
    assert "no answer within 0.3 s" in frozen["prefix-cache"].why
    assert "wrong" not in report.counts
