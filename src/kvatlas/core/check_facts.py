"""What is known of a cluster when it is checked: gathered by `validate.doctor`, judged by
`core.checks`.

-1 and "" stand for what nobody told. Token counts are of one request unless a field says otherwise.
"""

from __future__ import annotations

import msgspec

from kvatlas.core.keys import Fingerprint
from kvatlas.core.layout import Layout


class Asked(msgspec.Struct, frozen=True):
    """One canary, and what came of it. ``error``: why nothing did.

    ``cached_tokens``: what the engine says that it resumed; ``expected_tokens``: what the gateway
    said that it would; ``worker``: where the gateway sent it, and of a pair who computed the
    prompt, ``prefilled_by``. ``tokens`` and ``logprobs`` are
    of what it made, where it tells.
    """

    error: str = ""
    prompt_tokens: int = -1
    cached_tokens: int = -1
    expected_tokens: int = -1
    worker: str = ""
    prefilled_by: str = ""
    text: str = ""
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()


UNASKED = Asked(error="it was not asked")


class StreamFacts(msgspec.Struct, frozen=True):
    """An engine's KV events, as somebody heard them who sent it canaries.

    ``told``: it says where its events are. ``error``: why they could not be listened to.
    ``heard``: the canary's blocks came. ``on``: the engine on whose stream they came instead.
    ``blocks``: block sizes of the groups that they came in; ``hashes``: by group and block size,
    the engine's own hash of the canary's first block. ``gap``: of its sequence numbers.
    ``replay``: "" where the same batches came again, else what went wrong; None: not offered.
    """

    told: bool = False
    error: str = ""
    heard: bool = False
    on: str = ""
    blocks: tuple[int, ...] = ()
    hashes: dict[str, int] = {}
    batches: int = 0
    gap: str = ""
    malformed: int = 0
    replay: str | None = None


class EngineFacts(msgspec.Struct, frozen=True):
    """One engine. ``error``: why it could not be asked; then the rest says nothing.

    ``canaries`` by name: ``fresh`` and ``again`` are the same token ids, ``salted`` and
    ``salted again`` these under a salt of their own, ``text`` their text, ``chat`` a message and
    ``chat ids`` the token ids that its tokenize endpoint made of it, ``own`` a prompt that it alone
    was asked. ``text_ids`` and ``chat_ids`` are what that endpoint makes of texts that all engines
    of a model are asked.
    """

    name: str
    url: str
    error: str = ""
    kind: str = ""
    version: str = ""
    models: tuple[str, ...] = ()
    context_tokens: int = 0
    told_block_tokens: int = 0
    kv_dtype: str = ""
    configured_kv_dtype: str = ""
    tensor_ranks: int = 0
    draft: bool = False
    caching: str = ""  # as told: "True" or "False"
    fingerprint: Fingerprint | None = None
    layout: Layout | None = None
    layout_error: str = ""
    clock_ahead_s: float | None = None  # of ours
    metrics_error: str = ""
    counted_tokens: int | None = None  # prompt tokens, while the canaries ran
    counted_hits: int | None = None
    canary_tokens: int = 0
    canaries: dict[str, Asked] = {}
    text_ids: tuple[int, ...] = ()
    chat_ids: tuple[int, ...] = ()
    tokenize_error: str = ""
    chat_error: str = ""
    events_wanted: bool = True
    stream: StreamFacts = StreamFacts()

    def asked(self, name: str) -> Asked:
        """One of its canaries."""
        return self.canaries.get(name, UNASKED)

    @property
    def model(self) -> str:
        """The name that it is asked by."""
        return self.models[0] if self.models else ""


class WorkerRow(msgspec.Struct, frozen=True):
    """An engine as a gateway of ours shows it. ``feed``: why its events are not followed well;
    None where it follows none."""

    url: str
    up: bool
    error: str = ""
    fingerprint: str = ""
    feed: str | None = None


class PairRow(msgspec.Struct, frozen=True):
    """A pair as a gateway of ours shows it."""

    prefill: str
    decode: str
    state: str
    expected: str
    seen: str
    why: str
    bytes_per_s: float
    rate_from: str
    hand_offs: int


class KeyFacts(msgspec.Struct, frozen=True):
    """What a gateway makes of one prompt: keys in hex by engine; ``unkeyed``: why none.
    ``resume_tokens``: how far each engine holds it, as the gateway believes."""

    error: str = ""
    unkeyed: str = ""
    prompt_tokens: int = -1
    keys: dict[str, tuple[str, ...]] = {}
    resume_tokens: dict[str, int] = {}


class GatewayFacts(msgspec.Struct, frozen=True):
    """The router in front. ``ours``: a gateway of kvatlas, with its pages; any other one is only
    asked. ``canaries`` and ``ids``, ``text`` (its keys of them) as of engines; ``own_keys``: the
    same made from the configuration and its secret, where both are there. ``alarms``: problem →
    whom it concerns → why. ``agents``: those that it watches and that answer it. ``configured``:
    URLs by name in the operator's file.
    """

    url: str
    error: str = ""
    ours: bool = False
    version: str = ""
    own_version: str = ""
    ready: bool = True
    alarms: dict[str, dict[str, str]] = {}
    workers: dict[str, WorkerRow] = {}
    configured: dict[str, str] | None = None
    canaries: dict[str, Asked] = {}
    ids: KeyFacts = KeyFacts()
    text: KeyFacts = KeyFacts()
    own_keys: dict[str, tuple[str, ...]] = {}
    no_own_keys: str = ""
    agents: tuple[str, ...] = ()
    pairs: tuple[PairRow, ...] = ()
    rdma: dict[str, str] = {}

    def asked(self, name: str) -> Asked:
        """One of its canaries."""
        return self.canaries.get(name, UNASKED)


class AgentFacts(msgspec.Struct, frozen=True):
    """A node's agent. ``roots``: where the keys of each attached engine begin, by model name;
    ``own_roots``: the same from our side, by engine. ``tiers``: what its metrics say of each;
    ``faults``: what its disk met and did not survive well, counted."""

    name: str
    url: str
    error: str = ""
    alarms: dict[str, str] = {}
    roots: dict[str, str] = {}
    own_roots: dict[str, str] = {}
    no_own_roots: str = ""
    metrics_error: str = ""
    tiers: dict[str, dict[str, float]] = {}
    faults: dict[str, int] = {}


class Facts(msgspec.Struct, frozen=True):
    """All of it."""

    engines: tuple[EngineFacts, ...] = ()
    gateway: GatewayFacts | None = None
    agents: tuple[AgentFacts, ...] = ()
