"""`kvatlas observe` between clients and somebody's router: nothing changes, and it is recorded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from harness import COMPLETION, WAIT_S, FakeWorker, Product, announce, answer, fresh_tokens, process
from observe_kit import Observed, until
from stub_publisher import BLOCK

from kvatlas.cli.main import main
from kvatlas.config import Config, RouterConfig
from kvatlas.connectors.child import Child, free_ports
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.observe_record import read
from kvatlas.service.observe_runs import Observer, Settings, mirrored

PROMPT = fresh_tokens(100)
ROUND_ROBIN = RouterConfig(policy="round_robin")


def body(prompt: list[int] = PROMPT, **more: object) -> dict[str, object]:
    options = {"include_usage": True}
    whole = {"model": "m", "prompt": prompt, "max_tokens": 4, "stream": True}
    return whole | {"stream_options": options} | more


async def test_engines_and_clients_see_the_same_with_and_without_it(tmp_path: Path) -> None:
    async with (
        FakeWorker("w1") as worker,
        Product([worker.config()], router=ROUND_ROBIN) as router,
    ):
        observed = Observed(router.port, tmp_path / "seen", served_by="x-kvatlas-worker")
        async with observed.watching() as tunnel:
            answers = []
            for port in (router.port, tunnel.port):
                async with router.only_as_client(port):
                    for what in (body(), body(stream=False), b"{", body(max_tokens=0)):
                        headers = {"X-Request-Id": "one", "x-other": "Zwei"}
                        answers.append(await router.post(COMPLETION, what, headers))
                    answers.append(await router.send("GET", "/v1/nothing", b"", headers))
            hidden = {"date"}
            seen = [
                (a.status, {k: v for k, v in a.headers.items() if k not in hidden}, a.body)
                for a in answers
            ]
            assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
        through, direct = worker.got[len(worker.got) // 2 :], worker.got[: len(worker.got) // 2]
        assert [(r.headers, r.body) for r in through] == [(r.headers, r.body) for r in direct]
    rows = observed.recorded.rows
    assert len(rows) == 2
    assert {row.observed.engine for row in rows} == {"w1"}
    assert [row.observed.ttft_s > 0 for row in rows] == [True, False]  # whole: nobody saw it
    assert observed.summary.lost == {"no JSON object": 1, "status 400": 1}


@pytest.mark.parametrize("header", ["x-kvatlas-worker", ""])
async def test_what_was_missed_on_the_real_state_is_seen(tmp_path: Path, header: str) -> None:
    """The router takes engines in turn: the second request finds nothing where it is sent, while
    the other engine holds its prompt. Who served is told by a header, else by the events."""
    decided_of: Callable[[], int] = lambda: 0  # noqa: E731

    async def keeps(worker: FakeWorker, request: Request, reply: Reply) -> None:
        """An engine that caches what it computes, and takes longer than the shadow to decide."""
        await until(lambda: decided_of() >= len(w1.got) + len(w2.got))
        ids = array("I", json.loads(request.body)["prompt"]).tobytes()
        if worker.cached_tokens == 0:
            announce(worker.events, ids, worker.name)
        await answer(worker, request, reply)
        worker.cached_tokens = 96

    async with (
        FakeWorker("w1", keeps) as w1,
        FakeWorker("w2", keeps) as w2,
        Product([w1.config(), w2.config()], router=ROUND_ROBIN) as router,
    ):
        config = Config(worker=(w1.config(), w2.config()))
        observed = Observed(router.port, tmp_path / "seen", served_by=header, config=config)
        async with observed.watching() as tunnel, router.only_as_client(tunnel.port):
            live = observed.observer.live
            assert live is not None
            decided_of = lambda: live.assembly.dispatcher.decisions  # noqa: E731
            feed, held = live.assembly.feed, live.assembly.directory
            await until(lambda: all(s.connected for s in feed.status()) and len(feed.status()) == 2)
            await w1.heard()
            await w2.heard()
            for turn, engines_that_hold in enumerate((1, 2, 2)):
                blocks = engines_that_hold * (len(PROMPT) // BLOCK)
                assert (await router.post(COMPLETION, body())).status == 200
                await until(lambda turn=turn: len(_lines(tmp_path / "seen")) > turn)
                await until(lambda blocks=blocks: held.holders == blocks)
    rows = observed.recorded.rows
    decided = [row.observed.decided for row in rows]
    assert all(what is not None for what in decided)
    elsewhere = [what.elsewhere_tokens for what in decided if what]
    assert elsewhere == [0, 96, 96 if header else -1]
    assert [row.observed.cached_tokens for row in rows] == [0, 0, 96]
    engines = [row.observed.engine for row in rows]
    assert set(engines[:2]) == {"w1", "w2"}
    assert decided[1] is not None
    assert decided[1].engine == engines[0]  # who holds it
    if header:
        assert decided[1].there_resume_tokens == 0
        assert engines[2] == engines[0]
    else:
        assert engines[2] == ""  # nothing new was announced: it is not known
        assert [row.observed.told for row in rows] == ["events", "events", ""]


def _lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines() if file.exists() else []


async def test_a_mirror_is_answered_at_once_and_recorded(tmp_path: Path) -> None:
    file = tmp_path / "seen"
    settings = Settings(record=str(file), mode="mirror", started_s=time.monotonic())
    async with (
        Observer(settings) as observer,
        mirrored(observer, "127.0.0.1", 0) as server,
        Product([]).only_as_client(server.port) as client,
    ):
        one = await client.post(COMPLETION, body())
        other = await client.post("/v1/chat/completions", b"what is this")
        assert [(a.status, a.body) for a in (one, other)] == [(200, b"")] * 2
    recorded = read(file)
    assert [(r.input_length, r.output_length) for r in recorded.rows] == [(100, 4)]
    assert recorded.rows[0].observed.ttft_s == -1.0
    assert observer.summary().lost == {"no JSON object": 1}


# The command, as a process -----------------------------------------------------------------------


def front(folder: Path, router: str, *more: str) -> Child:
    (port,) = free_ports(1)
    command = ["observe", "front", "--router", router, "--listen", f"127.0.0.1:{port}"]
    command += ["--record", str(folder / "seen"), *more]
    return process(folder, *command, url=f"http://127.0.0.1:{port}", health="/v1/models")


def ended(child: Child) -> int:
    os.kill(child.pid, signal.SIGTERM)
    assert child._process is not None
    return child._process.wait(WAIT_S)


async def test_the_path_outlives_what_looks_at_it(tmp_path: Path) -> None:
    async with FakeWorker("w1") as worker:
        child = front(tmp_path, worker.config().url, "--drain-s", "0")
        try:
            await asyncio.to_thread(child.wait_ready, WAIT_S)
            port = int(child.url.rpartition(":")[2])
            async with Product([]).only_as_client(port) as client:
                assert (await client.post(COMPLETION, body())).status == 200
                await until(lambda: bool(_lines(tmp_path / "seen")))
                recorders = [
                    p
                    for p in psutil.Process(child.pid).children()
                    if "spawn_main" in str(p.cmdline())
                ]
                assert len(recorders) == 1
                recorders[0].kill()
                await until(lambda: b"none is recorded" in child.log.read_bytes())
                assert (await client.post(COMPLETION, body())).status == 200
            assert await asyncio.to_thread(ended, child) == 1
        finally:
            child.stop()
    assert len(read(tmp_path / "seen").rows) == 1


async def test_the_command_records_until_it_is_told_to_end(tmp_path: Path) -> None:
    async with FakeWorker("w1") as worker:
        child = front(tmp_path, worker.config().url, "--drain-s", "0")
        try:
            await asyncio.to_thread(child.wait_ready, WAIT_S)
            port = int(child.url.rpartition(":")[2])
            async with Product([]).only_as_client(port) as client:
                for _ in range(3):
                    assert (await client.post(COMPLETION, body())).status == 200
            assert await asyncio.to_thread(ended, child) == 0
        finally:
            child.stop()
    assert "3 requests in" in child.log.read_text()
    assert len(read(tmp_path / "seen").rows) == 3


def test_told_to_end_before_it_listens_it_ends_quietly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[bool] = []

    class Slow:
        async def ready(self, _: float) -> bool:
            os.kill(os.getpid(), signal.SIGTERM)
            return await asyncio.Future[bool]()

        async def end(self) -> None:
            killed.append(True)

    ours, theirs = socket.socketpair()
    monkeypatch.setattr("kvatlas.cli.observe.beside", lambda _: (Slow(), ours))
    command = ["observe", "front", "--router", "http://127.0.0.1:1"]
    with theirs:
        assert main([*command, "--record", str(tmp_path / "seen")]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("kvatlas observe: starting")
    assert "ended before it listened" in told.out
    assert (told.err, killed) == ("", [True])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--router", "https://h"], "only http:// URLs"),
        (["--router", "http://h:1/path"], "can have no path"),
        (["--router", "http://h:1", "--listen", "9000"], "HOST:PORT"),
        (["--router", "http://h:1", "--block-tokens", "24"], "a power of two"),
        (["--router", "http://h:1", "--max-bytes", "0"], "at least 1"),
        (["--router", "http://h:1", "--config", "nowhere"], "cannot be read"),
        (["--router", "http://h:1", "--record", "."], "exists already"),
    ],
)
def test_options_that_cannot_be_are_told(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["observe", "front", "--record", str(tmp_path / "seen"), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "seen").exists()


def test_a_log_is_recorded_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text(json.dumps({"ts": 1, "body": body(), "ttft_s": 0.1}) + "\n{\n")
    assert main(["observe", "log", str(log), "--record", str(tmp_path / "seen")]) == 0
    told = capsys.readouterr()
    assert "1 requests in" in told.out
    assert "1 not in it: line: no JSON" in told.out
    assert f"the first: {log}:2: no JSON" in told.err
    assert read(tmp_path / "seen").about.mode == "log"
