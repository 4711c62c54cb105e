"""Frames between engines and their node's agent, and the keys that the agent makes of tokens."""

from __future__ import annotations

import asyncio
import os
import socket
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.cli.main import main
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import Chain
from kvatlas.errors import EngineError
from kvatlas.service import agent_socket
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent_socket import Peer, Prompt

RING = Keyring(b"s" * 32)
FP = b"f" * 32
ROOT = RING.root(FP)


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 64))
def test_frames_arrive_whole_however_they_are_cut(tokens: list[bytes], step: int) -> None:
    sent = [wire.Want(f"r{i}", data, i, 1.0) for i, data in enumerate(tokens)]
    data = b"".join(wire.frame(message) for message in sent)
    frames = wire.Frames()
    got = []
    for at in range(0, len(data), step):
        got += [wire.from_engine(body) for body in frames.add(data[at : at + step])]
    assert got == sent


@pytest.mark.parametrize("step", [wire.READ_BYTES // 3, wire.READ_BYTES, 5 * wire.READ_BYTES])
def test_frames_that_are_longer_than_what_comes_at_once(step: int) -> None:
    sizes = [10, 3 * wire.READ_BYTES + 5, wire.READ_BYTES - 40, 0, 2 * wire.READ_BYTES, 7]
    sent = [wire.Want(f"r{i}", os.urandom(size), i, 1.0) for i, size in enumerate(sizes)]
    data = b"".join(wire.frame(message) for message in sent)
    frames = wire.Frames()
    got = []
    for at in range(0, len(data), step):
        got += [wire.from_engine(body) for body in frames.add(data[at : at + step])]
    assert got == sent
    assert len(frames._data) == wire.READ_BYTES, "the room for a long one is given back"


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for read in (wire.from_engine, wire.from_agent):
        try:
            read(data)
        except EngineError:
            continue
        assert data, "nothing is no message"


def test_frames_have_a_limit() -> None:
    with pytest.raises(EngineError, match="at most"):
        wire.frame(wire.Want("r", bytes(wire.FRAME_BYTES_MAX), 0, 1.0))
    with pytest.raises(EngineError, match="at most"):
        list(wire.Frames().add((wire.FRAME_BYTES_MAX + 1).to_bytes(4, "little")))


@given(st.lists(st.integers(0, 40), max_size=10))
def test_keys_do_not_depend_on_how_tokens_come(cuts: list[int]) -> None:
    tokens = array("I", range(sum(cuts))).tobytes()
    prompt = Prompt(Chain(RING, FP, 16), 16, "")
    at = 0
    for cut in cuts:
        prompt.extend(tokens[at * 4 : (at + cut) * 4])
        at += cut
    assert prompt.keys == RING.chain(ROOT, tokens, 16)
    assert prompt.count == sum(cuts)


def test_half_a_token_is_refused() -> None:
    with pytest.raises(EngineError, match="4 bytes"):
        Prompt(Chain(RING, FP, 16), 16, "").extend(b"abc")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dram", "1"], "at least 1 MiB"),
        (["status"], "no agent answers"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--dram", "900PB"], "does not fit"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["agent", "--socket", str(tmp_path / "a.sock"), *options]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no keys.secret_file"),
        ('[keys]\nsecret = "x"\n', "kvatlas.toml:2: unknown key 'keys.secret': did you mean"),
        ('[keys]\nsecret_file = "nowhere"\n', "keys.secret_file: nowhere: No such file"),
    ],
)
def test_a_config_without_a_secret_is_no_config_of_an_agent(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would make keys that nobody else makes. Of the rest of the file it wants nothing."""
    path = tmp_path / "kvatlas.toml"
    path.write_text(text + '[[worker]]\nname = "a"\n')
    assert main(["agent", "--socket", str(tmp_path / "a.sock"), f"--config={path}"]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


async def test_who_does_not_read_loses_its_connection_and_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits for its next message must wake, or what it holds is held for ever."""
    monkeypatch.setattr(agent_socket, "BACKLOG_BYTES_MAX", 100)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        peer = Peer(ours)
        waiting = asyncio.get_running_loop().create_task(
            asyncio.get_running_loop().sock_recv(ours, 1)
        )
        await asyncio.sleep(0)
        peer.send(wire.Status(b"x" * 50))
        assert not peer.slow
        peer.send(wire.Status(b"x" * 50))
        assert peer.slow
        assert await asyncio.wait_for(waiting, 5) == b""
