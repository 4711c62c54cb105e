"""What the page shows, as values: the cluster as it is now, and one request explained.

Names of engines, models, tenants and requests stand here as they came from outside; the page sets
them as text and never as markup.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

import kvatlas
from kvatlas.core.pairs import HandOff
from kvatlas.core.records import Publisher
from kvatlas.core.transports import Status
from kvatlas.service.agents import Node
from kvatlas.service.decision_log import Entry, explain, fell_text, reason, taken_plan
from kvatlas.service.engines import Worker
from kvatlas.service.metrics import SOURCES
from kvatlas.service.page_history import (
    BUCKET_S,
    BUCKETS,
    TERMS,
    Bucket,
    History,
    Prefix,
    Share,
    sources,
    terms,
)
from kvatlas.service.tenants import Tenants

if TYPE_CHECKING:
    from kvatlas.service.assembly import Assembly

ENGINES_MAX = 256
AGENTS_MAX = 256
PAIRS_MAX = 512
TENANTS_SHOWN = 50
RECENT = 40


class Engine(msgspec.Struct):
    """One rank of one engine. ``held``: complete grid blocks by tier, as it announces them."""

    name: str
    role: str
    up: bool
    draining: bool
    error: str
    models: tuple[str, ...]
    software: str
    in_flight: int
    held: dict[str, int]
    degraded: str = ""  # why it is believed less than its word


class Agent(msgspec.Struct):
    """One node. ``held``: bodies by tier; what a store holds is said by each who uses it."""

    name: str
    up: bool
    error: str
    workers: tuple[str, ...]
    store: str
    held: dict[str, int]


class Tenant(msgspec.Struct):
    """One, with its limits per node (None: none of its own), and its part of what was seen."""

    name: str
    share: str
    retention: str
    ttl_s: float
    dram_bytes: int | None
    disk_bytes: int | None
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0


class Recent(msgspec.Struct):
    """One request. ``status`` 0: still running; None stands for what was not seen."""

    id: str
    at: float
    worker: str
    status: int
    prompt_tokens: int
    hit_tokens: int | None
    ttft_s: float | None
    regret_s: float | None
    refused: str = ""
    fell: int = 0


class State(msgspec.Struct):
    """The whole page but for what /health says. Times are in seconds since 1970."""

    version: str
    at: float
    began_at: float  # since when tenants and prefixes are counted
    log_from: float | None  # the oldest request of which the log still knew then
    period_s: float
    viewers: int
    viewers_max: int
    decisions: int
    objectives: dict[str, int]
    policy: str
    bucket_s: float
    buckets_max: int
    first_bucket_at: float  # when the bucket of index 0 began
    sources: tuple[str, ...]
    terms: tuple[str, ...]
    buckets: list[Bucket]
    engines: list[Engine]
    engines_all: int
    agents: list[Agent]
    agents_all: int
    pairs: list[Status]
    pairs_all: int
    prefixes: list[Prefix]
    tenants: list[Tenant]
    tenants_all: int
    tenants_on: bool
    recent: list[Recent]


class Candidate(msgspec.Struct):
    """One plan. ``price_s`` by `TERMS`; ``why``: why it stands behind the first, "" for that."""

    worker: str
    price_s: list[float]
    total_s: float
    ttft_s: float
    resume_tokens: int
    expected_tokens: int
    chain_tokens: int
    tier_tokens: tuple[int, ...]
    in_flight: int
    taken: bool
    half: bool
    confidence: float | None
    why: str


class Explained(msgspec.Struct):
    """One request as a picture needs it; ``text`` is what `kvatlas explain` prints."""

    id: str
    at: float
    policy: str
    unkeyed: str
    prompt_tokens: int
    ttft_slo_s: float
    considered: int
    refused: str
    terms: tuple[str, ...]
    sources: tuple[str, ...]
    candidates: list[Candidate]
    fell: list[str]
    running: bool
    status: int
    worker: str
    prefilled_by: str
    cached_tokens: int | None
    completion_tokens: int | None
    ttft_s: float | None
    e2e_s: float | None
    came_from: list[int]
    error_s: float | None
    regret_s: float | None
    hand_off: HandOff | None
    text: str


def state_of(
    here: Assembly,
    history: History,
    now: float,
    *,
    viewers: tuple[int, int],
    period_s: float,
    since: tuple[float, float | None],
    offset_s: float,
) -> State:
    """Of the cluster ``now``, by the assembly's clock. ``viewers``: now and at most; ``since``:
    when ``history`` began, and how far back it goes; ``offset_s``: from that clock to 1970."""
    workers = here.engines.workers
    engines = list(_engines(here))
    statuses = here.transports.statuses()
    statuses.sort(key=lambda status: status.state != "degraded")
    tenants = here.tenancy.tenants
    return State(
        version=kvatlas.__version__,
        at=now + offset_s,
        began_at=since[0] + offset_s,
        log_from=None if since[1] is None else since[1] + offset_s,
        period_s=period_s,
        viewers=viewers[0],
        viewers_max=viewers[1],
        decisions=here.steering.decisions,
        objectives=dict(here.steering.objectives),
        policy=here.config.router.policy,
        bucket_s=BUCKET_S,
        buckets_max=BUCKETS,
        first_bucket_at=offset_s,
        sources=SOURCES,
        terms=TERMS,
        buckets=history.buckets(),
        engines=engines[:ENGINES_MAX],
        engines_all=len(engines),
        agents=_agents(here, workers)[:AGENTS_MAX],
        agents_all=len(here.agents.nodes),
        pairs=statuses[:PAIRS_MAX],
        pairs_all=len(statuses),
        prefixes=history.prefixes(),
        tenants=_tenants(tenants, history) if tenants is not None else [],
        tenants_all=len(tenants.file.tenant) if tenants is not None else 0,
        tenants_on=tenants is not None,
        recent=[recent(entry, offset_s) for entry in here.log.newest(RECENT)],
    )


def _engines(here: Assembly) -> Iterable[Engine]:
    in_flight = here.steering.in_flight()
    gaps = here.steering.gaps
    for worker in here.engines.workers.values():
        for publisher in worker.publishers():
            gap = gaps.get(publisher)
            yield Engine(
                name=str(publisher),
                role=worker.config.role,
                up=worker.up and not worker.asleep,
                draining=worker.name in here.steering.draining,
                error=worker.error or ("it sleeps" if worker.asleep else ""),
                models=_models(worker),
                software=_software(worker),
                in_flight=in_flight.get(publisher, 0),
                held=_held(here, publisher),
                degraded=gap.flag if gap is not None else "",
            )


def _models(worker: Worker) -> tuple[str, ...]:
    return worker.description.models if worker.description is not None else ()


def _software(worker: Worker) -> str:
    told = worker.description
    return f"{told.engine} {told.version}".strip() if told is not None else ""


def _held(here: Assembly, publisher: Publisher) -> dict[str, int]:
    """By tier, of the group of which most is held there: groups of one block are one block."""
    found: dict[str, int] = {}
    for tiers in here.directory.held(publisher).values():
        for tier, count in tiers.items():
            name = tier.name.lower()
            found[name] = max(count, found.get(name, 0))
    return found


def _agents(here: Assembly, workers: Mapping[str, Worker]) -> list[Agent]:
    return [_agent(here, node, workers) for node in here.agents.nodes.values()]


def _agent(here: Assembly, node: Node, workers: Mapping[str, Worker]) -> Agent:
    names = [str(p) for w in node.config.workers if w in workers for p in workers[w].publishers()]
    held = here.directory.shelves.held(node.publisher)
    return Agent(
        name=node.config.name,
        up=node.up,
        error=node.error,
        workers=tuple(names),
        store=node.config.store,
        held={tier.name.lower(): bodies for tier, (bodies, _) in held.items()},
    )


def _tenants(door: Tenants, history: History) -> list[Tenant]:
    """`TENANTS_SHOWN` of them, those with most requests first."""
    nothing = Share()
    shares = [(history.tenants.get(tag, nothing), tenant) for tenant, tag in door.tagged()]
    most = heapq.nlargest(TENANTS_SHOWN, shares, key=lambda pair: pair[0].requests)
    return [
        Tenant(
            name=tenant.name,
            share=tenant.share,
            retention=tenant.retention.value,
            ttl_s=tenant.ttl_s,
            dram_bytes=tenant.quota_bytes.dram,
            disk_bytes=tenant.quota_bytes.disk,
            requests=share.requests,
            prompt_tokens=share.prompt_tokens,
            hit_tokens=share.hit_tokens,
        )
        for share, tenant in most
    ]


def recent(entry: Entry, offset_s: float) -> Recent:
    """One line of the list of requests."""
    decision, outcome = entry.decision, entry.outcome
    refusal = decision.refusal
    worker = entry.tried[-1] if entry.tried else ""
    return Recent(
        id=decision.id,
        at=decision.at + offset_s,
        worker=outcome.target.worker if outcome is not None else worker,
        status=outcome.status if outcome is not None else 0,
        prompt_tokens=decision.prompt_tokens,
        hit_tokens=_known(outcome.cached_tokens) if outcome is not None else None,
        ttft_s=_seen(outcome.ttft_s) if outcome is not None else None,
        regret_s=entry.regret_s,
        refused=refusal.reason if refusal is not None else "",
        fell=len(entry.fallbacks),
    )


def explained(entry: Entry, offset_s: float) -> Explained:
    """All of one request."""
    decision, outcome = entry.decision, entry.outcome
    refusal = decision.refusal
    return Explained(
        id=decision.id,
        at=decision.at + offset_s,
        policy=decision.policy,
        unkeyed=decision.unkeyed,
        prompt_tokens=decision.prompt_tokens,
        ttft_slo_s=decision.ttft_slo_s if math.isfinite(decision.ttft_slo_s) else 0.0,
        considered=decision.considered,
        refused=refusal.reason if refusal is not None else "",
        terms=TERMS,
        sources=SOURCES,
        candidates=_candidates(entry),
        fell=[fell_text(step).strip() for step in entry.fallbacks],
        running=outcome is None and refusal is None,
        status=outcome.status if outcome is not None else 0,
        worker=outcome.target.worker if outcome is not None else "",
        prefilled_by=outcome.prefilled_by if outcome is not None else "",
        cached_tokens=_known(outcome.cached_tokens) if outcome is not None else None,
        completion_tokens=_known(outcome.completion_tokens) if outcome is not None else None,
        ttft_s=_seen(outcome.ttft_s) if outcome is not None else None,
        e2e_s=_seen(outcome.e2e_s) if outcome is not None else None,
        came_from=sources(entry),
        error_s=entry.error_s,
        regret_s=entry.regret_s,
        hand_off=entry.hand_off,
        text=explain(entry),
    )


def _candidates(entry: Entry) -> list[Candidate]:
    plans = entry.decision.plans
    taken = taken_plan(entry)
    planned = {str(plan.publisher) for plan in plans}
    sent = next((worker for worker in reversed(entry.tried) if worker in planned), "")
    name = str(taken.publisher) if taken is not None else sent
    return [
        Candidate(
            worker=str(plan.publisher),
            price_s=terms(plan),
            total_s=plan.price.total_s,
            ttft_s=plan.price.ttft_s,
            resume_tokens=plan.resume_tokens,
            expected_tokens=plan.expected_tokens,
            chain_tokens=plan.chain_tokens,
            tier_tokens=plan.tier_tokens,
            in_flight=plan.in_flight,
            taken=str(plan.publisher) == name,
            half=str(plan.publisher) in entry.halves,
            confidence=entry.confidence.get(str(plan.publisher)),
            why=reason(entry.decision, plan, plans[0]) if plan is not plans[0] else "",
        )
        for plan in plans
    ]


def _known(count: int) -> int | None:
    return count if count >= 0 else None


def _seen(seconds: float) -> float | None:
    return seconds if seconds >= 0 else None
