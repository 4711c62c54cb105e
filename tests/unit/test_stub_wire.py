"""What the stub puts on the wire is what vLLM 0.32 put there, byte for byte."""

from __future__ import annotations

import json
import lzma
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.connectors.stub_wire import EventEncoder
from kvatlas.core.events import BlockStored, Event
from kvatlas.service.wire import Decoder

RECORDED = Path(__file__).resolve().parents[1] / "fixtures" / "recorded"


def with_ids(events: Sequence[Event], payload: bytes) -> list[Event]:
    """The decoder leaves out the token ids that windowed groups repeat: the stub sends them."""

    def whole(event: Event, sent: dict[str, Any]) -> Event:
        if not isinstance(event, BlockStored) or not event.range_tokens:
            return event
        assert event.range_tokens == len(sent["token_ids"])
        ids = array("I", sent["token_ids"]).tobytes()
        return msgspec.structs.replace(event, tokens=ids, range_tokens=0)

    return list(map(whole, events, msgspec.msgpack.decode(payload)[1]))


@pytest.mark.parametrize("name", ["gqa", "swa", "swa-256", "v4", "v4-dense"])
def test_encoding_again_what_vllm_published_gives_vllms_bytes(name: str) -> None:
    with lzma.open(RECORDED / f"{name}.json.xz") as file:
        frames = json.load(file)["frames"]
    decoder, encoder = Decoder(), EventEncoder("vllm")
    kinds = set()
    for _, seq, payload in frames:
        expected = bytes.fromhex(payload)
        batch = decoder.decode(seq, expected)
        assert encoder.payload(with_ids(batch.events, expected), batch.ts) == expected
        kinds.update(type(event).__name__ for event in batch.events)
    assert {"BlockStored", "BlockRemoved"} <= kinds
