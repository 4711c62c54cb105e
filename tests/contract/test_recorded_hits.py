"""Recorded event bytes of real vLLM 0.32, through wire and directory: the hits that it reported.

Each recording (see ``tests/record_vllm.py``) has every request with its reported cached tokens,
and every frame that the engine published. The frames of the requests before go into the
directory; what it then promises for the next request must be what vLLM found. This covers one
chain group, sliding windows with the default and a dense retention, and DeepSeek V4's five groups.
"""

from __future__ import annotations

import json
import lzma
from array import array
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core.directory import Directory
from kvatlas.core.events import Batch, BlockStored
from kvatlas.core.keys import PUBLIC, Keyring, Scope
from kvatlas.core.layout import Group, Layout
from kvatlas.core.records import Publisher
from kvatlas.service.wire import Decoder

RECORDED = Path(__file__).resolve().parents[1] / "fixtures" / "recorded"
FINGERPRINT = b"f" * 32
W1 = Publisher("w1")


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


def pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def is_chain(event: object, grid: int) -> bool:
    """Whole blocks of the group that every block counts in."""
    return (
        isinstance(event, BlockStored)
        and "sliding" not in (event.kind or "")
        and event.block_tokens == grid
    )


def of_round(batch: Batch, requests: list[Any], done: dict[bytes, int], grid: int) -> bool:
    """Whether a batch can stem from these requests: what it stores are parts of them, and in a
    request's chain it goes on where the hit, or the batch before, ended (``done``)."""
    steps: dict[bytes, int] = {}
    for event in batch.events:
        if not isinstance(event, BlockStored):
            continue
        wholes = [pack(r["prompt"] + r["output"]) for r in requests]
        wholes = [whole for whole in wholes if event.tokens in whole]
        if not wholes:
            return False
        if len(requests) == 1 and is_chain(event, grid):
            (whole,) = wholes
            at = steps.get(whole, done.get(whole, requests[0]["cached_tokens"] * 4))
            if whole[at : at + len(event.tokens)] != event.tokens:
                return False
            steps[whole] = at + len(event.tokens)
    done.update(steps)
    return True


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_directory_promises_what_vllm_then_reports(name: str) -> None:
    recording: Any = json.loads(lzma.decompress((RECORDED / f"{name}.json.xz").read_bytes()))
    decoder = Decoder()
    batches = [decoder.decode(seq, bytes.fromhex(raw)) for _, seq, raw in recording["frames"]]
    assert decoder.reasons == {}
    assert [batch.seq for batch in batches] == list(range(len(batches)))
    keyring = Keyring(b"a test's own secret")
    directory = Directory(keyring)
    directory.register(W1, LAYOUTS[name], FINGERPRINT)
    grid = LAYOUTS[name].grid_tokens
    told, promised, before = [], [], []
    for requests in recording["rounds"]:
        prompt, salt = requests[0]["prompt"], requests[0]["salt"]
        # Requests of one round see each other's blocks; and where a round of several is followed
        # by one of its own prompts, nobody can say whose a frame is.
        unclear = len(before) > 1 and any(prompt == other["prompt"] for other in before)
        if len(requests) == 1 and not unclear:
            root = keyring.root(FINGERPRINT, Scope("tenant", salt) if salt else PUBLIC)
            usable = (len(prompt) - 1) // grid * grid
            found = directory.peek(keyring.chain(root, pack(prompt[:usable]), grid), FINGERPRINT)
            promised.append(found[0].tokens if found else 0)
            told.append(requests[0]["cached_tokens"])
        done: dict[bytes, int] = {}
        while batches and of_round(batches[0], requests, done, grid):
            applied = directory.apply(W1, batches.pop(0).events)
            problems = (applied.orphans, applied.undeclared, applied.malformed, applied.refused)
            assert problems == (0, 0, 0, 0)
        before = requests
    assert promised == told
    assert len(told) >= 15
    assert batches == []
