"""A small part of `kvatlas validate exactness` on real engines: one process per model.

The whole matrix takes a quarter of an hour; its results are in ``fixtures/validated``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nixl_kit import use_nixl
from real_engines import HERE, SGLANG_SHIM, require, require_v4

from kvatlas.connectors import vllm_greedy
from kvatlas.validate import exactness_tiers, exactness_transformers
from kvatlas.validate.answering import Child
from kvatlas.validate.exactness import Case, Fault, Report, bad_cases, difference, middle_length
from kvatlas.validate.exactness_vllm import Subject, _job, cases, run, subject, text

pytestmark = pytest.mark.engine

# The state of the window and of the entries, one part after the other, left out or damaged.
V4_FAULTS = [
    Fault(part, how) for part in ("swa", "c4_state", "c4_kv", "c128_kv") for how in ("omit", "flip")
]


def told(report: Report) -> list[str]:
    return [
        f"{f.case.name()}: {f.difference}, {f.cached_tokens}" for f in report.findings if not f.ok
    ]


def with_vllm(what: Subject, wanted: list[Case], tmp_path: Path) -> Report:
    v4 = what.layout.has_minimal()
    return run(
        what,
        wanted,
        venv=require_v4() if v4 else require("vllm"),
        engine_path=[HERE / "vllm_v4_shim"] if v4 else [],
        seed=5,
        scratch=tmp_path,
        fresh=False,
    )


@pytest.mark.parametrize("model", ["gqa", "swa"])
def test_loaded_state_is_as_good_as_computed(model: str, tmp_path: Path) -> None:
    what = subject(model, tmp_path)
    edge = 101 if model == "swa" else 129
    wanted = cases(what, [edge, 512], faults=False)
    wanted += bad_cases(what.layout, middle_length(what.layout))
    report = with_vllm(what, wanted, tmp_path)
    assert not told(report)
    assert {f.case.expected for f in report.findings} == {"same", "different"}
    assert report.proof() is None  # there is nothing minimal about these


def test_the_minimal_resume_point_of_v4_is_enough(tmp_path: Path) -> None:
    what = subject("v4", tmp_path)
    n, position = 600, 512
    wanted = [Case(n, position, "load"), Case(n, position, "minimal"), Case(n, 0, "again")]
    wanted += [Case(n, position, "load", fault, "different") for fault in V4_FAULTS]
    wanted += [Case(n, position, "load", Fault("c128_state", "omit"), "unread")]
    report = with_vllm(what, wanted, tmp_path)
    assert not told(report)


def test_what_a_minimal_load_leaves_unfilled_is_nobody_elses(tmp_path: Path) -> None:
    """The same twice: with the probe's care, and without it, where answers must go wrong.

    Not the usual minimal load: it leaves the whole window out, which is read, so that it shows.
    """
    what = subject("v4", tmp_path)
    prompt, at = text(5, 600), 512
    runs: list[dict[str, Any]] = []

    def ask(name: str, *, forget: bool = True, **params: Any) -> None:
        like = "" if name == "cold" else "cold"
        run = {"id": name, "prompt": prompt, "params": params, "forget": forget, "like": like}
        runs.append(run)

    ask("cold", save=[["whole", at]])
    for care in ("careful", "careless"):
        wishes: dict[str, Any] = {"load": "whole", "at": at, "minimal": True}
        wishes |= {"fault": ["swa", "leave", ""], "save": [[care, at]]}
        ask(f"{care} resumes", **wishes, careless=care == "careless")
        ask(f"{care} second hit", forget=False)
        ask(f"{care} load of its save", load=care, at=at)
    job = _job(what, tmp_path, runs, {}) | {"tokens": 4}
    child = Child(vllm_greedy.__file__, require_v4(), [HERE / "vllm_v4_shim"], tmp_path)
    found = child.run(job)
    told = {name: (a.cached_tokens, difference(found["cold"], a)) for name, a in found.items()}
    assert told["careful second hit"] == told["careful load of its save"] == (0, None)
    for name in ("careful resumes", "careless second hit", "careless load of its save"):
        cached, wrong = told[name]
        assert cached == at
        assert wrong is not None, name


def test_transformers_agrees_and_needs_the_rows_between_entries() -> None:
    wanted = exactness_transformers.cases("v4", [127, 256, 263], faults=False)
    wanted += [c for c in exactness_transformers.cases("v4") if c.fault and c.fault.how == "zero"]
    wanted = [c for c in wanted if not c.fault or c.position == 263]
    report = exactness_transformers.run("v4", wanted, venv=require("vllm"), seed=5)
    assert not told(report)
    (rows,) = [f for f in report.findings if f.case.fault and f.case.fault.part == "c128_state"]
    assert rows.difference is not None
    assert rows.difference.at == 384 - rows.case.prompt_tokens  # silent until the entry is complete


BELOW = {"disk": 2 * 192, "object": 192, "peer": 192}


@pytest.mark.parametrize(
    ("engine", "model", "tiers", "below"),
    [
        ("vllm", "swa", ("dram", "disk"), {"disk": 192}),
        pytest.param("vllm", "swa", exactness_tiers.TIERS, BELOW, marks=pytest.mark.long),
        pytest.param("sglang", "gqa", exactness_tiers.TIERS, BELOW, marks=pytest.mark.long),
    ],
)
def test_an_agent_gives_back_what_engines_saved(
    tmp_path: Path, engine: str, model: str, tiers: tuple[str, ...], below: dict[str, int]
) -> None:
    """Out of a peer's memory by NIXL under vLLM, over TCP under SGLang."""
    by = "nixl/cma" if engine == "vllm" and "peer" in tiers else "tcp"
    with pytest.MonkeyPatch.context() as patch:
        if by != "tcp":
            use_nixl(patch, tmp_path)
        report = exactness_tiers.run(
            subject(model, tmp_path),
            [200],
            tiers,
            engine=engine,
            venv=require(engine),
            engine_path=[SGLANG_SHIM] if engine == "sglang" else [],
            seed=5,
            scratch=tmp_path,
        )
    assert not report.failures
    dram = report.cached_tokens_by_tier["dram"]
    assert report.cached_tokens_by_tier == {"dram": dram, **below}
    assert dram
    assert not dram % 192
    assert report.damaged
    assert report.transports.get("peer", by) == by
