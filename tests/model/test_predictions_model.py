"""What the directory predicts is what the engine model then finds, over random sequences.

The same harness and the same sequences as ``kvatlas validate predictions``, with the engine model
in place of vLLM. The model's stream is the one that vLLM publishes (test_recorded_runs), so
what is seen here for hundreds of requests a second holds there; test_predictions_vllm checks that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from modelled_engine import Modelled

from kvatlas.core.claims import Applied, Claims
from kvatlas.core.events import BlockRemoved
from kvatlas.validate.predictions import Observer, Outcome, Play
from kvatlas.validate.results import Summary, summary
from kvatlas.validate.tiny import Tiny, tiny

SEED = 11


def played(model: Tiny, folder: Path, sequences: int) -> list[Outcome]:
    (folder / "config.json").write_bytes(model.config())
    engine = Modelled(model.layout(folder))
    return [
        Play(engine, model, folder, number).run(SEED, model.sequence_requests)
        for number in range(sequences)
    ]


def told(outcomes: Sequence[Outcome]) -> str:
    lines = [
        f"{o.sequence} (retention {o.retention}): {d}" for o in outcomes for d in o.differences
    ]
    return "\n".join(lines[:20])


@pytest.mark.parametrize(("name", "sequences"), [("gqa", 10), ("swa", 10), ("v4", 10)])
def test_every_prediction_is_what_the_engine_finds(
    name: str, sequences: int, tmp_path: Path
) -> None:
    outcomes = played(tiny(name), tmp_path, sequences)
    total: Summary = summary(outcomes)
    assert total.exact == total.requests, told(outcomes)
    assert total.hits > total.requests // 3
    assert total.applied["removed"] > total.requests
    assert {"crowd", "junction", "clear"} <= set(total.steps)
    assert not {"orphans", "undeclared", "malformed", "refused"} & set(total.applied)


def test_a_directory_that_forgets_nothing_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(_self: Claims, _event: BlockRemoved, _applied: Applied) -> None:
        pass

    monkeypatch.setattr(Claims, "removed", deaf)
    total = summary(played(tiny("gqa"), tmp_path, 2))
    assert total.false_hits > 0
    assert total.exact < total.requests - total.false_hits + 1


def test_a_directory_that_counts_the_longest_chain_is_caught(tmp_path: Path) -> None:
    """What routers for plain attention do: the windows of V4 do not count."""
    model = tiny("v4")
    (tmp_path / "config.json").write_bytes(model.config())
    engine = Modelled(model.layout(tmp_path))

    class Longest(Observer):
        def expected(self, keys: Sequence[bytes]) -> tuple[int, int]:
            return (super().expected(keys)[1],) * 2

    play = Play(engine, model, tmp_path, 0)
    play.observer = Longest(model.layout(tmp_path))
    assert play.run(SEED, 40).false_hits() > 0
