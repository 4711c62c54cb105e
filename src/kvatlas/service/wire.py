"""The engines' own event bytes, and those of agents, as `core.events`.

Known publishers: vLLM (tagged arrays up to 0.11 or so, named maps since), SGLang (the same two
forms) and what follows either. The batch is an array ``[ts, events, dp_rank]`` in all of them.
Every event is decoded on its own, so a bad one is counted and its neighbours still count.

What identifies a block besides its tokens comes untagged in vLLM (`to_event_extra_keys`, 0.32):
per listed block the LoRA name, ``[multimodal identifier, offset]`` pairs, the cache salt (first
block of the prompt only) and digests of prompt embeddings, in this order. Here that becomes:

- adapter: ``lora_name``; an older event with only a number gets ``#<number>``: equal to no name;
- salt: the one bare text of the prompt's first block. Versions that gave an image's identifier as
  bare text would file it as a salt: that misses hits and never makes one up;
- extras: everything else, as opaque bytes that a prompt of mere text never has.

Agents send the same batches with two events of their own (`encoded_units`), our keys in a row.

Nothing is guessed: a lower tier's event that does not say its extra keys, although its engine has
them, keeps its hashes only ("location only") and is keyed by the event that stored the block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvatlas.core.events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    UnitsGone,
    UnitsHeld,
)
from kvatlas.core.keys import KEY_BYTES
from kvatlas.core.native import token_ids
from kvatlas.core.records import Tier

PAYLOAD_BYTES_MAX = 64 << 20
EVENT_BYTES_MAX = 8 << 20  # a million tokens with their hashes are under 8 MB
EVENTS_MAX = 65_536
HASHES_MAX = 65_536  # a million tokens in blocks of 16
BLOCK_TOKENS_MAX = 65_536
EXTRA_BYTES_MAX = 4096  # per block
_HASH_BYTES_MAX = 64
_NAME_MAX = 1024  # characters of a salt or an adapter name
_MASK = 0xFFFF_FFFF_FFFF_FFFF

_TIERS = {
    "GPU": Tier.HBM,
    "CPU": Tier.DRAM,
    "CPU_PINNED": Tier.DRAM,
    "CPU_TIER1": Tier.DRAM,
    "CPU_TIER2": Tier.DRAM,
    "cpu": Tier.DRAM,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.OBJECT,
}
_REMOTE = {Tier.DRAM: Tier.PEER, Tier.DISK: Tier.OBJECT}  # where ``locality`` says so

Hash = int | bytes


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    dp_rank: int | None = None


class _Stored(msgspec.Struct):
    """Field order is vLLM's, the positional form depends on it. SGLang adds ``cache_salt``."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: msgspec.Raw  # decoded only where the ids themselves are needed
    block_size: int
    lora_id: object = None
    medium: str | None = None
    lora_name: object = None
    extra_keys: object = None
    group_idx: object = None
    kv_cache_spec_kind: object = None
    kv_cache_spec_sliding_window: object = None
    locality: object = None
    ownership: object = None
    session_id: object = None


class _Removed(msgspec.Struct):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: object = None
    locality: object = None


class _StoredMap(_Stored, tag="BlockStored"):
    cache_salt: str | None = None


class _RemovedMap(_Removed, tag="BlockRemoved"):
    pass


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _TagMap(msgspec.Struct):
    type: str


class _Units(msgspec.Struct):
    """``bodies`` and ``points``: keys one after the other."""

    tier: Literal["dram", "disk", "object"]
    bodies: bytes = b""
    points: bytes = b""


class _HeldMap(_Units, tag="UnitsHeld"):
    pass


class _GoneMap(_Units, tag="UnitsGone"):
    pass


_Map = _StoredMap | _RemovedMap | _ClearedMap | _HeldMap | _GoneMap
_Array = _StoredArray | _RemovedArray | _ClearedArray


