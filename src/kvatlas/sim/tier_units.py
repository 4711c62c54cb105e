"""Which of an engine's blocks make up a unit, and what one request left in which block."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import msgspec

from kvatlas.core.agent_values import Source
from kvatlas.core.keys import salt_scope
from kvatlas.core.layout import Layout
from kvatlas.core.units import Part, Unit
from kvatlas.sim.messages import Submit
from kvatlas.workload.holding import resumed_blocks, unroll
from kvatlas.workload.prompt_keys import PromptKeys, key_step, keys_of
from kvatlas.workload.protocol import BlockRef
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.step_time import StepTime

_TYPICAL_TOKENS = 8192


class Kept(msgspec.Struct, frozen=True):
    """A unit as it lies in a tier. ``data`` are its blocks' bytes, empty where engines compute
    nothing; ``check`` is their checksum, as it was when they were saved."""

    unit: Unit
    data: tuple[bytes, ...]
    tenant: str = ""
    check: int = 0

    @classmethod
    def of(cls, unit: Unit, data: tuple[bytes, ...], tenant: str) -> Kept:
        """One that is whole."""
        return cls(unit, data, tenant, _sum(data))

    @property
    def whole(self) -> bool:
        """Are these the bytes that were saved?"""
        return _sum(self.data) == self.check


def _sum(data: tuple[bytes, ...]) -> int:
    return zlib.crc32(b"".join(data)) if data else 0


@runtime_checkable
class Bytes(Protocol):
    """A model whose blocks' bytes can be read and written: `workload.state.Memory` is one."""

    def read(self, block_id: int) -> bytes:
        """A block's bytes."""

    def write(self, block_id: int, data: bytes) -> None:
        """Fill a block from outside."""


class AgentUse(msgspec.Struct, frozen=True):
    """One node's agent: bytes moved, by what was done and by tier (of a load where from, else where
    to), bytes held in the end by tier, and what was dropped, by reason."""

    moved_bytes: dict[str, int]
    held_bytes: dict[str, int]
    counts: dict[str, int]


class Request:
    """One request of an engine: its keys, and the blocks in which its state lies."""

    def __init__(self, submit: Submit, root: bytes, keys: tuple[bytes, ...]) -> None:
        self.submit = submit
        self.root = root
        self.keys = keys
        self.prompt_tokens = len(submit.tokens) // 4
        self.resumed_tokens = 0
        self.filled = False
        self.sources: tuple[Source, ...] = ()
        self.refs: dict[tuple[int, int], BlockRef] = {}
        self.engine_keys: PromptKeys | None = None

    @property
    def owner(self) -> str:
        """On whom its state is booked."""
        return salt_scope(self.submit.salt).owner

    def note(self, refs: Iterable[BlockRef]) -> None:
        """Blocks that can be found now."""
        for ref in refs:
            self.refs[ref.group, ref.index] = ref


class Blocks:
    """Units and blocks of one layout."""

    def __init__(self, layout: Layout, *, minimal: bool) -> None:
        grid = layout.grid_tokens
        self._layout = layout
        self._grid = grid
        slots = [slot for slot in unroll(layout) if slot.group.required]
        self._chains = [slot for slot in slots if slot.need is None]
        self._windows = [
            (slot, resumed_blocks(layout, slot, minimal=minimal) or 0)
            for slot in slots
            if slot.need is not None
        ]
        self._step = key_step(layout)
        self._block_tokens = {slot.index: slot.block_tokens for slot in slots}

    def prefill_tokens_per_s(self, spec: EngineSpec) -> float:
        """About how fast such an engine computes a prompt: the prior of its price."""
        tokens = min(_TYPICAL_TOKENS, spec.step_tokens)
        spent_s = StepTime(spec, self._layout).seconds([(0, tokens)])
        return tokens / spent_s if spent_s > 0 else 1e9

    def places(self, unit: Unit) -> list[tuple[int, int]]:
        """(slot, index) of the blocks of a unit."""
        start, end = unit.index * self._grid, (unit.index + 1) * self._grid
        if unit.part is Part.BODY:
            return [
                (slot.index, index)
                for slot in self._chains
                for index in range(start // slot.block_tokens, end // slot.block_tokens)
            ]
        return [
            (slot.index, index)
            for slot, need in self._windows
            for index in range(max(0, end // slot.block_tokens - need), end // slot.block_tokens)
        ]

    def refs(self, unit: Unit, request: Request) -> list[BlockRef]:
        """The blocks of a unit as a request knew them; fewer where it did not."""
        found = []
        for place in self.places(unit):
            ref = request.refs.get(place)
            if ref is not None:
                found.append(ref if ref.key else self._keyed(ref, request))
        return found

    def _keyed(self, ref: BlockRef, request: Request) -> BlockRef:
        """A block that was found before: under what the pool would find it again."""
        if request.engine_keys is None:
            submit = request.submit
            request.engine_keys = keys_of(
                submit.tokens,
                self._step,
                salt=submit.salt,
                adapter=submit.adapter,
                origin=submit.origin,
            )
        end = (ref.index + 1) * self._block_tokens[ref.group]
        keyed = BlockRef(ref.group, ref.index, ref.block_id, request.engine_keys.key(end))
        request.refs[ref.group, ref.index] = keyed
        return keyed

    def points(self, request: Request) -> tuple[int, ...]:
        """Counts of blocks of the prompt at which all windows are there."""
        if not self._windows:
            return ()
        first, _ = self._windows[0]
        ends = [
            (index + 1) * first.block_tokens
            for slot, index in request.refs
            if slot == first.index and not (index + 1) * first.block_tokens % self._grid
        ]
        counts = sorted({end // self._grid for end in ends} & set(range(len(request.keys) + 1)))
        return tuple(count for count in counts if count and self._whole(count, request))

    def _whole(self, count: int, request: Request) -> bool:
        unit = Unit(request.keys[count - 1], Part.POINT, count - 1, 0)
        return all(place in request.refs for place in self.places(unit))
