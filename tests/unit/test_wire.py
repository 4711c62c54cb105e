"""Every form in which engines write their KV events, and what must never pass for one."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import msgspec
import pytest

from kvatlas.core.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored
from kvatlas.core.records import Tier
from kvatlas.service import wire

# The history of field report vllm#26264: Stored A, B(A); Removed B; Stored C(A).
DIGESTS = {name: hashlib.sha256(name.encode()).digest() for name in "ABC"}
DIGESTS["B"] = DIGESTS["B"][:24] + ((1 << 63) + 1).to_bytes(8, "big")
DIGESTS["C"] = DIGESTS["C"][:24] + ((1 << 63) + 2).to_bytes(8, "big")
TOKENS = {"AB": [1, 2, 3, 70_000], "C": [9, 2**32 - 1]}


def encode(events: list[Any], *, ts: float = 5.0, rank: int | None = None) -> bytes:
    batch: list[Any] = [ts, events]
    return msgspec.msgpack.encode(batch if rank is None else [*batch, rank])


def decode(events: list[Any], **more: Any) -> Batch:
    return wire.Decoder().decode(7, encode(events, **more))


def stored(**fields: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
    }
    return event | fields


def one(**fields: Any) -> BlockStored:
    batch = decode([stored(**fields)])
    assert (batch.malformed, batch.unknown, len(batch.events)) == (0, 0, 1)
    event = batch.events[0]
    assert isinstance(event, BlockStored)
    return event


def uint(name: str) -> Any:
    return int.from_bytes(DIGESTS[name], "big") % 2**64


def signed(name: str) -> Any:
    return uint(name) - 2**64 if uint(name) >= 2**63 else uint(name)


def maps(hash_of: Any) -> list[Any]:
    return [
        stored(block_hashes=[hash_of("A"), hash_of("B")], token_ids=TOKENS["AB"]),
        {"type": "BlockRemoved", "block_hashes": [hash_of("B")], "medium": "GPU"},
        stored(block_hashes=[hash_of("C")], parent_block_hash=hash_of("A"), token_ids=TOKENS["C"]),
    ]


def arrays(hash_of: Any, tail: list[Any], removed_tail: list[Any]) -> list[Any]:
    a, b, c = hash_of("A"), hash_of("B"), hash_of("C")
    return [
        ["BlockStored", [a, b], None, TOKENS["AB"], 2, None, *tail],
        ["BlockRemoved", [b], *removed_tail],
        ["BlockStored", [c], a, TOKENS["C"], 2, None, *tail],
    ]


FORMS = {
    "array+integer": arrays(uint, ["GPU"], ["GPU"]),
    "array+bytes": arrays(DIGESTS.get, ["GPU"], ["GPU"]),
    "map+integer": maps(uint),
    "map+bytes": maps(DIGESTS.get),
    "signed integer": maps(signed),
    "array, two extra trailing fields": arrays(uint, ["GPU", "later", 7], ["GPU", "later", 7]),
    "array, every known field and two more": arrays(
        uint, ["GPU", *[None] * 8, "later", 7], ["GPU", None, None, "later", 7]
    ),
    "array, optional tail missing": arrays(uint, [], []),
}


@pytest.mark.parametrize("form", FORMS)
def test_vllm_26264_every_encoding_gives_the_same_batch(form: str) -> None:
    batch = decode(FORMS[form])
    assert batch == Batch(
        7,
        5.0,
        (
            BlockStored(
                (uint("A"), uint("B")), None, array("I", TOKENS["AB"]).tobytes(), 2, Tier.HBM
            ),
            BlockRemoved((uint("B"),), Tier.HBM),
            BlockStored((uint("C"),), uint("A"), array("I", TOKENS["C"]).tobytes(), 2, Tier.HBM),
        ),
    )
    assert uint("B") != uint("C")
    assert float(uint("B")) == float(uint("C"))  # what a 64-bit float would make of them


def test_vllm_26264_a_malformed_event_does_not_spoil_its_batch() -> None:
    bad = stored(token_ids="garbage")
    batch = decode([stored(block_hashes=[1, 2]), bad, stored(block_hashes=[3, 4])])
    assert [event.hashes for event in batch.events] == [(1, 2), (3, 4)]  # type: ignore[union-attr]
    assert (batch.malformed, batch.unknown) == (1, 0)


@pytest.mark.parametrize("event", [{"type": "BlockMoved", "x": 1}, ["BlockMoved", 1, 2]])
def test_unknown_event_types_are_counted(event: Any) -> None:
    decoder = wire.Decoder()
    batch = decoder.decode(0, encode([event, {"type": "AllBlocksCleared"}]))
    assert batch.events == (AllBlocksCleared(),)
    assert (batch.malformed, batch.unknown) == (0, 1)
    assert decoder.reasons == {"event type BlockMoved": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"block_hashes": ["a text"]},
        {"block_hashes": [1.5, 2.5]},
        {"block_hashes": [b"short", b"short"]},
        {"block_hashes": 1},
        {"block_hashes": [1, 2, 3]},  # more than the tokens make
        {"token_ids": [1, 2, 3]},  # no whole blocks
        {"token_ids": [-1, 2, 3, 4]},
        {"token_ids": [2**32, 2, 3, 4]},
        {"block_size": 0},
        {"block_size": -2},
        {"block_size": 1 << 40},
        {"group_idx": -1},
        {"group_idx": "0"},
        {"kv_cache_spec_kind": 3},
        {"kv_cache_spec_sliding_window": 2**40},
        {"cache_salt": 3},
        {"cache_salt": "x" * 5000},
        {"lora_name": ["x"]},
        {"extra_keys": "x"},
        {"extra_keys": [None] * 3},
        {"extra_keys": [["x" * 5000, "y"], None]},
        {"medium": 1},
    ],
)
def test_malformed_events_are_counted_with_a_reason(fields: dict[str, Any]) -> None:
    decoder = wire.Decoder()
    batch = decoder.decode(0, encode([stored(**fields)]))
    assert (batch.events, batch.malformed, batch.unknown) == ((), 1, 0)
    assert sum(decoder.reasons.values()) == 1


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"not msgpack",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, 5]),
        msgspec.msgpack.encode(["now", []]),
        encode([stored()])[:-3],
        b"\x91" * 5000,
        encode([stored()]) + b"\x00",
    ],
)
def test_a_payload_that_is_no_batch_clears_what_was_held(payload: bytes) -> None:
    decoder = wire.Decoder()
    decoder.decode(6, encode([], ts=3.0))
    assert decoder.decode(7, payload) == Batch(7, 3.0, (AllBlocksCleared(),), malformed=1)


def test_sizes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "EVENTS_MAX", 2)
    monkeypatch.setattr(wire, "EVENT_BYTES_MAX", 200)
    batch = decode([stored(token_ids=[1] * 400), stored(), stored(), stored()])
    assert (len(batch.events), batch.malformed) == (1, 3)
    monkeypatch.setattr(wire, "PAYLOAD_BYTES_MAX", 10)
    assert decode([stored()]).malformed == 1


def test_hashes_of_one_event_are_limited() -> None:
    decoder = wire.Decoder()
    many = [0] * (wire.HASHES_MAX + 1)
    events = [["BlockRemoved", many], ["BlockStored", many, None, [], 16]]
    batch = decoder.decode(1, encode([*events, ["BlockRemoved", [1]]]))
    assert (batch.malformed, len(batch.events)) == (2, 1)
    assert decoder.reasons == {"too many hashes in an event": 2}


@pytest.mark.parametrize("ts", [float("nan"), float("inf"), float("-inf")])
def test_a_time_stamp_is_a_number(ts: float) -> None:
    decoder = wire.Decoder()
    decoder.decode(0, encode([], ts=7.0))
    batch = decoder.decode(1, encode([["BlockRemoved", [1]]], ts=ts))
    assert (batch.ts, batch.events, batch.malformed) == (7.0, (AllBlocksCleared(),), 1)


def test_the_book_of_reasons_is_limited() -> None:
    decoder = wire.Decoder()
    for number in range(200):
        decoder.decode(0, encode([{"type": f"New{number}"}]))
    assert len(decoder.reasons) <= 65
    assert sum(decoder.reasons.values()) == 200


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        (None, None, Tier.HBM),
        ("GPU", None, Tier.HBM),
        ("CPU", "LOCAL", Tier.DRAM),
        ("CPU", "REMOTE", Tier.PEER),
        ("CPU_PINNED", None, Tier.DRAM),
        ("CPU_TIER1", None, Tier.DRAM),
        ("CPU_TIER2", None, Tier.DRAM),
        ("cpu", None, Tier.DRAM),
        ("DISK", None, Tier.DISK),
        ("STORAGE", None, Tier.DISK),
        ("STORAGE", "REMOTE", Tier.OBJECT),
        ("EXTERNAL", None, Tier.OBJECT),
    ],
)
def test_tiers(medium: str | None, locality: str | None, tier: Tier) -> None:
    assert one(medium=medium, locality=locality).tier is tier
    removed = {
        "type": "BlockRemoved",
        "block_hashes": [1],
        "medium": medium,
        "locality": locality,
    }
    assert decode([removed]).events == (BlockRemoved((1,), tier),)


def test_an_unknown_medium_is_not_taken_for_a_known_one() -> None:
    batch = decode(
        [
            stored(medium="TAPE"),
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE"},
        ]
    )
    assert (batch.events, batch.malformed, batch.unknown) == ((), 0, 2)


def test_salt_adapter_and_multimodal_keys_are_told_apart() -> None:
    event = one(
        lora_id=3,
        lora_name="sql",
        extra_keys=[["sql", ["img1", 1], "tenantA", b"\x01" * 32], ["sql", ["img1", -1]]],
    )
    assert (event.salt, event.adapter) == ("tenantA", "sql")
    assert len(event.extras) == 2
    assert all(event.extras)
    assert event.extras[0] != event.extras[1]
    other = one(lora_id=3, lora_name="sql", extra_keys=[["sql", ["img2", 1]], ["sql"]])
    assert other.extras[1] == b""
    assert other.extras[0] not in (b"", event.extras[0])


def test_plain_text_has_no_extras() -> None:
    assert one(extra_keys=[None, None]) == one()
    assert one(extra_keys=[[], None]) == one()
    assert one(extra_keys=[["tenantA"], None]).extras == ()
    assert one(extra_keys=[["tenantA"], None]).salt == "tenantA"
    assert one(cache_salt="tenantA").salt == "tenantA"  # SGLang
    adapted = one(lora_id=1, lora_name="sql", extra_keys=[["sql"], ["sql"]])
    assert (adapted.salt, adapted.adapter, adapted.extras) == ("", "sql", ())


def test_what_is_ambiguous_stays_opaque() -> None:
    two_texts = one(extra_keys=[["either", "or"], None])
    assert two_texts.salt == ""
    assert two_texts.extras[0]
    later_block = one(parent_block_hash=9, extra_keys=[["a text"], None])
    assert later_block.salt == ""
    assert later_block.extras[0]
    embeds = one(extra_keys=[[b"\x02" * 32], None])
    assert embeds.salt == ""
    assert embeds.extras[0]


def test_an_adapter_known_by_number_only_equals_no_name() -> None:
    assert one(lora_id=4).adapter == "#4"
    assert decode([["BlockStored", [1], None, [1, 2], 2, 4, "GPU"]]).events[0].adapter == "#4"  # type: ignore[union-attr]
    named = decode([["BlockStored", [1], None, [1, 2], 2, 4, "GPU", "sql", [["sql", "t"]]]])
    event = named.events[0]
    assert isinstance(event, BlockStored)
    assert (event.adapter, event.salt) == ("sql", "t")


def test_a_lower_tier_that_hides_its_extra_keys_says_the_location_only() -> None:
    assert one(medium="cpu", group_idx=0).tokens == b""
    assert one(medium="cpu", group_idx=0).hashes == (1, 2)
    assert one(medium="CPU", group_idx=0, extra_keys=[None, None]).tokens != b""
    assert one(medium="CPU_PINNED").tokens != b""  # SGLang has its salt in every event
    assert one(medium="GPU", group_idx=0).tokens != b""


def test_location_only_placeholders_are_kept() -> None:
    event = one(block_hashes=[5], token_ids=[], block_size=0, medium="CPU", group_idx=2)
    assert (event.hashes, event.tokens, event.block_tokens, event.group) == ((5,), b"", 0, 2)


def test_windowed_groups_list_fewer_hashes_than_blocks() -> None:
    event = one(
        block_hashes=[8],
        token_ids=list(range(8)),
        group_idx=1,
        kv_cache_spec_kind="sliding_window_mla",
        kv_cache_spec_sliding_window=128,
        extra_keys=[["tenantA"]],  # of a block that need not be the first
    )
    assert (event.kind, event.window_tokens, event.group) == ("sliding_window_mla", 128, 1)
    assert (event.hashes, event.tokens, event.range_tokens, event.salt) == ((8,), b"", 8, "")
    assert decode([stored(block_hashes=[], group_idx=1)]) == Batch(7, 5.0, ())


def test_bigram_pages_of_sglang_are_refused_by_name() -> None:
    decoder = wire.Decoder()
    batch = decoder.decode(0, encode([stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]])]))
    assert (batch.events, batch.malformed) == ((), 1)
    assert next(iter(decoder.reasons)).startswith("bigram tokens")


def test_rank_and_extra_batch_fields() -> None:
    assert decode([], rank=3).dp_rank == 3
    assert decode([]).dp_rank == 0
    more = msgspec.msgpack.encode([5, [], 1, "later"])
    assert wire.Decoder().decode(1, more) == Batch(1, 5.0, (), dp_rank=1)