class _Sound(msgspec.Struct, array_like=True):
    """A batch of maps, every one with the types that it should have."""

    ts: float
    events: list[_Map]
    dp_rank: int | None = None


_KNOWN = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared", "UnitsHeld", "UnitsGone"})

_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_sound = msgspec.msgpack.Decoder(_Sound).decode
_decode_map = msgspec.msgpack.Decoder(_Map).decode
_decode_array = msgspec.msgpack.Decoder(_Array).decode
_decode_tag_map = msgspec.msgpack.Decoder(_TagMap).decode
_decode_tag_array = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_text = msgspec.msgpack.Decoder(str).decode


class _Malformed(ValueError):
    """An event that must not be applied; the text is a short reason, used as a counter's name."""


class _Unknown(ValueError):
    """An event of a type or medium that we do not know."""


class Decoder:
    """One per publisher. ``reasons`` counts why events were left out, for metrics and `doctor`."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self._last_ts = 0.0

    def decode(self, seq: int, payload: bytes) -> Batch:
        """Never raises: what cannot be used is counted in the batch.

        A payload that is no batch at all is a hole that no replay can fill: removals may be in it,
        so it becomes `AllBlocksCleared`, with the time stamp of the batch before.
        """
        if len(payload) > PAYLOAD_BYTES_MAX:
            return self._nothing(seq, "batch too large")
        if len(payload) <= EVENT_BYTES_MAX:
            batch = _sound(seq, payload)
            if batch is not None:
                self._last_ts = batch.ts
                return batch
        try:
            raw = _decode_batch(payload)
        except (msgspec.DecodeError, RecursionError):
            return self._nothing(seq, "batch is not [ts, events, rank]")
        if not math.isfinite(raw.ts):
            return self._nothing(seq, "time stamp is no number")
        self._last_ts = raw.ts
        events: list[Event] = []
        malformed = unknown = 0
        for item in raw.events[:EVENTS_MAX]:
            try:
                event = _event(item)
            except _Unknown as error:
                unknown += 1
                self._count(str(error))
            except (ValueError, TypeError, RecursionError) as error:
                malformed += 1
                self._count(str(error) if isinstance(error, _Malformed) else _fault(item))
            else:
                if event is not None:
                    events.append(event)
        surplus = len(raw.events) - EVENTS_MAX
        if surplus > 0:
            malformed += surplus
            self._count("too many events in a batch")
        return Batch(seq, raw.ts, tuple(events), raw.dp_rank or 0, malformed, unknown)

    def _nothing(self, seq: int, reason: str) -> Batch:
        self._count(reason)
        return Batch(seq, self._last_ts, (AllBlocksCleared(),), malformed=1)

    def _count(self, reason: str) -> None:
        if reason not in self.reasons and len(self.reasons) >= 64:
            reason = "other"
        self.reasons[reason] += 1


def _sound(seq: int, payload: bytes) -> Batch | None:
    """A batch decoded at once: walking over its tokens to cut it into events takes longer than
    all else. None where anything is wrong or positional: then each is judged by itself."""
    try:
        raw = _decode_sound(payload)
        if len(raw.events) > EVENTS_MAX or not math.isfinite(raw.ts):
            return None
        events = [_meant(event, positional=False) for event in raw.events]
    except (ValueError, TypeError, RecursionError):
        return None
    return Batch(seq, raw.ts, tuple([e for e in events if e is not None]), raw.dp_rank or 0)


def _event(raw: msgspec.Raw) -> Event | None:
    """None where there is nothing to say (a windowed group that kept no block)."""
    view = memoryview(raw)
    if len(view) > EVENT_BYTES_MAX:
        raise _Malformed("event too large")
    if not view:
        raise _Malformed("event is empty")
    first = view[0]
    decoded: _Map | _Array
    try:
        if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):
            positional = False
            decoded = _decode_map(raw)
        else:
            positional = True
            decoded = _decode_array(raw)
    except msgspec.ValidationError:
        tag = _tag(raw, first)
        if tag is not None and tag not in _KNOWN:
            raise _Unknown(f"event type {tag[:40]}") from None
        raise
    return _meant(decoded, positional=positional)


def _meant(decoded: _Map | _Array, *, positional: bool) -> Event | None:
    """As `_event`, of what has the right types."""
    if isinstance(decoded, _Stored):
        return _stored(decoded, positional)
    if isinstance(decoded, _Removed):
        hashes = _hashes(decoded.block_hashes)
        tier = _tier(decoded.medium, decoded.locality)
        if positional and not isinstance(decoded.group_idx, int):
            decoded.group_idx = None
        return BlockRemoved(hashes, tier, _number(decoded.group_idx)) if hashes else None
    if isinstance(decoded, _Units):
        kind = UnitsHeld if isinstance(decoded, _HeldMap) else UnitsGone
        return kind(Tier[decoded.tier.upper()], _keys(decoded.bodies), _keys(decoded.points))
    return AllBlocksCleared()


def _keys(data: bytes) -> tuple[bytes, ...]:
    if len(data) % KEY_BYTES:
        raise _Malformed("keys are not whole")
    return tuple([data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)])


def encoded_units(ts: float, events: Sequence[AllBlocksCleared | UnitsHeld | UnitsGone]) -> bytes:
    """An agent's batch, as `Decoder` reads it; ``ts`` in seconds since 1970."""
    made: list[_ClearedMap | _Units] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            made.append(_ClearedMap())
            continue
        kind = _HeldMap if isinstance(event, UnitsHeld) else _GoneMap
        tier: Any = event.tier.name.lower()
        made.append(kind(tier, b"".join(event.bodies), b"".join(event.points)))
    return msgspec.msgpack.encode((ts, made, 0))


