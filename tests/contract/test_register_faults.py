"""Registers that are late, wrong, or not there: each question ends, with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from register_kit import DEADLINE_S, Both, join, member, opened, persistent
from stores_kit import Proxy, Server, nothing_left, start_valkey
from tls_kit import Authority
from valkey import Valkey

from kvatlas.config_register import Place
from kvatlas.core import register_values as words
from kvatlas.core.register_values import Question
from kvatlas.errors import ConfigError, RegisterError
from kvatlas.service import register as service
from kvatlas.service.register import ValkeyRegister
from kvatlas.service.register_servers import Servers

ASK = words.AskFloors()
NOTHING = words.ToldFloors(0, None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = start_valkey(tmp_path_factory.mktemp("valkey"))
    yield made
    made.kill()


@pytest.fixture
def admin(server: Server) -> Iterator[Valkey]:
    with Valkey(port=server.port) as client:
        yield client


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with nothing_left():
        made = Proxy(server.port)
        yield made
        made.close()


async def fault(
    register: ValkeyRegister, question: Question = ASK, deadline_s: float = DEADLINE_S
) -> tuple[str, str]:
    """The reason of the error that an ask ends with, and its text; it is closed."""
    with pytest.raises(RegisterError) as caught:
        await register.ask(question, deadline_s)
    await register.close()
    return caught.value.reason, str(caught.value)


async def test_late_answers_are_none_and_nothing_piles_up(proxy: Proxy) -> None:
    register = opened(f"valkey://127.0.0.1:{proxy.port}")
    await register.ask(ASK, DEADLINE_S)
    proxy.stalled.set()
    began = time.monotonic()
    asks = [register.ask(ASK, 0.3) for _ in range(100)]
    ends = await asyncio.gather(*asks, return_exceptions=True)
    assert time.monotonic() - began < 2.0
    assert {getattr(end, "reason", end) for end in ends} == {"late"}
    proxy.stalled.clear()
    assert await persistent(register, ASK) == NOTHING
    await register.close()


async def test_a_late_answer_is_not_taken_for_the_next_ones(proxy: Proxy) -> None:
    both = Both(opened(f"valkey://127.0.0.1:{proxy.port}", "mixed"))
    await both.ask(join(member()))
    for _ in range(5):
        proxy.slow.set()  # a kilobyte at a time: the answer is under way when it is given up
        with contextlib.suppress(RegisterError):
            await both.real.ask(words.AskFloors(), 0.005)
        proxy.slow.clear()
        await both.ask(words.AskTenants())
        await both.ask(words.AskUsage("st"))
    await both.real.close()


async def test_only_so_many_wait(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ASKED_MAX", 20)
    register = opened(f"valkey://127.0.0.1:{proxy.port}")
    await register.ask(ASK, DEADLINE_S)
    proxy.stalled.set()
    ends = await asyncio.gather(
        *(register.ask(ASK, 0.3) for _ in range(50)), return_exceptions=True
    )
    said = [getattr(end, "reason", end) for end in ends]
    assert (said.count("late"), said.count("busy")) == (20, 30)
    await register.close()


async def test_answers_that_break_off(proxy: Proxy) -> None:
    register = opened(f"valkey://127.0.0.1:{proxy.port}")
    await register.ask(ASK, DEADLINE_S)
    proxy.cut = 0
    with pytest.raises(RegisterError, match="register 'kvatlas' at valkey://127"):
        await register.ask(ASK, DEADLINE_S)
    proxy.cut = None
    assert await persistent(register, ASK) == NOTHING
    await register.close()


INFO = b"$%d\r\n%b\r\n" % (
    len(b"maxmemory_policy:noeviction\r\n"),
    b"maxmemory_policy:noeviction\r\n",
)


@contextlib.asynccontextmanager
async def saying(answer: Callable[[bytes], bytes]) -> AsyncIterator[str]:
    """The URL of a server that answers commands as told, by their first word."""

    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, ValueError):
            while line := await reader.readline():
                parts = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    parts.append((await reader.readexactly(size + 2))[:-2])
                writer.write(answer(parts[0]))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    yield f"valkey://127.0.0.1:{port}"
    listening.close()
    await asyncio.gather(*(task for task in serving if task is not None))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"\0\xffgarbage\r\n", "wrong"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "wrong"),
        (b"+OK\r\n", "wrong"),
        (b":7\r\n", "wrong"),
        (b"*2\r\n:1\r\n$6\r\njoined\r\n", "wrong"),
        (b"*4\r\n:1\r\n$6\r\nfloors\r\n$1\r\n7\r\n*0\r\n", "wrong"),
        (b"*4\r\n:1\r\n$6\r\nfloors\r\n:7\r\n*1\r\n$1\r\nx\r\n", "wrong"),
        (b"*4\r\n:1\r\n$7\r\nrefused\r\n$4\r\nwhat\r\n$0\r\n\r\n", "wrong"),
        (b"*0\r\n", "wrong"),
        (b"$-1\r\n", "wrong"),
        (b"$100\r\nshort", "late"),
        (b"-LOADING Valkey is loading the dataset in memory\r\n", "loading"),
        (b"-BUSY Valkey is busy running a script\r\n", "busy"),
        (b"-MISCONF Errors writing to the AOF file: No space left on device\r\n", "full"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "full"),
        (b"-NOREPLICAS Not enough good replicas to write.\r\n", "read_only"),
        (b"-READONLY You can't write against a read only replica.\r\n", "read_only"),
        (b"-CLUSTERDOWN The cluster is down\r\n", "moving"),
        (b"-ASK 8 127.0.0.1:1\r\n", "moving"),
        (b"-NOPERM this user has no permissions\r\n", "denied"),
        (b"-ERR unknown command 'FCALL'\r\n", "unfit"),
        (b"-ERR WRONGTYPE Operation against a key\r\n", "wrong"),
    ],
)
async def test_answers_that_are_none(said: bytes, reason: str) -> None:
    with nothing_left():
        async with saying(lambda word: INFO if word == b"INFO" else said) as url:
            assert (await fault(opened(url), deadline_s=0.3))[0] == reason


async def test_sent_in_a_circle() -> None:
    async with saying(lambda word: INFO if word == b"INFO" else b"-MOVED 1 :%d\r\n" % port) as url:
        port = int(url.rpartition(":")[2])
        assert (await fault(opened(url)))[0] == "moving"


async def test_who_may_not_is_told_so_without_the_password(server: Server, admin: Valkey) -> None:
    at = f"127.0.0.1:{server.port}"
    admin.execute_command("ACL", "SETUSER", "weak", "on", ">sesame", "~x", "+info")
    reason, text = await fault(opened(f"valkey://weak:wrong-one@{at}"))
    assert reason == "denied"
    assert "wrong-one" not in text
    assert (await fault(opened(f"valkey://weak:sesame@{at}")))[0] == "denied"
    rights = ["+info", "+fcall", "+function|load", "~kvatlas:{kvatlas}:*"]
    admin.execute_command("ACL", "SETUSER", "half", "on", ">sesame", *rights)
    reason, text = await fault(opened(f"valkey://half:sesame@{at}"), join(member()))
    assert reason == "denied"  # what the functions call counts as the user's own
    assert "ACL" in text
    rights += ["+time", "+@hash", "+@sortedset", "+@string", "+unlink"]
    admin.execute_command("ACL", "SETUSER", "just", "on", ">sesame", *rights)
    register = opened(f"valkey://just:sesame@{at}")
    for question in (join(member()), words.PutTenants("x", expected=0), words.Expire("st", 1)):
        assert not isinstance(await register.ask(question, DEADLINE_S), words.Refused)
    await register.close()
    assert (await fault(opened(f"valkey://just:sesame@{at}", "another"), join(member())))[0] == (
        "denied"
    )


async def test_functions_that_somebody_flushed_are_there_again(
    server: Server, admin: Valkey
) -> None:
    both = Both(opened(f"valkey://127.0.0.1:{server.port}", "flushed"))
    await both.ask(words.PutTenants("x", expected=0))
    admin.function_flush()
    await both.ask(words.AskTenants())
    await both.real.close()


async def test_keys_of_somebody_else_are_not_read(server: Server, admin: Valkey) -> None:
    admin.set("kvatlas:{taken}:head", "x")
    reason, text = await fault(opened(f"valkey://127.0.0.1:{server.port}", "taken"), join(member()))
    assert reason == "wrong"
    assert "WRONGTYPE" in text


async def test_a_replica_and_a_server_that_drops_keys_are_refused(
    server: Server, admin: Valkey, tmp_path: Path
) -> None:
    replica = start_valkey(tmp_path, "--replicaof", f"127.0.0.1 {server.port}")
    try:
        assert (await fault(opened(f"valkey://127.0.0.1:{replica.port}")))[0] == "read_only"
    finally:
        replica.kill()
    admin.config_set("maxmemory-policy", "allkeys-lru")
    try:
        reason, text = await fault(opened(f"valkey://127.0.0.1:{server.port}"))
    finally:
        admin.config_set("maxmemory-policy", "noeviction")
    assert reason == "unfit"
    assert "set noeviction" in text


async def test_one_that_comes_back_empty_has_another_life(tmp_path: Path) -> None:
    first = start_valkey(tmp_path)
    try:
        with nothing_left():
            register = opened(f"valkey://127.0.0.1:{first.port}")
            one = await register.ask(join(member()), DEADLINE_S)
            first.kill()
            with pytest.raises(RegisterError) as caught:
                await register.ask(ASK, DEADLINE_S)
            assert caught.value.reason == "gone"
            with pytest.raises(RegisterError, match="Connect call failed"):
                await register.ask(ASK, DEADLINE_S)
            first = start_valkey(tmp_path, port=first.port)
            two = await persistent(register, join(member()))
            assert isinstance(one, words.Joined)
            assert isinstance(two, words.Joined)
            assert two.created != one.created
            assert two.members_rev > one.members_rev
            await register.close()
    finally:
        first.kill()


async def test_over_tls(server: Server, tmp_path: Path) -> None:
    ours, other = (Authority(tmp_path / name) for name in ("ours", "other"))
    proxy = Proxy(server.port, ours.trust("engine", "valkey").server)
    url = f"valkeys://127.0.0.1:{proxy.port}"
    register = opened(url, ca=ours.ca)
    await register.ask(ASK, DEADLINE_S)
    await register.close()
    for stranger in (opened(url, ca=other.ca), opened(url)):
        reason, text = await fault(stranger)
        assert reason == "gone"
        assert "certificate verify failed" in text
    assert (await fault(opened(f"valkey://127.0.0.1:{proxy.port}"), deadline_s=1.0))[0] in (
        "gone",
        "late",
        "wrong",
    )
    with pytest.raises(ConfigError, match=r"none\.pem"):
        opened(url, ca=str(tmp_path / "none.pem"))
    proxy.close()


async def test_a_password_in_a_file(tmp_path: Path) -> None:
    secure = start_valkey(tmp_path, "--requirepass", "pä:ss@/")
    (tmp_path / "password").write_text("pä:ss@/\n")
    try:
        register = opened(
            f"redis://127.0.0.1:{secure.port}/3", password_file=str(tmp_path / "password")
        )
        await register.ask(ASK, DEADLINE_S)
        await register.close()
        register = opened(f"redis://:p%C3%A4%3Ass%40%2F@127.0.0.1:{secure.port}")
        await register.ask(ASK, DEADLINE_S)
        await register.close()
    finally:
        secure.kill()
    with pytest.raises(ConfigError, match=r"register\.password_file"):
        opened("valkey://127.0.0.1", password_file=str(tmp_path / "none"))


async def test_files_that_are_gone_and_a_register_that_is_closed_are_said() -> None:
    asked = 0

    async def awake() -> None:
        nonlocal asked
        asked += 1
        raise ConfigError("tls.ca: no such file")

    register = ValkeyRegister(Servers(Place(path="/nowhere"), "key", awake=awake), "test")
    reason, text = await fault(register)
    assert (reason, "no such file" in text) == ("unfit", True)
    reason, text = await fault(register)
    assert (reason, "closed" in text, asked) == ("gone", True, 1)
