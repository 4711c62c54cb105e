"""`kvatlas load` against real servers: stub engines, and a server that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvatlas.cli.main import main
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.core.layout import plain
from kvatlas.errors import ConfigError, EngineError
from kvatlas.report.latency import Slo
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.load import LoadPlan, run_load
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.trace import TraceRequest

SPEC = EngineSpec(blocks=4096, prefill_tokens_per_s=1e5, decode_step_s=0.01, time_scale=0.0)
SSE = [(b"content-type", b"text/event-stream")]


def requests(count: int, *, output_tokens: int = 100) -> list[TraceRequest]:
    """Pairs that share their first two blocks; ten a second."""
    return [
        TraceRequest(i, i / 10, 1200, output_tokens, (i // 2, 1000 + i // 2, 2000 + i))
        for i in range(count)
    ]


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[StubCluster]:
    async with StubCluster(StubOptions(plain(16), SPEC, model_name="m")) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def server(answer: object) -> AsyncIterator[str]:
    async def handle(request: Request, reply: Reply) -> None:
        if request.path == "/v1/models":
            reply.send_json(200, {"data": [{"id": "m"}]})
        else:
            await answer(request, reply)  # type: ignore[operator]

    running = HttpServer(handle)
    await running.start()
    try:
        yield f"http://127.0.0.1:{running.port}"
    finally:
        await running.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_replay_counts_tokens_hits_and_times(stream: bool) -> None:
    done: list[None] = []
    async with engine() as cluster:
        plan = LoadPlan(
            cluster.addresses[0].url, time_scale=0.02, max_output_tokens=8, stream=stream
        )
        result = await run_load(plan, requests(20), on_done=lambda: done.append(None))
    latency = result.latency
    assert (latency.requests, latency.failed, len(done)) == (20, 0, 20)
    assert result.plan.model == "m"
    assert latency.duration_s >= 1.9 * 0.02
    assert result.hits.prompt_tokens == 20 * 1200
    assert result.hits.reported_answers == 20
    assert result.hits.reported_tokens == 10 * 1024  # the second of each pair finds two blocks
    assert result.hits.expected_answers == 0
    assert latency.e2e_s.count == 20
    assert latency.output_tokens_per_s == pytest.approx(160 / latency.duration_s)
    assert latency.ttft_s.count == (20 if stream else 0)
    assert latency.itl_s.count == (20 * 7 if stream else 0)


async def test_output_is_capped_by_the_trace_and_by_the_plan() -> None:
    async with engine() as cluster:
        plan = LoadPlan(cluster.addresses[0].url, time_scale=0.0, max_output_tokens=4)
        mixed = [*requests(1, output_tokens=2), *requests(1, output_tokens=0), *requests(1)]
        await run_load(plan, mixed)
        assert cluster.engine(0).numbers().output_tokens == 2 + 1 + 4


async def test_requests_in_flight_are_bounded_and_the_wait_is_told() -> None:
    running = most = 0

    async def slow(request: Request, reply: Reply) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        reply.send_json(200, {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}})

    async with server(slow) as url:
        plan = LoadPlan(url, time_scale=0.0, max_in_flight=3, stream=False)
        result = await run_load(plan, requests(12))
    assert most == 3
    assert result.start_lag_s.max is not None
    assert result.start_lag_s.max >= 0.029
    assert result.latency.e2e_s.max is not None
    assert result.latency.e2e_s.max >= result.start_lag_s.max


async def test_what_the_gateway_says_is_summed() -> None:
    async def gateway(request: Request, reply: Reply) -> None:
        headers = [(b"X-KVAtlas-Expected-Hit-Tokens", b"512"), (b"x-kvatlas-worker", b"w1")]
        reply.start(200, [*SSE, *headers])
        reply.write(b'data: {"choices":[{"text":"a"}]}\n')  # events may come in any pieces
        await asyncio.sleep(0)
        reply.write(b'\ndata: {"choices":[{"text":"b"}]}\n\ndata: {"choices":[],"usage":')
        usage = {"prompt_tokens": 9, "completion_tokens": 2}
        details = {"prompt_tokens_details": {"cached_tokens": 7}}
        reply.write(msgspec.json.encode(usage | details) + b"}\n\n")
        reply.end(b"data: [DONE]\n\n")

    async with server(gateway) as url:
        result = await run_load(LoadPlan(url, time_scale=0.0), requests(3))
    hits = result.hits
    assert (hits.expected_tokens, hits.expected_answers) == (1536, 3)
    assert (hits.reported_tokens, hits.reported_answers, hits.prompt_tokens) == (21, 3, 27)
    assert result.workers == {"w1": 3}
    assert result.latency.itl_s.count == 3


async def test_every_kind_of_failure_is_counted_and_harms_nobody_else() -> None:
    seen = 0

    async def moody(request: Request, reply: Reply) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            reply.send_json(503, {"error": {"message": "no engine left"}})
            return
        if seen == 2:
            await asyncio.sleep(10)
        reply.start(200, SSE)
        reply.write(b'data: {"choices":[{"text":"a"}]}\n\n')
        if seen == 3:
            reply.abort()
        elif seen == 4:
            reply.end(b'data: {"error":{"message":"engine died"}}\n\ndata: [DONE]\n\n')
        elif seen == 5:
            reply.end()
        elif seen == 6:
            reply.end(b'data: {"choices":[],"usage":{garbage\n\ndata: [DONE]\n\n')
        else:
            reply.end(b"data: [DONE]\n\n")

    async with server(moody) as url:
        plan = LoadPlan(url, time_scale=0.0, max_in_flight=1, timeout_s=0.1)
        result = await run_load(plan, requests(9))
    assert result.errors == {
        "broken off": 2,
        "error in answer": 2,
        "http 503": 1,
        "timeout": 1,
    }
    assert "no engine left" in result.error_examples["http 503"]
    assert "engine died" in result.error_examples["error in answer"]
    assert (result.latency.requests, result.latency.failed) == (9, 6)
    assert result.latency.ttft_s.count == 3


async def test_nobody_there() -> None:
    async with server(None) as url:
        pass
    with pytest.raises(EngineError, match=r"127\.0\.0\.1"):
        await run_load(LoadPlan(url), requests(1))
    result = await run_load(LoadPlan(url, model="m", time_scale=0.0), requests(2))
    assert result.errors == {"no connection": 2}
    with pytest.raises(ConfigError, match="nonsense"):
        await run_load(LoadPlan("nonsense"), requests(1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"time_scale": -1.0}, "time scale"),
        ({"time_scale": float("nan")}, "time scale"),
        ({"timeout_s": 0.0}, "timeout"),
        ({"slo": Slo(tpot_s=-1.0)}, "TPOT"),
        ({"vocab_size": 1}, "vocabulary"),
        ({"max_output_tokens": 0}, "max output"),
        ({"max_in_flight": 0}, "in flight"),
        ({"stream": False, "slo": Slo(ttft_s=1.0)}, "needs streaming"),
    ],
)
async def test_plans_that_cannot_work(change: dict[str, object], said: str) -> None:
    plan = msgspec.structs.replace(LoadPlan("http://127.0.0.1:1"), **change)
    with pytest.raises(ConfigError, match=said):
        await run_load(plan, requests(1))


# --- the commands --------------------------------------------------------------------------------


def write_trace(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for r in requests(count, output_tokens=4):
            line = {
                "timestamp": r.arrival_s * 1000,
                "input_length": r.input_tokens,
                "output_length": r.output_tokens,
                "hash_ids": r.hash_ids,
            }
            file.write(json.dumps(line) + "\n")
    return path


async def command(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvatlas",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_load_command_prints_the_table_and_writes_json(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", 10)
    result = tmp_path / "result.json"
    async with engine() as cluster:
        target = cluster.addresses[0].url
        status, out, err = await command(
            *("load", "--trace", str(trace), "--target", target, "--time-scale", "0.01"),
            *("--requests", "6", "--slo-ttft-s", "60", "--json", str(result)),
        )
    assert status == 0, err
    for word in ("TTFT", "TPOT", "ITL", "E2E", "p99", "goodput", "hit tokens reported"):
        assert word in out
    assert "6 of 6" in out
    written = json.loads(result.read_bytes())
    assert written["latency"]["requests"] == 6
    assert written["latency"]["attained"] == 1.0
    assert written["hits"]["reported_tokens"] == 3 * 1024


def test_faults_of_the_input_are_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", 2)
    trace.write_text(trace.read_text() + "not json\n")
    load = ["load", "--target", "http://127.0.0.1:1", "--quiet", "--trace"]
    for arguments, said in (
        ([*load, str(trace)], f"{trace}:3: "),
        ([*load, str(tmp_path / "absent")], "absent"),
        ([*load, str(trace), "--requests", "2"], "127.0.0.1:1"),
        ([*load, str(trace), "--requests", "0"], "--requests 0"),
        ([*load, str(trace), "--block-tokens", "0"], "block_tokens 0"),
        (["stub-engine", "--pool-gib", "inf"], "--pool-gib inf"),
        (["stub-engine", "--pool-tokens", "9" * 16], "at most"),
        (["stub-engine", "--answer-tokens", "0"], "answers of 0 tokens"),
        (["stub-engine", "--layout", "no-such-model"], "no-such-model"),
        (["stub-engine", "--pool-blocks", "1", "--pool-tokens", "1"], "only one of"),
        (["stub-engine", "--retention-tokens", "x"], "--retention-tokens x"),
        (["stub-engine", "--precision", "fp4"], "fp4"),
    ):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("kvatlas: ")
        assert said in captured.err
        assert captured.err.count("\n") == 1


async def test_interrupting_the_load_command_is_quiet(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def never(request: Request, reply: Reply) -> None:
        asked.set()
        await asyncio.Event().wait()

    trace = write_trace(tmp_path / "t.jsonl", 2)
    async with server(never) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvatlas", "load", "--quiet"),
            *("--trace", str(trace), "--target", url, "--model", "m"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # A shell starts what runs in its background with SIGINT ignored: not this child.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            async with asyncio.timeout(30):
                await asked.wait()
                process.send_signal(signal.SIGINT)
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert (process.returncode, out, err) == (130, b"", b"")


def test_help_of_every_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["stub-engine", "--help"], ["load", "--help"]):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 0
        assert "  kvatlas " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["int", "term"]
)
async def test_stub_engine_command_tells_its_ports_and_stops(
    tmp_path: Path, number: int, status: int
) -> None:
    ports = tmp_path / "ports.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvatlas", "stub-engine", "--count", "3", "--layout", "16"),
        *("--time-scale", "0", "--ports-file", str(ports)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            told = json.loads(await process.stdout.readline())
            assert told == json.loads(ports.read_text())
            assert len({e["url"] for e in told["engines"]}) == 3
            plan = LoadPlan(told["engines"][1]["url"], time_scale=0.0, max_output_tokens=2)
            assert (await run_load(plan, requests(40))).errors == {}
            process.send_signal(number)
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, out, err) == (status, b"", b"")
