"""Agents as members of a cluster: their resume records and what was forgotten, in a register."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import GRID, hello, tokens_of
from stores_kit import Server, start_valkey, wait_until
from test_agent_purge import Engine

from kvatlas.cli.main import main
from kvatlas.config_register import RegisterConfig
from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Keyring
from kvatlas.core.register_values import (
    Answer,
    AskUsage,
    Expire,
    Join,
    Joined,
    Member,
    Question,
    Raise,
    ToldUsage,
)
from kvatlas.core.retention import Terms
from kvatlas.core.tenancy import TenantSalt, salt_of
from kvatlas.service.agent_orders import PROOF, signed
from kvatlas.service.membership import identity_of
from kvatlas.service.register import open_register
from kvatlas.service.tenant_limits import LIMITS, Limits
from kvatlas.validate.exactness_tiers import AgentProcess

PROMPT = tokens_of(1, 10 * GRID + 5)
END = 10 * GRID
POINTS = (10,)
SECRET = "ab" * 32
RING = Keyring(SECRET.encode())
TAG = "c" * 24
_FRESH = itertools.count(100)
CONFIG = """\
[keys]
secret_file = "{secret}"
[register]
url = "valkey://127.0.0.1:{port}"
name = "test"
beat_s = 0.05
ttl_s = 1.0
deadline_s = 0.3
"""


class Cluster:
    """A store, a register, and agents on nodes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[AgentProcess] = []
        self.store = start_valkey(folder)
        self.register = start_valkey(folder)

    def ends(self) -> None:
        for node in self.nodes:
            node.end()
        self.store.kill()
        self.register.kill()

    def config(self) -> Path:
        (self.folder / "secret").write_text(SECRET)
        path = self.folder / "kvatlas.toml"
        path.write_text(CONFIG.format(secret=self.folder / "secret", port=self.register.port))
        return path

    def node(self, *options: str) -> AgentProcess:
        name = f"n{len(self.nodes)}"
        folder = self.folder / name
        folder.mkdir()
        options = (
            *(f"--config={self.config()}", "--dram=16MB", "--listen=0", f"--member={name}"),
            *(f"--object=valkey://127.0.0.1:{self.store.port}", "--store=s", "--engine=w"),
            *options,
        )
        self.nodes.append(AgentProcess(folder, list(options), disk=False))
        self.nodes[-1].start()
        return self.nodes[-1]

    def ask(self, question: Question) -> Answer:
        config = RegisterConfig(url=f"valkey://127.0.0.1:{self.register.port}", name="test")

        async def asked() -> Answer:
            port = open_register(config)
            try:
                return await port.ask(question, 5.0)
            finally:
                await port.close()

        return asyncio.run(asked())

    def usage(self) -> ToldUsage:
        told = self.ask(AskUsage("s"))
        assert isinstance(told, ToldUsage)
        return told


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.ends()


def engine_of(node: AgentProcess, salt: str) -> Engine:
    made = Engine(node.socket, hello(kind="swa"))
    made.scope = salt
    return made


def save(node: AgentProcess, prompt: bytes = PROMPT, salt: str = "") -> dict[str, Any]:
    with engine_of(node, salt) as engine:
        engine.save("saved", prompt, points=POINTS)
    return node.idle()


def load(node: AgentProcess, prompt: bytes = PROMPT, salt: str = "") -> tuple[int, dict[str, int]]:
    with engine_of(node, salt) as engine:
        return engine.load("loaded", prompt)


def counts(node: AgentProcess) -> dict[str, int]:
    return dict(node.idle()["counts"])


def test_what_one_commits_another_resumes_and_the_store_has_no_records(cluster: Cluster) -> None:
    first, second = cluster.node(), cluster.node()
    save(first)
    usage = cluster.usage()
    assert usage.records == 1
    assert sum(usage.used_bytes.values()) > 0
    names = stored(cluster.store)
    assert names
    assert not [name for name in names if name.endswith(b"\2")]
    assert load(second) == (END, {"object": END})
    told = cluster.ask(
        Join(
            Member("x", "gateway", "1", "http://x", "1"),
            identity_of(RING, "test"),
            1000,
            round(time.time() * 1000),
        )
    )
    assert isinstance(told, Joined)
    assert told.members is not None
    assert {m.name: m.told for m in told.members if m.kind == "agent"} == {
        "n0": b'{"workers":["w"],"store":"s"}',
        "n1": b'{"workers":["w"],"store":"s"}',
    }