def _tag(raw: msgspec.Raw, first: int) -> str | None:
    try:
        if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):
            return _decode_tag_map(raw).type
        parts = _decode_tag_array(raw)
        return _decode_text(parts[0]) if parts else None
    except msgspec.DecodeError:
        return None


def _fault(raw: msgspec.Raw) -> str:
    """A reason for what did not fit the expected types."""
    try:
        event = msgspec.msgpack.decode(raw)
        tokens = event["token_ids"] if isinstance(event, dict) else event[3]
        if tokens and isinstance(tokens[0], list):
            # SGLang with EAGLE keys its pages by pairs of tokens: page k needs the first token of
            # page k+1, so no prompt's own blocks can be compared with them.
            return "bigram tokens (speculative decoding): unkeyable"
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, RecursionError):
        pass
    return "fields of a wrong type"


def _stored(event: _Stored, positional: bool) -> BlockStored | None:
    if positional:
        _trim(event)
    tier = _tier(event.medium, event.locality)
    hashes = _hashes(event.block_hashes)
    window = _number(event.kv_cache_spec_sliding_window)
    if not hashes and window is None:  # a window of which nothing is kept ends what was said of it
        return None
    parent = event.parent_block_hash
    if parent is not None:
        parent = _hash(parent)
    block = event.block_size
    count = _array_length(event.token_ids)
    blocks = 0
    if not 0 <= block <= BLOCK_TOKENS_MAX:
        raise _Malformed("block size out of range")
    if count:
        if not block or count % block:
            raise _Malformed("tokens are not whole blocks")
        blocks = count // block
        if len(hashes) > blocks:
            raise _Malformed("more hashes than blocks")
    # A windowed group repeats the ids of the chain group's range; its blocks are found by hash.
    tokens = token_ids(event.token_ids) if count and window is None else b""
    salt = getattr(event, "cache_salt", None) or ""
    adapter = _adapter(event)
    extras: tuple[bytes, ...] = ()
    group = _number(event.group_idx)
    if event.extra_keys is not None:
        if len(hashes) == blocks:  # else a windowed group: its blocks are found by their hashes
            first = event.parent_block_hash is None
            found, extras = _extras(event.extra_keys, adapter, first, blocks)
            salt = salt or found
    elif group is not None and tier is not Tier.HBM:
        tokens = b""  # vLLM's lower tiers may leave the extra keys out (MooncakeStore, 0.32)
    return BlockStored(
        hashes,
        parent,
        tokens,
        block,
        tier,
        group,
        _text(event.kv_cache_spec_kind),
        window,
        _named(salt),
        adapter,
        extras,
        0 if tokens else count,
    )


