"""Real vLLM engines on a real agent, when things do not go smoothly: no answer is ever another.

One engine per model, steered step by step (`tiers_child`). What is asked for under a salt of its
own shares nothing with anybody: that is the reference.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_engines import HERE, require, require_v4, tiny_model
from steered import Steered, steered

from kvatlas.core.units import Sizes
from kvatlas.dataplane.arena import SHARED_MEMORY
from kvatlas.validate.exactness_tiers import AgentProcess
from kvatlas.validate.exactness_vllm import _job, subject, text

pytestmark = pytest.mark.engine

TOKENS = 24
WAIT_S = 120.0


class Engine:
    """A real engine in a process of its own: `tiers_child`."""

    def __init__(self, child: Steered) -> None:
        self._child = child

    def ask(self, *runs: dict[str, Any], forget: bool = False) -> dict[str, Any]:
        """Requests that are in flight together."""
        return self._child.ask(runs=runs, forget=forget, die_in_save=False)

    def die_in_save(self, run: dict[str, Any]) -> int:
        """A request in which the engine ends; its exit status."""
        self._child.say(runs=[run], forget=False, die_in_save=True)
        return self._child.process.wait(WAIT_S)

    def one(self, id: str, prompt: list[int], *, forget: bool = True, **more: Any) -> Any:
        """One request alone: its logprobs, and from where its cached tokens came."""
        told = self.ask({"id": id, "prompt": prompt, **more}, forget=forget)
        return told["found"][id]["logprobs"], told["sources"]


@contextmanager
def engine(
    model: str, agent: AgentProcess, tmp_path: Path, *, context: int = 640, **settings: Any
) -> Iterator[Engine]:
    """One that is up."""
    what = subject(model, tmp_path)
    v4 = what.layout.has_minimal()
    connector = {
        "kv_connector": "KvatlasConnector",
        "kv_connector_module_path": "kvatlas.connectors.vllm_offload",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "socket": str(agent.socket),
            "answer_s": 1.0,
            "load_deadline_s": 5.0,
        },
    }
    job = _job(what, tmp_path, [{"prompt": [0] * context}], {})
    job |= {"tokens": TOKENS, "connector": connector}
    job["settings"] |= settings
    env = {"VLLM_HOST_IP": "127.0.0.1"}  # where ranks meet
    if v4:
        env["PYTHONPATH"] = str(HERE / "vllm_v4_shim")
    venv = require_v4() if v4 else require("vllm")
    with steered("tiers_child.py", venv, msgspec.json.encode(job), tmp_path, env) as child:
        child.heard()
        yield Engine(child)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    made = AgentProcess(tmp_path)
    made.start()
    yield made
    made.end()


def a_hit_that_shrinks_is_no_promise(made: Engine) -> None:
    """What an engine finds itself may be evicted while a request waits for room; "nothing beyond
    that here" was then taken for a promise of all that had gone, and nothing was loaded."""
    start, end = text(5, 225), text(5, 225) + text(6, 90)
    alone, _ = made.one("reference", end, salt="alone")
    made.one("first", start)
    # It takes so many of the 15 blocks that the second has to wait, and more while that waits.
    told = made.ask(
        {"id": "long", "prompt": text(7, 250), "tokens": 120, "salt": "long"},
        {"id": "waits", "prompt": end},
    )
    assert told["found"]["waits"]["logprobs"] == alone
    assert told["counts"]["asked_again"], "nothing was evicted: this shows nothing"
    assert told["sources"] == {"device": 96, "host": 128}


def an_agent_that_stalls_is_not_waited_for(made: Engine, agent: AgentProcess) -> None:
    prompt = text(8, 200)
    alone, _ = made.one("stall-reference", prompt, salt="alone")
    made.one("stall-saved", prompt)
    agent.send(signal.SIGSTOP)
    try:
        told = made.ask({"id": "stalled", "prompt": prompt}, forget=True)
    finally:
        agent.send(signal.SIGCONT)
    assert told["found"]["stalled"]["logprobs"] == alone
    assert told["sources"] == {}
    assert told["counts"]["loads_late"] == told["counts"]["orders_missed"] == 1
    assert made.one("awake", prompt) == (alone, {"host": 192})


