"""A register of our own in a folder: shared, taken over, never two on the same data."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from register_kit import DEADLINE_S, opened, persistent
from stores_kit import nothing_left, wait_until

from kvatlas.core import register_values as words
from kvatlas.core.register_values import No, Record, Refused
from kvatlas.errors import ConfigError, RegisterError
from kvatlas.service.register_embedded import EmbeddedServer

ASK = words.AskTenants()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with nothing_left():
        yield tmp_path / "register"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_who_comes_second_uses_the_first_ones_server_and_takes_over(folder: Path) -> None:
    one, two = (opened("embedded", folder=str(folder)) for _ in range(2))
    done = await one.ask(words.PutTenants("x", expected=0), DEADLINE_S)
    assert isinstance(done, words.Done)
    told = words.ToldTenants(done.revision, "x")
    assert await two.ask(ASK, DEADLINE_S) == told
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in folder.iterdir():
        assert file.name == "valkey.log" or not file.stat().st_mode & 0o077
    await one.close()
    assert await persistent(two, ASK) == told
    await two.close()
    three = opened("embedded", folder=str(folder))
    assert await three.ask(ASK, DEADLINE_S) == told
    await three.close()


async def test_a_server_that_was_killed_is_started_anew(folder: Path) -> None:
    server = EmbeddedServer(folder)
    await server.awake()
    first = server.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not alive(first))
    await server.awake()
    assert server.pid not in (0, first)
    await server.close()
    await server.close()


async def test_the_server_goes_with_who_started_it_and_the_data_stays(folder: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    other = opened("embedded", folder=str(folder))
    told = await other.ask(ASK, DEADLINE_S)
    assert isinstance(told, words.ToldTenants)
    assert told.text == "of a process that is killed"
    starter.kill()
    starter.wait()
    starter.stdout.close()
    wait_until(lambda: not alive(pid))
    assert await persistent(other, ASK) == told
    await other.close()


STARTER = """
import asyncio, sys
from kvatlas.config_register import RegisterConfig
from kvatlas.core.register_values import PutTenants
from kvatlas.service.register import open_register
register = open_register(RegisterConfig(url="embedded", folder=sys.argv[1]))
async def main():
    await register.ask(PutTenants("of a process that is killed", expected=0), 10.0)
    print(register._embedded.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_full_one_refuses_and_loses_nothing(folder: Path) -> None:
    server = EmbeddedServer(folder, memory_bytes=4 << 20)
    await server.awake()
    register = opened(f"unix://{server.socket}")
    first = await register.ask(words.AskUsage("st"), DEADLINE_S)
    assert isinstance(first, words.ToldUsage)
    known, kept = first.generation, 0
    for batch in range(100):
        records = tuple(
            Record(b"%d-%d" % (batch, i), "a" * 24 + ".1", 1, b"x" * 1000) for i in range(100)
        )
        said = await register.ask(words.Commit("st", known, records), DEADLINE_S)
        if isinstance(said, Refused):
            break
        kept += 100
    assert said == Refused(No.FULL, "the register's server is at its maxmemory")
    usage = await register.ask(words.AskUsage("st"), DEADLINE_S)
    assert isinstance(usage, words.ToldUsage)
    assert usage.records == kept > 0
    gone = await register.ask(words.Withdraw("st", tuple(b"0-%d" % i for i in range(100))), 5.0)
    assert isinstance(gone, words.Done)
    assert isinstance(await register.ask(words.Expire("st", known), DEADLINE_S), words.Done)
    again = await register.ask(words.Commit("st", known + 1, records), DEADLINE_S)
    assert isinstance(again, words.Committed)
    await register.close()
    await server.close()


async def test_a_server_that_cannot_start_says_why(folder: Path) -> None:
    (folder / "appendonlydir").mkdir(parents=True)
    (folder / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    register = opened("embedded", folder=str(folder))
    with pytest.raises(RegisterError, match=r"(?s)its server ended \(1\).*manifest"):
        await register.ask(ASK, DEADLINE_S)
    await register.close()


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for a socket"):
        EmbeddedServer(tmp_path / ("x" * 100))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="File exists"):
        EmbeddedServer(tmp_path / "file")