def _trim(event: _Stored) -> None:
    """Positional fields beyond ``medium`` are believed up to the first that does not fit.

    Later versions may append what we do not know; an adapter's name always comes with its number.
    """
    name = event.lora_name
    tail = (
        name is None or (isinstance(name, str) and event.lora_id is not None),
        event.extra_keys is None or isinstance(event.extra_keys, list),
        event.group_idx is None or isinstance(event.group_idx, int),
        event.kv_cache_spec_kind is None or isinstance(event.kv_cache_spec_kind, str),
    )
    if not all(tail):
        fields = ("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind")
        for field in (*fields[tail.index(False) :], "kv_cache_spec_sliding_window", "locality"):
            setattr(event, field, None)


def _hashes(values: Sequence[Hash]) -> tuple[int, ...]:
    if len(values) > HASHES_MAX:
        raise _Malformed("too many hashes in an event")
    return tuple([v & _MASK if type(v) is int else _hash(v) for v in values])


def _hash(value: Hash) -> int:
    """Low 64 bits, as vLLM's own integer form has them (`maybe_convert_block_hash`)."""
    if isinstance(value, bytes):
        if not 8 <= len(value) <= _HASH_BYTES_MAX:
            raise _Malformed("hash of a wrong length")
        return int.from_bytes(value[-8:], "big")
    return value & _MASK


def _array_length(raw: msgspec.Raw) -> int:
    """How many items a MessagePack array has, by its header alone."""
    view = memoryview(raw)
    first = view[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    if first == 0xDC:
        return int.from_bytes(view[1:3], "big")
    if first == 0xDD:
        return int.from_bytes(view[1:5], "big")
    raise _Malformed("token ids are no list")


def _tier(medium: str | None, locality: object) -> Tier:
    tier = _TIERS.get(medium or "GPU")
    if tier is None:
        raise _Unknown(f"medium {str(medium)[:40]}")
    return _REMOTE.get(tier, tier) if locality == "REMOTE" else tier


def _adapter(event: _Stored) -> str:
    if event.lora_name:
        return _named(event.lora_name)
    return f"#{event.lora_id}"[:_NAME_MAX] if event.lora_id else ""


def _named(value: object) -> str:
    if not isinstance(value, str) or len(value) > _NAME_MAX:
        raise _Malformed("a name is no text or too long")
    return value


def _number(value: object) -> int | None:
    if value is None or (type(value) is int and 0 <= value < 1 << 31):
        return value
    raise _Malformed("a number out of range")


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise _Malformed("a text field is no text")


def _extras(value: object, adapter: str, first: bool, blocks: int) -> tuple[str, tuple[bytes, ...]]:
    """(salt, extras per block) of the untagged ``extra_keys``, one entry per block."""
    if not isinstance(value, list) or len(value) > blocks:
        raise _Malformed("extra keys do not fit the blocks")
    salt = ""
    extras: list[bytes] = []
    for index, entry in enumerate(value):
        items = list(entry) if isinstance(entry, list) else [] if entry is None else [entry]
        if adapter and items and items[0] == adapter:
            items.pop(0)
        if first and index == 0:
            texts = [item for item in items if isinstance(item, str)]
            if len(texts) == 1:
                salt = texts[0]
                items.remove(salt)
        opaque = msgspec.msgpack.encode(items) if items else b""
        if len(opaque) > EXTRA_BYTES_MAX:
            raise _Malformed("extra keys too large")
        extras.append(opaque)
    return salt, tuple(extras) if any(extras) else ()
