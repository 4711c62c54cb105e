"""The worker's side of vLLM's connector: copies blocks from and to the arena."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvatlas.connectors.agent_client import Channel
from kvatlas.connectors.vllm_probe import Place, layers_of
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.records import checksum_bytes
from kvatlas.dataplane.tiers.base import checksum_of
from kvatlas.errors import EngineError, StoreError
from kvatlas.service import agent_wire as wire

Block = tuple[Place, int]  # a place, and the block's id


@dataclass
class Copy:
    """One unit: its blocks, in the order in which their bytes lie in the slot. A block 0 is
    passed over: the engine has it already."""

    piece: wire.Piece
    blocks: list[Block]


@dataclass
class Copies(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker's side does in one step. Loads and saves may be of two lives of the agent:
    what is promised stays where it is until this process lets go of it, even if the agent ends."""

    arena: str = ""
    load_arena: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    load: dict[str, list[Copy]] = field(default_factory=dict)  # by request
    save: dict[int, list[Copy]] = field(default_factory=dict)  # by order


@dataclass
class Results(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What it has done: requests that are loaded, and checksums of what was saved, by order."""

    loaded: list[str] = field(default_factory=list)
    saved: dict[int, list[tuple[bytes, bytes]]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        raise RuntimeError("one worker only")


class Copier:
    """Of one worker. ``groups``: the engine's groups of blocks."""

    def __init__(self, path: Path, groups: Any) -> None:
        self._path = path
        self._groups = groups
        self._channel: Channel | None = None
        self._results = Results()
        self._caches: dict[str, torch.Tensor] = {}
        self._layers: dict[Place, list[str]] = {}

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Where the blocks lie. The agent's memory is mapped now: to keep a promise takes no agent
        any more."""
        self._caches = kv_caches
        self._map()

    def load(self, copies: Copies) -> None:
        """Copies what was verified into its blocks, before the step computes anything.

        Raises RuntimeError where the agent took it back meanwhile, which it does not while this
        process lives: better no answer than a wrong one.
        """
        for id, units in copies.load.items():
            arena = self._arena(copies, copies.load_arena)
            for unit in units:
                if arena is None or not self._copy_in(arena, unit):
                    raise RuntimeError("what was promised to be loaded is not there any more")
            self._results.loaded.append(id)

    def save(self, copies: Copies) -> None:
        """Copies what the agent wants into its slots."""
        for op, units in copies.save.items():
            arena = self._arena(copies, copies.arena)
            sums = []
            for unit in units:
                checksum = self._copy_out(arena, unit) if arena is not None else b""
                if checksum:
                    sums.append((unit.piece.name, checksum))
            self._results.saved[op] = sums

    def results(self) -> Results | None:
        """What was done since the last call."""
        if not self._results.loaded and not self._results.saved:
            return None
        results, self._results = self._results, Results()
        return results

    def close(self) -> None:
        """Lets the memory go."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _arena(self, copies: Copies, life: str) -> Arena | None:
        """The memory of that life of the agent."""
        if not self._layers:
            self._layers = layers_of(copies.parts, self._groups)
        if self._channel is None or self._channel.welcome.arena != life:
            self._map()
        channel = self._channel
        return channel.arena if channel is not None and channel.welcome.arena == life else None

    def _map(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        try:
            self._channel = Channel(self._path, wire.Map(wire.VERSION))
        except (OSError, EngineError, StoreError):
            self._channel = None

    def _copy_in(self, arena: Arena, unit: Copy) -> bool:
        """Into the engine's blocks. False: the slot is somebody else's."""
        slot = unit.piece.slot
        if not arena.current(slot):
            return False
        source = torch.frombuffer(arena.view(slot), dtype=torch.uint8)
        at = 0
        for place, block in unit.blocks:
            for layer in self._layers[place]:
                target = self._caches[layer][block]
                size = target.numel() * target.element_size()
                if block:
                    data = source[at : at + size].view(target.dtype).view(target.shape)
                    target.copy_(data)
                at += size
        return arena.current(slot)

    def _copy_out(self, arena: Arena, unit: Copy) -> bytes:
        """Out of the engine's blocks; the checksum of all that lies in the slot, or b""."""
        slot = unit.piece.slot
        if not arena.current(slot):
            return b""
        view = arena.view(slot)
        target = torch.frombuffer(view, dtype=torch.uint8)
        at = 0
        for place, block in unit.blocks:
            for layer in self._layers[place]:
                source = self._caches[layer][block]
                size = source.numel() * source.element_size()
                if at + size > slot.size_bytes:
                    return b""  # not the pages that were described
                target[at : at + size].view(source.dtype).view(source.shape).copy_(source)
                at += size
        target[at:].zero_()  # padding
        checksum = checksum_bytes(checksum_of(view))
        return checksum if arena.current(slot) else b""
