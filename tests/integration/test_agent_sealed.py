"""Agents that seal: restarts, stores that nodes share, dropped keys, and faults at the start."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_engine import GRID, FakeEngine, tokens_of
from stores_kit import start_valkey

from kvatlas.cli.main import main
from kvatlas.dataplane.keystore import FileKeys
from kvatlas.validate.exactness_tiers import AgentProcess

PROMPT = tokens_of(1, 10 * GRID + 5)
END = 10 * GRID


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    FileKeys.create(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def node(tmp_path: Path, keys: Path) -> Iterator[Callable[..., AgentProcess]]:
    """Agents of one cluster: the same secret, and the same directory of keys."""
    made: list[AgentProcess] = []
    (tmp_path / "secret").write_text("ab" * 32)
    (tmp_path / "kvatlas.toml").write_text(f'[keys]\nsecret_file = "{tmp_path / "secret"}"\n')

    def make(*options: str, disk: bool = True) -> AgentProcess:
        common = (f"--config={tmp_path / 'kvatlas.toml'}", f"--seal-keys={keys}")
        made.append(AgentProcess(tmp_path / f"node-{len(made)}", [*common, *options], disk=disk))
        made[-1].start()
        return made[-1]

    yield make
    for agent in made:
        agent.end()


def saved(agent: AgentProcess) -> None:
    with FakeEngine(agent.socket) as engine:
        assert engine.save("r", PROMPT) == 10
    agent.idle()


def loaded(agent: AgentProcess) -> tuple[int, dict[str, int]]:
    with FakeEngine(agent.socket) as engine:
        return engine.load("q", PROMPT)


def test_a_killed_agent_reads_its_sealed_disk_until_the_key_is_dropped(
    node: Callable[..., AgentProcess], keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = node()
    saved(agent)
    assert agent.idle()["tiers"]["disk"]["sealed"] is True
    agent.end(signal.SIGKILL)
    agent.start()
    assert loaded(agent) == (END, {"disk": END})
    agent.end(signal.SIGKILL)
    agent.start()  # with nothing of it in memory
    assert main(["keys", "drop", str(keys), "nobody"]) == 0
    assert "1 keys of nobody dropped" in capsys.readouterr().out
    assert loaded(agent) == (0, {})
    status = agent.idle()
    assert status["tiers"]["disk"]["counts"]["read_erased"] >= 1
    assert status["tiers"]["disk"]["quarantined_bytes"] == 0
    with FakeEngine(agent.socket) as engine:  # and all goes on, under another key
        assert engine.save("r2", PROMPT) > 0
    agent.idle()
    agent.end(signal.SIGKILL)
    agent.start()
    assert loaded(agent) == (END, {"disk": END})


def test_nodes_with_the_same_keys_share_a_store_and_others_miss(
    node: Callable[..., AgentProcess], keys: Path, tmp_path: Path
) -> None:
    store = start_valkey(tmp_path)
    where = f"--object=valkey://127.0.0.1:{store.port}"
    one, two = (node(where, "--dram=16MB", disk=False) for _ in range(2))
    saved(one)
    assert loaded(two) == (END, {"object": END})
    other = FileKeys.create(tmp_path / "others").directory
    three = node(where, "--dram=16MB", f"--seal-keys={other}", disk=False)
    assert loaded(three) == (0, {})
    plain = AgentProcess(
        tmp_path / "plain", [f"--config={tmp_path / 'kvatlas.toml'}", where], disk=False
    )
    plain.start()
    assert loaded(plain) == (0, {})
    plain.end()
    two.end()
    two.start()
    assert loaded(two) == (END, {"object": END})  # nothing was lost by their looking
    store.kill()


def test_a_secret_of_the_nodes_own_does_not_lie_beside_what_is_sealed(
    tmp_path: Path, keys: Path
) -> None:
    """With it the names on the disk would tell whether a guessed prompt is there."""
    agent = AgentProcess(tmp_path / "node", [f"--seal-keys={keys}"])
    agent.start()
    saved(agent)
    agent.end(signal.SIGKILL)
    agent.start()
    assert loaded(agent) == (END, {"disk": END})
    agent.end()
    secret = (keys / "kvatlas.secret").read_bytes()
    assert (keys / "kvatlas.secret").stat().st_mode & 0o077 == 0
    assert all(secret not in path.read_bytes() for path in agent.disk.iterdir())


def test_a_directory_of_keys_that_cannot_be_used_is_told_at_the_start(
    tmp_path: Path, keys: Path
) -> None:
    (keys / "master.key").chmod(0o644)
    disk = f"--disk={tmp_path / 'disk'}=8MB"
    for folder, reason, more in (
        (keys, "chmod 600", [disk]),
        (tmp_path / "none", "kvatlas keys init", [disk]),
        (keys, "there is nothing to seal", []),
    ):
        words = ["agent", "--dram=2MB", *more, f"--seal-keys={folder}"]
        done = subprocess.run(
            [sys.executable, "-m", "kvatlas.cli.main", *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert reason in done.stderr
        assert done.stderr.count("\n") == 1
