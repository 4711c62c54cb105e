"""What vLLM 0.32 announced of a minimal load of DeepSeek V4's state, and what the directory makes
of it: blocks that were never filled are held nowhere. See ``tests/record_minimal.py``.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core.events import BlockRemoved, BlockStored
from kvatlas.service.wire import Decoder
from kvatlas.validate.exactness_vllm import subject
from kvatlas.validate.predictions import Observer
from kvatlas.validate.sequences import Request

FILE = Path(__file__).resolve().parents[1] / "fixtures" / "recorded" / "v4-minimal.json.xz"
CARELESS = "loads the minimum without care"


class Story:
    """The recording, one request after the other, heard by a directory."""

    def __init__(self, tmp_path: Path) -> None:
        self.recording: Any = json.loads(lzma.decompress(FILE.read_bytes()))
        self.observer = Observer(subject("v4", tmp_path).layout)
        self.keys = self.observer.keys(Request("repeat", self.recording["prompt"], 4, ""))
        self._heard = 0

    def promised(self) -> tuple[int, int]:
        """Where the directory expects a resume, and how long it holds the chain to be."""
        return self.observer.expected(self.keys)

    def hear(self, request: dict[str, Any]) -> list[tuple[int, bytes]]:
        """Everything published during that request."""
        frames = self.recording["frames"][self._heard : request["frames"]]
        self._heard = request["frames"]
        found = [(seq, bytes.fromhex(raw)) for _, seq, raw in frames]
        self.observer.hear(found)
        return found


def test_what_was_never_filled_is_never_promised(tmp_path: Path) -> None:
    story = Story(tmp_path)
    told = {}
    for request in story.recording["requests"]:
        told[request["name"]] = (story.promised()[0], request["cached_tokens"])
        story.hear(request)
        if request["name"] == "loads the minimum":
            # The chain is there, all of it; what the load left out is not.
            assert story.promised() == (0, story.recording["at"])
    assert told["finds nothing of it"] == (0, 0)
    assert told["finds what the last one computed"] == (512, 512)
    # Without care vLLM counts them and announces them, and nobody could tell.
    assert told["finds what was never filled"] == (512, 512)
    applied = story.observer.applied
    assert (applied.orphans, applied.undeclared, applied.malformed, applied.refused) == (0,) * 4


@pytest.mark.parametrize("name", ["loads the minimum", CARELESS])
def test_they_are_taken_back_in_the_batch_that_announces_them(name: str, tmp_path: Path) -> None:
    story = Story(tmp_path)
    (batch,) = [
        frame
        for request in story.recording["requests"]
        for frame in story.hear(request)
        if request["name"] == name
    ]
    events = Decoder().decode(*batch).events
    stored = {(e.group, h) for e in events if isinstance(e, BlockStored) for h in e.hashes}
    removed = {(e.group, h) for e in events if isinstance(e, BlockRemoved) for h in e.hashes}
    assert removed <= stored
    assert len(stored) == 2 * 2 + 2 + 2 + 16  # two windows, the chain, both kinds of rows
    # one block of ratio-4 rows of two, and all sixteen of ratio-128 rows
    assert len(removed) == (0 if name == CARELESS else 1 + 16)
