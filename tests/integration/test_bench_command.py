"""`kvatlas bench` as a command: what it writes, however it ends."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_kit import Between, stubs

from kvatlas.cli.main import main
from kvatlas.service.http import Request


async def command(
    *arguments: str, until: Callable[[], bool] | None = None, end: int = signal.SIGINT
) -> tuple[int, str, str]:
    """Run it; ``until``: end it by the signal ``end`` as soon as that is so."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvatlas", "bench", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        async with asyncio.timeout(60):
            while until is not None and not until():
                await asyncio.sleep(0.005)
            if until is not None:
                process.send_signal(end)
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_command_writes_everything(tmp_path: Path) -> None:
    page, result, lines = tmp_path / "b.html", tmp_path / "b.json", tmp_path / "b.csv"
    async with stubs(2) as cluster:
        one, other = (a.url for a in cluster.addresses)
        status, out, err = await command(
            *("--family", "shared-prompt", "--arm", f"a={one}", "--arm", f"b={other}"),
            *("--rounds", "2", "--requests", "25", "--rate", "400", "--context", "600"),
            *("--max-output", "2", "--slo-ttft-s", "30", "--html", str(page)),
            *("--json", str(result), "--csv", str(lines)),
        )
    assert status == 0, err
    assert "round 2 of 2: b" in err
    for word in ("TTFT p95", "hit tokens", "b against a", "not shown", "reset: verified"):
        assert word in out, out
    written = json.loads(result.read_bytes())
    assert written["outcome"]["rounds"][0]["load"]["latency"]["requests"] == 25
    assert written["findings"]["differences"][0]["verdict"] == "not shown"
    table = list(csv.DictReader(lines.read_text().splitlines()))
    assert len(table) == 100
    assert Counter((r["arm"], r["play"]) for r in table)["b", "round 2"] == 25
    assert all(float(r["ttft_s"]) <= float(r["e2e_s"]) for r in table)
    assert "<script" not in page.read_text()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_an_interrupted_bench_loses_nothing(tmp_path: Path, end: int) -> None:
    if signal.getsignal(end) is signal.SIG_IGN:
        pytest.skip(f"who runs these tests ignores {signal.Signals(end).name}, as by nohup")
    page, lines = tmp_path / "b.html", tmp_path / "b.csv"
    async with stubs() as cluster:
        asked = 0

        def counted(request: Request) -> None:
            nonlocal asked
            asked += request.path == "/v1/completions"

        async with Between(cluster.addresses[0].url, counted) as server:
            status, out, _ = await command(
                *("--family", "shared-prompt", "--target", server.url, "--context", "600"),
                *("--rounds", "50", "--requests", "20", "--rate", "100", "--max-output", "2"),
                *("--html", str(page), "--csv", str(lines)),
                until=lambda: asked > 60,
                end=end,
            )
    assert status == 130
    assert "The bench was interrupted" in out
    assert "not complete" in page.read_text()
    assert len(lines.read_text().splitlines()) > 20


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
async def test_one_file_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    page = tmp_path / "b.html"
    async with stubs() as cluster:
        status, out, err = await command(
            *("--family", "shared-prompt", "--target", cluster.addresses[0].url, "--quiet"),
            *("--rounds", "1", "--requests", "5", "--rate", "400", "--context", "600"),
            *("--csv", "/dev/full", "--html", str(page)),
        )
    assert status == 2
    assert "--csv /dev/full: cannot be written" in err
    assert "TTFT p50" in out
    assert "TTFT p50" in page.read_text()


async def test_a_reader_who_leaves_costs_no_result(tmp_path: Path) -> None:
    lines = tmp_path / "b.csv"
    async with stubs() as cluster:
        read, write = os.pipe()
        os.close(read)  # nobody hears a word
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvatlas", "bench", "--family", "shared-prompt"),
            *("--target", cluster.addresses[0].url, "--rounds", "2", "--requests", "5"),
            *("--rate", "400", "--context", "600", "--csv", str(lines)),
            stdout=write,
            stderr=write,
        )
        os.close(write)
        async with asyncio.timeout(60):
            await process.wait()
    assert len(lines.read_text().splitlines()) == 11


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--family", "nobody", "TARGET"], "use one of random"),
        (["--arm", "http://127.0.0.1:1"], "NAME=VALUE is needed"),
        (["TARGET", "--arm", "a=http://127.0.0.1:1"], "one of the two"),
        ([], "--target URL is needed"),
        (["--arm", "a=http://x", "--arm", "b=http://y", "--engine", "c=http://z"], "no arm c"),
        (["--arm", "a=http://x", "--before", "a=1", "--before", "a=2"], "--before a: given twice"),
        (["TARGET", "--api-key-env", "NOT_THERE"], "holds no key"),
        (["TARGET", "--html", "/"], "is a directory"),
        (["TARGET"], "127.0.0.1:1"),
        (["TARGET", "--context", "0"], "need 2 tokens"),
        (["TARGET", "--knee"], "--knee needs --slo-ttft-s"),
    ],
)
def test_faults_of_the_input_are_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[str] = []
    for word in arguments:
        given += ["--target", "http://127.0.0.1:1"] if word == "TARGET" else [word]
    family = [] if "--family" in given else ["--family", "random"]
    assert main(["bench", "--quiet", *family, *given]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
