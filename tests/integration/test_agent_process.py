"""A real agent process and engines without a model: restarts, kills, damage and bad messages."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_engine
import msgspec
import pytest
from fake_engine import GRID, FakeEngine, hello, tokens_of

from kvatlas.connectors.agent_client import Refusal
from kvatlas.dataplane.arena import SHARED_MEMORY
from kvatlas.service import agent_wire as wire
from kvatlas.validate.exactness_tiers import AgentProcess, _flip_arena, _flip_disk

PROMPT = tokens_of(1, 10 * GRID + 5)
END = 10 * GRID


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    made = AgentProcess(tmp_path)
    made.start()
    yield made
    made.end()


def test_what_one_engine_saves_another_resumes_from(agent: AgentProcess) -> None:
    with FakeEngine(agent.socket) as first:
        assert first.load("r", PROMPT) == (0, {})
        assert first.save("r", PROMPT) == 10
        assert first.save("again", PROMPT) == 0
    with FakeEngine(agent.socket) as second:
        assert second.load("q", PROMPT) == (END, {"dram": END})
        assert second.load("longer", PROMPT + tokens_of(7, GRID)) == (END, {"dram": END})
        assert second.load("other", tokens_of(2, 10 * GRID)) == (0, {})
        # One token must be computed: the last block of a prompt that ends with it is no help.
        assert second.load("cut", PROMPT[: END * 4]) == (END - GRID, {"dram": END - GRID})
    status = agent.idle()
    assert status["loaded_tokens"] == {"dram": 3 * END - GRID, "dram_unused": END}
    assert status["staged"] == 0


def test_a_killed_agent_knows_what_is_on_its_disk(
    agent: AgentProcess, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(agent.socket)
    engine.save("r", PROMPT)
    agent.wait(lambda status: not status["busy"])
    agent.end(signal.SIGKILL)
    assert not engine.client.want("late", PROMPT, 0, 1.0) or engine.client.staged("late") is None
    agent.start()
    engine.client._retry = 0.0
    assert engine.load("q", PROMPT) == (END, {"disk": END})
    assert engine.client.counts["agent_lost"] == 1
    assert caplog.messages == [
        f"the agent at {agent.socket} is lost: all is computed until it is back"
    ]
    engine.client.close()


def test_an_engine_that_is_killed_in_mid_copy_leaves_nothing(agent: AgentProcess) -> None:
    with subprocess.Popen(
        [sys.executable, fake_engine.__file__, str(agent.socket)], stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"copying\n"
            assert agent.wait(lambda status: True)["busy"] == 1
        finally:
            child.kill()
    status = agent.idle()
    assert status["tiers"]["dram"]["held_bytes"] == 0
    assert status["tiers"]["disk"]["quarantined_bytes"] == 0
    assert status["counts"]["save_given_up"] == 1
    with FakeEngine(agent.socket) as other:
        assert other.save("r", tokens_of(1, 200)) == 200 // GRID


def test_an_agent_that_is_killed_in_mid_save_holds_nothing_of_it(agent: AgentProcess) -> None:
    engine = FakeEngine(agent.socket)
    (order,) = engine.orders("r", PROMPT)
    sums = engine.copy(order)
    agent.end(signal.SIGKILL)
    engine.client.saved(order.op, sums)  # nobody hears it
    agent.start()
    engine.client._retry = 0.0
    assert engine.load("q", PROMPT) == (0, {})
    assert engine.save("q2", PROMPT) == 10
    engine.client.close()


def test_flipped_bytes_in_memory_are_a_recompute(agent: AgentProcess) -> None:
    with FakeEngine(agent.socket) as engine:
        engine.save("r", PROMPT)
        agent.wait(lambda status: not status["busy"])
        _flip_arena(agent)
        assert engine.load("q", PROMPT) == (0, {})
        assert agent.wait(lambda status: True)["counts"]["damaged"] == 10


def test_flipped_bytes_on_disk_are_a_recompute(agent: AgentProcess) -> None:
    with FakeEngine(agent.socket) as engine:
        engine.save("r", PROMPT)
    agent.idle()
    agent.end(signal.SIGKILL)
    _flip_disk(agent)
    agent.start()
    with FakeEngine(agent.socket) as engine:
        assert engine.load("q", PROMPT) == (0, {})
        assert engine.save("q", PROMPT) == 10
        assert engine.load("q", PROMPT) == (END, {"dram": END})
    assert agent.idle()["counts"]["damaged"] == 10


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"engine_version": "0.33.0"}, "engine_version 0.33.0, 0.32.0"),
        ({"weights_digest": "new"}, "weights_digest new, unknown"),
        ({"block_tokens": 64}, "grid_tokens 64, 32"),
        ({"ranks": 2}, "tensor_parallel 2, unknown"),
    ],
)
def test_old_and_new_engines_of_one_name_live_side_by_side(
    agent: AgentProcess, changed: dict[str, Any], reason: str
) -> None:
    """A rolling upgrade: each finds what its own kind saved, and never what the other did."""
    told = msgspec.structs.replace(hello(), **changed)
    other = tokens_of(2, 4 * 64 + 1)
    with FakeEngine(agent.socket) as old:
        assert old.save("r", PROMPT) == 10
        with FakeEngine(agent.socket, told) as new:
            status = agent.wait(lambda status: True)
            assert status["counts"]["not_shared"] == 1
            assert reason in status["not_shared"]["engine#2"]
            assert new.load("q", PROMPT) == (0, {})
            new.save("r", PROMPT)
            assert new.load("q2", PROMPT) == (END, {"dram": END})
            assert new.save("o", other) > 0
            assert old.load("q", PROMPT) == (END, {"dram": END})
            assert old.load("o", other) == (0, {})
        with FakeEngine(agent.socket, told) as newer:  # old ones still run
            assert newer.load("q", other) == (4 * 64, {"dram": 4 * 64})
    agent.idle()
    with FakeEngine(agent.socket, told) as last:
        assert last.load("q", PROMPT) == (END, {"dram": END})
    status = agent.idle()
    assert status["counts"].get("damaged", 0) == status["staged"] == 0
    assert status["not_shared"] == {}


def test_an_engine_of_another_version_of_the_wire_is_told(agent: AgentProcess) -> None:
    with pytest.raises(Refusal, match="version 99"):
        FakeEngine(agent.socket, hello(version=99))


def test_bad_messages_end_their_connection_and_nothing_else(agent: AgentProcess) -> None:
    mamba = b'{"model_type": "mamba"}'
    bad = [
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 5) + b"hello",
        wire.frame(wire.End("r")),
        wire.frame(wire.Saved(1, ())),
        wire.frame(wire.Map(7)),
        wire.frame(wire.Hello(1, "m", ("m",), b"\xff{", "vllm", "", "auto", 32)),
        wire.frame(wire.Hello(1, "m", ("m",), mamba, "vllm", "", "auto", 32)),
        wire.frame(wire.Hello(1, "m", ("m",), b"[]", "vllm", "", "auto", -1)),
    ]
    for data in bad:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(agent.socket))
            sock.sendall(data)
            answer = sock.recv(1 << 16)
            assert isinstance(wire.from_agent(answer[4:]), wire.Refused)
            assert sock.recv(1) == b""
    with FakeEngine(agent.socket) as engine:
        assert engine.save("r", PROMPT) == 10
    assert agent.idle()["counts"]["bad_messages"] == len(bad)


def test_saves_of_unknown_or_untrue_prompts_are_not_ordered(agent: AgentProcess) -> None:
    with FakeEngine(agent.socket) as engine:
        client = engine.client
        client._sent["never asked"] = 0
        filled = wire.Filled("never asked", 0, b"", 10, (), 0, 325)
        assert client.filled(filled, memoryview(PROMPT)) == ()
        engine.want("r", PROMPT)
        beyond = wire.Filled("r", 0, b"", 1 << 40, (-5, 1 << 40), -1, -1)
        (order,) = client.filled(beyond, memoryview(PROMPT))
        assert len(order.pieces) == 10
        client.saved(order.op, ((b"another name", b"x" * 16),))
        assert engine.load("q", PROMPT) == (0, {})
        client.saved(order.op, ())
        client.saved(-1, ())
    assert agent.idle()["counts"]["saved_too_late"] == 2


def test_an_agent_that_hangs_holds_nobody_up(agent: AgentProcess) -> None:
    with FakeEngine(agent.socket) as engine:
        engine.save("r", PROMPT)
        client = engine.client
        client._answer_s = 0.01
        assert agent._process is not None
        agent._process.send_signal(signal.SIGSTOP)
        try:
            assert client.want("q", PROMPT, 0, 0.05)
            assert client.waits("q")
            filled = wire.Filled("q", 0, b"", 10, (), 0, 325)
            began = time.monotonic()
            for _ in range(100):
                assert client.filled(filled, memoryview(PROMPT)) == ()
            assert time.monotonic() - began < 0.5
            while time.monotonic() - began < 0.1:
                assert client.staged("q") is None
            assert not client.waits("q")
            assert client.counts == {"orders_missed": 1, "loads_late": 1}
        finally:
            agent._process.send_signal(signal.SIGCONT)
        agent.wait(lambda status: not status["busy"])
        assert client.staged("q") is None
        assert engine.load("q2", PROMPT) == (END, {"dram": END})
    assert agent.idle()["staged"] == 0


def test_two_engines_that_fill_one_prompt_save_it_once(agent: AgentProcess) -> None:
    with FakeEngine(agent.socket) as first, FakeEngine(agent.socket) as second:
        (order,) = first.orders("r", PROMPT)
        assert second.orders("r", PROMPT) == ()  # it is being written
        first.client.saved(order.op, first.copy(order))
        assert second.load("q", PROMPT) == (END, {"dram": END})
    status = agent.idle()
    assert status["tiers"]["dram"]["held_bytes"] == sum(p.slot.size_bytes for p in order.pieces)
    assert status["counts"].get("save_after_the_step", 0) <= 1  # what it wished is there now


def test_an_agent_that_is_killed_in_mid_commit_holds_all_or_less(agent: AgentProcess) -> None:
    """Killed while its disk writes: what is found after that is whole, as `load` looks at it."""
    found = set()
    for turn in range(5):
        prompt = tokens_of(100 + turn, 200 * GRID + 5)
        engine = FakeEngine(agent.socket)
        engine.save("r", prompt)
        agent.end(signal.SIGKILL)
        engine.client.close()
        agent.start()
        with FakeEngine(agent.socket) as other:
            position, tiers = other.load("q", prompt)
        assert position == sum(tiers.values())
        found.add(position)
    assert found <= set(range(0, 200 * GRID + 1, GRID))
    status = agent.idle()
    assert status["counts"].get("damaged", 0) == status["staged"] == 0


@pytest.mark.parametrize("megabytes", [64, 160])
def test_a_disk_of_another_size_keeps_what_fits(tmp_path: Path, megabytes: int) -> None:
    def started(size: int) -> AgentProcess:
        made = AgentProcess(tmp_path, [f"--disk={tmp_path / 'disk'}={size}MB"], disk=False)
        made.start()
        return made

    agent = started(100)
    with FakeEngine(agent.socket) as engine:
        engine.save("r", PROMPT)
        agent.wait(lambda status: not status["busy"])
    agent.end()
    agent = started(megabytes)
    try:
        with FakeEngine(agent.socket) as engine:
            assert engine.load("q", PROMPT) == (END, {"disk": END})
        assert "catalogue_lost" not in agent.idle()["tiers"]["disk"]["counts"]
    finally:
        agent.end()


def test_nothing_is_left_in_shared_memory(agent: AgentProcess) -> None:
    def arenas() -> set[str]:
        return {path.name for path in SHARED_MEMORY.glob("kvatlas-arena-*")}

    killed = agent.wait(lambda status: True)["arena"]
    assert killed in arenas()
    agent.end(signal.SIGKILL)
    agent.start()
    ended = agent.wait(lambda status: True)["arena"]
    assert killed not in arenas()
    agent.end()
    assert ended not in arenas()
    assert not agent.socket.exists()


def test_an_agent_that_describes_the_state_otherwise_is_not_used(agent: AgentProcess) -> None:
    with FakeEngine(agent.socket) as engine:
        client = engine.client
        before = client.welcome
        assert before is not None
        client._described = msgspec.structs.replace(before, arena="", grid_tokens=2 * GRID)
        agent.end(signal.SIGKILL)
        assert not client.want("lost", PROMPT, 0, 1.0) or client.staged("lost") is None
        agent.start()
        client._retry = 0.0
        assert not client.want("q", PROMPT, 0, 1.0)
        assert client.counts["refused"] == 1
        assert client.life == ""


def test_positions_that_are_none_of_the_engine_are_refused(tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path, ["--points", "48"])
    agent.start()
    try:
        with pytest.raises(Refusal, match="--points: a resume point every 48 tokens"):
            FakeEngine(agent.socket)
    finally:
        agent.end()
