"""What the directory predicts is what the engine model then finds, over random sequences.

The same harness and the same sequences as ``kvatlas validate predictions``, with the engine model
in place of vLLM. The model's stream is the one that vLLM publishes (test_pool_against_vllm), so
what is seen here for hundreds of requests a second holds there; test_predictions_vllm checks that.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvatlas.connectors.stub_wire import EventEncoder
from kvatlas.connectors.vllm_direct import Answered, Asked
from kvatlas.core.layout import Layout
from kvatlas.validate.predictions import Outcome, Play
from kvatlas.validate.results import Summary, summary
from kvatlas.validate.tiny import Tiny, tiny
from kvatlas.workload.engine import Engine, EngineSpec
from kvatlas.workload.protocol import Admitted, Arrive, ClearCache, Effect, Produced, Published

SEED = 11


class Modelled:
    """The engine model behind the harness's interface."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._encoder = EventEncoder("vllm")
        self._number = 0

    def begin(self, settings: Mapping[str, Any]) -> None:
        spec = EngineSpec(
            blocks=settings["num_gpu_blocks_override"] - 1,
            max_running=settings["max_num_seqs"],
            step_tokens=settings["max_num_batched_tokens"],
            context_tokens=settings["max_model_len"],
            retention_tokens=settings["prefix_cache_retention_interval"],
            prefill_tokens_per_s=1e5,
            decode_step_s=0.01,
        )
        self._engine = Engine(self._layout, spec)
        self._now = 0.0
        self._seq = 0

    def clear(self) -> None:
        self._engine.handle(ClearCache(), self._now)

    def generate(self, requests: Sequence[Asked]) -> tuple[list[Answered], list[tuple[int, bytes]]]:
        effects: list[Effect] = []
        ids = []
        for asked in requests:
            ids.append(str(self._number))
            self._number += 1
            tokens = struct.pack(f"<{len(asked.prompt)}I", *asked.prompt)
            arrive = Arrive(ids[-1], tokens, asked.output_tokens, salt=asked.salt)
            effects += self._engine.handle(arrive, self._now)
        while (due := self._engine.next_deadline()) is not None:
            self._now = due
            effects += self._engine.tick(due)
        return [_answered(id, effects) for id in ids], self._batches(effects)

    def _batches(self, effects: list[Effect]) -> list[tuple[int, bytes]]:
        batches = []
        for effect in effects:
            if isinstance(effect, Published):
                payload = self._encoder.payload(effect.events, self._now)
                batches.append((self._seq, payload))
                self._seq += 1
        return batches


def _answered(id: str, effects: list[Effect]) -> Answered:
    hits = [e.cached_tokens for e in effects if isinstance(e, Admitted) and e.id == id]
    return Answered(hits[0], [e.token for e in effects if isinstance(e, Produced) and e.id == id])


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
