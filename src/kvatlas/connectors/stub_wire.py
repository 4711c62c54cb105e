"""KV events as an engine puts them on the wire: the encoding, and the sockets of one engine.

Three forms: ``vllm`` (vLLM 0.32: tagged maps), ``vllm-array`` (vLLM before 0.32: tagged arrays)
and ``sglang`` (SGLang 0.5: maps, signed hashes, no groups). Frames are [topic, sequence as 8
bytes big endian, msgpack([ts, events, dp_rank])] in all three (vLLM `distributed/kv_events.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import msgspec
import zmq.asyncio

from kvatlas.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvatlas.core.records import Tier
from kvatlas.service.event_socket import HWM, EventSocket

EventFormat = Literal["vllm", "vllm-array", "sglang"]
EVENT_FORMATS: tuple[EventFormat, ...] = ("vllm", "vllm-array", "sglang")

BUFFER_STEPS = 10_000  # vLLM's default: batches kept for replay

_VLLM_MEDIUM = dict.fromkeys(Tier, "STORAGE") | {Tier.HBM: "GPU", Tier.DRAM: "CPU"}
_SGLANG_MEDIUM = dict.fromkeys(Tier, "EXTERNAL") | {
    Tier.HBM: "GPU",
    Tier.DRAM: "CPU_PINNED",
    Tier.DISK: "DISK",
}


class _Map(msgspec.Struct, tag_field="type", omit_defaults=True):
    """vLLM 0.32 leaves out optional fields that hold their default."""


class _MapStored(_Map, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _MapRemoved(_Map, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class _SglangStored(_Map, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class _MapCleared(_Map, tag="AllBlocksCleared"):
    pass


class EventEncoder:
    """Turns core's events into one engine's own payload bytes."""

    def __init__(self, form: EventFormat = "vllm", *, dp_rank: int = 0) -> None:
        self._form = form
        self._dp_rank = dp_rank
        self._pack = msgspec.msgpack.Encoder()

    def payload(self, events: Sequence[Event], ts: float) -> bytes:
        """The third frame of one batch; ``ts`` in seconds since 1970."""
        encode = {"vllm": _vllm_map, "vllm-array": _vllm_array, "sglang": _sglang_map}[self._form]
        wire = [made for made in map(encode, events) if made is not None]
        return self._pack.encode((ts, wire, self._dp_rank))


@lru_cache(maxsize=2)
def _ids(tokens: bytes) -> list[int]:
    """Kept for a moment: every group of a layout announces the same range of tokens."""
    return memoryview(tokens).cast("I").tolist()


def _lora_id(adapter: str) -> int | None:
    return 1 if adapter else None


def _extra_keys(event: BlockStored) -> list[list[object] | None] | None:
    """One entry per listed block. A salt comes only with block 0, which is then listed first."""
    if not event.hashes:
        return None
    keys: list[list[object]] = [[event.adapter] if event.adapter else [] for _ in event.hashes]
    if event.salt and event.parent is None:
        keys[0].append(event.salt)
    return [key or None for key in keys]


def _vllm_map(event: Event) -> object:
    if isinstance(event, BlockStored):
        return _MapStored(
            block_hashes=list(event.hashes),
            parent_block_hash=event.parent,
            token_ids=_ids(event.tokens),
            block_size=event.block_tokens,
            lora_id=_lora_id(event.adapter),
            medium=_VLLM_MEDIUM[event.tier],
            lora_name=event.adapter or None,
            extra_keys=_extra_keys(event),
            group_idx=event.group,
            kv_cache_spec_kind=event.kind,
            kv_cache_spec_sliding_window=event.window_tokens,
        )
    if isinstance(event, BlockRemoved):
        medium = None if event.tier is None else _VLLM_MEDIUM[event.tier]
        return _MapRemoved(list(event.hashes), medium, event.group)
    return _MapCleared()


def _vllm_array(event: Event) -> object:
    """Positional form of older releases: the tag first, then the fields in order."""
    if isinstance(event, BlockStored):
        return [
            "BlockStored",
            list(event.hashes),
            event.parent,
            _ids(event.tokens),
            event.block_tokens,
            _lora_id(event.adapter),
            _VLLM_MEDIUM[event.tier],
            event.adapter or None,
            _extra_keys(event),
            event.group,
            event.kind,
            event.window_tokens,
        ]
    if isinstance(event, BlockRemoved):
        medium = None if event.tier is None else _VLLM_MEDIUM[event.tier]
        return ["BlockRemoved", list(event.hashes), medium, event.group]
    return ["AllBlocksCleared"]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _sglang_map(event: Event) -> object | None:
    """SGLang speaks of its full component only: windowed groups stay unannounced."""
    if isinstance(event, BlockStored):
        if event.window_tokens is not None:
            return None
        return _SglangStored(
            block_hashes=[_signed(h) for h in event.hashes],
            parent_block_hash=None if event.parent is None else _signed(event.parent),
            token_ids=_ids(event.tokens),
            block_size=event.block_tokens,
            lora_id=_lora_id(event.adapter),
            medium=_SGLANG_MEDIUM[event.tier],
            cache_salt=event.salt or None,
            lora_name=event.adapter or None,
        )
    if isinstance(event, BlockRemoved):
        medium = None if event.tier is None else _SGLANG_MEDIUM[event.tier]
        return _MapRemoved([_signed(h) for h in event.hashes], medium)
    return _MapCleared() if isinstance(event, AllBlocksCleared) else None


class EventPublisher(EventSocket):
    """The sockets of one engine. As a subscriber sees it: the last ``buffer_steps`` batches can be
    asked for again."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        port: int = 0,
        replay_port: int = 0,
        *,
        form: EventFormat = "vllm",
        topic: str = "",
        dp_rank: int = 0,
        buffer_steps: int = BUFFER_STEPS,
    ) -> None:
        """Raises zmq.ZMQError for a port that is taken."""
        super().__init__(context, host, port, replay_port, topic=topic, buffer_steps=buffer_steps)
        self._encoder = EventEncoder(form, dp_rank=dp_rank)
        self.buffer_steps = buffer_steps

    def source(self) -> dict[str, object]:
        """vLLM's `KVEventsConfig`, as ``GET /kv_event_sources`` shows it for one rank."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self.buffer_steps,
            "hwm": HWM,
            "max_queue_size": HWM,
            "topic": self.topic,
        }

    def publish(self, events: Sequence[Event], ts: float) -> None:
        """The next batch."""
        self.send(self._encoder.payload(events, ts))
