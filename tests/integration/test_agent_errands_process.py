"""`kvatlas agent where|pull|push|pin|cancel|resize|drain`, of a real agent with a real disk."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import GRID, FakeEngine, hello, tokens_of

from kvatlas.cli.main import main
from kvatlas.connectors.child import free_ports
from kvatlas.core.records import Tier
from kvatlas.dataplane.tiers.base import Finish, Piece
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.validate.exactness_tiers import DISK_BYTES, AgentProcess

BLOCKS = 10
PROMPT = tokens_of(1, BLOCKS * GRID + 5)
END = BLOCKS * GRID

Ask = Callable[..., Any]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    made = AgentProcess(tmp_path)
    made.start()
    yield made
    made.end()


def _file(folder: Path, tokens: bytes) -> str:
    path = folder / "ids.txt"
    path.write_text(" ".join(str(id) for id in array("I", tokens)))
    return str(path)


@pytest.fixture
def ask(agent: AgentProcess, capsys: pytest.CaptureFixture[str]) -> Ask:
    """``kvatlas agent ...``: its JSON, or the line by which it was refused."""

    def run(*words: str) -> Any:
        status = main(["agent", *words, "--socket", str(agent.socket)])
        told = capsys.readouterr()
        if status:
            assert status == 2
            assert told.err.count("\n") == 1
            return told.err
        return json.loads(told.out)

    return run


def test_a_prompt_is_pulled_up_before_it_is_asked_for(
    agent: AgentProcess, ask: Ask, tmp_path: Path
) -> None:
    ids = _file(tmp_path, PROMPT)
    with FakeEngine(agent.socket) as engine:
        assert engine.save("r", PROMPT) == BLOCKS
        agent.wait(lambda status: not status["busy"])
    agent.idle()
    agent.end(signal.SIGKILL)
    agent.start()
    assert "no engine is attached at all" in ask("where", "--tokens", ids)
    with FakeEngine(agent.socket) as engine:
        found = ask("where", "--tokens", ids)
        assert (found["resume_tokens"], found["by_tier"]) == (END, {"disk": END})
        pulled = ask("pull", "--tokens", ids, "--wait", "20")
        assert pulled["under_way"] == 0
        assert pulled["by_tier"] == {"dram": END, "disk": END}
        assert ask("pull", "--tokens", ids)["under_way"] == 0  # there is nothing left to do
        assert engine.load("q", PROMPT) == (END, {"dram": END})
        assert agent.wait(lambda status: True)["errands"] == {}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("pull",), "nothing of this prompt can be resumed from here"),
        (("pin", "--for", "10"), "nothing of this prompt"),
        (("where", "--model", "another"), "no engine is attached that serves 'another'"),
        (("push", "--to", "disk"), "nothing of this prompt"),
    ],
)
def test_what_is_not_held_cannot_be_moved(
    agent: AgentProcess, ask: Ask, tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    with FakeEngine(agent.socket) as engine:
        engine.save("r", PROMPT)
        assert why in ask(*words, "--tokens", _file(tmp_path, tokens_of(9, 4 * GRID)))
        assert agent.wait(lambda status: True)["counts"]["errands_refused"] == 1


def test_where_nothing_is_held_is_an_answer(agent: AgentProcess, ask: Ask, tmp_path: Path) -> None:
    with FakeEngine(agent.socket):
        told = ask("where", "--tokens", _file(tmp_path, PROMPT))
        assert (told["blocks"], told["resume_tokens"], told["by_tier"]) == (BLOCKS, 0, {})
        assert "at least one block" in ask("where", "--tokens", _file(tmp_path, tokens_of(1, 3)))


def test_of_old_and_new_engines_the_prompt_of_either_is_found(
    agent: AgentProcess, ask: Ask, tmp_path: Path
) -> None:
    """While they are exchanged, one name has two kinds of state."""
    ids = _file(tmp_path, PROMPT)
    told = msgspec.structs.replace(hello(), engine_version="0.33.0")

    def where(*words: str) -> Any:
        return ask("where", *words)["resume_tokens"]

    with FakeEngine(agent.socket) as old, FakeEngine(agent.socket, told) as new:
        old.save("r", PROMPT)
        assert where("--tokens", ids) == END
        assert where("--tokens", ids, "--model", "engine#2") == 0
        new.save("n", tokens_of(2, 5 * GRID))
        assert where("--tokens", _file(tmp_path, tokens_of(2, 5 * GRID))) == 5 * GRID
        (order,) = new.orders("k", tokens_of(3, GRID + 1))
        new.client.saved(order.op, new.copy(order))
        file = tmp_path / "keys.txt"
        file.write_text(order.pieces[0].name[:-1].hex())
        assert where("--keys", str(file)) == GRID
        file.write_text("ab" * 16)
        assert "Name one as the model: engine#1, engine#2" in ask("where", "--keys", str(file))
        assert where("--keys", str(file), "--model", "engine#1") == 0


def test_a_pin_has_a_name_and_an_end(agent: AgentProcess, ask: Ask, tmp_path: Path) -> None:
    ids = _file(tmp_path, PROMPT)
    with FakeEngine(agent.socket) as engine:
        engine.save("r", PROMPT)
        agent.wait(lambda status: not status["busy"])
        pinned = ask("pin", "--tokens", ids, "--for", "300", "--name", "system")
        assert pinned["name"] == "system"
        status = agent.wait(lambda status: True)
        assert status["errands"]["system"]["what"] == "pin"
        assert 290 < status["errands"]["system"]["left_s"] <= 300
        dram = status["tiers"]["dram"]
        assert dram["in_use_bytes"] == dram["held_bytes"] > 0
        again = ("pin", "--tokens", ids, "--name", "system")
        assert "'system' is under way" in ask(*again)
        for seconds in ("3601", "inf", "nan", "0", "-1"):
            refused = ask("pin", "--tokens", ids, f"--for={seconds}")
            assert "above 0 and at most 3600 s" in refused
        assert ask("unpin", "system") == {"name": "system", "recalled": True}
        assert agent.wait(lambda status: True)["tiers"]["dram"]["in_use_bytes"] == 0
        assert "no errand 'system'" in ask("cancel", "system")


def test_pins_leave_room_for_others(agent: AgentProcess, ask: Ask, tmp_path: Path) -> None:
    ids = _file(tmp_path, PROMPT)
    with FakeEngine(agent.socket) as engine:
        engine.save("r", PROMPT)
        agent.wait(lambda status: not status["busy"])
        held = agent.wait(lambda status: True)["tiers"]["dram"]["held_bytes"]
        ask("resize", f"dram={held + 1}")
        assert "pins may hold 50% of dram" in ask("pin", "--tokens", ids)


def test_what_is_written_through_may_be_pushed_again_and_no_store_is_told(
    agent: AgentProcess, ask: Ask, tmp_path: Path
) -> None:
    ids = _file(tmp_path, PROMPT)
    with FakeEngine(agent.socket) as engine:
        engine.save("r", PROMPT)
        agent.wait(lambda status: not status["busy"])
        assert ask("push", "--to", "disk", "--tokens", ids)["by_tier"]["disk"] == END
        assert "no tier 'object' to push to" in ask("push", "--tokens", ids)
        assert "'floppy' is no tier" in ask("push", "--to", "floppy", "--tokens", ids)


def test_a_tier_is_resized(agent: AgentProcess, ask: Ask) -> None:
    with FakeEngine(agent.socket) as engine:
        engine.save("r", PROMPT)
        agent.wait(lambda status: not status["busy"])
        before = agent.wait(lambda status: True)["tiers"]["dram"]
        assert "can have 0 to" in ask("resize", "dram=900TB")
        assert "no tier of this node's own" in ask("resize", "object=1GB")
        assert "is no size" in ask("resize", "dram=much")
        for words in ((), ("dram",), ("dram=1GB", "disk=1GB")):
            assert "TIER=SIZE is wanted" in ask("resize", *words)
        assert ask("resize", "dram=0")["capacity_bytes"] == 0
        agent.wait(lambda status: status["tiers"]["dram"]["held_bytes"] == 0)
        assert engine.load("q", PROMPT) == (END, {"disk": END})
        grown = ask("resize", f"dram={before['capacity_bytes']}")
        assert grown["capacity_bytes"] == before["capacity_bytes"]
        assert engine.load("q2", PROMPT)[0] == END


def test_a_disk_gets_back_what_it_was_started_with(agent: AgentProcess, ask: Ask) -> None:
    """Also where its pages leave less than that for units."""
    before = agent.wait(lambda status: True)["tiers"]["disk"]["capacity_bytes"]
    assert ask("resize", "disk=0")["capacity_bytes"] == 0
    assert f"0 to {DISK_BYTES} bytes" in ask("resize", f"disk={DISK_BYTES + 1}")
    assert ask("resize", f"disk={DISK_BYTES}")["capacity_bytes"] == before < DISK_BYTES


def test_no_more_is_booked_than_the_disk_has_segments_for(tmp_path: Path) -> None:
    """They are of 1 GiB each, or one of less."""
    if shutil.disk_usage(tmp_path).free < 3 << 30:
        pytest.skip("a segment of 1 GiB takes too much of what is free on this disk")
    made = AgentProcess(tmp_path, (f"--disk={tmp_path / 'other'}=1500MB",), disk=False)
    made.start()
    try:
        disk = made.wait(lambda status: True)["tiers"]["disk"]
        files = sum(path.stat().st_size for path in (tmp_path / "other").glob("segment-*"))
        assert 0.9 * files < disk["capacity_bytes"] < files == 1 << 30
    finally:
        made.end()


def test_a_node_drains_and_ends(agent: AgentProcess, ask: Ask) -> None:
    with FakeEngine(agent.socket) as engine:
        engine.save("r", PROMPT)
        assert ask("drain")["draining"]
        process = agent._process
        assert process is not None
        assert process.wait(20) == 0
    assert not agent.socket.exists()
    agent.start()
    with FakeEngine(agent.socket) as engine:
        assert engine.load("q", PROMPT) == (END, {"disk": END})


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("pull",), "which prompt?"),
        (("pull", "ids.txt"), "options tell the prompt"),
        (("cancel",), "NAME is wanted"),
        (("drain", "now"), "nothing is wanted"),
        (("status", "all"), "'all' means nothing here"),
        (("pull", "--prompt", "nowhere.txt"), "need --url"),
        (("pull", "--tokens", "ids.txt", "--to", "disk"), "--to is of push alone"),
        (("push", "--tokens", "ids.txt", "--for", "5"), "--for is of pin alone"),
        (("pull", "--keys", "nowhere.txt"), "cannot be read"),
    ],
)
def test_what_cannot_be_asked_is_told_in_one_line(
    ask: Ask, words: tuple[str, ...], why: str
) -> None:
    assert why in ask(*words)


def test_keys_that_are_none_are_told(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    for text in ("", "abc", "g" * 32, "a" * 33):
        file.write_text(text)
        assert "32 hex digits" in ask("pull", "--keys", str(file))


async def test_a_pull_is_called_off_in_mid_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its disk is slow: what arrives after that is not kept, and its room is free."""
    path, ids = tmp_path / "agent.sock", _file(tmp_path, PROMPT)
    settings = Settings(path, 64 << 20, tmp_path / "disk", 256 << 20, secret=b"s" * 32)

    def ask(*words: str) -> Any:
        assert main(["agent", *words, "--socket", str(path)]) == 0
        return json.loads(capsys.readouterr().out)

    async with NodeAgent(settings) as agent:
        serving = asyncio.get_running_loop().create_task(agent.serve())
        core, disk = agent._core, agent._disk
        assert disk is not None
        engine = await asyncio.to_thread(FakeEngine, path)
        await asyncio.to_thread(engine.save, "r", PROMPT)
        await _until(lambda: not core.busy)
        await asyncio.to_thread(ask, "resize", "dram=0")
        await _until(lambda: not core.ledger(Tier.DRAM).usage().committed_bytes)
        await asyncio.to_thread(ask, "resize", f"dram={64 << 20}")

        asked: list[tuple[list[Piece], Finish]] = []
        read, disk.read = disk.read, lambda pieces, done: asked.append((pieces, done))  # type: ignore[method-assign]
        began = await asyncio.to_thread(ask, "pull", "--tokens", ids, "--name", "up")
        assert (began["name"], began["under_way"]) == ("up", 1)
        assert (await asyncio.to_thread(ask, "status"))["errands"]["up"]["under_way"] == 1
        await asyncio.to_thread(ask, "cancel", "up")
        ((pieces, done),) = asked
        read(pieces, done)
        await _until(lambda: not core.busy)
        usage = core.ledger(Tier.DRAM).usage()
        assert (usage.committed_bytes, usage.reserved_bytes, usage.leases) == (0, 0, 0)

        disk.read = read  # type: ignore[method-assign]
        again = await asyncio.to_thread(ask, "pull", "--tokens", ids, "--wait", "20")
        assert again["by_tier"] == {"dram": END, "disk": END}
        await asyncio.to_thread(engine.client.close)
        serving.cancel()


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


