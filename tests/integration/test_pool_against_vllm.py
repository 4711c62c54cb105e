"""The engine model against recordings of real vLLM 0.32: same requests, same hits, same events.

`tests/record_vllm.py` made the recordings. Blocks, retention, step size and requests are the
same; engine keys are not (vLLM hashes otherwise), so hashes are compared by what they name: two
streams agree when one bijection of hashes makes them equal.
"""

from __future__ import annotations

import functools
import json
import lzma
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvatlas.core.layout import Group, Layout
from kvatlas.workload.engine import Engine
from kvatlas.workload.protocol import Admitted, Arrive, Effect, Published
from kvatlas.workload.spec import EngineSpec

RECORDED = Path(__file__).parent.parent / "fixtures" / "recorded"


def layout(grid: int, *groups: Group) -> Layout:
    return Layout("recorded", "vllm", "", grid, (), groups)


SWA = layout(
    32,
    Group("swa", "sliding_window", 32, 100, copies=2),
    Group("full", "full_attention", 32),
)
V4 = layout(
    256,
    Group("swa", "sliding_window_mla", 64, 128, copies=2),
    Group("global", "mla_attention", 256),
    Group("c4-state", "sliding_window_mla", 4, 8),
    Group("c128-state", "sliding_window_mla", 8, 128),
)
LAYOUTS = {
    "gqa": layout(32, Group("kv", "full_attention", 32)),
    "swa": SWA,
    "swa-256": SWA,
    "v4": V4,
    "v4-dense": V4,
}


@functools.cache
def recording(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        lzma.decompress((RECORDED / f"{name}.json.xz").read_bytes())
    )
    return loaded


class Replayed:
    """Answers with the outputs that vLLM gave."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[int]] = {}

    def resume(self, request: Arrive, admitted: Admitted) -> None:
        pass

    def compute(self, computed: object, tokens: bytes) -> None:
        pass

    def token(self, id: str, index: int) -> int:
        return self.outputs[id][index]

    def release(self, id: str) -> None:
        pass


@functools.cache
def replay(name: str) -> tuple[list[list[int]], list[list[Event]], int]:
    """Reported hits per round, batches of events, preemptions of our engine on the recording."""
    recorded = recording(name)
    settings = recorded["settings"]
    spec = EngineSpec(
        blocks=settings["num_gpu_blocks_override"] - 1,
        max_running=settings["max_num_seqs"],
        step_tokens=settings["max_num_batched_tokens"],
        context_tokens=settings["max_model_len"],
        retention_tokens=settings["prefix_cache_retention_interval"],
        prefill_tokens_per_s=1e5,
        decode_step_s=0.01,
    )
    model = Replayed()
    engine = Engine(LAYOUTS[name], spec, model=model)
    now, number = 0.0, 0
    hits: list[list[int]] = []
    batches: list[list[Event]] = []
    for requests in recorded["rounds"]:
        first = number
        effects: list[Effect] = []
        for request in requests:
            tokens = struct.pack(f"<{len(request['prompt'])}I", *request["prompt"])
            model.outputs[str(number)] = request["output"]
            arrive = Arrive(str(number), tokens, len(request["output"]), salt=request["salt"])
            effects += engine.handle(arrive, now)
            number += 1
        while (due := engine.next_deadline()) is not None:
            now = due
            effects += engine.tick(now)
        found: dict[str, int] = {}
        for effect in effects:
            if isinstance(effect, Admitted):
                found.setdefault(effect.id, effect.cached_tokens)  # before any preemption
            elif isinstance(effect, Published):
                batches.append(list(effect.events))
        hits.append([found[str(n)] for n in range(first, number)])
    return hits, batches, engine.preemptions


def wire(event: Event, names: dict[int, int]) -> dict[str, Any]:
    """One of our events as the fields that vLLM publishes, hashes by order of appearance."""

    def name(value: int) -> int:
        return names.setdefault(value, len(names))

    match event:
        case BlockStored():
            count = len(event.tokens) // 4
            return {
                "type": "BlockStored",
                "hashes": [name(h) for h in event.hashes],
                "parent": None if event.parent is None else name(event.parent),
                "tokens": list(struct.unpack(f"<{count}I", event.tokens)),
                "block_size": event.block_tokens,
                "group": event.group,
                "kind": event.kind,
                "window": event.window_tokens,
                "salt": event.salt,
            }
        case BlockRemoved():
            return {
                "type": "BlockRemoved",
                "hashes": [name(h) for h in event.hashes],
                "group": event.group,
            }
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def theirs(event: dict[str, Any], names: dict[int, int]) -> dict[str, Any]:
    def name(value: int) -> int:
        return names.setdefault(value, len(names))

    hashes = [name(h) for h in event["block_hashes"]]
    if event["type"] == "BlockRemoved":
        return {"type": "BlockRemoved", "hashes": hashes, "group": event["group_idx"]}
    extras = [key for keys in event.get("extra_keys") or [] if keys for key in keys]
    return {
        "type": event["type"],
        "hashes": hashes,
        "parent": None if event["parent_block_hash"] is None else name(event["parent_block_hash"]),
        "tokens": event["token_ids"],
        "block_size": event["block_size"],
        "group": event["group_idx"],
        "kind": event["kv_cache_spec_kind"],
        "window": event.get("kv_cache_spec_sliding_window"),
        "salt": extras[0] if extras else "",
    }


def recorded_batches(name: str) -> list[list[dict[str, Any]]]:
    frames = recording(name)["frames"]
    assert [seq for _, seq, _ in frames] == list(range(len(frames)))
    return [msgspec.msgpack.decode(bytes.fromhex(payload))[1] for _, _, payload in frames]


NAMES = sorted(LAYOUTS)


@pytest.mark.parametrize("name", NAMES)
def test_every_request_hits_what_vllm_reported(name: str) -> None:
    expected = [[r["cached_tokens"] for r in each] for each in recording(name)["rounds"]]
    hits, _, _ = replay(name)
    assert hits == expected
    assert any(hit for each in hits for hit in each)


@pytest.mark.parametrize("name", NAMES)
def test_the_event_stream_is_the_one_vllm_published(name: str) -> None:
    _, batches, _ = replay(name)
    ours_names: dict[int, int] = {}
    theirs_names: dict[int, int] = {}
    ours = [[wire(e, ours_names) for e in batch] for batch in batches]
    expected = [[theirs(e, theirs_names) for e in batch] for batch in recorded_batches(name)]
    for step, (got, want) in enumerate(zip(ours, expected, strict=False)):
        assert got == want, f"batch {step}"
    assert len(ours) == len(expected)


def test_the_recordings_exercise_what_they_are_for() -> None:
    kinds = {name: {e["type"] for batch in recorded_batches(name) for e in batch} for name in NAMES}
    assert all({"BlockStored", "BlockRemoved"} <= found for found in kinds.values())
    assert any(replay(name)[2] for name in NAMES), "no recording forces a preemption"
