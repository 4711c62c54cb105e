"""The worker's side of vLLM's connector: copies blocks from and to the arena.

With tensor parallelism each rank has a worker. Where state is cut by head, each copies its share of
a unit, and a unit is whole when all have; where every rank holds all of it, one of them saves. All
ranks load, and what one of them did not do was not done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvatlas.connectors.agent_client import AGAIN_S, HELLO_S, RETRY_S, Channel
from kvatlas.connectors.vllm_probe import Place, layers_of
from kvatlas.dataplane._copies import Rows, scatter
from kvatlas.dataplane.arena import Arena, Part
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
    """What the workers do in one step. Loads and saves may be of two lives of the agent: what is
    promised stays where it is until this process lets go of it, even if the agent ends."""

    arena: str = ""
    load_arena: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    load: dict[str, list[Copy]] = field(default_factory=dict)  # by request
    zero: list[Block] = field(default_factory=list)  # what these loads leave unfilled
    save: dict[int, list[Copy]] = field(default_factory=dict)  # by order


@dataclass
class Results(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What each of ``ranks`` workers has done: the life of the agent whose memory it maps, requests
    that are loaded, and by order the units that are saved, each with its checksum, or b"" from
    those that did not sum it up."""

    mapped: str = ""
    loaded: list[str] = field(default_factory=list)
    saved: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    ranks: int = 1

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """What both have done."""
        assert isinstance(other, Results)
        saved = {
            op: {name: sums[name] or mine for name, mine in self.saved[op].items() if name in sums}
            for op, sums in other.saved.items()
            if op in self.saved
        }
        mapped = self.mapped if self.mapped == other.mapped else ""
        loaded = [id for id in self.loaded if id in other.loaded]
        return Results(mapped, loaded, saved, self.ranks + other.ranks)


@dataclass(frozen=True)
class Share:
    """What of a unit is this worker's: that of ``rank`` among ``ranks``. ``by_head``: each has its
    own part of every page, and they lie side by side; else each has all. ``meet`` returns when all
    ranks have called it."""

    rank: int = 0
    ranks: int = 1
    by_head: bool = True
    meet: Callable[[], object] = lambda: None


def layer_rows(layer: str, cache: torch.Tensor) -> tuple[memoryview, int, int]:
    """One layer's blocks as bytes: their memory, the size of each, and from one to the next. Raises
    EngineError where they do not lie in rows of host memory."""
    if cache.device.type != "cpu" or not cache[0].is_contiguous():
        raise EngineError(f"kvatlas: blocks of {layer} do not lie in rows of host memory")
    size = cache.element_size()
    memory = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    view = memoryview(memory.numpy())[cache.storage_offset() * size :]
    return view, cache[0].numel() * size, cache.stride(0) * size


