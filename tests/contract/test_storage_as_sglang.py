"""Our storage backend for SGLang under SGLang's own host pools and cache controller: what is
written is found by its rules, comes back byte by byte, and what is not whole does not count."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_engines import HERE, require

import kvatlas
from kvatlas.validate.exactness_tiers import AgentProcess, _flip_arena

pytestmark = pytest.mark.engine

_CHILD = Path(__file__).with_name("sglang_storage_child.py")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    made = AgentProcess(tmp_path)
    made.start()
    yield made
    made.end()


def told(agent: AgentProcess, *engines: dict[str, Any]) -> list[list[Any]]:
    """Per engine: `None` or why it did not start, then what each of its steps said."""
    source = str(Path(kvatlas.__file__).parents[1])
    job = {"socket": str(agent.socket), "source": source, "engines": engines}
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    child = subprocess.run(
        [str(require("sglang") / "bin" / "python"), str(_CHILD)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=env | {"PYTHONPATH": str(HERE / "sglang_cpu_shim"), "OMP_NUM_THREADS": "1"},
    )
    assert child.returncode == 0, child.stderr[-3000:]
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    found = []
    for engine in engines:
        steps = len(engine["steps"]) if lines[0] is None else 0
        found.append(lines[: steps + 1])
        del lines[: steps + 1]
    assert not lines, lines
    return found


LAYOUTS = ("page_first", "page_first_direct", "layer_first")


def test_pages_of_one_pool_in_every_layout(agent: AgentProcess) -> None:
    steps = [
        ["query", 1, 0, 6],
        ["write", 1, 0, 5],
        ["query", 1, 0, 6],
        ["read", 1, 0, 6],
        ["read", 1, 2, 3],
        ["read", 2, 0, 6],
        ["write", 1, 5, 300],
        ["read", 1, 0, 305],
        ["write", 1, 0, 5],
        ["write", 3, 0, 2, {"no_prefix": True}],
        ["counts"],
    ]
    engines = [
        {"pools": kind, "layout": layout, "steps": steps}
        for kind in ("mha", "mla")
        for layout in LAYOUTS
    ]
    for number, found in enumerate(told(agent, *engines)):
        assert found == [
            None,
            [0, None, {"kv": 0}],  # the bytes of another layout are no hit
            5,
            [5, None, {"kv": 5}],
            [5, {}, {"kv": 5}],
            [3, {}, {"kv": 3}],
            [0, {}, {"kv": 0}],
            300,
            [305, {}, {"kv": 305}],
            5,
            0,
            {"set_without_prefix": 2},
        ], engines[number]
    status = agent.idle()
    assert status["staged"] == 0
    assert status["loaded_tokens"] == {"dram": 16 * 313 * 6}
    assert status["tiers"]["dram"]["units"] == 305 * 6


SIDE = ["deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128"]
TAIL = ["swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state"]


def v4(pages: int, trailing: int) -> dict[str, int]:
    """Right pages by pool."""
    return dict.fromkeys(SIDE, pages) | dict.fromkeys(TAIL, trailing)


def test_an_anchor_without_bytes_and_restorable_prefixes(agent: AgentProcess) -> None:
    """DeepSeek V4's pools: bodies of every page, windows and states at the ends of nodes only."""
    steps = [
        ["write", 1, 0, 5, 1],
        ["query", 1, 0, 6, 1],
        ["read", 1, 0, 6, 1],
        ["write", 1, 5, 3, 2],  # its last two pages have a window
        ["query", 1, 0, 9, 1],
        ["read", 1, 0, 6, 1],  # it ends where there is no window: back to the last one
        ["read", 1, 2, 6, 1],
        ["write", 1, 8, 2, 0],  # no window: bodies alone
        ["query", 1, 0, 10, 1],
        ["write", 1, 10, 150, 1],  # in two batches; bodies come before the point
        ["query", 1, 0, 160, 1],
        ["read", 1, 0, 160, 1],
        ["counts"],
        ["stats"],
    ]
    engines = [{"pools": "v4", "layout": layout, "steps": steps} for layout in LAYOUTS]

    def hits(bodies: int, tail: int) -> dict[str, int]:
        found = {"kv": bodies} | dict.fromkeys(SIDE, bodies) | dict.fromkeys(TAIL, tail)
        return {name: count for name, count in found.items() if count or name == "kv"}

    one = dict.fromkeys(TAIL, 1)
    for found in told(agent, *engines):
        assert found == [
            None,
            5,
            [5, [5], hits(5, 5)],
            [5, one, v4(5, 1)],
            3,
            [8, [5, 7, 8], hits(8, 8)],
            [5, one, v4(5, 1)],
            [6, one, v4(6, 1)],
            2,
            [8, [5, 7, 8], hits(10, 8)],
            150,
            [160, [5, 7, 8, 160], hits(160, 160)],
            [160, one, v4(160, 1)],
            {},
            [[5, 5, 6, 128, 32], [5, 3, 2, 128, 22], 5],
        ]


