"""Threads of an engine that names its pages itself, at a real agent: restarts, kills and damage."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stores_kit import start_valkey

from kvatlas.connectors.agent_client import Settings, settings_of
from kvatlas.connectors.page_client import PageClient
from kvatlas.core.units import Part
from kvatlas.errors import EngineError
from kvatlas.service import agent_wire as wire
from kvatlas.validate.exactness_tiers import AgentProcess, _flip_arena

KEYS = '[keys]\nsecret_file = "{}"\n[[worker]]\nname = "none"\nurl = "http://127.0.0.1:1"\n'
SIZES = {Part.BODY: 6000, Part.POINT: 900}
HELLO = wire.Hello(
    wire.VERSION,
    "model",
    ("model",),
    b"{}",
    "sglang",
    "0.5.23",
    "torch.bfloat16",
    16,
    pools=(
        wire.PoolInfo("kv", "a", 4096, False),
        wire.PoolInfo("indexer", "a", SIZES[Part.BODY] - 4096, False),
        wire.PoolInfo("swa", "b", SIZES[Part.POINT], True),
    ),
)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    made = AgentProcess(tmp_path)
    made.start()
    yield made
    made.end()


@pytest.fixture
def client(agent: AgentProcess) -> Iterator[PageClient]:
    made = PageClient(agent.socket, HELLO, answer_s=20.0, load_s=20.0)
    yield made
    made.close()


def hashes(prompt: str, count: int) -> bytes:
    found, last = b"", prompt.encode()
    for _ in range(count):
        last = hashlib.sha256(last).digest()
        found += last
    return found


def content(part: Part, page: bytes) -> bytes:
    size = SIZES[part]
    return (hashlib.sha256(page + bytes([part])).digest() * (size // 32 + 1))[:size]


def give(client: PageClient, prompt: str, first: int, count: int, *points: int) -> None:
    """Pages ``first``… of a prompt, in three parts each."""
    names = hashes(prompt, first + count)

    def parts_of(part: Part, index: int) -> list[memoryview]:
        data = memoryview(content(part, names[index * 32 : index * 32 + 32]))
        return [data[:100], data[100:101], data[101:]]

    client.give(names, first, points, parts_of)


def taken(client: PageClient, prompt: str, first: int, count: int, part: Part = Part.BODY) -> int:
    """Pages that came; all bytes of them must be right."""
    names = hashes(prompt, first + count)
    found = client.take(names, first, part)
    if found is None:
        return 0
    right = 0
    for index in range(first, first + count):
        data = bytearray(SIZES[part])
        # As SGLang reads: one pool, then the other.
        views = [memoryview(data)[:500], memoryview(data)[500:]]
        if found.read(index, 0, views[:1]) and found.read(index, 500, views[1:]):
            right += 1
            page = names[index * 32 : index * 32 + 32]
            assert bytes(data) == content(part, page), "wrong bytes were handed out"
    found.release(used=right > 0)
    return right


def test_pages_are_looked_for_given_and_taken(agent: AgentProcess, client: PageClient) -> None:
    assert client.look(hashes("a", 5), 0) == wire.Present("1", 0, ())
    give(client, "a", 0, 3, 3)
    give(client, "a", 3, 2)
    assert client.look(hashes("a", 6), 0) == wire.Present("4", 5, (3,))
    assert client.look(hashes("a", 6), 4) == wire.Present("5", 1, ())
    assert taken(client, "a", 0, 6) == 5
    assert taken(client, "a", 1, 3) == 3
    assert taken(client, "a", 0, 6, Part.POINT) == 1
    assert taken(client, "b", 0, 2) == 0
    status = agent.wait(lambda status: not status["busy"] and not status["staged"])
    assert status["loaded_tokens"] == {"dram": 8 * 16}
    assert client.counts == {}


def test_many_threads_at_once_each_get_their_own(client: PageClient) -> None:
    def one(number: int) -> int:
        prompt = str(number % 5)
        give(client, prompt, 0, 8, 8)
        return taken(client, prompt, 0, 8) + taken(client, prompt, 0, 8, Part.POINT)

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(one, range(30)))
    assert found[-10:] == [9] * 10
    assert set(client.counts) == set()


def test_an_agent_that_ends_is_misses_and_one_that_comes_is_found(
    agent: AgentProcess, client: PageClient, caplog: pytest.LogCaptureFixture
) -> None:
    give(client, "a", 0, 4, 4)
    agent.wait(lambda status: not status["busy"])
    held = client.take(hashes("a", 4), 0, Part.BODY)
    assert held is not None
    agent.end(signal.SIGKILL)
    data = bytearray(SIZES[Part.BODY])
    assert held.read(3, 0, [memoryview(data)]), "it was verified, and nobody writes to it"
    assert bytes(data) == content(Part.BODY, hashes("a", 4)[-32:])
    held.release(used=True)
    assert taken(client, "a", 0, 4) == 0
    give(client, "a", 0, 4)
    assert client.look(hashes("a", 4), 0).pages == 0
    agent.start()
    client._rest_until = 0.0
    assert taken(client, "a", 0, 4) == 4
    assert client.look(hashes("a", 4), 0).points == (4,)
    assert client.counts["agent_lost"] == 1
    assert caplog.messages == [
        f"the agent at {agent.socket} is lost: all is computed until it is back"
    ]


def test_an_agent_that_stalls_is_left_alone(agent: AgentProcess, client: PageClient) -> None:
    give(client, "a", 0, 4)
    agent.wait(lambda status: not status["busy"])
    client._answer_s, client._rest_s = 0.1, 600.0

    def found(_: int) -> int:
        return client.look(hashes("a", 4), 0).pages

    agent.send(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert set(threads.map(found, range(4))) == {0}
        late = client.counts["answers_late"]
        assert 1 <= late <= 4
        for number in range(20):
            assert found(number) == 0
        assert client.counts == {"answers_late": late, "agent_rests": 24 - late}
        # Nor does anybody wait for one that takes the connection and says nothing.
        agent.send(signal.SIGCONT)
        agent.end(signal.SIGKILL)
        agent.start()
        agent.send(signal.SIGSTOP)
        client._rest_until, client._rest_s = 0.0, 600.0
        for number in range(20):
            assert found(number) == 0
        assert client.counts["no_agent"] <= 1
        assert client.counts["asked_nobody"] >= 19
    finally:
        agent.send(signal.SIGCONT)
    client._answer_s, client._rest_until = 20.0, 0.0
    assert taken(client, "a", 0, 4) == 4
    assert client._rest_s < 2.0, "an answer in time, and all is well again"


def test_flipped_bytes_in_memory_are_read_from_the_disk(
    agent: AgentProcess, client: PageClient
) -> None:
    give(client, "a", 0, 4)
    agent.wait(lambda status: not status["busy"])
    _flip_arena(agent)
    assert taken(client, "a", 0, 4) == 0
    assert agent.wait(lambda status: True)["counts"]["damaged"] == 4
    assert taken(client, "a", 0, 4) == 4


def test_who_keeps_other_bytes_under_one_name_gets_none_of_ours(
    agent: AgentProcess, client: PageClient
) -> None:
    give(client, "a", 0, 4)
    pools = (msgspec.structs.replace(HELLO.pools[0], form="other"), *HELLO.pools[1:])
    told = msgspec.structs.replace(HELLO, pools=pools)
    other = PageClient(agent.socket, told, answer_s=10.0, load_s=20.0)
    try:
        status = agent.wait(lambda status: True)
        assert "layout: kv: pool" in status["not_shared"]["engine#2"]
        assert taken(other, "a", 0, 4) == 0
        assert taken(client, "a", 0, 4) == 4
    finally:
        other.close()
    with pytest.raises(EngineError, match="no agent answers at"):
        PageClient(agent.socket.with_name("nowhere"), HELLO, answer_s=1.0, load_s=1.0)


def test_pages_of_another_size_and_late_answers_leave_nothing(
    agent: AgentProcess, client: PageClient
) -> None:
    client.give(hashes("a", 2), 0, (), lambda part, index: [memoryview(b"short")])
    assert client.counts["page_of_another_size"] == 2
    client.give(hashes("a", 2), 0, (), lambda part, index: None)
    give(client, "b", 0, 4)
    agent.wait(lambda status: not status["busy"])
    client._load_s = client._answer_s = 0.0
    assert taken(client, "b", 0, 4) in (0, 4)
    while not client.counts["answers_late"]:  # some come in time all the same
        taken(client, "b", 0, 4)
    status = agent.wait(lambda status: not status["busy"] and not status["staged"])
    assert status["tiers"]["dram"]["units"] == 4


def test_another_node_finds_pages_in_the_store_that_both_share(tmp_path: Path) -> None:
    store = start_valkey(tmp_path)
    nodes = []
    try:
        for name in ("first", "second"):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "secret").write_text("ab" * 32)
            (folder / "kvatlas.toml").write_text(KEYS.format(folder / "secret"))
            options = [f"--config={folder / 'kvatlas.toml'}", "--dram=16MB"]
            options.append(f"--object=valkey://127.0.0.1:{store.port}?deadline_s=5")
            nodes.append(AgentProcess(folder, options, disk=False))
            nodes[-1].start()
        first, second = (
            PageClient(node.socket, HELLO, answer_s=20.0, load_s=20.0) for node in nodes
        )
        give(first, "a", 0, 6, 4)
        nodes[0].wait(lambda status: not status["busy"])
        assert second.look(hashes("a", 8), 0) == wire.Present("1", 6, (4,))
        assert taken(second, "a", 0, 6) == 6
        assert taken(second, "a", 3, 1, Part.POINT) == 1
        assert second.look(hashes("b", 8), 0).pages == 0
        first.close()
        second.close()
        assert nodes[1].idle()["loaded_tokens"] == {"object": 6 * 16}
    finally:
        for node in nodes:
            node.end()
        store.kill()


def test_a_closed_client_is_gone_at_the_agent(agent: AgentProcess) -> None:
    client = PageClient(agent.socket, HELLO, answer_s=20.0, load_s=20.0)
    give(client, "a", 0, 4)
    found = client.take(hashes("a", 4), 0, Part.BODY)
    assert found is not None
    client.close()
    found.release(used=False)
    assert client.look(hashes("a", 4), 0).pages == 0
    until = time.monotonic() + 20.0
    while client._listener is not None and client._listener.is_alive():
        assert time.monotonic() < until
        threading.Event().wait(0.02)
    assert agent.idle()["staged"] == 0


def test_what_is_not_said_of_a_connector_is_as_told() -> None:
    made = settings_of({"socket": "s", "load_deadline_s": "2", "name": ""}, answer_s=0.5)
    assert made == Settings("s", 2.0, 0.5, "", made.name)
    assert made.name


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "needs the agent's socket"),
        ({"socket": ""}, "needs the agent's socket"),
        ({"socket": "s", "weight_digest": "w"}, "no setting weight_digest"),
        ({"socket": "s", "answer_s": -1}, "`float` >= 0.0"),
        ({"socket": "s", "load_deadline_s": "soon"}, "load_deadline_s"),
        ({"socket": "s", "weights_digest": 7}, "weights_digest"),
    ],
)
def test_settings_of_a_connector_that_mean_nothing_are_refused(
    given: dict[str, Any], why: str
) -> None:
    with pytest.raises(EngineError, match=why):
        settings_of(given, answer_s=0.5)
