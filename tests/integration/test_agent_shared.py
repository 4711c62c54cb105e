"""Agents of several nodes over a real store and each other's memory, and what happens to those."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_engine import GRID, FakeEngine, hello, tokens_of
from nixl_kit import use_nixl
from stores_kit import Proxy, Server, start_valkey
from stores_rigs import MooncakeRig, S3Rig, mooncake_package, s3_packages

from kvatlas.cli.main import main
from kvatlas.connectors.child import free_ports
from kvatlas.dataplane.tiers import mooncake, nixl, valkey
from kvatlas.dataplane.tiers.sockets import Address
from kvatlas.errors import EngineError
from kvatlas.validate.exactness_tiers import AgentProcess, _flip_arena

PROMPT = tokens_of(1, 10 * GRID + 5)
END = 10 * GRID
KEYS = '[keys]\nsecret_file = "{}"\n'
Make = Callable[..., AgentProcess]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Server]:
    made = start_valkey(tmp_path)
    yield made
    made.kill()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Make]:
    """Agents without a disk that have the same secret, each a node of its own."""
    made: list[AgentProcess] = []

    def make(*options: str, secret: str = "ab" * 32) -> AgentProcess:
        folder = tmp_path / f"node-{len(made)}"
        folder.mkdir()
        (folder / "secret").write_text(secret)
        (folder / "kvatlas.toml").write_text(KEYS.format(folder / "secret"))
        config = f"--config={folder / 'kvatlas.toml'}"
        made.append(AgentProcess(folder, [config, "--dram=16MB", *options], disk=False))
        made[-1].start()
        return made[-1]

    yield make
    for agent in made:
        agent.end()


def by(port: int, deadline_s: float = 5.0) -> str:
    return f"--object=valkey://127.0.0.1:{port}?deadline_s={deadline_s:g}"


def saved(agent: AgentProcess, prompt: bytes = PROMPT, **more: Any) -> dict[str, Any]:
    """A prompt is saved there, and written through."""
    with FakeEngine(agent.socket, hello(kind="swa") if more else None) as engine:
        assert engine.save("saved", prompt, **more)
    return agent.idle()


def loaded(
    agent: AgentProcess, prompt: bytes = PROMPT, kind: str = "gqa"
) -> tuple[int, dict[str, int]]:
    with FakeEngine(agent.socket, hello(kind=kind)) as engine:
        return engine.load("loaded", prompt)


def health(port: int) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        return json.load(answer)


def ask(port: int, *words: bytes) -> Sequence[bytes | int | None]:
    server = valkey.Server.connect(Address("127.0.0.1", port), time.monotonic() + 10)
    try:
        return server.ask(*words)
    finally:
        server.close()


# -- what a node without anything of its own can use ----------------------------------------------


def test_a_new_node_resumes_what_another_saved_and_keeps_it(store: Server, node: Make) -> None:
    first, second = node(by(store.port)), node(by(store.port))
    assert saved(first)["moved_bytes"]["write object"] == 10 * 65536
    assert loaded(second) == (END, {"object": END})
    assert second.idle()["tiers"]["object"]["transport"] == "tcp"
    assert loaded(second) == (END, {"dram": END})
    status = second.idle()
    # It came over the network once: to be looked for, and to be read.
    assert status["tiers"]["object"]["counts"]["pieces"] == 20
    assert status["loaded_tokens"] == {"object": END, "dram": END}
    assert loaded(second, tokens_of(2, 10 * GRID)) == (0, {})
    assert loaded(second, PROMPT + tokens_of(7, 4 * GRID)) == (END, {"dram": END})


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["mooncake", "s3"])
def test_other_stores_do_the_same(
    kind: str, node: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what a store of that kind is told by its URL and its environment alone."""
    rig: MooncakeRig | S3Rig
    if kind == "mooncake":
        if not mooncake_package():
            pytest.skip(mooncake.missing())
        rig = MooncakeRig(tmp_path)
        url = f"mooncake://127.0.0.1:{rig.port}"
    else:
        if not s3_packages():
            pytest.skip("obstore or moto is not installed: make engines")
        rig = S3Rig(tmp_path)
        url = f"s3://{rig.bucket}?endpoint=http://127.0.0.1:{rig.port}"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    try:
        first, second = (node(f"--object={url}", "--seek-s=5") for _ in range(2))
        assert saved(first, points=(10,))["moved_bytes"]["write object"]
        assert loaded(second, kind="swa") == (END, {"object": END})
        assert second.idle()["tiers"]["object"]["transport"] == "tcp"
    finally:
        rig.close()


