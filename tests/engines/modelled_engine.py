"""The engine model behind the interface of `kvatlas.validate.predictions`: no vLLM, no waiting."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas.connectors.stub_wire import EventEncoder
from kvatlas.connectors.vllm_direct import Answered, Asked
from kvatlas.core.layout import Layout
from kvatlas.workload.engine import Engine
from kvatlas.workload.protocol import Admitted, Arrive, ClearCache, Effect, Produced, Published
from kvatlas.workload.spec import EngineSpec


class Modelled:
    """One engine model per life, with the settings that vLLM would get."""

    version = "engine model"

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
