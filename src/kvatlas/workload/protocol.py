"""The words between an engine model and whoever drives it (stub engine, simulator, tests).

The model is a machine (DESIGN §3): `handle(event, now) → effects`, `tick(now) → effects`,
`next_deadline() → time | None`. It never reads a clock; ``now`` is in seconds and never decreases.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvatlas.core.events import Event
from kvatlas.workload.prompt_keys import PromptKeys
from kvatlas.workload.spec import EngineSpec


class BlockRef(msgspec.Struct, frozen=True):
    """One physical block: ``index`` counts the group's blocks from the start of the prompt.

    ``key``: what the pool finds it by, in `Computed`, `HandOff` and what an `Admitted` resumed
    behind its prompt; else it may be 0.
    """

    group: int  # index into the layout's groups, copies unrolled
    index: int
    block_id: int
    key: int = 0


class Arrive(msgspec.Struct, frozen=True):
    """A request reaches the engine. ``tokens``: prompt ids, uint32 little endian, never empty.

    ``hand_off``: the prefill half of a P/D pair. When the last output token is out, the blocks
    of the prompt stay until `HandedOff` or `Abort`. ``keys`` saves hashing a prompt that several
    engines see; it must belong to these tokens, salt and adapter.
    """

    id: str
    tokens: bytes
    output_tokens: int
    salt: str = ""
    adapter: str = ""
    hand_off: bool = False
    keys: PromptKeys | None = None


class Abort(msgspec.Struct, frozen=True):
    """The client left, or a lease ran out: free everything the request holds.

    While the request loads, its blocks stay allocated until `Loaded` comes: a transfer may still
    write them.
    """

    id: str


class ClearCache(msgspec.Struct, frozen=True):
    """Drop the prefix cache (vLLM's /reset_prefix_cache)."""


class Loaded(msgspec.Struct, frozen=True):
    """The answer to `Loading`: the transfer is over and writes no more.

    ``tokens``: position up to which the state is there; less than was asked for after a failure.
    The request resumes at the deepest position that is complete with it and computes the rest.
    ``unfilled``: blocks of windows that no resume there reads and that did not come (what the
    other side had loaded minimally itself); they never become findable.
    """

    id: str
    tokens: int
    unfilled: tuple[BlockRef, ...] = ()


class Hold(msgspec.Struct, frozen=True):
    """Keep findable blocks from being evicted while they are copied. Answered by `Held`.

    A block is known by id and key: one that was evicted meanwhile, whoever has it now, is not
    held. Each hold of a block needs a `Release`; there is a limit (`EngineSpec.max_held`).
    """

    blocks: tuple[BlockRef, ...]


class Release(msgspec.Struct, frozen=True):
    """End of `Hold` for blocks that `Held` named. Others are passed over."""

    blocks: tuple[BlockRef, ...]


class HandedOff(msgspec.Struct, frozen=True):
    """The decode side has the state of a request with ``hand_off``: free it here."""

    id: str


class Retime(msgspec.Struct, frozen=True):
    """The machine got faster or slower: from the next step on steps take the time that this spec
    says. Nothing else of it counts."""

    spec: EngineSpec


Input = Arrive | Abort | ClearCache | Loaded | Hold | Release | HandedOff | Retime


class Admitted(msgspec.Struct, frozen=True):
    """A request got its blocks: ``cached_tokens`` were resumed, from exactly ``resumed``.

    ``loaded_tokens`` of them, the last ones, came by a load.
    """

    id: str
    cached_tokens: int
    resumed: tuple[BlockRef, ...]
    loaded_tokens: int = 0


class Loading(msgspec.Struct, frozen=True):
    """A waiting request got blocks for state from outside: ``start`` tokens are here, and
    ``blocks`` are to be filled so that it can resume at ``end``. Answer with `Loaded`.

    ``blocks`` are the chain blocks of start…end-1 and of each window those that end at ``end``
    (without keys: they become findable, and are announced, once they are loaded). Meanwhile the
    request is not among the running ones and stands in nobody's way.
    """

    id: str
    start: int
    end: int
    blocks: tuple[BlockRef, ...]


class HandOff(msgspec.Struct, frozen=True):
    """A request with ``hand_off`` is done: the state of its first ``tokens`` tokens (the whole
    prompt) stays here; ``blocks`` are those of it that can be found."""

    id: str
    tokens: int
    blocks: tuple[BlockRef, ...]


class Held(msgspec.Struct, frozen=True):
    """Answer to `Hold`: which of the blocks are held now. The others are gone, or too many."""

    blocks: tuple[BlockRef, ...]


class Computed(msgspec.Struct, frozen=True):
    """Tokens start…end-1 of the request (prompt, then output) are computed; ``filled`` are the
    blocks that became findable with them. Only those have an id: a block that no later request
    could resume from is counted by the pool and otherwise left alone."""

    id: str
    start: int
    end: int
    filled: tuple[BlockRef, ...]


class Produced(msgspec.Struct, frozen=True):
    """Output token ``index`` (from 0) came out. ``finished`` on the last.

    An engine that leaps reports a run of ``count`` tokens at once: index…index+count-1, of which
    ``token`` is the last. ``times_s`` says when each of them came; it is empty for a single token
    that came when the effect did. The first token of a request always does. ``answer``: on the
    last, where there is a `Connector` for it, all output tokens that were computed as well.
    """

    id: str
    index: int
    finished: bool
    token: int = 0
    count: int = 1
    times_s: tuple[float, ...] = ()
    answer: bytes = b""


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


Effect = Admitted | Loading | Computed | Produced | HandOff | Held | Rejected | Published | Cleared


class Connector(Protocol):
    """Where state outside the engine's pool is known: tiers, or the prefill half of a P/D pair.

    Asked when a waiting request is first scheduled, as vLLM asks `get_num_new_matched_tokens`.
    """

    def external(self, request: Arrive, local_tokens: int) -> int:
        """Position up to which the request's state can be loaded; 0, or anything up to
        ``local_tokens`` (the local hit), when there is nothing to load.

        It is cut to the whole prompt, and short of that to the layout's grid. Must not change
        what it answers from: the request may not get its blocks now, and be asked about again.
        """
        ...


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