def test_a_prompt_goes_on_in_the_store_where_the_node_ends(store: Server, node: Make) -> None:
    first, second = node(by(store.port)), node(by(store.port))
    saved(second, PROMPT[: 4 * 4 * GRID])
    saved(first)
    own = 4 * GRID
    assert loaded(second) == (END, {"dram": own, "object": END - own})


def test_what_lies_elsewhere_alone_is_pulled_before_it_is_kept(
    store: Server, node: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = node(by(store.port)), node(by(store.port))
    saved(first)
    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(str(id) for id in array("I", PROMPT)))

    def errand(what: str) -> int:
        words = ("--tokens", str(ids), "--wait", "20", "--socket", str(second.socket))
        return main(["agent", what, *words])

    with FakeEngine(second.socket):
        for what in ("pin", "push"):
            assert errand(what) == 2
            assert "dram or disk of this node: pull it first" in capsys.readouterr().err
        assert [errand(what) for what in ("pull", "pin", "push")] == [0, 0, 0]
        assert second.wait(lambda status: True)["tiers"]["dram"]["in_use_bytes"] == 10 * 65536


def test_a_point_counts_where_its_record_was_written_last(store: Server, node: Make) -> None:
    first, second = node(by(store.port)), node(by(store.port))
    saved(first, points=(10,))
    (record,) = [
        k for k in ask(store.port, b"KEYS", b"*") if isinstance(k, bytes) and k[-1:] == b"\2"
    ]
    assert loaded(second, kind="swa") == (END, {"object": END})
    third = node(by(store.port))
    ask(store.port, b"DEL", record)
    assert loaded(third, kind="swa") == (0, {})
    assert "object_found" in third.idle()["counts"]


def test_a_record_that_was_damaged_vouches_for_nothing(store: Server, node: Make) -> None:
    first, second = node(by(store.port)), node(by(store.port))
    saved(first, points=(10,))
    (record,) = [
        k for k in ask(store.port, b"KEYS", b"*") if isinstance(k, bytes) and k[-1:] == b"\2"
    ]
    ask(store.port, b"SETRANGE", record, b"540", b"?")
    assert loaded(second, kind="swa") == (0, {})


def test_a_peer_lends_what_is_in_its_memory(node: Make) -> None:
    (port,) = free_ports(1)
    first = node(f"--serve-peers=127.0.0.1:{port}")
    second = node(f"--peer=127.0.0.1:{port}")
    saved(first)
    assert loaded(second) == (END, {"peer": END})
    assert loaded(second) == (END, {"dram": END})
    here, there = first.idle(), second.idle()
    assert here["tiers"]["served"]["counts"] == {"sent": 10}
    assert here["tiers"]["served"]["transport"] == "tcp"
    told = there["tiers"]["peer"][f"127.0.0.1:{port}"]
    assert told["transport"] == "tcp"
    assert told["moved"]["tcp"]["size_bytes"] == 10 * 65536


