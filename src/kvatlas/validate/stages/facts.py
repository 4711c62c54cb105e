"""What was seen of a cluster while a stage ran, as values that rules judge. Pure.

Whatever may be out of reach is ``… | Missing``: a rule that needs it cannot pass.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.core.transports import Moved
from kvatlas.report.latency import Report
from kvatlas.validate.counters import Counters
from kvatlas.validate.stages.values import Missing

#: What stage A freezes of an engine, and what the halves of a pair must have in common.
SETTINGS = (
    "model",
    "model_digest",
    "runtime",
    "image",
    "tensor_parallel",
    "context_tokens",
    "weights_dtype",
    "kv_dtype",
    "graphs",
    "speculation",
    "hisparse",
    "connector",
    "shared_store",
    "block_tokens",
    "layout",
    "tokenizer",
)


class EngineSeen(msgspec.Struct, frozen=True):
    """One engine. ``seen``: settings that the engine itself tells, or its files; ``why``: why the
    others are not there."""

    name: str
    role: str
    seen: dict[str, str] = {}
    why: str = "the engine does not tell"

    def setting(self, name: str) -> str | Missing:
        """A setting as seen."""
        value = self.seen.get(name, "")
        return value or Missing(f"{name} of {self.name}: {self.why}")


class RequestSet(msgspec.Struct, frozen=True):
    """The fixed requests. ``digest`` is over all that is asked."""

    digest: str
    count: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int


class Reply(msgspec.Struct, frozen=True):
    """One answer. ``words``: token ids, or the text where the engine tells none. ``status`` 0:
    none came. ``ttft_s`` None: it was not streamed."""

    prompt: int
    status: int
    words: str
    request_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    seconds: float = 0.0
    ttft_s: float | None = None
    worker: str = ""
    prefilled_by: str = ""
    fallback: str = ""
    expected_tokens: int | None = None
    error: str = ""


class Counted(msgspec.Struct, frozen=True):
    """What one engine counted over a phase."""

    engine: str
    counters: Counters | Missing
    moved: Moved | Missing = Missing("it counts no transfers")


class AgentSeen(msgspec.Struct, frozen=True):
    """One agent over a phase: its tiers at the end, and what its counts rose by."""

    name: str
    tiers: dict[str, Any] = {}
    loaded_tokens: dict[str, int] = {}
    moved_bytes: dict[str, int] = {}
    counts: dict[str, int] = {}
    rdma_bytes: int | None = None  # None: its node has no RDMA ports that it can read
    rdma_why: str = ""


class Phase(msgspec.Struct, frozen=True):
    """Requests that were sent, and what all parts counted meanwhile."""

    replies: tuple[Reply, ...] = ()
    engines: tuple[Counted, ...] = ()
    agents: tuple[AgentSeen | Missing, ...] = ()

    def counted(self, engine: str) -> Counters | Missing:
        """Of one engine."""
        for found in self.engines:
            if found.engine == engine:
                return found.counters
        return Missing(f"{engine}: nothing was counted")


class Baseline(msgspec.Struct, frozen=True):
    """Stage A, as later stages compare with it. ``answers``: words by prompt."""

    settings: dict[str, str]
    requests: RequestSet
    answers: tuple[str, ...]
    load: Report
    concurrency: int = 1
    hbm: dict[str, float] = {}
    power_w: float | None = None


class StageA(msgspec.Struct, frozen=True):
    """One Combined engine alone. ``declared``: the operator's words by setting."""

    engine: EngineSeen
    requests: RequestSet
    rounds: tuple[tuple[Reply, ...], ...]
    load: Report | Missing
    declared: dict[str, str] = {}
    hbm: dict[str, float] | Missing = Missing("nothing tells")
    power_w: float | Missing = Missing("nothing tells")
    samples_min: int = 30
    slo: dict[str, float] = {}


class Figures(msgspec.Struct, frozen=True):
    """What a stage measured, for the stage after it: settings by role, a load of prompts that
    nobody had, and the share of tokens found when prompts came again. None: not measured."""

    settings: dict[str, dict[str, str]] = {}
    load: Report | None = None
    hit_share: float | None = None


