"""Our tier below vLLM's own CPU tier, under vLLM's own scheduler, connector and tiering manager.

Only the copies between a GPU and the CPU tier are made by the test, and every block that a resume
reads is looked at.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_engines import require

from kvatlas.dataplane.arena import SHARED_MEMORY
from kvatlas.validate.exactness_tiers import AgentProcess
from kvatlas.validate.exactness_vllm import subject, text

pytestmark = pytest.mark.engine

CHILD_S = 400
PROMPT, OTHER = text(5, 900), text(6, 900)
GQA = [{"block": 16, "window": 0, "layers": 2}]
SWA = [{"block": 32, "window": 0, "layers": 2}, {"block": 16, "window": 64, "layers": 3}]
V4 = [  # DeepSeek V4's blocks and windows
    {"block": 64, "window": 128, "layers": 2},
    {"block": 64, "window": 128, "layers": 1},
    {"block": 256, "window": 0, "layers": 2},
    {"block": 4, "window": 8, "layers": 2},
    {"block": 8, "window": 128, "layers": 1},
]
OURS = "external_unspecified"  # vLLM's word for tiers that are neither its host's nor its disk's


class Engines:
    """A process of vLLM's Python with any number of engines."""

    def __init__(self, model: Path) -> None:
        self._model = str(model)
        self._number = 0
        child = Path(__file__).with_name("vllm_tier_child.py")
        self._process = subprocess.Popen(
            [str(require("vllm") / "bin" / "python"), str(child)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._timer = threading.Timer(CHILD_S, self._process.kill)
        self._timer.start()

    def ask(self, **wish: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wish) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the child has ended"
        return json.loads(line)

    def start(self, agent: AgentProcess | None, groups: Any = GQA, **more: Any) -> str:
        """The name of a new one. Raises AssertionError, with its words, where it does not start."""
        self._number += 1
        tier = {"type": "KvatlasTier", "module_path": "kvatlas.connectors.vllm_tier"}
        if agent is not None:
            tier["socket"] = str(agent.socket)
        wish = {
            "engine": f"engine {self._number}",
            "model": self._model,
            "connector": "KvatlasTieringConnector",
            "groups": groups,
            "cpu_chunks": 400,
            "ranks": 1,
            "more": {},
            "late": {},
        }
        settings = {"answer_s": 5.0, **more.pop("tier", {})}
        refused = self.ask(**wish | more | {"tier": tier | settings})
        assert refused is None, refused
        return str(wish["engine"])

    def run(self, engine: str, prompt: list[int], forget: str = "all", **more: Any) -> Any:
        """Runs a prompt; nothing of it may have been wrong."""
        self._number += 1
        wish = {"run": engine, "id": f"request {self._number}", "prompt": prompt, "forget": forget}
        answer = self.ask(**wish | more)
        assert answer["wrong"] == 0
        assert answer["jobs"] == 0
        return answer

    def counts(self, engine: str) -> dict[str, int]:
        counts: dict[str, int] = self.ask(counts=engine)
        return counts

    def end(self) -> None:
        with self._process:  # closes both ends, and waits
            pass
        self._timer.cancel()
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("tier")
    subject("gqa", folder)
    made = Engines(folder / "model")
    yield made
    made.end()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    made = AgentProcess(tmp_path, disk=False)
    made.start()
    yield made
    made.end()


def saved(agent: AgentProcess) -> dict[str, Any]:
    """Its status, with nothing under way."""
    return agent.wait(lambda status: not status["busy"])


def flip(agent: AgentProcess, group: int, tokens: list[int]) -> None:
    """Turn over a bit of the block that ends these tokens, behind the agent's back."""
    content = hashlib.sha256(repr((group, tokens)).encode()).digest()
    life = saved(agent)["arena"]
    with (SHARED_MEMORY / life).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(content)
        assert at > 0, "it is not there"
        memory[at] ^= 1


def test_what_the_cpu_tier_evicted_comes_from_ours(engines: Engines, agent: AgentProcess) -> None:
    engine = engines.start(agent, cpu_chunks=60)  # one prompt of 56, and no second one
    assert engines.run(engine, PROMPT)["cached"] == 0
    again = engines.run(engine, PROMPT, "gpu")
    assert (again["cached"], again["sources"]) == (896, {"host": 896})
    assert engines.run(engine, OTHER, "gpu")["cached"] == 0
    evicted = engines.run(engine, PROMPT, "gpu")
    assert evicted["cached"] == 896
    assert evicted["sources"][OURS] >= 52 * 16
    all_gone = engines.run(engine, PROMPT, "all")
    assert (all_gone["cached"], all_gone["sources"]) == (896, {OURS: 896})
    assert engines.counts(engine) == {}
    status = saved(agent)
    assert status["tiers"]["dram"]["units"] == 2 * 56
    assert status["loaded_tokens"]["dram"] >= (52 + 56) * 16
    assert status["staged"] == 0


@pytest.mark.parametrize(("groups", "grid"), [(SWA, 32), (V4, 256)], ids=["swa", "v4"])
def test_groups_come_together_or_not_at_all(
    engines: Engines, agent: AgentProcess, groups: Any, grid: int
) -> None:
    engine = engines.start(agent, groups, cpu_chunks=1000)
    assert engines.run(engine, PROMPT)["cached"] == 0
    end = 899 // grid * grid
    found = engines.run(engine, PROMPT)
    assert (found["cached"], set(found["sources"])) == (end, {OURS})
    window = next(n for n, group in enumerate(groups) if group["window"])
    flip(agent, window, PROMPT[:end])
    damaged = engines.run(engine, PROMPT)
    assert damaged["cached"] == 0  # all else is there, but for one block of one group
    assert engines.counts(engine) == {"load_failed": 1}
    assert engines.run(engine, PROMPT)["cached"] == end  # it was computed, and saved again


def test_damage_is_a_miss_and_what_comes_before_is_not(
    engines: Engines, agent: AgentProcess
) -> None:
    engine = engines.start(agent)
    engines.run(engine, PROMPT)
    flip(agent, 0, PROMPT[: 31 * 16])
    assert engines.run(engine, PROMPT)["cached"] == 30 * 16
    assert engines.counts(engine) == {"load_failed": 1}
    assert engines.run(engine, PROMPT)["cached"] == 896


OTHERS: list[dict[str, Any]] = [
    {"tier": {"weights_digest": "w"}},
    {"more": {"hf_overrides": {"rope_theta": 5e5}}},
    {"more": {"revision": "another"}},
    {"more": {"dtype": "float16"}},
    {"groups": [GQA[0] | {"layers": 3}]},
    {"groups": [GQA[0] | {"block": 32}]},
    {"ranks": 2},
]


def test_what_must_agree_is_in_the_keys(engines: Engines, agent: AgentProcess) -> None:
    first = engines.start(agent)
    engines.run(first, PROMPT)
    engines.run(first, OTHER, salt="whose")
    second = engines.start(agent)
    assert engines.run(second, PROMPT)["cached"] == 896
    assert engines.run(first, PROMPT, salt="whose")["cached"] == 0
    assert engines.run(first, OTHER)["cached"] == 0
    beside = engines.start(agent, tier={"weights_digest": "w"})
    assert engines.run(beside, PROMPT)["cached"] == 0
    for engine in (first, second, beside):
        engines.ask(close=engine)
    for other in OTHERS:
        engine = engines.start(agent, **other)
        found = [engines.run(engine, PROMPT)["cached"] for _ in range(2)]
        assert found == [896 if other is OTHERS[0] else 0, 896], other  # it was there `beside`
        engines.ask(close=engine)
    assert agent.idle()["staged"] == 0


def test_what_waits_has_a_limit(engines: Engines, agent: AgentProcess) -> None:
    engine = engines.start(agent)
    engines.ask(jobs_max=0)
    assert engines.run(engine, PROMPT)["cached"] == 0
    engines.ask(jobs_max=100)
    assert engines.run(engine, PROMPT)["cached"] == 0
    engines.ask(jobs_max=0)
    assert engines.run(engine, PROMPT)["cached"] == 0
    counts = engines.counts(engine)
    assert counts["store_busy"] >= 56
    assert counts["load_busy"] == 56
    engines.ask(jobs_max=100)
    assert engines.run(engine, PROMPT)["cached"] == 896


def test_an_agent_that_stalls_or_dies(engines: Engines, tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path)
    agent.start()
    try:
        engine = engines.start(agent, tier={"answer_s": 2.0, "load_deadline_s": 2.0})
        engines.run(engine, PROMPT)
        saved(agent)
        agent.send(signal.SIGSTOP)
        stalled = engines.run(engine, PROMPT)
        agent.send(signal.SIGCONT)
        assert stalled["cached"] == 0
        assert stalled["slowest_s"] < 1.0  # vLLM's scheduler waits for nothing
        counts = engines.counts(engine)
        assert counts["answers_late"] >= 1
        assert counts["store_failed"] == 56
        assert engines.ask(exported=engine)["store_failed"] == 56
        agent.end(signal.SIGKILL)
        assert engines.run(engine, PROMPT)["cached"] == 0
        assert engines.counts(engine)["agent_lost"] == 1
        agent.start()
        until = time.monotonic() + 60.0  # it is asked for again after a while
        while not (cached := engines.run(engine, PROMPT)["cached"]) and time.monotonic() < until:
            time.sleep(0.2)
        assert cached == 896
    finally:
        agent.send(signal.SIGCONT)
        agent.end()


@pytest.mark.parametrize("when", ["submit_store", "submit_load"])
def test_an_agent_killed_in_mid_work(engines: Engines, tmp_path: Path, when: str) -> None:
    agent = AgentProcess(tmp_path, disk=False)
    agent.start()
    assert agent._process is not None
    kill = {"kill": agent._process.pid, "when": when}
    engine = engines.start(agent)
    if when == "submit_load":
        engines.run(engine, PROMPT)
    assert engines.run(engine, PROMPT, **kill)["cached"] == 0
    counts = engines.counts(engine)
    assert counts["store_failed"] == 56
    assert counts.get("load_failed", 0) == (56 if when == "submit_load" else 0)
    agent.end()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"connector": "OffloadingConnector"}, "KvatlasTieringConnector"),
    ({"tier": {"sockets": "s"}}, "no setting sockets"),
    ({"tier": {"socket": ""}}, "needs the agent's socket"),
    ({"tier": {"socket": "/nowhere/s"}}, "start `kvatlas agent` first"),
    ({"late": {"cache_config.prefix_caching_hash_algo": "xxhash"}}, "xxhash may give two prompts"),
    ({"late": {"cache_config.enable_prefix_caching": False}}, "prefix caching is off"),
    ({"late": {"speculative_config": {}}}, "draft model"),
    ({"late": {"parallel_config.nnodes": 2}}, "on one node"),
]


@pytest.mark.parametrize(("wish", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_cannot_work_is_refused_at_the_start(
    engines: Engines, agent: AgentProcess, wish: dict[str, Any], why: str
) -> None:
    with pytest.raises(AssertionError, match=why) as told:
        engines.start(agent, **wish)
    assert "EngineError: " in str(told.value)
