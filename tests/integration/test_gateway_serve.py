"""``kvatlas serve`` as a process: its line, its exit statuses, its way out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_kit import (
    STREAM_END,
    STREAM_HEAD,
    WAIT_S,
    Client,
    Engine,
    Got,
    Seen,
    ask,
    chunk,
    eventually,
    whole,
)
from otlp_kit import collecting

from kvatlas.config_tracing import TracingConfig
from kvatlas.connectors.child import free_ports
from kvatlas.errors import ConfigError
from kvatlas.service import tracing_export

CHAT = "/v1/chat/completions"


PLAIN = 'layout = "16"\nevents = ""\n'


def toml(*urls: str, port: int = 0, more: str = "") -> str:
    workers = "".join(
        f'[[worker]]\nname = "w{i}"\nurl = "{u}"\n{PLAIN}' for i, u in enumerate(urls)
    )
    return f"{workers}[gateway]\nport = {port}\n{more}"


async def kvatlas(
    tmp_path: Path, text: str, shell: str = "", more: tuple[str, ...] = ()
) -> asyncio.subprocess.Process:
    path = tmp_path / "kvatlas.toml"
    path.write_text(text)
    command = (sys.executable, "-m", "kvatlas", "serve", "--config", str(path), *more)
    return await asyncio.create_subprocess_exec(
        *("sh", "-c", f'{shell}; exec "$@"', "sh", *command) if shell else command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def fails(tmp_path: Path, text: str) -> str:
    """What it says on stderr when it leaves with status 2."""
    process = await kvatlas(tmp_path, text)
    async with asyncio.timeout(WAIT_S):
        _, err = await process.communicate()
    assert process.returncode == 2
    assert "Traceback" not in err.decode()
    return err.decode()


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path, text: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, str]]:
    process = await kvatlas(tmp_path, text)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found is not None, line
        yield process, int(found[1]), line
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[worker]]\nname = 'a'\nurl = 'http://x'\n\n[gateway]\nprot = 1\n", ":6:.*prot"),
        ("[[worker]]\nname = 'a'\nurl = 'no url'\n", ":3:.*no url"),
        ("[[worker]]\nname = 'a'\nurl = 'ftp://x'\n", "worker 'a'.*ftp://x"),
        ("[gateway]\nport = 'x'\n", "port|worker"),
        ("[gateway\n", "TOML"),
    ],
)
async def test_a_bad_file_names_the_fault(tmp_path: Path, text: str, said: str) -> None:
    assert re.search(said, await fails(tmp_path, text))


async def test_an_address_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} is in use" in await fails(tmp_path, toml("http://x", port=port))


@contextlib.asynccontextmanager
async def streaming_engine() -> AsyncIterator[tuple[Engine, asyncio.Event]]:
    """An engine with the model m whose streams end when the event is set."""
    release = asyncio.Event()

    async def behave(engine: Engine, got: Got, writer: asyncio.StreamWriter) -> None:
        if got.target == "/v1/models":
            writer.write(whole(b'{"object":"list","data":[{"id":"m","object":"model"}]}'))
        elif got.target == "/health":
            writer.write(whole(b""))
        elif got.target != CHAT:
            writer.write(whole(b"{}", 404))
        else:
            writer.write(STREAM_HEAD + chunk(b"data: 1\n\n"))
            await release.wait()
            writer.write(chunk(b"data: [DONE]\n\n") + STREAM_END)

    engine = Engine(behave)
    await engine.start()
    try:
        yield engine, release
    finally:
        release.set()
        await engine.stop()


async def begin(client: Client) -> Seen:
    """A stream whose first event has arrived."""
    await client.send("POST", CHAT, b'{"model":"m","stream":true,"messages":[]}')
    seen = await client.head()
    assert seen.status == 200, await client.rest(seen)
    seen.body += await client.chunk()
    return seen


async def readiness(port: int, status: int) -> None:
    """Waits until /ready answers with ``status``."""
    async with asyncio.timeout(WAIT_S):
        while (seen := await ask(port, "/ready")).status != status:
            assert seen.status in (200, 503)
            await asyncio.sleep(0.01)


async def test_files_enough_for_its_connections(tmp_path: Path) -> None:
    """Else engines could not be reached once clients hold all files, and would be blamed."""
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    for shell, said in (("ulimit -Sn 100", b""), ("ulimit -n 100", b"only 100 files")):
        process = await kvatlas(tmp_path, toml(url, more="max_connections = 60\n"), shell)
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            assert await process.stdout.readline()
            limits = Path(f"/proc/{process.pid}/limits")
            if limits.exists():
                soft = re.search(r"Max open files +(\d+)", limits.read_text())
                assert soft is not None
                assert int(soft[1]) == (100 if said else 1024 + 60 * 2 + 5)
            process.terminate()
            _, err = await process.communicate()
        assert process.returncode == 0
        assert said in err if said else b"files" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_exits_with_0(tmp_path: Path, number: signal.Signals) -> None:
    async with (
        streaming_engine() as (engine, release),
        serving(tmp_path, toml(engine.url)) as (process, port, line),
    ):
        assert "w0" in line
        await readiness(port, 200)
        async with Client.to(port) as client:
            seen = await begin(client)
            process.send_signal(number)
            await readiness(port, 503)
            release.set()
            await client.rest(seen)
            assert seen.complete
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 0


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    async with (
        streaming_engine() as (engine, _),
        serving(tmp_path, toml(engine.url)) as (process, port, _),
        Client.to(port) as client,
    ):
        await readiness(port, 200)
        seen = await begin(client)
        process.send_signal(signal.SIGTERM)
        await readiness(port, 503)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 0
        assert not (await client.rest(seen)).complete


def picker(port: int) -> str:
    return f'[picker]\nlisten = "127.0.0.1:{port}"\n'


async def test_the_endpoint_picker_is_served_beside_it(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with (
        streaming_engine() as (engine, _),
        serving(tmp_path, toml(engine.url, more=picker(port))) as (process, gateway_port, _),
    ):
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            assert f"endpoint picker on port {port}" in (await process.stdout.readline()).decode()
        await readiness(gateway_port, 200)
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S):
            pass
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 0


async def test_the_pickers_address_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = await fails(tmp_path, toml("http://127.0.0.1:1", more=picker(port)))
        assert f"kvatlas: cannot listen on 127.0.0.1:{port}: stop what listens there" in said


async def test_logs_are_lines_of_json_that_name_the_request_and_its_trace(tmp_path: Path) -> None:
    async with streaming_engine() as (engine, release), collecting() as collector:
        release.set()
        text = toml(engine.url, more=f'[tracing]\notlp = "{collector.url}"\n')
        process = await kvatlas(
            tmp_path, text, more=("--log-format", "json", "--log-level", "info")
        )
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            port = int(re.findall(r"http://127\.0\.0\.1:(\d+)", line)[0])
            await readiness(port, 200)
            ours = {"x-request-id": "mine", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
            answer = await ask(port, CHAT, {"model": "m", "messages": []}, headers=ours)
            assert answer.status == 200
            await eventually(lambda: any(span.kind == 2 for span in collector.spans))
            metrics = (await ask(port, "/metrics")).body.decode()
            assert 'kvatlas_traces_total{outcome="exported"}' in metrics
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                _, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        lines = [json.loads(line) for line in err.decode().splitlines()]
        (about,) = [line for line in lines if line.get("request_id") == "mine"]
        assert about["trace_id"] == "ab" * 16
        assert about["message"].startswith(f"POST {CHAT}: 200 in ")
        assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_export, "_NEEDS", "opentelemetry_is_away.exporter")
    with pytest.raises(ConfigError, match=r"pip install 'kvatlas\[otel\]'"):
        tracing_export.Exporter(TracingConfig(otlp="http://127.0.0.1:4318"))