class StageB(msgspec.Struct, frozen=True):
    """A pair. ``logs``: by engine, the line that names each request id; ``transports``: how the
    gateway sees the pair's transport; ``trial``: requests while the backend failed."""

    prefill: EngineSeen
    decode: EngineSeen
    baseline: Baseline
    phase: Phase
    declared: dict[str, str] = {}
    transport: str = "rdma"
    transport_seen: str | Missing = Missing("the gateway tells nothing of transports")
    logs: dict[str, dict[str, str] | Missing] = {}
    shared: dict[str, str | Missing] = {}
    block_tokens: int = 0
    trial: Phase | Missing = Missing("no hook backend_fail")
    samples_min: int = 30


class StageC(msgspec.Struct, frozen=True):
    """An engine with host memory below it. ``cold`` computes, ``warm`` resumes from host memory
    what the engine itself has let go, prompt by prompt the same; ``load``: repeated prefixes at
    the baseline's concurrency."""

    engine: EngineSeen
    baseline: Baseline
    cold: Phase | Missing
    warm: Phase | Missing
    load: Report | Missing
    shared: dict[str, str | Missing] = {}
    declared: dict[str, str] = {}
    samples_min: int = 30
    tpot_worse_max: float = 1.25
    bandwidth_min: float = 0.0  # bytes per second


class StoreSample(msgspec.Struct, frozen=True):
    """The store's own figures at one moment."""

    used_bytes: int
    max_bytes: int
    evicted: int = 0


class Outage(msgspec.Struct, frozen=True):
    """Something was taken away: requests ``during`` that, and ``after`` it was given back."""

    during: Phase
    after: Phase
    #: Tokens that requests after it resumed from the store, by the engines' own counts.
    hits_after: int | Missing = Missing("not counted")


class StageD(msgspec.Struct, frozen=True):
    """Two engines on two nodes, and the store that they share; each part as it was tried."""

    writer: EngineSeen
    reader: EngineSeen
    baseline: Baseline
    across: Phase | Missing
    same_tenant: Phase | Missing = Missing("not tried")
    other_tenant: Phase | Missing = Missing("not tried")
    stranger: Phase | Missing = Missing("not tried")
    ttl_before: Phase | Missing = Missing("not tried")
    ttl_after: Phase | Missing = Missing("not tried")
    eviction: tuple[StoreSample, ...] | Missing = Missing("not tried")
    filling: Report | Missing = Missing("not tried")
    full: Phase | Missing = Missing("not tried")
    dram: tuple[StoreSample, ...] | Missing = Missing("not tried")
    index: Outage | Missing = Missing("not tried")
    node: Outage | Missing = Missing("not tried")
    outage: Outage | Missing = Missing("not tried")
    partition: Outage | Missing = Missing("not tried")
    dirty: Phase | Missing = Missing("not tried")
    quota: Missing = Missing("no trial was given, and nothing outside can drive it")
    rebalance: Missing = Missing("no trial was given, and nothing outside can drive it")
    declared: dict[str, str] = {}
    samples_min: int = 30
    answer_max_s: float = 60.0


class StageE(msgspec.Struct, frozen=True):
    """One optimisation beside the stage before. ``before``: its settings by role; ``hits_before``:
    share of prompt tokens that were found when prompts came again; ``long``: of a longer context,
    a prompt that did not fit before."""

    change: str
    engines: tuple[EngineSeen, ...]
    before: dict[str, dict[str, str]]
    baseline: Baseline
    load_before: Report | Missing
    load: Report | Missing
    first: tuple[Reply, ...]
    again: tuple[Reply, ...]
    hits_before: float | Missing
    moved: Moved | Missing = Missing("it counts no transfers")
    moves: bool = False  # state changes hands in this cluster
    long: Reply | Missing = Missing("the stage before does not know its context length")
    declared: dict[str, str] = {}
    samples_min: int = 30
    worse_max: float = 1.1
    same_min: float = 1.0
