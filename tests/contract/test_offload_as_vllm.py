"""The connector under vLLM's own scheduler, with ranks of tensor parallelism and without a model.

Every block that a resume reads is looked at. V4's groups and the minimal resume point need no
processor that has V4's kernels here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm_kit import told_by_vllm

from kvatlas.service import agent_wire as wire
from kvatlas.validate.exactness_tiers import AgentProcess
from kvatlas.validate.exactness_vllm import subject, text

pytestmark = pytest.mark.engine

SHOWN_ON = "cpu AVX512"  # the minimal resume point of V4
PROMPT = text(5, 900)
OTHER = PROMPT[:600] + text(6, 300)
BROKEN = text(7, 900)

Hits = dict[str, tuple[int, int]]  # tokens of the engine's own hit, and tokens that were loaded


def run(
    id: str, prompt: list[int], *, forget: bool = True, salt: str = "", broken: int = -1
) -> dict[str, Any]:
    return {"id": id, "prompt": prompt, "forget": forget, "salt": salt, "broken": broken}


FIRST = [
    run("first", PROMPT),
    run("again", PROMPT),
    run("other", OTHER),
    run("own", OTHER, forget=False),
    run("edge", PROMPT[:520]),
    run("edge again", PROMPT[:520], forget=False),
    run("broken", BROKEN, broken=0),  # the first of each order is its turn, however few they are
    run("not whole", BROKEN),
]


def engine(
    model: str, folder: Path, agent: AgentProcess, runs: list[dict[str, Any]], ranks: int
) -> dict[str, Any]:
    """One for `vllm_offload_child`."""
    folder = folder / model
    folder.mkdir(exist_ok=True)
    layout = subject(model, folder).layout
    replicated = layout.tensor_parallel == "replicated"
    parts = {p.name: p for p in wire.parts_of(layout, 1 if replicated else ranks)}
    groups: list[dict[str, Any]] = []
    for group in layout.groups:
        for copy in range(group.copies):
            groups.append(
                {
                    f"{c.name}.{layer}": msgspec.structs.asdict(parts[c.name])
                    for c in layout.components
                    if c.group == group.name
                    for layer in range(copy, c.layers, group.copies)
                }
            )
    return {
        "config": str(folder / "model"),
        "socket": str(agent.socket),
        "device": SHOWN_ON,
        "ranks": ranks,
        "replicated": replicated,
        "groups": groups,
        "minimal": {p.name: p.least_blocks for p in parts.values()},
        "runs": runs,
    }


class Told:
    """All engines, one after the other on one agent, by model and number of ranks."""

    def __init__(self, folder: Path, agent: AgentProcess) -> None:
        self.hits: dict[tuple[str, int], Hits] = {}
        self.wrong = 0
        self.not_copied: list[int] = []
        wanted = [(model, 2, FIRST) for model in ("gqa", "swa", "v4")]
        wanted += [(model, 1, [run("there", PROMPT)]) for model in ("gqa", "v4")]
        wishes = [engine(model, folder, agent, runs, ranks) for model, ranks, runs in wanted]
        lines = iter(told_by_vllm("vllm_offload_child.py", wishes, sum(len(r) for *_, r in wanted)))
        for model, ranks, runs in wanted:
            answers = {asked["id"]: next(lines) for asked in runs}
            self.hits[model, ranks] = {k: (a["local"], a["loaded"]) for k, a in answers.items()}
            self.wrong += sum(answer["wrong"] for answer in answers.values())
            if ranks > 1:
                self.not_copied.append(answers["broken"]["counts"]["not_copied"])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    folder = tmp_path_factory.mktemp("ranks")
    agent = AgentProcess(folder)
    agent.start()
    try:
        yield Told(folder, agent)
    finally:
        agent.end()


def test_every_block_that_was_read_held_what_it_should(told: Told) -> None:
    assert told.wrong == 0


@pytest.mark.parametrize(("model", "grid"), [("gqa", 32), ("swa", 32), ("v4", 256)])
def test_two_ranks_save_and_load_together(model: str, grid: int, told: Told) -> None:
    hits = told.hits[model, 2]
    assert hits["first"] == (0, 0)
    assert hits["again"] == (0, 899 // grid * grid)
    assert hits["other"] == (0, 600 // grid * grid)  # vLLM alone keeps no window there
    assert hits["own"] == (899 // grid * grid, 0)
    assert hits["edge"] == (0, 519 // grid * grid)


def test_what_one_rank_did_not_save_is_not_saved(told: Told) -> None:
    """A share of each unit where heads are cut, every other unit where they are not."""
    for model in ("gqa", "swa", "v4"):
        assert told.hits[model, 2]["not whole"] == (0, 0)
    assert all(told.not_copied)


def test_heads_that_are_cut_are_not_for_others(told: Told) -> None:
    assert told.hits["gqa", 1]["there"] == (0, 0)
    assert told.hits["v4", 1]["there"] == (0, 768)  # every rank has the same


def test_what_a_minimal_load_leaves_unfilled_is_no_hit(told: Told) -> None:
    """The engine itself does not find it at the edge where it lies: all is loaded once more."""
    assert told.hits["v4", 2]["edge again"] == (0, 512)
    assert told.hits["swa", 2]["edge again"] == (512, 0)  # nothing was left unfilled