def an_agent_that_dies_is_found_again(made: Engine, agent: AgentProcess) -> None:
    prompt = text(9, 200)
    alone, _ = made.one("killed-reference", prompt, salt="alone")
    made.one("killed-saved", prompt)
    agent.wait(lambda status: not status["busy"])
    agent.end(signal.SIGKILL)
    told = made.ask({"id": "without", "prompt": prompt}, forget=True)
    assert told["found"]["without"]["logprobs"] == alone
    assert told["sources"] == {}
    assert told["counts"]["agent_lost"] == 1
    agent.start()
    found: Any = {}
    until = time.monotonic() + WAIT_S
    while not found and time.monotonic() < until:
        logprobs, found = made.one(f"again-{time.monotonic()}", prompt)
        assert logprobs == alone
    assert found in ({"disk": 192}, {"host": 192})  # the second: it was saved anew meanwhile


def an_engine_that_dies_in_a_save_leaves_nothing(made: Engine, agent: AgentProcess) -> None:
    before = agent.wait(lambda status: not status["busy"])
    assert made.die_in_save({"id": "dies", "prompt": text(10, 200)}) == -signal.SIGKILL
    after = agent.idle()
    assert after["counts"]["save_given_up"] == before["counts"].get("save_given_up", 0) + 1
    assert after["staged"] == 0
    for tier, held in before["tiers"].items():
        assert after["tiers"][tier]["held_bytes"] == held["held_bytes"]


def test_gqa_goes_on_whatever_happens(agent: AgentProcess, tmp_path: Path) -> None:
    small = {"num_gpu_blocks_override": 16, "max_num_seqs": 4, "max_model_len": 480}
    with engine("gqa", agent, tmp_path, **small) as made:
        a_hit_that_shrinks_is_no_promise(made)
        an_agent_that_stalls_is_not_waited_for(made, agent)
        an_agent_that_dies_is_found_again(made, agent)
        an_engine_that_dies_in_a_save_leaves_nothing(made, agent)
    memory = SHARED_MEMORY / agent.idle()["arena"]
    assert memory.exists()
    agent.end()
    assert not memory.exists()
    assert not agent.socket.exists()


@pytest.mark.parametrize(("model", "grid"), [("swa", 32), ("v4", 256)])
def test_partial_overlaps_hit_where_the_engine_alone_has_none(
    model: str, grid: int, agent: AgentProcess, tmp_path: Path
) -> None:
    """vLLM keeps windows at the end of a prompt only; the agent has them all over the grid. For V4
    with what is shown to be enough: what that leaves unfilled nobody finds."""
    prompt = text(5, 600)
    other = prompt[:400] + text(6, 200)
    hit = 400 // grid * grid
    with engine(model, agent, tmp_path) as made:
        alone, _ = made.one("reference", other, salt="alone")
        made.one("first", prompt)
        assert made.one("other", other, forget=False) == (alone, {"host": hit})
        last = 599 // grid * grid
        again, found = made.one("again", other, forget=False)
        assert again == alone
        assert sum(found.values()) == last
        made.one("more", other[:hit], forget=True)
        assert made.one("from there", other, forget=False)[0] == alone
    saved = agent.idle()["moved_bytes"]["save dram"]
    if model == "v4":
        layout = subject(model, tmp_path).layout
        least, whole = (Sizes(layout, minimal=minimal) for minimal in (True, False))
        units = 2 + 2 + 1  # of the reference, of the first, and what the other has of its own
        assert saved == units * (least.body_bytes + least.point_bytes(1))
        assert least.point_bytes(1) < whole.point_bytes(1) / 2


@pytest.mark.long
@pytest.mark.parametrize(("model", "hit", "after"), [("tiny", 192, "device"), ("v4", 256, "host")])
def test_two_ranks_save_and_load_all_or_nothing(
    model: str, hit: int, after: str, agent: AgentProcess, tmp_path: Path
) -> None:
    """Heads are cut: each rank has its share of a unit. V4's state is the same in every rank, and
    its load is minimal: what that leaves unfilled is not in the engine's own cache ``after``. (A
    process of its own per rank: weights come from a file, or from the shim.)"""
    prompt = [token % 250 for token in text(5, hit + 10)]
    name = str(tiny_model()) if model == "tiny" else model
    with engine(name, agent, tmp_path, tensor_parallel_size=2) as made:
        alone, _ = made.one("reference", prompt, salt="alone")
        assert made.one("first", prompt) == (alone, {})
        assert made.one("again", prompt) == (alone, {"host": hit})
        assert made.one("the same again", prompt, forget=False) == (alone, {after: hit})