def test_windows_of_several_pages_over_a_pool_with_bytes(agent: AgentProcess) -> None:
    steps = [
        ["write", 1, 0, 6, 6],
        ["query", 1, 0, 6, 3],
        ["write", 1, 6, 4, 2],
        ["query", 1, 0, 10, 3],  # at 10 the window is one page short
        ["query", 1, 0, 10, 2],
        ["read", 1, 0, 10, 3],
        ["read", 1, 0, 10, 2],
        ["write", 2, 3, 2, 2],  # what comes before it is not here
        ["query", 2, 3, 2, 1],
        ["counts"],
    ]
    (found,) = told(agent, {"pools": "swa", "steps": steps})
    assert found == [
        None,
        6,
        [6, [1, 2, 3, 4, 5, 6], {"kv": 6, "swa": 6}],
        4,
        [6, [1, 2, 3, 4, 5, 6], {"kv": 10, "swa": 6}],
        [10, [1, 2, 3, 4, 5, 6, 10], {"kv": 10, "swa": 10}],
        [6, {"swa": 3}, {"kv": 6, "swa": 3}],
        [10, {"swa": 2}, {"kv": 10, "swa": 2}],
        2,
        [0, [], {"kv": 2}],
        {"set_failed_trailing": 2},
    ]


def test_what_must_agree_is_in_the_keys(agent: AgentProcess) -> None:
    """Another model, weights, rank, page content or sharing of heads never shares; replicated ranks
    do."""
    look = [["query", 1, 0, 4]]
    write = [["write", 1, 0, 4]]
    ranks = {"tp_size": 2, "tp_rank": 1}
    miss, hit = [None, [0, None, {"kv": 0}]], [None, [4, None, {"kv": 4}]]
    found = told(
        agent,
        {"pools": "mha", "steps": write},
        {"pools": "mha", "steps": look},
        {"pools": "mha", "config": {"model_name": "another"}, "steps": look},
        {"pools": "mha", "settings": {"weights_digest": "w"}, "steps": look},
        {"pools": "mha", "config": ranks, "steps": [*look, *write]},
        {"pools": "mha", "config": {**ranks, "tp_rank": 0}, "steps": look},
        {"pools": "mha", "config": ranks, "steps": look},
        {"pools": "mha", "heads": 4, "steps": look},
        {"pools": "mla", "config": {**ranks, "tp_rank": 0}, "steps": write},
        {"pools": "mla", "config": ranks, "steps": look},
        {"pools": "mla", "steps": look},
        {"pools": "mla", "config": {"pp_size": 2, "pp_rank": 0}, "steps": [*look, *write]},
        {"pools": "mla", "config": {"pp_size": 2, "pp_rank": 1}, "steps": look},
    )
    assert found[1] == hit
    assert found[2] == found[3] == found[5] == found[7] == miss
    assert found[4] == [*miss, 4]
    assert found[6] == hit
    assert found[9] == found[10] == hit
    assert found[11] == [*miss, 4]
    assert found[12] == miss


def test_what_cannot_work_is_refused_at_the_start(agent: AgentProcess) -> None:
    def start(pools: str = "mha", **more: Any) -> dict[str, Any]:
        return {"pools": pools, "steps": [["clear"]], **more}

    found = told(
        agent,
        start(settings={"interface_v1": 0}),
        start(config={"tp_lcm_size": 4}),
        start(config={"attn_cp_size": 2}),
        start(config={"model_name": None}),
        start(settings={"socket": "/nowhere/s"}),
        start(layout="page_unified"),
        start(),
    )
    assert [str(lines[0]) for lines in found[:-2]] == [
        'EngineError: the extra config lacks "interface_v1": 1, without which pages go through'
        " Python objects",
        "EngineError: tp_lcm_size is not supported: each rank keeps its own heads whole",
        "EngineError: context parallel engines are not supported: their ranks cut pages up",
        "EngineError: the engine does not say which model it serves",
        "EngineError: no agent answers at /nowhere/s: start `kvatlas agent` first"
        " ([Errno 2] No such file or directory)",
    ]
    assert "page_unified" in str(found[-2][0])
    assert found[-1][0] is None
    assert "belongs to all engines of its node" in found[-1][1]


def test_damage_and_a_dead_agent_are_misses(agent: AgentProcess) -> None:
    steps = [["write", 1, 0, 6, 1]]
    told(agent, {"pools": "v4", "steps": steps})
    agent.idle()
    _flip_arena(agent)
    assert agent._process is not None
    steps = [
        ["query", 1, 0, 6, 1],  # nobody knows yet
        ["read", 1, 0, 6, 1],
        ["read", 1, 0, 6, 1],  # bodies from the disk, and the point in memory is found out
        ["read", 1, 0, 6, 1],
        ["write", 2, 0, 3, 1],
        ["kill_agent", agent._process.pid],
        ["read", 2, 0, 3, 1],
        ["write", 3, 0, 2, 1],
        ["counts"],
    ]
    (found,) = told(agent, {"pools": "v4", "steps": steps})
    assert found[1][0] == 6
    assert found[2][0] == 0
    assert set(found[2][2].values()) == {0}, "wrong bytes were handed out"
    assert found[3] == [6, dict.fromkeys(TAIL, 0), v4(6, 0)]
    assert found[4] == [6, dict.fromkeys(TAIL, 1), v4(6, 1)]
    assert found[5] == 3
    assert found[7][0] == 0
    assert set(found[7][2].values()) == {0}
    assert found[8] == 0
    assert found[9]["agent_lost"] == 1
    assert found[9]["set_failed"] == 2
