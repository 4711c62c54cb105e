"""A small part of `kvatlas validate exactness` on real engines: one process per model.

The whole matrix takes a quarter of an hour; its results are in ``fixtures/validated``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engines import HERE, require

from kvatlas.validate import exactness_transformers
from kvatlas.validate.exactness import Case, Fault, Report, bad_cases, middle_length
from kvatlas.validate.exactness_vllm import Subject, cases, run, subject

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
    return run(
        what,
        wanted,
        venv=require("vllm"),
        engine_path=[HERE / "vllm_v4_shim"] if what.layout.has_minimal() else [],
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
    wanted = [Case(n, position, way) for way in ("load", "minimal", "again")]
    wanted += [Case(n, position, "load", fault, "different") for fault in V4_FAULTS]
    wanted += [Case(n, position, "load", Fault("c128_state", "omit"), "unread")]
    report = with_vllm(what, wanted, tmp_path)
    assert not told(report)


def test_transformers_agrees_and_needs_the_rows_between_entries() -> None:
    wanted = exactness_transformers.cases("v4", [127, 256, 263], faults=False)
    wanted += [c for c in exactness_transformers.cases("v4") if c.fault and c.fault.how == "zero"]
    wanted = [c for c in wanted if not c.fault or c.position == 263]
    report = exactness_transformers.run("v4", wanted, venv=require("vllm"), seed=5)
    assert not told(report)
    (rows,) = [f for f in report.findings if f.case.fault and f.case.fault.part == "c128_state"]
    assert rows.difference is not None
    assert rows.difference.at == 384 - rows.case.prompt_tokens  # silent until the entry is complete
