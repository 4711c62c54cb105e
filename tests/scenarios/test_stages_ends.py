"""Whoever ends ``validate stage`` or ``doctor --self-test`` ends it as with Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer

#: Children inherit what is ignored, as under nohup.
ENDS = [
    number
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if signal.getsignal(number) is not signal.SIG_IGN
]
BREAKS = """
import asyncio, sys
from pathlib import Path
from kvatlas.cli.ending import run_until_ended
from kvatlas.validate.stages.hooks import Hooks

folder = Path(sys.argv[1])
hooks = Hooks(
    {{"store_stop": "{away}", "store_start": f"sleep 0.2; touch {{folder}}/back"}}, timeout_s=20.0
)

async def during():
    print("broken", flush=True)
    await asyncio.sleep(60)

try:
    run_until_ended(hooks.around("store_stop", "store_start", during))
except KeyboardInterrupt:
    print(hooks.done, flush=True)
"""


@pytest.mark.parametrize("number", ENDS)
@pytest.mark.parametrize(
    "away", ["true", "echo broken > TOLD; sleep 60"], ids=["while", "half-way"]
)
def test_what_a_hook_broke_is_mended(tmp_path: Path, number: signal.Signals, away: str) -> None:
    """``half-way``: the hook that breaks is still at it."""
    heard, said = os.pipe()
    code = BREAKS.format(away=away.replace("TOLD", f"/proc/{os.getpid()}/fd/{said}"))
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    if away == "true":
        assert child.stdout.readline() == b"broken\n"
    else:
        assert os.read(heard, 6) == b"broken"
    child.send_signal(number)
    if number != signal.SIGINT:
        child.send_signal(number)  # impatience does not cut short what is being undone
    told, _ = child.communicate(timeout=30)
    os.close(heard)
    os.close(said)
    assert (tmp_path / "back").exists()
    assert told.decode().endswith("'store_start']\n")


@pytest.mark.parametrize("number", ENDS)
async def test_a_stage_that_is_ended_says_how_far_it_came(
    tmp_path: Path, number: signal.Signals
) -> None:
    asked = asyncio.Event()

    async def handle(request: Request, reply: Reply) -> None:
        if request.path == "/v1/models":
            reply.send_json(200, {"data": [{"id": "m"}]})
        elif request.path == "/v1/completions":
            asked.set()
            await asyncio.Event().wait()
        else:
            reply.send(404, [])

    server = HttpServer(handle)
    await server.start("127.0.0.1", 0)
    file = tmp_path / "stage.toml"
    file.write_text(f'name = "x"\n[[engine]]\nname = "e"\nurl = "http://127.0.0.1:{server.port}"\n')
    out = tmp_path / "proof"
    argv = ["validate", "stage", "a", "--file", str(file), "--out", str(out)]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvatlas", *argv), stderr=asyncio.subprocess.PIPE
    )
    await asked.wait()
    child.send_signal(number)
    _, told = await child.communicate()
    await server.close()
    assert child.returncode == 130
    assert "stage a was interrupted" in told.decode()
    assert "one by one until then: 1. Hooks run, all that undo among them: none" in told.decode()
    assert "Traceback" not in told.decode()
    assert list(out.iterdir()) == []


async def test_a_self_test_that_is_ended_says_how_far_it_came(tmp_path: Path) -> None:
    """Its clusters are in folders of their own, which are gone after it."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvatlas", "doctor", "--self-test"),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    while child.returncode is None and not list(tmp_path.iterdir()):
        await asyncio.sleep(0.01)
    child.terminate()
    _, told = await child.communicate()
    assert child.returncode == 130
    assert "the self-test was interrupted: " in told.decode()
    assert "Traceback" not in told.decode()
    assert list(tmp_path.iterdir()) == []