def stored(server: Server) -> list[bytes]:
    import valkey

    client = valkey.Valkey(port=server.port)
    try:
        return list(client.scan_iter())
    finally:
        client.close()


def test_a_register_that_is_away_costs_hits_and_no_more(cluster: Cluster) -> None:
    first, second = cluster.node(), cluster.node()
    save(first)
    cluster.register.kill()
    assert load(second) == (0, {})  # nobody vouches for it
    assert load(first) == (END, {"dram": END})
    save(first, other := tokens_of(2, END + 5))
    assert counts(first)["register_silent"]
    # A new one, which knows nothing: what is saved from now on counts, and is found.
    cluster.register = start_valkey(cluster.folder, port=cluster.register.port)
    wait_until(lambda: saved_and_found(first, second))
    assert load(second, other) == (0, {})


def saved_and_found(first: AgentProcess, second: AgentProcess) -> bool:
    """A prompt that is new: of one that was saved before a loss was known nothing is written anew
    while the node still has it."""
    prompt = tokens_of(next(_FRESH), END + 5)
    save(first, prompt)
    return load(second, prompt)[0] == END


def test_a_store_of_another_generation_is_not_believed(cluster: Cluster) -> None:
    """Somebody else has seen that the store lost all."""
    first, second = cluster.node(), cluster.node()
    save(first)
    before = cluster.usage()
    cluster.ask(Expire("s", before.generation))
    assert cluster.usage().records == 0
    assert load(second) == (0, {})
    wait_until(lambda: saved_and_found(first, second))
    assert counts(first)["generations"] == 1


def test_what_was_forgotten_while_it_was_away(cluster: Cluster) -> None:
    """Floors that were raised are known to whoever comes, before it serves anybody."""
    salt = salt_of(RING, TenantSalt(TAG, 0, ""))
    first = cluster.node()
    save(first, salt=salt)
    assert load(cluster.node(), salt=salt)[0] == END
    cluster.ask(Raise((Floor(TAG, 1),)))
    wait_until(lambda: load(first, salt=salt)[0] == 0)
    assert load(cluster.node(), salt=salt)[0] == 0


def test_quota_and_life_in_the_store(cluster: Cluster) -> None:
    first, second = cluster.node(), cluster.node()
    salt = salt_of(RING, TenantSalt(TAG, 0, ""))
    limit(first, quota_bytes={TAG: {"object": 1}})
    save(first, salt=salt)
    assert counts(first)["records_over_quota"] == 1
    assert load(second, salt=salt) == (0, {})
    limit(first, quota_bytes={}, terms={TAG: Terms(ttl_s=0.3)})
    save(first, other := tokens_of(5, END + 5), salt=salt)
    assert counts(first)["records_committed"] == 1
    wait_until(lambda: cluster.usage().records == 0)
    assert load(second, other, salt=salt) == (0, {})
    limit(first)
    save(first, again := tokens_of(6, END + 5), salt=salt)
    assert load(second, again, salt=salt)[0] == END


def limit(node: AgentProcess, **limits: Any) -> None:
    status = node.idle()
    body, proof = signed(RING, LIMITS, Limits(status["arena"], **limits))
    asked = urllib.request.Request(status["listens"] + LIMITS, body, {PROOF: proof})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "need --listen, and the engines of their node by --engine"),
        (["--listen=0.0.0.0:0", "--engine=w"], "name where they can by --advertise"),
        (["--listen=0", "--engine=w", "--advertise=10.0.0.1:1"], "--advertise: '10.0.0.1:1'"),
        (["--listen=0", "--engine=w", "--object=valkey://127.0.0.1:1"], "--store and --object"),
        (["--listen=0", "--engine=w", "--store=s"], "--store and --object"),
    ],
)
def test_options_that_cannot_be(
    cluster: Cluster, options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = cluster.folder / f"{secrets.token_hex(4)}.sock"
    argv = ["agent", f"--config={cluster.config()}", f"--socket={socket}", "--dram=16MB"]
    assert main([*argv, *options]) == 2
    assert why in capsys.readouterr().err


def test_without_a_register_there_are_no_members(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["agent", f"--socket={tmp_path / 's'}", "--engine=w"]) == 2
    assert "names no [register]" in capsys.readouterr().err
