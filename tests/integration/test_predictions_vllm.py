"""Random request sequences on real vLLM: the directory's predictions are what vLLM reports.

The same as ``kvatlas validate predictions``, with a seed of its own, on the three kinds of state:
plain attention, sliding windows, DeepSeek V4. Restarts and cache resets are part of the sequences.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from real_engines import HERE, require, require_v4

from kvatlas.connectors.vllm_direct import DirectVllm
from kvatlas.validate.predictions import Outcome
from kvatlas.validate.results import Summary, extend, summary
from kvatlas.validate.tiny import Tiny, tiny

pytestmark = pytest.mark.engine

SEED = 2
SHIM = HERE / "vllm_v4_shim"


def play(model: Tiny, requests: int, folder: Path) -> list[Outcome]:
    v4 = model.name == "v4"
    venv = require_v4() if v4 else require("vllm")
    path = [SHIM] if v4 else []
    with DirectVllm(venv, name="vllm", log=folder / "vllm.log", path=path) as engine:
        return extend(
            folder / "out.jsonl",
            model,
            seed=SEED,
            requests=requests,
            engine=engine,
            told=lambda _: None,
        )


def check(outcomes: list[Outcome], requests: int) -> Summary:
    total = summary(outcomes)
    assert total.requests == requests
    assert total.false_hits == 0
    differences = [d for o in outcomes for d in o.differences]
    assert total.exact == requests, differences[:5]
    assert total.hits > requests // 3
    assert total.applied["removed"] > requests // 5
    assert not {"orphans", "undeclared", "malformed", "refused"} & set(total.applied)
    return total


@pytest.mark.parametrize(
    ("name", "requests", "each"), [("gqa", 500, 125), ("swa", 500, 125), ("v4", 40, 20)]
)
def test_every_prediction_is_what_vllm_reports(
    name: str, requests: int, each: int, tmp_path: Path
) -> None:
    """Sequences of ``each``: every one starts an engine, which is most of the time."""
    model = msgspec.structs.replace(tiny(name), sequence_requests=each)
    total = check(play(model, requests, tmp_path), requests)
    if requests == 500:
        assert {"crowd", "clear", "restart", "junction"} <= set(total.steps)
