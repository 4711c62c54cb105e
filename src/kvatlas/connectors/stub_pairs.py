"""Stub engines as halves of pairs, by vLLM's Nixl protocol: one keeps, another reads.

The bytes go from memory to memory of one process: engines that share an `Exchange` find each other
there by the id that ``kv_transfer_params`` name. Whole blocks are handed over; the rest of a prompt
is computed by whoever takes it. What nobody takes is let go when its lease ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping

import msgspec

from kvatlas.core.transports import Moved
from kvatlas.errors import RequestError
from kvatlas.workload.protocol import Arrive, HandOff, Loading
from kvatlas.workload.state import Memory

KEPT_MAX = 4096  # prompts that wait to be taken over; beyond, the oldest goes
LEASE_S = 30.0  # vLLM's own (`NixlConnector`, ``kv_lease_duration``)


class _Kept(msgspec.Struct):
    tokens: int
    blocks: dict[tuple[int, int], bytes]
    forget: Callable[[], None]  # the engine frees its own
    lease: asyncio.TimerHandle


class _Source(msgspec.Struct, frozen=True):
    engine: str
    id: str
    tokens: int


class Exchange:
    """Where the halves of one process find each other. ``lease_s``: how long a side keeps what
    nobody has taken."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._ids = itertools.count()
        self._sides: dict[str, Handovers] = {}

    def join(self, memory: Memory, grid_tokens: int) -> Handovers:
        """One more engine, under an id of its own: another one after each start."""
        side = Handovers(self, f"stub-engine-{next(self._ids)}", memory, grid_tokens)
        self._sides[side.engine_id] = side
        return side

    def leave(self, side: Handovers) -> None:
        self._sides.pop(side.engine_id, None)

    def side(self, engine_id: str) -> Handovers | None:
        return self._sides.get(engine_id)


class Handovers:
    """One engine's side. Implements `kvatlas.workload.protocol.Connector`."""

    def __init__(
        self, exchange: Exchange, engine_id: str, memory: Memory, grid_tokens: int
    ) -> None:
        self.engine_id = engine_id
        self._exchange = exchange
        self._memory = memory
        self._grid = grid_tokens
        self._kept: dict[str, _Kept] = {}
        self._wanted: dict[str, _Source] = {}
        self.expired = 0  # prompts that nobody took before their lease ended
        self.moved = Moved()  # taken over from others, as vLLM's NixlConnector counts it

    def external(self, request: Arrive, local_tokens: int) -> int:
        source = self._wanted.get(request.id)
        # The last token is always computed, as with a hit of an engine's own.
        return (source.tokens - 1) // self._grid * self._grid if source is not None else 0

    def wants(self, id: str, params: Mapping[str, object]) -> None:
        """That request's state lies elsewhere. Raises RequestError for params that say nothing."""
        engine, name = params.get("remote_engine_id"), params.get("remote_request_id")
        tokens = params.get("remote_num_tokens")
        if not isinstance(engine, str) or not isinstance(name, str) or not isinstance(tokens, int):
            text = "remote_engine_id, remote_request_id and remote_num_tokens are needed"
            raise RequestError(f"kv_transfer_params: {text}", param="kv_transfer_params")
        self._wanted[id] = _Source(engine, name, tokens)

    def keep(self, hand_off: HandOff, forget: Callable[[], None]) -> dict[str, object]:
        """The first half is done: what its answer says. ``forget`` is called once it is taken, or
        at the end of the lease. Needs a running loop."""
        if len(self._kept) >= KEPT_MAX:
            self.taken(next(iter(self._kept)))
        blocks = {(b.group, b.index): self._memory.read(b.block_id) for b in hand_off.blocks}
        loop = asyncio.get_running_loop()
        lease = loop.call_later(self._exchange.lease_s, self._expired, hand_off.id)
        self._kept[hand_off.id] = _Kept(hand_off.tokens, blocks, forget, lease)
        groups: dict[int, list[int]] = {}
        for block in hand_off.blocks:
            groups.setdefault(block.group, []).append(block.block_id)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [groups[group] for group in sorted(groups)] or [[]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": hand_off.id,
            "remote_host": "127.0.0.1",  # in this very process: nobody connects
            "remote_port": 0,
            "remote_num_tokens": hand_off.tokens,
        }

    def fetch(self, loading: Loading, took_s: float = 0.0) -> int:
        """Read what was asked for: the position up to which it is there now. ``took_s``: since it
        was asked for."""
        source = self._wanted.get(loading.id)  # None: it was given up meanwhile
        side = self._exchange.side(source.engine) if source is not None else None
        kept = side._kept.get(source.id) if source is not None and side is not None else None
        places = [(block.group, block.index) for block in loading.blocks]
        if kept is None or not all(place in kept.blocks for place in places):
            self.moved = msgspec.structs.replace(self.moved, failures=self.moved.failures + 1)
            return loading.start
        for block, place in zip(loading.blocks, places, strict=True):
            self._memory.write(block.block_id, kept.blocks[place])
        was, size_bytes = self.moved, sum(len(kept.blocks[place]) for place in places)
        self.moved = Moved(
            was.size_bytes + size_bytes, was.seconds + took_s, was.transfers + 1, was.failures
        )
        return loading.end

    def over(self, id: str) -> None:
        """That request has its state, or will not need it: the other side may let go."""
        source = self._wanted.pop(id, None)
        side = self._exchange.side(source.engine) if source is not None else None
        if source is not None and side is not None:
            side.taken(source.id)

    def taken(self, id: str) -> None:
        """Nobody else will read it."""
        kept = self._kept.pop(id, None)
        if kept is not None:
            kept.lease.cancel()
            kept.forget()

    def _expired(self, id: str) -> None:
        self.expired += 1
        self.taken(id)

    def close(self) -> None:
        """The engine is gone, and what it kept with it."""
        self._exchange.leave(self)
        for kept in self._kept.values():
            kept.lease.cancel()
        self._kept.clear()

    @property
    def lease_s(self) -> float:
        """How long a side keeps what nobody has taken."""
        return self._exchange.lease_s

    @property
    def kept(self) -> int:
        """Prompts that wait to be taken over."""
        return len(self._kept)
