"""The words between an engine model and whoever drives it (stub engine, simulator, tests).

The model is a machine (DESIGN §3): `handle(event, now) → effects`, `tick(now) → effects`,
`next_deadline() → time | None`. It never reads a clock; ``now`` is in seconds and never decreases.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvatlas.core.events import Event


class Arrive(msgspec.Struct, frozen=True):
    """A request reaches the engine. ``tokens``: prompt ids, uint32 little endian, never empty."""

    id: str
    tokens: bytes
    output_tokens: int
    salt: str = ""
    adapter: str = ""


class Abort(msgspec.Struct, frozen=True):
    """The client left: free everything the request holds."""

    id: str


class ClearCache(msgspec.Struct, frozen=True):
    """Drop the prefix cache (vLLM's /reset_prefix_cache)."""


Input = Arrive | Abort | ClearCache


class BlockRef(msgspec.Struct, frozen=True):
    """One physical block: ``index`` counts the group's blocks from the start of the prompt."""

    group: int  # index into the layout's groups, copies unrolled
    index: int
    block_id: int


class Admitted(msgspec.Struct, frozen=True):
    """A request got its blocks: ``cached_tokens`` were resumed, from exactly ``resumed``."""

    id: str
    cached_tokens: int
    resumed: tuple[BlockRef, ...]


class Computed(msgspec.Struct, frozen=True):
    """Tokens start…end-1 of the request (prompt, then output) are computed; ``filled`` are the
    blocks that became findable with them. Only those have an id: a block that no later request
    could resume from is counted by the pool and otherwise left alone."""

    id: str
    start: int
    end: int
    filled: tuple[BlockRef, ...]


class Produced(msgspec.Struct, frozen=True):
    """One output token came out; ``index`` counts from 0. ``finished`` on the last."""

    id: str
    index: int
    finished: bool
    token: int = 0


class Rejected(msgspec.Struct, frozen=True):
    """The request can never run here (longer than the whole pool, empty prompt), or, where
    ``busy``, not now: too many wait already."""

    id: str
    reason: str
    busy: bool = False


class Published(msgspec.Struct, frozen=True):
    """KV events of one step: one batch on the wire."""

    events: tuple[Event, ...]


class Cleared(msgspec.Struct, frozen=True):
    """Answer to `ClearCache`: refused (``done`` False) while any request holds blocks. The event
    that announces it goes out with the next step, as from vLLM."""

    done: bool


Effect = Admitted | Computed | Produced | Rejected | Published | Cleared


class Model(Protocol):
    """What an engine computes: called by the engine in the order in which a batch would run.

    A request may resume from blocks that an earlier request of the same step fills, so `resume`
    must not read them before the first `compute`.
    """

    def resume(self, request: Arrive, admitted: Admitted) -> None:
        """The request got its blocks (again, after a preemption)."""

    def compute(self, computed: Computed, tokens: bytes) -> None:
        """Tokens start…end-1 (``tokens``, uint32 little endian) run; ``filled`` blocks are due."""

    def token(self, id: str, index: int) -> int:
        """Output token ``index`` of the request (uint32), after all before it were computed."""
        ...

    def release(self, id: str) -> None:
        """The request is gone: finished, aborted or preempted."""