class Copier:
    """Of one worker. ``groups``: the engine's groups of blocks."""

    def __init__(self, path: Path, groups: Any, share: Share) -> None:
        self._path = path
        self._groups = groups
        self._share = share
        self._channel: Channel | None = None
        self._results = Results()
        self._memory: dict[str, tuple[memoryview, int, int]] = {}
        self._places: dict[Place, list[Rows]] = {}
        self._again = 0.0  # when the memory may be mapped anew

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Where the blocks lie. The agent's memory is mapped now: to keep a promise takes no agent
        any more. Raises EngineError where it cannot be."""
        self._memory = {layer: layer_rows(layer, cache) for layer, cache in kv_caches.items()}
        self._map(HELLO_S)
        if self._channel is None:
            raise EngineError(f"this worker has no way to the memory of an agent at {self._path}")

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
        for place, block in copies.zero:
            for rows in self._places[place]:
                scatter(bytes(rows.size_bytes), [(rows, block)])

    def save(self, copies: Copies) -> None:
        """Copies what the agent wants into its slots, together with the other ranks."""
        if not copies.arena:
            return
        share = self._share
        arena = self._arena(copies, copies.arena)
        self._results.mapped = copies.arena if arena is not None else ""
        number = 0
        mine: list[tuple[int, Copy, int]] = []
        for op, units in copies.save.items():
            there = self._results.saved[op] = {}
            for unit in units:
                turn = number % share.ranks == share.rank
                number += 1
                checksum: int | None = 0
                if arena is None:
                    checksum = None
                elif turn or share.by_head:
                    checksum = self._copy_out(arena, unit)
                if checksum is not None:
                    there[unit.piece.name] = b""
                    if turn:
                        mine.append((op, unit, checksum))
        if number and share.by_head:
            share.meet()
        for op, unit, checksum in mine:
            assert arena is not None
            self._sum_up(arena, op, unit, checksum)

    def _sum_up(self, arena: Arena, op: int, unit: Copy, checksum: int) -> None:
        slot, name = unit.piece.slot, unit.piece.name
        checksum = checksum or checksum_of(arena.view(slot))
        if arena.current(slot):
            self._results.saved[op][name] = checksum_bytes(checksum)
        else:
            del self._results.saved[op][name]

    def results(self) -> Results | None:
        """What was done since the last call."""
        done = self._results
        if not (done.mapped or done.loaded or done.saved):
            return None
        self._results = Results()
        return done

    def close(self) -> None:
        """Lets the memory go."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _arena(self, copies: Copies, life: str) -> Arena | None:
        """The memory of that life of the agent."""
        if not self._places:
            layers = layers_of(copies.parts, self._groups)
            one = self._share.by_head and self._share.ranks > 1  # page: the others' lie between
            for place, names in layers.items():
                all_ = [self._memory[name] for name in names]
                self._places[place] = [Rows([m]) for m in all_] if one else [Rows(all_)]
        there = self._channel is not None and self._channel.welcome.arena == life
        if not there and time.monotonic() >= self._again:
            self._map(AGAIN_S)
        channel = self._channel
        return channel.arena if channel is not None and channel.welcome.arena == life else None

    def _map(self, hello_s: float) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        try:
            self._channel = Channel(self._path, wire.Map(wire.VERSION), hello_s=hello_s)
        except (OSError, EngineError, StoreError):
            self._again = time.monotonic() + RETRY_S

    def _pages(self, unit: Copy, fill_bytes: int = 0) -> Iterator[tuple[int, int, Part]]:
        """Where in the slot pages of ours lie, how many bytes, and where in the engine; in the end
        zeros, up to ``fill_bytes`` in all."""
        share = self._share
        rank, ranks = (share.rank, share.ranks) if share.by_head else (0, 1)
        at = 0
        for place, block in unit.blocks:
            for rows in self._places[place]:
                size = rows.size_bytes
                if block:
                    yield at + rank * size, size, (rows, block)
                at += ranks * size
        if at < fill_bytes and rank == 0:
            yield at, fill_bytes - at, memoryview(bytes(fill_bytes - at))

    def _copy_in(self, arena: Arena, unit: Copy) -> bool:
        """Into the engine's blocks. False: the slot is somebody else's."""
        slot = unit.piece.slot
        runs = _joined(self._pages(unit))
        return arena.current(slot) and all(arena.copy_out(slot, parts, at) for at, _, parts in runs)

    def _copy_out(self, arena: Arena, unit: Copy) -> int | None:
        """Out of the engine's blocks. The checksum of all that lies in the slot, 0 where not all of
        it is ours. None: the slot is somebody else's, or not of that size."""
        slot = unit.piece.slot
        runs = _joined(self._pages(unit, slot.size_bytes))
        try:
            checksums = [arena.copy_in(slot, parts, at) for at, _, parts in runs]
        except StoreError:
            return None  # not the pages that were described
        if not all(checksums):
            return None
        whole = [(begin, end) for begin, end, _ in runs] == [(0, slot.size_bytes)]
        return checksums[0] if whole else 0


def _joined(pages: Iterable[tuple[int, int, Part]]) -> list[tuple[int, int, list[Part]]]:
    """Those that follow each other are copied in one go: from where to where, and the parts."""
    runs: list[tuple[int, int, list[Part]]] = []
    for at, size, part in pages:
        if runs and runs[-1][1] == at:
            begin, _, parts = runs.pop()
            runs.append((begin, at + size, [*parts, part]))
        else:
            runs.append((at, at + size, [part]))
    return runs