@pytest.mark.engine
def test_two_agents_of_one_node_read_by_nixl_and_say_so(
    node: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless one of them is told otherwise; a peer that is lost in mid-life is one over TCP."""
    use_nixl(monkeypatch, tmp_path)
    port, pages = free_ports(2)
    first = node(f"--serve-peers=127.0.0.1:{port}")
    peer = f"--peer=127.0.0.1:{port}"
    second = node(peer, f"--listen={pages}", "--peer-transport=nixl")
    third = node(peer, "--peer-transport=tcp")
    saved(first)
    first.wait(lambda status: status["tiers"]["served"]["nixl"] == "on")
    assert loaded(second) == (END, {"peer": END})
    assert loaded(third) == (END, {"peer": END})
    assert first.idle()["tiers"]["served"]["counts"] == {"lent": 10, "sent": 10}
    told = second.idle()["tiers"]["peer"][f"127.0.0.1:{port}"]
    assert told["transport"] == "nixl/cma"
    assert told["moved"]["nixl/cma"]["size_bytes"] == 10 * 65536
    assert told["instead"] == {}
    told = third.idle()["tiers"]["peer"][f"127.0.0.1:{port}"]
    assert (told["transport"], told["nixl"]) == ("tcp", "not_wanted")
    with urllib.request.urlopen(f"http://127.0.0.1:{pages}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    name = f'peer="127.0.0.1:{port}",transport="nixl/cma"'
    assert f"kvatlas_agent_peer_moved_bytes_total{{{name}}} {10 * 65536}" in page
    assert f"kvatlas_agent_peer_transport_info{{{name}}} 1.0" in page


def test_nixl_alone_is_refused_where_it_is_not_installed(node: Make) -> None:
    if not nixl.missing():
        pytest.skip("NIXL is installed in this environment")
    (port,) = free_ports(1)
    for option in (f"--peer=127.0.0.1:{port}", f"--serve-peers=127.0.0.1:{port}"):
        with pytest.raises(EngineError, match=r"pip install 'kvatlas\[nixl\]'"):
            node(option, "--peer-transport=nixl")


def test_of_windows_a_peer_lends_points_that_are_sealed(node: Make) -> None:
    (port,) = free_ports(1)
    first = node(f"--serve-peers=127.0.0.1:{port}")
    second = node(f"--peer=127.0.0.1:{port}")
    saved(first, points=(4, 10))
    assert loaded(second, kind="swa") == (END, {"peer": END})


# -- faults ---------------------------------------------------------------------------------------


def test_a_store_that_stalls_is_dropped_and_no_request_waits_for_it(
    store: Server, node: Make
) -> None:
    (port,) = free_ports(1)
    first, second = node(by(store.port)), node(by(store.port, 0.3), f"--listen={port}")
    saved(first)
    assert health(port) == {"status": "ok", "flags": [], "details": {}}
    store.process.send_signal(signal.SIGSTOP)
    try:
        with FakeEngine(second.socket) as engine:
            assert engine.load("q", PROMPT) == (0, {})
            assert engine.load("again", PROMPT) == (0, {})  # without asking it
            assert engine.save("mine", tokens_of(3, 4 * GRID)) == 4
        status = second.idle()
        assert status["tiers"]["object"]["rests"]
        assert status["counts"]["object_silent"] == 1
        assert status["counts"]["write_rests"] >= 1
        assert status["tiers"]["dram"]["held_bytes"] == 4 * 65536
        assert health(port)["flags"] == ["object_silent"]
    finally:
        store.process.send_signal(signal.SIGCONT)
    second.wait(lambda status: not status["tiers"]["object"]["rests"])
    assert loaded(second) == (END, {"object": END})
    assert health(port)["flags"] == []


def test_a_store_that_stalls_in_mid_read_fails_the_load_by_its_time(
    store: Server, node: Make
) -> None:
    proxy = Proxy(store.port)
    first, second = node(by(store.port)), node(by(proxy.port, 1.0))
    saved(first)
    proxy.slow.set()
    with FakeEngine(second.socket) as engine:
        assert engine.load("q", PROMPT)[0] < END  # what came in a row before it counts
        status = second.wait(lambda status: not status["busy"])
        assert status["counts"]["object_silent"] == 1
        assert status["staged"] == 0
        assert engine.save("r", tokens_of(3, 4 * GRID)) == 4
    proxy.close()


def test_a_store_that_starts_anew_is_empty_and_is_written_to_again(
    store: Server, node: Make, tmp_path: Path
) -> None:
    first, second = node(by(store.port)), node(by(store.port))
    saved(first)
    assert loaded(second, PROMPT[: 4 * 4 * GRID + 4]) == (4 * GRID, {"object": 4 * GRID})
    store.kill()
    again = start_valkey(tmp_path, port=store.port)
    try:
        assert loaded(second) == (4 * GRID, {"dram": 4 * GRID})
        assert second.idle()["counts"]["object_lost"] == 1
        saved(second, tokens_of(5, 3 * GRID))
        third = node(by(store.port))
        assert loaded(third, tokens_of(5, 3 * GRID) + b"\0" * 4) == (3 * GRID, {"object": 3 * GRID})
    finally:
        again.kill()


def test_what_a_store_lost_is_taken_back_and_written_again_when_it_is_used(
    store: Server, node: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where nothing is asked of it: what was said of it to the gateway would be believed."""
    agent = node(by(store.port))
    used, unused = PROMPT, tokens_of(2, 6 * GRID)

    def held(prompt: bytes) -> Any:
        ids = tmp_path / "ids.txt"
        ids.write_text(" ".join(str(id) for id in array("I", prompt)))
        words = ["agent", "where", "--tokens", str(ids), "--socket", str(agent.socket)]
        assert main(words) == 0
        return json.loads(capsys.readouterr().out)["by_tier"]

    with FakeEngine(agent.socket) as engine:
        engine.save("used", used)
        engine.save("unused", unused)
        agent.wait(lambda status: not status["busy"])
        assert held(used) == {"dram": END, "object": END}
        store.kill()
        again = start_valkey(tmp_path, port=store.port)
        try:
            status = agent.wait(lambda status: status["counts"].get("object_lost"))
            assert status["tiers"]["object"]["counts"]["restarts"] == 1
            assert held(used) == {"dram": END}
            assert held(unused) == {"dram": 6 * GRID}
            assert ask(store.port, b"DBSIZE") == [0]
            assert engine.load("again", used) == (END, {"dram": END})
            agent.wait(lambda status: not status["busy"])
            assert held(used) == {"dram": END, "object": END}
            assert held(unused) == {"dram": 6 * GRID}
            assert loaded(node(by(store.port))) == (END, {"object": END})
        finally:
            again.kill()


@pytest.mark.engine
def test_a_mooncake_master_that_lost_its_index_is_written_to_again(
    node: Make, tmp_path: Path
) -> None:
    if not mooncake_package():
        pytest.skip(mooncake.missing())
    rig = MooncakeRig(tmp_path)
    url = f"--object=mooncake://127.0.0.1:{rig.port}"
    try:
        agent = node(url, "--seek-s=5")
        with FakeEngine(agent.socket) as engine:
            for turn in range(20):  # its client connects in the background
                engine.save("r", tokens_of(10 + turn, 2 * GRID))
                status = agent.wait(lambda status: not status["busy"])
                if status["moved_bytes"].get("write object"):
                    break
            engine.save("used", PROMPT)
            agent.wait(lambda status: not status["busy"])
            rig.restart()
            agent.wait(lambda status: status["counts"].get("object_lost"))

            def again(status: dict[str, Any]) -> bool:
                assert engine.load("again", PROMPT) == (END, {"dram": END})
                written = status["moved_bytes"]["write object"]
                return bool(not status["busy"] and written >= 20 * 65536)

            agent.wait(again)
        assert loaded(node(url, "--seek-s=5")) == (END, {"object": END})
    finally:
        rig.close()


def test_a_flipped_bit_in_the_store_is_a_recompute_and_thrown_out(
    store: Server, node: Make
) -> None:
    first, second = node(by(store.port)), node(by(store.port))
    saved(first)
    for key in ask(store.port, b"KEYS", b"*"):
        assert isinstance(key, bytes)
        ask(store.port, b"SETRANGE", key, b"700", b"????")
    assert loaded(second) == (0, {})
    status = second.idle()
    assert status["counts"]["damaged"] == 10
    assert status["tiers"]["object"]["counts"]["quarantined"] == 10
    assert ask(store.port, b"DBSIZE") == [0]
    saved(second)
    assert loaded(node(by(store.port))) == (END, {"object": END})


@pytest.mark.parametrize("change", ["longer", "shorter", "empty"])
def test_values_of_a_wrong_size_are_a_recompute(store: Server, node: Make, change: str) -> None:
    first, second = node(by(store.port)), node(by(store.port))
    saved(first)
    for key in ask(store.port, b"KEYS", b"*"):
        assert isinstance(key, bytes)
        if change == "longer":
            ask(store.port, b"APPEND", key, b"?" * 64)
            continue
        (value,) = ask(
            store.port, b"GETRANGE", key, b"0", b"40000" if change == "shorter" else b"0"
        )
        assert isinstance(value, bytes)
        ask(store.port, b"SET", key, value)
    assert loaded(second) == (0, {})
    status = second.idle()
    assert status["counts"]["damaged"] == 10
    assert status["staged"] == status["tiers"]["dram"]["held_bytes"] == 0
    saved(second)
    assert loaded(second) == (END, {"dram": END})


def test_two_nodes_that_write_one_prompt_at_once_agree(store: Server, node: Make) -> None:
    nodes = [node(by(store.port)), node(by(store.port))]

    def saves(agent: AgentProcess) -> dict[str, Any]:
        with FakeEngine(agent.socket) as engine:
            engine.save("r", PROMPT)  # or finds there what the other was quicker to write
        return agent.idle()

    with ThreadPoolExecutor(2) as pool:
        for status in pool.map(saves, nodes):
            assert status["counts"].get("damaged", 0) == 0
            assert status["tiers"]["dram"]["held_bytes"] == 10 * 65536
    assert ask(store.port, b"DBSIZE") == [10]
    assert loaded(node(by(store.port))) == (END, {"object": END})


def test_a_peer_that_dies_in_mid_read_is_a_recompute(node: Make) -> None:
    (port,) = free_ports(1)
    first = node(f"--serve-peers=127.0.0.1:{port}")
    proxy = Proxy(port)
    second = node(f"--peer=127.0.0.1:{proxy.port}")
    saved(first)
    proxy.cut = 300_000
    assert loaded(second)[0] < END  # what came in a row before it counts
    status = second.idle()
    assert status["counts"]["peer_silent"] == 1
    assert status["tiers"]["peer"][f"127.0.0.1:{proxy.port}"]["rests"]
    proxy.close()


def test_what_a_peer_has_damaged_is_a_recompute(node: Make) -> None:
    (port,) = free_ports(1)
    first = node(f"--serve-peers=127.0.0.1:{port}")
    second = node(f"--peer=127.0.0.1:{port}")
    saved(first)
    _flip_arena(first)
    assert loaded(second) == (0, {})
    assert second.idle()["counts"]["damaged"] == 10
    assert first.idle()["tiers"]["served"]["counts"]["quarantined"] == 10
    assert loaded(first) == (0, {})  # its owner has thrown it out, too


def test_a_peer_that_started_anew_holds_nothing(node: Make) -> None:
    (port,) = free_ports(1)
    first = node(f"--serve-peers=127.0.0.1:{port}")
    second = node(f"--peer=127.0.0.1:{port}")
    saved(first)
    with FakeEngine(second.socket) as engine:
        assert engine.load("a", PROMPT[: 4 * 4 * GRID + 4]) == (4 * GRID, {"peer": 4 * GRID})
        first.end(signal.SIGKILL)
        first.start()
        assert engine.load("b", PROMPT) == (4 * GRID, {"dram": 4 * GRID})


def test_without_the_secret_nothing_is_read(store: Server, node: Make) -> None:
    (port,) = free_ports(1)
    first = node(by(store.port), f"--serve-peers=127.0.0.1:{port}")
    stranger = node(by(store.port), f"--peer=127.0.0.1:{port}", secret="cd" * 32)
    saved(first)
    assert loaded(stranger) == (0, {})
    assert first.idle()["tiers"]["served"]["counts"]["denied"] >= 1
