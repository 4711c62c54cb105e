"""`validate stage --cpu-cluster`: real vLLM alone, as a NIXL pair, and with an agent below it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from real_engines import require

from kvatlas.validate.stages.cluster import REQUESTS, run_cluster
from kvatlas.validate.stages.result import Result, load_result, path_of

pytestmark = pytest.mark.engine

FEW = 8
#: What rests on times, which a busy machine may spoil.
BY_TIME = {"c.pays", "c.tpot"}
#: Nothing outside can drive these on one Valkey server.
NOT_SHOWN = {"d.quota", "d.rebalance"}


def played(upto: str, out: Path) -> dict[str, Result]:
    require("nixl")
    few = msgspec.structs.replace(REQUESTS, count=FEW, samples_min=FEW)
    found = run_cluster(upto, out, venv=require("vllm"), requests=few)  # type: ignore[arg-type]
    return {result.stage: result for result in found}


def open_points(result: Result) -> dict[str, str]:
    good = ("pass", "not applicable")
    return {
        v.point: f"{v.status}: {v.reason} {v.evidence}"
        for v in result.verdicts
        if v.status not in good and v.point not in BY_TIME
    }


def test_a_to_c_on_the_cpu_cluster(tmp_path: Path) -> None:
    found = played("c", tmp_path)
    assert {stage: open_points(result) for stage, result in found.items()} == {
        "a": {},
        "b": {},
        "c": {},
    }
    answers = next(v for v in found["b"].verdicts if v.point == "b.no_reprefill").evidence
    assert answers["from_outside_tokens"] > 0.9 * FEW * REQUESTS.prompt_tokens
    for stage, result in found.items():
        assert load_result(path_of(tmp_path, stage)) == result  # type: ignore[arg-type]


@pytest.mark.long  # seven starts of an engine, and an end of life that is waited for
def test_a_to_d_on_the_cpu_cluster(tmp_path: Path) -> None:
    found = played("d", tmp_path)
    if set(found) == {"a", "b", "c"}:
        pytest.skip(f"the machine is too busy for times: {open_points(found['c'])}")
    assert set(open_points(found["d"])) == NOT_SHOWN