def test_what_a_peer_holds_is_pulled_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This node never heard of the prompt: it looks where its engines' requests would."""
    (tmp_path / "secret").write_bytes(b"one secret for both nodes")
    config = tmp_path / "kvatlas.toml"
    config.write_text(f'[keys]\nsecret_file = "{tmp_path}/secret"\n')
    (port,) = free_ports(1)
    nodes = []
    for name, option in (
        ("near", f"--peer=127.0.0.1:{port}"),
        ("far", f"--serve-peers=127.0.0.1:{port}"),
    ):
        (tmp_path / name).mkdir()
        nodes.append(AgentProcess(tmp_path / name, (f"--config={config}", option)))
    near, far = nodes
    ids = _file(tmp_path, PROMPT)
    try:
        far.start()
        near.start()
        with FakeEngine(far.socket) as there, FakeEngine(near.socket) as here:
            assert there.save("r", PROMPT) == BLOCKS
            where = ["agent", "where", "--tokens", ids, "--socket", str(near.socket)]
            assert main(where) == 0
            assert json.loads(capsys.readouterr().out)["by_tier"] == {"peer": END}
            assert main(["agent", "pull", "--wait", "20", *where[2:]]) == 0
            assert json.loads(capsys.readouterr().out)["by_tier"]["dram"] == END
            far.end(signal.SIGKILL)
            assert here.load("q", PROMPT) == (END, {"dram": END})
    finally:
        for node in nodes:
            node.end()
